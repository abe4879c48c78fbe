"""Speed and memory of reward-augmented decoding: plain generate, cached path, stateless path.

    python benchmarks/rad.py --model MODEL_FOLDER --output rad.json

The language model is MODEL_FOLDER (weights do not matter for speed). The reward model is a random classifier of the
same architecture: of the same size (`same`), or with a quarter of the transformer blocks (`quarter`). Every (path,
reward model) pair runs in a process of its own, so that its peak memory is its own. `best_only` is the cached path told
that decoding is greedy: candidates that cannot win are not scored. The stateless path is what public
code does: decode prefix + candidate, encode it again, run the reward model on each full text. Its time is summed from
measured steps at five lengths by the trapezoid rule (a full run at batch 8 takes a quarter of an hour on two cores);
`--full-stateless` generates every token instead. `--clock process` counts the process's CPU seconds, which on a machine
that others use too says more than the wall clock; it needs OMP_NUM_THREADS=1 (idle threads of a pool would count).
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from openrlhf_ebft.core.cpu_frozen import pack_frozen_model
from openrlhf_ebft.rad import CachedRewardModelValue, RewardModelValue, ValueGuidedProcessor

PROMPT = "The weather had been fine all week and the people of the small town were looking forward to the weekend. On"
CELLS = ((1, 32), (1, 128), (8, 32), (8, 128))  # (batch, new tokens)
TOP_K = 20
BETA = 10.0
CLOCKS = {"wall": time.perf_counter, "process": time.process_time}
PATHS = ("plain", "cached", "best_only", "stateless")
SETTINGS = {"do_sample": False, "eos_token_id": None, "top_k": None}


def build_models(folder: str, reward_size: str, dtype: torch.dtype) -> tuple:
    """The language model, a random reward model of the wanted size, the tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    lm = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    config = AutoConfig.from_pretrained(folder)
    config.num_labels = 1
    if reward_size == "quarter":
        config.num_hidden_layers = max(config.num_hidden_layers // 4, 1)
    torch.manual_seed(0)
    reward = AutoModelForSequenceClassification.from_config(config, dtype=dtype).eval()
    return lm, reward, tokenizer


def make_processor(path: str, reward, tokenizer, prompt: torch.Tensor) -> list:
    """The processors of a path; none for plain generate."""
    if path == "plain":
        return []
    value = (
        CachedRewardModelValue(reward, tokenizer, score_transform="sigmoid")
        if path in ("cached", "best_only")
        else RewardModelValue(reward, tokenizer, score_transform="sigmoid", shared_vocab=False)
    )
    return [
        ValueGuidedProcessor(
            value,
            k=TOP_K,
            beta=BETA,
            normalize="clamp",
            lm_tokenizer=tokenizer,
            prompt_ids=prompt,
            attention_mask=torch.ones_like(prompt),
            best_only=path == "best_only",
        )
    ]


def time_generate(lm, processors_for, prompt: torch.Tensor, new_tokens: int, repeats: int, clock) -> float:
    """Median seconds of a whole generate call, prompt included."""
    seconds = []
    for _ in range(repeats):
        processors = processors_for()
        start = clock()
        out = lm.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=new_tokens,
            logits_processor=processors,
            **SETTINGS,
        )
        seconds.append(clock() - start)
        assert out.size(1) == prompt.size(1) + new_tokens
    return statistics.median(seconds)


def stateless_by_steps(lm, processor, prompt: torch.Tensor, new_tokens: int, clock) -> float:
    """Seconds of a stateless run: plain generate plus the processor's time, summed over lengths by trapezoids."""
    text = lm.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=new_tokens, **SETTINGS)
    scores = torch.randn(prompt.size(0), lm.config.vocab_size)
    points = sorted({round(i * (new_tokens - 1) / 4) for i in range(5)})
    costs = []
    for point in points:
        start = clock()
        processor(text[:, : prompt.size(1) + point], scores)
        costs.append(clock() - start)
    area = sum((b - a) * (x + y) / 2 for a, b, x, y in zip(points, points[1:], costs, costs[1:], strict=False))
    scoring = area / (points[-1] - points[0]) * new_tokens
    return scoring + time_generate(lm, list, prompt, new_tokens, 1, clock)


