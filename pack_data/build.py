"""python -m pack_data.build: text in, a packed data set out.

    documents, dealt out to parts -> examples -> histogram -> packing -> assignment -> sorted by shard -> shards -> manifest

Every stage works on parts of a few megabytes and notes what is done in a folder beside the data set (OUT.building). So
memory does not grow with the corpus, a build that was killed continues where it was, and the bytes do not depend on the
number of workers. The data set that was in OUT stays readable until the new manifest takes its place.
"""
from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import random
import shutil
import sys
import time
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence, Set, Tuple, Union

import numpy as np

from pack_data.assignment import assign
from pack_data.bad_records import BadRecords
from pack_data.command import ArgumentParser, parse_depth, positive_int, progress_bar, run_main
from pack_data.corpus import EMBEDDED, Document, content_digest, documents, file_documents, relative_name, source_files
from pack_data.examples import ExampleOptions
from pack_data.formats import parts
from pack_data.formats.detect import open_source
from pack_data.files import write_atomically
from pack_data.histogram import PUBLISHED, LengthHistogram
from pack_data.packers import PACKERS, get_packer
from pack_data.packing import Packing
from pack_data.packs import PREDICTION, PackSchema, default_predictions, predictions_per_pack
from pack_data.runner import DaskRunner, ProcessRunner, SerialRunner, available_cores
from pack_data.spill import SpillFormat, Totals
from pack_data.stages import (ExamplesTask, ShardTask, SortTask, SyntheticTask, examples_name, make_part, make_shard,
                              make_synthetic_part, read_notes, read_text, save_array, shard_name, sort_part, sorted_name, text_name, write_json)
from pack_data.store import Manifest, PackStore, StoredFile, commit, map_table, read_manifest, stored_file, write_table
from pack_data.wordpiece import load_vocabulary, train_vocabulary

# Characters of text in one part (some 8 of the longest documents, thousands of ordinary ones), and characters that wait
# in memory until they are written to their parts.
PART_CHARACTERS, TEXT_IN_MEMORY = 8 << 20, 64 << 20
SYNTHETIC_PART = 1 << 15
# Token positions in one shard, so that a worker's memory does not depend on S.
SLOTS_PER_SHARD = 1 << 22
# For the check of the disk: English text gives a token for about four characters (and a second segment now and then comes
# for nothing), foreign files take about a byte for one; a token takes 2.6 bytes sorted and about as many in its pack.
CHARACTERS_PER_TOKEN, BYTES_PER_TOKEN = 3.5, 5.5


@dataclass(frozen=True)
class BuildOptions:
    """One build. All but `out`, `workers` and `dask` decide the bytes of the data set."""

    out: Union[str, Path]
    corpus: Union[str, Path, None] = EMBEDDED
    vocabulary: Union[str, Path, None] = None        # vocab.txt; None: train one of vocabulary_size on the corpus
    vocabulary_size: int = 8192
    lower_case: bool = True
    max_sequence_length: int = 512
    max_predictions_per_sequence: Optional[int] = None
    packer: str = "nnlshp"
    max_sequences_per_pack: Optional[int] = 3        # None: unlimited
    recipe: Union[str, Path, None] = None            # a packing made before, instead of the packer
    duplication_factor: int = 5
    short_sequence_probability: float = 0.1
    masked_lm_probability: float = 0.15
    seed: int = 0
    epoch: int = 0
    json_field: str = "text"
    document_separator: str = "file"
    synthetic: Optional[str] = None                  # draw lengths from this histogram instead of reading a corpus
    sequences: int = 1_000_000                       # how many, with `synthetic`
    source: Union[str, Path, None] = None            # sequences made elsewhere (pack_data.formats), instead of a corpus
    source_format: str = "auto"
    columns: Tuple[str, ...] = ()                    # Parquet, Arrow: the columns of the sequences; none: all integer lists
    skip_bad: int = 0
    append: bool = False                             # add to the data set in `out`, with the options it was made with
    workers: Optional[int] = None                    # None: one a core
    dask: Optional[str] = None

    def example_options(self) -> ExampleOptions:
        predictions = self.max_predictions_per_sequence
        if predictions is None:
            predictions = default_predictions(self.max_sequence_length, self.masked_lm_probability)
        return ExampleOptions(self.max_sequence_length, predictions, self.duplication_factor, self.short_sequence_probability,
                              self.masked_lm_probability, self.seed)

    def deciding(self) -> Dict[str, Any]:
        """The options that decide the bytes, as they go into the manifest; files stand there by content, not by path."""
        left_out = {"out", "append", "workers", "dask", "corpus", "vocabulary", "recipe", "synthetic" if self.synthetic is None else "",
                    "sequences" if self.synthetic is None else "", "source"}
        if self.source is None:
            left_out |= {"source_format", "columns", "" if self.skip_bad else "skip_bad"}
        return {name: value for name, value in asdict(self).items() if name not in left_out}


