"""Check that a Hugging Face model keeps the examples of a packed row apart, on rows like those of training."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Sequence

import numpy as np

from pack_data.cli.command import ArgumentParser, positive_int, typed
from pack_data.cli.terminal import progress_bar
from pack_data.reading.fields import Fields, one_line, parse_json
from pack_data.reading.files import read_regular
from pack_data.reading.packages import require

_MAX_BYTES = 64 << 20  # size of a file of --batch; a row takes a few KiB
_STATUSES = {"isolated": 0, "leaks": 1, "cannot be judged": 2}
_TYPES = ("float32", "bfloat16", "float16", "float64")


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Check a model; return 1 if the examples of a row affect each other, and 2 if it cannot be judged."""
    parser = ArgumentParser(
        prog=typed("check-model"),
        description="Compare packed rows, computed as in training, with plain calls for each example: logits, losses\n"
        "and gradients. Exit status 1 if they differ, and 2 if the model cannot be judged.",
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a Hugging Face directory (safetensors; none of its code is run), or module:function",
    )
    parser.add_argument(
        "--row",
        type=positive_int,
        metavar="N",
        help="tokens of a packed row (default: --longest)",
    )
    parser.add_argument(
        "--longest", type=positive_int, metavar="N", help="tokens of the longest example"
    )
    parser.add_argument(
        "--precision", choices=_TYPES, help="data type of the weights (default: as stored)"
    )
    parser.add_argument(
        "--attention",
        metavar="NAME",
        help="attention, such as padding_free or sdpa (default: the first that passes)",
    )
    parser.add_argument(
        "--batch",
        metavar="FILE",
        help="also check a row of these examples: JSON lines with input_ids and labels",
    )
    parser.add_argument(
        "--collator",
        metavar="MODULE:NAME",
        help="your collator, which maps examples to inputs; the model is not changed",
    )
    parser.add_argument(
        "--all-layers",
        action="store_true",
        help="check all layers of a large model, not one of each kind",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(argv)
    if args.row and args.longest and args.longest > args.row:
        raise ValueError(f"--longest {args.longest}: does not fit into --row {args.row}; lower it")
    batch = _examples(args.batch) if args.batch else None
    folder = Path(args.model)
    is_model = (folder / "config.json").is_file() and any(folder.glob("*.safetensors"))
    if folder.is_dir() and not is_model:
        raise ValueError(
            f"{folder}: needs config.json and *.safetensors; save_pretrained writes both, packed-bert export those of "
            "a run"
        )
    if not folder.is_dir() and ":" not in args.model:
        raise ValueError(
            f"{args.model}: not a directory; pass one written by save_pretrained, or module:function"
        )
    require("check-model", "torch", "transformers")
    collator = _import_name(args.collator, "--collator") if args.collator else None
    with progress_bar(None, "packed rows and single examples", at_once=True):
        result = _check(_load(args.model, args.precision), args, collator, batch)
    if args.json:
        if "first" in result:
            result["first"] = result["first"]._asdict()
        print(json.dumps({"model": args.model, **result}))
    else:
        for name, value in result.items():
            print(f"{name:<10}{value}")
    return _STATUSES[result["verdict"]]


def _check(
    model: Any, args: Any, collator: Any, batch: Optional[List[Dict[str, Any]]]
) -> Dict[str, Any]:
    """Return the attention, the checked rows, and the verdict or the first difference."""
    from padding_free.choice import find_choice, switch
    from padding_free.collators import PaddingFreeCollator
    from padding_free.leaks.probe import audit_batch, check_no_leak
    from padding_free.models import Leak, choice_of

    result: Dict[str, Any] = {}
    options = {"longest": args.longest, "row": args.row, "all_layers": args.all_layers}
    try:
        if collator is None:
            choice, probed = find_choice(model, attention=args.attention, **options)
        else:
            if args.attention:
                switch(model, args.attention)
            probed = check_no_leak(model, collator=collator, **options)
            choice = choice_of(model)
        result["attention"] = str(choice)
        result["rows"] = str(probed)
        if batch is not None:
            collate = collator or PaddingFreeCollator(model)
            result["batch"] = str(audit_batch(model, collate(batch)))
        result["verdict"] = "isolated"
    except ValueError as error:
        result["verdict"] = "leaks" if isinstance(error, Leak) else "cannot be judged"
        result["reason"] = str(error)
        first = getattr(error, "first", None)
        if first:
            result["first"] = first
    return result


def _import_name(text: str, option: str) -> Callable[..., Any]:
    """Import `module:name`; the module may be in the current directory."""
    module, colon, name = text.partition(":")
    if not (module and colon and name):
        raise ValueError(f"{option}: {text!r} is not module:name, such as my_code:collate")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{option}: {text!r} cannot be loaded: {error}") from None


def _load(text: str, precision: Optional[str]) -> Any:
    """Load a model from a directory, or call module:function."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()  # unused weights of a file do not affect rows
    transformers.logging.disable_progress_bar()  # it interferes with our progress bar
    dtype = getattr(torch, precision) if precision else None
    folder = Path(text)
    if not folder.is_dir():
        model = _import_name(text, "MODEL")()
        return model if dtype is None else model.to(dtype)
    try:
        config = transformers.AutoConfig.from_pretrained(
            text, trust_remote_code=False, local_files_only=True
        )
        architectures = getattr(config, "architectures", None) or []
        model_class: Any = transformers.AutoModelForCausalLM
        if any("MaskedLM" in name for name in architectures):
            model_class = transformers.AutoModelForMaskedLM
        return model_class.from_pretrained(
            text,
            trust_remote_code=False,
            local_files_only=True,
            use_safetensors=True,
            torch_dtype=dtype or "auto",
        )
    except (OSError, KeyError, RuntimeError, ValueError, ImportError) as error:
        problem = one_line(error, 300)
        raise ValueError(f"{text}: cannot be loaded: {problem}") from None


def _examples(path: str) -> List[Dict[str, np.ndarray]]:
    """Read examples from JSON lines with input_ids and, optionally, labels."""
    way_out = "pass JSON lines with input_ids and optional labels, lists of equally many integers"
    text = read_regular(path, way_out=way_out, most_bytes=_MAX_BYTES)
    examples = []
    for number, line in enumerate(text.splitlines(), start=1):
        source = f"{path}, line {number}"
        fields = Fields.of(parse_json(line, source, way_out), source, way_out)
        token_ids = fields.integers("input_ids", least=-(2**31), most=2**31)
        if not token_ids:
            raise fields.error("input_ids", "must have a token")
        example = {"input_ids": np.array(token_ids, np.int64)}
        if "labels" in fields:
            labels = fields.integers("labels", len(token_ids), least=-(2**31), most=2**31)
            example["labels"] = np.array(labels, np.int64)
        examples.append(example)
    if not examples:
        raise ValueError(f"{path}: has no examples; {way_out}")
    return examples
