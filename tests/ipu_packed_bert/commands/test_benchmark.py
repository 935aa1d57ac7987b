"""The benchmark compares the same work, and its figures are what it says; not how fast this machine is."""

import json
from importlib.util import find_spec

import numpy as np
import pytest
import torch

from ipu_packed_bert.benchmarks import packed
from ipu_packed_bert.benchmarks.layouts import LAYOUTS, HuggingFaceSide
from ipu_packed_bert.benchmarks.work import SIZES, config_of, draw_work
from ipu_packed_bert.commands.benchmark import main
from ipu_packed_bert.engine.host import HostEngine
from ipu_packed_bert.model.packed import BATCH_FIELDS, PackedBertForPreTraining, PaddingMask
from ipu_packed_bert.settings.schema import EngineConfig, LossConfig, ModelConfig
from ipu_packed_bert.tasks.pretraining import Pretraining
from pack_data.packers import get_packer
from pack_data.packing.histogram import LengthHistogram
from tests.graphs import count_graphs
from tests.refusals import refusal_of, refused
from tests.tolerances import assert_same


def options_of(folder, counts, more):
    """Return the options for sequences of at most 64 tokens. counts: "LENGTH,COUNT ..."."""
    lengths = folder / "lengths.csv"
    lengths.write_text(
        "\n".join(["length,count", *counts.split(), ""]),
        encoding="utf-8",
    )
    options = f"--size tiny --rounds 7 --histogram {lengths} --max-sequence-length 64 --vocabulary-size 50 {more}"
    return options.split()


@pytest.fixture(scope="module")
def packing():
    histogram = LengthHistogram.from_lengths(
        [64] * 5 + [40] * 9 + [24] * 9 + [8] * 6 + [30] * 7,
        64,
    )
    return get_packer("spfhp")(histogram, max_sequences_per_pack=3)


@pytest.fixture(scope="module")
def work(packing):
    return draw_work(packing, packs=6, micro_batch=2, vocabulary=50, max_predictions=10, seed=1)


def test_the_unpacked_side_is_canonical_bert_and_the_same_work(work):
    """Gradients of both sides are equal: the padding mask is right, and nothing is left out to be fast."""
    model = ModelConfig(
        vocabulary_size=50,
        hidden_size=16,
        num_layers=2,
        num_heads=2,
        intermediate_size=32,
        max_position_embeddings=64,
        hidden_dropout=0.0,
    )
    network = PackedBertForPreTraining(model, LossConfig()).double()
    gradients = []
    for batch, mask in (
        (work.packed, network.attention_mask),
        (work.unpacked, PaddingMask(-1000.0)),
    ):
        network.attention_mask = mask
        network.zero_grad()
        rows = len(batch["input_ids"])
        network(*(torch.from_numpy(batch[name]) for name in BATCH_FIELDS)).loss.backward()
        # One micro-batch of all rows here, scales for micro-batches of two.
        gradients.append([2 * parameter.grad / rows for parameter in network.parameters()])
    assert_same(found=gradients[0], expected=gradients[1], dtype=torch.float32)


