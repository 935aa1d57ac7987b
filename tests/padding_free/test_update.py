"""Updates by their tokens: however they are cut, on one rank or several."""

import os
from functools import partial

import pytest
import torch
from torch.nn.functional import cross_entropy

from ipu_packed_bert.processes.ranks import _end_group
from padding_free import losses
from padding_free.collators import PaddingCollator, PaddingFreeCollator
from padding_free.losses import IGNORED, cross_entropy_sum, loss_sum
from padding_free.streams import least_of_ranks
from padding_free.update import accumulate, mean_loss, take_step
from tests.padding_free_models import a_model, alone, some_examples
from tests.ranks_at_work import run_all
from tests.refusals import refused
from tests.tolerances import assert_same, relative_error

try:
    from torch.distributed.fsdp import fully_shard
except ImportError:  # torch 2.0
    fully_shard = None

LENGTHS = [9, 2, 12, 5, 3, 11]
KINDS = ["ddp", "plain"]
if fully_shard is not None:
    KINDS.append("fully_shard")


def ours():
    return a_model(attention="padding_free")


def gradients(model):
    return [parameter.grad for parameter in model.parameters()]


def weights(model):
    return [parameter.detach() for parameter in model.parameters()]


def micro_batches(model, cuts):
    collator = PaddingFreeCollator(model)
    examples = some_examples(3, LENGTHS)
    ends = [*cuts, len(examples)]
    return [collator(examples[begin:end]) for begin, end in zip([0, *cuts], ends)]


@pytest.mark.parametrize("cuts", [[], [1, 4]], ids=["whole", "three micro-batches"])
def test_the_loss_is_the_mean_over_the_predicted_tokens(cuts):
    """An update and an evaluation equal plain calls of the model with one example each."""
    model = ours()
    expected = torch.cat([alone(a_model(), example) for example in some_examples(3, LENGTHS)])
    batches = micro_batches(model, cuts)
    assert mean_loss(model, batches) == pytest.approx(float(expected.mean()), rel=1e-12)
    assert model.training and all(gradient is None for gradient in gradients(model))
    model.eval()
    on_cpu = mean_loss(model, iter(batches), torch.device("cpu"))
    assert on_cpu == mean_loss(model, batches) and not model.training
    result = accumulate(model, batches)
    assert result.loss == pytest.approx(float(expected.mean()), rel=1e-12)
    assert result.supervised_tokens == len(expected) == sum(LENGTHS) - len(LENGTHS)


def test_labels_that_are_ignored_do_not_count():
    model = ours()
    (example,) = some_examples(3, [9])
    example["labels"] = example["input_ids"].copy()
    example["labels"][[2, 3, 7]] = IGNORED
    # Token n is predicted from token n - 1.
    kept = alone(a_model(), example)[[0, 3, 4, 5, 7]]
    result = accumulate(model, [PaddingFreeCollator(model)([example])])
    assert result.supervised_tokens == 5
    assert result.loss == pytest.approx(float(kept.mean()), rel=1e-12)


@pytest.mark.parametrize(
    "dtype, allowed",
    [
        (torch.float64, 1e-12),
        (torch.float32, 2e-6),
        (torch.bfloat16, 5e-3),
    ],
)
def test_the_loss_in_pieces_is_the_cross_entropy(dtype, allowed, monkeypatch):
    """And its gradient: pieces of three tokens, a long run of ignored labels, and a word that no token may be."""
    monkeypatch.setitem(losses.NUMBERS_AT_ONCE, "cpu", 3 * 11)
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 7, 11, generator=draw, dtype=torch.float64).to(dtype)
    logits[..., 10] = -torch.inf
    labels = torch.randint(0, 10, (2, 7), generator=draw)
    labels[0, 2:6] = IGNORED
    given = logits.clone().requires_grad_()
    exact = logits.double().requires_grad_()
    loss = cross_entropy_sum(given, labels)
    predicting = exact[:, :-1].flatten(0, 1)
    expected = cross_entropy(predicting, labels[:, 1:].flatten(), reduction="sum")
    assert loss.dtype == torch.promote_types(dtype, torch.float32)
    assert loss.item() == pytest.approx(expected.item(), rel=allowed)
    gradient = torch.autograd.grad(3 * loss, given)
    expected_gradient = torch.autograd.grad(3 * expected, exact)
    assert gradient[0].dtype == dtype
    assert relative_error(gradient, expected_gradient) <= allowed


