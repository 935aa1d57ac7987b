"""Streams and samplers that are resumed three times: what was seen is what an undisturbed pass sees, item for item.

    python -m tests.resumes streams [--every 7] [--seed S]       # also: runs, all

Each case is stopped at every triple of places, also twice at the same one, and continued from its state as JSON by new
objects: with other numbers of workers, ranks and rows wherever a state may be loaded with others. If a process number
belongs to the state, another process must refuse it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any, Callable, Iterator, List, NamedTuple
from unittest import mock

import numpy as np
import pytest

from pack_data import PackMixture, PackStream, pack_dataset
from pack_data.batching.plans import WAYS, BatchOptions
from pack_data.batching.sampler import IndexBatchSampler, MicroBatchSampler
from pack_data.batching.shard_files import ShardFiles
from pack_data.batching.share import Share
from pack_data.cli.command import ArgumentParser, positive_int, run_main
from tests.kills import memory_folder
from tests.pack_data.batching.test_share import SOURCES, files
from tests.token_sequences import random_sequences

S = 16  # slots of a row
SEQUENCES = random_sequences(17, S)
RANKS = 2
EPOCHS = 2


class Opened(NamedTuple):
    """Items of a pass, each a list of what was seen, and the state after those that were taken."""

    items: Iterator[List[Any]]
    state: Callable[[], Any]


# A case is a function (state, rng) -> Opened. It opens a state, None for the beginning; draws choose what may change.


# ---- loaders


class InOneProcess:
    """Requests batches in the order in which a DataLoader with workers does."""

    def __init__(self, batch_sampler, num_workers, prefetch_factor):
        self.batch_sampler = batch_sampler
        self.num_workers = num_workers
        self.prefetch_factor = prefetch_factor

    def __len__(self):
        return len(self.batch_sampler)

    def __iter__(self):
        iter(self.batch_sampler)
        return Requests(iter(self.batch_sampler), self.num_workers * self.prefetch_factor)


class Requests:
    def __init__(self, source, in_advance):
        self.source = source
        self.waiting = []
        for _ in range(in_advance):
            self.request()

    def request(self):
        self.waiting += itertools.islice(self.source, 1)

    def __iter__(self):
        return self

    def __next__(self):
        self.request()
        if not self.waiting:
            raise StopIteration
        return self.waiting.pop(0)


def loader_of(sampler, workers):
    return sampler.counted(InOneProcess(sampler, workers, 2) if workers else sampler)


# ---- samplers


def sampler_case(make, by_updates=False):
    """Two epochs of a sampler, step by step of all ranks: each rank with its sampler, or all with one."""

    def loop(sampler, workers, rng):
        loader = loader_of(sampler, workers)
        sets_epoch = by_updates or rng.random() < 0.5
        for epoch in range(sampler.epoch, EPOCHS):
            if sets_epoch:
                sampler.set_epoch(epoch)
            batches = iter(loader)
            if by_updates:
                for steps in sampler.updates():
                    yield from ((epoch, left, next(batches)) for left in reversed(range(steps)))
            else:
                yield from ((epoch, batch) for batch in batches)

    def case(state, rng):
        in_turn = not by_updates and rng.random() < 0.3
        samplers = [make(None)] if in_turn else list(map(make, range(RANKS)))
        if state is not None:
            for sampler in samplers:
                sampler.load_state_dict(state)
        workers = rng.randrange(4)
        loops = [loop(sampler, workers, rng) for sampler in samplers]
        return Opened(map(list, zip(*(loops * RANKS if in_turn else loops))), lambda: of_all(samplers))

    return case


def of_all(ranks, state="state_dict"):
    """Return the state of every rank."""
    states = [getattr(rank, state)() for rank in ranks]
    assert states == states[:1] * len(ranks), f"the states of the ranks differ: {states}"
    return states[0]


def index_sampler(way, lengths, rank):
    return IndexBatchSampler(way, lengths, BatchOptions(2, S, RANKS, seed=3), rank, longer="split")


def micro_batch_sampler(rank):
    return MicroBatchSampler(list(map(len, SEQUENCES)), 8, rank, ranks=RANKS, max_tokens=2 * S, seed=1)


def packed_rows(first, last):
    examples = [{"input_ids": tokens} for tokens in SEQUENCES[first:last]]
    return pack_dataset(examples, max_sequence_length=S)


def mixture_case(state, rng):
    """The rows of a mixture, in updates of any number of rows on any number of ranks."""
    mixture = PackMixture([packed_rows(0, 10), packed_rows(10, 17)], [2, 1], seed=4)
    ranks = rng.choice((1, 2, 3))
    of_ranks = [mixture.batches(6, rank=rank, ranks=ranks, state=state) for rank in range(ranks)]
    workers = rng.randrange(4)
    updates = zip(*[loader_of(batches, workers) for batches in of_ranks])
    left = 12 - (0 if state is None else state["place"] // 6)
    items = (list(itertools.chain(*rows)) for rows in itertools.islice(updates, left))
    return Opened(items, lambda: of_all(of_ranks))


# ---- streams


def new_folder(folder):
    return Path(tempfile.mkdtemp(dir=folder))


def files_case(folder, kind):
    paths = files(new_folder(folder), kind)

    def case(state, rng):
        source = ShardFiles(paths)
        if state is not None:
            source.load_state_dict(state)
        return Opened(([example["input_ids"]] for example in source), source.state_dict)

    return case


def stream_case(folder, kind, number, of):
    """The packs of a process's share of a source."""
    source = SOURCES[kind](new_folder(folder))

    def case(state, rng):
        share = Share(source, number, of)
        stream = PackStream(12, max_sequences_per_pack=3, buffer_sequences=5)
        if state is not None:
            refused_by(Share(source, number, of + 1), state["share"])
            share.load_state_dict(state["share"])
            stream.load_state_dict(state["stream"])

        def packs():
            if rng.random() < 0.5:
                yield from stream.packs((example, len(example["input_ids"])) for example in share)
                return
            yield from stream.ready()
            for example in share:
                stream.put(example, len(example["input_ids"]))
                yield from stream.ready()
            stream.finish()
            yield from stream.ready()

        items = ([pack.examples, stream.waits] for pack in packs())
        return Opened(items, lambda: {"share": share.state_dict(), "stream": stream.state_dict()})

    return case


