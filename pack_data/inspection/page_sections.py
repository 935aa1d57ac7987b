"""Pages about a histogram of lengths and about a packed data set: how packs are filled, what is wasted, the proof."""

from __future__ import annotations

import gc
from collections import Counter
from pathlib import Path
from typing import Dict, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from pack_data.cli.command import depth_text
from pack_data.display.facts import Fact, Facts, number, quantities
from pack_data.display.page import Figure, Page, Section
from pack_data.display.picture import (
    SEQUENCES,
    Axis,
    Bars,
    Line,
    Lines,
    MaskPicture,
    Series,
    padding_bars,
)
from pack_data.inspection.compare import ALGORITHMS, compare, heat_maps, packers_facts
from pack_data.inspection.lengths import lengths_facts
from pack_data.inspection.one_packer import Row
from pack_data.lengths.counting import picture
from pack_data.packers import get_packer
from pack_data.packing.histogram import LengthHistogram
from pack_data.packing.packing import Packing, of_at_most, statement
from pack_data.reading.words import counted
from pack_data.store.data_set import PackStore
from pack_data.store.quantities import padding_share

_RECIPE = "recipe.json"  # of a data set
# The optimal packing of each takes most of the time.
_DEPTHS: Tuple[Optional[int], ...] = (2, 3, 4, None)
# Beyond these sizes one packer takes longer than all others together: NNLSHP lists the strategies of a pack, and GREEDY
# places each sequence by itself.
_MOST_SLOTS_NNLSHP = 256
_MOST_SEQUENCES_GREEDY = 1_000_000
_MOST_DRAWN_STRATEGIES = 12  # bars that a picture has room for
_MOST_LISTED_STRATEGIES = 60  # rows of the table
_MOST_ROW_BARS = 120  # bars for the rows before packing
_MOST_DEPTH_LABELS = 12  # bars that are wide enough for a percentage
_COLOURED = len(SEQUENCES) - 1  # sequences of a pack that have a colour of their own


# ---- how packs are filled --------------------------------------------------------------------------------------------


def rows_picture(packing: Packing, heading: str, width: int) -> Bars:
    """Draw all rows of a packing side by side, from the longest first sequence on.

    Each bar stands for many rows. The share of padding in the title is exact; the areas are those of the bars.

    Args:
        packing: has at least one pack.
        heading: begins the title.
        width: rows that the axis has room for.
    """
    packs = packing.packs
    places = min(_MOST_ROW_BARS, width)
    bars = max(1, round(places * packs / width))
    empty = places - bars

    middles = (2 * np.arange(bars, dtype=np.int64) + 1) * packs // (2 * bars)
    ends = np.cumsum(packing.repeats, dtype=np.int64)
    drawn = [packing.strategies[n] for n in np.searchsorted(ends, middles, side="right").tolist()]
    stacks = _stacks(drawn, packing.largest_depth, packing.max_sequence_length)
    return Bars(
        f"{heading}: {counted(packs, 'row')}, {number(packing.padding_share, 'share')} padding",
        tuple(map(_sum_text, drawn)) + ("",) * empty,
        Axis("slots", most=float(packing.max_sequence_length)),
        tuple(series._replace(values=series.values + (None,) * empty) for series in stacks),
        along="rows",
        stacked=True,
        edges=tuple(width * n / places for n in range(places + 1)),
    )


def _stacks(strategies: Sequence[Sequence[int]], depth: int, slots: int) -> Tuple[Series, ...]:
    """Return each strategy as a stack: the first sequences, all further ones together, and the padding."""
    columns = []
    for strategy in strategies:
        first = [*strategy[:_COLOURED], *[0] * (_COLOURED - len(strategy))]
        columns.append([*first, sum(strategy[_COLOURED:]), slots - sum(strategy)])

    names = ("longest sequence", "second", "third", "further ones", "padding")
    roles = (*SEQUENCES, "padding")
    stacks = []
    for place, (name, role) in enumerate(zip(names, roles)):
        if place < depth or role == "padding":
            heights = tuple(float(column[place]) or None for column in columns)
            stacks.append(Series(name, heights, role=role))
    return tuple(stacks)


