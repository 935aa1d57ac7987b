"""The stages of a build, each of which continues where a former run of it stopped.

plan -> examples -> packing -> assignment -> sorted by shard -> shards -> ready -> in place
"""

from __future__ import annotations

import json
import shutil
import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from pack_data.building.assignment import assign
from pack_data.building.assignment_on_disk import assign_on_disk, parts_groups, places_of_parts
from pack_data.building.existing_data_set import is_built
from pack_data.building.held_out import HELD_OUT, TRAINING, TRAINING_DIGEST, held_out_folder, split_overfull
from pack_data.building.inputs import BuildSide, Files, VocabularyFile, one_sided, open_input
from pack_data.building.options import BuildOptions
from pack_data.building.runner import TaskRunner
from pack_data.building.tasks import (
    RunningTotals,
    ShardTask,
    SortTask,
    SpilledRun,
    file_of,
    lengths_of_part,
    make_shard,
    places_names,
    read_notes,
    remove_and_build_again,
    save_array,
    sort_part,
    write_json,
)
from pack_data.building.work_folder import HELD_OUT_WORK, PLAN, announce, check_out, clear, complete
from pack_data.cli.command import progress_bar
from pack_data.packers import get_packer
from pack_data.packing.histogram import LengthHistogram
from pack_data.packing.packing import Packing
from pack_data.reading.fields import Fields, read_object
from pack_data.reading.files import sha256_of, write_atomically
from pack_data.reading.npy import map_array, read_array
from pack_data.solver.free_slots import longest_first
from pack_data.store.data_set import (
    Manifest,
    PackStore,
    StoredFile,
    stored_file,
    write_manifest,
    write_table,
)
from pack_data.store.packs import PREDICTION, PackSchema, predictions_per_pack
from pack_data.text.vocabulary import load_either, load_tokenizer, load_vocabulary

# Token positions in one shard, so that a worker's memory does not depend on S.
SLOTS_PER_SHARD = 1 << 22
# Rows of the parts' indices in memory at a time; one has 24 bytes, and becomes a tuple of three numbers.
_INDEX_ROWS = 1 << 18
_LOOK = 1.0  # seconds between two looks at what is made
# Of the tokens, and of the rows without a limit on depth: above it a build says so.
_MUCH_UNKNOWN, _MANY_ROWS = 0.05, 1.05

_Note = Dict[str, Any]


class Built(NamedTuple):
    """A data set, its packing with the time it took to solve (the recipe in the data set leaves that out), the
    seconds of each stage (none for "commit" where nothing had to be built), and a line for each thing that whoever
    builds should know."""

    store: PackStore
    packing: Packing
    seconds: Dict[str, float]
    remarks: Tuple[str, ...] = ()


class TaskShare(NamedTuple):
    """Task `number` of `tasks`: which parts, groups of files and shards are its own."""

    number: int = 0
    tasks: int = 1

    def distance(self, number: int) -> int:
        """How many tasks this one is from the one that this part belongs to."""
        return (number - self.number) % self.tasks

    def has(self, number: int) -> bool:
        return not self.distance(number)


class NotBegunError(ValueError):
    """The build must be begun by a task that has the work folder for itself."""


