"""python -m pack_data.build: text in, a packed data set out.

    documents, dealt out to parts -> examples -> histogram -> packing -> assignment -> sorted by shard -> shards -> manifest

Every stage works on parts of a few megabytes and notes what is done in a folder beside the data set (OUT.building). So
memory does not grow with the corpus, a build that was killed continues where it was, and the bytes do not depend on the
number of workers. The data set that was in OUT stays readable until the new manifest takes its place.

With --held-out the documents are split first (sides.py), and the rest is done for both sides; they appear together (switch.py).
"""
from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import re
import shutil
import sys
import time
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence, Set, Tuple, Union

import numpy as np

from pack_data.building import sides
from pack_data.building.assignment import assign
from pack_data.bad_records import BadRecords
from pack_data.command import ArgumentParser, parse_depth, positive_int, progress_bar, run_main
from pack_data.text.corpus import EMBEDDED, Document, content_digest, documents, file_documents, relative_name, source_files
from pack_data.text.examples import ExampleOptions
from pack_data.building import source_parts as parts
from pack_data.formats.detect import open_source
from pack_data.files import locked, write_atomically
from pack_data.histogram import PUBLISHED, LengthHistogram
from pack_data.packers import PACKERS, get_packer
from pack_data.packing import Packing
from pack_data.packs import PREDICTION, PackSchema, default_predictions, predictions_per_pack
from pack_data.building.runner import DaskRunner, ProcessRunner, SerialRunner, available_cores
from pack_data.building.spill import SpillFormat, Totals
from pack_data.building.tasks import (ExamplesTask, ShardTask, SortTask, SyntheticTask, examples_name, make_part, make_shard,
                              make_synthetic_part, read_notes, read_text, save_array, shard_name, sort_part, sorted_name, text_name, write_json)
from pack_data.store import MANIFEST, Manifest, PackStore, StoredFile, map_table, read_manifest, stored_file, write_manifest, write_table
from pack_data.building.switch import COMMIT, READY, Target, announce, complete
from pack_data.text.wordpiece import load_vocabulary, train_vocabulary

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
    """One build. All but `out`, `overwrite`, `workers` and `dask` decide the bytes of the data set."""

    out: Union[str, Path]
    corpus: Union[str, Path, None] = EMBEDDED
    vocabulary: Union[str, Path, None] = None        # vocab.txt; None: train one of vocabulary_size on the corpus
    vocabulary_size: int = 8192
    lower_case: bool = True
    max_sequence_length: int = 512
    max_predictions_per_sequence: Optional[int] = None
    packer: str = "optimal"
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
    held_out: float = 0.0                            # share of the documents that form a second data set, OUT-held-out
    overwrite: bool = False                          # replace a data set in `out` that was made otherwise
    append: bool = False                             # add to the data set in `out`, with the options it was made with
    workers: Optional[int] = None                    # None: one a core
    dask: Optional[str] = None

    def __post_init__(self) -> None:
        if not 0 <= self.held_out < 1:
            raise ValueError(f"held_out is {self.held_out}; the share of documents held out is from 0 to below 1")

    def example_options(self) -> ExampleOptions:
        predictions = self.max_predictions_per_sequence
        if predictions is None:
            predictions = default_predictions(self.max_sequence_length, self.masked_lm_probability)
        return ExampleOptions(self.max_sequence_length, predictions, self.duplication_factor, self.short_sequence_probability,
                              self.masked_lm_probability, self.seed)

    def deciding(self) -> Dict[str, Any]:
        """The options that decide the bytes, as they go into the manifest; files stand there by content, not by path."""
        left_out = {"out", "overwrite", "append", "workers", "dask", "corpus", "vocabulary", "recipe", "synthetic" if self.synthetic is None else "",
                    "sequences" if self.synthetic is None else "", "source", "" if self.held_out else "held_out"}
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
    seconds of each stage (none for "commit" where nothing had to be built)."""

    store: PackStore
    packing: Packing
    seconds: Dict[str, float]


def build_and_report(options: BuildOptions, progress: Optional[bool] = None) -> Built:
    """`build`, with what there is to tell about it."""
    try:
        import fcntl  # noqa: F401
    except ImportError:
        raise ValueError("pack_data.build needs a POSIX system such as Linux or macOS (fcntl is missing here); build there and copy the folder") from None
    out = Path(options.out) if Path(options.out).name else Path(options.out).resolve()
    options = replace(options, out=out)
    _check_out(out)
    with _work_folder(out) as work:
        if options.append:
            options = _with_former_options(options)
        options.example_options()
        if options.recipe is None:
            get_packer(options.packer)
        runner = _runner(options)
        try:
            return _Build(options, work, runner, progress).run()
        finally:
            runner.close()


def _check_out(out: Path) -> None:
    """ValueError where nothing can be written to `out`."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out {out}: is a file; a data set is a folder, choose another name")
    if out.is_dir() and not os.access(out, os.W_OK):
        raise ValueError(f"--out {out}: the folder cannot be written; choose another one")