def _sum_text(strategy: Sequence[int]) -> str:
    """Return the lengths of a pack as a sum: `256 + 128 + 2 x 64`."""
    terms = []
    for length, count in Counter(strategy).items():
        terms.append(f"{length}" if count == 1 else f"{count} x {length}")
    return " + ".join(terms)


def _filling_section(packing: Packing, packer: str) -> Section:
    """Show strategies, depths and totals of a packing. packer: its packer and depth, for a title."""
    if not packing.packs:
        raise ValueError("the packing has no packs; use a source with at least one sequence")
    strategies = len(packing.strategies)
    notes = {
        "packs": f"of {packing.max_sequence_length} slots; strategies: {strategies:,}",
        "packing_factor": of_at_most(packing.theoretical_speedup),
        "efficiency": "",
        "padding_tokens": "",
        "largest_depth": "",
    }
    rows = quantities(packing, notes)
    totals = Facts(f"The packing: {packer}", rows, name="packing")

    numbers = range(len(packing.strategies))
    most_used = sorted(numbers, key=lambda n: (-packing.repeats[n], n))
    pictures = _strategies_picture(packing, most_used), _depths_picture(packing)
    return Section(
        "How the packs are filled", (*pictures, totals, _strategies_table(packing, most_used))
    )


def _strategies_picture(packing: Packing, most_used: Sequence[int]) -> Bars:
    drawn = most_used[:_MOST_DRAWN_STRATEGIES]
    strategies = [packing.strategies[n] for n in drawn]
    return Bars(
        "The strategies used most, and how they fill a pack",
        tuple(map(_sum_text, strategies)),
        Axis("slots", most=float(packing.max_sequence_length)),
        _stacks(strategies, packing.largest_depth, packing.max_sequence_length),
        stacked=True,
        across=True,
        ends=tuple(f"{counted(packing.repeats[n], 'pack')}" for n in drawn),
    )


def _depths_picture(packing: Packing) -> Bars:
    depth = packing.largest_depth
    packs = np.bincount(
        packing.depths, weights=np.array(packing.repeats, float), minlength=depth + 1
    )[1:]
    shares = tuple(number(count / packing.packs, "share") for count in packs)
    return Bars(
        "Packs by the number of their sequences",
        tuple(map(str, range(1, depth + 1))),
        Axis("packs"),
        (Series("packs", tuple(packs.tolist())),),
        along="sequences in a pack",
        ends=shares if depth <= _MOST_DEPTH_LABELS else (),
    )


def _strategies_table(packing: Packing, most_used: Sequence[int]) -> Facts:
    rows = []
    for n in most_used[:_MOST_LISTED_STRATEGIES]:
        strategy = packing.strategies[n]
        packs = packing.repeats[n]
        tokens = sum(strategy)
        row = {
            "strategy": Fact("lengths of a pack", strategy, note=_sum_text(strategy)),
            "sequences": Fact("sequences", len(strategy)),
            "packs": Fact("packs", packs),
            "share": Fact("share", packs / packing.packs, "of all packs"),
            "tokens": Fact("tokens", tokens),
            "padding": Fact("empty slots", packing.max_sequence_length - tokens),
        }
        rows.append(row)
    title = f"Strategies, the {len(rows)} most used of {number(len(packing.strategies))}"
    return Facts(title, rows, name="strategies")


# ---- waste by depth and packer ---------------------------------------------------------------------------------------


