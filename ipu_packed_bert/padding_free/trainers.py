"""Optimal packs in the trainers of Hugging Face: Trainer, and SFTTrainer of TRL.

    trainer = SFTTrainer(model, args=SFTConfig(max_length=4096, ...), train_dataset=dataset)
    pack_into(trainer)
    trainer.train()

The trainer keeps its data set, its data collator, its loss and its accumulation.  What changes is which examples share
a batch, and that a batch is one row without padding.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import logging
import sys
from functools import partial
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Union

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from ipu_packed_bert.padding_free.choice import find_choice
from ipu_packed_bert.padding_free.collators import Inputs, attends_both_ways, inputs_for
from ipu_packed_bert.padding_free.losses import BLOCK, IGNORED, cross_entropy_sum, loss_sum, output_layer, supervised
from ipu_packed_bert.padding_free.models import base_of, choice_of
from ipu_packed_bert.padding_free.probe import audit_batch
from ipu_packed_bert.padding_free.streams import PackedStream
from pack_data.batching.collators import padding_free_batch
from pack_data.batching.plans import BatchOptions, get_way
from pack_data.batching.sampler import IndexBatchSampler
from pack_data.batching.share import splits_over_workers

_logger = logging.getLogger(__name__)

# Ways whose epochs all have as many steps.  A trainer counts the steps of the first epoch and stops the others there.
WAYS_OF_EQUAL_EPOCHS = ("OptimalPacking+PosID", "SortedPacking+PosID", "MiniBatchPacking+PosID")
KEEPS_EXAMPLES = "MiniBatchPacking+PosID"  # as many examples in a batch as a padded one has
# What collators give for one example besides its tokens; a row of several examples gets its own.
_OF_A_ROW = set("attention_mask position_ids cu_seq_lens_q cu_seq_lens_k max_length_q max_length_k seq_idx".split())

_Planned = Union[IndexBatchSampler, PackedStream]


def pack_into(
    trainer: Any,
    *,
    max_sequence_length: Optional[int] = None,
    way: str = KEEPS_EXAMPLES,
    longer: str = "raise",
    check: bool = True,
    audit: bool = True,
) -> _Planned:
    """Let a Hugging Face Trainer, or TRL's SFTTrainer, train on packs.  Call it before `trainer.train()`.

    A batch has per_device_train_batch_size examples, joined to one row, so an update has as many examples as before.
    With another way, and where the data set is an iterable, it has per_device_train_batch_size rows of
    max_sequence_length tokens, and more examples.  By default max_sequence_length is the trainer's `max_length`, else
    the longest example.
    Every rank gets as many batches, every example comes once an epoch, and a run that is resumed inside an epoch goes
    on with the next batch.
    Labels are those of the trainer's own data collator, so masks of prompts and of other turns stay what they are.  The
    loss is the mean over the predicted tokens of a whole update, over accumulation and ranks.
    Evaluation stays as it was; beside the mean over batches, eval_loss, it gives that over tokens, eval_loss_by_token.

    way: MiniBatchPacking+PosID, OptimalPacking+PosID or SortedPacking+PosID.  longer: a rule of
    `pack_data.lengths.overlong` for examples of more than max_sequence_length tokens.  check: try out that the model
    keeps examples apart, and switch it to an attention that does (`use_padding_free`); without it the model must be
    switched already.  audit: compute the first batch of the training once more, each of its examples alone beside the
    row.  What both found and took is printed.
    Returns the sampler of this rank, or for an iterable data set its stream; their `longer` counts the examples that
    were cut or left out.  The stream begins again at its end, so max_steps ends the training.
    Raises ValueError, one line, for what cannot be packed.
    """
    args, accelerator = trainer.args, trainer.accelerator
    _check_trainer(trainer, way)
    theirs = trainer.get_train_dataloader
    lengths = _lengths_of(theirs().dataset) if _is_map_style(trainer.train_dataset) else None
    row = max_sequence_length if max_sequence_length is not None else getattr(args, "max_length", None)
    if row is None and way == KEEPS_EXAMPLES and lengths is not None:
        row = int(lengths.max(initial=1))
    if row is None:
        raise ValueError(
            "max_sequence_length is not given, and the trainer has no max_length; give the tokens of a row"
        )
    config = base_of(trainer.model).config
    cached = getattr(config, "use_cache", None)
    if check:
        _, probed = find_choice(trainer.model, longest=row, row=trainer._train_batch_size * row)
        _say(accelerator, str(probed))
    choice_of(trainer.model, tried=True)
    if args.world_size > 1:
        args.average_tokens_across_devices = True
    both_ways = attends_both_ways(trainer.model)  # Transformers' masked models take a count of tokens and forget it
    if (both_ways or not trainer.model_accepts_loss_kwargs) and trainer.compute_loss_func is None:
        # Otherwise the trainer takes the mean of the micro-batches' means.
        trainer.compute_loss_func = partial(_token_loss, causal=not both_ways)
    if _takes_use_cache(trainer.model):
        config.use_cache = cached  # batches say it, and the configuration is saved as it was

    def plan() -> _Planned:
        if lengths is None:
            place = {"rank": args.process_index, "ranks": args.world_size}
            return PackedStream(trainer.train_dataset, row, longer=longer, **place)
        seed = args.seed if args.data_seed is None else args.data_seed
        options = BatchOptions(trainer._train_batch_size, row, args.world_size, seed)
        return IndexBatchSampler(way, lengths, options, args.process_index, longer=longer)

    def get_train_dataloader() -> DataLoader:
        _let_ranks_train_together(trainer)
        return _loader(theirs(), planned if lengths is None else plan(), trainer)

    planned = plan()
    if planned.longer.longer and accelerator.is_main_process:
        _logger.warning("%s", planned.longer)
    changed = _changed_updates(trainer, planned, lengths)
    trainer.get_train_dataloader = get_train_dataloader
    _say(accelerator, f"the loss is {_loss_in_blocks(trainer)}")
    _evaluate_by_token(trainer)
    if audit:
        _audit_first(trainer)
    _say(accelerator, changed)
    return planned


def _say(accelerator: Any, text: str) -> None:
    if accelerator.is_main_process:
        print(f"pack_into: {text}", flush=True)


def _let_ranks_train_together(trainer: Any) -> None:
    """Accelerate 1.15 takes a model that was evaluated first for one that is in DistributedDataParallel already."""
    model, kind = trainer.model, trainer.accelerator.distributed_type.value
    alone = trainer.model_wrapped is model and kind.startswith("MULTI_")
    if alone and vars(model).pop("_is_accelerate_prepared", False) and "_original_forward" in vars(model):
        model.forward = vars(model).pop("_original_forward")  # or it would be in autocast twice


def _loss_in_blocks(trainer: Any) -> str:
    """Let the training compute its loss in blocks of tokens, where that is known to be the same.  Says what is done."""
    kind = next(each for each in type(trainer).__mro__ if "compute_loss" in vars(each))
    if kind.__module__ != "transformers.trainer":
        return f"that of {kind.__name__}{_in_smaller_tiles(trainer)}"
    if trainer.label_smoother is not None or trainer.compute_loss_func is not None or "compute_loss" in vars(trainer):
        return "the trainer's own, from the logits of all tokens"
    layer = output_layer(trainer.model)
    if layer is None or not layer.asked:
        return f"that of {type(base_of(trainer.model)).__name__}, from the logits of all tokens"
    theirs = trainer.compute_loss

    def compute_loss(model: Any, inputs: Inputs, *others: Any, **named: Any) -> Any:
        found = output_layer(model, inside=True) if model.training else None  # the model is in its wrappers now
        with contextlib.nullcontext() if found is None else found.for_loss(model):
            return theirs(model, inputs, *others, **named)

    trainer.compute_loss = compute_loss
    return "computed in blocks of tokens"


def _in_smaller_tiles(trainer: Any) -> str:
    """TRL 1.16 computes the logits of 4,096 tokens at a time, which a CPU gains nothing from.  Says what is done."""
    tiles: Any = sys.modules.get("trl.kernels.chunked_logprob")
    layer = base_of(trainer.model).get_output_embeddings()
    if not hasattr(tiles, "TOKEN_CHUNK_SIZE") or layer is None or trainer.args.device.type != "cpu":
        return ""
    tiles.TOKEN_CHUNK_SIZE = min(tiles.TOKEN_CHUNK_SIZE, max(1, BLOCK // layer.weight.shape[0]))
    return f", in blocks of {tiles.TOKEN_CHUNK_SIZE:,} tokens"


def _audit_first(trainer: Any) -> None:
    """The first batch of the training is audited before its loss is computed."""
    theirs = trainer.compute_loss
    own = "compute_loss" in vars(trainer)

    def compute_loss(model: Any, inputs: Inputs, *others: Any, **named: Any) -> Any:
        if not model.training:  # an evaluation before the training
            return theirs(model, inputs, *others, **named)
        del trainer.compute_loss
        if own:
            trainer.compute_loss = theirs
        _say(trainer.accelerator, f"the first batch: {audit_batch(model, inputs)}")
        return theirs(model, inputs, *others, **named)

    trainer.compute_loss = compute_loss


def _evaluate_by_token(trainer: Any) -> None:
    """An evaluation also gives the mean loss over all predicted tokens: "eval_loss_by_token"."""
    theirs, loop = trainer.compute_loss, trainer.evaluation_loop
    sums: List[torch.Tensor] = []  # of each batch: its loss and its predicted tokens

    def compute_loss(model: Any, inputs: Inputs, *others: Any, **named: Any) -> Any:
        labels = inputs.get("labels")  # the trainer may take it out
        found = theirs(model, inputs, *others, **named)
        if not model.training and torch.is_tensor(labels):
            loss = found[0] if isinstance(found, tuple) else found
            given = {**inputs, "labels": labels}
            sums.append(_loss_and_tokens(trainer, model, given, loss.detach(), named.get("num_items_in_batch")))
        return found

    def evaluation_loop(*others: Any, metric_key_prefix: str = "eval", **named: Any) -> Any:
        sums.clear()
        output = loop(*others, metric_key_prefix=metric_key_prefix, **named)
        if sums:
            loss, tokens = trainer.accelerator.gather(torch.stack(sums)).cpu().double().sum(0).tolist()
            output.metrics[f"{metric_key_prefix}_loss_by_token"] = loss / max(tokens, 1)
        return output

    trainer.compute_loss, trainer.evaluation_loop = compute_loss, evaluation_loop


def _loss_and_tokens(trainer: Any, model: Any, inputs: Inputs, loss: torch.Tensor, number: Any) -> torch.Tensor:
    """The sum over the predicted tokens of a batch, and their number: [2].

    loss: the trainer's, a sum over `number`, if that is given, times the ranks where the trainer averages over them.
    Accelerate fills the last batches of several ranks with examples that were there before.  They are left out.
    """
    args, state, labels = trainer.args, trainer.accelerator.gradient_state, inputs["labels"]
    rows = real = len(labels)
    if args.world_size > 1 and state.end_of_dataloader and 0 < state.remainder < rows * args.world_size:
        real = min(max(state.remainder - rows * args.process_index, 0), rows)
        some = {name: each[:real] if torch.is_tensor(each) else each for name, each in inputs.items()}
        with torch.no_grad(), trainer.compute_loss_context_manager():  # on all ranks, as their weights may be shared
            total = loss_sum(model, some if real else inputs)
    tokens = supervised(model, labels[:real])
    if real == rows and number is None:
        total = loss * tokens
    elif real == rows:
        total = loss * number / (args.world_size if args.average_tokens_across_devices else 1)
    return torch.stack([torch.where(tokens > 0, total, 0.0).float(), tokens.float()])


def _changed_updates(trainer: Any, planned: _Planned, lengths: Optional[np.ndarray]) -> str:
    """One line: what an update and an epoch are now, and were."""
    args = trainer.args
    of_update = args.gradient_accumulation_steps * args.world_size
    rows, most = trainer._train_batch_size * of_update, planned.longer.max_sequence_length
    text = f"{rows:,} rows of {most:,} slots"
    if lengths is None or isinstance(planned, PackedStream):
        text += f" (before: {rows:,} examples) until max_steps"
    else:
        # Updates of an epoch before packing; the loader has the batches of one rank.
        before = max(1, -(-len(trainer.get_train_dataloader()) // of_update))
        after = max(1, -(-len(planned) // args.gradient_accumulation_steps))
        examples, tokens = len(lengths), int(lengths.sum())
        text = (
            f"{'' if planned.way.name == KEEPS_EXAMPLES else f'{text}, about '}{examples / after:,.0f} examples and "
            f"{tokens / after:,.0f} tokens (before: {examples / before:,.0f} and {tokens / before:,.0f}); "
            f"{after:,} updates an epoch (before: {before:,})"
        )
    return f"an update has {text}; {choice_of(trainer.model)}"


def _check_trainer(trainer: Any, way: str) -> None:
    """Raise ValueError for a trainer whose batches cannot be replaced."""
    args = trainer.args
    dataset = trainer.train_dataset
    columns = getattr(dataset, "column_names", None) or ["input_ids"]
    model = base_of(trainer.model)
    reasons = {
        f"the examples have no input_ids, but {', '.join(map(str, columns[:4]))}: pairs of answers and rewards are not "
        "packed; use Trainer or SFTTrainer with examples of tokens": "input_ids" not in columns,
        f"{type(model).__name__} gives one answer a row, and a row here has several examples; use a model that gives "
        "each token its logits": "SequenceClassification" in type(model).__name__
        or "MultipleChoice" in type(model).__name__,
        "the trainer has no train_dataset; give it one before": dataset is None,
        "an IterableDataset of torch may itself share its examples out to workers; set dataloader_num_workers=0": (
            args.dataloader_num_workers > 0 and not _is_map_style(dataset) and not splits_over_workers(dataset)
        ),
        "packing=True packs already; set packing=False": getattr(args, "packing", False),
        f"one process drives {args.n_gpu} GPUs, which would cut the row; start it with torchrun or accelerate launch": (
            args.n_gpu > 1
        ),
        f"{way} pads its rows, cuts examples, or has epochs of unequal numbers of steps, whose last batches a trainer "
        f"would leave out; choose from {', '.join(WAYS_OF_EQUAL_EPOCHS)}": get_way(way).name
        not in WAYS_OF_EQUAL_EPOCHS,
        "pack_into was called for this trainer already": "get_train_dataloader" in vars(trainer),
        "label_smoothing_factor is a mean of each micro-batch in this Transformers; set it to 0 or use 5.15 or newer": (
            trainer.label_smoother is not None
            and "num_items_in_batch" not in inspect.signature(type(trainer.label_smoother).__call__).parameters
        ),
        "ranks that share one example (tensor, context or sequence parallelism) are not supported": _shares(trainer),
    }
    for reason, holds in reasons.items():
        if holds:
            raise ValueError(reason)


def _is_map_style(dataset: Any) -> bool:
    return hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")


def _shares(trainer: Any) -> bool:
    """Whether some ranks get the same examples."""
    layout = getattr(trainer.accelerator, "parallelism_config", None)
    sizes = [getattr(layout, name, 1) for name in ("tp_size", "cp_size", "sp_size")]
    return any((size or 1) > 1 for size in [*sizes, getattr(trainer.model, "_tp_size", 1)])


def _lengths_of(dataset: Any) -> np.ndarray:
    """Tokens of each example: int64 [examples].  From a table of `datasets` without reading the tokens."""
    if hasattr(dataset, "with_format") and (getattr(dataset, "format", None) or {}).get("type") != "custom":
        import pyarrow.compute

        tables = dataset.select_columns(["input_ids"]).with_format("arrow").iter(batch_size=10_000)
        counts = [np.asarray(pyarrow.compute.list_value_length(table["input_ids"])) for table in tables]
        return np.concatenate([np.zeros(0, np.int64), *counts]).astype(np.int64)
    return np.array([len(dataset[number]["input_ids"]) for number in range(len(dataset))], np.int64)


def _takes_use_cache(model: Any) -> bool:
    """Whether a batch can switch the key cache off, so that the configuration need not."""
    return "use_cache" in inspect.signature(base_of(model).forward).parameters


class _RowLoader(DataLoader):
    """As Accelerate's: a trainer hands it the number of the epoch."""

    def set_epoch(self, epoch: int) -> None:
        sampler: Any = self.batch_sampler
        sampler.set_epoch(epoch)


