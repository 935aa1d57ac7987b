"""`PackDataset`: the rows of a packing for a DataLoader, with workers, ranks and resume; Hugging Face data sets in."""

import json
import pickle

import numpy as np
import pytest

from pack_data import BuildOptions, PackDataset, build, pack, pack_dataset
from pack_data.batching.plans import BatchOptions
from pack_data.batching.sampler import IndexBatchSampler
from tests.format_samples import example, mlperf_row, write_hdf5
from tests.refusals import refused
from tests.token_sequences import random_sequences, sequences_of, write_megatron

S = 16
GIVEN = random_sequences(60)


def jsonl(path, sequences=GIVEN):
    path.write_text("".join(json.dumps({"input_ids": tokens}) + "\n" for tokens in sequences))
    return path


def sequences_in(rows):
    """The sequences of rows, as input_mask and positions tell them."""
    sequences = []
    for row in rows:
        for number in range(1, int(row["input_mask"].max()) + 1):
            slots = row["input_mask"] == number
            assert row["positions"][slots].tolist() == list(range(slots.sum()))
            sequences.append(row["input_ids"][slots].tolist())
    return sorted(sequences)


def sequences_of_batches(batches):
    sequences = []
    for batch in batches:
        ends = [int(end) for end in batch["cumulative_lengths"]]
        ids = batch["input_ids"][0].tolist()
        sequences += [ids[start:end] for start, end in zip(ends, ends[1:])]
    return sorted(sequences)


def built(tmp_path):
    options = BuildOptions(
        tmp_path / "built",
        source=jsonl(tmp_path / "a.jsonl"),
        max_sequence_length=S,
        max_sequences_per_pack=None,
    )
    return build(options)


@pytest.mark.parametrize("how", ["jsonl", "megatron", "built", "store", "examples"])
def test_each_sequence_stands_in_one_row(tmp_path, how):
    if how in ("built", "store"):
        store = built(tmp_path)
        rows = PackDataset(store if how == "store" else str(tmp_path / "built"))
    else:
        source = {
            "jsonl": lambda: jsonl(tmp_path / "a.jsonl"),
            "megatron": lambda: write_megatron(tmp_path / "a", GIVEN),
            "examples": lambda: [{"input_ids": tokens} for tokens in GIVEN],
        }[how]()
        rows = pack_dataset(source, max_sequence_length=S)
    every = [rows[number] for number in range(len(rows))]
    assert sequences_in(every) == sorted(GIVEN)
    assert rows.lengths.tolist() == [np.count_nonzero(row["input_mask"]) for row in every]
    assert len(rows) == len(pack([len(tokens) for tokens in GIVEN], max_sequence_length=S).bins)
    assert sequences_of_batches([rows.collate(every)]) == sorted(GIVEN)
    for one, other in zip(every, rows.__getitems__(list(range(len(rows))))):
        assert all(np.array_equal(one[name], other[name]) for name in one)
    assert all(np.array_equal(rows[-1][name], every[-1][name]) for name in every[-1])


def test_the_rows_of_pack_are_its_bins():
    packed = pack([len(tokens) for tokens in GIVEN], max_sequence_length=8, longer="split")
    rows = PackDataset([{"input_ids": tokens, "text": "x"} for tokens in GIVEN], packed=packed)
    assert len(rows) == len(packed.bins)
    for row, bin_ in zip((rows[number] for number in range(len(rows))), packed.bins):
        pieces = zip(
            *(
                values[bin_]
                for values in (
                    packed.fitted.example,
                    packed.fitted.start,
                    packed.fitted.stop,
                )
            )
        )
        tokens = [token for example, start, stop in pieces for token in GIVEN[example][start:stop]]
        assert row["input_ids"].tolist() == tokens
        assert set(row) == {"input_ids", "input_mask", "positions"}