def _waste_section(
    histogram: LengthHistogram, rows: Sequence[Row], left_out: Sequence[str]
) -> Section:
    """Show the padding of every packer. rows: `compare`'s. left_out: packers that are not among them."""
    drawn = [row for row in rows if row.algorithm == "none"]
    names = ["one a row"] * len(drawn)
    packers = [row for row in rows if row.algorithm not in ("none", "sort")]
    for depth in dict.fromkeys(row.max_sequences_per_pack for row in packers):
        of_depth = [row for row in packers if row.max_sequences_per_pack == depth]
        drawn.append(min(of_depth, key=lambda row: row.packs))
        names.append(f"depth {depth_text(depth)}")
    by_depth = padding_bars(
        "Tokens and padding of the same sequences, by depth",
        names,
        histogram.tokens,
        [row.padding_tokens for row in drawn],
        unit="%",
        notes=("Each depth by the packer that needs the fewest packs there.",),
    )

    facts = packers_facts("Every packer at every depth", rows)
    omissions = [
        f"{name.upper()} takes long here: packed-bert compare has it." for name in left_out
    ]
    table = facts._replace(notes=[*facts.notes, *omissions])
    return Section("Waste by depth and packer", (by_depth, *heat_maps(rows), table))


# ---- the proof -------------------------------------------------------------------------------------------------------


def _proof_section(packing: Packing, packer: str) -> Section:
    """Show the certificate in words, and the price of each length."""
    title = "The proof"
    certificate = packing.certificate
    if certificate is None:
        words = f"{packer} comes without a certificate; the optimal packer writes one."
        if packing.lower_bound is not None:
            words += f" Its maker states that no packing has fewer than {counted(packing.lower_bound, 'pack')}."
        return Section(title, (_capitalised(words),))

    method = (
        "Every length has a price, in packs. No pack that obeys the limits is worth more than 1, so a packing needs at "
        "least as many packs as all sequences are worth together. Whoever doubts it only has to check the prices."
    )
    S = packing.max_sequence_length
    lengths = tuple(map(float, certificate.lengths))
    prices = tuple(price / certificate.denominator for price in certificate.prices)
    shares = tuple(length / S for length in lengths)
    drawn = Lines(
        "What a sequence of each length is worth",
        Axis("tokens of a sequence", most=float(S)),
        Axis("packs"),
        (Line("price", lengths, prices), Line("its share of the slots", lengths, shares)),
        notes=(
            "Where the price is flat, a longer sequence is worth no more: the depth is scarce there, not the slots.",
        ),
    )
    return Section(title, (f"{_capitalised(statement(packing))}. {method}", drawn))


def _capitalised(words: str) -> str:
    return words[0].upper() + words[1:]


# ---- one pack --------------------------------------------------------------------------------------------------------


class _DrawnPack(NamedTuple):
    """One pack.

    runs: (first slot, slot after the last, sequence from 1 on, or 0 for padding). sequences: facts about each.
    """

    title: str
    runs: List[Tuple[int, int, int]]
    sequences: List[Dict[str, Fact]]


def _drawn_pack(title: str, numbers: np.ndarray) -> _DrawnPack:
    """Return a pack by the sequence that each slot belongs to, integers [S]."""
    starts = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist()]
    stops = [*starts[1:], len(numbers)]
    runs = [(start, stop, int(numbers[start])) for start, stop in zip(starts, stops)]
    sequences = []
    for start, stop, sequence in runs:
        if sequence:
            values = {
                "sequence": sequence,
                "first slot": start,
                "last slot": stop - 1,
                "tokens": stop - start,
            }
            sequences.append({name.split()[0]: Fact(name, value) for name, value in values.items()})
    return _DrawnPack(title, runs, sequences)


def _drawn_strategy(packing: Packing) -> _DrawnPack:
    """Draw the strategy used most among those of at least two sequences, else the one used most."""
    numbers = range(len(packing.strategies))
    several = [n for n in numbers if len(packing.strategies[n]) > 1]
    chosen = max(several or numbers, key=lambda n: packing.repeats[n])
    strategy = packing.strategies[chosen]
    slots = np.zeros(packing.max_sequence_length, np.int64)
    slots[: sum(strategy)] = np.repeat(np.arange(1, len(strategy) + 1), strategy)
    return _drawn_pack(
        f"The pack {_sum_text(strategy)}, of which there are {packing.repeats[chosen]:,}", slots
    )


