"""Ways to train padding-free rows wrong: small models, collators and losses, each with a threshold that is drawn.

Every fault stands beside the right code: `TinyModel` without changes, `joined` and `token_loss` keep examples apart.
A fault gives one part of the model another view of the row, or changes an input, a label, a gradient or a count.  Its
threshold (a place in the row, a place in the example, a number of examples, a block) is drawn over the trained row of
ROW tokens, so that no number can be wired into a check.  The letters are those of the classes: (a) masks, (b)
recurrences, (c) positions, (d) labels, (e) normalisers, (f) routers, (g) padding and one-token examples, (h) shards,
(i) backward, (j) training and evaluation, (k) versions that do not fit together.
"""

from types import SimpleNamespace
from typing import Any, Callable, NamedTuple, Optional

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from padding_free import check_no_leak

ROW = 320  # tokens of a trained row
LONGEST = 160  # of its longest example
VOCABULARY = 40
_WIDTH = 16
_IGNORED = -100


class Wrong(NamedTuple):
    """A model with its collator and loss, if they are not the usual ones."""

    model: Any
    forward: Optional[Callable] = None  # model, inputs -> logits
    collator: Optional[Callable] = None  # examples -> inputs
    loss: Optional[Callable] = None  # model, inputs -> mean loss
    mean: str = "token"  # what the loss is a mean over: "token" or "example"


class Fault(NamedTuple):
    letter: str
    name: str
    where: str  # who had it in public, if anybody
    make: Callable  # random generator -> Wrong


FAULTS = []


def probe(wrong, **settings):
    """Judge a model with its collator and loss on rows of ROW tokens."""
    kept = {name: value for name, value in wrong._asdict().items() if name != "model" and value is not None}
    return check_no_leak(wrong.model, **{"longest": LONGEST, "row": ROW, **kept, **settings})


class RowView(NamedTuple):
    """Which example each token is in, and where: int64 [rows, tokens]."""

    number: torch.Tensor
    place: torch.Tensor

    @property
    def tokens(self):
        return self.number.shape[1]

    @property
    def at(self):
        return torch.arange(self.tokens)[None]

    @property
    def examples(self):
        return int(self.number.max()) + 1

    @property
    def packed(self):
        return self.examples > 1


def view_of(begins):
    """begins: bool [rows, tokens], true where an example begins."""
    at = torch.arange(begins.shape[1])[None]
    first = torch.where(begins, at, torch.zeros_like(at)).cummax(1).values
    return RowView(begins.long().cumsum(1) - 1, at - first)


def _plain_view(rows, tokens):
    begins = torch.zeros(rows, tokens, dtype=torch.bool)
    begins[:, 0] = True
    return view_of(begins)


