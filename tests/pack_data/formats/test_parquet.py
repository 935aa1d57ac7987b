"""Parquet and Arrow: any integer columns; padding, foreign columns, damage."""

import numpy as np
import pytest

pa = pytest.importorskip("pyarrow", reason="needs the formats extra (pyarrow)")
pq = pytest.importorskip("pyarrow.parquet", reason="needs the formats extra (pyarrow)")

from pack_data.formats import parquet, sequence_output
from pack_data.formats.records import EXAMPLE_FIELDS
from pack_data.formats.source import open_source
from pack_data.store.packs import FIELDS
from pack_data.text.corpus import documents
from tests.format_samples import records, values
from tests.refusals import refused
from tests.token_sequences import random_sequences


def plain(value):
    return {name: array.tolist() for name, array in value.items()}


def write_arrow(path, table, batch_rows=3):
    with pa.ipc.new_stream(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=batch_rows)
    return path


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_what_is_written_is_read_with_its_types_over_several_batches(tmp_path, monkeypatch, suffix):
    for module in (parquet, sequence_output):
        monkeypatch.setattr(module, "_ROWS", 2)
    table = pa.table(
        {
            "input_ids": pa.array([[1, 2], [3], [4]], pa.list_(pa.int32())),
            "labels": pa.array([[5, -100], [6], [7]], pa.list_(pa.int16())),
            "text": pa.array(["a", None, "b"]),
            "score": pa.array([0.5, 1.5, 2.5], pa.float32()),
            "words": pa.array([["x"], [], None], pa.list_(pa.string())),
            "when": pa.array([1, 2, 3], pa.timestamp("ms")),
        }
    )
    pq.write_table(table, tmp_path / "a.parquet")
    path = tmp_path / f"b.{suffix}"
    assert sequence_output.write(str(path), open_source(tmp_path / "a.parquet").read, suffix) == 3
    got = list(open_source(path).read())
    assert [record.origin.record for record in got] == [0, 1, 2]
    assert [plain(record.value) for record in got] == table.select(["input_ids", "labels"]).to_pylist()
    assert (pq.read_table(path) if suffix == "parquet" else pa.ipc.open_stream(str(path)).read_all()).equals(table)


@pytest.mark.parametrize("kind", ["list", "large_list", "fixed"])
def test_token_columns_of_every_list_type(tmp_path, kind):
    lists = {"list": pa.list_, "large_list": pa.large_list, "fixed": lambda value: pa.list_(value, 3)}[kind]
    table = pa.table(
        {
            "ids": pa.array([[1, 2, 3], [4, 5, 6]], lists(pa.int64())),
            "labels": pa.array([[-100, 2, 3], [-100, 5, 6]], lists(pa.int16())),
        }
    )
    pq.write_table(table, tmp_path / "a.parquet")
    got = values(tmp_path / "a.parquet")
    assert [plain(value) for value in got] == [
        {"ids": [1, 2, 3], "labels": [-100, 2, 3]},
        {"ids": [4, 5, 6], "labels": [-100, 5, 6]},
    ]
    assert (got[0]["ids"].dtype, got[0]["labels"].dtype) == (np.int64, np.int16)


def test_dictionary_and_null_rows(tmp_path):
    table = pa.table(
        {
            "input_ids": pa.array([[1], None, [2, None], [3]], pa.list_(pa.int32())),
            "tag": pa.array(["x", "y", "x", "x"]).dictionary_encode(),
        }
    )
    pq.write_table(table, tmp_path / "a.parquet")
    with refused("a.parquet: record 1", "input_ids", "null"):
        values(tmp_path / "a.parquet")
    source = open_source(tmp_path / "a.parquet", skip_bad=2)
    got = list(source.read())
    assert [(record.origin.record, record.value["input_ids"].tolist()) for record in got] == [(0, [1]), (3, [3])]
    sequence_output.write(str(tmp_path / "b.parquet"), lambda: got, "parquet")
    assert pq.read_table(tmp_path / "b.parquet")["tag"].to_pylist() == ["x", "x"]


@pytest.mark.parametrize(
    "table, names",
    [
        ({"input_ids": [[1, 2]], "labels": [[1]]}, ("record 0", "input_ids 2", "labels 1", "--columns")),
        ({"input_ids": [[1, -2]]}, ("record 0", "input_ids", -2, "index 1")),
        ({"input_ids": [[1, 2**31]]}, ("record 0", "input_ids", 2**31, "index 1")),
        ({"ids": [[1, 2**31]]}, ("record 0", "ids", 2**31)),
        ({"input_ids": pa.array([[]], pa.list_(pa.int32()))}, ("record 0", "input_ids", "empty")),
        ({"input_ids": [[1, 2, 3]], "attention_mask": [[1, 0, 1]]}, ("record 0", "attention_mask")),
        ({"input_ids": [[1, 2]], "attention_mask": [[0, 0]]}, ("record 0", "input_ids", "empty")),
        ({"text": ["a"], "number": [1]}, ("text", "string", "number", "int64", "--corpus")),
    ],
)
def test_what_is_wrong_is_said(tmp_path, table, names):
    pq.write_table(pa.table(table), tmp_path / "a.parquet")
    with refused("a.parquet", *names):
        values(tmp_path / "a.parquet")


