"""What a histogram of lengths, a packing of it and a packed data set look like: the sections of a page."""

from __future__ import annotations

import gc
from collections import Counter
from pathlib import Path
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from pack_data.cli.command import depth_text
from pack_data.display.page import Figure, Page, Section
from pack_data.display.picture import SEQUENCES, Axis, Bars, Line, Lines, MaskPicture, Series
from pack_data.display.table import Cell, Column, Table
from pack_data.inspection.compare import ALGORITHMS, Case, compare, gap_map, padding_map
from pack_data.inspection.one_packer import Row
from pack_data.lengths.counting import picture, statistics
from pack_data.packers import get_packer
from pack_data.packing.histogram import LengthHistogram
from pack_data.packing.packing import Packing, prove, statement
from pack_data.store.data_set import PackStore

_RECIPE = "recipe.json"  # of a data set
DEPTHS: Tuple[Optional[int], ...] = (2, 3, 4, None)  # the optimal packing of each takes most of the time
# Beyond these a packer takes longer than all others together: NNLSHP lists the strategies of a pack, and GREEDY places
# each sequence by itself.
_LONGEST_NNLSHP, _MOST_GREEDY = 256, 1_000_000
_SHOWN = 12  # strategies in the picture
_LISTED = 60  # strategies in the table
BARS = 120  # of the rows before packing
_PLACES = len(SEQUENCES) - 1  # sequences of a pack with a colour of their own


class _Drawn(NamedTuple):
    """One pack. numbers: int [S], the sequence that each slot belongs to, from 1; 0 in padding."""

    title: str
    numbers: np.ndarray
    rows: List[Dict[str, Any]]  # about each sequence, for the table
    columns: Tuple[Column, ...]


def _histogram_of(store: PackStore) -> LengthHistogram:
    """The lengths of a data set's sequences, for its packs."""
    counts = np.array(store.manifest.histogram, np.int64)
    histogram = LengthHistogram(counts, store.folder.resolve().name)
    return histogram.with_max_sequence_length(store.schema.max_sequence_length).rounded_up(store.schema.multiple_of)


def _facts_table(name: str, title: str, facts: Mapping[str, Any], rows: Sequence[Tuple[str, ...]]) -> Table:
    """rows: key of the fact, its words, format of its value, and a note."""
    columns = (Column("what", "what"), Column("value", "value"), Column("about", "note"))
    return Table(
        name,
        title,
        columns,
        [
            {"what": Cell(key, words), "value": Cell(facts[key], format(facts[key], form)), "about": about}
            for key, words, form, about in rows
        ],
    )


# ---- lengths ---------------------------------------------------------------------------------------------------------


def _lengths_section(histogram: LengthHistogram) -> Section:
    facts = statistics(histogram)
    rows = [
        ("sequences", "sequences", ",", ""),
        ("tokens", "tokens", ",", ""),
        ("max_sequence_length", "slots of a row", ",", "the longest sequence that is allowed"),
        ("shortest", "shortest", ",", "tokens"),
        ("median_length", "median", ",", "tokens"),
        ("mean_length", "mean", ",.1f", "tokens"),
        ("longest", "longest", ",", "tokens"),
        ("padding_share", "padding", ".2%", "of all slots, where each sequence has a row of its own"),
        ("theoretical_speedup", "speed-up", ".3f", "at most, by packing without any padding"),
    ]
    table = _facts_table("lengths", f"Lengths of {histogram.name or 'these sequences'}", facts, rows)
    return Section("Lengths", (picture(histogram), table))


# ---- how packs are filled --------------------------------------------------------------------------------------------


def _stack(strategies: Sequence[Sequence[int]], depth: int, slots: int) -> Tuple[Series, ...]:
    """Packs as stacks: the first sequences, all further ones together where there may be some, and the padding."""
    columns = [
        [*each[:_PLACES], *[0] * (_PLACES - len(each)), sum(each[_PLACES:]), slots - sum(each)] for each in strategies
    ]
    names = ("longest sequence", "second", "third", "further ones", "padding")
    return tuple(
        Series(
            name,
            tuple(float(column[place]) or None for column in columns),
            role=role,
        )
        for place, (name, role) in enumerate(zip(names, (*SEQUENCES, "padding")))
        if place < depth or role == "padding"
    )


