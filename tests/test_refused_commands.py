"""The table of refused commands: each prints one line `error: ...`, exits with status 2, and writes nothing.

A row of REFUSED is a command, as a user types it in the directory of `command_files`, and behind `=>` the names and
values that its message must hold: the file or field, the rule, the way out. The table does not test wording.
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
from tests.refusals import refusal_of, rows_of

TRAIN = "pretrain --config tiny.yml"
BUILD = "build --max-sequence-length 64 --vocabulary-size 200 --workers 1"
FINETUNE = "finetune --config finetune_squad_packed --set data.training=squad.json --set data.evaluation=squad.json"
CLASSIFY = "finetune --config finetune_banking77_packed --set model.checkpoint=bert --set data.max_sequence_length=64"
CLASSIFY += " --set data.training=table.csv --set data.evaluation=table.csv"
TINY = "--set model.checkpoint=bert --set data.max_sequence_length=64"

REFUSED = rows_of(
    """
# what is typed
pretrain => --config | --resume
pretrain --config tiny.yml --resume run => --resume | --config
{TRAIN} --steps many => run.steps | many
{TRAIN} --steps -3 => run.steps | -3
{TRAIN} --engine gpu => engine.kind | gpu | host
{TRAIN} --out run --resume-if-there --allow-change x => --allow-change | --resume
{BUILD} --out new => --corpus | --synthetic | --from
{BUILD} --corpus texts => --out
{BUILD} --corpus= --out new => --corpus | empty
export '' hf => empty
{TRAIN} --data '' => --data | empty
{TRAIN} --set data.directory= => data.directory= | null
{BUILD} --corpus texts --out new --max-sequence-length=-64 => --max-sequence-length | -64
{BUILD} --corpus texts --out new --workers 1000000 => --workers | 1000000 | core
{BUILD} --corpus texts --out new --workers 0 => --workers | 0
{BUILD} --corpus texts --out new --packer best => --packer | best | optimal
pack l.txt --rows r.npy --longer cut => --longer | cut | truncate
{BUILD} --corpus texts --out new --held-out 5 => --held-out | 5
{BUILD} --corpus texts --out new --max-sequences-per-pack all => all | unlimited
{BUILD} --corpus texts --out new --masked-lm-probability 15 => --masked-lm-probability | 15
{BUILD} --corpus texts --out new --masked-lm-probability nan => --masked-lm-probability | nan | finite
{TRAIN} --out data => --out data | data set | another
{BUILD} --corpus texts --synthetic wikipedia_512 --out new => --synthetic | --corpus
{BUILD} --synthetic wikipedia --out new => wikipedia | wikipedia_512
{BUILD} --synthetic wikipedia_512 --out new => --max-sequence-length | 512
benchmark --size tiny --ranks 100000 => --ranks | 100000
look --workers 99999999 texts/000.txt => --workers | 99999999
pack --packer fastest => --packer | fastest | optimal
pack l.csv => --histogram l.csv
pack --packer spfhp --lengths l.csv => --histogram l.csv
# files and folders that are not what is wanted
pretrain --config missing.yml => missing.yml
pretrain --config texts => texts
pretrain --config packed_phase2_pod61 => packed_phase2_pod61 | packed_phase2_pod
{BUILD} --corpus missing --out new => missing
{BUILD} --corpus empty --out new => empty | Parquet
{BUILD} --corpus table.csv --out new => table.csv | JSONL
{BUILD} --corpus empty.txt --out new => empty.txt
{BUILD} --corpus tabs.txt --out new => tabs.txt | 3 columns | JSONL
{BUILD} --corpus bad.jsonl --skip-bad 9 --out new => 2 bad records | bad.jsonl: line 1 | 'text'
{BUILD} --from negative.jsonl --skip-bad 9 --out new => 1 bad record; | negative.jsonl: line 1 | -1
{BUILD} --corpus book.txt --held-out 0.1 --out new => book.txt | --held-out 0.1 | blank lines
{BUILD} --corpus texts/000.txt words.txt --held-out 1e-9 --out new => its 2 documents | held-out
{BUILD} --corpus empty.txt words.txt --held-out 1e-9 --out new => its 1 document with | held-out
verify negative.jsonl => negative.jsonl | look | --from | --corpus
verify book.txt => book.txt | look | --from | --corpus
verify table.csv => table.csv | look | --from | --corpus
{BUILD} --corpus noise.txt --out new => noise.txt | UTF-8
{BUILD} --corpus nogzip.txt.gz --out new => nogzip.txt.gz
{BUILD} --corpus cut.txt.gz --out new => cut.txt.gz
{BUILD} --corpus broken.jsonl --out new => broken.jsonl | 2
{BUILD} --corpus fields.jsonl --out new => fields.jsonl | text | --json-field
{BUILD} --corpus texts --out texts => texts
{BUILD} --corpus texts --out new --vocabulary missing.txt => missing.txt
{BUILD} --corpus texts --out new --vocabulary texts => texts
{BUILD} --corpus texts --out new --vocabulary words.txt => words.txt | [CLS]
{BUILD} --corpus texts --out new --tokenizer broken.jsonl => broken.jsonl
{BUILD} --corpus texts --out new --tokenizer t.json --vocabulary vocab.txt => --tokenizer | --vocabulary
{BUILD} --corpus texts --out new --recipe tiny.yml => tiny.yml
{BUILD} --from texts --out new => texts
{BUILD} --from noise.txt --out new => noise.txt
{BUILD} --corpus texts --out data => data | --overwrite
{BUILD} --corpus texts --out new --append => --append | data.mixed_with
verify missing => missing
verify texts => texts
verify damaged => damaged
verify garbled => garbled | manifest.json
look missing.csv => missing.csv
look broken.csv => broken.csv | 2
look wikipedia_512 --plot nowhere/a.png => --plot | nowhere
pack --histogram broken.csv --max-sequence-length 512 => broken.csv | 2
verify tiny.yml => tiny.yml
look wikipedia_512 --out texts => --out | texts
convert noise.txt new --to-format mlperf_tfrecord => noise.txt
convert data new --to-format mlperf => --to-format | mlperf | mlperf_tfrecord
# configurations
pretrain --config unknown.yml => unknown.yml | model.hiden_size | hidden_size
pretrain --config wrong_type.yml => wrong_type.yml | model.num_layers | three
pretrain --config list.yml => list.yml
pretrain --config noyaml.yml => noyaml.yml
pretrain --config noise.txt => noise.txt
{TRAIN} --set steps => steps | =
{TRAIN} --set model.hidden_size=15 => model.hidden_size | 15 | num_heads
{TRAIN} --set batch.micro_batch=0 => batch.micro_batch | 0
{TRAIN} --set optimizer.learning_rate=fast => optimizer.learning_rate | fast
{TRAIN} --set optimizer.learning_rate=-1 => optimizer.learning_rate | -1
{TRAIN} --set model.hidden_dropout=1.5 => model.hidden_dropout | 1.5
{TRAIN} --set task.name=translation => task.name | translation
# data, weights and runs that do not belong together
{TRAIN} --data missing => missing | packed-bert build
{TRAIN} --data texts => texts | packed-bert build
{TRAIN} --data empty.txt => empty.txt | packed-bert build
{TRAIN} --data garbled => garbled
{TRAIN} --set data.max_sequence_length=128 --set model.max_position_embeddings=128 => data | 128 | 64
{TRAIN} --out empty.txt => empty.txt
{TRAIN} --out /proc/none/run => /proc/none
{TRAIN} --start-from missing => missing
pretrain --resume missing => missing
pretrain --resume texts => texts
pretrain --resume run => run | checkpoint
export run hf => run | checkpoint
export missing hf => missing
export --import texts new => texts | config.json
predict texts empty.txt => texts | fine-tuned | config.json
predict missing empty.txt => missing
predict run empty.txt => run | checkpoint
predict bert missing.json => missing.json
predict bert squad.json => bert | BertModel
predict bert => FILE
{FINETUNE} --set model.checkpoint=texts => texts
{FINETUNE} --set model.checkpoint=missing => missing
{FINETUNE} --set model.checkpoint=bert --set data.training=missing.json => missing.json
{FINETUNE} --set model.checkpoint=bert --data-dir missing => --data-dir missing
{CLASSIFY} --set task.text_column=text => table.csv | 'text' | texts
{FINETUNE} {TINY} --set data.training=fields.jsonl => fields.jsonl | 1
{FINETUNE} {TINY} --set task.stride=-1 => task.stride | -1
{FINETUNE} --set model.checkpoint=bert => data.max_sequence_length | 384 | 64
report --config missing.yml => missing.yml
report --measured run => run | log.jsonl
# lengths, vocabularies and settings of the wrong kind
pack --histogram squad_1_1_384 --max-sequence-length 512tokens => --max-sequence-length | 512tokens
compare --max-sequence-length 1.5 => --max-sequence-length | 1.5
compare --histogram nan.csv => nan.csv | --max-sequence-length
pack --histogram nan.csv --max-sequence-length 512 => nan.csv | 2 | nan
verify data/manifest.json => data/manifest.json | directory
verify => DIR
convert data => DST
convert missing new --to-format mlperf_tfrecord => missing
convert empty new --to-format mlperf_tfrecord => empty | .tfrecord
convert data data --to-format mlperf_tfrecord => data | files to read
{BUILD} --corpus texts --out new --on 127.0.0.1 => --on | --workers
{BUILD} --corpus texts --out new --task 9/4 => --task | 9/4 | counted from 0
{BUILD} --corpus texts --out new --task 4 => --task | I/N
{BUILD} --corpus texts --out new --vocabulary twice.txt => twice.txt | 'the' | twice
{BUILD} --corpus texts --out new --vocabulary empty.txt => empty.txt | [PAD]
{BUILD} --corpus texts --out new --vocabulary noise.txt => noise.txt | UTF-8
{BUILD} --corpus texts --out new --vocabulary-size 3 => vocabulary of 3 | at least
{BUILD} --corpus texts --out new --vocabulary-size 30k => --vocabulary-size | 30k
{BUILD} --corpus texts --out new --seed -1 => seed | -1
{BUILD} --corpus two words --out new => two
{BUILD} --corpus squad.json --out new => squad.json | --json-field
{BUILD} --from data --out data => data | --overwrite
{BUILD} --corpus texts --out new --recipe broken.jsonl => broken.jsonl | recipe
{BUILD} --corpus texts --out new --max-sequence-length 2 => max_sequence_length | 2 | 5
pretrain --config section.yml => section.yml | modell | model
pretrain --config scalar.yml => scalar.yml | model | 3
pretrain --config twice.yml => twice.yml | hidden_size | twice
pretrain --config tab.yml => tab.yml | line 2
{TRAIN} --set model.num_heads=[1,2] => model.num_heads | [1, 2] | whole number
{TRAIN} --set placement.layers_per_ipu=3 => placement.layers_per_ipu | list
{TRAIN} --set placement.layers_per_ipu=[1] => placement.layers_per_ipu | model.num_layers
{TRAIN} --set data.shares=[0.5,0.6] => data.shares | 2 | 1
{TRAIN} --data data --set data.mixed_with=[./data] => data.mixed_with | twice | data.shares
{TRAIN} --set data.shares=0.5 => data.shares | 0.5 | list
{TRAIN} --set run=4 => run | 4 | settings
{TRAIN} --set optimizer.learning_rate=nan => optimizer.learning_rate | nan
{TRAIN} --set model.vocabulary_size=10 => data | 128 | model.vocabulary_size | 10
{TRAIN} --start-from run => run | checkpoint
{TRAIN} extra => extra
export run => target
export --import bert run => run | empty directory
check-model missing => missing | save_pretrained
check-model texts => texts | config.json
finetune --config tiny.yml => tiny.yml | task.name | run_pretraining.py
pretrain --config finetune_squad_packed => task.name | squad | finetune
{FINETUNE} {TINY} --set data.training=noise.txt => noise.txt | UTF-8
{FINETUNE} {TINY} --set data.training=empty.txt => empty.txt | JSON
# builds
{BUILD} --corpus blank --out new => vocabulary
{BUILD} --corpus blank --vocabulary vocab.txt --out new => blank
{BUILD} --synthetic squad_1_1_384 --max-sequence-length 384 --held-out 0.1 --out new => held | documents
{BUILD} --corpus texts --out new --held-out 0.00001 => --held-out | 1e-05
{BUILD} --corpus texts --out new --held-out 0.99999 => --held-out | 0.99999
{BUILD} --from one.tfrecord --out new --max-sequence-length 6 => record 0 | 7 | 6
{BUILD} --from one.tfrecord --out new --format tf => 'tf'
{BUILD} --from one.tfrecord --out new --format hdf5 => one.tfrecord | HDF5
{BUILD} --from one.tfrecord --out new --columns x => column | Parquet
# packers and lengths
pack --packer spfhp --max-sequences-per-pack 0 => --max-sequences-per-pack | '0'
pack --packer spfhp --max-sequence-length -3 => --max-sequence-length | -3
pack --packer spfhp --max-sequence-length 100 => 512
pack --packer spfhp --histogram texts/000.txt => --max-sequence-length
pack --packer spfhp --histogram texts/000.txt --max-sequence-length 4 => 000.txt | length,count
pack --packer spfhp --histogram squad_1_1_384 --synthetic uniform:max=9,n=100 => --histogram | --synthetic
pack --packer spfhp --synthetic uniform:max=9 => n  | uniform
pack --packer spfhp --out nowhere/r.json => --out nowhere/r.json | nowhere
pack --packer spfhp --depth 3 => --depth | --help
pack --packer nnlshp --max-sequences-per-pack unlimited => optimal | spfhp
pack --packer nnlshp --rounds x => --rounds | 'x'
pack --packer optimal --budget 0 => --budget | '0'
pack --packer optimal --out . => --out . | file
pack --packer optimal --histogram . --out l.csv => --out l.csv
pack --packer optimal --histogram l.csv --out ./l.csv => --out ./l.csv
stream --plot . => --plot . | file
stream --plot nowhere/x.png => --plot nowhere/x.png | nowhere
stream --seed -1 => --seed | -1
compare --csv nowhere/x.csv => --csv nowhere/x.csv | nowhere
compare --plot x.docx => --plot x.docx | .png | .svg
compare --histogram l.csv --csv ./l.csv => --csv ./l.csv
compare --depths 2,zero => --depths | 'zero' | unlimited
compare --packers spfhp,best => --packers | 'best'
compare --histogram nowhere => nowhere | wikipedia_512 | squad_1_1_384
look wikipedia_512 l.csv --out l.csv => --out l.csv
look l.csv --plot x.csv => --plot x.csv | .png | .svg
# fine-tuned models
{FINETUNE} {TINY} --set model.vocabulary=nothing.txt => nothing.txt | vocab.txt
{FINETUNE} {TINY} --set data.packer=best => data.packer | 'best' | greedy
{FINETUNE} {TINY} --set run.epochs=6e-3 => run.epochs
{FINETUNE} {TINY} --set engine.attention=fast => engine.attention | 'fast' | varlen
predict tuned train.csv --set data.max_sequence_length=128 => 64
predict tuned train.csv --set task.name=tokens => tuned | single_label
predict tuned train.csv --set batch.micro_batch=0 => batch.micro_batch | 0
predict tuned train.csv --set data.evaluation=other.csv => data.evaluation
predict tuned train.csv --set batch.sequences_per_update=8 => batch.sequences_per_update
predict tuned train.csv --set run.seed=7 => run.seed
predict tuned train.csv --output no/such/file => no/such
export missing out => missing | directory of a run
export --import bert texts => texts | empty
check-model json:nothing => json:nothing
check-model json:loads --collator collate => collate | module:name
# names that other projects use
{TRAIN} --set optimizer.lr=1 => optimizer.lr | optimizer.learning_rate
{TRAIN} --set batch_size=8 => batch_size | batch.micro_batch
{TRAIN} --set epochs=3 => epochs | run.steps
{TRAIN} --set seq_len=128 => seq_len | data.max_sequence_length
{TRAIN} --set depth=3 => depth | data.max_sequences_per_pack
{TRAIN} --batch-size 8 => --batch-size | --set batch.micro_batch
{TRAIN} --epochs 3 => --epochs | --steps
{BUILD} --corpus texts --out new --seq-len 3 => --seq-len | --max-sequence-length
{BUILD} --corpus texts --out new --depth 3 => --depth | --max-sequences-per-pack
# no setting of training is advised
predict tuned train.csv --epochs 3 => --epochs 3 (try
look l.csv --length 8 => --length | --max-sequence-length
# numbers out of range, and files in the wrong place
{BUILD} --corpus texts --out new --epoch -1 => epoch | -1
{BUILD} --corpus texts --out new --multiple-of 128 => multiple_of | 128 | 64
{BUILD} --corpus texts --out new --split train => --split train | texts
{BUILD} --corpus texts --out l.csv/new => l.csv/new | --out
check-model bert --longest 9 --row 4 => --longest 9 | --row 4
export data hf => data | config.yml
look l.csv --packer nnlshp --max-sequence-length 16 => nnlshp | --max-sequences-per-pack 3
look data --pack 100000 => --pack 100000 | data
predict tuned table.csv --output table.csv => --output table.csv
stream --synthetic sample:nothing,n=5 => 'nothing' | wikipedia_512
convert l.csv new.jsonl => l.csv | jsonl
""".format_map(globals())
)


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
