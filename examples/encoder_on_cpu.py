"""Train an encoder, or a classifier of texts, on a CPU without padding, beside the same loop on padded batches.

    python examples/encoder_on_cpu.py [--task masked|classes] [--updates N]

The texts are the English documentation that comes with Python; the classes are the packages that they describe. The
encoder is a small ModernBERT. Before training, both loops make one update of the same weights, which must be equal.
"""

from __future__ import annotations

import time
from typing import Any, Dict, List, Optional, Sequence

import tiny
from pack_data.cli.command import ArgumentParser, positive_int, run_main

CLASSES = ("encodings", "lib2to3", "idlelib", "distutils", "asyncio", "email")
WORDS, LONGEST, BATCH, MASKED_SHARE = 2048, 256, 16, 0.15


def main(argv: Optional[Sequence[str]] = None) -> None:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--task", choices=("masked", "classes"), default="masked")
    parser.add_argument("--updates", type=positive_int, default=60)
    options = parser.parse_args(argv)
    tiny.require(parser, "torch", "transformers")
    import numpy as np
    import torch

    from padding_free import PaddingCollator, PaddingFreeCollator
    from padding_free.attention import NAME

    torch.manual_seed(0)
    examples = texts(options.task)
    outputs = WORDS if options.task == "masked" else len(CLASSES)
    model = encoder(outputs)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    random = np.random.default_rng(0)
    updates = [random.choice(len(examples), BATCH, replace=False) for _ in range(options.updates)]
    gradients = []
    seconds = {}
    for name, collator in (("unpacked", PaddingCollator()), ("packed", None)):
        model.load_state_dict(weights)
        if collator is None:
            model.encoder.set_attn_implementation(NAME)
            collator = PaddingFreeCollator(model.encoder)
        model.loss(collator([examples[number] for number in updates[0]])).backward()
        gradients.append(torch.cat([value.grad.flatten() for value in model.parameters()]))
        model.zero_grad()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        started = time.perf_counter()
        losses = []
        for numbers in updates:
            loss = model.loss(collator([examples[number] for number in numbers]))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        seconds[name] = time.perf_counter() - started
        print(f"{name:9} loss {losses[0]:.4f} -> {np.mean(losses[-10:]):.4f}")
    difference = float((gradients[0] - gradients[1]).norm() / gradients[0].norm())
    print(f"gradients of the first update differ by {difference:.1e} of their norm")
    tokens = sum(len(examples[number]["input_ids"]) for numbers in updates for number in numbers)
    tiny.report(tokens, seconds)


def texts(task: str) -> List[Dict[str, List[int]]]:
    """Return texts as tokens, with labels at masked tokens, or with the class at the first token."""
    import numpy as np

    from pack_data.text.corpus import documents
    from pack_data.text.vocabulary import train_vocabulary

    corpus = list(documents("embedded"))
    vocabulary = train_vocabulary(corpus, WORDS)
    first, separator, mask = (vocabulary.ids[token] for token in ("[CLS]", "[SEP]", "[MASK]"))
    random = np.random.default_rng(0)
    examples = []
    for document in corpus:
        package = document.name.split(".")[0]
        if task == "classes" and package not in CLASSES:
            continue
        for encoding in vocabulary.cut(document.lines):
            ids = [first, *encoding.ids[: LONGEST - 2], separator]
            labels = [-100] * len(ids)
            if task == "classes":
                labels[0] = CLASSES.index(package)
            else:
                is_masked = random.random(len(ids)) < MASKED_SHARE
                is_masked[1] = True
                labels = np.where(is_masked, ids, -100).tolist()
                ids = np.where(is_masked, mask, ids).tolist()
            examples.append({"input_ids": ids, "labels": labels})
    return examples


def encoder(outputs: int) -> Any:
    """Return a small ModernBERT with a linear layer after it."""
    import torch
    import transformers

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            config = transformers.ModernBertConfig(
                vocab_size=WORDS,
                hidden_size=128,
                intermediate_size=256,
                num_hidden_layers=4,
                num_attention_heads=4,
                pad_token_id=0,
                **dict.fromkeys(["bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"]),
            )
            self.encoder = transformers.ModernBertModel(config)
            self.head = torch.nn.Linear(config.hidden_size, outputs)

        def loss(self, inputs: Dict[str, torch.Tensor]) -> torch.Tensor:
            labels = inputs.pop("labels")
            hidden = self.encoder(**inputs).last_hidden_state
            is_labelled = labels != -100
            logits = self.head(hidden[is_labelled])
            return torch.nn.functional.cross_entropy(logits, labels[is_labelled])

    return Model()


if __name__ == "__main__":
    raise SystemExit(run_main(main))