def _stored_pack(store: PackStore, pack: int) -> _DrawnPack:
    """Draw a pack of a data set as its batches have it."""
    if not 0 <= pack < len(store):
        raise ValueError(
            f"--pack {pack}: no such pack; {store.folder} has packs 0 to {len(store) - 1}"
        )
    batch = {name: values[0] for name, values in store.batch(np.array([pack])).items()}
    drawn = _drawn_pack(f"Pack {pack} of {store.folder.resolve().name}", batch["input_mask"])
    for facts in drawn.sequences:
        sequence = facts["sequence"].value
        if "masked_lm_weights" in batch:
            masked = int((batch["masked_lm_weights"] == sequence).sum())
            facts["masked"] = Fact("masked tokens", masked)
        if "segment_ids" in batch:
            second = int(batch["segment_ids"][batch["input_mask"] == sequence].sum())
            facts["second"] = Fact("tokens of its second segment", second)
    return drawn


def _pack_section(drawn: _DrawnPack) -> Section:
    slots = drawn.runs[-1][1]
    pairs = slots**2
    pairs_within = sum(facts["tokens"].value ** 2 for facts in drawn.sequences)
    words = (
        f"{drawn.title}: tokens see those of their own sequence only, whatever else shares the row. "
        f"{pairs_within:,} of the {pairs:,} pairs of slots are within a sequence, "
        f"{number(pairs_within / pairs, 'share')}. Padding sees padding, so that no row of the softmax is empty."
    )
    mask = MaskPicture("Its attention mask: which slot sees which", tuple(drawn.runs))
    table = Facts("The sequences of this pack", drawn.sequences, ["Slots count from 0."], "pack")
    return Section("One pack and its attention mask", (words, mask, table))


# ---- together --------------------------------------------------------------------------------------------------------


def page_of_histogram(histogram: LengthHistogram, *, packer: str, depth: Optional[int]) -> Page:
    """Return the page of a histogram.

    Args:
        histogram: lengths to pack.
        packer: name of the packer whose packing is drawn.
        depth: its limit on sequences per pack; None is unlimited.

    Raises:
        ValueError: the histogram has no sequences, or the packer refuses the depth.
    """
    packing = get_packer(packer)(histogram, max_sequences_per_pack=depth)
    return _page(f"Packing {histogram.name}", histogram, packing, None)


def page_of_data_set(store: PackStore, *, pack: int) -> Page:
    """Return the page of a data set.

    Args:
        store: an open data set.
        pack: number of the pack that is drawn, from 0.

    Raises:
        ValueError: the data set has no packs, or not this one.
    """
    if not len(store):
        raise ValueError(
            f"{store.folder}: has no packs; build it from a source with at least one sequence"
        )
    drawn = _stored_pack(store, pack)
    counts = np.array(store.manifest.histogram, np.int64)
    histogram = LengthHistogram(counts, store.folder.resolve().name)
    histogram = histogram.with_max_sequence_length(store.schema.max_sequence_length)
    histogram = histogram.rounded_up(store.schema.multiple_of)
    return _page(f"Data set {histogram.name}", histogram, _packing_of(store, histogram), drawn)


