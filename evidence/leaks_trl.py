"""Calls of TRL in the table of leaks: its collator in a plain loop, and a step of its SFTTrainer."""

from __future__ import annotations

import importlib
import tempfile
from typing import Any, Dict, List, Sequence

import numpy as np

COLLATOR = "DataCollatorForLanguageModeling(padding_free=True)"
NO_CACHE = "the same, use_cache=False"
PACKED = "SFTTrainer, packing=True"
WRAPPED = 'SFTTrainer, packing=True, packing_strategy="wrapped"'
FREE = "SFTTrainer, padding_free=True"
PADDED = "SFTTrainer, padded"
CALLS = (COLLATOR, NO_CACHE, PACKED, WRAPPED, FREE, PADDED)
# What does not leak, in place of a call that may.
INSTEAD = {COLLATOR: (NO_CACHE,), WRAPPED: (PACKED, FREE, PADDED)}
IN_WORDS = f"""
Calls of TRL are made with Llama. **{COLLATOR}** is `model(**inputs)` in train() with all that the collator returns.
The rows of **SFTTrainer** are its `compute_loss` of a batch of its own loader, with the defaults of SFTConfig except
for the arguments in the row; A comes first, and the outputs are the last hidden states."""


def outputs(call: str, model: Any, first: Sequence[int], second: Sequence[int]) -> np.ndarray:
    """Return the outputs of the second example."""
    examples = [{"input_ids": list(first)}, {"input_ids": list(second)}]
    if call in (COLLATOR, NO_CACHE):
        return _by_collator(call, model, examples)
    return _by_trainer(call, model, examples)


def _by_collator(call: str, model: Any, examples: List[Dict[str, Any]]) -> np.ndarray:
    import torch

    collators: Any = importlib.import_module("trl.trainer.sft_trainer")
    collator = collators.DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)
    inputs = collator(examples)
    del inputs["labels"]
    if call == NO_CACHE:
        inputs["use_cache"] = False
    with torch.no_grad():
        logits = model.train()(**inputs)[0]
    return logits[0, len(examples[0]["input_ids"]) :].numpy()


def _by_trainer(call: str, model: Any, examples: List[Dict[str, Any]]) -> np.ndarray:
    datasets: Any = importlib.import_module("datasets")
    trl: Any = importlib.import_module("trl")
    datasets.disable_progress_bars()
    first, second = (example["input_ids"] for example in examples)
    settings: Dict[str, Any] = {"max_length": len(first) + len(second)}
    if call in (PACKED, WRAPPED):
        settings["packing"] = True
    if call == WRAPPED:
        settings["packing_strategy"] = "wrapped"
    if call == FREE:
        settings = {"max_length": None, "padding_free": True}

    seen = []

    def keep(_model: Any, _args: Any, named: Dict[str, Any], output: Any) -> None:
        seen.append((named["input_ids"].flatten(), output[0].detach().flatten(0, 1)))

    with tempfile.TemporaryDirectory() as folder:
        trainer = trl.SFTTrainer(
            model,
            args=trl.SFTConfig(
                folder,
                use_cpu=True,
                bf16=False,
                report_to=[],
                train_sampling_strategy="sequential",
                **settings,
            ),
            train_dataset=datasets.Dataset.from_list(examples),
            processing_class=_tokenizer(model.config.vocab_size),
        )
        (batch,) = trainer.get_train_dataloader()
        model.train().model.register_forward_hook(keep, with_kwargs=True)
        trainer.compute_loss(model, batch)
    tokens, hidden = seen[-1]
    windows = tokens.unfold(0, len(second), 1).tolist()
    begin = windows.index(second)
    assert begin, f"{call}: the second example comes first, so that it can see no other"
    return hidden[begin : begin + len(second)].numpy()


def _tokenizer(words: int) -> Any:
    """Return a tokenizer, which SFTTrainer requires; the examples are tokens already."""
    import transformers
    from tokenizers import Tokenizer, models

    vocabulary = {f"w{number}": number for number in range(words)}
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="w2")),
        pad_token="w0",
        eos_token="w1",
    )
