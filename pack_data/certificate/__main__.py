"""`python -m pack_data.certificate RECIPE`: proves a recipe's lower bound again."""

from __future__ import annotations

from typing import Optional, Sequence

from pack_data.command import ArgumentParser, run_main
from pack_data.packing import Packing
from pack_data.proof import prove, statement


def main(argv: Optional[Sequence[str]] = None) -> None:
    parser = ArgumentParser(
        prog="python -m pack_data.certificate",
        description="Proves again the lower bound of a recipe that the optimal packer wrote.",
    )
    parser.add_argument("recipe", help="a recipe, written with `python -m pack_data.optimal --out`")
    args = parser.parse_args(argv)
    packing = Packing.load(args.recipe)
    try:
        proof = prove(packing)
    except ValueError as error:
        raise ValueError(f"{args.recipe}: {error}") from None
    print(statement(packing, proof))


if __name__ == "__main__":
    raise SystemExit(run_main(main))
