"""The stages of a build, each of which continues where an earlier run of it stopped.

plan -> examples -> packing -> assignment -> sorted by shard -> shards -> ready -> in place
"""

from __future__ import annotations

import json
import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain, groupby
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Tuple

import numpy as np

from pack_data.building.account import ACCOUNT, Counts, tokens_line
from pack_data.building.assignment import assign
from pack_data.building.assignment_on_disk import assign_on_disk, parts_groups, places_of_parts
from pack_data.building.existing_data_set import is_built
from pack_data.building.held_out import (
    HELD_OUT,
    TRAINING,
    TRAINING_DIGEST,
    held_out_folder,
)
from pack_data.building.inputs import (
    BuildSide,
    BuildVocabulary,
    check_unchanged,
    one_sided,
    open_input,
)
from pack_data.building.options import AUTO, BuildOptions
from pack_data.building.runner import TaskRunner
from pack_data.building.tasks import (
    RunningTotals,
    ShardLayout,
    ShardTask,
    SortTask,
    SpilledRun,
    file_of,
    lengths_of_part,
    make_shard,
    places_names,
    read_notes,
    remove_and_build_again,
    sort_part,
    write_json,
)
from pack_data.building.work_folder import HELD_OUT_WORK, PLAN, announce, check_out, clear, complete
from pack_data.cli.terminal import progress_bar
from pack_data.packers import DEEPEST, get_packer, packs_at_depth
from pack_data.packing.histogram import LengthHistogram
from pack_data.packing.packing import Packing
from pack_data.reading.durable import free_bytes, write_array
from pack_data.reading.fields import Fields, read_object
from pack_data.reading.files import sha256_of
from pack_data.reading.npy import map_array, read_array
from pack_data.reading.words import counted
from pack_data.solver.free_slots import cost_of_depth
from pack_data.solver.search import fewest_packs, smallest_depth
from pack_data.store.data_set import PackStore, StoredFile, finish_data_set
from pack_data.store.packs import PREDICTION, PackSchema, predictions_per_pack
from pack_data.text.spelling import Spelling
from pack_data.text.vocabulary import load_tokenizer, load_vocabulary

# Note that every part is made, with the number of parts of each side.
_GATHERED = "examples.json"
# Slots in one shard, so that a worker's memory does not depend on S.
SLOTS_PER_SHARD = 1 << 22
# Rows of the parts' indices in memory at a time: a row has 24 bytes in the file and becomes a tuple of three numbers.
_INDEX_ROWS = 1 << 18
# Seconds between two updates of a progress bar while a task is at work.
_REFRESH_SECONDS = 1.0


class Built(NamedTuple):
    """A data set, its packing, the seconds of each stage, and a line for each remark to the user.

    The packing has the time that it took to solve, which the recipe in the data set omits. There are no seconds for
    "commit" if nothing had to be built.
    """

    store: PackStore
    packing: Packing
    seconds: Dict[str, float]
    remarks: Tuple[str, ...] = ()


class TaskShare(NamedTuple):
    """Task `number` of `tasks`: it does the parts, groups of files and shards with its number modulo `tasks`."""

    number: int = 0
    tasks: int = 1

    def has(self, number: int) -> bool:
        """Return True if the part or shard belongs to this task."""
        return number % self.tasks == self.number


class NotBegunError(ValueError):
    """The build must be begun by a task that has the work directory for itself."""