def _loader(theirs: Any, planned: _Planned, trainer: Any) -> DataLoader:
    """The loader that the trainer would have, with other batches.

    theirs: the trainer's own.  Its data set and its collator have lost the columns that the model does not take.
    """
    names = ("num_workers", "pin_memory", "persistent_workers", "prefetch_factor", "worker_init_fn")
    same = {name: getattr(theirs, name) for name in (*names, "multiprocessing_context")}
    size = trainer._train_batch_size
    collate = _JoiningCollator(theirs.collate_fn, trainer.model, size * planned.longer.max_sequence_length)
    if isinstance(planned, PackedStream):
        packs: Any = _EndlessPacks(planned, trainer.train_dataset)
        return DataLoader(packs, batch_size=size, collate_fn=collate.of_packs, **same)
    view: Any = planned.view(theirs.dataset)
    return _RowLoader(view, batch_sampler=planned, collate_fn=collate, **same)


class _EndlessPacks(IterableDataset):
    """The packs of one pass over a data set behind those of another, so that ranks need not end a pass together.

    A trainer stops at its max_steps.  A resumed one skips the batches that it has seen, in whichever pass they were.
    """

    def __init__(self, packs: PackedStream, source: Any) -> None:
        super().__init__()
        self._packs, self._source = packs, source

    def __iter__(self) -> Iterator[Any]:
        for epoch in itertools.count():
            if hasattr(self._source, "set_epoch"):
                self._source.set_epoch(epoch)
            empty = True
            for pack in self._packs:
                empty = False
                yield pack
            worker = get_worker_info()
            if empty and worker is not None and worker.id:
                return  # more workers than shards
            if empty:
                raise ValueError("the train_dataset has no example for this rank; give it as many as there are ranks")


