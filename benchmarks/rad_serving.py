"""Speed of reward-augmented decoding in an engine: vLLM without and with RAD, `generate()` with the library.

    python benchmarks/rad_serving.py --model MODEL_FOLDER --output rad_serving.json

k = 20, a random reward model of the language model's own architecture and size, N prompts of 22 tokens at once. Greedy,
but for `vllm-rad-sampled`: a greedy request leaves candidates unscored that cannot win, a sampled one needs all scores.
Every path runs in a process of its own; rows are added to the output file, so the table can be measured in pieces
(`--path`, `--concurrency`) and is printed from all of them. The stateless path decodes and encodes every candidate, as
public code does; its time is summed from measured steps at five lengths (see rad.py). The floor of a reward step is one
forward of the reward model over N * k tokens, each a row of its own: nothing but the candidates, no prefix.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from rad import BETA, CLOCKS, PROMPT, TOP_K, build_models, make_processor, stateless_by_steps, time_generate

from openrlhf_ebft.core.cpu_frozen import pack_frozen_model
from openrlhf_ebft.core.cpu_linear import PackedLinear

PATHS = ("vllm", "vllm-rad", "vllm-rad-sampled", "generate-cached", "generate-stateless")
CONCURRENCY = (1, 8, 32)


def prompts_of(tokenizer, count: int) -> list[list[int]]:
    """The prompt's tokens, turned by one place from request to request, so that the requests go different ways."""
    ids = tokenizer(PROMPT).input_ids
    return [ids[place % len(ids) :] + ids[: place % len(ids)] for place in range(count)]


def start_engine(args: argparse.Namespace, folder: Path):
    """vLLM in this process with RAD and its reward model loaded (requests without RAD arguments are plain)."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm import LLM

    from openrlhf_ebft.rad.vllm_processor import PROCESSOR, WORKER_EXTENSION

    models = {"same": {"path": str(folder), "score_transform": "sigmoid"}}
    return LLM(
        args.model,
        dtype=args.dtype,
        enforce_eager=True,
        max_model_len=512,
        max_num_seqs=max(args.concurrency),
        distributed_executor_backend="uni",
        kv_cache_memory_bytes=2**30,
        enable_prefix_caching=False,
        logits_processors=[PROCESSOR],
        worker_extension_cls=WORKER_EXTENSION,
        additional_config={"rad": {"reward_models": models, "cache_tokens": 16384}},
    )


def reward_floor(reward: torch.nn.Module, tokens: int, repeats: int, clock) -> float:
    """Median seconds of a reward forward over `tokens` rows of one token."""
    seconds = []
    with torch.inference_mode():
        for _ in range(repeats + 1):
            started = clock()
            reward.model(input_ids=torch.zeros(1, tokens, dtype=torch.long).T, use_cache=False)
            seconds.append(clock() - started)
    return statistics.median(seconds[1:])


def run_engine(args: argparse.Namespace) -> list[dict]:
    """All concurrencies of one engine path in one engine."""
    from vllm import SamplingParams

    _, reward, tokenizer = build_models(args.model, "same", getattr(torch, args.dtype))
    clock = CLOCKS[args.clock]
    extra = {"rad_beta": BETA, "rad_top_k": TOP_K} if args.path.startswith("vllm-rad") else None
    temperature = 1.0 if args.path.endswith("sampled") else 0.0
    rows = []
    with tempfile.TemporaryDirectory() as folder, torch.compiler.set_stance("force_eager"):
        reward.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        pack_frozen_model(reward)  # as the engine does
        engine = start_engine(args, Path(folder))

        def generate(count: int, new: int) -> float:
            params = SamplingParams(temperature=temperature, max_tokens=new, ignore_eos=True, extra_args=extra)
            started = clock()
            prompts = [{"prompt_token_ids": ids} for ids in prompts_of(tokenizer, count)]
            outputs = engine.generate(prompts, params, use_tqdm=False)
            seconds = clock() - started
            assert all(len(output.outputs[0].token_ids) == new for output in outputs)
            return seconds

        for count in args.concurrency:
            generate(count, 2)
            before, started = reward_totals(engine), time.perf_counter()
            seconds = [generate(count, args.new_tokens) for _ in range(args.repeats)]
            after, passed = reward_totals(engine), time.perf_counter() - started
            share = (after["forward_seconds"] - before["forward_seconds"]) / passed
            tokens = count * args.new_tokens * args.repeats
            row = {"path": args.path, "concurrency": count, "seconds": statistics.median(seconds)}
            if extra is not None:
                row |= {"reward_share": share, "reward_step_s": share * row["seconds"] / args.new_tokens}
                row |= {"reward_floor_s": reward_floor(reward, count * TOP_K, args.repeats, clock)}
                row |= {"products_s": products(reward, count * TOP_K, args.repeats, clock)}
                row |= {"candidates": (after["candidate_tokens"] - before["candidate_tokens"]) / tokens}
            rows.append(row)
    return rows


def products(reward: torch.nn.Module, tokens: int, repeats: int, clock) -> float:
    """Median seconds of the matrix products alone of that forward."""
    layers = [layer for layer in reward.model.modules() if isinstance(layer, PackedLinear)]
    inputs = {layer.in_features: torch.randn(tokens, layer.in_features, dtype=layer.dtype) for layer in layers}
    seconds = []
    with torch.inference_mode():
        for _ in range(repeats + 1):
            started = clock()
            for layer in layers:
                layer(inputs[layer.in_features])
            seconds.append(clock() - started)
    return statistics.median(seconds[1:])


def reward_totals(engine) -> dict:
    """What the engine's reward model has done so far."""
    return engine.collective_rpc("rad_statistics")[0]["reward_models"]["same"]