def rows_picture(packing: Packing, heading: str, whole: int) -> Bars:
    """All rows side by side on an axis of `whole` rows, each bar one of many, from the longest first sequence on.

    The share of padding in the title is exact; the areas are those of the bars.
    """
    S, packs, count = packing.max_sequence_length, packing.packs, min(BARS, whole)
    bars = max(1, round(count * packs / whole))
    ends = np.cumsum(packing.repeats, dtype=np.int64)
    places = np.searchsorted(ends, (2 * np.arange(bars, dtype=np.int64) + 1) * packs // (2 * bars), side="right")
    rows = [packing.strategies[n] for n in places.tolist()]
    none = (None,) * (count - bars)  # rows that are not needed
    return Bars(
        f"{heading}: {packs:,} rows, {1 - packing.efficiency:.1%} padding",
        tuple(map(_text, rows)) + ("",) * len(none),
        Axis("slots", most=float(S)),
        tuple(each._replace(values=each.values + none) for each in _stack(rows, packing.largest_depth, S)),
        along="rows",
        stacked=True,
        edges=tuple(whole * n / count for n in range(count + 1)),
    )


def _text(strategy: Sequence[int]) -> str:
    """`256 + 128 + 2 x 64`."""
    return " + ".join(
        f"{length}" if count == 1 else f"{count} x {length}" for length, count in Counter(strategy).items()
    )


def _filling_section(packing: Packing, made: str) -> Section:
    """made: how the packing was made, in words.  ValueError where there is no pack."""
    if not packing.packs:
        raise ValueError("the packing holds no pack; there is nothing to look at")
    S, depth, packs = packing.max_sequence_length, packing.largest_depth, packing.packs
    most_used = sorted(range(len(packing.strategies)), key=lambda n: (-packing.repeats[n], n))
    listed = most_used[:_LISTED]
    shown = [packing.strategies[n] for n in most_used[:_SHOWN]]
    top = Bars(
        "The strategies used most, and how they fill a pack",
        tuple(map(_text, shown)),
        Axis("slots", most=float(S)),
        _stack(shown, depth, S),
        stacked=True,
        across=True,
        ends=tuple(f"{packing.repeats[n]:,} packs" for n in most_used[:_SHOWN]),
    )
    by_depth = np.bincount(packing.depths, weights=np.array(packing.repeats, float), minlength=depth + 1)[1:]
    table = Table(
        "strategies",
        f"Strategies, the {len(listed)} most used of {len(packing.strategies):,}",
        (
            Column("strategy", "lengths of a pack"),
            Column("sequences", "sequences"),
            Column("packs", "packs"),
            Column("share", "of all packs", form=".2%"),
            Column("tokens", "tokens"),
            Column("padding", "empty slots"),
        ),
        [
            {
                "strategy": Cell(list(strategy), _text(strategy)),
                "sequences": len(strategy),
                "packs": packing.repeats[n],
                "share": packing.repeats[n] / packs,
                "tokens": sum(strategy),
                "padding": S - sum(strategy),
            }
            for n, strategy in ((n, packing.strategies[n]) for n in listed)
        ],
    )
    facts = packing.to_json()
    rows = [
        ("packs", "packs", ",", f"of {S} slots; different strategies: {len(packing.strategies):,}"),
        ("packing_factor", "packing factor", ".3f", f"sequences in a pack; at most {packing.theoretical_speedup:.3f}"),
        ("efficiency", "efficiency", ".3%", "of all slots hold a token"),
        ("padding_tokens", "padding", ",", "empty slots"),
        ("largest_depth", "deepest pack", ",", "sequences"),
    ]
    accounting = _facts_table("packing", f"The packing: {made}", facts, rows)
    pictures = (
        top,
        Bars(
            "Packs by the number of their sequences",
            tuple(str(number + 1) for number in range(len(by_depth))),
            Axis("packs"),
            (Series("packs", tuple(map(float, by_depth))),),
            along="sequences in a pack",
            ends=tuple(f"{value / packs:.1%}" for value in by_depth) if depth <= 12 else (),
        ),
    )
    return Section("How the packs are filled", (*pictures, accounting, table))


# ---- waste by depth and packer ---------------------------------------------------------------------------------------


def _waste_section(histogram: LengthHistogram, rows: Sequence[Row], left_out: Sequence[str]) -> Section:
    """rows: `compare`'s. left_out: packers that are not among them."""
    packers = [row for row in rows if row.algorithm not in ("none", "sort")]
    depths = list(dict.fromkeys(row.max_sequences_per_pack for row in packers))
    plain_rows = [row for row in rows if row.algorithm == "none"]
    best = [
        min((row for row in packers if row.max_sequences_per_pack == depth), key=lambda row: row.packs)
        for depth in depths
    ]
    chosen = plain_rows + best
    rows_of = Bars(
        "Tokens and padding of the same sequences, by depth",
        tuple(
            "one a row" if row.algorithm == "none" else f"depth {depth_text(row.max_sequences_per_pack)}"
            for row in chosen
        ),
        Axis("slots"),
        (
            Series("tokens", tuple(float(histogram.tokens) for _ in chosen), role="tokens"),
            Series("padding", tuple(float(row.padding_tokens) for row in chosen), role="padding"),
        ),
        stacked=True,
        across=True,
        ends=tuple(f"{1 - row.efficiency:.2%} padding" for row in chosen),
        notes=("Each depth by the packer that needs the fewest packs there.",),
    )
    columns = (
        Column("algorithm", "packer"),
        Column("max_sequences_per_pack", "depth"),
        Column("packs", "packs"),
        Column("padding_tokens", "padding"),
        Column("efficiency", "efficiency", form=".3%"),
        Column("packing_factor", "factor", form=".3f"),
        Column("speedup", "speed-up", form=".3f"),
        Column("strategies", "strategies"),
        Column("lower_bound", "proven least"),
        Column("gap", "above it"),
        Column("solve_seconds", "solved in s", form=",.3f"),
    )
    table = Table(
        "packers",
        "Every packer at every depth",
        columns,
        [
            {
                **{column.key: getattr(row, column.key) for column in columns},
                "algorithm": Cell(row.algorithm, row.algorithm.upper()),
                "max_sequences_per_pack": Cell(row.max_sequences_per_pack, depth_text(row.max_sequences_per_pack)),
            }
            for row in rows
        ],
        ("Padding in slots; factor: sequences in a pack; speed-up: slots without packing over slots with it.",)
        + ("SORT makes batches of similar length, each padded to its longest: no packing, and many engines.",)
        + tuple(f"{name.upper()} takes long here: packed-bert compare has it." for name in left_out),
    )
    return Section("Waste by depth and packer", (rows_of, padding_map(rows), gap_map(rows), table))


# ---- the proof -------------------------------------------------------------------------------------------------------


def _proof_section(packing: Packing, made: str) -> Section:
    """The certificate in words, and what it says each length is worth."""
    title = "The proof"
    if packing.certificate is None:
        bound = (
            ""
            if packing.lower_bound is None
            else f" Its maker states that no packing has fewer than {packing.lower_bound:,} packs."
        )
        words = f"{made} comes without a certificate; the optimal packer writes one.{bound}"
        return Section(title, (words[0].upper() + words[1:],))
    proof = prove(packing)
    certificate = packing.certificate
    said = statement(packing, proof)
    how = (
        "Every length has a price, in packs. No pack that obeys the limits is worth more than 1, so a packing needs at "
        "least as many packs as all sequences are worth together. Whoever doubts it only has to check the prices."
    )
    lengths = tuple(float(length) for length in certificate.lengths)
    prices = Lines(
        "What a sequence of each length is worth",
        Axis("tokens of a sequence", most=float(packing.max_sequence_length)),
        Axis("packs"),
        (
            Line("price", lengths, tuple(price / certificate.denominator for price in certificate.prices)),
            Line("its share of the slots", lengths, tuple(n / packing.max_sequence_length for n in lengths)),
        ),
        notes=(
            "Where the price is flat, a longer sequence is worth no more: the depth is scarce there, not the slots.",
        ),
    )
    return Section(title, (said[0].upper() + said[1:] + ". " + how, prices))


# ---- one pack --------------------------------------------------------------------------------------------------------


def _drawn_strategy(packing: Packing) -> Optional[_Drawn]:
    """The strategy used most among those of two sequences at least, else the one used most; None for no packs."""
    if not packing.strategies:
        return None
    several = [n for n in range(len(packing.strategies)) if len(packing.strategies[n]) > 1]
    chosen = max(several or range(len(packing.strategies)), key=lambda n: packing.repeats[n])
    strategy = packing.strategies[chosen]
    numbers = np.zeros(packing.max_sequence_length, np.int64)
    numbers[: sum(strategy)] = np.repeat(np.arange(1, len(strategy) + 1), strategy)
    title = f"The pack {_text(strategy)}, of which there are {packing.repeats[chosen]:,}"
    return _Drawn(title, numbers, *_sequences_of(numbers))


def _drawn_pack(store: PackStore, pack: int) -> _Drawn:
    """A pack of a data set as its batches have it."""
    if not 0 <= pack < len(store):
        raise ValueError(f"--pack {pack}: {store.folder} has packs 0 to {len(store) - 1}")
    batch = {name: values[0] for name, values in store.batch(np.array([pack])).items()}
    rows, columns = _sequences_of(batch["input_mask"])
    if "masked_lm_weights" in batch:
        for row in rows:
            row["masked"] = int((batch["masked_lm_weights"] == row["sequence"]).sum())
        columns += (Column("masked", "masked tokens"),)
    if "segment_ids" in batch:
        for row in rows:
            own = batch["input_mask"] == row["sequence"]
            row["second"] = int(batch["segment_ids"][own].sum())
        columns += (Column("second", "tokens of its second segment"),)
    return _Drawn(f"Pack {pack:,} of {store.folder.resolve().name}", batch["input_mask"], rows, columns)


def _sequences_of(numbers: np.ndarray) -> Tuple[List[Dict[str, Any]], Tuple[Column, ...]]:
    rows = []
    for number in range(1, int(numbers.max(initial=0)) + 1):
        slots = np.flatnonzero(numbers == number)
        if len(slots):
            first, last = int(slots[0]), int(slots[-1])
            rows.append({"sequence": number, "first": first, "last": last, "tokens": len(slots)})
    titles = (("sequence", "sequence"), ("first", "first slot"), ("last", "last slot"), ("tokens", "tokens"))
    return rows, tuple(Column(key, title) for key, title in titles)


def _runs(numbers: np.ndarray) -> List[Tuple[int, int, int]]:
    """(first slot, slot after the last, number) of each run of one number."""
    starts = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist()]
    return [(start, end, int(numbers[start])) for start, end in zip(starts, [*starts[1:], len(numbers)]) if end > start]


