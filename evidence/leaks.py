"""Leaks between the examples of a padding-free row: calls of Transformers, TRL and torch.

Each model is tiny and random, in float32 on a CPU, without dropout, and its code is that of the library.  A row is
example A and then example B.  A is replaced by other tokens, once for each seed; the figure is the largest change of
B's outputs.  It is 0 or rounding if the examples are apart.
"""

from __future__ import annotations

import importlib
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Callable, Dict, Iterable, List, Mapping, NamedTuple, Sequence, Tuple

import numpy as np

from evidence import leaks_trl
from evidence.runner import Cell, Row, Runner
from evidence.writer import Part, Shown, markdown, small
from pack_data.reading.fields import one_line
from pack_data.reading.words import counted

SUMMARY = (
    "Largest change of one example's outputs when only the other example of a padding-free row changes, for stock\n"
    "Transformers, TRL, torch attention and ours, on a CPU. Needs Transformers and TRL; a few minutes."
)


class LeakSize(NamedTuple):
    """Lengths of the two examples, in tokens, and the vocabulary of the models."""

    first: int
    second: int
    vocabulary: int


SIZES = {"quick": LeakSize(5, 4, 40), "default": LeakSize(24, 16, 100)}
_LONGEST = 128  # positions of each model; a row is shorter
# Share of the largest output above which a change is a leak; float32 sums differ by less.
_ROUNDING = 1e-5

ENCODER = "encoder"
DECODER = "decoder"
TOWER = "text tower"  # a decoder with positions of three axes
STATES = "state space"
TORCH = "torch"
TRL = "TRL"


class Family(NamedTuple):
    """A model family of the table."""

    kind: str
    auto: str  # class of Transformers that builds the model
    config: str  # model type
    options: Mapping[str, Any] = {}


# A head of 16 has 8 angles: of time, height and width.
_SECTIONS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
_HYBRID = ["linear_attention", "full_attention"]

FAMILIES = {
    "BERT": Family(ENCODER, "AutoModelForMaskedLM", "bert"),
    "RoBERTa": Family(ENCODER, "AutoModelForMaskedLM", "roberta"),
    "ModernBERT": Family(ENCODER, "AutoModelForMaskedLM", "modernbert"),
    "ESM": Family(ENCODER, "AutoModelForMaskedLM", "esm", {"position_embedding_type": "rotary"}),
    "Llama": Family(DECODER, "AutoModelForCausalLM", "llama"),
    "Qwen3": Family(DECODER, "AutoModelForCausalLM", "qwen3"),
    "Gemma 3 (text)": Family(DECODER, "AutoModelForCausalLM", "gemma3_text"),
    "Qwen2-VL (text tower)": Family(
        TOWER, "AutoModel", "qwen2_vl_text", {"rope_parameters": _SECTIONS}
    ),
    "Mamba": Family(STATES, "AutoModelForCausalLM", "mamba"),
    "Mamba-2": Family(
        STATES, "AutoModelForCausalLM", "mamba2", {"num_heads": 8, "head_dim": 16, "n_groups": 1}
    ),
    "Qwen3-Next": Family(STATES, "AutoModelForCausalLM", "qwen3_next", {"layer_types": _HYBRID}),
}


def kind_of(variant: str) -> str:
    """Return the kind of a family; TRL and torch are kinds of their own."""
    return FAMILIES[variant].kind if variant in FAMILIES else variant


VARIANTS = (*FAMILIES, TRL, TORCH)

# ---- the calls of a model