class _JoiningCollator:
    """Examples -> one padding-free row of the model's inputs, with the labels that another collator gives each example.

    The other collator gets one example at a time, so whatever it does to the labels is done here too.
    """

    def __init__(self, collator: Callable[[List[Any]], Mapping[str, Any]], model: Any, most_tokens: int) -> None:
        self._collator, self._model, self._most_tokens = collator, model, most_tokens

    def __call__(self, examples: Sequence[Any]) -> Inputs:
        made = [self._one(example) for example in examples]
        inputs = inputs_for(self._model, padding_free_batch(made, causal=not attends_both_ways(self._model)))
        if inputs["input_ids"].numel() > max(self._most_tokens, 1):
            raise ValueError(
                f"the examples of a batch have {inputs['input_ids'].numel()} tokens behind the data collator, and "
                f"{self._most_tokens} are planned; let the collator add no tokens"
            )
        return {**inputs, "use_cache": False} if _takes_use_cache(self._model) else inputs

    def of_packs(self, packs: Sequence[Sequence[Any]]) -> Inputs:
        return self([example for pack in packs for example in pack])

    def _one(self, example: Any) -> Dict[str, np.ndarray]:
        """input_ids and labels of one example, without padding."""
        batch = self._collator([example])
        if batch.get("labels") is None:
            raise ValueError(
                "the trainer's data collator gives no labels; use "
                "DataCollatorForLanguageModeling(tokenizer, mlm=False), or give the examples labels"
            )
        others = sorted(set(batch) - _OF_A_ROW - {"input_ids", "labels"})
        if others:
            raise ValueError(
                f"the trainer's data collator gives {', '.join(others)}, which a row of several examples cannot have; "
                "remove them from the data set"
            )
        ids, labels = (torch.as_tensor(batch[name])[0] for name in ("input_ids", "labels"))
        real = torch.as_tensor(batch.get("attention_mask", torch.ones(1, len(ids))))[0].bool()
        return {"input_ids": ids[real].numpy(), "labels": labels[real].numpy()}


def _token_loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None, *, causal: bool) -> torch.Tensor:
    """The sum of the cross-entropies over the predicted tokens of the whole update, for models that cannot count."""
    total = cross_entropy_sum(outputs["logits"], labels, causal=causal)
    own = (labels[:, 1 if causal else 0 :] != IGNORED).sum()
    return total / (own if num_items_in_batch is None else num_items_in_batch)