def build(options: BuildOptions, progress: Optional[bool] = None) -> PackStore:
    """Builds the data set, or continues a build that was killed, and opens it. ValueError, one line, for what cannot be.

    progress: whether to show bars on stderr; None: where that is a terminal.
    """
    return build_and_report(options, progress).store


class Built(NamedTuple):
    """A data set, its packing with the time it took to solve (the recipe in the data set leaves that out), and the
    seconds of each stage."""

    store: PackStore
    packing: Packing
    seconds: Dict[str, float]


def build_and_report(options: BuildOptions, progress: Optional[bool] = None) -> Built:
    """`build`, with what there is to tell about it."""
    if options.append:
        options = _with_former_options(options)
    options.example_options()
    if options.recipe is None:
        get_packer(options.packer)
    with _work_folder(Path(options.out)) as work:
        runner = _runner(options)
        try:
            return _Build(options, work, runner, progress).run()
        finally:
            runner.close()


def _with_former_options(options: BuildOptions) -> BuildOptions:
    """What is appended is made as the rest was: same vocabulary, lengths, masking, packer and depth."""
    out = Path(options.out)
    manifest = read_manifest(out)
    if "options" not in manifest.made_with or "recipe.json" not in [entry.file for entry in manifest.files]:
        raise ValueError(f"{out}: was not made by pack_data.build, so nothing can be appended; build it anew with --from {out}")
    made_with = manifest.made_with["options"]
    algorithm = Packing.load(out / "recipe.json").algorithm
    kept = {name: made_with[name] for name in (
        "vocabulary_size", "lower_case", "max_sequence_length", "max_predictions_per_sequence", "max_sequences_per_pack",
        "duplication_factor", "short_sequence_probability", "masked_lm_probability", "seed", "epoch")}
    return replace(options, **kept, packer=algorithm if algorithm in PACKERS else made_with["packer"], recipe=None,
                   vocabulary=out / "vocab.txt" if (out / "vocab.txt").exists() else None)


def _runner(options: BuildOptions) -> Any:
    if options.dask is not None:
        return DaskRunner(options.dask)
    workers = available_cores() if options.workers is None else options.workers
    return ProcessRunner(workers) if workers > 1 else SerialRunner()