def _pack_section(drawn: _Drawn) -> Section:
    S = len(drawn.numbers)
    runs = _runs(drawn.numbers)
    count = max((number for _, _, number in runs), default=0)
    mask = MaskPicture("Its attention mask: which slot sees which", tuple(runs))
    within = sum(int((drawn.numbers == number).sum()) ** 2 for number in range(1, count + 1))
    words = (
        f"{drawn.title}: tokens see those of their own sequence only, whatever else shares the row. "
        f"{within:,} of the {S * S:,} pairs of slots are within a sequence, {within / (S * S):.1%}. "
        "Padding sees padding, so that no row of the softmax is empty."
    )
    table = Table("pack", "The sequences of this pack", drawn.columns, drawn.rows, ("Slots count from 0.",))
    return Section("One pack and its attention mask", (words, mask, table))


# ---- together --------------------------------------------------------------------------------------------------------


def _packing_of(store: PackStore) -> Packing:
    """The packing of a data set: its recipe with the proof where it has one, else what its packs hold."""
    manifest = store.manifest
    recipe = Path(store.folder) / _RECIPE
    if any(entry.file == _RECIPE for entry in manifest.files) and recipe.is_file():
        packing = Packing.load(recipe)
        if packing.packs == manifest.packs and packing.sequences == manifest.sequences:
            return packing
    lengths = np.sort(manifest.schema.taken(store.lengths()["lengths"].astype(np.int64)), axis=1)[:, ::-1]
    found, counts = np.unique(lengths, axis=0, return_counts=True)
    packs = (([int(n) for n in row if n], int(count)) for row, count in zip(found, counts))
    depth = manifest.schema.max_sequences_per_pack
    return Packing.of(manifest.algorithm, _histogram_of(store), depth, packs, lower_bound=manifest.lower_bound)