def test_sequences_end_to_end_are_the_same_work(work):
    """Its boundaries are for FlashAttention; here they become the mask that they mean."""
    pytest.importorskip("transformers", minversion="4.48", reason="needs transformers 4.48 or newer")
    config = config_of("tiny", work, EngineConfig(kind="host", threads=1), micro_batch=2, dropout=0.0)
    forwards = []
    for item in LAYOUTS["flash"].lay_out(work.unpacked, 128):
        inputs = dict(item.inputs)
        bounds = inputs.pop("cu_seq_lens_q").to(torch.int64)
        assert torch.equal(bounds.to(torch.int32), inputs.pop("cu_seq_lens_k"))
        assert (bounds[1:] - bounds[:-1]).max() == inputs.pop("max_length_q") == inputs.pop("max_length_k")
        assert bounds[-1] == inputs["input_ids"].shape[1] <= 128
        assert torch.equal(bounds[:-1], item.first)
        number = torch.bucketize(
            torch.arange(int(bounds[-1])),
            bounds[1:],
            right=True,
        )
        inputs["attention_mask"] = (number[:, None] == number[None, :])[None, None]
        forwards.append(item._replace(inputs=inputs))
    assert sum(item.inputs["input_ids"].shape[1] for item in forwards) == work.tokens
    sides = [
        HuggingFaceSide(config, {}, created, torch.device("cpu"), "sdpa")
        for created in (forwards, LAYOUTS["sorted"].lay_out(work.unpacked, 192))
    ]
    sides[1]._model.load_state_dict(sides[0]._model.state_dict())
    losses = [side() for side in sides]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_rivals_are_timed_in_turn_with_the_packs_and_do_the_same_work(work, monkeypatch, capsys):
    """The rivals of a GPU, mocked on a CPU; other work is an error."""
    pytest.importorskip("transformers", minversion="4.48", reason="needs transformers 4.48 or newer")
    monkeypatch.setitem(packed.RIVALS, "cpu", packed.RIVALS["cuda"])
    config = config_of("tiny", work, EngineConfig(kind="host", threads=1), micro_batch=2, dropout=0.0)
    actual = packed._compare_rivals(config, work, rounds=2, bar=None)
    assert capsys.readouterr().err.startswith("flash is left out: ")
    assert "flash_time" not in actual
    for name in ("sorted", "dense"):
        low, high = actual[f"{name}_time_quartiles"]
        assert 0 < low <= actual[f"{name}_time"] <= high
    wrong = work.unpacked["masked_lm_ids"].copy()
    wrong[wrong > 0] = 1
    broken = work._replace(unpacked={**work.unpacked, "masked_lm_ids": wrong})
    with refused("packed", "sorted", kind=AssertionError):
        packed._compare_rivals(config, broken, rounds=1, bar=None)


def test_packs_that_never_fill_their_micro_batches_are_one_line():
    packing = get_packer("spfhp")(
        LengthHistogram.from_lengths([30] * 2 + [20] * 3, 64),
        max_sequences_per_pack=3,
    )
    with refused("1 packs", "7 sequences", "--micro-batch"):
        draw_work(packing, packs=1, micro_batch=7, vocabulary=50, max_predictions=10, seed=1)


def test_useful_work_is_that_of_each_sequence_alone(work):
    """Multiplications of a network of 4 features, 2 layers and 8 inner ones, of the sequences in rows of their own."""
    by_hand = 0
    for mask, weights in zip(work.unpacked["input_mask"], work.unpacked["masked_lm_weights"]):
        length = int((mask > 0).sum())
        masked = int((weights > 0).sum())
        layer = length * (4 * 4 * 4 + 2 * 4 * 8) + 2 * length * length * 4
        by_hand += 2 * layer + masked * 4 * (4 + 50)
    model = ModelConfig(hidden_size=4, num_layers=2, num_heads=2, intermediate_size=8)
    assert packed.useful_flop(work, model) == 6 * by_hand > 0


def test_shares_of_several_processes_are_the_whole_work(packing):
    options = dict(packs=4, vocabulary=50, max_predictions=10, seed=1)
    parts = [draw_work(packing, share=(part, 2), micro_batch=1, **options) for part in range(2)]
    whole = draw_work(packing, micro_batch=2, **options)
    assert {part.sequences for part in parts} == {whole.sequences}
    for side in ("packed", "unpacked"):
        first, second = (getattr(part, side)["input_ids"] for part in parts)
        assert len(first) == len(second) > 0
        assert np.array_equal(
            np.concatenate([first, second]),
            getattr(whole, side)["input_ids"],
        )


