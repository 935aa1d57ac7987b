"""Optimal packs in the trainers of Hugging Face: Trainer, and SFTTrainer of TRL.

    trainer = SFTTrainer(model, args=SFTConfig(max_length=4096, ...), train_dataset=dataset)
    pack_into(trainer)
    trainer.train()

The trainer keeps its data set, its data collator, its loss and its accumulation.  Other examples share a batch, and a
batch is one row without padding.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import logging
from functools import partial
from typing import (
    Any,
    Callable,
    Dict,
    Iterator,
    List,
    Mapping,
    Optional,
    Sequence,
    Tuple,
    Union,
)

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from pack_data.batching.collators import padding_free_batch
from pack_data.batching.plans import BatchOptions, get_way
from pack_data.batching.sampler import IndexBatchSampler
from pack_data.batching.share import splits_over_workers
from pack_data.store.boundaries import sequences_in
from pack_data.store.meanings import OF_SEQUENCES
from pack_data.store.trained_labels import IGNORED, LABELS, MASKS, labels_of
from padding_free.choice import find_choice
from padding_free.collators import Inputs, attends_both_ways, inputs_for
from padding_free.leaks.probe import audit_batch
from padding_free.leaks.step import check_step
from padding_free.leaks.subject import kept_outputs
from padding_free.losses import (
    cross_entropy_sum,
    output_layer,
    supervised,
)
from padding_free.models import base_of, choice_of
from padding_free.streams import PackedStream

_logger = logging.getLogger(__name__)

# Ways with the same number of steps in every epoch.  A trainer counts the steps of the first epoch and ends all other
# epochs after this number.
WAYS_OF_EQUAL_EPOCHS = ("OptimalPacking+PosID", "SortedPacking+PosID", "MiniBatchPacking+PosID")
KEEPS_EXAMPLES = "MiniBatchPacking+PosID"  # a batch has the same number of examples as a padded one
# Fields of a collated batch that a row has too, with a value for each token, and those that follow from the others.
_TOKEN_FIELDS = ("input_ids", "labels", "attention_mask", "position_ids")
_DERIVED_FIELDS = ("max_length_q", "max_length_k", "seq_idx")
_UPDATES_BETWEEN_CHECKS = 2  # of the training step

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
    """Let a Hugging Face Trainer or TRL's SFTTrainer train on packs; call it before `trainer.train()`.

    A batch has per_device_train_batch_size examples, joined to one row, so the number of examples of an update does not
    change.  With another way, or with an iterable data set, it has per_device_train_batch_size rows of
    max_sequence_length tokens, and more examples.  All ranks have the same number of batches, each example is used once
    an epoch, and a run that is resumed inside an epoch continues with the next batch.

    Labels come from the trainer's data collator, so the masks of prompts and of other turns do not change.  The loss is
    the mean over the predicted tokens of a whole update, over accumulation and ranks.  Evaluation does not change.
    The results of the check and the audit, and their cost, are printed.

    Args:
        trainer: A Trainer or SFTTrainer with a train_dataset of examples with input_ids.
        max_sequence_length: Tokens of a row.  Default: the trainer's `max_length`, or those of the longest example.
        way: MiniBatchPacking+PosID, OptimalPacking+PosID or SortedPacking+PosID.
        longer: A rule of `pack_data.lengths.overlong` for examples of more than max_sequence_length tokens.
        check: Probe the model and switch it to an attention that keeps examples apart (`use_padding_free`); without
            the check, the model must already be switched.
        audit: Compare the first batch of the training with each of its examples alone, and the trainer's step on it
            with that on a padded batch; the step again after 2 updates.

    Returns:
        The sampler of this rank, or the stream of an iterable data set; the attribute `longer` of either counts the
        examples that were cut or dropped.  The stream restarts at its end, so max_steps ends the training.

    Raises:
        ValueError: The trainer, its data set or its model cannot be packed.
    """
    _check_trainer(trainer, way)
    original_loader = trainer.get_train_dataloader
    lengths = None
    if _is_map_style(trainer.train_dataset):
        lengths = _lengths_of(original_loader().dataset)
    row_tokens = _row_tokens(trainer, max_sequence_length, way, lengths)

    if check:
        tokens = trainer._train_batch_size * row_tokens
        _, probed = find_choice(trainer.model, longest=row_tokens, row=tokens)
        _print_once(trainer, str(probed))
    choice_of(trainer.model, tried=True)
    _average_over_update(trainer)

    new_plan = partial(_plan, trainer, way, lengths, row_tokens, longer)
    planned = new_plan()
    if lengths is not None:
        _compare_extremes(_loader(original_loader(), planned, trainer), lengths, row_tokens)
    if planned.longer.longer and trainer.accelerator.is_main_process:
        _logger.warning("%s", planned.longer)
    changed_updates = _changed_updates(trainer, planned, lengths)

    def get_train_dataloader() -> DataLoader:
        _let_ranks_train_together(trainer)
        return _loader(original_loader(), planned if lengths is None else new_plan(), trainer)

    trainer.get_train_dataloader = get_train_dataloader
    _wrap_loss(trainer, audit)
    _print_once(trainer, changed_updates)
    return planned


def _print_once(trainer: Any, text: str) -> None:
    """Print a line on the main process only."""
    if trainer.accelerator.is_main_process:
        print(f"pack_into: {text}", flush=True)


# ---- the checks and the parts of `pack_into`


def _check_trainer(trainer: Any, way: str) -> None:
    """Raise ValueError for a trainer if its batches cannot be replaced."""
    if not hasattr(trainer, "get_train_dataloader"):
        raise ValueError(f"the trainer is a {type(trainer).__name__}; pass a Trainer or SFTTrainer")
    args = trainer.args
    dataset = trainer.train_dataset
    columns = getattr(dataset, "column_names", None) or ["input_ids"]
    model_name = type(base_of(trainer.model)).__name__
    has_workers = args.dataloader_num_workers > 0
    sampling = getattr(args, "train_sampling_strategy", "random")
    smoothing = trainer.label_smoother
    problems = (
        (
            "input_ids" not in columns,
            f"the examples have no input_ids, but {', '.join(map(str, columns[:4]))}; use Trainer or SFTTrainer with "
            "tokenized examples (pairs of answers and rewards are not packed)",
        ),
        (
            "SequenceClassification" in model_name or "MultipleChoice" in model_name,
            f"{model_name} returns one answer per row, but a row has several examples; use a model with logits for "
            "each token",
        ),
        (dataset is None, "the trainer has no train_dataset; pass one to the trainer"),
        (
            has_workers and not _is_map_style(dataset) and not splits_over_workers(dataset),
            "an IterableDataset of torch may split its examples over workers itself; set dataloader_num_workers=0",
        ),
        (
            getattr(args, "packing", False),
            "packing=True already packs the examples; set packing=False",
        ),
        (
            _is_map_style(dataset) and _has_own_sampler(trainer),
            "_get_train_sampler is overridden, but pack_into orders the examples; select them in train_dataset, and "
            "leave _get_train_sampler alone",
        ),
        (
            _is_map_style(dataset) and sampling != "random",
            f'train_sampling_strategy="{sampling}" has no effect on packs; set it to "random"',
        ),
        (
            args.n_gpu > 1,
            f"one process drives {args.n_gpu} GPUs and would split the row; use torchrun or accelerate launch",
        ),
        (
            get_way(way).name not in WAYS_OF_EQUAL_EPOCHS,
            f"{way} pads its rows, cuts examples, or has different numbers of steps per epoch, and a trainer would "
            f"skip the last batches; choose from {', '.join(WAYS_OF_EQUAL_EPOCHS)}",
        ),
        (
            "get_train_dataloader" in vars(trainer),
            "pack_into was already called for this trainer; call it once",
        ),
        (
            smoothing is not None
            and "num_items_in_batch" not in inspect.signature(type(smoothing).__call__).parameters,
            "label_smoothing_factor averages over each micro-batch in this version of Transformers; set it to 0 or use "
            "Transformers 5.15 or newer",
        ),
        (
            _ranks_share_examples(trainer),
            "ranks that share one example (tensor, context or sequence parallelism) are not supported; use data "
            "parallelism",
        ),
    )
    for is_wrong, problem in problems:
        if is_wrong:
            raise ValueError(problem)


def _is_map_style(dataset: Any) -> bool:
    return hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")


def _has_own_sampler(trainer: Any) -> bool:
    """Return True if neither Transformers nor TRL chooses the examples of a batch."""
    module = getattr(getattr(trainer, "_get_train_sampler", None), "__module__", "transformers.")
    return not module.startswith(("transformers.", "trl."))


def _ranks_share_examples(trainer: Any) -> bool:
    layout = getattr(trainer.accelerator, "parallelism_config", None)
    sizes = [getattr(layout, name, 1) for name in ("tp_size", "cp_size", "sp_size")]
    sizes.append(getattr(trainer.model, "_tp_size", 1))
    return any((size or 1) > 1 for size in sizes)


def _lengths_of(dataset: Any) -> np.ndarray:
    """Return the tokens of each example, int64 [examples], without decoding a table of `datasets`."""
    dataset_format = getattr(dataset, "format", None) or {}
    if hasattr(dataset, "with_format") and dataset_format.get("type") != "custom":
        import pyarrow.compute

        tables = dataset.select_columns(["input_ids"]).with_format("arrow").iter(batch_size=10_000)
        counts = [np.zeros(0, np.int64)]
        for table in tables:
            counts.append(np.asarray(pyarrow.compute.list_value_length(table["input_ids"])))
        return np.concatenate(counts).astype(np.int64)
    try:
        lengths = [len(dataset[number]["input_ids"]) for number in range(len(dataset))]
    except (KeyError, TypeError):
        raise ValueError(
            "the examples of train_dataset are no mappings with input_ids; tokenize them in the data set, not in the "
            "data collator"
        ) from None
    return np.array(lengths, np.int64)


def _row_tokens(
    trainer: Any, max_sequence_length: Optional[int], way: str, lengths: Optional[np.ndarray]
) -> int:
    """Return the tokens of a row: of the argument, of the trainer's `max_length`, or of the longest example."""
    if max_sequence_length is not None:
        return max_sequence_length
    max_length: Optional[int] = getattr(trainer.args, "max_length", None)
    if max_length is not None:
        return max_length
    if way == KEEPS_EXAMPLES and lengths is not None:
        return int(lengths.max(initial=1))
    raise ValueError(
        "max_sequence_length is None and the trainer has no max_length; pass max_sequence_length=N"
    )


