"""The fastest plans that fit a pod: packed-bert plan --search.

A plan is a micro-batch, the IPUs of a replica, the placement of the layers, the room of products on each IPU, the parts
of the vocabulary projection, the mask, the packing depth and whether layers are recomputed. What an update learns from
stays: as many packs as the configuration has, within `UPDATE_DIFFERS`. Memory is that of `plan`, whose verdict decides;
the rest is asked of the cycle model. Three rounds, so that few graphs are traced:

1. micro-batches, IPUs of a replica, placements and recomputation, with the configuration's mask and depth;
2. the best few with each mask and depth;
3. the best few with each number of parts of the vocabulary projection, and with room for products in steps of 1 %.

Each IPU gives its products all the room that the verdict leaves it: with more room no product has a slower plan.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

from ipu_packed_bert.cycles.calibration import Calibration
from ipu_packed_bert.cycles.workload import Machine
from ipu_packed_bert.data.factors import PackingFactor
from ipu_packed_bert.planning.plan import FULLEST_THAT_RAN, IPU_BYTES, RunPlan, largest_that_fits, plan
from ipu_packed_bert.settings.pretraining import Config, ConfigError, check_accumulation, cross_check
from ipu_packed_bert.settings.schema import check_on_ipus

# Room for the temporary values of products, shares of an IPU: from the least that was published (TensorFlow, BERT-large
# at 512) to PopLibs' own default.
ROOMS = (0.05, 0.10, 0.15, 0.20, 0.30, 0.40, 0.60)
UPDATE_DIFFERS = 0.02  # packs of an update, from the configuration's
MOST_IPUS = 16  # of a replica
_MOST_PARTS = 8  # of the vocabulary projection
MICRO_BATCHES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96, 128, 192, 256)
DEPTHS = (2, 3, 4, 6, 8)
KEPT, REFINED = 3, 6  # plans that go on to the next round, and to the last

_UNPROMISING = 0.98  # a depth that packs so much worse is not looked at: its graph is no faster by as much

# Why a plan is none; `Outcome.failures` counts them.
NO_ROOM = "an IPU has no room for products beside the rest"
NOT_FILLED = "an update has fewer micro-batches than the pipeline has stages"
OTHER_UPDATE = f"an update would differ by more than {UPDATE_DIFFERS:.0%}"
REFUSED = "the configuration's rules refuse it"

_FactorOf = Callable[[str, Optional[int]], PackingFactor]  # of a packer and a packing depth


class _Fails(Exception):
    """Why a choice is no plan."""


class _Choice(NamedTuple):
    """What is varied."""

    ipus_per_replica: int
    micro_batch: int
    layers_per_ipu: Tuple[int, ...]
    recompute: bool
    mask: str
    packer: str
    depth: Optional[int]
    parts: int  # of the vocabulary projection


class Found(NamedTuple):
    """A plan that fits, and what the model says of it."""

    config: Config
    made: RunPlan
    rate: float  # sequences a second, of all replicas
    rate_lower: float
    rate_upper: float
    days: float  # of the whole run


class SearchOutcome(NamedTuple):
    base: Optional[Found]  # the configuration as written; None where it does not fit, or is for another pod
    best: List[Found]  # the fastest first
    tried: int
    failures: Dict[str, int]


class Search:
    """One search, over plans for `ipus` IPUs."""

    def __init__(
        self,
        base: Config,
        machine: Machine,
        calibration: Calibration,
        factor_of: _FactorOf,
        *,
        ipus: int,
        depths: Sequence[int] = (),
        after_each: Callable[[], Any] = lambda: None,
    ):
        """depths: beside the configuration's. after_each: is called for each plan that fits."""
        self.base, self.machine, self.calibration, self.factor_of = base, machine, calibration, factor_of
        self.ipus, self.depths, self._after_each = ipus, depths, after_each
        self.packs = base.batch.micro_batch * base.batch.gradient_accumulation * base.placement.replicas
        self.sequences = base.run.steps * base.expected_sequences_per_update(self._factor(base).value)
        self.found: Dict[Tuple, Found] = {}
        self.failures: Counter = Counter()
        self.tried: Dict[_Choice, None] = {}

    def _factor(self, config: Config) -> PackingFactor:
        return self.factor_of(config.data.packer, config.data.max_sequences_per_pack)

    # Rounds -----------------------------------------------------------------------------------------------------------

    def run(self) -> SearchOutcome:
        base = None
        if self.base.ipus == self.ipus:
            made = plan(self.base, packing_factor=self._factor(self.base).value)
            if made.fits:
                base = self._consider(self.base)
                self._attempt(choice_of(self.base), fine=True)
        for choice in self._first_round():
            self._attempt(choice)
        for found in self._best()[:KEPT]:
            for choice in self._second_round(choice_of(found.config)):
                self._attempt(choice)
        for found in self._best()[:KEPT]:
            for parts in self._parts():
                self._attempt(choice_of(found.config)._replace(parts=parts))
        for found in self._best()[:REFINED]:
            self._attempt(choice_of(found.config), fine=True)
        return SearchOutcome(base, self._best(), len(self.tried), dict(self.failures))

    def _best(self) -> List[Found]:
        """The fastest first, one for each micro-batch, placement and way of keeping activations.

        Of equally fast ones the one that changes the least.
        """
        start = choice_of(self.base)

        def order(found: Found) -> Tuple[float, int]:
            return -found.rate, sum(one != other for one, other in zip(choice_of(found.config), start))

        fastest: Dict[Tuple, Found] = {}
        for found in sorted(self.found.values(), key=order):
            fastest.setdefault(choice_of(found.config)[:4], found)
        return list(fastest.values())

    def _first_round(self) -> Iterator[_Choice]:
        start = choice_of(self.base)
        for ipus_per_replica in _powers_of_two(min(self.ipus, MOST_IPUS)):
            for recompute in (True, False):
                for layers in _placements(self.base.model.num_layers, ipus_per_replica):
                    choice = start._replace(
                        ipus_per_replica=ipus_per_replica, recompute=recompute, layers_per_ipu=layers
                    )
                    largest = largest_that_fits(MICRO_BATCHES[-1] + 1, partial(self._has_room, choice))
                    if largest is None:
                        self._fails(choice._replace(micro_batch=1), NO_ROOM)
                        continue
                    for size in MICRO_BATCHES:
                        if largest / 2 <= size <= largest:
                            yield choice._replace(micro_batch=size)

    def _second_round(self, choice: _Choice) -> Iterator[_Choice]:
        packings: List[Tuple[str, Optional[int]]] = [(choice.packer, choice.depth)]
        most = _UNPROMISING * self.factor_of(*packings[0]).value
        for deeper in sorted(self.depths):  # a deeper one that packs no better only has more heads to compute
            factor = self.factor_of("optimal", deeper).value
            if factor > most:
                packings.append(("optimal", deeper))
                most = factor
        for packer, depth in packings:
            for mask in ("product", "additive"):
                yield choice._replace(mask=mask, depth=depth, packer=packer)

    def _parts(self) -> List[int]:
        rows = self.base.model.vocabulary_size
        return [parts for parts in range(1, _MOST_PARTS + 1) if rows % parts == 0]

    # One plan ---------------------------------------------------------------------------------------------------------

    def _attempt(self, choice: _Choice, *, fine: bool = False) -> None:
        """fine: room for products in steps of 1 %."""
        if choice in self.tried and not fine:
            return
        try:
            config = self._configured(choice, fine=fine)
        except _Fails as why:
            self._fails(choice, str(why))
            return
        self.tried[choice] = None
        self._consider(config)

    def _fails(self, choice: _Choice, why: str) -> None:
        if choice not in self.tried:
            self.tried[choice] = None
            self.failures[why] += 1

    def _consider(self, config: Config) -> Found:
        key = (choice_of(config), config.placement.available_memory_proportion)
        if key not in self.found:
            self.found[key] = self._modelled(config)
            self._after_each()
        return self.found[key]

    def _configured(self, choice: _Choice, *, fine: bool) -> Config:
        """The configuration of a choice. Raises Fails where it is no plan."""
        roomy = self._with_choice(choice)
        packs = roomy.batch.micro_batch * roomy.batch.gradient_accumulation * roomy.placement.replicas
        if abs(packs / self.packs - 1) > UPDATE_DIFFERS:
            raise _Fails(OTHER_UPDATE)
        factor = self._factor(roomy).value
        try:
            check_accumulation(roomy, factor)
        except ConfigError:
            raise _Fails(NOT_FILLED) from None
        rooms = []
        for memory in plan(roomy, packing_factor=factor).memory:
            left = FULLEST_THAT_RAN - memory.total / IPU_BYTES
            room = int(100 * left) / 100 if fine else max((each for each in ROOMS if each <= left), default=0.0)
            if room < ROOMS[0]:
                raise _Fails(NO_ROOM)
            rooms.append(min(room, ROOMS[-1]))
        placement = replace(roomy.placement, available_memory_proportion=tuple(rooms))
        config = replace(roomy, placement=placement)
        if cross_check(config):
            raise _Fails(REFUSED)
        check_on_ipus(config)
        return config

    def _with_choice(self, choice: _Choice) -> Config:
        """With the least room for products."""
        base = self.base
        replicas = self.ipus // choice.ipus_per_replica
        data = base.data
        if (choice.packer, choice.depth) != (data.packer, data.max_sequences_per_pack):
            # Another packing is another data set.
            folder = f"{data.directory}_{choice.packer}_depth_{choice.depth}"
            data = replace(data, packer=choice.packer, max_sequences_per_pack=choice.depth, directory=folder)
        engine = base.engine
        if engine.recomputes(ipus=True) != choice.recompute:
            engine = replace(engine, recompute_layers=choice.recompute)
        return replace(
            base,
            data=data,
            engine=replace(engine, mask=choice.mask),
            batch=replace(
                base.batch,
                micro_batch=choice.micro_batch,
                gradient_accumulation=max(1, round(self.packs / (choice.micro_batch * replicas))),
            ),
            placement=replace(
                base.placement,
                replicas=replicas,
                ipus_per_replica=choice.ipus_per_replica,
                layers_per_ipu=choice.layers_per_ipu,
                available_memory_proportion=(ROOMS[0],) * choice.ipus_per_replica,
                embedding_serialization_factor=choice.parts,
                # One replica has nobody to share with; a configuration of one says nothing of several.
                replicated_tensor_sharding=replicas > 1
                and (base.placement.replicated_tensor_sharding or base.placement.replicas == 1),
            ),
        )

    def _has_room(self, choice: _Choice, micro_batch: int) -> bool:
        config = self._with_choice(choice._replace(micro_batch=micro_batch))
        # A plan checks the accumulation, which has nothing to do with room: one that is long enough for any.
        config = replace(config, batch=replace(config.batch, gradient_accumulation=1 << 20))
        return bool(plan(config, packing_factor=1.0).fits)

    def _modelled(self, config: Config) -> Found:
        factor = self._factor(config).value
        made = plan(config, packing_factor=factor)
        pipeline, accumulation = self.machine.pipeline(config), config.accumulation(factor)
        lower, rate, upper = self.calibration.draws.throughput(
            lambda parameters: pipeline.sequences_per_second(accumulation, factor, parameters)
        )
        return Found(config, made, rate, lower, upper, self.sequences / rate / 86400)


def choice_of(config: Config) -> _Choice:
    placement = config.placement
    return _Choice(
        placement.ipus_per_replica,
        config.batch.micro_batch,
        tuple(placement.layers_per_ipu),
        config.engine.recomputes(ipus=True),
        config.engine.mask,
        config.data.packer,
        config.data.max_sequences_per_pack,
        placement.embedding_serialization_factor,
    )


def _powers_of_two(most: int) -> List[int]:
    return [1 << bits for bits in range(most.bit_length())]


def _placements(num_layers: int, ipus: int) -> List[Tuple[int, ...]]:
    """Layers of each IPU: any number on the first, which has embeddings and heads, and the others as equal as can be.

    Where they cannot be equal the later ones have more: an earlier one keeps activations of more micro-batches.
    """
    if ipus == 1:
        return [(num_layers,)]
    found = []
    for first in range(num_layers // ipus + 1):
        share, more = divmod(num_layers - first, ipus - 1)
        found.append((first, *(share + (number >= ipus - 1 - more) for number in range(ipus - 1))))
    return found