@contextmanager
def _work_folder(out: Path) -> Iterator[Path]:
    """OUT.building, held by one build at a time (the lock goes with the process), removed when the build is done."""
    out.mkdir(parents=True, exist_ok=True)
    work = out.with_name(out.name + ".building")
    work.mkdir(exist_ok=True)
    with open(work / "lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ValueError(f"{out}: another build is writing this data set; wait for it or choose another --out") from None
        try:
            yield work
        except ValueError:
            # A user's mistake, found before there is anything to continue, leaves nothing behind.
            if not any(work.glob("examples-*.json")):
                shutil.rmtree(work)
                if not any(out.iterdir()):
                    out.rmdir()
            raise
        shutil.rmtree(work)


class _Build:
    def __init__(self, options: BuildOptions, work: Path, runner: Any, progress: Optional[bool]) -> None:
        self.options, self.work, self.runner, self.progress = options, work, runner, progress
        self.out = Path(options.out)
        self.example_options = options.example_options()
        self.seconds: Dict[str, float] = {}
        self.former: Optional[Manifest] = read_manifest(self.out) if options.append else None
        # Parts are numbered on, so that what is appended draws other random numbers.
        self.first_stream: int = self.former.made_with["parts"] if self.former else 0
        # Files that the data set holds already, by their names in the corpus.
        self.known: Set[str] = set()
        self.source: Any = None
        if options.source is not None:
            self.source = open_source(options.source, options.source_format, options.skip_bad, options.columns)

    @contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - start

    def run(self) -> Built:
        with self._timed("examples"):
            sources = self._plan()
            if not sources:
                return Built(PackStore.open(self.out), Packing.load(self.out / "recipe.json"), self.seconds)
            vocabulary_size, vocabulary = self._vocabulary()
            parts_schema = self._parts_schema(vocabulary_size)
            notes = self._examples(parts_schema, vocabulary_size)
        with self._timed("packing"):
            packing, schema = self._packing(parts_schema, notes)
        with self._timed("assignment"):
            self._assignment(parts_schema, notes, packing)
        shards = self._shards(parts_schema, schema, notes, packing)
        made_with = {"options": self.options.deciding(), "sources": sources, "parts": len(notes),
                     "documents": sum(note["documents"] for note in notes)}
        if self.former:
            before = self.former.made_with
            made_with = {"options": before["options"], "sources": before["sources"] + sources,
                         "parts": before["parts"] + len(notes), "documents": before["documents"] + made_with["documents"]}
        if (self.work / "skipped.json").exists() and json.loads((self.work / "skipped.json").read_text()):
            made_with["skipped"] = json.loads((self.work / "skipped.json").read_text())
        if self.source is not None:
            made_with.update(json.loads((self.work / "examples.json").read_text()))
            ids = parts.vocabulary_size(notes)
            if vocabulary and ids > vocabulary_size:
                raise ValueError(f"{self.options.source}: token id {ids - 1} is not in the vocabulary of {vocabulary_size}; give the one it was made with")
            vocabulary_size = vocabulary_size or ids
        with self._timed("commit"):
            store, whole = self._commit(schema, packing, notes, shards, made_with, vocabulary_size, vocabulary)
        return Built(store, whole, self.seconds)

    # ---- the plan: what is built, and whether a former build of the same was left half done -----------------------------

    def _plan(self) -> List[List[str]]:
        """Empties the work folder unless it belongs to this very build. Returns name and sha256 of what goes in and is new."""
        options = self.options
        if options.synthetic is not None:
            sources = [[f"synthetic {options.synthetic}", ""]]
        elif self.source is not None:
            sources = [list(entry) for entry in parts.content_digest(self.source)]
        else:
            with progress_bar(None, "checking the corpus", shown=self.progress, unit="B") as bar:
                sources = [list(entry) for entry in content_digest(options.corpus, bar.update)]
        if self.former:
            held = {sha256 for _, sha256 in self.former.made_with["sources"] if sha256}
            self.known = {name for name, sha256 in sources if sha256 in held}
            sources = [entry for entry in sources if entry[0] not in self.known]
            if self.source is not None:
                self.source.files = [file for file in self.source.files if Path(file).name not in self.known]
        if options.vocabulary is not None:
            load_vocabulary(options.vocabulary, options.lower_case)
        others = [_sha256(path) for path in (options.vocabulary, options.recipe)]
        self._check_room()
        plan = {"options": options.deciding(), "sources": sources, "others": others,
                "former": f"{self.former.digest:016x}" if self.former else None}
        path = self.work / "plan.json"
        if not path.exists() or json.loads(path.read_text()) != plan:
            for item in self.work.iterdir():
                if item.name != "lock":
                    item.unlink()
            if self.former:
                # The commit replaces the recipe just before the manifest; a build killed between the two still needs the former one.
                shutil.copyfile(self.out / "recipe.json", self.work / "former.json")
            write_json(path, plan)
        return sources

    def _check_room(self) -> None:
        """Refuses to begin what the disk cannot hold: the sorted sequences and the shards lie there together at the end."""
        options, text = self.options, 0.0
        if options.synthetic is not None:
            tokens = options.sequences * LengthHistogram.published(options.synthetic).mean_length
        elif self.source is not None:
            tokens = sum(Path(path).stat().st_size for path in self.source.files if Path(path).is_file())
        else:
            text = _characters(options.corpus)
            tokens = text / CHARACTERS_PER_TOKEN * options.duplication_factor
        already = sum(path.stat().st_size for path in self.work.iterdir())
        needed, free = text + tokens * BYTES_PER_TOKEN - already, free_bytes(self.work)
        if needed > free:
            raise ValueError(f"{self.out}: the build needs about {needed / 1e6:,.0f} MB of disk, {free / 1e6:,.0f} MB are free; "
                             "make room or choose another --out")

    # ---- text to examples -----------------------------------------------------------------------------------------------

    def _documents(self) -> Iterator[Document]:
        bad = BadRecords(self.options.skip_bad)
        how = dict(json_field=self.options.json_field, separator=self.options.document_separator, bad=bad)
        if not self.known:
            yield from documents(self.options.corpus, **how)
        else:
            for path in source_files(self.options.corpus):
                if relative_name(path, self.options.corpus) not in self.known:
                    yield from file_documents(path, **how)
        write_json(self.work / "skipped.json", [str(line) for line in bad.found])

    def _vocabulary(self) -> Tuple[int, Optional[Path]]:
        """The vocabulary's size and its file in the work folder."""
        options, path = self.options, self.work / "vocab.txt"
        if options.synthetic is not None:
            return options.vocabulary_size, None
        if self.source is not None and options.vocabulary is None:
            return 0, None                         # largest id + 1, known when all is read
        if not path.exists():
            if options.vocabulary is not None:
                content = Path(options.vocabulary).read_bytes()
            else:
                content = train_vocabulary(self._dealt_out(), options.vocabulary_size, options.lower_case).text
            write_atomically(path, content)
        return len(load_vocabulary(path, options.lower_case)), path

    def _parts_schema(self, vocabulary_size: int) -> PackSchema:
        S, predictions = self.options.max_sequence_length, self.example_options.max_predictions_per_sequence
        if self.source is not None:
            return parts.parts_schema(self.source, S, predictions)
        return PackSchema.bert(S, 1, predictions, vocabulary_size=vocabulary_size)

    def _examples(self, schema: PackSchema, vocabulary_size: int) -> List[Dict[str, Any]]:
        options = self.options
        if not (self.work / "examples.json").exists():
            if options.synthetic is not None:
                tasks, function, total = self._synthetic_tasks(schema, vocabulary_size), make_synthetic_part, options.sequences
            elif self.source is not None:
                tasks, function, total = parts.tasks(self.source, self.work, schema, self._missing), parts.make_source_part, None
            else:
                tasks, function, total = self._text_tasks(schema), make_part, None
            with progress_bar(total, "examples", shown=self.progress, unit=" sequences") as bar:
                bar.update(sum(note["totals"][0] for note in read_notes(self.work, "examples-*.json")))
                for note in self.runner.map(function, tasks):
                    bar.update(note["totals"][0])
            write_json(self.work / "examples.json", {} if self.source is None else {
                "skipped": [str(bad) for bad in self.source.bad.found], "left_out": list(self.source.foreign_lost)})
        notes = read_notes(self.work, "examples-*.json")
        if not sum(note["totals"][0] for note in notes):
            for path in self.work.glob("examples-*.json"):
                path.unlink()                      # so that nothing stays behind
            raise ValueError(f"{options.corpus}: the corpus is empty: no text in {sum(note['documents'] for note in notes)} documents; nothing to pack")
        return notes

    def _missing(self, part: int) -> bool:
        return not (self.work / f"{examples_name(part)}.json").exists()

    def _spread_text(self) -> int:
        """Deals the documents out to parts at random, and returns how many parts there are.

        The second segment of an example comes from the same part, so a part is to be a fair sample of the corpus, whose
        files are often sorted by kind or age.
        """
        done = self.work / "text.json"
        if not done.exists():
            count = max(1, round(_characters(self.options.corpus) / PART_CHARACTERS))
            paths = [self.work / text_name(part) for part in range(count)]
            for path in paths:
                path.write_bytes(b"")
            draw = random.Random(f"{self.options.seed} documents {self.first_stream}")
            waiting: Dict[Path, List[str]] = {}
            characters = 0
            with progress_bar(None, "reading", shown=self.progress, unit=" documents") as bar:
                for document in self._documents():
                    line = json.dumps(document.lines)
                    waiting.setdefault(paths[draw.randrange(count)], []).append(line)
                    characters += len(line)
                    bar.update(1)
                    if characters > TEXT_IN_MEMORY:
                        _append_lines(waiting)
                        waiting, characters = {}, 0
            _append_lines(waiting)
            write_json(done, {"parts": count})
        return json.loads(done.read_text())["parts"]

    def _dealt_out(self) -> Iterator[Document]:
        """The documents part by part, each part a fair sample of them."""
        for part in range(self._spread_text()):
            yield from read_text(self.work, part)

    def _text_tasks(self, schema: PackSchema) -> Iterator[ExamplesTask]:
        for part in range(self._spread_text()):
            if self._missing(part):
                yield ExamplesTask(str(self.work.resolve()), part, self.first_stream + part, self.options.lower_case, self.example_options, schema)

    def _synthetic_tasks(self, schema: PackSchema, vocabulary_size: int) -> Iterator[SyntheticTask]:
        histogram = LengthHistogram.published(self.options.synthetic)
        if histogram.longest > self.options.max_sequence_length:
            raise ValueError(f"--synthetic {histogram.name} has sequences of {histogram.longest} tokens; take --max-sequence-length {histogram.max_sequence_length}")
        weights = tuple(histogram.counts.tolist())
        for part, first in enumerate(range(0, self.options.sequences, SYNTHETIC_PART)):
            if self._missing(part):
                count = min(SYNTHETIC_PART, self.options.sequences - first)
                yield SyntheticTask(str(self.work.resolve()), part, self.first_stream + part, count, weights, self.example_options,
                                    vocabulary_size, schema)

    # ---- lengths to packing and assignment ------------------------------------------------------------------------------

    def _packing(self, parts_schema: PackSchema, notes: Sequence[Dict[str, Any]]) -> Tuple[Packing, PackSchema]:
        """The recipe, solved once, and the schema of its packs; both stay in the work folder."""
        recipe, schema_file = self.work / "recipe.json", self.work / "schema.json"
        if not schema_file.exists():
            S = self.options.max_sequence_length
            counts, masked = np.zeros(S + 1, dtype=np.int64), np.zeros(S + 1, dtype=np.int64)
            for note in notes:
                lengths, sequences, most = np.array(note["lengths"], dtype=np.int64).reshape(-1, 3).T
                counts[lengths] += sequences
                masked[lengths] = np.maximum(masked[lengths], most)
            packing = self._solve(LengthHistogram(counts, self.out.name))
            if self.former:
                packing = _split_overfull(packing, masked, self.former.schema.max_predictions_per_pack)
            packing.save(recipe)
            depth = packing.max_sequences_per_pack or packing.largest_depth
            needed = max(int(masked[list(strategy)].sum()) for strategy in packing.strategies)
            P = predictions_per_pack(self.example_options.max_predictions_per_sequence, depth, needed) if parts_schema.on(PREDICTION) else 0
            if self.source is not None:
                parts_schema = parts.narrowed(parts_schema, notes)
            schema = replace(parts_schema, max_sequences_per_pack=depth, max_predictions_per_pack=P)
            write_json(schema_file, (self._former_schema(schema) if self.former else schema).to_json())
        return Packing.load(recipe), PackSchema.from_json(json.loads(schema_file.read_text()))

    def _solve(self, histogram: LengthHistogram) -> Packing:
        if self.options.recipe is not None:
            packing = Packing.load(self.options.recipe)
        else:
            pack, depth = get_packer(self.options.packer), self.options.max_sequences_per_pack
            packing = pack(histogram, max_sequences_per_pack=depth)
            if self.former and packing.largest_depth > self.former.schema.max_sequences_per_pack:
                packing = replace(pack(histogram, max_sequences_per_pack=self.former.schema.max_sequences_per_pack), max_sequences_per_pack=depth)
        packing.check(histogram)
        return packing

    def _former_schema(self, wanted: PackSchema) -> PackSchema:
        """The schema of the data set that is appended to, if what is new fits its columns."""
        schema = self.former.schema
        types = {column.name: np.dtype(column.dtype) for column in schema.columns}
        for column in wanted.columns:
            if column.name not in types or not np.can_cast(np.dtype(column.dtype), types[column.name]):
                raise ValueError(f"{self.out}: column {column.name} of what is new does not fit the data set's columns; build one of both together")
        if len(wanted.columns) != len(schema.columns):
            raise ValueError(f"{self.out}: what is new lacks some of the data set's columns ({', '.join(types)}); build one of both together")
        return schema

    def _assignment(self, parts_schema: PackSchema, notes: Sequence[Dict[str, Any]], packing: Packing) -> None:
        done = self.work / "slot.npy"
        if done.exists():
            return
        spill = SpillFormat.of(parts_schema)
        lengths = np.concatenate([spill.read_lengths(self.work / f"{examples_name(note['part'])}.bin", Totals(*note["totals"])) for note in notes])
        assignment = assign(lengths, packing, (self.options.seed, self.options.epoch))
        save_array(self.work / "pack.npy", assignment.pack)
        save_array(done, assignment.slot)

    # ---- sequences to packs ---------------------------------------------------------------------------------------------

    def _shards(self, parts_schema: PackSchema, schema: PackSchema, notes: Sequence[Dict[str, Any]],
                packing: Packing) -> List[Dict[str, Any]]:
        work, per_shard = self.work, max(1, SLOTS_PER_SHARD // schema.max_sequence_length)
        count, first_shard = -(-packing.packs // per_shard), len(self.former.shards) if self.former else 0
        totals = [Totals(*note["totals"]) for note in notes]
        firsts = np.cumsum([0] + [total.sequences for total in totals])
        sort_tasks = [SortTask(str(work.resolve()), part, totals[part], int(firsts[part]), parts_schema, per_shard, count)
                      for part in range(len(notes)) if not (work / f"{sorted_name(part)}.npy").exists()]
        with self._timed("sorting"), progress_bar(len(notes), "sorting", shown=self.progress, unit=" parts") as bar:
            bar.update(len(notes) - len(sort_tasks))
            for _ in self.runner.map(sort_part, sort_tasks):
                bar.update(1)
        runs = np.stack([np.load(work / f"{sorted_name(part)}.npy") for part in range(len(notes))])

        def shard_task(number: int) -> ShardTask:
            between = tuple((totals[part], Totals(*runs[part, number].tolist()), Totals(*runs[part, number + 1].tolist()))
                            for part in range(len(notes)))
            packs = min(per_shard, packing.packs - number * per_shard)
            return ShardTask(str(work.resolve()), str(self.out.resolve()), number, first_shard + number, packs, between, parts_schema,
                             schema, per_shard)

        with self._timed("writing"), progress_bar(packing.packs, "packs", shown=self.progress, unit=" packs") as bar:
            done = {note["number"] for note in read_notes(work, "shard-*.json") if (self.out / note["file"]).exists()}
            bar.update(sum(min(per_shard, packing.packs - number * per_shard) for number in done))
            for note in self.runner.map(make_shard, (shard_task(number) for number in range(count) if number not in done)):
                bar.update(note["packs"])
        shards = read_notes(work, "shard-*.json")
        if (sum(note["digest"] for note in shards) - sum(note["digest"] for note in notes)) % (1 << 64):
            raise ValueError(f"{work}: the packs do not hold exactly the sequences that were made; the disk lost data, remove the folder and build again")
        return shards

    def _commit(self, schema: PackSchema, packing: Packing, notes: Sequence[Dict[str, Any]], shards: Sequence[Dict[str, Any]],
                made_with: Dict[str, Any], vocabulary_size: int, vocabulary: Optional[Path]) -> Tuple[PackStore, Packing]:
        former = self.former
        whole = _merged(Packing.load(self.work / "former.json"), packing) if former else packing
        files = ["recipe.json"]
        # Solving takes another time in every build; the file is to be the same.
        replace(whole, solve_seconds=0.0).save(self.out / files[0])
        if vocabulary is not None:
            files.append("vocab.txt")
            write_atomically(self.out / "vocab.txt", vocabulary.read_bytes())
        tables = chain([map_table(self.out, former.lengths, schema.lengths_dtype)] if former else [],
                       (np.load(self.work / f"{shard_name(note['number'])}.npy") for note in shards))
        lengths = write_table(self.out, "lengths", schema.lengths_dtype, tables, whole.packs)
        digest = sum(note["digest"] for note in notes) + (former.digest if former else 0)
        commit(self.out, Manifest(
            schema=schema, sequences=whole.sequences, packs=whole.packs, tokens=whole.tokens,
            histogram=tuple(whole.placed().tolist()), digest=digest % (1 << 64),
            shards=(former.shards if former else ()) + tuple(
                StoredFile(note["file"], note["bytes"], note["sha256"], note["packs"]) for note in shards),
            lengths=lengths, algorithm=whole.algorithm, lower_bound=whole.lower_bound, lp_bound=whole.lp_bound,
            seed=self.options.seed, max_predictions_per_sequence=self.example_options.max_predictions_per_sequence,
            vocabulary_size=max(vocabulary_size, former.vocabulary_size if former else 0), vocabulary_sha256=load_vocabulary(vocabulary).sha256 if vocabulary else "",
            files=tuple(stored_file(self.out, name) for name in files), made_with=made_with))
        return PackStore.open(self.out), whole


def _split_overfull(packing: Packing, masked: np.ndarray, most: int) -> Packing:
    """The packing with those packs taken apart that could hold more masked tokens than fit. masked[l]: the most masked
    tokens of any sequence of l tokens."""
    packs: List[Tuple[Tuple[int, ...], int]] = []
    for strategy, repeat in zip(packing.strategies, packing.repeats):
        begun: Tuple[int, ...] = ()
        for length in strategy:
            if begun and int(masked[list(begun + (length,))].sum()) > most:
                packs.append((begun, repeat))
                begun = ()
            begun += (length,)
        packs.append((begun, repeat))
    if int(masked.max()) > most:
        raise ValueError(f"a sequence has {int(masked.max())} masked tokens, the packs of this data set have room for {most}; build one of both together")
    proof = dict(solve_seconds=packing.solve_seconds, lower_bound=packing.lower_bound, lp_bound=packing.lp_bound, certificate=packing.certificate)
    return Packing.of(packing.algorithm, LengthHistogram(packing.placed()), packing.max_sequences_per_pack, packs, **proof)


def _merged(former: Packing, new: Packing) -> Packing:
    """Both packings as one. Where the packer proves bounds, the bound is proved for all sequences together."""
    histogram = LengthHistogram(former.placed() + new.placed())
    proof: Dict[str, Any] = {}
    if former.certificate is not None:
        whole = get_packer(former.algorithm)(histogram, max_sequences_per_pack=former.max_sequences_per_pack)
        proof = dict(lower_bound=whole.lower_bound, lp_bound=whole.lp_bound, certificate=whole.certificate)
    packs = [*zip(former.strategies, former.repeats), *zip(new.strategies, new.repeats)]
    return Packing.of(former.algorithm, histogram, former.max_sequences_per_pack, packs, solve_seconds=new.solve_seconds, **proof)


def _append_lines(waiting: Dict[Path, List[str]]) -> None:
    for path, lines in waiting.items():
        with open(path, "a", encoding="utf-8") as out:
            out.write("\n".join(lines) + "\n")


def free_bytes(folder: Path) -> int:
    return shutil.disk_usage(folder).free


def _characters(corpus: Union[str, Path]) -> float:
    """About how much text there is; compressed text unpacks to about four times its size."""
    if str(corpus) == EMBEDDED:
        return sum(len(line) for document in documents(corpus) for line in document.lines)
    return sum(path.stat().st_size * (4 if path.suffix in (".gz", ".xz") else 1) for path in source_files(corpus))


def _sha256(path: Union[str, Path, None]) -> str:
    return "" if path is None else hashlib.sha256(Path(path).read_bytes()).hexdigest()


# ---- the command --------------------------------------------------------------------------------------------------------

def main(argv: Optional[Sequence[str]] = None) -> int:
    default = BuildOptions(out="")
    parser = ArgumentParser(prog="python -m pack_data.build", description="Packs text into a data set for BERT pre-training.")
    parser.add_argument("--out", required=True, metavar="DIR", help="folder of the data set; one that is there stays readable until the new one is complete")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--corpus", metavar="PATH|embedded", help="text or JSONL (.gz, .xz), a file or a folder; 'embedded': the documentation inside this Python")
    what.add_argument("--synthetic", choices=PUBLISHED, help="draw lengths from a published histogram, with random tokens")
    what.add_argument("--from", dest="source", metavar="PATH", help="sequences made elsewhere: MLPerf or packed TFRecord, HDF5, Parquet, Arrow; a file or a folder")
    parser.add_argument("--format", dest="source_format", default="auto", metavar="NAME", help="of --from (default: told from the content; names: python -m pack_data.convert --help)")
    parser.add_argument("--columns", type=lambda text: tuple(text.split(",")), default=(), metavar="A,B", help="--from Parquet or Arrow: the integer columns that make the sequences")
    parser.add_argument("--skip-bad", type=int, default=0, metavar="N", help="leave out up to N bad records, or lines of text (default 0: the first is an error)")
    parser.add_argument("--sequences", type=positive_int, default=default.sequences, metavar="N", help="how many, with --synthetic (default 1,000,000)")
    parser.add_argument("--json-field", default=default.json_field, metavar="NAME", help="field of the text in JSONL (default text)")
    parser.add_argument("--document-separator", choices=("file", "blank-line"), default="file", help="what a document is in a text file (default: the file)")
    parser.add_argument("--vocabulary", metavar="FILE", help="vocab.txt; without it one is trained on the corpus and kept with the data")
    parser.add_argument("--vocabulary-size", type=positive_int, default=default.vocabulary_size, metavar="N", help="when training one (default 8192)")
    parser.add_argument("--keep-case", action="store_true", help="tell capitals apart (default: lower case, accents stripped)")
    parser.add_argument("--max-sequence-length", type=positive_int, default=512, metavar="S", help="slots in a pack (default 512)")
    parser.add_argument("--max-predictions-per-sequence", type=positive_int, metavar="M", help="masked tokens at most (default 20, 56, 76 at 128, 384, 512)")
    parser.add_argument("--packer", choices=PACKERS, default=default.packer, help="default nnlshp")
    parser.add_argument("--max-sequences-per-pack", type=parse_depth, default=3, metavar="D", help="packing depth, a number or 'unlimited' (default 3)")
    parser.add_argument("--recipe", metavar="FILE", help="a packing that a packer wrote with --out for exactly these lengths, instead of --packer")
    parser.add_argument("--duplication-factor", type=positive_int, default=default.duplication_factor, metavar="N", help="passes over the corpus, each masked anew (default 5)")
    parser.add_argument("--short-sequence-probability", type=float, default=0.1, metavar="P", help="documents cut into shorter sequences (default 0.1)")
    parser.add_argument("--masked-lm-probability", type=float, default=0.15, metavar="P", help="share of tokens masked (default 0.15)")
    parser.add_argument("--seed", type=int, default=0, help="of every random choice (default 0)")
    parser.add_argument("--epoch", type=int, default=0, metavar="E", help="another number pairs the same sequences differently (default 0)")
    parser.add_argument("--append", action="store_true", help="add to the data set in --out the files it does not hold yet, made and packed as the rest was (its own options count)")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--workers", type=positive_int, metavar="N", help="processes (default: one a core); the result does not depend on it")
    where.add_argument("--dask", metavar="ADDRESS|local:N", help="run on a Dask cluster whose workers see --out under the same path")
    parser.add_argument("--progress", action=argparse.BooleanOptionalAction if hasattr(argparse, "BooleanOptionalAction") else "store_true",
                        default=None, help="show bars even where stderr is no terminal")
    args = parser.parse_args(argv)
    chosen = {name: value for name, value in vars(args).items() if name not in ("keep_case", "progress")}
    options = BuildOptions(lower_case=not args.keep_case, **chosen)
    store, packing, seconds = build_and_report(options, args.progress)
    with store:
        if options.append and "commit" not in seconds:
            print(f"nothing new: {store.folder} holds all of it already\n")
        print(packing.table(f"{store.folder}"))
        size = sum(entry.bytes for entry in store.manifest.shards)
        for skipped in store.manifest.made_with.get("skipped", ()):
            print(f"skipped {skipped}", file=sys.stderr)
        if store.manifest.made_with.get("left_out"):
            print(f"left out: {', '.join(store.manifest.made_with['left_out'])} (a store holds whole numbers only)", file=sys.stderr)
        print(f"\n{store.folder}: {len(store):,} packs in {len(store.manifest.shards)} shards, {size / 1e6:,.1f} MB, {size / len(store):,.0f} bytes a pack")
    return 0


if __name__ == "__main__":
    raise SystemExit(run_main(main))
