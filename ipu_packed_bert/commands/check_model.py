"""Whether a Hugging Face model keeps the examples of a packed row apart: the rows that will be trained, probed."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Sequence

import numpy as np

from pack_data.cli.command import ArgumentParser, positive_int, progress_bar, typed
from pack_data.reading.fields import parse_json
from pack_data.reading.files import read_regular
from pack_data.reading.packages import require

_MOST_BYTES = 64 << 20  # of a batch
_TYPES = ("float32", "bfloat16", "float16", "float64")


def main(argv: Optional[Sequence[str]] = None) -> int:
    parser = ArgumentParser(
        prog=typed("check-model"),
        description="Computes packed rows as they are trained, and each example alone by a plain call; compares\n"
        "logits, losses and gradients. Exit status 1 where they differ.",
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a Hugging Face folder (safetensors; no code of it is run), or module:function",
    )
    parser.add_argument(
        "--row",
        type=positive_int,
        metavar="N",
        help="tokens that a batch joins; default: --longest",
    )
    parser.add_argument(
        "--longest", type=positive_int, metavar="N", help="tokens of the longest example"
    )
    parser.add_argument(
        "--precision", choices=_TYPES, help="of the weights; default: as they are stored"
    )
    parser.add_argument(
        "--attention",
        metavar="NAME",
        help="padding_free, sdpa, ...; default: the first that is right",
    )
    parser.add_argument(
        "--batch", metavar="FILE", help="a row of these as well: JSON lines with input_ids, labels"
    )
    parser.add_argument(
        "--collator",
        metavar="MODULE:NAME",
        help="yours, examples to inputs; the model stays as it is",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(argv)
    batch = _examples(args.batch) if args.batch else None
    if not Path(args.model).is_dir() and ":" not in args.model:
        raise ValueError(
            f"{args.model}: is no folder; save_pretrained writes one, or give module:function"
        )
    require("check-model", "torch", "transformers")
    collator = _named(args.collator, "--collator") if args.collator else None
    with progress_bar(None, "packed rows against each example alone", at_once=True):
        found = _checked(_loaded(args.model, args.precision), args, collator, batch)
    if args.json:
        first = {"first": found["first"]._asdict()} if "first" in found else {}
        print(json.dumps({"model": args.model, **found, **first}))
    else:
        for name, value in found.items():
            print(f"{name:<10}{value}")
    return 0 if found["verdict"] == "isolated" else 1


def _checked(
    model: Any, args: Any, collator: Any, batch: Optional[List[Dict[str, Any]]]
) -> Dict[str, Any]:
    from ipu_packed_bert.padding_free.choice import find_choice, switch
    from ipu_packed_bert.padding_free.collators import PaddingFreeCollator
    from ipu_packed_bert.padding_free.models import choice_of
    from ipu_packed_bert.padding_free.probe import audit_batch, check_no_leak

    found: Dict[str, Any] = {}
    try:
        if collator is None:
            choice, probed = find_choice(
                model, longest=args.longest, row=args.row, attention=args.attention
            )
        else:
            if args.attention:
                switch(model, args.attention)
            probed = check_no_leak(model, longest=args.longest, row=args.row, collator=collator)
            choice = choice_of(model)
        found.update(attention=str(choice), rows=str(probed))
        if batch is not None:
            found["batch"] = str(
                audit_batch(model, (collator or PaddingFreeCollator(model))(batch))
            )
    except ValueError as error:
        found.update(
            verdict="examples depend on each other, or are not computed", reason=str(error)
        )
        first = getattr(error, "first", None)
        return {**found, "first": first} if first else found
    return {**found, "verdict": "isolated"}


def _named(text: str, what: str) -> Callable[..., Any]:
    """`module:name` of a module that Python finds, also in the current folder."""
    module, colon, name = text.partition(":")
    if not (module and colon and name):
        raise ValueError(f"{what}: {text!r} is not module:name, such as my_code:collate")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{what}: {text!r} cannot be loaded: {error}") from None
    return found


def _loaded(text: str, precision: Optional[str]) -> Any:
    import torch
    import transformers

    transformers.logging.set_verbosity_error()  # what a file has beside the model is no matter of its rows
    transformers.logging.disable_progress_bar()  # it moves the cursor, and not by our terminal
    dtype = getattr(torch, precision) if precision else None
    folder = Path(text)
    if not folder.is_dir():
        model = _named(text, "MODEL")()
        return model if dtype is None else model.to(dtype)
    if not (folder / "config.json").is_file() or not any(folder.glob("*.safetensors")):
        raise ValueError(
            f"{text}: needs config.json and *.safetensors; save_pretrained writes both"
        )
    try:
        config = transformers.AutoConfig.from_pretrained(
            text, trust_remote_code=False, local_files_only=True
        )
        masked = any("MaskedLM" in name for name in getattr(config, "architectures", None) or [])
        kind = transformers.AutoModelForMaskedLM if masked else transformers.AutoModelForCausalLM
        return kind.from_pretrained(
            text,
            trust_remote_code=False,
            local_files_only=True,
            use_safetensors=True,
            torch_dtype=dtype or "auto",
        )
    except (OSError, KeyError, RuntimeError, ValueError, ImportError) as error:
        raise ValueError(
            f"{text}: cannot be loaded: {' '.join(str(error).split())[:300]}"
        ) from None


def _examples(path: str) -> List[Dict[str, np.ndarray]]:
    """JSON lines with input_ids, and labels where they differ."""
    way_out = "must be JSON lines with input_ids, whole numbers, and labels where they differ"
    found = []
    for number, line in enumerate(
        read_regular(path, way_out=way_out, most_bytes=_MOST_BYTES).splitlines(), start=1
    ):
        record = parse_json(line, f"{path}, line {number}", way_out)
        columns = {
            name: record[name]
            for name in ("input_ids", "labels")
            if isinstance(record, dict) and name in record
        }
        lengths = {len(each) if isinstance(each, list) else 0 for each in columns.values()}
        right = "input_ids" in columns and len(lengths) == 1 and lengths != {0}
        if not right or any(
            type(each) is not int or abs(each) > 2**31 for part in columns.values() for each in part
        ):
            raise ValueError(f"{path}, line {number}: {way_out}, as many of each")
        found.append({name: np.array(values, np.int64) for name, values in columns.items()})
    if not found:
        raise ValueError(f"{path}: has no examples; {way_out}")
    return found