def page_of_histogram(histogram: LengthHistogram, *, packer: str, depth: Optional[int]) -> Page:
    """packer, depth: of the packing that is drawn."""
    packing = get_packer(packer)(histogram, max_sequences_per_pack=depth)
    return _page(f"Packing {histogram.name}", histogram, packing, _drawn_strategy(packing))


def page_of_data_set(store: PackStore, *, pack: int) -> Page:
    """pack: the number of the one that is drawn."""
    if not len(store):
        raise ValueError(f"{store.folder}: holds no pack; there is nothing to look at")
    title = f"Data set {store.folder.resolve().name}"
    return _page(title, _histogram_of(store), _packing_of(store), _drawn_pack(store, pack))


def _page(title: str, histogram: LengthHistogram, packing: Packing, drawn: Optional[_Drawn]) -> Page:
    left_out = ["nnlshp"] if histogram.max_sequence_length > _LONGEST_NNLSHP else []
    left_out += ["greedy"] if histogram.sequences > _MOST_GREEDY else []
    limit = packing.max_sequences_per_pack
    depth = "any depth" if limit is None else f"depth {limit}"
    made = f"{packing.algorithm.upper()}, {depth}"
    filling = _filling_section(packing, made)
    gc.freeze()  # garbage is collected before each packing that is measured; what is loaded by now stays
    packers = [name for name in ALGORITHMS if name not in left_out]
    rows = compare(Case(histogram, DEPTHS), packers)
    before = get_packer("none")(histogram, max_sequences_per_pack=1)
    bounds = [packing.lower_bound, *(row.lower_bound for row in rows if row.max_sequences_per_pack == limit)]
    bound = next((each for each in bounds if each is not None), None)
    figures = (
        Figure(
            f"{packing.packing_factor:.3f}",
            "sequences in a pack",
            f"the packing factor; {histogram.theoretical_speedup:.3f} would leave no slot empty",
        ),
        Figure(f"{1 - packing.efficiency:.1%}", "padding", f"{1 - before.efficiency:.1%} with one sequence a row"),
        Figure(f"{len(packing.strategies):,}", "strategies", "different lengths that share a pack")
        if bound is None
        else Figure(
            f"{packing.packs - bound:,}",
            "packs above the proven least",
            f"no packing of {depth} has fewer than {bound:,}",
        ),
    )
    return Page(
        title,
        f"{packing.sequences:,} sequences fit into {packing.packs:,} packs of {packing.max_sequence_length} slots "
        f"({made}): {1 - packing.efficiency:.1%} of the slots are padding instead of {1 - before.efficiency:.1%}.",
        (
            _lengths_section(histogram),
            filling,
            _waste_section(histogram, rows, left_out),
            _proof_section(packing, made),
            *([_pack_section(drawn)] if drawn is not None else []),
        ),
        figures,
        (
            rows_picture(before, "Each sequence in its row", before.packs),
            rows_picture(packing, f"Up to {packing.largest_depth} sequences in a row", before.packs),
        ),
    )