class Worker(NamedTuple):
    """Like torch's WorkerInfo."""

    id: int
    num_workers: int


def torch_stream_case(folder, kind, worker):
    """Two passes over the packs of one worker of rank 1 of 2, of pieces of longer examples."""
    from padding_free import streams

    source = SOURCES[kind](new_folder(folder))

    def opened(ranks):
        return streams.PackedStream(source, 5, rank=1, ranks=ranks, longer="split", buffer_sequences=4)

    with mock.patch.object(streams, "get_worker_info", lambda: worker):
        total = 2 * len(list(opened(2)))

    def case(state, rng):
        stream = opened(2)
        seen = 0
        if state is not None:
            seen = state["seen"]
            stream.load_state_dict(state["stream"])
            if state["stream"]["process"] is not None:
                other = opened(3)
                other.load_state_dict(state["stream"])
                with pytest.raises(ValueError, match="ranks and workers"):
                    next(iter(other))

        def items():
            nonlocal seen
            packs = iter(())
            while seen < total:
                with mock.patch.object(streams, "get_worker_info", lambda: worker):
                    pack = next(packs, None)
                    packs = packs if pack else iter(stream)
                if pack:
                    seen += 1
                    examples = [{name: list(values) for name, values in example.items()} for example in pack]
                    yield [examples, stream.longer.examples, stream.longer.pieces, stream.longer.tokens]

        return Opened(items(), lambda: {"seen": seen, "stream": stream.state_dict()})

    return case


def refused_by(other, state):
    with pytest.raises(ValueError, match="ranks and workers"):
        other.load_state_dict(state)


# ---- training data


class Accessor:
    """Like PopTorch's: the batches of a reader, some of them read ahead."""

    def __init__(self, reader):
        self._tensors = iter(reader)
        self._ahead = list(itertools.islice(self._tensors, 2))

    def __next__(self):
        self._ahead.append(next(self._tensors))
        return self._ahead.pop(0)

    def terminate(self):
        self._tensors.close()


def batches_case(folder):
    """The updates of a run's data, by any number of processes, read ahead by a thread or by another process."""
    from ipu_packed_bert.data.global_batches import GlobalBatches, Layout, StoredPacks
    from ipu_packed_bert.engine.ipu.feed import BatchesAhead
    from pack_data.store.data_set import PackStore
    from tests.tiny_runs import tiny_data

    store = PackStore.open(tiny_data(folder / "data", sequences=40))

    def case(state, rng):
        parts = rng.choice((1, 2, 4))
        layout = Layout(("input_ids",), {}, 1, 4, 4)
        of_parts = [
            GlobalBatches(StoredPacks(store, seed=2), layout, share=(part, parts), prefetch=rng.randint(1, 3))
            for part in range(parts)
        ]
        if rng.random() < 0.3:
            of_parts = [BatchesAhead(batches, read_ahead=Accessor) for batches in of_parts]
        if state is not None:
            for batches in of_parts:
                batches.load_state(state)

        def items():
            # Six updates of the first epoch, and some of the second.
            while of_parts[0].position < (1, 16):
                shares = [next(batches)["input_ids"].copy() for batches in of_parts]
                yield np.concatenate(shares).tolist()

        return Opened(items(), lambda: of_all(of_parts, "state"))

    return case


