"""Proves the lower bound of a packing from its certificate, in exact arithmetic."""

from __future__ import annotations

from fractions import Fraction

from pack_data.certificate import Proof, proven_bound
from pack_data.packing import Packing

_ROUNDING = Fraction(1, 10**12)  # relative; lp_bound is a float


def prove(packing: Packing) -> Proof:
    """Proves that no packing of the same sequences at this depth has fewer packs than packing.lower_bound.

    Raises ValueError where the packing has no certificate, or one that does not prove its bounds, or where a pack
    breaks a limit.
    """
    certificate = packing.certificate
    if certificate is None:
        raise ValueError(f"the {packing.algorithm} recipe has no certificate; the optimal packer writes one")
    packing.check_form()
    for limit in ("max_sequence_length", "max_sequences_per_pack"):
        ours, theirs = getattr(packing, limit), getattr(certificate, limit)
        if ours != theirs:
            raise ValueError(f"certificate: it is for {limit} {theirs}, the recipe for {ours}; make the recipe again")
    proof = proven_bound(certificate, packing.placed())
    if packing.lower_bound != proof.lower_bound:
        raise ValueError(
            f"certificate: it proves a lower bound of {proof.lower_bound}, the recipe claims {packing.lower_bound}; "
            "make the recipe again"
        )
    claimed = packing.lp_bound
    if claimed is not None and abs(Fraction(claimed) - proof.worth) > _ROUNDING * max(Fraction(1), proof.worth):
        raise ValueError(
            f"certificate: all sequences are worth {float(proof.worth)!r} packs, the recipe claims an lp_bound of "
            f"{claimed!r}; make the recipe again"
        )
    return proof


def statement(packing: Packing, proof: Proof) -> str:
    """The proof as one sentence."""
    assert packing.certificate is not None, "what was proved has one"
    depth = packing.max_sequences_per_pack
    most = "" if depth is None else f" at most {depth} sequences and"
    verdict = (
        "no packing has fewer"
        if packing.packs == proof.lower_bound
        else (f"the best possible has at most {packing.packs - proof.lower_bound:,} fewer")
    )
    return (
        f"proved in exact arithmetic: with the {len(packing.certificate.lengths):,} prices stored, no "
        f"pack of{most} {packing.max_sequence_length} slots is worth more than 1, all {packing.sequences:,} "
        f"sequences are worth {float(proof.worth):,.3f}, so at least {proof.lower_bound:,} packs are needed; "
        f"this recipe makes {packing.packs:,}: {verdict}"
    )