def _packing_of(store: PackStore, histogram: LengthHistogram) -> Packing:
    """Return the packing of a data set: its recipe with the proof, else what its packs hold."""
    manifest = store.manifest
    recipe = Path(store.folder) / _RECIPE
    if any(entry.file == _RECIPE for entry in manifest.files) and recipe.is_file():
        packing = Packing.load(recipe)
        if packing.packs == manifest.packs and packing.sequences == manifest.sequences:
            return packing

    lengths = manifest.schema.taken(store.lengths()["lengths"].astype(np.int64))
    strategies, counts = np.unique(-np.sort(-lengths, axis=1), axis=0, return_counts=True)
    packs = []
    for strategy, count in zip(strategies.tolist(), counts.tolist()):
        packs.append(([length for length in strategy if length], count))
    depth = manifest.schema.max_sequences_per_pack
    return Packing.of(manifest.algorithm, histogram, depth, packs, lower_bound=manifest.lower_bound)


def _depth_text(packing: Packing) -> str:
    limit = packing.max_sequences_per_pack
    return "any depth" if limit is None else f"depth {limit}"


def headline(packing: Packing) -> str:
    """Return one sentence on a packing, with its padding and that of one sequence per row."""
    packer = f"{packing.algorithm.upper()}, {_depth_text(packing)}"
    unpacked_padding = padding_share(
        packing.tokens, packing.sequences * packing.max_sequence_length
    )
    return (
        f"{counted(packing.sequences, 'sequence')} fit into {counted(packing.packs, 'pack')} of "
        f"{packing.max_sequence_length:,} slots ({packer}): {number(packing.padding_share, 'share')} of the slots are "
        f"padding instead of {number(unpacked_padding, 'share')}. The packing factor is "
        f"{number(packing.packing_factor, 'sequences per pack')} "
        f"{of_at_most(packing.theoretical_speedup)}."
    )


def _page(
    title: str, histogram: LengthHistogram, packing: Packing, drawn: Optional[_DrawnPack]
) -> Page:
    """Return the page of a packing, with a drawn pack: by default the strategy used most."""
    limit = packing.max_sequences_per_pack
    depth = _depth_text(packing)
    packer = f"{packing.algorithm.upper()}, {depth}"
    filling = _filling_section(packing, packer)

    left_out = []
    if histogram.max_sequence_length > _MOST_SLOTS_NNLSHP:
        left_out.append("nnlshp")
    if histogram.sequences > _MOST_SEQUENCES_GREEDY:
        left_out.append("greedy")
    gc.freeze()  # garbage is collected before each packing that is measured; what is loaded by now stays
    rows = compare(histogram, _DEPTHS, [name for name in ALGORITHMS if name not in left_out])
    bounds = [packing.lower_bound]
    bounds += [row.lower_bound for row in rows if row.max_sequences_per_pack == limit]
    bound = next((bound for bound in bounds if bound is not None), None)

    unpacked = get_packer("none")(histogram, max_sequences_per_pack=1)
    padding = number(packing.padding_share, "share")
    unpacked_padding = number(unpacked.padding_share, "share")
    largest_factor = number(histogram.theoretical_speedup, "times")
    last_figure = Figure(
        f"{len(packing.strategies):,}", "strategies", "different lengths that share a pack"
    )
    if bound is not None:
        words = f"no packing of {depth} has fewer than {bound:,}"
        last_figure = Figure(f"{packing.packs - bound:,}", "packs above the proven least", words)
    return Page(
        title,
        headline(packing),
        (
            Section("Lengths", (picture(histogram), lengths_facts(histogram))),
            filling,
            _waste_section(histogram, rows, left_out),
            _proof_section(packing, packer),
            _pack_section(drawn or _drawn_strategy(packing)),
        ),
        figures=(
            Figure(
                number(packing.packing_factor, "sequences per pack"),
                "sequences in a pack",
                f"the packing factor; {largest_factor} would leave no slot empty",
            ),
            Figure(padding, "padding", f"{unpacked_padding} with one sequence a row"),
            last_figure,
        ),
        first=(
            rows_picture(unpacked, "Each sequence in its row", unpacked.packs),
            rows_picture(
                packing, f"Up to {packing.largest_depth} sequences in a row", unpacked.packs
            ),
        ),
    )
