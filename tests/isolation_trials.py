"""Random models that keep examples apart, which no check may refuse, and faults, which every check must report.

    python -m tests.isolation_trials               # 80 dense models, 20 mixtures of experts, 160 faults: 15 minutes
    python -m tests.isolation_trials --models 10   # the same, of 10 models

Sizes, windows, experts, weights, rows and lengths are drawn; each model is judged in float32 and in bfloat16.  The
status is 1 if a right model is refused or a fault is missed.
"""

import argparse
import itertools
import sys
import time

import numpy as np
import torch

from padding_free import use_padding_free
from tests.padding_free_faults import FAULTS, probe
from tests.padding_free_models import transformers, with_large_weights

DRAWS = 4  # of each fault
WINDOWED = ("Mistral", "Gemma2", "Gemma3Text", "Olmo3", "Cohere2", "GptOss", "Starcoder2", "Exaone4", "Phi3")
DENSE = (
    "Llama Qwen2 Qwen3 Mistral Gemma Gemma2 Gemma3Text Phi Phi3 Olmo2 Olmo3 GPTNeoX Granite Cohere Cohere2 StableLm "
    "Starcoder2 GPT2 OPT SmolLM3 Exaone4 Glm Helium"
).split()
MIXTURES = {  # family -> its setting for the number of experts
    "Mixtral": "num_local_experts",
    "Qwen2Moe": "num_experts",
    "Qwen3Moe": "num_experts",
    "GptOss": "num_local_experts",
    "Olmoe": "num_experts",
    "DeepseekV3": "n_routed_experts",
    "GraniteMoe": "num_local_experts",
    "Dots1": "n_routed_experts",
}


def settings_of(family, draw):
    """Draw the settings of a small model."""
    heads = int(draw.choice([2, 4]))
    width = int(draw.choice([8, 16]))
    settings = {
        "vocab_size": int(draw.choice([50, 300, 5000])),
        "hidden_size": heads * width,
        "intermediate_size": int(draw.choice([32, 96])),
        "num_hidden_layers": int(draw.integers(1, 5)),
        "num_attention_heads": heads,
        "num_key_value_heads": int(draw.choice([1, heads])),
        "max_position_embeddings": 512,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 1,
    }
    if family.startswith(("Gemma", "Qwen3", "GptOss", "Glm", "Helium")):
        settings["head_dim"] = width
    if family in WINDOWED:
        settings["sliding_window"] = int(draw.choice([4, 17, 64]))
    if family == "OPT":
        settings.update(word_embed_proj_dim=settings["hidden_size"], ffn_dim=32)
    if family in MIXTURES:
        experts = int(draw.choice([4, 8, 32, 64]))
        chosen = int(draw.choice([1, 2, min(8, experts // 2)]))
        settings.update({MIXTURES[family]: experts, "num_experts_per_tok": chosen, "moe_intermediate_size": 16})
    if family in ("DeepseekV3", "Dots1"):
        settings.update(n_group=1, topk_group=1, first_k_dense_replace=1, n_shared_experts=1)
    if family == "DeepseekV3":
        ranks = "q_lora_rank kv_lora_rank qk_rope_head_dim qk_nope_head_dim v_head_dim".split()
        settings.update(dict.fromkeys(ranks, 8), num_key_value_heads=heads)
    return settings


def a_right_model(number, family, dtype):
    """Build a random model and draw its longest example and its row."""
    draw = np.random.default_rng(number)
    config = getattr(transformers, f"{family}Config")(**settings_of(family, draw))
    torch.manual_seed(number)
    attention = str(draw.choice(["eager", "sdpa"]))
    if family in ("Gemma2", "GptOss"):
        attention = "eager"  # their soft caps and sinks
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    size = float(draw.choice([0.0, 0.05, 0.3]))  # new models, and models to which each token matters
    with_large_weights(model, size)
    longest = int(draw.choice([16, 48, 96]))
    return model.to(dtype).train(bool(draw.integers(2))), longest, longest * int(draw.integers(1, 5))


def families_of(models):
    """List the families of so many models; every fifth is a mixture of experts."""
    mixtures = list(MIXTURES)
    listed = []
    for number in range(models):
        fifth = number // 5
        if number % 5 == 4:
            listed.append(mixtures[fifth % len(mixtures)])
        else:
            listed.append(DENSE[(number - fifth) % len(DENSE)])
    return listed


def refusal(number, family, dtype):
    """Judge one right model; return the reason if it is refused."""
    model, longest, row = a_right_model(number, family, dtype)
    try:
        use_padding_free(model, longest=longest, row=row, attention="padding_free")
    except ValueError as error:
        return f"model {number}, {family} in {dtype}, rows of {row}: {error}"
    return ""


def is_caught(fault, seed):
    """Judge one fault; return whether it is reported."""
    try:
        probe(fault.make(np.random.default_rng(seed)))
    except ValueError:
        return True
    return False


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", type=int, default=100)
    parser.add_argument("--first", type=int, default=0, help="number of the first model, which seeds it")
    options = parser.parse_args(arguments)
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)  # small tensors; threads that wait for a busy core slow them down
    start = time.process_time()
    refused = 0
    families = families_of(options.first + options.models)
    for number in range(options.first, options.first + options.models):
        for dtype in (torch.float32, torch.bfloat16):
            reason = refusal(number, families[number], dtype)
            if reason:
                refused += 1
                print(f"REFUSED {reason}", flush=True)
    missed = 0
    for fault, seed in itertools.product(FAULTS, range(DRAWS)):
        if not is_caught(fault, seed):
            missed += 1
            print(f"MISSED {fault.name}, draw {seed}", flush=True)
    seconds = time.process_time() - start
    print(f"{refused} of {2 * options.models} right models refused (float32, bfloat16)")
    print(f"{missed} of {DRAWS * len(FAULTS)} faults missed; {seconds:.0f} s of processor time")
    return int(refused + missed > 0)


if __name__ == "__main__":
    sys.exit(main())
