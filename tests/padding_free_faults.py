"""Ways to train padding-free rows wrong: small models, collators and losses, each with a threshold that is drawn.

Every fault stands beside the right code: `TinyModel` without changes, `joined` and `token_loss` keep examples apart.
A fault gives one part of the model another view of the row, or changes an input, a label, a gradient or a count.  Its
threshold (a place in the row, a place in the example, a number of examples, a block) is drawn over the trained row of
ROW tokens, so that no number can be wired into a check.  The letters are those of the classes: (a) masks, (b)
recurrences, (c) positions, (d) labels, (e) normalisers, (f) routers, (g) padding and one-token examples, (h) shards,
(i) backward, (j) training and evaluation, (k) versions that do not fit together.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

ROW = 320  # tokens of a trained row
LONGEST = 160  # of its longest example
VOCABULARY = 40
_WIDTH = 16
_IGNORED = -100


class Wrong(NamedTuple):
    """A model with its collator and loss, if they are not the usual ones."""

    model: Any
    forward: Optional[Callable[..., torch.Tensor]] = None  # model, inputs -> logits
    collator: Optional[Callable[..., Dict[str, Any]]] = None  # examples -> inputs
    loss: Optional[Callable[..., torch.Tensor]] = None  # model, inputs -> mean loss
    mean: str = "token"  # what the loss is a mean over: "token" or "example"


class Fault(NamedTuple):
    letter: str
    name: str
    where: str  # who had it in public, if anybody
    make: Callable[[np.random.Generator], Wrong]


FAULTS: List[Fault] = []


def fault(letter: str, where: str = "") -> Callable[[Any], Any]:
    def keep(make: Callable[[np.random.Generator], Wrong]) -> Callable[[np.random.Generator], Wrong]:
        FAULTS.append(Fault(letter, make.__name__, where, make))
        return make

    return keep


class RowView(NamedTuple):
    """Which example each token is in, and where: int64 [rows, tokens]."""

    number: torch.Tensor
    place: torch.Tensor

    @property
    def tokens(self) -> int:
        return self.number.shape[1]

    @property
    def at(self) -> torch.Tensor:
        return torch.arange(self.tokens)[None]

    @property
    def examples(self) -> int:
        return int(self.number.max()) + 1

    @property
    def packed(self) -> bool:
        return self.examples > 1


View = Callable[[RowView], RowView]


def view_of(begins: torch.Tensor) -> RowView:
    """begins: bool [rows, tokens], true where an example begins."""
    at = torch.arange(begins.shape[1])[None]
    first = torch.where(begins, at, torch.zeros_like(at)).cummax(1).values
    return RowView(begins.long().cumsum(1) - 1, at - first)


def _plain_view(rows: int, tokens: int) -> RowView:
    begins = torch.zeros(rows, tokens, dtype=torch.bool)
    begins[:, 0] = True
    return view_of(begins)


class TinyModel(nn.Module):
    """A causal model whose every part keeps examples apart, unless it gets another view of the row.

    parts: "convolution", "state", "groups", "experts", besides attention and positions.
    views: part -> how it sees the row, where that is wrong.  edit: changes the hidden states of a layer.
    """

    def __init__(
        self,
        draw: np.random.Generator,
        *parts: str,
        edit: Optional[Callable[[torch.Tensor, RowView, Any], torch.Tensor]] = None,
        window: int = 0,
        chunk: int = 0,
        group: int = 4,
        capacity: int = 0,
        **views: View,
    ) -> None:
        super().__init__()
        self.parts, self.views, self.edit = parts, views, edit
        self.window, self.chunk, self.group, self.capacity = window, chunk, group, capacity
        made = torch.Generator().manual_seed(int(draw.integers(2**31)))

        def weight(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(shape, generator=made) / shape[-1] ** 0.5)

        self.words = nn.Embedding(VOCABULARY, _WIDTH)
        self.words.weight = weight(VOCABULARY, _WIDTH)
        with torch.no_grad():
            self.words.weight.mul_(4)
        self.places = weight(ROW, _WIDTH)
        self.qkv, self.out, self.mix = (weight(2, n * _WIDTH, _WIDTH) for n in (3, 1, 1))
        self.expert, self.router = weight(4, _WIDTH, _WIDTH), weight(4, _WIDTH)
        self.head = weight(VOCABULARY, _WIDTH)
        self.config = SimpleNamespace(
            vocab_size=VOCABULARY, max_position_embeddings=ROW, use_cache=False, _attn_implementation="padding_free"
        )
        self.seen: List[str] = []

    def get_input_embeddings(self) -> nn.Module:
        return self.words

    def set_attn_implementation(self, name: str) -> None:
        self.config._attn_implementation = name

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: Optional[torch.Tensor] = None,
        cu_seq_lens_q: Optional[torch.Tensor] = None,
        **others: Any,
    ) -> Any:
        row = _plain_view(*input_ids.shape)
        if cu_seq_lens_q is not None:
            begins = torch.zeros(input_ids.shape, dtype=torch.bool)
            begins[0, cu_seq_lens_q[cu_seq_lens_q < row.tokens].long()] = True
            row = view_of(begins)
        if position_ids is None:
            position_ids = row.place
        places = self._view("positions", RowView(row.number, position_ids)).place
        hidden = self.words(input_ids) + self.places[places.clamp(0, ROW - 1)]
        auxiliary = hidden.new_zeros(())
        for layer in range(2):
            hidden = hidden + self._attention(hidden, layer, self._view("attention", row))
            for part in self.parts:
                given = F.layer_norm(hidden, (_WIDTH,))
                if part == "experts":
                    added, auxiliary = self._experts(given, self._view(part, row), auxiliary)
                else:
                    added = self._mixed(given, part, self._view(part, row)) @ self.mix[layer].T
                hidden = hidden + added
            if self.edit is not None:
                hidden = self.edit(hidden, row, self)
        logits = F.layer_norm(hidden, (_WIDTH,)) @ self.head.T * 2
        return SimpleNamespace(logits=logits, aux_loss=auxiliary)

    def _view(self, part: str, row: RowView) -> RowView:
        return self.views[part](row) if part in self.views else row

    def _attention(self, hidden: torch.Tensor, layer: int, row: RowView) -> torch.Tensor:
        query, key, value = (F.layer_norm(hidden, (_WIDTH,)) @ self.qkv[layer].T).chunk(3, dim=2)
        seen = _same(row)
        if self.window:
            seen = seen & (_behind(row) < self.window)
        if self.chunk:
            piece = row.place // self.chunk
            seen = seen & (piece[:, :, None] == piece[:, None, :])
        scores = (query @ key.transpose(1, 2)).masked_fill(~seen, float("-inf"))
        return torch.softmax(scores / _WIDTH**0.5, 2) @ value @ self.out[layer].T

    def _mixed(self, hidden: torch.Tensor, part: str, row: RowView) -> torch.Tensor:
        """Linear in the tokens of the example up to each."""
        behind, same = _behind(row), _same(row)
        if part == "convolution":
            weights = 0.5 ** behind.clamp(min=0) * (behind < 4)
        elif part == "state":
            weights = 0.8 ** behind.clamp(min=0)
        else:  # groups of tokens, each pooled
            piece = row.place // self.group
            weights = (piece[:, :, None] == piece[:, None, :]) / (1.0 + behind.clamp(min=0))
        return (weights * same).to(hidden.dtype) @ hidden

    def _experts(
        self, hidden: torch.Tensor, row: RowView, auxiliary: torch.Tensor
    ) -> Tuple[torch.Tensor, torch.Tensor]:
        """One of four experts a token, and a loss that levels them within each example."""
        shares = torch.softmax(hidden @ self.router.T * 2, 2)
        chosen = F.one_hot(shares.argmax(2), 4).to(hidden.dtype)
        kept = chosen
        if self.capacity:
            kept = chosen * (chosen.cumsum(1) <= self.capacity)
        every = torch.einsum("btw,evw->btev", hidden, self.expert)
        of = F.one_hot(row.number, row.examples).to(hidden.dtype).transpose(1, 2)  # [rows, examples, tokens]
        count = of.sum(2, keepdim=True).clamp(min=1)
        level = ((of @ chosen) / count * ((of @ shares) / count)).sum(2)
        # A mean over the tokens: an example counts by its tokens.
        auxiliary = auxiliary + (level * count[..., 0]).sum() / hidden.shape[:2].numel()
        return (every * (kept * shares)[..., None]).sum(2), auxiliary


def _behind(row: RowView) -> torch.Tensor:
    return row.at[:, :, None] - row.at[:, None, :]


def _same(row: RowView) -> torch.Tensor:
    return (row.number[:, :, None] == row.number[:, None, :]) & (_behind(row) >= 0)


def joined(examples: Any, slots: int = 0) -> Dict[str, Any]:
    """Examples -> one row.  slots: a tail of padding up to so many, an example of its own without labels."""
    ids = [torch.as_tensor(np.asarray(each["input_ids"])) for each in examples]
    labels = [torch.as_tensor(np.asarray(each.get("labels", each["input_ids"]))).clone() for each in examples]
    tail = slots - sum(map(len, ids))
    if tail > 0:
        ids, labels = [*ids, torch.zeros(tail).long()], [*labels, torch.full((tail,), _IGNORED)]
    for each in labels:
        each[:1] = _IGNORED
    lengths = torch.tensor([0, *map(len, ids)])
    bounds = lengths.cumsum(0).int()
    return {
        "input_ids": torch.cat(ids)[None],
        "labels": torch.cat(labels)[None],
        "position_ids": torch.cat([torch.arange(len(each)) for each in ids])[None],
        "cu_seq_lens_q": bounds,
        "cu_seq_lens_k": bounds,
        "max_length_q": int(lengths.max()),
        "max_length_k": int(lengths.max()),
    }


def _sums(model: Any, inputs: Dict[str, Any], ahead: int = 1) -> torch.Tensor:
    """The loss of each predicted token, 0 elsewhere, [tokens]."""
    logits = model(**inputs).logits[0, :-ahead]
    return F.cross_entropy(logits.float(), inputs["labels"][0, ahead:], reduction="none", ignore_index=_IGNORED)


def _count(inputs: Dict[str, Any]) -> torch.Tensor:
    return (inputs["labels"][0, 1:] != _IGNORED).sum().clamp(min=1)


def token_loss(model: Any, inputs: Dict[str, Any]) -> torch.Tensor:
    return _sums(model, inputs).sum() / _count(inputs)


def example_loss(model: Any, inputs: Dict[str, Any]) -> torch.Tensor:
    """The mean of the examples' means; an example without a prediction is none."""
    bounds = inputs["cu_seq_lens_q"].tolist()
    losses, labels = _sums(model, inputs), inputs["labels"][0, 1:]
    parts = [slice(begin, end - 1) for begin, end in zip(bounds, bounds[1:])]
    counts = [(labels[part] != _IGNORED).sum() for part in parts]
    means = [losses[part].sum() / count for part, count in zip(parts, counts) if count]
    return torch.stack(means).mean() if means else losses.sum()