def test_an_update_takes_one_step_at_its_rate_and_clears_the_gradients():
    """Plain gradient descent: the weights move by rate times gradient, twice in a row."""
    model, reference = ours(), ours()
    optimizer = torch.optim.SGD(model.parameters(), lr=100.0)
    for rate in (0.5, 0.25):
        result = take_step(model, optimizer, micro_batches(model, [2]), rate)
        assert result == accumulate(reference, micro_batches(reference, [2]))
        with torch.no_grad():
            for parameter in reference.parameters():
                parameter -= rate * parameter.grad
                parameter.grad = None
        assert all(gradient is None for gradient in gradients(model))
        assert_same(found=weights(model), expected=weights(reference), dtype=torch.float64)


def test_an_update_is_the_same_however_it_is_cut():
    whole, cut, means = ours(), ours(), ours()
    result = accumulate(whole, micro_batches(whole, []))
    again = accumulate(cut, micro_batches(cut, [1, 4]))
    assert result.supervised_tokens == again.supervised_tokens == sum(LENGTHS) - len(LENGTHS)
    assert again.loss == pytest.approx(result.loss, rel=1e-12)
    assert_same(found=gradients(cut), expected=gradients(whole), dtype=torch.float64)
    for inputs in micro_batches(means, [1, 4]):  # the usual mean of means is another update
        predicted = (inputs["labels"][:, 1:] != IGNORED).sum()
        mean = loss_sum(means, inputs) / predicted
        (mean / 3).backward()
    assert relative_error(gradients(means), gradients(whole)) > 0.05


def test_an_update_without_a_supervised_token_adds_nothing():
    model = ours()
    empty = PaddingFreeCollator(model)([])
    single_token = PaddingCollator()(some_examples(1, [1]))
    for batches in ([], [empty, single_token]):
        assert accumulate(model, batches) == (0.0, 0)
    assert all(gradient is None for gradient in gradients(model))


def on_several_devices(kind, model):
    if kind == "ddp":
        return torch.nn.parallel.DistributedDataParallel(model)
    if kind == "fully_shard":
        for part in [*model.model.layers, model]:
            fully_shard(part)
    return model


def one_rank(rank, folder):
    """All ways to train on several devices, in one process group: its start is what takes time."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", f"file://{folder}/meet", rank=rank, world_size=2)
    assert least_of_ranks(7 + rank) == least_of_ranks(9 - 2 * rank) == 7
    for kind in KINDS:
        model = ours()
        if kind == "plain":  # gradients of frozen weights would let the weight decay of an optimizer change them
            model.frozen = torch.nn.Linear(2, 2).requires_grad_(False)
        # 8, 1 + 11 + 4 and 2 + 10 tokens: unequal shares, and for the plain model unequal numbers of them.
        shares = micro_batches(model, [1, 4])
        parallel = on_several_devices(kind, model)
        unequal = [shares[:1], shares[1:]][rank]
        if kind == "plain":
            accumulate(parallel, unequal)
            result = accumulate(parallel, unequal)  # what is there already stays
            *summed, weight, bias = gradients(model)
            assert weight is None and bias is None
            found = [gradient / 2 for gradient in summed]
        else:
            with refused("2 ranks", "3"):
                accumulate(parallel, unequal)
            with refused("2 ranks", "1"):
                accumulate(parallel, [shares[:1], []][rank])
            empty = PaddingFreeCollator(model)([])
            filled = [*shares[2:], empty]
            result = accumulate(parallel, [shares[:2], filled][rank])
            found = gradients(model)
        if kind == "fully_shard":
            found = [gradient.full_tensor() for gradient in found]
        kept = {**result._asdict(), "gradients": found}
        torch.save(kept, folder / f"{rank}-{kind}.pt")
    _end_group()


def test_two_ranks_make_the_update_of_one(tmp_path):
    assert least_of_ranks(7) == 7  # without torch.distributed
    single = ours()
    expected = accumulate(single, micro_batches(single, []))
    run_all(tmp_path, [partial(one_rank, rank, tmp_path) for rank in range(2)])
    files = sorted(tmp_path.glob("*.pt"))
    assert len(files) == 2 * len(KINDS)
    for path in files:
        found = torch.load(path, weights_only=True)
        assert found["loss"] == pytest.approx(expected.loss, rel=1e-12)
        assert found["supervised_tokens"] == expected.supervised_tokens
        assert_same(found=found["gradients"], expected=gradients(single), dtype=torch.float64)