def _average_over_update(trainer: Any) -> None:
    """Let the loss be the mean over the tokens of an update; by default it may be a mean of micro-batch means."""
    if trainer.args.world_size > 1:
        trainer.args.average_tokens_across_devices = True
    # Masked models of Transformers accept the number of tokens but ignore it.
    counts_tokens = trainer.model_accepts_loss_kwargs and not attends_both_ways(trainer.model)
    if trainer.compute_loss_func is None and not counts_tokens:
        trainer.compute_loss_func = partial(_token_loss, trainer.model)


def _token_loss(
    model: Any, outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None
) -> torch.Tensor:
    """Return the summed cross-entropy of the predicted tokens over their number in the whole update."""
    total = cross_entropy_sum(outputs["logits"], labels, causal=not attends_both_ways(model))
    if num_items_in_batch is None:
        num_items_in_batch = supervised(model, labels)
    return total / num_items_in_batch


def _plan(
    trainer: Any, way: str, lengths: Optional[np.ndarray], row_tokens: int, longer: str
) -> _Planned:
    """Plan the batches of this rank; `lengths` is None for an iterable data set."""
    args = trainer.args
    if lengths is None:
        return PackedStream(
            trainer.train_dataset,
            row_tokens,
            longer=longer,
            rank=args.process_index,
            ranks=args.world_size,
        )
    seed = args.seed if args.data_seed is None else args.data_seed
    options = BatchOptions(trainer._train_batch_size, row_tokens, args.world_size, seed)
    return IndexBatchSampler(way, lengths, options, args.process_index, longer=longer)