_PLAIN = "DataCollatorWithFlattening"
_TRAIN = "the same in train()"
_NO_CACHE = "use_cache=False"
_ONES = "the same, attention mask of ones"
_BOUNDARIES = "boundaries alone"
_RENAMED = "boundaries under another name"
_PADDED = "padded batch"
_DECODER_CALLS = (_PLAIN, _TRAIN, _NO_CACHE, _ONES, _BOUNDARIES, _RENAMED, _PADDED)
CALLS = {
    ENCODER: (_PLAIN, _ONES, _BOUNDARIES, _RENAMED, _PADDED),
    DECODER: _DECODER_CALLS,
    TOWER: _DECODER_CALLS,
    STATES: (_PLAIN, _NO_CACHE, _PADDED),
}
ATTENTIONS = ("sdpa", "eager", "flex_attention", "padding_free")
_CALLS_IN_WORDS = f"""
Calls of a model: **{_PLAIN}** is `model(**inputs)` in eval() with all that the collator returns with
`return_flash_attn_kwargs=True` and `return_seq_idx=True`, without the labels. **{_NO_CACHE}** is the same call with
that argument, as in all rows below it of decoders. **{_BOUNDARIES}**: without `position_ids`, so that positions run on.
**{_RENAMED}**: the same with `cu_seqlens` in place of `cu_seq_lens_q` and `cu_seq_lens_k`. **{_PADDED}**: A and B are
two rows with `attention_mask`."""


_MISSING = {
    _BOUNDARIES: ["position_ids"],
    _RENAMED: ["position_ids", "cu_seq_lens_q", "cu_seq_lens_k"],
}


def inputs_of(call: str, kind: str, examples: Sequence[Sequence[int]]) -> Dict[str, Any]:
    """Return the arguments of the model for these examples, in one row unless they are padded."""
    import torch
    import transformers

    if call == _PADDED:
        rows = [torch.tensor(example) for example in examples]
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        # No example has a token 0.
        inputs: Dict[str, Any] = {"input_ids": ids, "attention_mask": (ids != 0).long()}
    else:
        collator: Any = transformers.DataCollatorWithFlattening(
            return_flash_attn_kwargs=True, return_seq_idx=True, return_tensors="pt"
        )
        inputs = dict(collator([{"input_ids": list(example)} for example in examples]))
        if call == _ONES:
            inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        if call == _RENAMED:
            inputs["cu_seqlens"] = inputs["cu_seq_lens_q"]
        of_others = [] if kind == STATES else ["seq_idx"]
        for name in ("labels", *of_others, *_MISSING.get(call, ())):
            del inputs[name]
    if kind != ENCODER and call not in (_PLAIN, _TRAIN):
        inputs["use_cache"] = False
    return inputs


def new_model(family: Family, attention: str, size: LeakSize, seed: int) -> Any:
    """Build a tiny model with random weights, large enough that attention matters."""
    import torch
    import transformers

    torch.manual_seed(seed)
    options = {
        "vocab_size": size.vocabulary,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": _LONGEST,
        "initializer_range": 0.3,
        "pad_token_id": 0,
    }
    if family.kind != ENCODER:
        options["num_key_value_heads"] = 2
    options.update(family.options)
    config = transformers.AutoConfig.for_model(family.config, **options)
    for name in list(vars(config)):
        if "dropout" in name and isinstance(getattr(config, name), float):
            setattr(config, name, 0.0)
    build = getattr(transformers, family.auto).from_config
    chosen = {"attn_implementation": attention} if attention else {}
    return build(config, **chosen).eval()


# ---- attention of torch alone

_WIDTH = 16  # of a head
_HEADS = 2


def _causal(heads: Any, _lengths: Sequence[int]) -> Any:
    from torch.nn import functional as F

    query, key, value = heads
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def _masked(heads: Any, lengths: Sequence[int]) -> Any:
    import torch
    from torch.nn import functional as F

    squares = [torch.ones(length, length, dtype=torch.bool) for length in lengths]
    mask = torch.block_diag(*squares).bool().tril()
    query, key, value = heads
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)


def _flex(heads: Any, lengths: Sequence[int]) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    first, tokens = lengths[0], sum(lengths)

    def seen(_batch: Any, _head: Any, row: Any, column: Any) -> Any:
        return ((row < first) == (column < first)) & (row >= column)

    mask = create_block_mask(seen, None, None, tokens, tokens, device="cpu")
    query, key, value = heads
    return flex_attention(query, key, value, block_mask=mask)


