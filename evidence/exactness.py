"""Packed and unpacked training give the same weights, beyond the paper: the same sequences in the same updates.

Both runs start from the same weights and take LAMB's steps.  The packed one gets packs, the unpacked one the very
sequences of those packs, each alone in its row.  With losses normalised over the update nothing parts them but
rounding; with the usual mean over each micro-batch they part from the first update, because a sequence's weight then
depends on its neighbours.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple, Union

import numpy as np
import torch

from evidence import packed_runs
from evidence.packed_runs import PretrainingSetup
from evidence.runner import Cell, Row, Runner
from evidence.statistics import Verdict
from evidence.writer import Shown, Table, curve, curves, small
from ipu_packed_bert.data.global_batches import Batch
from ipu_packed_bert.engine.host import HostEngine
from ipu_packed_bert.model.optimizer import build_optimizer, learning_rate
from ipu_packed_bert.settings.pretraining import Config
from ipu_packed_bert.tasks.pretraining import Pretraining
from pack_data.cli.command import counted
from pack_data.display.picture import Picture
from pack_data.store.data_set import PackStore
from pack_data.store.packs import FIELDS, assemble, decode, disassemble

SUMMARY = (
    "One model trained on packs and one on the same sequences unpacked, in the same updates, in float64 and float32:\n"
    "relative L2 distance of all parameters after 100 updates (the promise: below 1e-6 in float64), and how far they\n"
    "part with the usual means over micro-batches, which is the control. Exit status 1 where the promise is broken,\n"
    "or where the control keeps it as well.\n\n"
    "Data of the other experiments' size; hidden 32, 2 layers, 8 packs an update (quick: 5 updates)."
)

UPDATES = {"quick": 5, "minutes": 100, "hours": 100, "full": 1000}
SIZES, DEFAULT = UPDATES, "minutes"
PACKS, MICRO_BATCH = 8, 2
LIMIT = 1.0e-6  # relative L2 over all parameters, float64, after 100 updates
FAR = 100 * LIMIT  # where the control has to come out


class Normalisation(NamedTuple):
    words: str
    dtype: torch.dtype
    whole_update: bool  # losses normalised over the update, else over each micro-batch


VARIANTS: Dict[str, Normalisation] = {
    "update_float64": Normalisation("over the update, float64", torch.float64, True),
    "update_float32": Normalisation("over the update, float32", torch.float32, True),
    "micro_batch_float64": Normalisation("over each micro-batch, float64", torch.float64, False),
}
CLAIM, CONTROL = "update_float64", "micro_batch_float64"


def settings(options: Any) -> Dict[str, Any]:
    return {
        **packed_runs.settings(options),
        "updates": UPDATES[options.size],
        "packs": PACKS,
        "micro_batch": MICRO_BATCH,
    }


def run(options: Any, runner: Runner) -> int:
    setup = packed_runs.setup(options)
    updates = UPDATES[options.size]
    runner.keep_facts({"packing_factor": setup.packing_factor("packed")})
    cells = [Cell(name, seed) for seed in range(1, options.seeds + 1) for name in VARIANTS]
    runner.run(cells, lambda cell: part(setup, VARIANTS[cell.variant], seed=cell.seed, updates=updates))
    return runner.show(shown(runner.folder), plot=options.plot)


def part(setup: PretrainingSetup, variant: Normalisation, *, seed: int, updates: int) -> List[Row]:
    """Relative L2 distance between the two models after some of the updates, and their losses in those updates."""
    config = configuration(setup, seed=seed, updates=updates)
    packed, unpacked = engine(config, variant.dtype), engine(config, variant.dtype)
    rows = []
    with setup.store("packed") as store:
        for number, (packs, alone) in enumerate(same_sequences(store, seed=seed, updates=updates), 1):
            rate = learning_rate(number - 1, config)
            scaled = [scales(batch, variant) for batch in (packs, alone)]
            results = [each.step(batch, rate) for each, batch in zip((packed, unpacked), scaled)]
            if number in (1, 2, 5, 10, 20, 50) or number % 100 == 0 or number == updates:
                rows.append(
                    {
                        "update": number,
                        "distance": distance(packed, unpacked),
                        "packed_loss": results[0].loss,
                        "unpacked_loss": results[1].loss,
                    }
                )
    return rows


def configuration(setup: PretrainingSetup, *, seed: int, updates: int) -> Config:
    config = setup.config("packed", seed=seed)
    model = replace(config.model, hidden_size=32, num_layers=2, num_heads=2, intermediate_size=128)
    return replace(
        config,
        model=model,
        batch=replace(config.batch, micro_batch=MICRO_BATCH),
        optimizer=replace(config.optimizer, name="lamb", learning_rate=1.5e-2),
        run=replace(config.run, steps=updates),
    )


def engine(config: Config, dtype: torch.dtype) -> HostEngine:
    """A host engine whose weights, moments and arithmetic are of this type, from the initial weights of the seed."""
    made = HostEngine(config, Pretraining(config), packing_factor=1.0)
    made.model.to(dtype)
    made.optimizer = build_optimizer(made.model, config.optimizer, betas=config.betas(1.0))
    return made


def same_sequences(store: PackStore, *, seed: int, updates: int) -> Iterator[Tuple[Batch, Batch]]:
    """PACKS random packs, and their sequences each alone in a row, for every update."""
    alone_schema = replace(store.schema, max_sequences_per_pack=1)
    random = np.random.default_rng(seed)
    for _ in range(updates):
        records = store.records(random.choice(len(store), PACKS, replace=False))
        sequences = disassemble(store.schema, records)
        rows = len(sequences.lengths)
        alone = assemble(
            alone_schema, sequences, np.arange(rows), np.zeros(rows, np.int64), -(-rows // MICRO_BATCH) * MICRO_BATCH
        )
        packed, unpacked = decode(store.schema, records), decode(alone_schema, alone)
        yield {name: packed[name] for name in FIELDS}, {name: unpacked[name] for name in FIELDS}


def scales(batch: Batch, variant: Normalisation) -> Batch:
    """The batch with the variant's normalisation, in the variant's type."""
    whole = packed_runs.update_scales(batch, MICRO_BATCH)
    scaled = whole if variant.whole_update else packed_runs.micro_batch_means(whole, MICRO_BATCH)
    kind = np.float64 if variant.dtype == torch.float64 else np.float32
    return {**scaled, **{name: scaled[name].astype(kind) for name in ("mlm_scale", "nsp_scale")}}


def distance(first: HostEngine, second: HostEngine) -> float:
    """Relative L2 over all parameters together: |first - second| / |second|."""
    with torch.no_grad():
        pairs = list(zip(first.model.parameters(), second.model.parameters()))
        apart = sum(float((a.double() - b.double()).pow(2).sum()) for a, b in pairs)
        whole = sum(float(b.double().pow(2).sum()) for _, b in pairs)
    return (apart / whole) ** 0.5


# ---- what the cells say ----------------------------------------------------------------------------------------------


class ExactnessShown(Shown):
    """What the finished cells of one folder say."""

    def verdict(self) -> Verdict:
        claim, control = (self.columns(name, "distance") for name in (CLAIM, CONTROL))
        if not claim.size or not control.size:
            return Verdict(False, False, "shows nothing yet: the claim and its control need a finished run each")
        worst, least = float(claim.max()), float(control[:, -1].min())
        if least < FAR:
            return Verdict(
                False, False, f"shows nothing: the control comes out at {least:.1e}, it must exceed {FAR:.0e}"
            )
        kept = worst < LIMIT
        return Verdict(
            True,
            kept,
            f"{'the same' if kept else 'NOT the same'}: at most {worst:.1e} apart within {self.settings['updates']} "
            f"updates, limit {LIMIT:.0e}; the control fails as it must: at least {least:.1e} apart after them",
        )

    @property
    def passes(self) -> bool:
        return self.verdict()[:2] == (True, True)

    def parts(self) -> List[Union[str, Table]]:
        settings = self.settings
        sequences = settings["packs"] * self.facts["packing_factor"]
        seeds = max(len(self.seeds(name)) for name in VARIANTS)
        return [
            self.table(),
            f"Claim: packed and unpacked training give the same weights, in float64. Control: each micro-batch's "
            f"losses as a mean. **{self.verdict().why}.**",
            f"Distance: of all weights together, as a share of their size (relative L2); the largest of "
            f"{counted(seeds, 'seed')}.",
            f"Corpus {settings['corpus']}, {settings['packs']} packs of {settings['max_sequence_length']} slots (about "
            f"{sequences:.0f} sequences) an update, micro-batches of {counted(settings['micro_batch'], 'row')}, LAMB, "
            f"no dropout; {self.facts['machine']}.",
        ]

    def table(self) -> Table:
        """The largest distance over the seeds after some of the updates."""
        measured = {row["update"] for rows in self.cells.values() for row in rows}

        def after(number: int) -> Callable[[str], Optional[str]]:
            def cell(name: str) -> Optional[str]:
                found = self.columns(name, "distance")
                return small(found[self.columns(name, "update") == number].max()) if found.size else None

            return cell

        updates = sorted(measured & {1, 10, 100, 1000, self.settings["updates"]})
        columns = [(f"after {counted(number, 'update')}", after(number)) for number in updates]
        return Table([("losses normalised", lambda name: VARIANTS[name].words), *columns], list(VARIANTS))

    def pictures(self) -> Dict[str, Sequence[Picture]]:
        lines = [
            curve(
                variant.words + (" (control)" if name == CONTROL else ""),
                self.columns(name, "update"),
                self.columns(name, "distance"),
            )
            for name, variant in VARIANTS.items()
            if self.seeds(name)
        ]
        title = "How far packed training is from unpacked training, losses normalised"
        y = "distance of the weights (relative L2)"
        level = ("limit of the claim", LIMIT)
        return {"distances": [curves(title, "updates", y, lines, [level], log=10)]} if lines else {}


shown = ExactnessShown