def run_path(args: argparse.Namespace) -> list[dict]:
    """All cells of one path and reward model, smallest first; peak memory is that of the process so far."""
    lm, reward, tokenizer = build_models(args.model, args.reward, getattr(torch, args.dtype))
    if args.path in ("cached", "best_only"):
        pack_frozen_model(reward)  # as RAD.steer() does
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    rows = []
    clock = CLOCKS[args.clock]
    time_generate(lm, lambda: make_processor(args.path, reward, tokenizer, ids), ids, 4, 1, clock)  # warm up
    for batch, new_tokens in CELLS:
        prompt = ids.repeat(batch, 1)
        if args.path == "stateless" and not args.full_stateless:
            processor = make_processor(args.path, reward, tokenizer, prompt)[0]
            seconds = stateless_by_steps(lm, processor, prompt, new_tokens, clock)
        else:
            seconds = time_generate(
                lm,
                lambda prompt=prompt: make_processor(args.path, reward, tokenizer, prompt),
                prompt,
                new_tokens,
                1 if args.path == "stateless" else args.repeats,
                clock,
            )
        rows.append(
            {
                "path": args.path,
                "reward": args.reward,
                "batch": batch,
                "new_tokens": new_tokens,
                "seconds": seconds,
                "tokens_per_s": batch * new_tokens / seconds,
                "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    return rows


def print_table(rows: list[dict]) -> None:
    """A Markdown table: speeds, and the ratios of the cached path, with and without candidates that cannot win."""
    by_key = {(r["path"], r["reward"], r["batch"], r["new_tokens"]): r for r in rows}
    speeds = " | ".join(f"{path} tok/s" for path in PATHS)
    print(f"| reward model | batch | new tokens | {speeds} | cached / stateless | time: cached / plain |", end="")
    print(f" time: best_only / plain | peak MiB {', '.join(PATHS)} |")
    print("|---" * 11 + "|")
    for size in ("same", "quarter"):
        for batch, new in CELLS:
            cells = [by_key.get((path, size, batch, new)) for path in PATHS]
            if None in cells:
                continue
            plain, cached, best_only, stateless = cells
            speeds = " | ".join(f"{cell['tokens_per_s']:.3g}" for cell in cells)
            peaks = ", ".join(f"{cell['peak_mib']:.0f}" for cell in cells)
            print(
                f"| {size} | {batch} | {new} | {speeds} | {stateless['seconds'] / cached['seconds']:.1f}x "
                f"| {cached['seconds'] / plain['seconds']:.2f}x | {best_only['seconds'] / plain['seconds']:.2f}x "
                f"| {peaks} |"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of the language model")
    parser.add_argument("--dtype", default="bfloat16", help="dtype of both models")
    parser.add_argument("--repeats", type=int, default=3, help="runs per cell (median)")
    parser.add_argument("--clock", choices=sorted(CLOCKS), default="wall", help="what a second is")
    parser.add_argument("--full-stateless", action="store_true", help="generate every token on the stateless path")
    parser.add_argument("--output", help="JSON file for the rows")
    parser.add_argument("--path", choices=PATHS, help="one path only, in this process")
    parser.add_argument("--reward", choices=("same", "quarter"), help="one reward model only")
    args = parser.parse_args()
    if args.path and args.reward:
        run_path(args)
        return
    rows = []
    for reward in [args.reward] if args.reward else ["same", "quarter"]:
        for path in [args.path] if args.path else PATHS:
            command = [sys.executable, __file__, "--model", args.model, "--dtype", args.dtype, "--path", path]
            command += ["--reward", reward, "--repeats", str(args.repeats), "--clock", args.clock]
            command += ["--full-stateless"] if args.full_stateless else []
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            rows += [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
            print(done.stdout, end="", flush=True)
    if args.output:
        Path(args.output).write_text(json.dumps(rows, indent=1))
    print_table(rows)


if __name__ == "__main__":
    main()
