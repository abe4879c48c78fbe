"""Forward and backward pass of the policy trainer: trees against rows, with and without gradient checkpointing.

A tree holds a reference once and its completions behind it; with rows every completion is a sequence of its own that
repeats the context. Loss, gradients and trained tokens are the same (column `check`: norm of the gradient). Tokens per
second count the tokens that get a loss (completions and ground truth), so that a repeated context earns nothing. Every
cell runs in a process of its own; seconds are CPU seconds of all threads unless --clock wall; peak memory is that of
the process above the loaded model, gradients included.

    python benchmarks/trainer.py --model models/SmolLM2-135M-Instruct
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys

import torch
from strided import CLOCKS, SAMPLES, TEMPERATURE, document, memory_mib, reset_peak, timed

from openrlhf_ebft.config.lora import LoRAConfig
from openrlhf_ebft.core.experience import Completion, Reference, Rollout
from openrlhf_ebft.core.rollout_tree import RolloutTree
from openrlhf_ebft.core.tree_batch import TreeBatch
from openrlhf_ebft.models.loading import DTYPES, load_causal_lm
from openrlhf_ebft.models.lora import add_adapters
from openrlhf_ebft.models.policy import PolicyModel

MODES = ("sdpa", "split", "rows")
SHAPES = ("structured", "strided")
PROMPT, ANSWER, COMPLETION = 192, 64, 64  # tokens of the structured example


def make_tree(shape: str, path: str, size: int) -> RolloutTree:
    """One example: a prompt with n completions, or a document of `size` tokens with n short ones at every anchor."""
    reference, steps = document(path, size), 8
    if shape == "structured":
        steps = COMPLETION
        reference = Reference(
            "pair",
            reference.token_ids[: PROMPT + ANSWER],
            torch.tensor([PROMPT]),
            torch.tensor([ANSWER]),
            torch.tensor([COMPLETION]),
            torch.arange(PROMPT + ANSWER) >= PROMPT,
        )
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(100, 40000, (len(reference.anchors), SAMPLES, steps), generator=generator)
    groups = tuple(
        tuple(Completion(tuple(ids), (0.0,) * steps, "length") for ids in group) for group in tokens.tolist()
    )
    return RolloutTree.from_rollout(reference, Rollout(reference.example_id, groups, 0))


def measure(arguments: argparse.Namespace) -> dict[str, float]:
    """One cell, in this process."""
    torch.set_num_threads(arguments.threads)
    model = load_causal_lm(arguments.model, dtype=DTYPES[arguments.dtype]).train()
    if arguments.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    adapters = None
    if arguments.lora_rank:
        adapters = add_adapters(model, LoRAConfig(rank=arguments.lora_rank), seed=0)
    policy = PolicyModel(
        model, arguments.mode, temperature=TEMPERATURE, chunk_tokens=256, with_entropy=False, adapters=adapters
    )
    tree = make_tree(arguments.shape, arguments.model, arguments.length)
    batch = TreeBatch.collate([tree])
    advantages = torch.randn(tree.branch_lengths.shape, generator=torch.Generator().manual_seed(1))

    def step() -> None:
        model.zero_grad(set_to_none=True)
        output = policy(batch)
        (-(output.branch * batch.spread([advantages])).mean() - 0.03 * output.supervised.mean()).backward()

    before = reset_peak()
    seconds = timed(arguments.clock, arguments.repeats, step)
    peak = memory_mib("VmHWM") - before
    norms = [p.grad.float().norm() for p in model.parameters() if p.grad is not None]
    trained = batch.branch_tokens.numel() + batch.supervised_targets.numel()
    return {"rate": trained / seconds, "peak_mib": peak, "check": float(torch.stack(norms).norm())}


def run_child(arguments: argparse.Namespace, shape: str, mode: str, checkpointing: bool) -> dict[str, float]:
    names = ("model", "dtype", "length", "threads", "repeats", "clock", "lora_rank")
    options = [part for name in names for part in (f"--{name.replace('_', '-')}", str(getattr(arguments, name)))]
    command = [sys.executable, __file__, *options, "--shape", shape, "--mode", mode]
    command += ["--checkpointing"] if checkpointing else []
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", default="bfloat16", choices=sorted(DTYPES))
    parser.add_argument("--length", type=int, default=96, help="tokens of the strided document")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=2, help="the best counts")
    parser.add_argument("--clock", choices=sorted(CLOCKS), default="process", help="CPU seconds, or wall seconds")
    parser.add_argument("--lora-rank", type=int, default=0, help="0: all weights train")
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--shape", choices=SHAPES, help="measure this shape and --mode in this process, print JSON")
    parser.add_argument("--mode", choices=MODES)
    parser.add_argument("--checkpointing", action="store_true")
    arguments = parser.parse_args()
    if arguments.shape is not None:
        print(json.dumps(measure(arguments)))
        return
    print("shape       mode   recompute  tokens/s  vs rows  peak MiB  vs rows  check")
    for shape in arguments.shapes:
        for checkpointing in (False, True):
            results = {mode: run_child(arguments, shape, mode, checkpointing) for mode in MODES}
            for mode, result in results.items():
                speed = result["rate"] / results["rows"]["rate"]
                memory = result["peak_mib"] / results["rows"]["peak_mib"]
                print(
                    f"{shape:<11} {mode:<6} {checkpointing!s:<9} {result['rate']:>9.1f} {speed:>7.2f}x "
                    f"{result['peak_mib']:>9.0f} {memory:>7.2f}x  {result['check']:.4g}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
