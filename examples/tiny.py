"""The default model and data of the examples: a small random Llama and random tokens of varied lengths."""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from typing import Any, Dict, List, Optional, Sequence

import numpy as np

from pack_data.cli.command import ArgumentParser, positive_int

WORDS, LONGEST = 200, 256


def options(argv: Optional[Sequence[str]], about: str, *packages: str) -> argparse.Namespace:
    """Parse the options that all examples share; exit with status 2 and one line if a package is missing."""
    parser = ArgumentParser(description=about.splitlines()[0])
    parser.add_argument(
        "--model", default="", help="a Hugging Face model; default: a small random one"
    )
    parser.add_argument("--examples", type=positive_int, default=400)
    parser.add_argument("--row", type=positive_int, default=1024, help="tokens per packed row")
    arguments = parser.parse_args(argv)
    require(parser, *packages)
    return arguments


def require(parser: ArgumentParser, *packages: str) -> None:
    """Exit with status 2 and one line if a package is missing."""
    missing = [package for package in packages if find_spec(package) is None]
    if missing:
        parser.exit(
            2, f"error: this example needs {', '.join(missing)}: pip install '.[trainers]'\n"
        )


def load(name: str) -> Any:
    """Load the model with this name or directory, or the small one if the name is empty."""
    import transformers

    transformers.set_seed(0)
    if name:
        return transformers.AutoModelForCausalLM.from_pretrained(name)
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    config = transformers.LlamaConfig(
        vocab_size=WORDS + 3, max_position_embeddings=2048, pad_token_id=0, **sizes
    )
    return transformers.LlamaForCausalLM(config)


def examples(count: int) -> List[Dict[str, List[int]]]:
    """Return tokens and labels with lengths as uneven as those of instructions, half of them below 45 tokens."""
    rng = np.random.default_rng(0)
    lengths = rng.lognormal(3.8, 0.9, count).astype(int).clip(2, LONGEST)
    tokens = [rng.integers(3, WORDS, length).tolist() for length in lengths]
    return [{"input_ids": ids, "labels": ids} for ids in tokens]


def tokenizer() -> Any:
    """Return a tokenizer with one word per token: w0, w1, ..."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["<pad>", "<eos>", "<unk>", *(f"w{number}" for number in range(WORDS))]
    word_level = Tokenizer(
        models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>")
    )
    word_level.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=word_level, pad_token="<pad>", eos_token="<eos>"
    )


def report(tokens: int, seconds: Dict[str, float]) -> None:
    """Print the tokens per second, without padding, of each run."""
    for name, time in seconds.items():
        print(f"{name:9} {tokens / time:10,.0f} tokens/s")
    print(f"packed is {seconds['unpacked'] / seconds['packed']:.2f} times as fast as unpacked")