class Stages:
    """One build in its work folder."""

    def __init__(
        self, options: BuildOptions, work: Path, runner: TaskRunner, tasks_beside: Optional[bool] = None
    ) -> None:
        """tasks_beside: whether other tasks of this build may be at work now; None: it is not built in tasks."""
        self.options, self.work, self.runner = options, work, runner
        self.tasks_beside = tasks_beside
        self.out = Path(options.out)
        self.example_options = options.example_options()
        self.seconds: Dict[str, float] = {}
        places: List[Tuple[Optional[str], Path, Path]] = [(None, work, self.out)]
        if options.held_out:
            held_out = held_out_folder(self.out)
            check_out(held_out, list(options.given_files().values()))
            places = [(TRAINING, work, self.out), (HELD_OUT, work / HELD_OUT_WORK, held_out)]
        self.sides = [BuildSide(name, folder, out) for name, folder, out in places]
        self.input = open_input(options, self.sides)
        self._sources: Files = []
        self._vocabulary = VocabularyFile(0, None)
        self._parts_schema: PackSchema

    @contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - start

    def run(self) -> Built:
        """All stages in turn."""
        if not self.begin():
            return Built(PackStore.open(self.out), Packing.load(self.out / "recipe.json"), self.seconds)
        self.count(TaskShare())
        self.recipe()
        self.deal(TaskShare())
        return self.commit()

    def _remarks(self, packing: Packing) -> Iterator[str]:
        options, depth = self.options, packing.max_sequences_per_pack
        texts = [note["unknown"] for side in self.sides for note in side.notes if "unknown" in note]
        unknown, tokens = (sum(numbers) for numbers in zip(*texts)) if texts else (0, 0)
        if unknown > _MUCH_UNKNOWN * tokens:
            yield (
                f"{unknown / tokens:.0%} of the text's tokens are [UNK], which its vocabulary cannot spell: give one "
                "made for such text (--vocabulary or --tokenizer), or none, and one is trained on it"
            )
        chosen = depth == options.max_sequences_per_pack and not options.recipe
        if chosen and options.packer != "none" and packing.largest_depth == depth:
            fewest = sum(count for _, count in longest_first(LengthHistogram(packing.placed()), None))
            if packing.packs > _MANY_ROWS * fewest:
                yield (
                    f"depth {depth} costs {packing.packs / fewest:.1f} times the rows here: "
                    "--max-sequences-per-pack unlimited"
                )

    def _read(self, path: Path) -> Fields:
        """What the build noted for itself."""
        return read_object(path, way_out=remove_and_build_again(self.work))

    # ---- the plan: what is built, and whether a former build of the same was stopped --------------------------------

    def begin(self) -> bool:
        """Plans what is built, unless a former build of the same, or another task of it, has. False where it is built.

        Empties the work folder unless it belongs to this very build. ValueError where another data set would be
        replaced unasked, and NotBegunError where that is left to a task that is alone.
        """
        options = self.options
        with self._timed("examples"):
            path = self.work / PLAN
            before = self._read(path) if path.exists() else None
            seen = self.input.seen()
            if before is not None and seen is not None and before.tree.get("seen") == seen:
                files = [[str(value) for value in entry] for entry in before.tree["files"]]
            else:
                files = self.input.files()
            self._sources = files
            if options.vocabulary is not None:
                load_vocabulary(options.vocabulary, options.lower_case)
            if options.tokenizer is not None:
                tokenizer = load_tokenizer(options.tokenizer)
                if options.whole_word_masking:
                    tokenizer.continues  # noqa: B018  ValueError where words cannot be told
            given = options.given_files()
            plan = {
                "options": json.loads(json.dumps(options.deciding())),
                "sources": self._sources,
                "given": {name: sha256_of(path) for name, path in given.items()},
            }
            continued = before is not None and {**before.tree, "files": 0, "seen": 0} == {**plan, "files": 0, "seen": 0}
            if not options.overwrite and not continued:
                # Every side is looked at before one is found to be missing.
                there = [is_built(side, plan, list(given.values())) for side in self.sides]
                if all(there):
                    return False
            if self.tasks_beside is not None and not continued:
                if before is not None:
                    raise ValueError(
                        f"{self.work}: holds another build, of other files or with other options; end that one, or "
                        "remove the folder"
                    )
                if self.tasks_beside:
                    raise NotBegunError(f"{self.work}: nothing is counted yet; run --stage count")
            if not self.tasks_beside:
                self._check_room()
            if not continued:
                clear(self.work)
                write_json(path, {**plan, "files": files, "seen": seen})
            for side in self.sides:
                side.ready.mkdir(parents=True, exist_ok=True)
            self._vocabulary = self.input.vocabulary()
            self._parts_schema = replace(self.input.schema(self._vocabulary.size), multiple_of=options.multiple_of)
        return True

    def _check_room(self) -> None:
        """Refuses to begin what the disk cannot hold: sorted sequences and shards lie there together at the end."""
        already = sum(path.stat().st_size for path in self.work.rglob("*"))
        needed, free = self.input.need() - already, shutil.disk_usage(self.work).free
        if needed > free:
            raise ValueError(
                f"{self.out}: the build needs about {needed / 1e6:,.0f} MB of disk, {free / 1e6:,.0f} MB "
                "are free; make room or choose another --out"
            )

    def _made_with(self, side: BuildSide) -> Dict[str, Any]:
        """The manifest's account of what went in."""
        account = {**self._read(self.work / "examples.json").tree}
        if side.name == HELD_OUT:
            account[TRAINING_DIGEST] = f"{self.sides[0].digest:016x}"
        made: Dict[str, Any] = {
            "options": self.options.deciding(),
            "sources": self._sources,
            "parts": len(side.notes),
            "documents": sum(note["documents"] for note in side.notes),
            **account,
        }
        given = self._read(self.work / PLAN).values_of("given", Fields.text)
        if given:
            made["given"] = given
        if side.name is not None:
            made["side"] = side.name
        return made

    # ---- examples ---------------------------------------------------------------------------------------------------

    def count(self, share: TaskShare) -> None:
        """The sequences of every side, spilled, with a note for each part."""
        with self._timed("examples"), progress_bar(self.input.parts, "examples", unit=" parts") as bar:
            if self.is_gathered:
                return
            own = (task for task in self.uncounted() if share.has(task.part))
            with _growing(bar, self.input.made):
                for _ in self.runner.map(self.input.make, own):
                    pass

    def uncounted(self) -> Iterator[Any]:
        """The tasks whose parts are not there."""
        for task in self.input.tasks(self._parts_schema, self._vocabulary.size):
            if not (Path(task.work) / file_of(self.input.note, task.part, "json")).exists():
                yield task

    @property
    def is_gathered(self) -> bool:
        """Whether all parts are made, and numbered."""
        return (self.work / "examples.json").exists()

    def _gather(self) -> None:
        """All parts of every side. ValueError where some are missing, or where there is nothing to pack."""
        if not self.is_gathered:
            if next(self.uncounted(), None) is not None:
                raise ValueError(f"{self.work}: not all is counted; --missing N names the tasks to run")
            write_json(self.work / "examples.json", self.input.gathered())
        self._read_notes()

    def load(self) -> bool:
        """Reads what `recipe` has left, for a process that has not run it. False where it is not complete."""
        if not self.is_gathered:
            return False
        self._read_notes()
        return all(map(_is_assigned, self.sides))

    def _read_notes(self) -> None:
        for side in self.sides:
            side.notes = read_notes(side.work, "examples-*.json")
        empty = [side for side in self.sides if not side.sequences]
        if empty:
            read = sum(note["documents"] for side in self.sides for note in side.notes)
            for side in self.sides:
                for path in side.work.glob("examples-*.json"):
                    path.unlink()  # so that nothing stays behind
            if len(empty) < len(self.sides):
                raise ValueError(one_sided(self.options, empty[0], read))
            what = self.options.source or self.options.corpus
            raise ValueError(f"{what}: the corpus is empty: no text in {read} documents; nothing to pack")
        notes = [note for side in self.sides for note in side.notes]
        size = self.input.settled_vocabulary_size(notes, self._vocabulary.size)
        self._vocabulary = self._vocabulary._replace(size=size)

    # ---- lengths to packing and assignment --------------------------------------------------------------------------

    def recipe(self) -> List[Packing]:
        """One packing of all sequences of each side, and the place of each."""
        with self._timed("examples"):
            self._gather()
        packings: List[Packing] = []
        fixed: Optional[PackSchema] = None  # packs of the held-out side have the shape of the training side's
        for side in self.sides:
            with self._timed("packing"):
                packing, fixed = self._packing(side, fixed)
            packings.append(packing)
            with self._timed("assignment"):
                self._assignment(side, packing)
        return packings

    def _packing(self, side: BuildSide, fixed: Optional[PackSchema] = None) -> Tuple[Packing, PackSchema]:
        """The recipe, solved once, and the schema of its packs; both stay in the work folder.

        fixed: for the held-out side, the schema of the training side's packs, which its packs must have.
        """
        parts_schema = self._parts_schema
        recipe, schema_file = side.work / "recipe.json", side.work / "schema.json"
        if not schema_file.exists():
            S = self.options.max_sequence_length
            counts, masked = np.zeros(S + 1, dtype=np.int64), np.zeros(S + 1, dtype=np.int64)
            for part, totals in enumerate(_totals(side)):
                lengths, predictions = lengths_of_part(side.work, part, totals, parts_schema)
                counts += np.bincount(lengths, minlength=S + 1)
                np.maximum.at(masked, lengths, predictions)
            packing = self._solve(side, LengthHistogram(counts, side.out.name), fixed)
            if fixed:
                packing = split_overfull(packing, masked, fixed.max_predictions_per_pack)
            packing.save(recipe)
            depth = packing.max_sequences_per_pack or packing.largest_depth
            P = 0
            if parts_schema.on(PREDICTION):
                needed = max(int(masked[list(strategy)].sum()) for strategy in packing.strategies)
                P = predictions_per_pack(self.example_options.max_predictions_per_sequence, depth, needed)
            schema = replace(
                self.input.packed_schema(parts_schema, side.notes),
                max_sequences_per_pack=depth,
                max_predictions_per_pack=P,
            )
            write_json(schema_file, (fixed or schema).to_json())
        return Packing.load(recipe), PackSchema.from_json(self._read(schema_file))

    def _solve(self, side: BuildSide, histogram: LengthHistogram, fixed: Optional[PackSchema]) -> Packing:
        if self.options.recipe is not None and side is self.sides[0]:
            packing = Packing.load(self.options.recipe)
        else:
            pack, depth = get_packer(self.options.packer), self.options.max_sequences_per_pack
            packing = pack(histogram, max_sequences_per_pack=depth)
            if fixed and packing.largest_depth > fixed.max_sequences_per_pack:
                packing = pack(histogram, max_sequences_per_pack=fixed.max_sequences_per_pack)
        packing.check(histogram)
        return packing

    def _assignment(self, side: BuildSide, packing: Packing) -> None:
        work, totals, parts_schema = side.work, _totals(side), self._parts_schema
        seed = self.options.seed, self.options.epoch
        if _is_assigned(side):
            return
        if len(parts_groups(totals)) > 1:
            assign_on_disk(work, work / "recipe.json", parts_schema, totals, seed, self.runner)
            return
        lengths = [lengths_of_part(work, part, total, parts_schema)[0] for part, total in enumerate(totals)]
        assignment = assign(np.concatenate(lengths), packing, seed)
        for name, values in zip(places_names(0), assignment):
            save_array(work / name, values)

    # ---- sequences to packs -----------------------------------------------------------------------------------------

    def deal(self, share: TaskShare) -> None:
        """Every sequence of this share's shards into its pack.

        A shard takes from all sorted parts. So a task sorts its own parts, then those that no other has sorted; which
        of two tasks sorts a part makes no difference.
        """
        for side in self.sides:
            self._shards(side, share)

    def undealt(self) -> List[int]:
        """The shards that are not there, of all sides."""
        return [shard for side in self.sides for shard in self._undealt(side)]

    def _undealt(self, side: BuildSide) -> List[int]:
        packing, schema = self._packing(side)
        done = {
            note["number"] for note in read_notes(side.work, "shard-*.json") if (side.ready / note["file"]).exists()
        }
        return [number for number in range(-(-packing.packs // _packs_per_shard(schema))) if number not in done]

    def _shards(self, side: BuildSide, share: TaskShare) -> None:
        """Sorts the parts by shard and gathers the shards of this share."""
        parts_schema, (packing, schema) = self._parts_schema, self._packing(side)
        work, notes, per_shard = side.work, side.notes, _packs_per_shard(schema)
        count = -(-packing.packs // per_shard)
        totals = _totals(side)
        sort_tasks = [
            SortTask(
                str(work.resolve()),
                part,
                totals[part],
                group,
                first,
                self.input.packed_schema(parts_schema, notes[part : part + 1]),
                schema,
                per_shard,
                count,
            )
            for part, (group, first) in enumerate(places_of_parts(totals))
            if not (work / file_of("sorted", part, "npy")).exists()
        ]
        sort_tasks.sort(key=lambda task: share.distance(task.part))
        with self._timed("sorting"), progress_bar(
            len(notes), "sorting", unit=" parts", done=len(notes) - len(sort_tasks)
        ) as bar:
            for _ in self.runner.map(sort_part, sort_tasks):
                bar.update(1)

        def packs_of(number: int) -> int:
            return min(per_shard, packing.packs - number * per_shard)

        def shard_tasks(missing: Sequence[int]) -> Iterator[ShardTask]:
            # The indices of all parts together grow with the square of the sequences: some shards at a time.
            some = max(1, _INDEX_ROWS // len(notes))
            for first, group in groupby(missing, lambda number: number // some * some):
                last = min(first + some, count)
                runs = [
                    self._run_ends(work, part, total, count, first, last).tolist() for part, total in enumerate(totals)
                ]
                for number in group:
                    between = (
                        (RunningTotals(*rows[number - first]), RunningTotals(*rows[number + 1 - first]))
                        for rows in runs
                    )
                    of_shard = tuple(
                        SpilledRun(work.resolve() / file_of("sorted", part, "bin"), total, *ends)
                        for part, (total, ends) in enumerate(zip(totals, between))
                        if ends[0] != ends[1]
                    )
                    yield ShardTask(
                        str(work.resolve()),
                        str(side.ready.resolve()),
                        number,
                        packs_of(number),
                        of_shard,
                        schema,
                        per_shard,
                    )

        missing = self._undealt(side)
        done = packing.packs - sum(map(packs_of, missing))
        with self._timed("writing"), progress_bar(packing.packs, "packs", unit=" packs", done=done) as bar:
            for note in self.runner.map(make_shard, shard_tasks(list(filter(share.has, missing)))):
                bar.update(note["packs"])

    def _run_ends(self, work: Path, part: int, totals: RunningTotals, shards: int, first: int, last: int) -> np.ndarray:
        """The running totals of a sorted part where shards `first` to `last` begin, int64 [last - first + 1, 3]."""
        path, way_out = work / file_of("sorted", part, "npy"), remove_and_build_again(self.work)
        index = map_array(path, way_out=way_out)
        if index.dtype == np.int64 and index.shape == (shards + 1, 3):
            ends: np.ndarray = np.array(index[first : last + 1])
            if (
                (np.diff(ends, axis=0) >= 0).all()
                and (first or not ends[0].any())
                and (last < shards or tuple(ends[-1]) == totals)
            ):
                return ends
        raise ValueError(f"{path}: is not the index of its part; {way_out}")

    def commit(self) -> Built:
        """The data sets take their places; to be called when every shard is there."""
        with self._timed("commit"):
            packings = [self._make_ready(side) for side in self.sides]
            announce(self.work, [(side.work, side.out) for side in self.sides])
            complete(self.work)
            store = PackStore.open(self.out)
        return Built(store, packings[0], self.seconds, tuple(self._remarks(packings[0])))

    def _make_ready(self, side: BuildSide) -> Packing:
        """Puts the rest of the data set's files into the folder of what is ready. Returns the packing."""
        vocabulary, (packing, schema) = self._vocabulary, self._packing(side)
        shards = read_notes(side.work, "shard-*.json")
        if (sum(note["digest"] for note in shards) - sum(note["digest"] for note in side.notes)) % (1 << 64):
            raise ValueError(
                f"{side.work}: the packs do not hold exactly the sequences that were made; the disk lost data, "
                "remove the folder and build again"
            )
        counts = np.zeros(schema.max_sequence_length + 1, np.int64)
        files = ["recipe.json"]
        # Solving takes another time in every build; the file is to be the same.
        replace(packing, solve_seconds=0.0).save(side.ready / files[0])
        if vocabulary.path is not None:
            files.append(vocabulary.path.name)
            write_atomically(side.ready / vocabulary.path.name, vocabulary.path.read_bytes())

        def tables() -> Iterator[np.ndarray]:
            for note in shards:
                path, way_out = side.work / file_of("shard", note["number"], "npy"), remove_and_build_again(self.work)
                table = read_array(path, dtype=schema.lengths_dtype, dimensions=1, way_out=way_out)
                counts[1:] += np.bincount(table["lengths"].reshape(-1), minlength=len(counts))[1:]
                yield table

        lengths = write_table(side.ready, "lengths", schema.lengths_dtype, tables(), packing.packs)
        write_manifest(
            side.ready,
            Manifest(
                schema=schema,
                sequences=packing.sequences,
                packs=packing.packs,
                tokens=int(counts @ np.arange(len(counts))),
                histogram=tuple(counts.tolist()),
                digest=side.digest,
                shards=tuple(StoredFile.from_json(Fields.of(shard, side.work, "")) for shard in shards),
                lengths=lengths,
                algorithm=packing.algorithm,
                lower_bound=packing.lower_bound,
                lp_bound=packing.lp_bound,
                seed=self.options.seed,
                max_predictions_per_sequence=self.example_options.max_predictions_per_sequence,
                vocabulary_size=vocabulary.size,
                vocabulary_sha256=load_either(vocabulary.path).sha256 if vocabulary.path else "",
                files=tuple(stored_file(side.ready, name) for name in files),
                made_with=self._made_with(side),
            ),
        )
        return packing


@contextmanager
def _growing(bar: Any, made: Callable[[], int]) -> Iterator[None]:
    """Shows on the bar, every second, how many there are: a task that reads a large file makes many before it ends."""
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(_LOOK):
            bar.update(max(0, made() - bar.n))

    thread = threading.Thread(target=watch, daemon=True)
    if not bar.disable:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        if not bar.disable:
            thread.join()


def _packs_per_shard(schema: PackSchema) -> int:
    return max(1, SLOTS_PER_SHARD // schema.max_sequence_length)


def _totals(side: BuildSide) -> List[RunningTotals]:
    return [RunningTotals(*note["totals"]) for note in side.notes]


def _is_assigned(side: BuildSide) -> bool:
    """Whether all sequences have their places."""
    groups = parts_groups(_totals(side))
    return all((side.work / places_names(group.number)[1]).exists() for group in groups)