def _varlen(heads: Any, lengths: Sequence[int]) -> Any:
    import torch

    import padding_free.varlen_on_cpu  # noqa: F401, registers the kernel

    starts = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    longest = max(lengths)
    rows = heads[:, 0].transpose(1, 2)
    varlen: Any = importlib.import_module("torch.nn.attention.varlen")
    context = varlen.varlen_attn(*rows, starts, starts, longest, longest, window_size=(-1, 0))
    return context.transpose(0, 1).unsqueeze(0)


_MASKED = "scaled_dot_product_attention, mask of examples"
_VARLEN = "varlen_attn, our kernel for CPUs"
TORCH_CALLS: Dict[str, Callable[..., Any]] = {
    "scaled_dot_product_attention, is_causal": _causal,
    _MASKED: _masked,
    "flex_attention, mask of examples": _flex,
    _VARLEN: _varlen,
}


def torch_outputs(call: str, size: LeakSize, seed: int) -> List[np.ndarray]:
    """Return the outputs of B with two different A, from attention over random vectors."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    lengths = (size.first, size.second)
    shape = (3, 1, _HEADS, sum(lengths), _WIDTH)
    heads = torch.randn(shape, generator=generator)
    changed = torch.randn(shape, generator=generator)
    changed[..., size.first :, :] = heads[..., size.first :, :]
    attended = [TORCH_CALLS[call](vectors, lengths) for vectors in (heads, changed)]
    return [context[..., size.first :, :].numpy() for context in attended]


# ---- one cell: a model


class Leaks:
    """The measurement of a cell: all attentions and calls of a model."""

    def __init__(self, size: LeakSize) -> None:
        self.size = size

    def __call__(self, cell: Cell) -> Iterable[Row]:
        import torch

        import padding_free.attention  # noqa: F401, registers our attention

        # Compilation of flex attention takes minutes.
        with torch.compiler.set_stance("force_eager"):
            for attention, call in calls_of(cell.variant):
                result = self._result(cell.variant, attention, call, cell.seed)
                yield {"attention": attention, "call": call, **result}

    def _result(self, variant: str, attention: str, call: str, seed: int) -> Row:
        try:
            if variant == TORCH:
                before, after = torch_outputs(call, self.size, seed)
            else:
                before, after = self._outputs(variant, attention, call, seed)
        except Exception as error:  # the table shows any refusal of the library
            text = f"{type(error).__name__}: {one_line(error, 150)}"
            return {"change": None, "largest": None, "error": text}
        change = float(np.abs(before - after).max())
        return {"change": change, "largest": float(np.abs(before).max()), "error": None}

    def _outputs(self, variant: str, attention: str, call: str, seed: int) -> List[np.ndarray]:
        """Return the outputs of B with two different A."""
        import torch

        family = FAMILIES["Llama" if variant == TRL else variant]
        size = self.size
        draw = np.random.default_rng(seed)
        # Ids below 4 are special tokens in some families.
        second = draw.integers(4, size.vocabulary, size.second).tolist()
        outputs = []
        for _ in range(2):
            first = draw.integers(4, size.vocabulary, size.first).tolist()
            model = new_model(family, attention, size, seed).train(call == _TRAIN)
            if variant == TRL:
                outputs.append(leaks_trl.outputs(call, model, first, second))
                continue
            with torch.no_grad():
                output = model(**inputs_of(call, family.kind, [first, second]))[0]
            of_second = output[1, : size.second] if call == _PADDED else output[0, size.first :]
            outputs.append(of_second.float().numpy())
        return outputs


def calls_of(variant: str) -> List[Tuple[str, str]]:
    """Return each call of a family, of TRL or of torch, with each attention: attention, call."""
    if variant == TORCH:
        return [("", call) for call in TORCH_CALLS]
    kind = kind_of(variant)
    calls = leaks_trl.CALLS if kind == TRL else CALLS[kind]
    attentions = ("",) if kind == STATES else ATTENTIONS
    return [(attention, call) for attention in attentions for call in calls]


# ---- the experiment


def versions() -> Dict[str, str]:
    """Return the versions that determine the table."""
    names = {"python": platform.python_version()}
    for package in ("torch", "transformers", "trl"):
        try:
            names[package] = version(package)
        except PackageNotFoundError:
            raise ValueError(
                f"{package} is not installed, which is measured; pip install {package}"
            ) from None
    return names


def settings(options: Any) -> Dict[str, Any]:
    return {"size": list(SIZES[options.size]), "versions": versions()}


def run(options: Any, runner: Runner) -> int:
    import transformers

    transformers.logging.set_verbosity_error()  # warnings about tiny models
    runner.keep_facts({})
    cells = []
    for name in VARIANTS:
        cells += [Cell(name, seed) for seed in range(options.seeds)]
    runner.run(cells, Leaks(SIZES[options.size]))
    return runner.show(shown(runner.path), plot=options.plot)


# ---- results

_OURS = 'attn_implementation="padding_free"'
# Calls in place of one that leaks, by kind; those that leak as well are left out.
_INSTEAD = {
    ENCODER: (_OURS, _PADDED),
    DECODER: (_NO_CACHE, _OURS, _PADDED),
    TOWER: (_NO_CACHE, _OURS, _PADDED),
    STATES: (_NO_CACHE, _PADDED),
    TORCH: (_MASKED, _VARLEN),
}


class Result(NamedTuple):
    """The result of a call with one attention, over all seeds."""

    change: float  # the largest; 0 if the call fails
    largest: float  # output
    error: str  # "" if the call does not fail
    leaking: Sequence[bool]  # by seed

    @property
    def leaks(self) -> bool:
        return any(self.leaking)

    def cell(self) -> str:
        """Return the largest change, bold for a leak."""
        if self.error:
            return "error"
        return f"**{self.change:.2g}**" if self.leaks else small(self.change)


def result_of(rows: Sequence[Row]) -> Result:
    """Return the largest change and the largest output of the seeds, and the first error."""
    changes = [row["change"] or 0.0 for row in rows]
    largest = max(row["largest"] or 0.0 for row in rows)
    errors = [row["error"] or "" for row in rows]
    leaking = [change > _ROUNDING * largest for change in changes]
    return Result(max(changes), largest, max(errors), leaking)


class Line(NamedTuple):
    """A line of the table: a model and a call with each attention."""

    model: str
    call: str
    results: Mapping[str, Result]  # by attention
    instead: Sequence[str] = ()  # calls that do not leak, if this one does

    def leaking(self) -> List[str]:
        """Return the attentions with which the call leaks."""
        return [attention for attention, result in self.results.items() if result.leaks]


def _instead_of(line: Line, lines: Mapping[Tuple[str, str], Line]) -> List[str]:
    """Return calls that do not leak with any attention with which this one does; lines: by model and call."""
    leaking = line.leaking()
    if not leaking:
        return []
    kind = kind_of(line.model)
    candidates = leaks_trl.INSTEAD.get(line.call, ()) if kind == TRL else _INSTEAD[kind]
    chosen = []
    for call in candidates:
        measured = _PLAIN if call == _OURS else call
        attentions = ["padding_free"] if call == _OURS else leaking
        results = [lines[line.model, measured].results[name] for name in attentions]
        if not any(result.leaks or result.error for result in results):
            chosen.append(call)
    return chosen


class LeaksShown(Shown):
    """The results in a run's file."""

    def lines(self) -> List[Line]:
        """Return a line for each model and call, in the order of the families."""
        rows: Dict[Tuple[str, str], Dict[str, List[Row]]] = {}
        for variant in VARIANTS:
            for seed in self.seeds(variant):
                for row in self.cells[Cell(variant, seed)]:
                    attentions = rows.setdefault((variant, row["call"]), {})
                    attentions.setdefault(row["attention"], []).append(row)
        lines = {}
        for (model, call), attentions in rows.items():
            results = {name: result_of(seeds) for name, seeds in attentions.items()}
            lines[model, call] = Line(model, call, results)
        return [line._replace(instead=_instead_of(line, lines)) for line in lines.values()]

    def parts(self) -> List[Part]:
        lines = self.lines()
        results = [result for line in lines for result in line.results.values()]
        leaking = [result for result in results if result.leaks]
        always = sum(all(result.leaking) for result in leaking)
        failing = sum(bool(result.error) for result in results)
        used = self.settings["versions"]
        libraries = f"transformers {used['transformers']}, trl {used['trl']}"
        seeds = counted(len(self.seeds(TORCH)), "seed")

        chosen = [line for line in lines if "" not in line.results]
        single = [line for line in lines if "" in line.results]
        titles = dict(zip(ATTENTIONS, ("sdpa", "eager", "flex", "ours")))
        size = LeakSize(*self.settings["size"])
        parts: List[Part] = [
            f"A padding-free row is example A ({size.first} tokens) and then example B ({size.second} tokens). Only "
            "the tokens of A are replaced; the table has the largest change of B's logits (of the hidden states for a "
            "text tower and SFTTrainer, of the outputs for torch alone) over all seeds. Examples that are apart "
            f"change by 0 or by rounding; a change above {_ROUNDING:.0e} of the largest output is a leak.",
            _METHOD,
            _CALLS_IN_WORDS,
            leaks_trl.IN_WORDS,
            "",
            f"{len(results)} calls with {seeds}: {len(leaking)} leak (bold), {always} of them with each seed; "
            f"{failing} fail with an error. {libraries}; {self.facts['machine']}.",
            "",
            _table(chosen, titles),
            "Models without a choice of attention, and functions of torch alone:",
            "",
            _table(single, {"": "change of B"}),
        ]
        return [*parts, *_errors(lines), _LIMITS]