def _changed_updates(trainer: Any, planned: _Planned, lengths: Optional[np.ndarray]) -> str:
    """Describe an update and an epoch, with packs and without."""
    args = trainer.args
    batches_per_update = args.gradient_accumulation_steps * args.world_size
    choice = choice_of(trainer.model)
    if lengths is None or isinstance(planned, PackedStream):
        rows = trainer._train_batch_size * batches_per_update
        slots = planned.longer.max_sequence_length
        text = f"{rows:,} rows of {slots:,} slots (before: {rows:,} examples)"
        return f"an update has {text} until max_steps; {choice}"

    # The loader has the batches of all ranks, because Accelerate divides them later.
    batches_before = len(trainer.get_train_dataloader())
    before = max(1, -(-batches_before // batches_per_update))
    after = max(1, -(-len(planned) // args.gradient_accumulation_steps))
    sizes = []
    for updates in (after, before):
        examples = len(lengths) / updates
        tokens = lengths.sum() / updates
        sizes.append(f"{examples:,.0f} examples and {tokens:,.0f} tokens")
    epoch = f"{after:,} updates an epoch (before: {before:,})"
    padding = _padding_share(lengths, trainer._train_batch_size)
    gain = f"padding 0 % of the slots (before: {padding:.0%})"
    if not padding:
        gain = (
            'nothing to gain, since batches have no padding; way="OptimalPacking+PosID" fills rows'
        )
    return f"an update has {sizes[0]} (before: {sizes[1]}); {epoch}; {gain}; {choice}"


def _padding_share(lengths: np.ndarray, examples: int) -> float:
    """Return the share of padding in the slots of random batches of this number of examples."""
    order = np.random.default_rng(0).permutation(len(lengths))
    slots = 0
    for begin in range(0, len(order), examples):
        of_batch = lengths[order[begin : begin + examples]]
        slots += int(of_batch.max()) * len(of_batch)
    return (slots - int(lengths.sum())) / max(slots, 1)


def _let_ranks_train_together(trainer: Any) -> None:
    """Let Accelerate wrap a model that was evaluated first; version 1.15 considers it wrapped already."""
    model = trainer.model
    is_multi_process = trainer.accelerator.distributed_type.value.startswith("MULTI_")
    if trainer.model_wrapped is not model or not is_multi_process:
        return
    if vars(model).pop("_is_accelerate_prepared", False) and "_original_forward" in vars(model):
        # Without it, autocast would apply twice.
        model.forward = vars(model).pop("_original_forward")


# ---- the loss


def _wrap_loss(trainer: Any, audit: bool) -> None:
    """Wrap the trainer's loss, and print its method."""
    loss_class = next(kind for kind in type(trainer).__mro__ if "compute_loss" in vars(kind))
    is_replaced = "compute_loss" in vars(trainer)
    in_blocks = False
    if loss_class.__module__ != "transformers.trainer":
        source = f"that of {loss_class.__name__}"
    elif is_replaced or trainer.label_smoother is not None or trainer.compute_loss_func is not None:
        source = "that of the trainer, from the logits of all tokens"
    else:
        layer = output_layer(trainer.model)
        in_blocks = layer is not None and layer.asked
        source = f"that of {type(base_of(trainer.model)).__name__}, from the logits of all tokens"
    if in_blocks:
        source = "computed in blocks of tokens"
    _print_once(trainer, f"the loss is {source}")

    wrapper = _LossWrapper(trainer, in_blocks, audit)
    trainer.compute_loss = wrapper.compute_loss


class _LossWrapper:
    """The loss of a trainer, with checks of the training step."""

    def __init__(self, trainer: Any, in_blocks: bool, audit: bool) -> None:
        self._trainer = trainer
        self._compute_loss = trainer.compute_loss
        self._in_blocks = in_blocks
        self._checks_left = 2 if audit else 0
        self._next_check = 0  # at this number of updates
        # The trainer's own noise is scaled by the tokens of a row, not of an example.
        self._noise_alpha: Optional[float] = getattr(trainer, "neftune_noise_alpha", None)
        trainer.neftune_noise_alpha = None

    def compute_loss(self, model: Any, inputs: Inputs, *args: Any, **kwargs: Any) -> Any:
        """Compute the loss of a batch, of training or of evaluation."""
        if not model.training:
            return self._compute_loss(model, inputs, *args, **kwargs)
        update = self._trainer.state.global_step
        if self._checks_left and update >= self._next_check:
            self._checks_left -= 1
            self._next_check = update + _UPDATES_BETWEEN_CHECKS
            if self._checks_left:
                _print_once(self._trainer, f"the first batch: {audit_batch(model, inputs)}")

            def loss_of(model: Any, inputs: Inputs, number: Any) -> Any:
                numbered = kwargs
                if kwargs.get("num_items_in_batch") is not None:
                    numbered = {**kwargs, "num_items_in_batch": number}
                return self._training_loss(model, inputs, args, numbered)

            text = check_step(self._trainer, model, inputs, loss_of)
            _print_once(self._trainer, f"the training step after {update:,} updates: {text}")
        return self._training_loss(model, inputs, args, kwargs)

    def _training_loss(self, model: Any, inputs: Inputs, args: Any, kwargs: Any) -> Any:
        with contextlib.ExitStack() as stack:
            if self._noise_alpha is not None:
                stack.enter_context(_noisy_embeddings(model, inputs, self._noise_alpha))
            # Each call looks the layer up, because DistributedDataParallel and others wrap the model after `pack_into`.
            layer = output_layer(model, inside=True) if self._in_blocks else None
            if layer is not None:
                stack.enter_context(layer.for_loss(model))
            return self._compute_loss(model, inputs, *args, **kwargs)


def _noisy_embeddings(model: Any, inputs: Inputs, alpha: float) -> Any:
    """Add the noise of NEFTune (arXiv 2310.05914) in the block: up to alpha / sqrt(tokens of the example x width)."""
    positions = inputs.get("position_ids")
    if positions is None:
        tokens = inputs["attention_mask"].sum(1, keepdim=True)
    else:
        numbers = (positions[0] == positions[0, 0]).cumsum(0)
        tokens = numbers.bincount()[numbers][None]

    def add(embedded: torch.Tensor) -> torch.Tensor:
        most = alpha / (tokens * embedded.shape[-1]).sqrt()
        noise = torch.zeros_like(embedded).uniform_(-1, 1)
        return embedded + noise * most[..., None].to(embedded.dtype)

    return kept_outputs(base_of(model).get_input_embeddings(), add)


# ---- the batches


class _RowLoader(DataLoader):
    """A loader like Accelerate's, to which a trainer passes the number of the epoch."""

    def set_epoch(self, epoch: int) -> None:
        sampler: Any = self.batch_sampler
        sampler.set_epoch(epoch)


def _loader(original: Any, planned: _Planned, trainer: Any) -> DataLoader:
    """Return the trainer's loader with other batches.

    original: the trainer's loader, without the columns that the model does not support.
    """
    names = ("num_workers", "pin_memory", "persistent_workers", "prefetch_factor", "worker_init_fn")
    settings = {name: getattr(original, name) for name in (*names, "multiprocessing_context")}
    size = trainer._train_batch_size
    tokens = size * planned.longer.max_sequence_length
    masks = _masks_of(trainer)
    dataset, hidden = _with_hidden(original.dataset, trainer.train_dataset, (*OF_SEQUENCES, *masks))
    collate = _JoiningCollator(original.collate_fn, trainer.model, tokens, hidden, masks)
    if isinstance(planned, PackedStream):
        packs = _EndlessPacks(planned, trainer.train_dataset)
        return DataLoader(packs, batch_size=size, collate_fn=collate.of_packs, **settings)
    view: Any = planned.view(dataset)
    return _RowLoader(view, batch_sampler=planned, collate_fn=collate, **settings)


def _masks_of(trainer: Any) -> List[str]:
    """List the masks of the loss that apply; TRL has an option to train on prompts as well."""
    parts = (trainer, trainer.args, trainer.data_collator)
    if any(getattr(part, "completion_only_loss", None) is False for part in parts):
        return [name for name in MASKS if name != "completion_mask"]
    return list(MASKS)


def _with_hidden(dataset: Any, source: Any, names: Sequence[str]) -> Tuple[Any, List[str]]:
    """Return the data set with those of the columns `names` that the trainer has removed, and list them."""
    kept = getattr(dataset, "column_names", None)
    if kept is None or not _is_map_style(source):
        return dataset, []
    removed = [name for name in names if name in source.column_names and name not in kept]
    return (source.select_columns([*kept, *removed]) if removed else dataset), removed


def _compare_extremes(loader: Any, lengths: np.ndarray, row_tokens: int) -> None:
    """Compare the trainer's collator with itself on the longest, the shortest and a middle example."""
    order = np.argsort(lengths, kind="stable")
    order = order[lengths[order] <= row_tokens].tolist()
    numbers = dict.fromkeys([*order[-1:], *order[:1], *order[len(order) // 2 :][:1]])
    loader.collate_fn.compare([loader.dataset[number] for number in numbers])


def _by_example(batch: Mapping[str, Any], name: str) -> List[Any]:
    """Return a field of each example of a row, or the number of its tokens, in a sorted list."""
    lengths = np.diff(batch["cumulative_lengths"])
    if name == "tokens":
        return sorted(lengths.tolist())
    parts = np.split(np.asarray(batch[name]).ravel(), np.cumsum(lengths)[:-1])
    return sorted(part.tolist() for part in parts)


class _EndlessPacks(IterableDataset):
    """The packs of repeated passes over a data set, so that ranks need not end a pass together.

    A trainer stops at its max_steps.  A resumed trainer skips the batches of its earlier steps, in all their passes.
    """

    def __init__(self, packs: PackedStream, source: Any) -> None:
        super().__init__()
        self._packs = packs
        self._source = source

    def __iter__(self) -> Iterator[Any]:
        for epoch in itertools.count():
            if hasattr(self._source, "set_epoch"):
                self._source.set_epoch(epoch)
            is_empty = True
            for pack in self._packs:
                is_empty = False
                yield pack
            worker = get_worker_info()
            if is_empty and worker is not None and worker.id:
                return  # more workers than shards
            if is_empty:
                raise ValueError(
                    "train_dataset has no example for this rank; pass at least one example per rank"
                )


class _JoiningCollator:
    """Examples -> the model's inputs of one padding-free row, with the labels of another collator.

    The other collator gets one example at a time, so that its changes to the labels are kept.  Examples that are rows
    of several sequences keep their boundaries, and the masks of the loss apply even if the other collator ignores them.
    """

    def __init__(
        self,
        collator: Callable[[List[Any]], Mapping[str, Any]],
        model: Any,
        most_tokens: int,
        hidden: Sequence[str] = (),
        masks: Sequence[str] = (),
    ) -> None:
        self._collator = collator
        self._model = model
        self._most_tokens = most_tokens
        self._hidden = hidden  # columns that the other collator does not get
        self._masks = masks  # columns that leave tokens out of the loss
        self._longest = 0  # tokens of an example in a compared batch

    def __call__(self, examples: Sequence[Any]) -> Inputs:
        batch = self._joined(*([example] for example in examples))
        if batch["max_length"] > self._longest:
            self._longest = batch["max_length"]
            self.compare(examples)
        inputs = inputs_for(self._model, batch)
        tokens = inputs["input_ids"].numel()
        if tokens > max(self._most_tokens, 1):
            raise ValueError(
                f"the examples of a batch have {tokens} tokens after the data collator, but {self._most_tokens} are "
                "planned; use a collator that adds no tokens"
            )
        if "use_cache" in inspect.signature(base_of(self._model).forward).parameters:
            inputs["use_cache"] = False
        return inputs

    def of_packs(self, packs: Sequence[Sequence[Any]]) -> Inputs:
        """Collate the examples of several packs as one row."""
        return self(list(itertools.chain.from_iterable(packs)))

    def compare(self, examples: Sequence[Any]) -> None:
        """Raise ValueError if the other collator returns other examples for a batch than one by one."""
        if len(examples) < 2:
            return
        with torch.random.fork_rng(devices=[]):
            single = self._joined(*([example] for example in examples))
            whole = self._joined(examples)
            is_random = not np.array_equal(whole["labels"], self._joined(examples)["labels"])
        # Masks that are drawn at random differ.  The collator may sort the examples.
        names = ["tokens"] if is_random else ["tokens", "labels", "input_ids"]
        differing = [
            name for name in names if _by_example(single, name) != _by_example(whole, name)
        ]
        if differing:
            raise ValueError(
                f"the trainer's data collator returns other {differing[0]} for {len(examples)} examples together than "
                "for each of them alone; use one whose result for an example does not depend on the others"
            )

    def _joined(self, *batches: Sequence[Any]) -> Dict[str, Any]:
        """Join the examples of batches that are collated one by one."""
        rows = []
        for batch in batches:
            rows += self._rows(batch)
        return padding_free_batch(rows, causal=not attends_both_ways(self._model))

    def _rows(self, examples: Sequence[Any]) -> List[Dict[str, Any]]:
        """Collate examples with the other collator; return the columns of each row that have values for its tokens."""
        shown = []
        for example in examples:
            shown.append({name: example[name] for name in example if name not in self._hidden})
        batch = self._collator(shown)
        if batch.get("labels") is None:
            raise ValueError(
                "the trainer's data collator returns no labels; use DataCollatorForLanguageModeling(tokenizer, "
                "mlm=False), or add labels to the examples"
            )
        others = sorted(set(batch) - {*_TOKEN_FIELDS, *_DERIVED_FIELDS, *OF_SEQUENCES})
        if others:
            raise ValueError(
                f"the trainer's data collator returns {', '.join(others)}, which a row of several examples cannot "
                "have; remove them from the data set"
            )

        stated = {name: batch[name] for name in OF_SEQUENCES if name in batch}
        rows = []
        for number in range(len(batch["input_ids"])):
            of_tokens = {name: batch[name][number] for name in _TOKEN_FIELDS if name in batch}
            rows.append({**of_tokens, **stated})
        if len(rows) == len(examples):
            for row, example in zip(rows, examples):
                _, lengths = sequences_in({"input_ids": row["input_ids"], **example}, "an example")
                if len(lengths) > 1:
                    row["seq_lengths"] = lengths
                if any(example.get(name) is not None for name in self._masks):
                    row[LABELS] = self._masked(row, example)
        return rows

    def _masked(self, row: Mapping[str, Any], example: Mapping[str, Any]) -> np.ndarray:
        """Return the labels of a collated row, -100 where the masks of its example are 0."""
        stated = {"input_ids", LABELS, *self._masks}.intersection(example)
        wanted = labels_of({name: example[name] for name in stated}, "an example")
        labels = np.asarray(row[LABELS]).copy()
        real, _ = sequences_in(row, "a collated example")
        if len(labels[real]) != len(wanted):
            raise ValueError(
                f"the trainer's data collator makes {len(labels[real])} tokens of an example of {len(wanted)} tokens "
                "with a mask of the loss; use a collator that keeps the tokens"
            )
        labels[real][wanted == IGNORED] = IGNORED
        return labels
