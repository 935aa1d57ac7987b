"""The table of refused commands: each prints one line `error: ...`, exits with status 2, and writes nothing.

A row of REFUSED is a command, as a user types it in the directory of `command_files`, and the names and values that
its message must hold: the file or field, the rule, the way out. The table does not test wording.
"""

import errno
import importlib.util
import os
import re
import shlex
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="most commands need torch")

from ipu_packed_bert.__main__ import main
from tests.command_files import command_files
from tests.refusals import refusal_of

TRAIN = "pretrain --config tiny.yml"
BUILD = "build --max-sequence-length 64 --vocabulary-size 200 --workers 1"
FINETUNE = "finetune --config finetune_squad_packed --set data.training=squad.json --set data.evaluation=squad.json"
CLASSIFY = "finetune --config finetune_banking77_packed --set model.checkpoint=bert --set data.max_sequence_length=64"
CLASSIFY += " --set data.training=table.csv --set data.evaluation=table.csv"
TINY = "--set model.checkpoint=bert --set data.max_sequence_length=64"

REFUSED = [
    # ---- what is typed
    ("pretrain", ["--config", "--resume"]),
    ("pretrain --config tiny.yml --resume run", ["--resume", "--config"]),
    (f"{TRAIN} --steps many", ["run.steps", "many"]),
    (f"{TRAIN} --steps -3", ["run.steps", "-3"]),
    (f"{TRAIN} --engine gpu", ["engine.kind", "gpu", "host"]),
    (f"{TRAIN} --out run --resume-if-there --allow-change x", ["--allow-change", "--resume"]),
    (f"{BUILD} --out new", ["--corpus", "--synthetic", "--from"]),
    (f"{BUILD} --corpus texts", ["--out"]),
    (f"{BUILD} --corpus= --out new", ["--corpus", "empty"]),
    ("export '' hf", ["empty"]),
    (f"{TRAIN} --data ''", ["--data", "empty"]),
    (f"{TRAIN} --set data.directory=", ["data.directory=", "null"]),
    (f"{BUILD} --corpus texts --out new --max-sequence-length=-64", ["--max-sequence-length", "-64"]),
    (f"{BUILD} --corpus texts --out new --workers 1000000", ["--workers", "1000000", "core"]),
    (f"{BUILD} --corpus texts --out new --workers 0", ["--workers", "0"]),
    (f"{BUILD} --corpus texts --out new --packer best", ["--packer", "best", "optimal"]),
    ("pack l.txt --rows r.npy --longer cut", ["--longer", "cut", "truncate"]),
    (f"{BUILD} --corpus texts --out new --held-out 5", ["held_out", "5"]),
    (f"{BUILD} --corpus texts --out new --max-sequences-per-pack all", ["all", "unlimited"]),
    (f"{BUILD} --corpus texts --out new --masked-lm-probability 15", ["masked_lm_probability", "15"]),
    (f"{BUILD} --corpus texts --out new --masked-lm-probability nan", ["masked_lm_probability", "nan", "0 to 1"]),
    (f"{TRAIN} --out data", ["--out data", "data set", "another"]),
    (f"{BUILD} --corpus texts --synthetic wikipedia_512 --out new", ["--synthetic", "--corpus"]),
    (f"{BUILD} --synthetic wikipedia --out new", ["wikipedia", "wikipedia_512"]),
    (f"{BUILD} --synthetic wikipedia_512 --out new", ["--max-sequence-length", "512"]),
    ("benchmark --size tiny --ranks 100000", ["--ranks", "100000"]),
    ("look --workers 99999999 texts/000.txt", ["--workers", "99999999"]),
    ("pack --packer fastest", ["--packer", "fastest", "optimal"]),
    ("pack l.csv", ["--histogram l.csv"]),
    ("pack --packer spfhp --lengths l.csv", ["--histogram l.csv"]),
    # ---- files and folders that are not what is wanted
    ("pretrain --config missing.yml", ["missing.yml"]),
    ("pretrain --config texts", ["texts"]),
    ("pretrain --config packed_phase2_pod61", ["packed_phase2_pod61", "packed_phase2_pod"]),
    (f"{BUILD} --corpus missing --out new", ["missing"]),
    (f"{BUILD} --corpus empty --out new", ["empty", "Parquet"]),
    (f"{BUILD} --corpus table.csv --out new", ["table.csv", "JSONL"]),
    (f"{BUILD} --corpus empty.txt --out new", ["empty.txt"]),
    (f"{BUILD} --corpus tabs.txt --out new", ["tabs.txt", "3 columns", "JSONL"]),
    (f"{BUILD} --corpus bad.jsonl --skip-bad 9 --out new", ["2 bad records", "bad.jsonl: line 1", "'text'"]),
    (f"{BUILD} --from negative.jsonl --skip-bad 9 --out new", ["1 bad record;", "negative.jsonl: line 1", "-1"]),
    (f"{BUILD} --corpus book.txt --held-out 0.1 --out new", ["book.txt", "--held-out 0.1", "blank lines"]),
    (f"{BUILD} --corpus texts/000.txt words.txt --held-out 1e-9 --out new", ["its 2 documents", "held-out"]),
    (f"{BUILD} --corpus empty.txt words.txt --held-out 1e-9 --out new", ["its 1 document ", "held-out"]),
    *[(f"verify {file}", [file, "look", "--from", "--corpus"]) for file in ("negative.jsonl", "book.txt", "table.csv")],
    (f"{BUILD} --corpus noise.txt --out new", ["noise.txt", "UTF-8"]),
    (f"{BUILD} --corpus nogzip.txt.gz --out new", ["nogzip.txt.gz"]),
    (f"{BUILD} --corpus cut.txt.gz --out new", ["cut.txt.gz"]),
    (f"{BUILD} --corpus broken.jsonl --out new", ["broken.jsonl", "2"]),
    (f"{BUILD} --corpus fields.jsonl --out new", ["fields.jsonl", "text", "--json-field"]),
    (f"{BUILD} --corpus texts --out texts", ["texts"]),
    (f"{BUILD} --corpus texts --out new --vocabulary missing.txt", ["missing.txt"]),
    (f"{BUILD} --corpus texts --out new --vocabulary texts", ["texts"]),
    (f"{BUILD} --corpus texts --out new --vocabulary words.txt", ["words.txt", "[CLS]"]),
    (f"{BUILD} --corpus texts --out new --tokenizer broken.jsonl", ["broken.jsonl"]),
    (f"{BUILD} --corpus texts --out new --tokenizer t.json --vocabulary vocab.txt", ["--tokenizer", "--vocabulary"]),
    (f"{BUILD} --corpus texts --out new --recipe tiny.yml", ["tiny.yml"]),
    (f"{BUILD} --from texts --out new", ["texts"]),
    (f"{BUILD} --from noise.txt --out new", ["noise.txt"]),
    (f"{BUILD} --corpus texts --out data", ["data", "--overwrite"]),
    (f"{BUILD} --corpus texts --out new --append", ["--append", "data.mixed_with"]),
    ("verify missing", ["missing"]),
    ("verify texts", ["texts"]),
    ("verify damaged", ["damaged"]),
    ("verify garbled", ["garbled", "manifest.json"]),
    ("look missing.csv", ["missing.csv"]),
    ("look broken.csv", ["broken.csv", "2"]),
    ("look wikipedia_512 --plot nowhere/a.png", ["--plot", "nowhere"]),
    ("pack --histogram broken.csv --max-sequence-length 512", ["broken.csv", "2"]),
    ("verify tiny.yml", ["tiny.yml"]),
    ("look wikipedia_512 --out texts", ["--out", "texts"]),
    ("convert noise.txt new --to-format mlperf_tfrecord", ["noise.txt"]),
    ("convert data new --to-format mlperf", ["--to-format", "mlperf", "mlperf_tfrecord"]),
    # ---- configurations
    ("pretrain --config unknown.yml", ["unknown.yml", "model.hiden_size", "hidden_size"]),
    ("pretrain --config wrong_type.yml", ["wrong_type.yml", "model.num_layers", "three"]),
    ("pretrain --config list.yml", ["list.yml"]),
    ("pretrain --config noyaml.yml", ["noyaml.yml"]),
    ("pretrain --config noise.txt", ["noise.txt"]),
    (f"{TRAIN} --set steps", ["steps", "="]),
    (f"{TRAIN} --set model.hidden_size=15", ["model.hidden_size", "15", "num_heads"]),
    (f"{TRAIN} --set batch.micro_batch=0", ["batch.micro_batch", "0"]),
    (f"{TRAIN} --set optimizer.learning_rate=fast", ["optimizer.learning_rate", "fast"]),
    (f"{TRAIN} --set optimizer.learning_rate=-1", ["optimizer.learning_rate", "-1"]),
    (f"{TRAIN} --set model.hidden_dropout=1.5", ["model.hidden_dropout", "1.5"]),
    (f"{TRAIN} --set task.name=translation", ["task.name", "translation"]),
    # ---- data, weights and runs that do not belong together
    (f"{TRAIN} --data missing", ["missing", "packed-bert build"]),
    (f"{TRAIN} --data texts", ["texts", "packed-bert build"]),
    (f"{TRAIN} --data empty.txt", ["empty.txt", "packed-bert build"]),
    (f"{TRAIN} --data garbled", ["garbled"]),
    (f"{TRAIN} --set data.max_sequence_length=128 --set model.max_position_embeddings=128", ["data", "128", "64"]),
    (f"{TRAIN} --out empty.txt", ["empty.txt"]),
    (f"{TRAIN} --out /proc/none/run", ["/proc/none"]),
    (f"{TRAIN} --start-from missing", ["missing"]),
    ("pretrain --resume missing", ["missing"]),
    ("pretrain --resume texts", ["texts"]),
    ("pretrain --resume run", ["run", "checkpoint"]),
    ("export run hf", ["run", "checkpoint"]),
    ("export missing hf", ["missing"]),
    ("export --import texts new", ["texts", "config.json"]),
    ("predict texts empty.txt", ["texts", "fine-tuned", "config.json"]),
    ("predict missing empty.txt", ["missing"]),
    ("predict run empty.txt", ["run", "checkpoint"]),
    ("predict bert missing.json", ["missing.json"]),
    ("predict bert squad.json", ["bert", "BertModel"]),
    ("predict bert", ["FILE"]),
    (f"{FINETUNE} --set model.checkpoint=texts", ["texts"]),
    (f"{FINETUNE} --set model.checkpoint=missing", ["missing"]),
    (f"{FINETUNE} --set model.checkpoint=bert --set data.training=missing.json", ["missing.json"]),
    (f"{FINETUNE} --set model.checkpoint=bert --data-dir missing", ["--data-dir missing"]),
    (f"{CLASSIFY} --set task.text_column=text", ["table.csv", "'text'", "texts"]),
    (f"{FINETUNE} {TINY} --set data.training=fields.jsonl", ["fields.jsonl", "1"]),
    (f"{FINETUNE} {TINY} --set task.stride=-1", ["task.stride", "-1"]),
    (f"{FINETUNE} --set model.checkpoint=bert", ["data.max_sequence_length", "384", "64"]),
    ("report --config missing.yml", ["missing.yml"]),
    ("report --measured run", ["run", "log.jsonl"]),
    # ---- lengths, vocabularies and settings of the wrong kind
    ("pack --histogram squad_1_1_384 --max-sequence-length 512tokens", ["--max-sequence-length", "512tokens"]),
    ("compare --max-sequence-length 1.5", ["--max-sequence-length", "1.5"]),
    ("compare --histogram nan.csv", ["nan.csv", "--max-sequence-length"]),
    ("pack --histogram nan.csv --max-sequence-length 512", ["nan.csv", "2", "nan"]),
    ("verify data/manifest.json", ["data/manifest.json", "directory"]),
    ("verify", ["DIR"]),
    ("convert data", ["DST"]),
    ("convert missing new --to-format mlperf_tfrecord", ["missing"]),
    ("convert empty new --to-format mlperf_tfrecord", ["empty", ".tfrecord"]),
    ("convert data data --to-format mlperf_tfrecord", ["data", "files to read"]),
    (f"{BUILD} --corpus texts --out new --on 127.0.0.1", ["--on", "--workers"]),
    (f"{BUILD} --corpus texts --out new --task 9/4", ["--task", "9/4", "counted from 0"]),
    (f"{BUILD} --corpus texts --out new --task 4", ["--task", "I/N"]),
    (f"{BUILD} --corpus texts --out new --vocabulary twice.txt", ["twice.txt", "'the'", "twice"]),
    (f"{BUILD} --corpus texts --out new --vocabulary empty.txt", ["empty.txt", "[PAD]"]),
    (f"{BUILD} --corpus texts --out new --vocabulary noise.txt", ["noise.txt", "UTF-8"]),
    (f"{BUILD} --corpus texts --out new --vocabulary-size 3", ["vocabulary of 3", "at least"]),
    (f"{BUILD} --corpus texts --out new --vocabulary-size 30k", ["--vocabulary-size", "30k"]),
    (f"{BUILD} --corpus texts --out new --seed -1", ["seed", "-1"]),
    (f"{BUILD} --corpus two words --out new", ["two"]),
    (f"{BUILD} --corpus squad.json --out new", ["squad.json", "--json-field"]),
    (f"{BUILD} --from data --out data", ["data", "--overwrite"]),
    (f"{BUILD} --corpus texts --out new --recipe broken.jsonl", ["broken.jsonl", "recipe"]),
    (f"{BUILD} --corpus texts --out new --max-sequence-length 2", ["max_sequence_length", "2", "5"]),
    ("pretrain --config section.yml", ["section.yml", "modell", "model"]),
    ("pretrain --config scalar.yml", ["scalar.yml", "model", "3"]),
    ("pretrain --config twice.yml", ["twice.yml", "hidden_size", "twice"]),
    ("pretrain --config tab.yml", ["tab.yml", "line 2"]),
    (f"{TRAIN} --set model.num_heads=[1,2]", ["model.num_heads", "[1, 2]", "whole number"]),
    (f"{TRAIN} --set placement.layers_per_ipu=3", ["placement.layers_per_ipu", "list"]),
    (f"{TRAIN} --set placement.layers_per_ipu=[1]", ["placement.layers_per_ipu", "model.num_layers"]),
    (f"{TRAIN} --set data.shares=[0.5,0.6]", ["data.shares", "2", "1"]),
    (f"{TRAIN} --data data --set data.mixed_with=[./data]", ["data.mixed_with", "twice", "data.shares"]),
    (f"{TRAIN} --set data.shares=0.5", ["data.shares", "0.5", "list"]),
    (f"{TRAIN} --set run=4", ["run", "4", "settings"]),
    (f"{TRAIN} --set optimizer.learning_rate=nan", ["optimizer.learning_rate", "nan"]),
    (f"{TRAIN} --set model.vocabulary_size=10", ["data", "128", "model.vocabulary_size", "10"]),
    (f"{TRAIN} --start-from run", ["run", "checkpoint"]),
    (f"{TRAIN} extra", ["extra"]),
    ("export run", ["target"]),
    ("export --import bert run", ["run", "empty directory"]),
    ("check-model missing", ["missing", "save_pretrained"]),
    ("check-model texts", ["texts", "config.json"]),
    ("finetune --config tiny.yml", ["tiny.yml", "task.name", "run_pretraining.py"]),
    ("pretrain --config finetune_squad_packed", ["task.name", "squad", "finetune"]),
    (f"{FINETUNE} {TINY} --set data.training=noise.txt", ["noise.txt", "UTF-8"]),
    (f"{FINETUNE} {TINY} --set data.training=empty.txt", ["empty.txt", "JSON"]),
    # ---- builds
    (f"{BUILD} --corpus blank --out new", ["vocabulary"]),
    (f"{BUILD} --corpus blank --vocabulary vocab.txt --out new", ["blank"]),
    (f"{BUILD} --synthetic squad_1_1_384 --max-sequence-length 384 --held-out 0.1 --out new", ["held", "documents"]),
    (f"{BUILD} --corpus texts --out new --held-out 0.00001", ["--held-out", "1e-05"]),
    (f"{BUILD} --corpus texts --out new --held-out 0.99999", ["--held-out", "0.99999"]),
    (f"{BUILD} --from one.tfrecord --out new --max-sequence-length 6", ["record 0", "7", "6"]),
    (f"{BUILD} --from one.tfrecord --out new --format tf", ["'tf'"]),
    (f"{BUILD} --from one.tfrecord --out new --format hdf5", ["one.tfrecord", "HDF5"]),
    (f"{BUILD} --from one.tfrecord --out new --columns x", ["column", "Parquet"]),
    # ---- packers and lengths
    ("pack --packer spfhp --max-sequences-per-pack 0", ["--max-sequences-per-pack", "'0'"]),
    ("pack --packer spfhp --max-sequence-length -3", ["--max-sequence-length", "-3"]),
    ("pack --packer spfhp --max-sequence-length 100", ["512"]),
    ("pack --packer spfhp --histogram texts/000.txt", ["--max-sequence-length"]),
    (
        "pack --packer spfhp --histogram texts/000.txt --max-sequence-length 4",
        ["000.txt", "length,count"],
    ),
    ("pack --packer spfhp --histogram squad_1_1_384 --synthetic uniform:max=9,n=100", ["--histogram", "--synthetic"]),
    ("pack --packer spfhp --synthetic uniform:max=9", ["n ", "uniform"]),
    ("pack --packer spfhp --out nowhere/r.json", ["--out nowhere/r.json", "nowhere"]),
    ("pack --packer spfhp --depth 3", ["--depth", "--help"]),
    ("pack --packer nnlshp --max-sequences-per-pack unlimited", ["optimal", "spfhp"]),
    ("pack --packer nnlshp --rounds x", ["--rounds", "'x'"]),
    ("pack --packer optimal --out .", ["--out .", "file"]),
    ("pack --packer optimal --histogram . --out l.csv", ["--out l.csv"]),
    ("pack --packer optimal --histogram l.csv --out ./l.csv", ["--out ./l.csv"]),
    ("stream --plot .", ["--plot .", "file"]),
    ("stream --plot nowhere/x.png", ["--plot nowhere/x.png", "nowhere"]),
    ("stream --seed -1", ["--seed", "-1"]),
    ("compare --csv nowhere/x.csv", ["--csv nowhere/x.csv", "nowhere"]),
    ("compare --plot x.docx", ["--plot x.docx", ".png", ".svg"]),
    ("compare --histogram l.csv --csv ./l.csv", ["--csv ./l.csv"]),
    ("compare --depths 2,zero", ["--depths", "'zero'", "unlimited"]),
    ("compare --packers spfhp,best", ["--packers", "'best'"]),
    ("compare --histogram nowhere", ["nowhere", "wikipedia_512", "squad_1_1_384"]),
    ("look wikipedia_512 l.csv --out l.csv", ["--out l.csv"]),
    ("look l.csv --plot x.csv", ["--plot x.csv", ".png", ".svg"]),
    # ---- fine-tuned models
    (f"{FINETUNE} {TINY} --set model.vocabulary=nothing.txt", ["nothing.txt", "vocab.txt"]),
    (f"{FINETUNE} {TINY} --set data.packer=best", ["data.packer", "'best'", "greedy"]),
    (f"{FINETUNE} {TINY} --set run.epochs=6e-3", ["run.epochs"]),
    (f"{FINETUNE} {TINY} --set engine.attention=fast", ["engine.attention", "'fast'", "varlen"]),
    ("predict tuned train.csv --set data.max_sequence_length=128", ["64"]),
    ("predict tuned train.csv --set task.name=tokens", ["tuned", "single_label"]),
    ("predict tuned train.csv --set batch.micro_batch=0", ["batch.micro_batch", "0"]),
    ("predict tuned train.csv --set data.evaluation=other.csv", ["data.evaluation"]),
    ("predict tuned train.csv --set batch.sequences_per_update=8", ["batch.sequences_per_update"]),
    ("predict tuned train.csv --set run.seed=7", ["run.seed"]),
    ("predict tuned train.csv --output no/such/file", ["no/such"]),
    ("export missing out", ["missing", "directory of a run"]),
    ("export --import bert texts", ["texts", "empty"]),
    ("check-model json:nothing", ["json:nothing"]),
    ("check-model json:loads --collator collate", ["collate", "module:name"]),
    # ---- names that other projects use
    (f"{TRAIN} --set optimizer.lr=1", ["optimizer.lr", "optimizer.learning_rate"]),
    (f"{TRAIN} --set batch_size=8", ["batch_size", "batch.micro_batch"]),
    (f"{TRAIN} --set epochs=3", ["epochs", "run.steps"]),
    (f"{TRAIN} --set seq_len=128", ["seq_len", "data.max_sequence_length"]),
    (f"{TRAIN} --set depth=3", ["depth", "data.max_sequences_per_pack"]),
    (f"{TRAIN} --batch-size 8", ["--batch-size", "--set batch.micro_batch"]),
    (f"{TRAIN} --epochs 3", ["--epochs", "--steps"]),
    (f"{BUILD} --corpus texts --out new --seq-len 3", ["--seq-len", "--max-sequence-length"]),
    (f"{BUILD} --corpus texts --out new --depth 3", ["--depth", "--max-sequences-per-pack"]),
    ("predict tuned train.csv --epochs 3", ["--epochs 3 (try"]),  # no setting of training is advised
    ("look l.csv --length 8", ["--length", "--max-sequence-length"]),
    # ---- numbers out of range, and files in the wrong place
    (f"{BUILD} --corpus texts --out new --epoch -1", ["epoch", "-1"]),
    (f"{BUILD} --corpus texts --out new --multiple-of 128", ["multiple_of", "128", "64"]),
    (f"{BUILD} --corpus texts --out new --split train", ["--split train", "texts"]),
    (f"{BUILD} --corpus texts --out l.csv/new", ["l.csv/new", "--out"]),
    ("check-model bert --longest 9 --row 4", ["--longest 9", "--row 4"]),
    ("export data hf", ["data", "config.yml"]),
    ("look l.csv --packer nnlshp --max-sequence-length 16", ["nnlshp", "--max-sequences-per-pack 3"]),
    ("look data --pack 100000", ["--pack 100000", "data"]),
    ("predict tuned table.csv --output table.csv", ["--output table.csv"]),
    ("stream --synthetic sample:nothing,n=5", ["'nothing'", "wikipedia_512"]),
    ("convert l.csv new.jsonl", ["l.csv", "jsonl"]),
]


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    return command_files(tmp_path_factory.mktemp("here"))