def columns_of_bert(kind):
    """Return the columns, by name, of a file of BERT examples, of BERT packs, or of packs of token sequences."""
    if kind == "token_packs":
        return {"input_ids": [[5, 6, 7]], "input_mask": [[1, 1, 2]], "positions": [[0, 1, 0]]}
    return {name: [[1, 1, 1]] for name in (EXAMPLE_FIELDS if kind == "examples" else FIELDS)}


@pytest.mark.parametrize("name", sorted({*FIELDS, *EXAMPLE_FIELDS, "nothing"}))
@pytest.mark.parametrize("kind", ["examples", "packs", "token_packs"])
def test_examples_and_packs_in_columns_are_refused_also_with_a_misnamed_column(tmp_path, kind, name):
    if kind == "token_packs" and name == "positions":
        return  # nothing is left that tells packs
    path = str(tmp_path / "a.parquet")
    columns = {("x" + old if old == name else old): values for old, values in columns_of_bert(kind).items()}
    pq.write_table(pa.table(columns), path)
    with refused("a.parquet", "no longer supported", "TFRecord", "--columns"):
        open_source(path)
    assert open_source(path, columns=(next(iter(columns)),)).kind == "tokens"


def test_single_fields_of_packs_may_stand_beside_tokens(tmp_path):
    path = str(tmp_path / "a.parquet")
    for other in ({"next_sentence_labels": [1]}, {"input_mask": [[1, 1]]}, {"positions": ["north"]}):
        pq.write_table(pa.table({"input_ids": [[5, 6]], **other}), path)
        assert open_source(path).kind == "tokens"


def test_a_column_that_is_not_there_is_said(tmp_path):
    pq.write_table(pa.table({"input_ids": [[1]], "text": ["a"]}), tmp_path / "a.parquet")
    with refused("a.parquet", "text", "integer lists", "input_ids"):
        open_source(tmp_path / "a.parquet", columns=["text"])


def test_a_damaged_page_costs_no_record_before_it(tmp_path):
    """Ten row groups of two; the fifth is damaged: its two records are counted, all others come out."""
    sequences = random_sequences(20)
    rows = list(records([{"input_ids": np.array(each)} for each in sequences]))
    path = tmp_path / "a.parquet"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sequence_output, "_ROWS", 2)
        sequence_output.write(str(path), lambda: rows, "parquet")
    chunk = pq.ParquetFile(path).metadata.row_group(4).column(0)
    raw = bytearray(path.read_bytes())
    raw[(chunk.dictionary_page_offset or chunk.data_page_offset) + chunk.total_compressed_size - 3] ^= 1
    path.write_bytes(raw)
    with refused("a.parquet: records 8 to 9", "row group 4"):
        values(path)
    source = open_source(path, skip_bad=2)
    assert [record.value["input_ids"].tolist() for record in source.read()] == sequences[:8] + sequences[10:]
    assert source.bad.count == 2


def test_a_stream_cut_between_batches_does_not_pass_for_whole(tmp_path):
    table = pa.table({"input_ids": [[n + 1] for n in range(9)]})
    path = write_arrow(tmp_path / "a.arrow", table)
    raw = path.read_bytes()
    path.write_bytes(raw[:-8])
    with refused("a.arrow: record 9", "end mark"):
        values(path)
    assert len(values(path, skip_bad=1)) == 9
    path.write_bytes(raw[:-60])
    got = []
    with refused("a.arrow: record 6", "Arrow", "6 records"):
        for record in open_source(path, skip_bad=99).read():
            got.append(record.value["input_ids"][0])
    assert got == [1, 2, 3, 4, 5, 6]


def test_an_ipc_file_is_read_too(tmp_path):
    table = pa.table({"input_ids": [[n + 1] for n in range(9)]})
    with pa.ipc.new_file(str(tmp_path / "a.arrow"), table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    assert [value["input_ids"].tolist() for value in values(tmp_path / "a.arrow")] == [[n + 1] for n in range(9)]


def test_text_that_is_not_utf_8_is_refused(tmp_path):
    """pyarrow checks neither Parquet nor Arrow by itself."""
    texts = pa.array([b"one two", b"\xff\xfe", b"three"]).view(pa.string())
    pq.write_table(pa.table({"text": texts}), tmp_path / "a.parquet")
    with refused("a.parquet: records 1 to 2", "UTF8"):
        list(documents(str(tmp_path / "a.parquet")))


@pytest.mark.parametrize(
    "keys, has_plain_footer", [(["text"], True), (["input_ids.list.element"], True), (["text"], False)]
)
@pytest.mark.parametrize("columns", [(), ("input_ids",)])
def test_encrypted_columns_are_refused_and_do_not_abort_the_process(tmp_path, keys, has_plain_footer, columns):
    encryption = pytest.importorskip("pyarrow.parquet.encryption")

    class Keys(encryption.KmsClient):
        def __init__(self, _):
            encryption.KmsClient.__init__(self)

        def wrap_key(self, key, _):
            return key

    table = pa.table({"input_ids": [[1, 2], [3]], "text": ["a", "b"]})
    settings = encryption.EncryptionConfiguration("footer", column_keys={"k": keys}, plaintext_footer=has_plain_footer)
    properties = encryption.CryptoFactory(Keys).file_encryption_properties(encryption.KmsConnectionConfig(), settings)
    with pq.ParquetWriter(tmp_path / "a.parquet", table.schema, encryption_properties=properties) as writer:
        writer.write_table(table)
    with refused("a.parquet", "encrypted" if has_plain_footer else "Arrow"):
        list(open_source(tmp_path / "a.parquet", columns=columns).blocks())