def test_a_worker_opens_the_built_data_set_itself(tmp_path):
    store = built(tmp_path)
    rows = PackDataset(store)
    data = pickle.dumps(rows)
    assert len(data) < 20_000
    again = pickle.loads(data)
    assert all(np.array_equal(rows[3][name], again[3][name]) for name in rows[3])
    for examples, packer in (
        (GIVEN, "none"),
        (GIVEN[:9], "nnlshp"),
    ):  # the same sequences too, in other packs
        source = jsonl(tmp_path / "b.jsonl", examples)
        other = dict(source=source, max_sequence_length=S, packer=packer, overwrite=True)
        build(BuildOptions(tmp_path / "built", **other)).close()
        with refused("built", "again"):
            pickle.loads(data)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_with_ranks_and_resume(tmp_path, workers):
    torch = pytest.importorskip("torch")
    rows = pack_dataset(
        jsonl(tmp_path / "a.jsonl"),
        max_sequence_length=S,
        as_tensor=torch.from_numpy,
    )

    def loader(rank):
        options = BatchOptions(2, S, ranks=2, seed=1)
        sampler = IndexBatchSampler("RandomSampling+Padding", rows.lengths, options, rank=rank)
        options = dict(batch_sampler=sampler, collate_fn=rows.collate, num_workers=workers)
        return sampler, torch.utils.data.DataLoader(rows, **options)

    whole = [list(loader(rank)[1]) for rank in range(2)]
    assert len(whole[0]) == len(whole[1])
    full = [batch for batches in whole for batch in batches if len(batch["cumulative_lengths"]) > 1]
    assert [tokens for tokens in sequences_of_batches(full) if tokens != [0]] == sorted(GIVEN)
    assert all(torch.is_tensor(values) for values in full[0].values())
    sampler, again = loader(1)
    sampler.load_state_dict(sampler.state_at(0, 3))
    rest = list(again)
    assert len(rest) == len(whole[1]) - 3
    for one, other in zip(rest, whole[1][3:]):
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_rows_of_bert_are_stacked(tmp_path):
    options = BuildOptions(tmp_path / "out", synthetic="wikipedia_512", sequences=40)
    with build(options) as store:
        rows = PackDataset(tmp_path / "out")
        batch = store.batch(np.array([2, 0]))
        collated = rows.collate([rows[2], rows[0]])
        assert collated.keys() == batch.keys()
        assert all(np.array_equal(collated[name], batch[name]) for name in batch)
        store_of_bert = PackDataset(store)
        assert store_of_bert.is_bert
        assert store_of_bert.identity == rows.identity


def test_examples_of_bert_are_packed_by_a_build(tmp_path):
    pytest.importorskip("h5py", reason="needs the formats extra (h5py)")
    path = write_hdf5(tmp_path / "a.hdf5", [mlperf_row(example(), S, 2)])
    with refused(path, f"packed-bert build --from {path}"):
        pack_dataset(path, max_sequence_length=S)


def test_data_sets_of_hugging_face(tmp_path):
    datasets = pytest.importorskip("datasets")
    lengths = [len(tokens) for tokens in GIVEN]
    dataset = datasets.Dataset.from_dict({"input_ids": GIVEN, "text": ["x"] * len(GIVEN)})
    wanted = pack(lengths, max_sequence_length=S)
    for given in (
        dataset,
        dataset.with_format("numpy"),
        datasets.Dataset.from_dict({"length": lengths}),
    ):
        assert np.array_equal(pack(given, max_sequence_length=S).pack, wanted.pack)
    chosen = dataset.select(range(50, 10, -1))
    assert np.array_equal(pack(chosen, max_sequence_length=S).fitted.lengths, lengths[50:10:-1])
    options = BuildOptions(
        tmp_path / "out",
        source=chosen,
        max_sequence_length=S,
        max_sequences_per_pack=None,
    )
    build(options).close()
    build(options).close()  # the same examples again: nothing to do
    assert sequences_of(tmp_path / "out") == sorted(GIVEN[50:10:-1])
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["out"]
    dataset.save_to_disk(str(tmp_path / "saved"))
    for source in (dataset, tmp_path / "saved"):
        rows = pack_dataset(source, max_sequence_length=S)
        assert sequences_in([rows[number] for number in range(len(rows))]) == sorted(GIVEN)
    misleading = dataset.add_column("length", [1] * len(GIVEN))  # of something else than tokens
    assert sum(pack_dataset(misleading, max_sequence_length=S).lengths) == sum(lengths)
    with refused("columns none"):
        pack_dataset(dataset.select_columns("text"), max_sequence_length=S)
    with refused("columns text", "length, lengths or input_ids"):
        pack(dataset.select_columns("text"), max_sequence_length=S)


def test_what_is_cut_off_is_said_and_examples_without_a_label_are_named(caplog):
    """Examples 1 and 3 lose all labels; of example 0 one stays, example 2 had none, and example 4 fits."""
    labelled = {0: [3, 9], 1: [6, 9], 2: [], 3: [5], 4: [1]}
    examples = []
    for number, places in labelled.items():
        ids = np.arange(4 if number == 4 else 10) + 10 * number
        examples.append(
            {
                "input_ids": ids,
                "completion_mask": np.isin(np.arange(len(ids)), places).astype(int),
            }
        )
    rows = pack_dataset(examples, max_sequence_length=5, longer="truncate")
    (message,) = [record.getMessage() for record in caplog.records]
    assert str(rows.longer) in message
    assert "20 of 44 tokens" in message
    assert "2 examples" in message
    assert "1, 3" in message
    assert rows.collate([rows[number] for number in range(len(rows))])["labels"].max() == 41

    caplog.clear()
    dropped = pack_dataset(examples, max_sequence_length=5, longer="drop")
    (message,) = [record.getMessage() for record in caplog.records]
    assert message == str(dropped.longer)
    assert dropped.longer.lost_tokens == 40