@pytest.mark.parametrize("command, names", REFUSED, ids=[command for command, _ in REFUSED])
def test_a_refused_command_names_the_reason_in_one_line(here, monkeypatch, capsys, command, names):
    if command.startswith("check-model"):
        pytest.importorskip("transformers", reason="needs transformers")
    if "one.tfrecord" in command:
        pytest.importorskip("google_crc32c", reason="needs the formats extra (google-crc32c)")
    if "hdf5" in command:
        pytest.importorskip("h5py", reason="needs the formats extra (h5py)")
    monkeypatch.chdir(here)
    # These two describe the model and the run before they refuse a setting.
    after = "(model .*\n)?" if "predict tuned" in command else "(data .*)?" if "pretrain" in command else ""
    refusal_of(main, shlex.split(command), capsys, *map(re.escape, names), unchanged=here, after=after)


@pytest.mark.skipif(importlib.util.find_spec("poptorch") is not None, reason="the Poplar SDK is installed")
@pytest.mark.parametrize("command", [TRAIN, f"{FINETUNE} {TINY}", "predict tuned train.csv"])
def test_ipus_need_the_sdk(here, monkeypatch, capsys, command):
    monkeypatch.chdir(here)
    arguments = shlex.split(f"{command} --engine ipu")
    refusal_of(main, arguments, capsys, "Poplar SDK", "--engine host", unchanged=here, after="(model .*\n)?")


def test_a_full_disk_is_one_line_that_names_the_file(here, monkeypatch, capsys):
    def full(self, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.chdir(here)
    monkeypatch.setattr(Path, "write_bytes", full)
    command = "pack --histogram squad_1_1_384 --out recipe.json"
    refusal_of(main, shlex.split(command), capsys, "recipe.json", unchanged=here)