class TinyModel(nn.Module):
    """A causal model whose every part keeps examples apart, unless it gets another view of the row.

    parts: "convolution", "state", "groups", "experts", besides attention and positions.
    views: part -> how it sees the row, where that is wrong.  edit: changes the hidden states of a layer.
    """

    def __init__(self, draw, *parts, edit=None, window=0, chunk=0, group=4, capacity=0, **views):
        super().__init__()
        self.parts = parts
        self.views = views
        self.edit = edit
        self.window = window
        self.chunk = chunk
        self.group = group
        self.capacity = capacity
        generator = torch.Generator().manual_seed(int(draw.integers(2**31)))

        def weight(*shape):
            return nn.Parameter(torch.randn(shape, generator=generator) / shape[-1] ** 0.5)

        self.words = nn.Embedding(VOCABULARY, _WIDTH)
        self.words.weight = weight(VOCABULARY, _WIDTH)
        with torch.no_grad():
            self.words.weight.mul_(4)
        self.places = weight(ROW, _WIDTH)
        self.qkv = weight(2, 3 * _WIDTH, _WIDTH)
        self.out = weight(2, _WIDTH, _WIDTH)
        self.mix = weight(2, _WIDTH, _WIDTH)
        self.expert = weight(4, _WIDTH, _WIDTH)
        self.router = weight(4, _WIDTH)
        self.head = weight(VOCABULARY, _WIDTH)
        self.config = SimpleNamespace(
            vocab_size=VOCABULARY, max_position_embeddings=ROW, use_cache=False, _attn_implementation="padding_free"
        )

    def get_input_embeddings(self):
        return self.words

    def set_attn_implementation(self, name):
        self.config._attn_implementation = name

    def forward(self, input_ids, position_ids=None, cu_seq_lens_q=None, **others):
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
                normalised = F.layer_norm(hidden, (_WIDTH,))
                if part == "experts":
                    added, auxiliary = self._experts(normalised, self._view(part, row), auxiliary)
                else:
                    added = self._mixed(normalised, part, self._view(part, row)) @ self.mix[layer].T
                hidden = hidden + added
            if self.edit is not None:
                hidden = self.edit(hidden, row, self)
        logits = F.layer_norm(hidden, (_WIDTH,)) @ self.head.T * 2
        return SimpleNamespace(logits=logits, aux_loss=auxiliary)

    def _view(self, part, row):
        return self.views[part](row) if part in self.views else row

    def _attention(self, hidden, layer, row):
        query, key, value = (F.layer_norm(hidden, (_WIDTH,)) @ self.qkv[layer].T).chunk(3, dim=2)
        seen = _same(row)
        if self.window:
            seen = seen & (_behind(row) < self.window)
        if self.chunk:
            seen = seen & _equal(row.place // self.chunk)
        scores = (query @ key.transpose(1, 2)).masked_fill(~seen, float("-inf"))
        return torch.softmax(scores / _WIDTH**0.5, 2) @ value @ self.out[layer].T

    def _mixed(self, hidden, part, row):
        """Linear in the tokens of the example up to each."""
        behind = _behind(row).clamp(min=0)
        if part == "convolution":
            weights = 0.5**behind * (_behind(row) < 4)
        elif part == "state":
            weights = 0.8**behind
        else:  # groups of tokens, each pooled
            weights = _equal(row.place // self.group) / (1.0 + behind)
        return (weights * _same(row)).to(hidden.dtype) @ hidden

    def _experts(self, hidden, row, auxiliary):
        """One of four experts a token, and a loss that levels them within each example."""
        shares = torch.softmax(hidden @ self.router.T * 2, 2)
        chosen = F.one_hot(shares.argmax(2), 4).to(hidden.dtype)
        kept = chosen
        if self.capacity:
            kept = chosen * (chosen.cumsum(1) <= self.capacity)
        every = torch.einsum("btw,evw->btev", hidden, self.expert)
        of_example = F.one_hot(row.number, row.examples).to(hidden.dtype).transpose(1, 2)  # [rows, examples, tokens]
        count = of_example.sum(2, keepdim=True).clamp(min=1)
        level = ((of_example @ chosen) / count * ((of_example @ shares) / count)).sum(2)
        # A mean over the tokens: an example counts by its tokens.
        auxiliary = auxiliary + (level * count[..., 0]).sum() / hidden.shape[:2].numel()
        return (every * (kept * shares)[..., None]).sum(2), auxiliary


def _equal(values):
    return values[:, :, None] == values[:, None, :]


def _behind(row):
    return row.at[:, :, None] - row.at[:, None, :]


def _same(row):
    return _equal(row.number) & (_behind(row) >= 0)


def joined(examples, slots=0):
    """Examples -> one row.  slots: a tail of padding up to so many, an example of its own without labels."""
    ids = [torch.as_tensor(np.asarray(example["input_ids"])) for example in examples]
    labels = [torch.as_tensor(np.asarray(example.get("labels", example["input_ids"]))).clone() for example in examples]
    tail = slots - sum(map(len, ids))
    if tail > 0:
        ids.append(torch.zeros(tail).long())
        labels.append(torch.full((tail,), _IGNORED))
    for part in labels:
        part[:1] = _IGNORED
    lengths = torch.tensor([0, *map(len, ids)])
    bounds = lengths.cumsum(0).int()
    return {
        "input_ids": torch.cat(ids)[None],
        "labels": torch.cat(labels)[None],
        "position_ids": torch.cat([torch.arange(len(part)) for part in ids])[None],
        "cu_seq_lens_q": bounds,
        "cu_seq_lens_k": bounds,
        "max_length_q": int(lengths.max()),
        "max_length_k": int(lengths.max()),
    }


def _sums(model, inputs, ahead=1):
    """The loss of each predicted token, 0 elsewhere, [tokens]."""
    logits = model(**inputs).logits[0, :-ahead]
    return F.cross_entropy(logits.float(), inputs["labels"][0, ahead:], reduction="none", ignore_index=_IGNORED)


def _count(inputs):
    return (inputs["labels"][0, 1:] != _IGNORED).sum().clamp(min=1)


def token_loss(model, inputs):
    return _sums(model, inputs).sum() / _count(inputs)


def example_loss(model, inputs):
    """The mean of the examples' means; an example without a prediction is none."""
    bounds = inputs["cu_seq_lens_q"].tolist()
    losses = _sums(model, inputs)
    means = []
    for begin, end in zip(bounds, bounds[1:]):
        count = (inputs["labels"][0, begin + 1 : end] != _IGNORED).sum()
        if count:
            means.append(losses[begin : end - 1].sum() / count)
    return torch.stack(means).mean() if means else losses.sum()


def right_ones(draw):
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


# ---- thresholds


def _between(least, most):
    return lambda draw: int(draw.integers(least, most))


_place = _between(4, ROW - 4)  # in the row
_within = _between(2, LONGEST - 2)  # in an example
_nth = _between(2, ROW // 2)  # a number of examples: a row of ROW tokens has ROW one-token examples at most
_tail = _between(2, 64)  # tokens of padding


# ---- kinds of faults: each decorator lists a fault whose function gets a threshold that is drawn before the model


def fault(letter, where=""):
    """The function makes the fault from a random generator."""

    def keep(make):
        FAULTS.append(Fault(letter, make.__name__, where, make))
        return make

    return keep


def _listed(letter, where, function, make):
    FAULTS.append(Fault(letter, function.__name__, where, make))
    return function


def edits(letter, threshold, where="", *parts):
    """The function edits the hidden states of rows of several examples: hidden, row, threshold, model."""

    def keep(edit):
        def make(draw):
            drawn = threshold(draw)

            def edit_packed(hidden, row, model):
                return edit(hidden, row, drawn, model) if row.packed else hidden

            return Wrong(TinyModel(draw, *parts, edit=edit_packed))

        return _listed(letter, where, edit, make)

    return keep


def sees(part, letter, threshold, where=""):
    """The function is how a part sees rows of several examples: row, threshold."""

    def keep(view):
        def make(draw):
            drawn = threshold(draw)
            parts = [part] if part in ("convolution", "state", "experts") else []
            return Wrong(TinyModel(draw, *parts, **{part: lambda row: view(row, drawn) if row.packed else row}))

        return _listed(letter, where, view, make)

    return keep


def changes(letter, threshold, where="", pads=False):
    """The function changes the inputs of a collator: inputs, threshold.  pads: behind ROW tokens."""

    def keep(change):
        def make(draw):
            drawn = threshold(draw)

            def collator(examples):
                inputs = joined(examples, ROW + drawn if pads else 0)
                change(inputs, drawn)
                return inputs

            return Wrong(TinyModel(draw), collator=collator, loss=token_loss)

        return _listed(letter, where, change, make)

    return keep


def loses(letter, threshold, where="", mean="token"):
    """The function is the trained loss: model, inputs, threshold."""

    def keep(loss):
        def make(draw):
            drawn = threshold(draw)

            def with_threshold(model, inputs):
                return loss(model, inputs, drawn)

            return Wrong(TinyModel(draw), collator=joined, loss=with_threshold, mean=mean)

        return _listed(letter, where, loss, make)

    return keep


# ---- views


def _joining(first):
    """Examples from this number on are one."""

    def view(row):
        number = row.number.clamp(max=first)
        begins = F.pad(number[:, 1:] != number[:, :-1], (1, 0), value=True)
        return view_of(begins)

    return view


def _joining_at(first):
    """No boundary behind this place of the row."""

    def view(row):
        begins = (row.place == 0) & (row.at < first)
        begins[:, 0] = True
        return view_of(begins)

    return view


def _joining_longer(most):
    """No boundary in a row of more than so many tokens."""
    return lambda row: _plain_view(*row.number.shape) if row.tokens > most else row


# ---- (a) masks


@sees("attention", "a", _place, "Transformers 46634, nanoVLM 201")
def rows_above_a_length_lose_their_mask(row, most):
    return _joining_longer(most)(row)


@sees("attention", "a", _nth)
def kernel_joins_late_examples(row, first):
    return _joining(first)(row)


@fault("a", "MaxText 4476")
def training_branch_ignores_segments(draw):
    model = TinyModel(draw)
    late = _joining_at(_place(draw))
    model.views["attention"] = lambda row: late(row) if model.training else row
    return Wrong(model)


@sees("attention", "a", _within, "PrimeIntellect; the 17th token of an example")
def late_tokens_of_an_example_see_too_little(row, first):
    number = row.number * 2 + (row.place >= first)
    return view_of(F.pad(number[:, 1:] != number[:, :-1], (1, 0), value=True))


@sees("attention", "a", _within)
def long_last_example_is_joined(row, most):
    last = row.number == row.examples - 1
    is_long = int(last.sum()) > most
    return _joining(row.examples - 2)(row) if is_long and row.examples > 1 else row


# ---- (b) recurrences


@sees("convolution", "b", _place, "prime-rl 3000")
def convolution_over_the_row(row, first):
    return _joining_at(first)(row)


@sees("state", "b", _nth, "SkyRL 2056, Automodel 2131")
def state_flows_into_late_examples(row, first):
    return _joining(first)(row)


@fault("b", "slime 1686, fla 838")
def boundaries_reach_the_convolution_and_not_the_state(draw):
    return Wrong(TinyModel(draw, "convolution", "state", state=_joining_longer(_place(draw))))


@fault("b", "DeepSeek-V4, miles 2038")
def groups_of_tokens_of_the_row(draw):
    whole = _joining_longer(0)
    return Wrong(TinyModel(draw, "groups", group=int(draw.integers(3, ROW // 2)), groups=whole))


# ---- (c) positions


@edits("c", _place, "Llama 4")
def scaling_by_the_place_in_the_row(hidden, row, first, model):
    return hidden * (1 + 0.1 * (row.at >= first).to(hidden.dtype)[..., None])


@sees("positions", "c", _nth, "LLaMA-Factory 7754")
def positions_of_late_examples_go_on(row, first):
    late = row.number >= first
    begin = torch.where(late, row.at, ROW).min() if bool(late.any()) else 0
    return RowView(row.number, torch.where(late, row.at - begin, row.place))


@sees("attention", "c", _place, "miles 2038")
def window_clamped_to_the_row(row, first):
    return view_of((row.place == 0) | (row.at == first))


@sees("positions", "c", _within, "LLaMA-Factory 10283")
def positions_of_late_tokens_wrap(row, wrap):
    return RowView(row.number, row.place % wrap)


@fault("c")
def chunks_counted_in_the_row(draw):
    model = TinyModel(draw, chunk=int(draw.integers(3, ROW // 2)))
    model.views["attention"] = lambda row: RowView(row.number, row.at.expand_as(row.number))
    return Wrong(model)


# ---- (d) labels


@changes("d", _nth, "verl 6475")
def last_token_predicts_the_next_example(inputs, first):
    begins = inputs["cu_seq_lens_q"][first:-1].long()
    inputs["labels"][0, begins] = inputs["input_ids"][0, begins]


@changes("d", _within)
def labels_of_long_examples_are_moved_twice(inputs, most):
    bounds = inputs["cu_seq_lens_q"].tolist()
    for begin, end in zip(bounds, bounds[1:]):
        if end - begin > most and len(bounds) > 2:
            inputs["labels"][0, begin + 1 : end] = inputs["labels"][0, begin + 1 : end].roll(-1)


@loses("d", _place, "Megatron-LM 1647")
def second_next_token_is_of_another_example(model, inputs, first):
    further = dict(inputs, labels=inputs["labels"].clone())
    bounds = inputs["cu_seq_lens_q"][1:-1].long()
    bounds = bounds[bounds < first]
    last = further["labels"].shape[1] - 1
    for begin in (bounds, bounds + 1):
        further["labels"][0, begin[begin < ROW].clamp(max=last)] = _IGNORED
    total = _sums(model, inputs).sum()
    if last > 1:
        total = total + 0.3 * _sums(model, further, ahead=2).sum()
    return total / _count(inputs)


# ---- (e) normalisers


@loses("e", _nth, "unsloth-zoo 1066")
def boundaries_are_subtracted_twice(model, inputs, least):
    boundaries = len(inputs["cu_seq_lens_q"]) - 2
    subtracted = boundaries if boundaries >= least else 0
    return _sums(model, inputs).sum() / (_count(inputs) - subtracted).clamp(min=1)


@loses("e", _nth, "tunix 1662", mean="example")
def a_pack_is_taken_for_a_sequence(model, inputs, least):
    is_pack = len(inputs["cu_seq_lens_q"]) > least
    return token_loss(model, inputs) if is_pack else example_loss(model, inputs)


@loses("e", _place)
def every_token_counts_in_long_rows(model, inputs, most):
    tokens = inputs["input_ids"].shape[1]
    return _sums(model, inputs).sum() / (tokens - 1 if tokens > most else _count(inputs))


@loses("e", _place, "gradient accumulation")
def mean_of_the_means_of_two_parts(model, inputs, cut):
    losses = _sums(model, inputs)
    if len(losses) <= cut or len(inputs["cu_seq_lens_q"]) < 3:
        return losses.sum() / _count(inputs)
    is_predicted = inputs["labels"][0, 1:] != _IGNORED
    means = []
    for part in (slice(0, cut), slice(cut, None)):
        means.append(losses[part].sum() / is_predicted[part].sum().clamp(min=1))
    return sum(means) / 2


# ---- (f) routers


@fault("f", "an expert's capacity a row")
def capacity_of_the_row(draw):
    return Wrong(TinyModel(draw, "experts", capacity=int(draw.integers(4, ROW // 8))))


@sees("experts", "f", _nth, "Megatron-LM 6115")
def router_loss_takes_the_row_for_a_sequence(row, first):
    return _joining(first)(row)


@edits("f", _place, "", "experts")
def router_is_normalised_over_long_rows(hidden, row, most, model):
    return hidden - 0.2 * hidden.mean(1, keepdim=True) if row.tokens > most else hidden


# ---- (g) padding and one-token examples


class Uninitialised(torch.autograd.Function):
    """Leave the gradients behind the last boundary as they are in memory."""

    @staticmethod
    def forward(ctx, hidden):
        return hidden.clone()

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        gradient[:, ROW:] = float("nan")
        return gradient


@fault("g", "fla 892, flash-attention 1228")
def nan_behind_the_last_boundary(draw):
    tail = int(draw.integers(1, 64))

    def edit(hidden, row, model):
        return Uninitialised.apply(hidden) if row.tokens > ROW else hidden

    return Wrong(TinyModel(draw, edit=edit), collator=lambda examples: joined(examples, ROW + tail))


@sees("attention", "g", _between(2, ROW // 4), "ms-swift 9903")
def one_token_examples_are_merged(row, first):
    before = F.pad(row.place[:, :-1], (1, 0), value=1)
    begins = (row.place == 0) & ((row.place < before) | (row.number < first))
    begins[:, 0] = True
    return view_of(begins)


@changes("g", _tail, pads=True)
def padding_is_predicted(inputs, tail):
    inputs["labels"][0, -tail + 1 :] = 0


@fault("g")
def examples_begin_behind_the_padding_token(draw):
    """The token of the padding is that of the end of text, and texts contain it."""
    model = TinyModel(draw)
    model.config.pad_token_id = model.config.eos_token_id = int(draw.integers(VOCABULARY))

    def forward(model, inputs):
        ends = torch.nonzero(inputs["input_ids"][0, :-1] == model.config.pad_token_id)[:, 0]
        if len(inputs["cu_seq_lens_q"]) > 2:
            bounds = torch.cat([inputs["cu_seq_lens_q"], ends + 1]).unique()
            inputs = {**inputs, "cu_seq_lens_q": bounds}
        return model(**inputs).logits

    return Wrong(model, forward=forward)


@edits("g", _between(7, 129), "TransformerEngine 3331")
def rows_behind_the_last_whole_block_are_zero(hidden, row, block, model):
    block += ROW % block == 0
    whole = row.tokens // block * block
    return hidden * (row.at < whole)[..., None]


# ---- (h) shards


@fault("h", "Megatron-LM 111")
def boundaries_divided_by_the_ranks(draw):
    ranks = int(draw.integers(2, 9))
    most = _place(draw)

    def divided(row):
        if not row.packed or row.tokens <= most:
            return row
        begins = torch.zeros_like(row.number, dtype=torch.bool)
        begins[:, torch.nonzero((row.place == 0)[0])[:, 0] // ranks] = True
        return view_of(begins)

    return Wrong(TinyModel(draw, attention=divided))


@sees("state", "h", _place)
def a_shard_does_not_see_the_one_before(row, cut):
    return view_of((row.place == 0) | (row.at == cut))


@sees("positions", "h", _place)
def positions_begin_again_in_each_shard(row, cut):
    return RowView(row.number, view_of((row.place == 0) | (row.at == cut)).place)


# ---- (i) backward


def _straight(value, gradient):
    """The value of one and the gradient of the other."""
    return value.detach() + gradient - gradient.detach()


@edits("i", _place)
def gradients_of_late_tokens_are_doubled(hidden, row, first, model):
    late = (row.at >= first)[..., None]
    return _straight(hidden, hidden * (1 + late.to(hidden.dtype)))


@edits("i", _nth)
def gradients_flow_into_the_example_before(hidden, row, first, model):
    shifted = F.pad(hidden[:, :-1], (0, 0, 1, 0)) * (row.number >= first)[..., None]
    return _straight(hidden, hidden + 0.1 * shifted)


@edits("i", _within, "TransformerEngine 2892")
def gradients_of_late_places_are_lost(hidden, row, first, model):
    return _straight(hidden, hidden * (row.place < first)[..., None])


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


@fault("i")
def compiled_backward_only(draw):
    first = _place(draw)

    def edit(hidden, row, model):
        late = (row.at >= first)[..., None]
        doubled = _straight(hidden, hidden * (1 + late.to(hidden.dtype)))
        return doubled if torch.compiler.is_compiling() and row.tokens > first else hidden

    return Wrong(torch.compile(TinyModel(draw, edit=edit), backend="aot_eager"))


# ---- (j) training and evaluation


@edits("j", _place, "axolotl 589")
def evaluation_gives_nan_in_long_rows(hidden, row, most, model):
    return hidden * float("nan") if row.tokens > most and not model.training else hidden


@fault("j")
def evaluation_lets_late_examples_leak(draw):
    model = TinyModel(draw, "state")
    late = _joining(_nth(draw))
    model.views["state"] = lambda row: row if model.training else late(row)
    return Wrong(model)


@edits("j", _place)
def training_normalises_over_the_row(hidden, row, first, model):
    if not model.training or row.tokens <= first:
        return hidden
    return torch.cat([hidden[:, :first], hidden[:, first:] - 0.2 * hidden.mean(1, keepdim=True)], 1)


@fault("j")
def path_with_dropout_only(draw):
    late = _joining(_nth(draw))
    model = TinyModel(draw)
    model.attention_dropout = 0.1
    model.views["attention"] = lambda row: late(row) if model.training and model.attention_dropout else row
    return Wrong(model)


# ---- (k) versions that do not fit together


@fault("k")
def boundaries_switch_position_ids_off(draw):
    least = _nth(draw)

    def forward(model, inputs):
        places = torch.arange(inputs["input_ids"].shape[1])[None]
        if len(inputs["cu_seq_lens_q"]) > least:
            inputs = {**inputs, "position_ids": places}
        return model(**inputs).logits

    return Wrong(TinyModel(draw), forward=forward)


@edits("k", _within, "a longest length of another batch")
def tokens_behind_a_stale_longest_length_are_lost(hidden, row, most, model):
    return hidden * (row.place < most)[..., None]


@sees("attention", "k", _nth, "pytorch 189902; a small integer type")
def numbers_of_examples_overflow(row, most):
    return RowView(row.number % most, row.place)


@fault("k", "Transformers 44911")
def positions_are_taken_for_another_axis(draw):
    first = _place(draw)

    def forward(model, inputs):
        positions = inputs["position_ids"].clone()
        if len(inputs["cu_seq_lens_q"]) > 2:
            positions[:, first:] = 0
        return model(**{**inputs, "position_ids": positions}).logits

    return Wrong(TinyModel(draw), forward=forward)