def _with_former_options(options: BuildOptions) -> BuildOptions:
    """What is appended is made as the rest was: same vocabulary, lengths, masking, packer, depth and share held out."""
    out = Path(options.out)
    manifest = read_manifest(out)
    if "options" not in manifest.made_with or "recipe.json" not in [entry.file for entry in manifest.files]:
        raise ValueError(f"{out}: was not made by pack_data.build, so nothing can be appended; build it anew with --from {out}")
    if manifest.made_with.get("side") == sides.HELD_OUT:
        raise ValueError(f"{out}: is the held-out side of a data set; append to the training side, both grow together")
    made_with = {"held_out": 0.0, **manifest.made_with["options"]}
    algorithm = Packing.load(out / "recipe.json").algorithm
    kept = {name: made_with[name] for name in (
        "vocabulary_size", "lower_case", "max_sequence_length", "max_predictions_per_sequence", "max_sequences_per_pack",
        "duplication_factor", "short_sequence_probability", "masked_lm_probability", "seed", "epoch", "held_out")}
    return replace(options, **kept, packer=algorithm if algorithm in PACKERS else made_with["packer"], recipe=None,
                   vocabulary=out / "vocab.txt" if (out / "vocab.txt").exists() else None)


def _runner(options: BuildOptions) -> Any:
    if options.dask is not None:
        return DaskRunner(options.dask)
    workers = available_cores() if options.workers is None else options.workers
    return ProcessRunner(workers) if workers > 1 else SerialRunner()


# ---- the work folder ------------------------------------------------------------------------------------------------------

PLAN, LOCK = "plan.json", "lock"
_HELD_OUT_WORK = "held-out"
# The names of files that a build makes in its work folder; it removes no others.
_OWN = re.compile(r"lock|vocab\.txt|(plan|commit|text|examples|recipe|schema|skipped|former|manifest)\.json|(pack|slot)\.npy|"
                  r"(text|examples|sorted|shard)-\d{5,}\.(jsonl|json|bin|npy)|packs-\d{5,}-[0-9a-f]{8}\.npy|lengths-[0-9a-f]{8}\.npy|"
                  r"[\w.-]+\.\d+\.tmp")


@contextmanager
def _work_folder(out: Path) -> Iterator[Path]:
    """OUT.building, held by one build at a time (the lock goes with the process), removed when the build is done."""
    work = out.with_name(out.name + ".building")
    try:
        work.mkdir(parents=True, exist_ok=True)
        _check_made_by_a_build(work, out)
    except OSError as error:
        raise ValueError(f"--out {out}: the folder {work} cannot be made or read ({error.strerror}); choose another --out") from None
    with locked(work / LOCK, f"{out}: another build is writing this data set; wait for it or choose another --out"):
        if complete(work):
            _clear(work)
        try:
            yield work
        except ValueError:
            # A user's mistake, found before there is anything to continue, leaves nothing behind.
            if not any(work.rglob("examples-*.json")):
                _remove(work)
            raise
        _remove(work)