def run_generate(args: argparse.Namespace) -> list[dict]:
    """All concurrencies of one `generate()` path."""
    lm, reward, tokenizer = build_models(args.model, "same", getattr(torch, args.dtype))
    kind = args.path.removeprefix("generate-")
    if kind == "cached":
        pack_frozen_model(reward)  # as RAD.steer() does
    clock = CLOCKS[args.clock]
    rows = []
    for count in args.concurrency:
        prompt = torch.tensor(prompts_of(tokenizer, count))

        def processors(prompt=prompt) -> list:
            return make_processor(kind, reward, tokenizer, prompt)

        if kind == "stateless":
            seconds = stateless_by_steps(lm, processors()[0], prompt, args.new_tokens, clock)
        else:
            time_generate(lm, processors, prompt, 2, 1, clock)
            seconds = time_generate(lm, processors, prompt, args.new_tokens, args.repeats, clock)
        rows.append({"path": args.path, "concurrency": count, "seconds": seconds})
    return rows


def print_table(rows: list[dict]) -> None:
    """A Markdown table: one line per path and concurrency, with the reward forward beside its floor."""
    columns = ("requests", "path", "tokens/s", "candidates scored", "reward share of a step", "reward step ms")
    print(f"| {' | '.join((*columns, 'floor ms', 'of it products'))} |")
    print("|---" * (len(columns) + 2) + "|")
    order = {path: place for place, path in enumerate(PATHS)}
    for row in sorted(rows, key=lambda row: (row["concurrency"], order[row["path"]])):
        line = f"| {row['concurrency']} | {row['path']} | {row['tokens_per_s']:.3g} |"
        if "reward_share" in row:
            times = (row[name] * 1e3 for name in ("reward_step_s", "reward_floor_s", "products_s"))
            line += f" {row['candidates']:.1f} | {row['reward_share']:.0%} | "
            line += " | ".join(f"{time:.0f}" for time in times) + " |"
        else:
            line += " | " * 5 + "|"
        print(line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of the language model")
    parser.add_argument("--dtype", default="bfloat16", help="dtype of both models")
    parser.add_argument("--new-tokens", type=int, default=64, help="tokens of each response")
    parser.add_argument("--repeats", type=int, default=3, help="runs per cell (median)")
    parser.add_argument("--clock", choices=sorted(CLOCKS), default="wall", help="what a second is (see rad.py)")
    parser.add_argument("--concurrency", type=int, nargs="+", default=list(CONCURRENCY), help="requests at once")
    parser.add_argument("--path", choices=PATHS, nargs="+", default=list(PATHS), help="what to measure")
    parser.add_argument("--output", type=Path, required=True, help="JSON file to which rows are added")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", str(os.cpu_count()))
    if args.here:
        (args.path,) = args.path
        rows = run_engine(args) if args.path.startswith("vllm") else run_generate(args)
        for row in rows:
            row["tokens_per_s"] = row["concurrency"] * args.new_tokens / row["seconds"]
            print(json.dumps(row), flush=True)
        return
    rows = json.loads(args.output.read_text()) if args.output.exists() else []
    for path in args.path:
        command = [sys.executable, __file__, *sys.argv[1:], "--here", "--path", path]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        new = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"path"')]
        rows = [row for row in rows if row["path"] != path or row["concurrency"] not in args.concurrency] + new
        args.output.write_text(json.dumps(rows, indent=1))
    print_table(rows)


if __name__ == "__main__":
    main()
