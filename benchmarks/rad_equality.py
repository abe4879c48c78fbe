"""Greedy RAD in vLLM against greedy RAD through `generate()`: 20 prompts, 64 tokens, float32, the same tokens.

    python benchmarks/rad_equality.py --model MODEL_FOLDER

The reward model is the language model's backbone with a random head, wide enough that rewards differ (std 0.05).
"""

from __future__ import annotations

import argparse
import os
import tempfile

import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from openrlhf_ebft.core.cpu_frozen import pack_frozen_model
from openrlhf_ebft.rad import CachedRewardModelValue, ValueGuidedProcessor

BETA, TOP_K, NEW_TOKENS = 10.0, 20, 64
PROMPTS = [
    *("The weather in the mountains", "def fibonacci(n):", "Once upon a time there was", "My favourite film is"),
    *("The capital of France", "In a recent study, scientists", "To cook rice, first", "The dog looked at the"),
    *("Dear customer, we are", "The history of computers began", "She opened the door and", "A good teacher should"),
    *("import numpy as np\n", "The recipe needs two eggs", "Nobody knew why the ship", "When I was young"),
    *("The price of oil rose", "Mathematics is", "He was a terrible man who", "Thank you for your letter. I"),
]


def in_vllm(model: str, reward_folder: str, prompts: list[list[int]], extra: dict | None) -> list[list[int]]:
    """Greedy tokens of every prompt, all prompts in one batch."""
    from vllm import LLM, SamplingParams

    from openrlhf_ebft.rad.vllm_processor import PROCESSOR

    models = {"reward": {"path": reward_folder, "score_transform": "sigmoid"}}
    engine = LLM(
        model,
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        distributed_executor_backend="uni",
        kv_cache_memory_bytes=2**29,
        generation_config="vllm",
        logits_processors=[PROCESSOR],
        additional_config={"rad": {"reward_models": models, "cache_tokens": 8192}},
    )
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, extra_args=extra)
    with torch.compiler.set_stance("force_eager"):
        outputs = engine.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def in_generate(lm, reward, tokenizer) -> list[list[int]]:
    """The same through transformers, left padded."""
    batch = tokenizer(PROMPTS, return_tensors="pt", padding=True)
    processor = ValueGuidedProcessor(
        CachedRewardModelValue(reward, tokenizer, score_transform="sigmoid"),
        k=TOP_K,
        beta=BETA,
        normalize="clamp",
        prompt_ids=batch.input_ids,
        attention_mask=batch.attention_mask,
    )
    out = lm.generate(
        **batch, do_sample=False, max_new_tokens=NEW_TOKENS, eos_token_id=None, logits_processor=[processor]
    )
    return out[:, batch.input_ids.size(1) :].tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of the language model")
    args = parser.parse_args()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("OMP_NUM_THREADS", str(os.cpu_count()))
    tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
    lm = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    torch.manual_seed(0)
    reward = AutoModelForSequenceClassification.from_pretrained(args.model, num_labels=1, dtype=torch.float32).eval()
    torch.nn.init.normal_(reward.score.weight, std=0.05)
    reward.config.pad_token_id = tokenizer.pad_token_id
    with tempfile.TemporaryDirectory() as folder:
        reward.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        extra = {"rad_beta": BETA, "rad_top_k": TOP_K}
        steered = in_vllm(args.model, folder, [tokenizer(prompt).input_ids for prompt in PROMPTS], extra)
    pack_frozen_model(reward)
    pack_frozen_model(lm)
    expected = in_generate(lm, reward, tokenizer)
    equal = sum(mine == theirs for mine, theirs in zip(steered, expected, strict=True))
    print(f"equal: {equal} of {len(PROMPTS)} prompts x {NEW_TOKENS} tokens")


if __name__ == "__main__":
    main()