def _check_made_by_a_build(work: Path, out: Path) -> None:
    """ValueError for a folder of this name that holds something else."""
    if all(item.name == LOCK or re.fullmatch(PLAN + r"\.\d+\.tmp", item.name) for item in work.iterdir()):
        return
    try:
        note = json.loads((work / PLAN).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        note = None
    if not isinstance(note, dict) or "options" not in note:
        raise ValueError(f"{work}: was not made by a build, but a build of {out} needs this folder; move it away or choose another --out")


def _clear(folder: Path, keep: Sequence[str] = (LOCK,)) -> None:
    """Removes what builds make; what else lies there stays."""
    for item in sorted(folder.iterdir()):
        if item.is_dir() and not item.is_symlink() and item.name in (READY, _HELD_OUT_WORK):
            _clear(item)
            if not any(item.iterdir()):
                item.rmdir()
        elif _OWN.fullmatch(item.name) and item.name not in keep and item.is_file():
            item.unlink()


def _remove(work: Path) -> None:
    """Removes the work folder; its notes go last, so that what a kill leaves behind is still known as a build's."""
    _clear(work, keep=(COMMIT, PLAN, LOCK))
    for name in (COMMIT, PLAN, LOCK):
        if (work / name).exists():
            (work / name).unlink()
    if not any(work.iterdir()):
        work.rmdir()


# ---- the build ------------------------------------------------------------------------------------------------------------

class _Side:
    """One data set on its way: its documents or sequences, its packs, where it goes. A build has one, or a training and a held-out one."""

    def __init__(self, name: Optional[str], work: Path, out: Path, former: Optional[Manifest]) -> None:
        self.name, self.work, self.out, self.former = name, work, out, former
        # Parts are numbered on, so that what is appended draws other random numbers.
        self.first_stream: int = former.made_with["parts"] if former else 0
        self.notes: List[Dict[str, Any]] = []

    @property
    def ready(self) -> Path:
        return self.work / READY

    @property
    def sequences(self) -> int:
        return sum(note["totals"][0] for note in self.notes)

    def missing(self, part: int) -> bool:
        return not (self.work / f"{examples_name(part)}.json").exists()


class _Build:
    def __init__(self, options: BuildOptions, work: Path, runner: Any, progress: Optional[bool]) -> None:
        self.options, self.work, self.runner, self.progress = options, work, runner, progress
        self.out = Path(options.out)
        self.example_options = options.example_options()
        self.seconds: Dict[str, float] = {}
        # Files that the data set holds already, by their names in the corpus.
        self.known: Set[str] = set()
        self.source: Any = None
        if options.source is not None:
            self.source = open_source(options.source, options.source_format, options.skip_bad, options.columns)
        if options.held_out and (options.source is not None or options.synthetic is not None):
            raise ValueError(f"--held-out {options.held_out}: splits a corpus by documents, and {'--from' if options.synthetic is None else '--synthetic'} "
                             "has none; build the held-out sequences from files of their own")
        places = [(sides.TRAINING if options.held_out else None, work, self.out)]
        if options.held_out:
            _check_out(sides.held_out_folder(self.out))
            places.append((sides.HELD_OUT, work / _HELD_OUT_WORK, sides.held_out_folder(self.out)))
        self.sides = [_Side(*place, read_manifest(place[2]) if options.append else None) for place in places]
        self.appended = options.append

    @property
    def training(self) -> _Side:
        return self.sides[0]

    @contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - start

    def run(self) -> Built:
        with self._timed("examples"):
            sources = self._plan()
            if sources is None:
                return Built(PackStore.open(self.out), Packing.load(self.out / "recipe.json"), self.seconds)
            for side in self.sides:
                side.ready.mkdir(parents=True, exist_ok=True)
            vocabulary_size, vocabulary = self._vocabulary()
            parts_schema = self._parts_schema(vocabulary_size)
            self._examples(parts_schema, vocabulary_size)
        schema: Optional[PackSchema] = None
        packings: List[Packing] = []
        for side in self.sides:
            if not side.sequences and side.former:
                packings.append(self._keep(side, sources))
                schema = side.former.schema
                continue
            with self._timed("packing"):
                packing, schema = self._packing(side, parts_schema, side.former.schema if side.former else schema)
            with self._timed("assignment"):
                self._assignment(side, parts_schema, packing)
            shards = self._shards(side, parts_schema, schema, packing)
            made_with = self._made_with(side, sources)
            if self.source is not None:
                made_with.update(json.loads((self.work / "examples.json").read_text()))
                ids = parts.vocabulary_size(side.notes)
                if vocabulary and ids > vocabulary_size:
                    raise ValueError(f"{self.options.source}: token id {ids - 1} is not in the vocabulary of {vocabulary_size}; give the one it was made with")
                vocabulary_size = vocabulary_size or ids
            with self._timed("commit"):
                packings.append(self._make_ready(side, schema, packing, shards, made_with, vocabulary_size, vocabulary))
        with self._timed("commit"):
            announce(self.work, [Target(side.work, side.out) for side in self.sides])
            complete(self.work)
            store = PackStore.open(self.out)
        return Built(store, packings[0], self.seconds)

    # ---- the plan: what is built, and whether a former build of the same was left half done -----------------------------

    def _plan(self) -> Optional[List[List[str]]]:
        """Empties the work folder unless it belongs to this very build. Returns name and sha256 of what goes in and is new;
        None where all of it has been built. ValueError where another data set would be replaced."""
        options = self.options
        if options.synthetic is not None:
            sources = [[f"synthetic {options.synthetic}", ""]]
        elif self.source is not None:
            sources = [list(entry) for entry in parts.content_digest(self.source)]
        else:
            with progress_bar(None, "checking the corpus", shown=self.progress, unit="B") as bar:
                sources = [list(entry) for entry in content_digest(options.corpus, bar.update)]
        if self.appended:
            held = {sha256 for _, sha256 in self.training.former.made_with["sources"] if sha256}
            self.known = {name for name, sha256 in sources if sha256 in held}
            sources = [entry for entry in sources if entry[0] not in self.known]
            if not sources:
                return None
            if self.source is not None:
                self.source.files = [file for file in self.source.files if Path(file).name not in self.known]
        if options.vocabulary is not None:
            load_vocabulary(options.vocabulary, options.lower_case)
        given = {name: _sha256(path) for name, path in (("vocabulary", options.vocabulary), ("recipe", options.recipe)) if path is not None}
        plan = {"options": json.loads(json.dumps(options.deciding())), "sources": sources, "given": given,
                "former": [f"{side.former.digest:016x}" for side in self.sides if side.former]}
        path = self.work / PLAN
        continued = path.exists() and json.loads(path.read_text()) == plan
        if not self.appended and not options.overwrite and not continued:
            if all([self._is_built(side, plan) for side in self.sides]):
                return None
        self._check_room()
        if not continued:
            _clear(self.work)
            write_json(path, plan)
        return sources

    def _is_built(self, side: _Side, plan: Dict[str, Any]) -> bool:
        """Whether the data set is there and whole. ValueError where something else is in its place, which is replaced on request only."""
        if not (side.out / MANIFEST).exists():
            for name in ("recipe.json", "vocab.txt"):
                mine = [path for path in (self.options.vocabulary, self.options.recipe) if path is not None]
                if (side.out / name).exists() and not any(os.path.samefile(side.out / name, path) for path in mine):
                    raise ValueError(f"{side.out}: holds a file {name} but no data set; add --overwrite to replace the file, or choose another --out")
            return False
        way_out = "add --overwrite to replace it, or choose another --out"
        try:
            manifest = read_manifest(side.out)
        except ValueError:
            raise ValueError(f"{side.out}: holds a {MANIFEST} that is no data set's, or a damaged one; {way_out}") from None
        made = manifest.made_with
        if "options" not in made or made.get("side") != side.name:
            raise ValueError(f"{side.out}: holds a data set that was made in another way ({manifest.packs:,} packs); {way_out}")
        if sorted(made["sources"]) != sorted(plan["sources"]) or made.get("given", {}) != plan["given"]:
            what = "vocabulary or recipe" if sorted(made["sources"]) == sorted(plan["sources"]) else "corpus"
            raise ValueError(f"{side.out}: holds a data set made from another {what} ({manifest.packs:,} packs); {way_out}, or add to it with --append")
        before, now = _meant(made["options"]), _meant(plan["options"])
        others = [name for name in sorted({*before, *now}) if before.get(name) != now.get(name)]
        if others == ["epoch"]:                    # another pairing of the same sequences
            return False
        if others:
            raise ValueError(f"{side.out}: holds a data set made with {', '.join(f'{name} {before.get(name)} (now {now.get(name)})' for name in others)}; {way_out}")
        try:
            PackStore.open(side.out).close()
        except ValueError:
            return False
        return True

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
        already = sum(path.stat().st_size for path in self.work.rglob("*"))
        needed, free = text + tokens * BYTES_PER_TOKEN - already, free_bytes(self.work)
        if needed > free:
            raise ValueError(f"{self.out}: the build needs about {needed / 1e6:,.0f} MB of disk, {free / 1e6:,.0f} MB are free; "
                             "make room or choose another --out")

    def _made_with(self, side: _Side, sources: List[List[str]]) -> Dict[str, Any]:
        """The manifest's account of what went in, that of the former data set included."""
        made = {"options": self.options.deciding(), "sources": sources, "parts": len(side.notes),
                "documents": sum(note["documents"] for note in side.notes)}
        skipped = self.work / "skipped.json"
        if skipped.exists() and json.loads(skipped.read_text()):
            made["skipped"] = json.loads(skipped.read_text())
        given = json.loads((self.work / PLAN).read_text())["given"]
        if given:
            made["given"] = given
        if side.name is not None:
            made["side"] = side.name
        if side.former:
            before = side.former.made_with
            made = {**before, **{name: made[name] for name in ("skipped",) if name in made}, "sources": before["sources"] + sources, "parts": before["parts"] + len(side.notes),
                    "documents": before["documents"] + made["documents"]}
        return made

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
        """The vocabulary's size and its file in the work folder; trained on the training side."""
        options, path = self.options, self.work / "vocab.txt"
        if options.synthetic is not None:
            return options.vocabulary_size, None
        if self.source is not None and options.vocabulary is None:
            return 0, None                         # largest id + 1, known when all is read
        if not path.exists():
            if options.vocabulary is not None:
                content = Path(options.vocabulary).read_bytes()
            else:
                self._spread_text()
                content = train_vocabulary(self._dealt_out(), options.vocabulary_size, options.lower_case).text
            write_atomically(path, content)
        for side in self.sides[1:]:
            write_atomically(side.work / "vocab.txt", path.read_bytes())
        return len(load_vocabulary(path, options.lower_case)), path

    def _parts_schema(self, vocabulary_size: int) -> PackSchema:
        S, predictions = self.options.max_sequence_length, self.example_options.max_predictions_per_sequence
        if self.source is not None:
            return parts.parts_schema(self.source, S, predictions)
        return PackSchema.bert(S, 1, predictions, vocabulary_size=vocabulary_size)

    def _examples(self, schema: PackSchema, vocabulary_size: int) -> None:
        """The sequences of every side, spilled, with a note for each part."""
        options = self.options
        if not (self.work / "examples.json").exists():
            if options.synthetic is not None:
                tasks, function, total = self._synthetic_tasks(schema, vocabulary_size), make_synthetic_part, options.sequences
            elif self.source is not None:
                tasks, function, total = parts.tasks(self.source, self.work, schema, self.training.missing), parts.make_source_part, None
            else:
                tasks, function, total = self._text_tasks(schema), make_part, None
            with progress_bar(total, "examples", shown=self.progress, unit=" sequences") as bar:
                bar.update(sum(note["totals"][0] for side in self.sides for note in read_notes(side.work, "examples-*.json")))
                for note in self.runner.map(function, tasks):
                    bar.update(note["totals"][0])
            write_json(self.work / "examples.json", {} if self.source is None else {
                "skipped": [str(bad) for bad in self.source.bad.found], "left_out": list(self.source.foreign_lost)})
        for side in self.sides:
            side.notes = read_notes(side.work, "examples-*.json")
        empty = [side for side in self.sides if not side.sequences and not side.former]
        if empty or not any(side.sequences for side in self.sides):
            read = sum(note["documents"] for side in self.sides for note in side.notes)
            for side in self.sides:
                for path in side.work.glob("examples-*.json"):
                    path.unlink()                  # so that nothing stays behind
            if len(empty) == len(self.sides) or self.appended:
                raise ValueError(f"{options.corpus}: the corpus is empty: no text in {read} documents; nothing to pack")
            raise ValueError(_one_sided(options, empty[0].name, read))

    def _spread_text(self) -> List[int]:
        """Deals the documents of each side out to its parts at random, and returns how many parts each has.

        The second segment of an example comes from the same part, so a part is to be a fair sample of the corpus, whose
        files are often sorted by kind or age.
        """
        done = self.work / "text.json"
        if not done.exists():
            size, held_out = _characters(self.options.corpus), self.options.held_out
            counts = [max(1, round(share * size / PART_CHARACTERS)) for share in ([1 - held_out, held_out] if held_out else [1.0])]
            paths = [[side.work / text_name(part) for part in range(count)] for side, count in zip(self.sides, counts)]
            for path in chain.from_iterable(paths):
                path.write_bytes(b"")
            draws = [random.Random(f"{self.options.seed} documents {side.first_stream}") for side in self.sides]
            waiting: Dict[Path, List[str]] = {}
            characters, found = 0, [0] * len(counts)
            with progress_bar(None, "reading", shown=self.progress, unit=" documents") as bar:
                for document, is_held_out in sides.split(self._documents(), held_out):
                    line, number = json.dumps(document.lines), int(is_held_out)
                    waiting.setdefault(paths[number][draws[number].randrange(counts[number])], []).append(line)
                    found[number] += 1
                    characters += len(line)
                    bar.update(1)
                    if characters > TEXT_IN_MEMORY:
                        _append_lines(waiting)
                        waiting, characters = {}, 0
            if held_out and not self.appended and sum(found) and not all(found):
                raise ValueError(_one_sided(self.options, self.sides[found.index(0)].name, sum(found)))
            _append_lines(waiting)
            write_json(done, {"parts": counts})
        return json.loads(done.read_text())["parts"]

    def _dealt_out(self) -> Iterator[Document]:
        """The documents of the training side part by part, each part a fair sample of them."""
        for part in range(self._spread_text()[0]):
            yield from read_text(self.work, part)

    def _text_tasks(self, schema: PackSchema) -> Iterator[ExamplesTask]:
        for side, count in zip(self.sides, self._spread_text()):
            for part in range(count):
                if side.missing(part):
                    yield ExamplesTask(str(side.work.resolve()), part, side.first_stream + part, self.options.lower_case, self.example_options, schema)

    def _synthetic_tasks(self, schema: PackSchema, vocabulary_size: int) -> Iterator[SyntheticTask]:
        histogram = LengthHistogram.published(self.options.synthetic)
        if histogram.longest > self.options.max_sequence_length:
            raise ValueError(f"--synthetic {histogram.name} has sequences of {histogram.longest} tokens; take --max-sequence-length {histogram.max_sequence_length}")
        weights = tuple(histogram.counts.tolist())
        for part, first in enumerate(range(0, self.options.sequences, SYNTHETIC_PART)):
            if self.training.missing(part):
                count = min(SYNTHETIC_PART, self.options.sequences - first)
                yield SyntheticTask(str(self.work.resolve()), part, self.training.first_stream + part, count, weights, self.example_options,
                                    vocabulary_size, schema)

    # ---- lengths to packing and assignment ------------------------------------------------------------------------------

    def _packing(self, side: _Side, parts_schema: PackSchema, fixed: Optional[PackSchema]) -> Tuple[Packing, PackSchema]:
        """The recipe, solved once, and the schema of its packs; both stay in the work folder.

        fixed: the schema that the packs must have: that of the data set to append to, or of the training side.
        """
        recipe, schema_file = side.work / "recipe.json", side.work / "schema.json"
        if not schema_file.exists():
            S = self.options.max_sequence_length
            counts, masked = np.zeros(S + 1, dtype=np.int64), np.zeros(S + 1, dtype=np.int64)
            for note in side.notes:
                lengths, sequences, most = np.array(note["lengths"], dtype=np.int64).reshape(-1, 3).T
                counts[lengths] += sequences
                masked[lengths] = np.maximum(masked[lengths], most)
            packing = self._solve(side, LengthHistogram(counts, side.out.name), fixed)
            if fixed:
                packing = _split_overfull(packing, masked, fixed.max_predictions_per_pack)
            packing.save(recipe)
            depth = packing.max_sequences_per_pack or packing.largest_depth
            needed = max(int(masked[list(strategy)].sum()) for strategy in packing.strategies)
            P = predictions_per_pack(self.example_options.max_predictions_per_sequence, depth, needed) if parts_schema.on(PREDICTION) else 0
            if self.source is not None:
                parts_schema = parts.narrowed(parts_schema, side.notes)
            schema = replace(parts_schema, max_sequences_per_pack=depth, max_predictions_per_pack=P)
            write_json(schema_file, (_fitted(schema, fixed, side.out) if fixed else schema).to_json())
        return Packing.load(recipe), PackSchema.from_json(json.loads(schema_file.read_text()))

    def _solve(self, side: _Side, histogram: LengthHistogram, fixed: Optional[PackSchema]) -> Packing:
        if self.options.recipe is not None and side is self.training:
            packing = Packing.load(self.options.recipe)
        else:
            pack, depth = get_packer(self.options.packer), self.options.max_sequences_per_pack
            packing = pack(histogram, max_sequences_per_pack=depth)
            if fixed and packing.largest_depth > fixed.max_sequences_per_pack:
                packing = replace(pack(histogram, max_sequences_per_pack=fixed.max_sequences_per_pack), max_sequences_per_pack=depth)
        packing.check(histogram)
        return packing

    def _assignment(self, side: _Side, parts_schema: PackSchema, packing: Packing) -> None:
        done = side.work / "slot.npy"
        if done.exists():
            return
        spill = SpillFormat.of(parts_schema)
        lengths = np.concatenate([spill.read_lengths(side.work / f"{examples_name(note['part'])}.bin", Totals(*note["totals"])) for note in side.notes])
        assignment = assign(lengths, packing, (self.options.seed, self.options.epoch))
        save_array(side.work / "pack.npy", assignment.pack)
        save_array(done, assignment.slot)

    # ---- sequences to packs ---------------------------------------------------------------------------------------------

    def _shards(self, side: _Side, parts_schema: PackSchema, schema: PackSchema, packing: Packing) -> List[Dict[str, Any]]:
        work, notes, per_shard = side.work, side.notes, max(1, SLOTS_PER_SHARD // schema.max_sequence_length)
        count, first_shard = -(-packing.packs // per_shard), len(side.former.shards) if side.former else 0
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
            return ShardTask(str(work.resolve()), str(side.ready.resolve()), number, first_shard + number, packs, between, parts_schema,
                             schema, per_shard)

        with self._timed("writing"), progress_bar(packing.packs, "packs", shown=self.progress, unit=" packs") as bar:
            done = {note["number"] for note in read_notes(work, "shard-*.json") if (side.ready / note["file"]).exists()}
            bar.update(sum(min(per_shard, packing.packs - number * per_shard) for number in done))
            for note in self.runner.map(make_shard, (shard_task(number) for number in range(count) if number not in done)):
                bar.update(note["packs"])
        shards = read_notes(work, "shard-*.json")
        if (sum(note["digest"] for note in shards) - sum(note["digest"] for note in notes)) % (1 << 64):
            raise ValueError(f"{work}: the packs do not hold exactly the sequences that were made; the disk lost data, remove the folder and build again")
        return shards

    def _make_ready(self, side: _Side, schema: PackSchema, packing: Packing, shards: Sequence[Dict[str, Any]],
                    made_with: Dict[str, Any], vocabulary_size: int, vocabulary: Optional[Path]) -> Packing:
        """Puts the rest of the data set's files into the folder of what is ready."""
        former = side.former
        whole = _merged(Packing.load(side.out / "recipe.json"), packing) if former else packing
        files = ["recipe.json"]
        # Solving takes another time in every build; the file is to be the same.
        replace(whole, solve_seconds=0.0).save(side.ready / files[0])
        if vocabulary is not None:
            files.append("vocab.txt")
            write_atomically(side.ready / "vocab.txt", vocabulary.read_bytes())
        tables = chain([map_table(side.out, former.lengths, schema.lengths_dtype)] if former else [],
                       (np.load(side.work / f"{shard_name(note['number'])}.npy") for note in shards))
        lengths = write_table(side.ready, "lengths", schema.lengths_dtype, tables, whole.packs)
        digest = sum(note["digest"] for note in side.notes) + (former.digest if former else 0)
        write_manifest(side.ready, Manifest(
            schema=schema, sequences=whole.sequences, packs=whole.packs, tokens=whole.tokens,
            histogram=tuple(whole.placed().tolist()), digest=digest % (1 << 64),
            shards=(former.shards if former else ()) + tuple(
                StoredFile(note["file"], note["bytes"], note["sha256"], note["packs"]) for note in shards),
            lengths=lengths, algorithm=whole.algorithm, lower_bound=whole.lower_bound, lp_bound=whole.lp_bound,
            seed=self.options.seed, max_predictions_per_sequence=self.example_options.max_predictions_per_sequence,
            vocabulary_size=max(vocabulary_size, former.vocabulary_size if former else 0), vocabulary_sha256=load_vocabulary(vocabulary).sha256 if vocabulary else "",
            files=tuple(stored_file(side.ready, name) for name in files), made_with=made_with))
        return whole

    def _keep(self, side: _Side, sources: List[List[str]]) -> Packing:
        """What is appended has nothing for this side: only the manifest changes, which says what went in."""
        assert side.former is not None
        write_manifest(side.ready, replace(side.former, made_with=self._made_with(side, sources)))
        return Packing.load(side.out / "recipe.json")


def _meant(options: Dict[str, Any]) -> Dict[str, Any]:
    """Options of a manifest with the number of predictions that None stands for."""
    if options["max_predictions_per_sequence"] is not None:
        return options
    return {**options, "max_predictions_per_sequence": default_predictions(options["max_sequence_length"], options["masked_lm_probability"])}


def _one_sided(options: BuildOptions, side: Optional[str], count: int) -> str:
    return (f"{options.corpus}: --held-out {options.held_out:g} puts none of its {count:,} documents with text on the {side} side (a document is held out "
            "where the hash of its text, as a fraction, is below that number); choose another number or give more documents")


def _fitted(wanted: PackSchema, fixed: PackSchema, out: Path) -> PackSchema:
    """`fixed`, if the columns of what is new fit its columns."""
    types = {column.name: np.dtype(column.dtype) for column in fixed.columns}
    for column in wanted.columns:
        if column.name not in types or not np.can_cast(np.dtype(column.dtype), types[column.name]):
            raise ValueError(f"{out}: column {column.name} of what is new does not fit the data set's columns; build one of both together")
    if len(wanted.columns) != len(fixed.columns):
        raise ValueError(f"{out}: what is new lacks some of the data set's columns ({', '.join(types)}); build one of both together")
    return fixed


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
    parser.add_argument("--packer", choices=PACKERS, default=default.packer, help=f"default {default.packer}")
    parser.add_argument("--max-sequences-per-pack", type=parse_depth, default=3, metavar="D", help="packing depth, a number or 'unlimited' (default 3)")
    parser.add_argument("--recipe", metavar="FILE", help="a packing that a packer wrote with --out for exactly these lengths, instead of --packer")
    parser.add_argument("--duplication-factor", type=positive_int, default=default.duplication_factor, metavar="N", help="passes over the corpus, each masked anew (default 5)")
    parser.add_argument("--short-sequence-probability", type=float, default=0.1, metavar="P", help="documents cut into shorter sequences (default 0.1)")
    parser.add_argument("--masked-lm-probability", type=float, default=0.15, metavar="P", help="share of tokens masked (default 0.15)")
    parser.add_argument("--seed", type=int, default=0, help="of every random choice (default 0)")
    parser.add_argument("--epoch", type=int, default=0, metavar="E", help="another number pairs the same sequences differently (default 0)")
    parser.add_argument("--held-out", type=float, default=0.0, metavar="F", help="share of the documents (0.01: about one in a hundred) that goes into a second data set, DIR-held-out, to evaluate on")
    parser.add_argument("--overwrite", action="store_true", help="replace a data set in --out that was made from something else or with other options")
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
        if "commit" not in seconds:
            print(f"nothing to build: {store.folder} holds exactly this already")
            return 0
        print(packing.table(f"{store.folder}"))
        size = sum(entry.bytes for entry in store.manifest.shards)
        for skipped in store.manifest.made_with.get("skipped", ()):
            print(f"skipped {skipped}", file=sys.stderr)
        if store.manifest.made_with.get("left_out"):
            print(f"left out: {', '.join(store.manifest.made_with['left_out'])} (a store holds whole numbers only)", file=sys.stderr)
        print(f"\n{store.folder}: {len(store):,} packs in {len(store.manifest.shards)} shards, {size / 1e6:,.1f} MB, {size / len(store):,.0f} bytes a pack")
        if store.manifest.made_with.get("side") == sides.TRAINING:
            held_out = read_manifest(sides.held_out_folder(store.folder))
            print(f"{sides.held_out_folder(store.folder)}: {held_out.packs:,} packs of {held_out.sequences:,} sequences, from the {held_out.made_with['documents']:,} documents held out")
    return 0


if __name__ == "__main__":
    raise SystemExit(run_main(main))
