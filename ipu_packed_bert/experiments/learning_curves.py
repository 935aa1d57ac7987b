"""Packed and unpacked learning curves, over sequences processed and over seconds (packedBERT, section 4.2 and Figure
3).

All runs start from one checkpoint and process the same number of sequences.  (a) divides the accumulation by the
packing factor p and keeps the hyperparameters; (b) keeps the packs of an update, so p times the sequences in 1/p of the
updates, with betas to the power p, with and without a learning rate times p; (c) is each at the better of two learning
rates.
"""

from __future__ import annotations

import argparse
import math
from typing import Any, Dict, List, NamedTuple, Sequence, Tuple

import numpy as np

from ipu_packed_bert.experiments import pretraining, tables
from ipu_packed_bert.experiments.ablation import columns, final
from ipu_packed_bert.experiments.pretraining import PretrainingSetup
from ipu_packed_bert.experiments.runner import Cell, Row, Runner

# Two runs count as equal if their held-out MLM losses differ by less than this, in nats.  Fixed before any run, by what
# matters to a user: 0.05 nats are 5 % of perplexity, a quarter of the step from BERT-base to BERT-large, whose
# published perplexities are 3.99 and 3.23, 0.21 nats (Devlin et al. 2019, table 6).
MARGIN = 0.05
ALPHA = 0.05  # of each of the two one-sided tests

SELECTION_SEED = 100  # of the runs that choose the learning rates of (c); no run that is compared has it

SUMMARY = (
    "Packed (optimal, depth 3) against unpacked training from one checkpoint: (a) accumulation / p, (b) betas ** p "
    "with and\n"
    "without a scaled learning rate, (c) each at its better learning rate. Held-out loss over sequences and over "
    "seconds,\n"
    f"equivalence of (a) by two one-sided tests with a margin of {MARGIN} nats, and how far (b) lags.\n\n"
    + "\n".join(f"{name}: {pretraining.describe(size)}" for name, size in pretraining.SIZES.items())
    + "\nThe shared checkpoint and the data sets are made once and serve ablation too."
)

settings = pretraining.settings


class Variant(NamedTuple):
    words: str
    store: str
    adjustment: str = "none"
    rate: float = 1.0  # times the learning rate of the size
    scaled: bool = False  # and times the packing factor


VARIANTS: Dict[str, Variant] = {
    "unpacked": Variant("unpacked", "unpacked"),
    "accumulation": Variant("(a) accumulation / p", "packed", "accumulation"),
    "betas": Variant("(b) betas ** p", "packed", "betas"),
    "betas_scaled": Variant("(b) betas ** p, rate x p", "packed", "betas", scaled=True),
}
# (c): what each side may choose from; the first of each is a run of the table anyway.
BEST: Tuple[Tuple[str, str], ...] = (("unpacked", "unpacked_twice"), ("betas", "packed_twice"))
ALL: Dict[str, Variant] = {
    **VARIANTS,
    "unpacked_twice": Variant("(c) unpacked, rate x 2", "unpacked", rate=2.0),
    "packed_twice": Variant("(c) betas ** p, rate x 2", "packed", "betas", rate=2.0),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    pass


def run(options: Any, runner: Runner) -> None:
    setup = pretraining.setup(options)
    seeds = range(1, options.seeds + 1)

    def measure(cell: Cell) -> List[Row]:
        return setup.run(configuration(setup, ALL[cell.variant], seed=cell.seed))

    chosen = best(runner.run([Cell(name, SELECTION_SEED) for side in BEST for name in side], measure))
    names = list(VARIANTS) + [name for name in chosen if name not in VARIANTS]
    rows = runner.run([Cell(name, seed) for seed in seeds for name in names], measure)
    runner.write_csv("curves.csv", rows)
    factor = setup.store("packed").manifest.packing_factor
    text = report(rows, names) + (
        f"\n(c) each at its better learning rate: {', '.join(ALL[name].words for name in chosen)}.\n"
        f"\np = {factor:.3f}; {pretraining.describe(setup.size, options.seeds)}; {setup.corpus}; {tables.machine()}\n"
    )
    runner.write("table.md", text)
    print("\n" + text)
    if options.plot:
        from ipu_packed_bert.experiments import pictures

        pictures.draw(panels(rows, chosen), runner.folder / "learning_curves.png")
    print(f"{runner.folder}: curves.csv, table.md" + (", learning_curves.png" if options.plot else ""))


def configuration(setup: PretrainingSetup, variant: Variant, *, seed: int):
    """The run of a variant; as many updates as process the sequences of the unpacked run."""
    factor = setup.store("packed").manifest.packing_factor
    divided = factor if variant.adjustment == "betas" else 1.0
    return setup.config(
        variant.store,
        seed=seed,
        steps=math.ceil(setup.size.steps / divided),
        adjustment=variant.adjustment,
        rate=variant.rate * (factor if variant.scaled else 1.0),
    )


def best(rows: List[Row]) -> List[str]:
    """The better candidate of each side, by its last held-out loss."""
    return [min(side, key=lambda name: float(final(rows, name, "mlm_loss")[0])) for side in BEST]


# ---- equivalence -----------------------------------------------------------------------------------------------------


class Equivalence(NamedTuple):
    """Two one-sided tests of |mean difference| < margin (Schuirmann 1987), with pooled variance."""

    difference: float  # mean of the first minus mean of the second
    interval: float  # half width of the confidence interval of 1 - 2 ALPHA
    p_value: float  # the larger of the two; equivalent where it is below ALPHA
    power: float  # chance of finding equivalence if the true difference were 0, at this spread and number of seeds

    @property
    def equivalent(self) -> bool:
        return self.p_value < ALPHA


def equivalence(first: np.ndarray, second: np.ndarray, margin: float = MARGIN) -> Equivalence:
    """Of the values of two variants, one a seed; at least two each.

    A spread of 0 makes the tests exact: p is 0 inside the margin and 1 outside.
    """
    from scipy import stats

    first, second = np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64)
    freedom = len(first) + len(second) - 2
    if len(first) < 2 or len(second) < 2:
        raise ValueError(
            f"an equivalence test needs two seeds of each variant, there are {len(first)} and {len(second)}; add "
            f"--seeds 3"
        )
    difference = float(first.mean() - second.mean())
    squares = float(((first - first.mean()) ** 2).sum() + ((second - second.mean()) ** 2).sum())
    error = math.sqrt(squares / freedom * (1 / len(first) + 1 / len(second)))
    if error == 0.0:
        inside = abs(difference) < margin
        return Equivalence(difference, 0.0, 0.0 if inside else 1.0, 1.0)
    p_value = float(
        max(stats.t.sf((difference + margin) / error, freedom), stats.t.cdf((difference - margin) / error, freedom))
    )
    critical = float(stats.t.ppf(1 - ALPHA, freedom))
    return Equivalence(difference, critical * error, p_value, power(margin / error, freedom))


