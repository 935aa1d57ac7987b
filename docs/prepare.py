"""Prepare the model and the examples of the pages on causal models: `exec(open("docs/prepare.py").read())`."""

import json
import sys
from functools import partial
from pathlib import Path

import datasets
import torch
import trl
from trl import SFTConfig

from padding_free import PaddingFreeCollator, use_padding_free

sys.path.append("examples")
import tiny  # noqa: E402

# A small Llama in a directory and, checked, in memory; examples of at most 256 tokens.
name = "model"
model = tiny.load("")
model.save_pretrained(name)
tiny.tokenizer().save_pretrained(name)
use_padding_free(model, longest=1024)
examples = tiny.examples(60)
dataset = datasets.Dataset.from_list(examples)
collator = PaddingFreeCollator(model)
optimizer = torch.optim.AdamW(model.parameters())
args = SFTConfig(max_length=4096, num_train_epochs=1, use_cpu=True)


def stand_in(model_name: str, data_name: str) -> None:
    """Put the small Llama and its examples where libraries look first for the hub's model and data set of these names.

    TRL's configuration then trains on the CPU, for one epoch.
    """
    model.save_pretrained(model_name)
    tiny.tokenizer().save_pretrained(model_name)
    texts = [" ".join(f"w{token}" for token in example["input_ids"]) for example in examples]
    Path(data_name).mkdir(parents=True)
    lines = [json.dumps({"text": text}) for text in texts]
    Path(data_name, "train.jsonl").write_text("\n".join(lines) + "\n")
    trl.SFTConfig = partial(SFTConfig, use_cpu=True, num_train_epochs=1)
