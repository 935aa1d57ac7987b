"""The files that the commands in the tables of `test_refused_commands` and `test_advice` name."""

import gzip
import importlib.util
import shutil
from pathlib import Path

from pack_data.text.vocabulary import SPECIAL_TOKENS
from tests.fine_tuning_files import tiny_checkpoint, tiny_fine_tuned, tiny_squad
from tests.format_samples import example, frame, mlperf_row, tf_example
from tests.pack_data.text_corpus import write_corpus
from tests.tiny_runs import tiny_config, tiny_data


def command_files(folder):
    """Write the files into a directory, and return it."""
    write_corpus(folder / "texts", 6)
    (folder / "empty").mkdir()
    (folder / "empty.txt").write_text("")
    (folder / "noise.txt").write_bytes(bytes(range(128, 256)) * 20)
    (folder / "nogzip.txt.gz").write_text("This is no gzip file.\n")
    (folder / "cut.txt.gz").write_bytes(gzip.compress(b"A text that ends too early. " * 1000)[:-40])
    (folder / "broken.jsonl").write_text('{"text": "one"}\n{"text": \n')
    (folder / "fields.jsonl").write_text('{"body": "one"}\n')
    (folder / "table.csv").write_text("texts,label\none,a\ntwo,b\n")
    (folder / "tabs.txt").write_text("1\tone\tA text.\n" * 5)
    (folder / "bad.jsonl").write_text('{"body": "one"}\n{"text": 5}\n')
    (folder / "negative.jsonl").write_text('{"input_ids": [-1]}\n')
    (folder / "book.txt").write_text("One sentence. Another one.\n")
    (folder / "words.txt").write_text("the\nof\nand\n")
    (folder / "vocab.txt").write_text("\n".join(SPECIAL_TOKENS) + "\n")
    (folder / "t.json").write_text("{}")
    (folder / "broken.csv").write_text("length,count\nten,3\n")
    (folder / "nan.csv").write_text("length,count\n3,nan\n")
    (folder / "twice.txt").write_text("\n".join(SPECIAL_TOKENS) + "\nthe\nthe\n")
    (folder / "section.yml").write_text("modell:\n  hidden_size: 16\n")
    (folder / "scalar.yml").write_text("model: 3\n")
    (folder / "twice.yml").write_text("model:\n  hidden_size: 16\n  hidden_size: 32\n")
    (folder / "tab.yml").write_text("model:\n\thidden_size: 16\n")
    tiny_data(folder / "data")
    tiny_data(folder / "other", vocabulary=300)
    for name in ("damaged", "garbled"):
        shutil.copytree(folder / "data", folder / name)
    shard = next(path for path in sorted((folder / "damaged").iterdir()) if path.suffix != ".json")
    shard.write_bytes(shard.read_bytes()[:-100])
    (folder / "garbled" / "manifest.json").write_text('{"format": ')
    text = tiny_config(folder / "tiny.yml", Path("data")).read_text()
    (folder / "unknown.yml").write_text(text.replace("hidden_size", "hiden_size"))
    (folder / "wrong_type.yml").write_text(text.replace("num_layers: 2", "num_layers: three"))
    (folder / "list.yml").write_text("- model\n- data\n")
    (folder / "noyaml.yml").write_text("model: {hidden_size: 16\n")
    (folder / "run").mkdir()
    (folder / "run" / "config.yml").write_text(text)
    tiny_checkpoint(folder / "bert")
    tiny_squad(folder / "squad.json", questions=4)
    tiny_fine_tuned(folder / "tuned", "single_label")
    (folder / "blank").mkdir()
    (folder / "blank" / "a.txt").write_text(" \n\n")
    (folder / "l.csv").write_text("length,count\n5,3\n")
    if importlib.util.find_spec("google_crc32c") is not None:
        (folder / "one.tfrecord").write_bytes(frame(tf_example(mlperf_row(example(), 8, 2))))
    return folder