def _table(lines: Sequence[Line], titles: Mapping[str, str]) -> str:
    """Return the table of some lines; titles: headings by attention."""
    cells = []
    for line in lines:
        results = [line.results[name] for name in titles]
        largest = max(result.largest for result in results)
        changes = [result.cell() for result in results]
        cells.append(
            [line.model, line.call, *changes, f"{largest:.1f}", ", or ".join(line.instead)]
        )
    headings = ["model", "call", *titles.values(), "largest output", "instead"]
    return markdown(headings, cells)


def _errors(lines: Sequence[Line]) -> List[str]:
    """List the errors of each model."""
    listed: Dict[str, None] = {}
    for line in lines:
        for result in line.results.values():
            if result.error:
                listed[f"- {line.model}: `{result.error}`"] = None
    return ["Errors:", "", *listed]


_METHOD = """
All models are tiny (2 layers, width 64), with random weights of standard deviation 0.3 in most families, in float32 on
a CPU, without dropout; each seed draws other weights and tokens. Their code is that of the library; **ours** is its
model with `attn_implementation="padding_free"`. The size of a leak depends on the weights. Flex attention is not
compiled; compiled, which takes minutes, it gave the same figures to 1e-6 of the largest output (seed 0).

**Instead** names rows of the same model that do not leak. `attn_implementation="padding_free"` is the column "ours" of
its first row: pass all that the collator returns."""

