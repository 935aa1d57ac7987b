"""Prepare the model and the examples of the pages on causal models: `exec(open("docs/prepare.py").read())`."""

import sys

import datasets
import torch
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