class Stages:
    """One build in its work directory."""

    def __init__(
        self,
        options: BuildOptions,
        work: Path,
        runner: TaskRunner,
        tasks_beside: Optional[bool] = None,
    ) -> None:
        """tasks_beside: whether other tasks of this build may be at work now; None: it is not built in tasks."""
        self.options = options
        self.work = work.absolute()
        self.runner = runner
        self.tasks_beside = tasks_beside
        self.out = Path(options.out)
        self.example_options = options.example_options()
        self.seconds: Dict[str, float] = {}
        if options.held_out:
            held_out = held_out_folder(self.out)
            check_out(held_out, list(options.given_files().values()))
            self.sides = [
                BuildSide(TRAINING, self.work, self.out),
                BuildSide(HELD_OUT, self.work / HELD_OUT_WORK, held_out),
            ]
        else:
            self.sides = [BuildSide(None, self.work, self.out)]
        self.input = open_input(options, self.sides)
        self._plan: Dict[str, Any] = {}
        self._vocabulary = BuildVocabulary(0)
        self._parts_schema: PackSchema

    @contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - start

    def run(self) -> Built:
        """Run all stages in turn."""
        if not self.begin():
            return Built(
                PackStore.open(self.out), Packing.load(self.out / "recipe.json"), self.seconds
            )
        self.count(TaskShare())
        self.recipe()
        self.deal(TaskShare())
        return self.commit()

    def _remarks(self, packing: Packing) -> Iterator[str]:
        """Yield lines about the input, a vocabulary that does not fit it, and a depth that needs many more rows."""
        yield from self.input.remarks()
        notes = chain.from_iterable(side.notes for side in self.sides)
        counts = [note["spelling"] for note in notes if "spelling" in note]
        yield from Spelling.total(counts).remarks()
        asked = self.options.vocabulary_size
        made = self._vocabulary.size
        is_trained = self._vocabulary.files is not None and self.input.given_vocabulary is None
        if is_trained and made < asked:
            yield (
                f"vocabulary: {made:,} tokens, of {asked:,} asked for; the text has no more words and pieces that "
                "occur twice"
            )
        options = self.options
        depth = packing.max_sequences_per_pack
        if options.recipe or options.packer == "none":
            return
        if depth == options.max_sequences_per_pack or not packs_at_depth(options.packer, None):
            cost = cost_of_depth(packing)
            if cost:
                yield cost
        elif options.max_sequences_per_pack == AUTO:
            histogram = LengthHistogram(packing.placed())
            excess = fewest_packs(histogram, depth) / fewest_packs(histogram, None) - 1
            yield (
                f"depth {depth}: the smallest that needs at most 1% more packs than no limit ({excess:.1%}); "
                "--max-sequences-per-pack changes it"
            )

    def _read(self, path: Path) -> Fields:
        """Read a JSON file of the work directory."""
        return read_object(path, way_out=remove_and_build_again(self.work))

    # ---- the plan: what is built, and whether an earlier build of the same was stopped ------------------------------

    def begin(self) -> bool:
        """Plan the build, unless an earlier run of it, or another task of it, has. Return False if it is already built.

        The work directory is emptied unless it belongs to this very build. ValueError if another data set would be
        replaced without --overwrite, and NotBegunError if the plan is left to a task that is alone.
        """
        with self._timed("examples"):
            path = self.work / PLAN
            before = self._read(path) if path.exists() else None
            # Every task begins, and would read all files for their checksums.
            seen = None if self.tasks_beside is None else self.input.seen()
            self._plan = self._make_plan(before, seen)
            self.input.sources = self._plan["sources"]
            self.input.given = self._plan["given"]
            is_continued = before is not None and before.tree.items() >= self._plan.items()
            if not is_continued:
                if not self.options.overwrite and self._is_built():
                    return False
                if self.tasks_beside is not None and before is not None:
                    raise ValueError(
                        f"{self.work}: holds another build, of other files or with other options; finish that one, or "
                        "remove the directory"
                    )
                if self.tasks_beside:
                    raise NotBegunError(f"{self.work}: nothing is counted yet; run --stage count")
            if not self.tasks_beside:
                self._check_room()
            if not is_continued:
                clear(self.work)
                write_json(path, {**self._plan, "seen": seen})
            for side in self.sides:
                side.ready.mkdir(parents=True, exist_ok=True)
            self._vocabulary = self.input.vocabulary()
            schema = self.input.schema(self._vocabulary.size)
            self._parts_schema = replace(schema, multiple_of=self.options.multiple_of)
        return True

    def _make_plan(self, before: Optional[Fields], seen: Any) -> Dict[str, Any]:
        """Return options and files of the build; `before`, the plan of an earlier run, saves reading the same files."""
        if before is not None and seen is not None and before.tree.get("seen") == seen:
            sources = before.list_of("sources", Fields.texts, 2)
        else:
            sources = self.input.files()
        self._check_vocabulary()
        return {
            "options": json.loads(json.dumps(self.options.deciding())),
            "sources": sources,
            "given": {name: sha256_of(file) for name, file in self.options.given_files().items()},
        }

    def _is_built(self) -> bool:
        given_files = list(self.options.given_files().values())
        # Every side is checked, because is_built refuses another data set in its place.
        built = [is_built(side, self._plan, given_files) for side in self.sides]
        return all(built)

    def _check_vocabulary(self) -> None:
        """Raise ValueError if the vocabulary or the tokenizer cannot be used."""
        options = self.options
        if options.vocabulary is not None:
            load_vocabulary(options.vocabulary, options.lower_case)
        if options.tokenizer is not None:
            tokenizer = load_tokenizer(options.tokenizer)
            if options.whole_word_masking:
                tokenizer.continues  # noqa: B018  ValueError if words cannot be told apart

    def _check_room(self) -> None:
        """Refuse a build that the disk cannot hold: at its end, sorted sequences and shards are there together."""
        already = sum(path.stat().st_size for path in self.work.rglob("*"))
        needed = self.input.need() - already
        free = free_bytes(self.work)
        if free is not None and needed > free:
            raise ValueError(
                f"{self.out}: the build needs about {needed / 1e6:,.0f} MB of disk, {free / 1e6:,.0f} MB "
                "are free; make room or choose another --out"
            )

    def _made_with(self, side: BuildSide) -> Dict[str, Any]:
        """Return the manifest's record of options and sources."""
        made_with: Dict[str, Any] = {
            "options": self.options.deciding(),
            "sources": self._plan["sources"],
            "parts": len(side.notes),
            "documents": sum(note["documents"] for note in side.notes),
            **self._gathered().object("omitted").tree,
        }
        if ACCOUNT in made_with:
            made_with[ACCOUNT] = _account(side, made_with[ACCOUNT])
        if side.name == HELD_OUT:
            made_with[TRAINING_DIGEST] = f"{self.sides[0].digest:016x}"
        if self._plan["given"]:
            made_with["given"] = self._plan["given"]
        if side.name is not None:
            made_with["side"] = side.name
        return made_with

    # ---- examples ---------------------------------------------------------------------------------------------------

    def count(self, share: TaskShare) -> None:
        """Spill the sequences of every side, with a note for each part."""
        with self._timed("examples"), progress_bar(
            self.input.parts, "examples", unit=" parts"
        ) as bar:
            if self.is_gathered:
                return
            tasks_of_share = (task for task in self.uncounted() if share.has(task.part))
            with _growing(bar, self.input.made):
                for _ in self.runner.map(self.input.make, tasks_of_share):
                    pass

    def uncounted(self) -> Iterator[Any]:
        """Yield the tasks whose parts are missing."""
        for task in self.input.tasks(self._parts_schema, self._vocabulary):
            if not (task.work / file_of(self.input.note, task.part, "json")).exists():
                yield task

    @property
    def is_gathered(self) -> bool:
        """True if all parts are made and numbered."""
        return (self.work / _GATHERED).exists()

    def _gather(self) -> None:
        """Assign numbers to all parts of every side; raise ValueError if parts or sequences are missing."""
        if not self.is_gathered:
            if next(self.uncounted(), None) is not None:
                raise ValueError(
                    f"{self.work}: not all is counted; --missing N names the tasks to run"
                )
            omitted = self.input.gathered()
            parts = [len(read_notes(side.work, "examples")) for side in self.sides]
            write_json(self.work / _GATHERED, {"omitted": omitted, "parts": parts})
        self._read_notes()

    def _gathered(self) -> Fields:
        """Read the note that every part is made."""
        return self._read(self.work / _GATHERED)

    def load(self) -> bool:
        """Read what `recipe` has left, for a process that has not run it. Return False if it is not complete."""
        if not self.is_gathered:
            return False
        self._read_notes()
        return all(map(_is_assigned, self.sides))

    def _read_notes(self) -> None:
        parts_of_sides = self._gathered().integers("parts", len(self.sides))
        for side, parts in zip(self.sides, parts_of_sides):
            side.notes = read_notes(side.work, "examples")
            if len(side.notes) != parts:
                raise ValueError(
                    f"{side.work}: has {len(side.notes)} of {counted(parts, 'file')} examples-*.json; "
                    f"{remove_and_build_again(side.work)}"
                )
        empty = [side for side in self.sides if not any(part.sequences for part in side.totals)]
        if empty:
            documents = sum(note["documents"] for side in self.sides for note in side.notes)
            for side in self.sides:
                for path in side.work.glob("examples-*.json"):
                    path.unlink()  # so that nothing is left to continue with
            if len(empty) < len(self.sides):
                raise one_sided(self.options, empty[0], documents)
            source = self.options.source or self.options.corpus
            raise ValueError(
                f"{source}: the corpus is empty: no text in {counted(documents, 'document')}; nothing to pack"
            )
        notes = [note for side in self.sides for note in side.notes]
        size = self.input.settled_vocabulary_size(notes, self._vocabulary.size)
        self._vocabulary = self._vocabulary._replace(size=size)

    # ---- lengths to packing and assignment --------------------------------------------------------------------------

    def recipe(self) -> List[Packing]:
        """Find one packing of all sequences of each side, and the place of each sequence."""
        with self._timed("examples"):
            self._gather()
        packings: List[Packing] = []
        training_schema: Optional[PackSchema] = None
        for side in self.sides:
            with self._timed("packing"):
                packing, training_schema = self._packing(side, training_schema)
            packings.append(packing)
            with self._timed("assignment"):
                self._assignment(side, packing)
        return packings

    def _packing(
        self, side: BuildSide, training_schema: Optional[PackSchema] = None
    ) -> Tuple[Packing, PackSchema]:
        """Return the packing, solved once, and the schema of its packs; both stay in the work directory.

        training_schema: for the held-out side, the schema of the training packs, which its packs must have.
        """
        parts_schema = self._parts_schema
        recipe = side.work / "recipe.json"
        schema_file = side.work / "schema.json"
        if not schema_file.exists():
            S = self.options.max_sequence_length
            counts = np.zeros(S + 1, dtype=np.int64)
            # The most masked tokens of a sequence, by length.
            masked = np.zeros(S + 1, dtype=np.int64)
            for part, totals in enumerate(side.totals):
                lengths, predictions = lengths_of_part(side.work, part, totals, parts_schema)
                counts += np.bincount(lengths, minlength=S + 1)
                np.maximum.at(masked, lengths, predictions)
            packing = self._solve(side, LengthHistogram(counts, side.out.name), training_schema)
            if training_schema:
                packing = _split_overfull(packing, masked, training_schema.max_predictions_per_pack)
            packing.save(recipe)
            schema = training_schema or self._schema(side, packing, masked)
            write_json(schema_file, schema.to_json())
        packing = Packing.from_recipe(self._read(recipe))
        return packing, PackSchema.from_json(self._read(schema_file))

    def _schema(self, side: BuildSide, packing: Packing, masked: np.ndarray) -> PackSchema:
        """Return the schema of the packs. masked[l]: the most masked tokens of a sequence of l tokens."""
        depth = packing.max_sequences_per_pack or packing.largest_depth
        P = 0
        if self._parts_schema.on(PREDICTION):
            needed = max(int(masked[list(strategy)].sum()) for strategy in packing.strategies)
            P = predictions_per_pack(
                self.example_options.max_predictions_per_sequence, depth, needed
            )
        schema = self.input.packed_schema(self._parts_schema, side.notes)
        return replace(schema, max_sequences_per_pack=depth, max_predictions_per_pack=P)

    def _solve(
        self, side: BuildSide, histogram: LengthHistogram, training_schema: Optional[PackSchema]
    ) -> Packing:
        if self.options.recipe is not None and side is self.sides[0]:
            packing = Packing.load(self.options.recipe)
            check_unchanged([str(self.options.recipe)], self._plan["given"]["recipe"])
        else:
            pack = get_packer(self.options.packer)
            packing = pack(histogram, max_sequences_per_pack=self._depth(histogram))
            if training_schema and packing.largest_depth > training_schema.max_sequences_per_pack:
                packing = pack(
                    histogram, max_sequences_per_pack=training_schema.max_sequences_per_pack
                )
        packing.check(histogram)
        return packing

    def _depth(self, histogram: LengthHistogram) -> Optional[int]:
        """Return the packing depth of the options, or the smallest that needs few packs more than unlimited."""
        depth = self.options.max_sequences_per_pack
        if not isinstance(depth, str):
            return depth
        if packs_at_depth(self.options.packer, None):
            return smallest_depth(histogram)
        return DEEPEST[self.options.packer]

    def _assignment(self, side: BuildSide, packing: Packing) -> None:
        """Write the pack and the slot of every sequence."""
        if _is_assigned(side):
            return
        seed = (self.options.seed, self.options.epoch)
        if len(parts_groups(side.totals)) > 1:
            assign_on_disk(side.work, self._parts_schema, side.totals, seed, self.runner)
            return
        lengths = [
            lengths_of_part(side.work, part, totals, self._parts_schema)[0]
            for part, totals in enumerate(side.totals)
        ]
        assignment = assign(np.concatenate(lengths), packing, seed)
        for name, values in zip(places_names(0), assignment):
            write_array(side.work / name, values)

    # ---- sequences to packs -----------------------------------------------------------------------------------------

    def deal(self, share: TaskShare) -> None:
        """Put every sequence of this share's shards into its pack.

        A shard takes from all sorted parts, so a task sorts its own parts and then those that no other task has sorted;
        it makes no difference which of two tasks sorts a part.
        """
        for side in self.sides:
            layout = self._layout(side)
            with self._timed("sorting"):
                self._sort(side, layout, share)
            with self._timed("writing"):
                self._write_shards(side, layout, share)

    def _layout(self, side: BuildSide) -> ShardLayout:
        packing, schema = self._packing(side)
        return ShardLayout(
            schema, packing.packs, max(1, SLOTS_PER_SHARD // schema.max_sequence_length)
        )

    def undealt(self) -> List[int]:
        """Return the numbers of the missing shards of all sides."""
        return [shard for side in self.sides for shard in _missing_shards(side, self._layout(side))]

    def _sort(self, side: BuildSide, layout: ShardLayout, share: TaskShare) -> None:
        """Sort the parts by shard, those of this share first."""
        totals = side.totals
        tasks = []
        for part, (group, first) in enumerate(places_of_parts(totals)):
            if not (side.work / file_of("sorted", part, "npy")).exists():
                part_schema = self.input.packed_schema(
                    self._parts_schema, side.notes[part : part + 1]
                )
                tasks.append(
                    SortTask(side.work, part, totals[part], group, first, part_schema, layout)
                )
        tasks.sort(key=lambda task: (task.part - share.number) % share.tasks)
        done = len(totals) - len(tasks)
        with progress_bar(len(totals), "sorting", unit=" parts", done=done) as bar:
            for _ in self.runner.map(sort_part, tasks):
                bar.update(1)

    def _write_shards(self, side: BuildSide, layout: ShardLayout, share: TaskShare) -> None:
        """Gather the sequences of this share's shards and write their packs."""
        missing = _missing_shards(side, layout)
        done = layout.packs - sum(map(layout.packs_of, missing))
        tasks = self._shard_tasks(side, layout, filter(share.has, missing))
        with progress_bar(layout.packs, "packs", unit=" packs", done=done) as bar:
            for note in self.runner.map(make_shard, tasks):
                bar.update(note["packs"])

    def _shard_tasks(
        self, side: BuildSide, layout: ShardLayout, numbers: Iterator[int]
    ) -> Iterator[ShardTask]:
        # All parts together have as many index rows as parts times shards, so only some shards are looked up at a time.
        shards_at_once = max(1, _INDEX_ROWS // len(side.notes))
        totals = side.totals
        paths = [side.work / file_of("sorted", part, "npy") for part in range(len(totals))]
        for first, group in groupby(
            numbers, lambda number: number // shards_at_once * shards_at_once
        ):
            last = min(first + shards_at_once, layout.shards)
            starts = []
            for part, path in enumerate(paths):
                starts.append(
                    self._starts_of_shards(path, totals[part], layout, first, last).tolist()
                )
            for number in group:
                runs = []
                for part, path in enumerate(paths):
                    start = RunningTotals(*starts[part][number - first])
                    end = RunningTotals(*starts[part][number - first + 1])
                    if start != end:
                        runs.append(SpilledRun(path.with_suffix(".bin"), totals[part], start, end))
                yield ShardTask(side.work, number, tuple(runs), layout)

    def _starts_of_shards(
        self, path: Path, totals: RunningTotals, layout: ShardLayout, first: int, last: int
    ) -> np.ndarray:
        """Return the running totals of a sorted part at the start of shards `first` to `last`, int64 [shards, 3]."""
        way_out = remove_and_build_again(self.work)
        index = map_array(path, way_out=way_out)
        if index.dtype == np.int64 and index.shape == (layout.shards + 1, 3):
            starts: np.ndarray = np.array(index[first : last + 1])
            begins_at_zero = first > 0 or not starts[0].any()
            ends_with_part = last < layout.shards or tuple(starts[-1]) == totals
            if begins_at_zero and ends_with_part and (np.diff(starts, axis=0) >= 0).all():
                return starts
        raise ValueError(f"{path}: is not the index of its part; {way_out}")

    def commit(self) -> Built:
        """Put the data sets in place; to be called when every shard is there."""
        with self._timed("commit"):
            packings = [self._make_ready(side) for side in self.sides]
            announce(self.work, [(side.work, side.out) for side in self.sides])
            complete(self.work)
            store = PackStore.open(self.out)
        return Built(store, packings[0], self.seconds, tuple(self._remarks(packings[0])))

    def _make_ready(self, side: BuildSide) -> Packing:
        """Add the remaining files of the data set to the directory of finished files. Return the packing."""
        packing, schema = self._packing(side)
        notes = read_notes(side.work, "shard")
        if (sum(note["digest"] for note in notes) - side.digest) % (1 << 64):
            raise ValueError(
                f"{side.work}: the packs do not hold exactly the sequences that were made; "
                f"{remove_and_build_again(side.work)}"
            )
        files = ["recipe.json"]
        # Solving takes another time in every build; the file must have the same bytes.
        replace(packing, solve_seconds=0.0).save(side.ready / "recipe.json")
        vocabulary = self._vocabulary
        vocabulary_sha256 = ""
        if vocabulary.files is not None:
            vocabulary_sha256 = vocabulary.files.parse(self.options.lower_case).sha256
            name = self.input.vocabulary_name
            files += [name, *(stating for stating, _ in vocabulary.files.beside)]
            vocabulary.files.write(side.ready / name)

        def tables() -> Iterator[np.ndarray]:
            way_out = remove_and_build_again(self.work)
            for note in notes:
                path = side.work / file_of("shard", note["number"], "npy")
                yield read_array(path, dtype=schema.lengths_dtype, dimensions=1, way_out=way_out)

        finish_data_set(
            side.ready,
            schema,
            [StoredFile.from_json(Fields.of(note, side.work, "")) for note in notes],
            tables(),
            files=files,
            digest=side.digest,
            algorithm=packing.algorithm,
            lower_bound=packing.lower_bound,
            lp_bound=packing.lp_bound,
            seed=self.options.seed,
            max_predictions_per_sequence=self.example_options.max_predictions_per_sequence,
            vocabulary_size=vocabulary.size,
            vocabulary_sha256=vocabulary_sha256,
            made_with=self._made_with(side),
        )
        return packing


def _split_overfull(packing: Packing, masked: np.ndarray, most: int) -> Packing:
    """Return the packing with every pack split that could hold more than `most` masked tokens.

    Held-out packs have the shape of the training packs, which may have room for fewer masked tokens. masked[l]: the
    most masked tokens of any sequence of l tokens, at most `most`.
    """
    assert int(masked.max()) <= most
    packs: List[Tuple[Tuple[int, ...], int]] = []
    for strategy, repeat in zip(packing.strategies, packing.repeats):
        begun: Tuple[int, ...] = ()
        for length in strategy:
            if begun and int(masked[[*begun, length]].sum()) > most:
                packs.append((begun, repeat))
                begun = ()
            begun += (length,)
        packs.append((begun, repeat))
    return Packing.of(
        packing.algorithm,
        LengthHistogram(packing.placed()),
        packing.max_sequences_per_pack,
        packs,
        solve_seconds=packing.solve_seconds,
        lower_bound=packing.lower_bound,
        lp_bound=packing.lp_bound,
        certificate=packing.certificate,
    )


def _account(side: BuildSide, read: Counts) -> Dict[str, int]:
    """Return the account of a side: what was read, and what is in its parts. ValueError if tokens are missing."""
    account = {**read, "sequences": sum(part.sequences for part in side.totals)}
    for note in side.notes:
        of_part = note.get(ACCOUNT, {"tokens_in_sequences": note["totals"][1]})
        for name, count in of_part.items():
            account[name] = account.get(name, 0) + count
    if account["tokens"] != account["tokens_in_sequences"]:
        raise ValueError(
            f"{side.work}: {tokens_line(account)}; {remove_and_build_again(side.work)}"
        )
    return account


def _is_assigned(side: BuildSide) -> bool:
    """Return True if all sequences have their places."""
    return all(
        (side.work / places_names(group.number)[1]).exists() for group in parts_groups(side.totals)
    )


def _missing_shards(side: BuildSide, layout: ShardLayout) -> List[int]:
    notes = read_notes(side.work, "shard")
    done = {note["number"] for note in notes if (side.ready / note["file"]).exists()}
    return [number for number in range(layout.shards) if number not in done]


@contextmanager
def _growing(bar: Any, count_made: Callable[[], int]) -> Iterator[None]:
    """Show on the bar, every second, how many are made: a task that reads a large file makes many before it ends."""
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(_REFRESH_SECONDS):
            bar.update(max(0, count_made() - bar.n))

    thread = threading.Thread(target=watch, daemon=True)
    if not bar.disable:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        if not bar.disable:
            thread.join()