_LIMITS = """
Three causes explain the leaks of Transformers. The mask of an encoder never depends on `position_ids`. The mask of a
decoder does, but only without an attention mask and without a cache, and `use_cache` is True unless `Trainer` or
`SFTTrainer` turns it off. sdpa, eager and flex do not read `cu_seq_lens_q`. Mamba and Mamba-2 carry their state over
the boundary. TRL's "wrapped" joins examples into one on purpose, and passes no boundaries.

The collator of Transformers numbers positions from 0, RoBERTa from `padding_idx + 1`: for its family, take the rows of
`PaddingFreeCollator(model)`.

Not tried: CUDA and its kernels, half precision, trained weights, Transformers' `Trainer`, other versions. Torch has no
kernel of `varlen_attn` for CPUs; the row uses [ours](../padding_free.md). A call that does not
leak here can still be wrong in other ways, such as its positions; `check_no_leak` judges a whole model
([padding-free rows](../padding_free.md)).

To repeat it (finished cells are kept in `runs/evidence/leaks`):

<!-- not run: takes minutes -->
```sh
make .venv-trainers-newest/ready
.venv-trainers-newest/bin/python -m evidence leaks
.venv-trainers-newest/bin/python -m evidence.figures --take runs/evidence/leaks
```

The figures as JSON are in `evidence/results/leaks.jsonl`."""


shown = LeaksShown