# ---- the law


def cases(folder):
    """Yield all cases, each with a function that makes it, which skips what needs a missing package."""
    lengths = [2 * len(tokens) for tokens in SEQUENCES]
    for way in WAYS:
        yield f"IndexBatchSampler {way}", partial(sampler_case, partial(index_sampler, way, lengths))
    rows = packed_rows(0, len(SEQUENCES))
    of_rows = partial(index_sampler, "RandomSampling+Padding", rows)
    yield "IndexBatchSampler of a PackDataset", partial(sampler_case, of_rows)
    yield "MicroBatchSampler", partial(sampler_case, micro_batch_sampler)
    yield "MicroBatchSampler, by updates", partial(sampler_case, micro_batch_sampler, True)
    yield "PackMixture", lambda: mixture_case
    yield "GlobalBatches", partial(batches_case, folder)
    for kind in ("jsonl", "jsonl.gz", "parquet"):
        yield f"ShardFiles {kind}", partial(files_case, folder, kind)
    for kind in SOURCES:
        for number, of in ((0, 1), (1, 2), (1, 3)):
            yield f"PackStream of {kind}, {number} of {of}", partial(stream_case, folder, kind, number, of)
        for worker in (None, Worker(0, 2), Worker(1, 2)):
            yield f"PackedStream of {kind}, {worker}", partial(torch_stream_case, folder, kind, worker)


def undisturbed(case):
    return list(case(None, random.Random(0)).items)


def triples(items):
    """Return every three places between the items, in order."""
    return list(itertools.combinations_with_replacement(range(items + 1), 3))


def resumed(case, stops, rng):
    """Return what is seen if the pass is stopped at these places."""
    state = None
    seen = []
    for stop in stops:
        opened = case(state, rng)
        seen += itertools.islice(opened.items, stop - len(seen))
        state = json.loads(json.dumps(opened.state()))
    return seen + list(case(state, rng).items)


def faults(case, whole, places, seed):
    """Yield "" for each triple of places that changes nothing, else what is wrong."""
    for stops in places:
        story = f"stopped at {stops} of {len(whole)}"
        try:
            seen = resumed(case, stops, random.Random(f"{seed} {stops}"))
        except (ValueError, AssertionError, RuntimeError, pytest.fail.Exception) as error:
            yield f"{story}: {' '.join(str(error).split())[:300]}"
            continue
        differing = [number for number, (one, other) in enumerate(itertools.zip_longest(whole, seen)) if one != other]
        yield f"{story}: other items from number {differing[0]} on" if differing else ""


def try_streams(every, seed):
    """Try all cases; return the numbers of cases and of triples, and of each wrong case the first fault."""
    tried = 0
    done = 0
    wrong = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, make in cases(Path(folder)):
            try:
                case = make()
            except pytest.skip.Exception as reason:
                print(f"skipped: {name}: {reason}")
                continue
            whole = undisturbed(case)
            results = list(faults(case, whole, triples(len(whole))[::every], f"{seed} {name}"))
            tried += 1
            done += len(results)
            for line in filter(None, results):
                if name not in wrong:
                    print(f"wrong: {name}: {line}", flush=True)
                wrong.setdefault(name, line)
    return tried, done, wrong


def main(argv=None):
    parser = ArgumentParser(
        prog="python -m tests.resumes", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("streams", "runs", "all"))
    parser.add_argument("--every", type=positive_int, default=1, help="try each n-th triple (default 1: every one)")
    parser.add_argument(
        "--runs", type=positive_int, default=200, help="runs that are stopped three times (default 200)"
    )
    parser.add_argument("--first", type=int, default=0, help="the number of the first run (default 0)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    failed = False
    if args.what in ("streams", "all"):
        tried, done, wrong = try_streams(args.every, args.seed)
        print(f"{done:,} times three resumes of {tried} streams and samplers, {len(wrong)} of these wrong", flush=True)
        failed |= bool(wrong)
    if args.what in ("runs", "all"):
        failed |= report_runs(args.runs, args.first, args.seed)
    return int(failed)


def report_runs(number, first, seed):
    """Try runs and print the result; return True if one is wrong."""
    from tests.resumed_runs import try_runs

    done = 0
    stopped = 0
    wrong = 0
    with memory_folder("resumes-") as folder:
        for early, line in try_runs(folder, number=number, seed=seed, first=first):
            done += 1
            stopped += early
            wrong += bool(line)
            print(f"wrong: {line}" if line else f"{done} runs, {stopped} stops, {wrong} wrong", flush=True)
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(run_main(main))