def power(margin_in_errors: float, freedom: int) -> float:
    """Power at a true difference of 0: the mean over the estimated standard errors, r times the true one with r^2
    chi-squared over its degrees of freedom, of P(|difference| < margin - critical x estimated error)."""
    from scipy import stats

    quantiles = (np.arange(4000) + 0.5) / 4000
    ratio = np.sqrt(stats.chi2.ppf(quantiles, freedom) / freedom)
    room = margin_in_errors - stats.t.ppf(1 - ALPHA, freedom) * ratio
    return float(np.mean(np.where(room > 0, 2 * stats.norm.cdf(room) - 1, 0.0)))


def lag(sequences: np.ndarray, losses: np.ndarray, reached: float) -> float:
    """How much of a run a variant lags: 1 minus the share of the sequences after which the reference curve, made
    falling, has reached the loss that the variant ends with; 0 where the variant ends below the curve."""
    falling = np.minimum.accumulate(losses)
    if reached <= falling[-1]:
        return 0.0
    return float(
        1.0 - np.interp(-reached, -falling, sequences) / sequences[-1]
    )  # negative: np.interp wants rising abscissae


# ---- what is shown ---------------------------------------------------------------------------------------------------


def report(rows: List[Row], names: Sequence[str]) -> str:
    unpacked = final(rows, "unpacked", "mlm_loss")
    curve = columns(rows, "unpacked", "sequences").mean(axis=0), columns(rows, "unpacked", "mlm_loss").mean(axis=0)
    rate = (final(rows, "unpacked", "sequences") / final(rows, "unpacked", "seconds")).mean()
    lines = []
    for name in names:
        losses, sequences, seconds = (final(rows, name, value) for value in ("mlm_loss", "sequences", "seconds"))
        reference = name == "unpacked"
        lines.append(
            [
                ALL[name].words,
                tables.spread(losses, 4),
                "" if reference else tables.signed(float(losses.mean() - unpacked.mean()), 4),
                "" if reference else f"{100 * lag(*curve, float(losses.mean())):.0f} %",
                f"{sequences.mean():,.0f}",
                tables.spread(seconds, 1),
                f"{(sequences / seconds).mean() / rate:.2f}",
            ]
        )
    text = tables.markdown(
        ["run", "held-out MLM loss", "against unpacked", "lags by", "sequences", "seconds", "sequences/s, ratio"], lines
    )
    if len(unpacked) < 2:
        return text + "\nOne seed: no equivalence test.\n"
    found = equivalence(final(rows, "accumulation", "mlm_loss"), unpacked)
    verdict = "equivalent" if found.equivalent else "not shown to be equivalent"
    return text + (
        f"\n(a) against unpacked: difference {found.difference:+.4f} ± {found.interval:.4f} nats ({1 - 2 * ALPHA:.0%} "
        f"interval), margin "
        f"{MARGIN}: {verdict}, p = {found.p_value:.2g} (two one-sided tests); power {found.power:.2f} at a true "
        f"difference of 0.\n"
    )


def panels(rows: List[Row], chosen: Sequence[str]):
    from ipu_packed_bert.experiments.pictures import Curve, Panel

    def curves(x: str, shown: Sequence[str]) -> List[Curve]:
        return [
            Curve(
                ALL[name].words,
                columns(rows, name, x),
                columns(rows, name, "mlm_loss"),
                dashed=name.startswith("unpacked"),
            )
            for name in shown
        ]

    loss, first, rest = (
        "held-out MLM loss, unpacked",
        ["unpacked", "accumulation"],
        ["unpacked", "betas", "betas_scaled"],
    )
    return [
        Panel("same sequences in an update", "sequences processed", loss, curves("sequences", first)),
        Panel("p times the sequences in an update", "sequences processed", loss, curves("sequences", rest)),
        Panel(
            "time",
            "seconds of training",
            loss,
            curves("seconds", first + [name for name in chosen if name not in first]),
        ),
    ]
