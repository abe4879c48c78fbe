"""vLLM and the block-parallel sampler on the same trees: what `rollout.engine: auto` should choose in strided mode.

Each engine runs in a process of its own, through the interface that a run uses. Every measurement samples a document
that the engine has not seen (its tokens turned by a few places), as after a weight update, which empties vLLM's prefix
cache; nested prefixes of one document still come from it. A first document warms up. Seconds as in `strided.py`.

    python benchmarks/strided_engines.py --model models/SmolLM2-135M-Instruct --lengths 256 512 --dtypes bfloat16
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys

import torch
from strided import CLOCKS, SAMPLES, SAMPLING, STEPS, document, timed

from openrlhf_ebft.config.sections import RolloutConfig
from openrlhf_ebft.core.experience import RolloutRequest
from openrlhf_ebft.rollouts.engine import build_engine

ENGINES = ("vllm", "transformers")


def measure(arguments: argparse.Namespace) -> dict[str, float]:
    """One engine, one length, one precision, in this process."""
    size = arguments.lengths[0]
    base = document(arguments.model, size)
    engine = build_engine(
        arguments.model,
        RolloutConfig(engine=arguments.engine, block_size=arguments.block_size, kv_cache_gib=1.0),
        SAMPLING,
        dtype=arguments.dtypes[0],
        max_model_len=size + STEPS,
        seed=0,
        threads=arguments.threads,
    )
    turns = iter(range(1, arguments.repeats + 2))
    counts: dict[str, float] = {}

    def sample() -> None:
        reference = dataclasses.replace(base, token_ids=base.token_ids.roll(3 * next(turns)))
        (rollout,) = engine.generate([RolloutRequest(reference, SAMPLES, seed=0)])
        completions = [completion for group in rollout.completions for completion in group]
        counts["tokens"] = sum(len(completion.token_ids) for completion in completions)
        counts["cached"] = rollout.cached_tokens / float(reference.anchors.sum())

    sample()
    seconds = timed(arguments.clock, arguments.repeats, sample)
    engine.shutdown()
    return {"seconds": seconds, **counts}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 512])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16"], choices=["float32", "bfloat16"])
    parser.add_argument("--block-size", type=int, default=32, help="tokens of one key/value block of vllm")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3, help="the best counts")
    parser.add_argument("--clock", choices=sorted(CLOCKS), default="process", help="CPU seconds, or wall seconds")
    parser.add_argument("--engine", choices=ENGINES, help="measure this engine in this process and print JSON")
    arguments = parser.parse_args()
    if arguments.engine is not None:
        print(json.dumps(measure(arguments)))
        return
    print(f"{'S':>4} {'dtype':<9} {'vllm':>8} {'block-parallel':>15} {'ratio':>6}  prefix tokens from vllm's cache")
    for size in arguments.lengths:
        for dtype in arguments.dtypes:
            vllm, ours = (run_child(arguments, engine, size, dtype) for engine in ENGINES)
            if vllm["tokens"] != ours["tokens"]:
                raise SystemExit(f"vllm sampled {vllm['tokens']} tokens, the block-parallel sampler {ours['tokens']}")
            ratio = vllm["seconds"] / ours["seconds"]
            cells = f"{vllm['seconds']:>6.2f} s {ours['seconds']:>13.2f} s {ratio:>6.1f}  {vllm['cached']:.0%}"
            print(f"{size:>4} {dtype:<9} {cells}", flush=True)


def run_child(arguments: argparse.Namespace, engine: str, size: int, dtype: str) -> dict[str, float]:
    command = [sys.executable, __file__, "--model", arguments.model, "--engine", engine]
    command += ["--lengths", str(size), "--dtypes", dtype, "--threads", str(arguments.threads)]
    command += ["--block-size", str(arguments.block_size)]
    command += ["--repeats", str(arguments.repeats), "--clock", arguments.clock]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