def right_ones(draw: np.random.Generator) -> Dict[str, Wrong]:
    """The same parts, and nothing wrong."""
    parts = ("convolution", "state", "groups", "experts")
    return {
        "attention": Wrong(TinyModel(draw)),
        "window": Wrong(TinyModel(draw, window=int(draw.integers(2, LONGEST)))),
        "chunk": Wrong(TinyModel(draw, chunk=int(draw.integers(2, LONGEST)))),
        "parts": Wrong(TinyModel(draw, *parts)),
        "collator": Wrong(TinyModel(draw), collator=joined),
        "tail": Wrong(TinyModel(draw, *parts[:3]), collator=lambda examples: joined(examples, ROW + 8)),
        "token loss": Wrong(TinyModel(draw), collator=joined, loss=token_loss),
        "example loss": Wrong(TinyModel(draw), collator=joined, loss=example_loss, mean="example"),
    }


def _place(draw: np.random.Generator) -> int:
    """A place in the row."""
    return int(draw.integers(4, ROW - 4))


def _within(draw: np.random.Generator) -> int:
    """A place in an example."""
    return int(draw.integers(2, LONGEST - 2))


def _nth(draw: np.random.Generator) -> int:
    """A number of examples: a row of ROW tokens has ROW one-token examples at most."""
    return int(draw.integers(2, ROW // 2))


def _joining(first: int) -> View:
    """Examples from this number on are one."""

    def view(row: RowView) -> RowView:
        number = row.number.clamp(max=first)
        begins = F.pad(number[:, 1:] != number[:, :-1], (1, 0), value=True)
        return view_of(begins)

    return view


def _joining_at(first: int) -> View:
    """No boundary behind this place of the row."""

    def view(row: RowView) -> RowView:
        begins = (row.place == 0) & (row.at < first)
        begins[:, 0] = True
        return view_of(begins)

    return view


def _joining_longer(most: int) -> View:
    """No boundary in a row of more than so many tokens."""
    return lambda row: _plain_view(*row.number.shape) if row.tokens > most else row


@fault("a", "Transformers 46634, nanoVLM 201")
def rows_above_a_length_lose_their_mask(draw):
    return Wrong(TinyModel(draw, attention=_joining_longer(_place(draw))))


@fault("a")
def kernel_joins_late_examples(draw):
    return Wrong(TinyModel(draw, attention=_joining(_nth(draw))))


@fault("a", "MaxText 4476")
def training_branch_ignores_segments(draw):
    model = TinyModel(draw)
    late = _joining_at(_place(draw))
    model.views["attention"] = lambda row: late(row) if model.training else row
    return Wrong(model)


@fault("a", "PrimeIntellect; the 17th token of an example")
def late_tokens_of_an_example_see_too_little(draw):
    first = _within(draw)

    def cut(row):
        if not row.packed:
            return row
        number = row.number * 2 + (row.place >= first)
        begins = F.pad(number[:, 1:] != number[:, :-1], (1, 0), value=True)
        return view_of(begins)

    return Wrong(TinyModel(draw, attention=cut))


@fault("b", "prime-rl 3000")
def convolution_over_the_row(draw):
    return Wrong(TinyModel(draw, "convolution", convolution=_joining_at(_place(draw))))


@fault("b", "SkyRL 2056, Automodel 2131")
def state_flows_into_late_examples(draw):
    return Wrong(TinyModel(draw, "state", state=_joining(_nth(draw))))


@fault("b", "slime 1686, fla 838")
def boundaries_reach_the_convolution_and_not_the_state(draw):
    return Wrong(TinyModel(draw, "convolution", "state", state=_joining_longer(_place(draw))))


@fault("b", "DeepSeek-V4, miles 2038")
def groups_of_tokens_of_the_row(draw):
    model = TinyModel(draw, "groups", group=int(draw.integers(3, ROW // 2)))
    model.views["groups"] = lambda row: _plain_view(*row.number.shape)
    return Wrong(model)


@fault("c", "Llama 4")
def scaling_by_the_place_in_the_row(draw):
    first = _place(draw)

    def edit(hidden, row, model):
        return hidden * (1 + 0.1 * (row.at >= first).to(hidden.dtype)[..., None]) if row.packed else hidden

    return Wrong(TinyModel(draw, edit=edit))


@fault("c", "LLaMA-Factory 7754")
def positions_of_late_examples_go_on(draw):
    first = _nth(draw)

    def go_on(row):
        late = row.number >= first
        begin = torch.where(late, row.at, ROW).min() if bool(late.any()) else 0
        return RowView(row.number, torch.where(late, row.at - begin, row.place))

    return Wrong(TinyModel(draw, positions=go_on))


@fault("c", "miles 2038")
def window_clamped_to_the_row(draw):
    first = _place(draw)

    def cut(row):
        if not row.packed:
            return row
        begins = (row.place == 0) | (row.at == first)
        return view_of(begins)

    return Wrong(TinyModel(draw, attention=cut))


@fault("c", "LLaMA-Factory 10283")
def positions_of_late_tokens_wrap(draw):
    wrap = _within(draw)
    return Wrong(TinyModel(draw, positions=lambda row: RowView(row.number, row.place % wrap) if row.packed else row))


@fault("c")
def chunks_counted_in_the_row(draw):
    model = TinyModel(draw, chunk=int(draw.integers(3, ROW // 2)))
    model.views["attention"] = lambda row: RowView(row.number, row.at.expand_as(row.number))
    return Wrong(model)


def _changed(change: Callable[[Dict[str, Any]], None], slots: int = 0) -> Callable[[Any], Dict[str, Any]]:
    def collator(examples: Any) -> Dict[str, Any]:
        inputs = joined(examples, slots)
        change(inputs)
        return inputs

    return collator


@fault("d", "verl 6475")
def last_token_predicts_the_next_example(draw):
    first = _nth(draw)

    def roll(inputs):
        begins = inputs["cu_seq_lens_q"][first:-1].long()
        inputs["labels"][0, begins] = inputs["input_ids"][0, begins]

    return Wrong(TinyModel(draw), collator=_changed(roll), loss=token_loss)


@fault("d")
def labels_of_long_examples_are_moved_twice(draw):
    most = _within(draw)

    def move(inputs):
        bounds = inputs["cu_seq_lens_q"].tolist()
        for begin, end in zip(bounds, bounds[1:]):
            if end - begin > most and len(bounds) > 2:
                inputs["labels"][0, begin + 1 : end] = inputs["labels"][0, begin + 1 : end].roll(-1)

    return Wrong(TinyModel(draw), collator=_changed(move), loss=token_loss)


@fault("d", "Megatron-LM 1647")
def second_next_token_is_of_another_example(draw):
    first = _place(draw)

    def loss(model, inputs):
        further = dict(inputs, labels=inputs["labels"].clone())
        bounds = inputs["cu_seq_lens_q"][1:-1].long()
        bounds = bounds[bounds < first]
        for begin in (bounds, bounds + 1):
            further["labels"][0, begin[begin < ROW].clamp(max=further["labels"].shape[1] - 1)] = _IGNORED
        total = _sums(model, inputs).sum()
        if further["labels"].shape[1] > 2:
            total = total + 0.3 * _sums(model, further, ahead=2).sum()
        return total / _count(inputs)

    return Wrong(TinyModel(draw), collator=joined, loss=loss)


@fault("e", "unsloth-zoo 1066")
def boundaries_are_subtracted_twice(draw):
    least = _nth(draw)

    def loss(model, inputs):
        more = len(inputs["cu_seq_lens_q"]) - 2
        return _sums(model, inputs).sum() / (_count(inputs) - (more if more >= least else 0)).clamp(min=1)

    return Wrong(TinyModel(draw), collator=joined, loss=loss)


@fault("e", "tunix 1662")
def a_pack_is_taken_for_a_sequence(draw):
    least = _nth(draw)

    def loss(model, inputs):
        many = len(inputs["cu_seq_lens_q"]) > least
        return token_loss(model, inputs) if many else example_loss(model, inputs)

    return Wrong(TinyModel(draw), collator=joined, loss=loss, mean="example")


@fault("e")
def every_token_counts_in_long_rows(draw):
    most = _place(draw)

    def loss(model, inputs):
        tokens = inputs["input_ids"].shape[1]
        return _sums(model, inputs).sum() / (tokens - 1 if tokens > most else _count(inputs))

    return Wrong(TinyModel(draw), collator=joined, loss=loss)


@fault("e", "gradient accumulation")
def mean_of_the_means_of_two_parts(draw):
    cut = _place(draw)

    def loss(model, inputs):
        losses, labels = _sums(model, inputs), inputs["labels"][0, 1:]
        if len(losses) <= cut or len(inputs["cu_seq_lens_q"]) < 3:
            return losses.sum() / _count(inputs)
        pieces = [(losses[part], labels[part]) for part in (slice(0, cut), slice(cut, None))]
        means = [piece.sum() / (words != _IGNORED).sum().clamp(min=1) for piece, words in pieces]
        return sum(means) / 2

    return Wrong(TinyModel(draw), collator=joined, loss=loss)


@fault("f", "an expert's capacity a row")
def capacity_of_the_row(draw):
    return Wrong(TinyModel(draw, "experts", capacity=int(draw.integers(4, ROW // 8))))


@fault("f", "Megatron-LM 6115")
def router_loss_takes_the_row_for_a_sequence(draw):
    return Wrong(TinyModel(draw, "experts", experts=_joining(_nth(draw))))


@fault("f")
def router_is_normalised_over_long_rows(draw):
    most = _place(draw)

    def edit(hidden, row, model):
        return hidden - 0.2 * hidden.mean(1, keepdim=True) if row.packed and row.tokens > most else hidden

    return Wrong(TinyModel(draw, "experts", edit=edit))


@fault("g", "fla 892, flash-attention 1228")
def nan_behind_the_last_boundary(draw):
    tail = int(draw.integers(1, 64))
    changed = _changed(lambda inputs: None, ROW + tail)

    class Uninitialised(torch.autograd.Function):
        @staticmethod
        def forward(ctx, hidden, first):
            ctx.first = first
            return hidden.clone()

        @staticmethod
        def backward(ctx, gradient):
            gradient = gradient.clone()
            gradient[:, ctx.first :] = float("nan")
            return gradient, None

    def edit(hidden, row, model):
        return Uninitialised.apply(hidden, ROW) if row.tokens > ROW else hidden

    return Wrong(TinyModel(draw, edit=edit), collator=changed)


@fault("g", "ms-swift 9903")
def one_token_examples_are_merged(draw):
    first = int(draw.integers(2, ROW // 4))

    def merge(row):
        before = F.pad(row.place[:, :-1], (1, 0), value=1)
        begins = (row.place == 0) & ((row.place < before) | (row.number < first))
        begins[:, 0] = True
        return view_of(begins)

    return Wrong(TinyModel(draw, attention=merge))


@fault("g")
def padding_is_predicted(draw):
    tail = int(draw.integers(2, 64))

    def label(inputs):
        inputs["labels"][0, -tail + 1 :] = 0

    return Wrong(TinyModel(draw), collator=_changed(label, ROW + tail), loss=token_loss)


@fault("g", "TransformerEngine 3331")
def rows_behind_the_last_whole_block_are_zero(draw):
    block = int(draw.integers(7, 129))
    block += ROW % block == 0

    def edit(hidden, row, model):
        whole = row.tokens // block * block
        return hidden * (row.at < whole)[..., None] if row.packed else hidden

    return Wrong(TinyModel(draw, edit=edit))


@fault("h", "Megatron-LM 111")
def boundaries_divided_by_the_ranks(draw):
    ranks, most = int(draw.integers(2, 9)), _place(draw)

    def divided(row):
        if not row.packed or row.tokens <= most:
            return row
        begins = torch.zeros_like(row.number, dtype=torch.bool)
        begins[:, torch.nonzero((row.place == 0)[0])[:, 0] // ranks] = True
        return view_of(begins)

    return Wrong(TinyModel(draw, attention=divided))


@fault("h")
def a_shard_does_not_see_the_one_before(draw):
    cut = _place(draw)

    def view(row):
        begins = (row.place == 0) | ((row.at == cut) & row.packed)
        return view_of(begins)

    return Wrong(TinyModel(draw, "state", state=view))


@fault("h")
def positions_begin_again_in_each_shard(draw):
    cut = _place(draw)

    def view(row):
        again = view_of((row.place == 0) | (row.at == cut)).place
        return RowView(row.number, again if row.packed else row.place)

    return Wrong(TinyModel(draw, positions=view))


def _straight(value: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """The value of one and the gradient of the other."""
    return value.detach() + gradient - gradient.detach()


@fault("i")
def gradients_of_late_tokens_are_doubled(draw):
    first = _place(draw)

    def edit(hidden, row, model):
        late = (row.at >= first)[..., None] & row.packed
        return _straight(hidden, hidden * (1 + late.to(hidden.dtype)))

    return Wrong(TinyModel(draw, edit=edit))


@fault("i")
def gradients_flow_into_the_example_before(draw):
    first = _nth(draw)

    def edit(hidden, row, model):
        shifted = F.pad(hidden[:, :-1], (0, 0, 1, 0)) * (row.number >= first)[..., None]
        return _straight(hidden, hidden + 0.1 * shifted)

    return Wrong(TinyModel(draw, edit=edit))


@fault("i", "TransformerEngine 2892")
def gradients_of_late_places_are_lost(draw):
    first = _within(draw)

    def edit(hidden, row, model):
        kept = (row.place < first)[..., None] | (not row.packed)
        return _straight(hidden, hidden * kept.to(hidden.dtype))

    return Wrong(TinyModel(draw, edit=edit))


@fault("j", "axolotl 589")
def evaluation_gives_nan_in_long_rows(draw):
    most = _place(draw)

    def edit(hidden, row, model):
        return hidden * float("nan") if row.packed and row.tokens > most and not model.training else hidden

    return Wrong(TinyModel(draw, edit=edit).train())


@fault("j")
def evaluation_lets_late_examples_leak(draw):
    model = TinyModel(draw, "state")
    late = _joining(_nth(draw))
    model.views["state"] = lambda row: row if model.training else late(row)
    return Wrong(model.train())


@fault("j")
def training_normalises_over_the_row(draw):
    first = _place(draw)

    def edit(hidden, row, model):
        if not model.training or row.tokens <= first or not row.packed:
            return hidden
        return torch.cat([hidden[:, :first], hidden[:, first:] - 0.2 * hidden.mean(1, keepdim=True)], 1)

    return Wrong(TinyModel(draw, edit=edit).train())


@fault("j")
def path_with_dropout_only(draw):
    late = _joining(_nth(draw))
    model = TinyModel(draw)
    model.attention_dropout = 0.1
    model.views["attention"] = lambda row: late(row) if model.training and model.attention_dropout else row
    return Wrong(model)


@fault("i")
def attention_backward_in_bfloat16_only(draw):
    class Backward(TinyModel):
        def _attention(self, hidden, layer, row):
            right = super()._attention(hidden, layer, row)
            if hidden.dtype != torch.bfloat16 or not row.packed:
                return right
            wrong = super()._attention(hidden, layer, view_of(row.at == 0))
            return wrong + (right - wrong).detach()

    return Wrong(Backward(draw).to(torch.bfloat16))


@fault("k")
def boundaries_switch_position_ids_off(draw):
    least = _nth(draw)

    def forward(model, inputs):
        many = len(inputs["cu_seq_lens_q"]) > least
        at = torch.arange(inputs["input_ids"].shape[1])[None]
        return model(**dict(inputs, position_ids=at) if many else inputs).logits

    return Wrong(TinyModel(draw), forward=forward)


@fault("k", "a longest length of another batch")
def tokens_behind_a_stale_longest_length_are_lost(draw):
    most = _within(draw)

    def edit(hidden, row, model):
        return hidden * ((row.place < most)[..., None] | (not row.packed))

    return Wrong(TinyModel(draw, edit=edit))


@fault("k", "pytorch 189902; a small integer type")
def numbers_of_examples_overflow(draw):
    most = _nth(draw)
    model = TinyModel(draw)
    model.views["attention"] = lambda row: RowView(row.number % most, row.place)
    return Wrong(model)


@fault("k", "Transformers 44911")
def positions_are_taken_for_another_axis(draw):
    first = _place(draw)

    def forward(model, inputs):
        changed = dict(inputs, position_ids=inputs["position_ids"].clone())
        if len(inputs["cu_seq_lens_q"]) > 2:
            changed["position_ids"][:, first:] = 0
        return model(**changed).logits

    return Wrong(TinyModel(draw), forward=forward)