def test_the_profile_has_all_time_once(capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(SIZES, "tiny", (16, 1, 2, 16))
    options = options_of(tmp_path, "40,6 24,6", "--packs 2 --precision float32 --threads 1 --profile")
    assert main(options + ["--json"]) == 0
    shares = json.loads(capsys.readouterr().out)["float32, 64 slots"]
    useful = shares.pop("useful products in forward and backward pass")
    assert sum(shares.values()) == pytest.approx(1.0)
    assert min(shares.values()) >= 0.0 < useful
    assert all(shares[part] > 0.0 for part in ("dropout", "layer products", "vocabulary product", "attention", "loss"))
    refusal_of(main, [*options, "--ranks", "1"], capsys, "--ranks", "--profile")


def test_command(capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(SIZES, "tiny", (16, 1, 2, 16))
    options = options_of(tmp_path, "64,5 40,9 24,9", "--packs 2 --precision float32 --threads 1 --packer spfhp")
    assert main(options + ["--json"]) == 0
    output = json.loads(capsys.readouterr().out)
    (figures,) = output["measurements"]
    if find_spec("transformers"):
        low, high = figures["sorted_time_quartiles"]
        assert 0 < low <= figures["sorted_time"] <= high
        assert figures["sorted_rows"] in (2, 4, 8)
        assert figures["sorted_attention"] in ("sdpa", "eager")
    assert figures["rounds"] == 7
    assert figures["speed_up"] > 0
    assert figures["packing_factor"] == output["sequences"] / 2


@pytest.mark.slow
def test_it_says_that_the_sides_are_compiled(capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(SIZES, "tiny", (16, 1, 2, 16))
    count_graphs(monkeypatch)
    options = "--packs 2 --precision float32 --threads 1 --packer spfhp --compile"
    assert main(options_of(tmp_path, "64,5 40,9 24,9", options)) == 0
    assert "compiled" in capsys.readouterr().out


def test_both_sides_hold_the_same_sequences(work):
    def sequences(batch):
        numbers = batch["input_mask"]
        return sorted(
            tuple(ids[mask == number]) for ids, mask in zip(batch["input_ids"], numbers) for number in set(mask) - {0}
        )

    assert sequences(work.packed) == sequences(work.unpacked)
    assert len(sequences(work.packed)) == work.sequences == len(work.unpacked["input_ids"])
    assert sum(map(len, sequences(work.packed))) == work.tokens
    assert work.packing_factor == work.sequences / 6 > 1.2
    assert work.sequences % 2 == 0


def test_the_sorted_rival_does_the_same_work(work):
    """Hugging Face's BERT, a token budget, heads on masked tokens alone: the loss of our packs in float64."""
    pytest.importorskip("transformers", minversion="4.48", reason="needs transformers 4.48 or newer")
    config = config_of("tiny", work, EngineConfig(kind="host", threads=1), micro_batch=2, dropout=0.0)
    engine = HostEngine(config, Pretraining(config), packing_factor=work.packing_factor)
    forwards = LAYOUTS["sorted"].lay_out(work.unpacked, 2 * work.slots)
    shapes = [tuple(each.inputs["input_ids"].shape) for each in forwards]
    assert sum(rows for rows, _ in shapes) == work.sequences
    assert all(rows * slots <= 128 for rows, slots in shapes)
    assert [slots for _, slots in shapes] == sorted(slots for _, slots in shapes)
    rival = HuggingFaceSide(config, engine.weights(), forwards, torch.device("cpu"), "sdpa")
    engine.model.double()
    rival._model.double()
    rows = len(work.packed["input_ids"])
    batch = work.packed
    ours = engine.model(*(torch.from_numpy(batch[name]) for name in BATCH_FIELDS)).loss * 2 / rows
    # The scales are float32.
    assert rival() == pytest.approx(float(ours.detach()), rel=1e-6)
    # Sequences of 40 and of 8 tokens agree in length somewhere: those batches have no mask.
    masked = ["attention_mask" in each.inputs for each in forwards]
    assert any(masked)
    assert not all(masked)
    assert all(each.inputs["attention_mask"].min() == 0 for each in forwards if "attention_mask" in each.inputs)
