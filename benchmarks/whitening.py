"""Whitening and rewards of many groups: the package against the formula written out, one group at a time.

    python benchmarks/whitening.py

The loop takes one SVD and one D x D matrix per group (algorithms: feature space, tol 1e-5) and then alignment,
diversity and the feature-matching loss. Both must agree to 1e-4 in the same run, or the benchmark fails. Times are CPU
seconds of one thread, the best of the repeats, so that a busy machine does not change the ratio.
"""

import argparse
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from openrlhf_ebft.core.gram import group_gram
from openrlhf_ebft.core.rewards import compute_rewards
from openrlhf_ebft.core.whitening import whiten_embeddings_batched

NUM_GROUPS, NUM_SAMPLES, TOL = 128, 4, 1e-5


class Size(NamedTuple):
    """One line of the table."""

    name: str
    dim: int
    loop_groups: int  # groups that the loop does; its time is scaled to NUM_GROUPS
    loop_repeats: int  # runs of the loop, the best counts
    whiten_goal: int
    rewards_goal: int


SIZES = (
    Size("SmolLM2-135M (3 x 576)", 1_728, 128, 10, 25, 40),
    Size("1.5B class (3 x 1536)", 4_608, 128, 2, 200, 400),
    Size("8B class (3 x 4096)", 12_288, 8, 2, 300, 600),
)


def whiten_one(phi: Tensor, gt: Tensor) -> tuple[Tensor, Tensor]:
    """One group, as the formula says: phi (N, D), gt (1, D)."""
    u, s, _ = torch.linalg.svd(phi.T, full_matrices=False)
    inverse = torch.where(s > TOL * s.max(), 1 / s, torch.zeros_like(s))
    w = u @ torch.diag(inverse) @ u.T
    return phi @ w, gt @ w


def loop_whitening(phi: Tensor, gt: Tensor) -> tuple[Tensor, Tensor]:
    """All groups, one after the other."""
    pairs = [whiten_one(phi[i], gt[i : i + 1]) for i in range(len(phi))]
    return torch.stack([pair[0] for pair in pairs]), torch.stack([pair[1] for pair in pairs])


def loop_rewards(phi: Tensor, gt: Tensor) -> tuple[Tensor, Tensor]:
    """Whitened alignment and diversity (reward) and the unwhitened feature-matching loss, group by group."""
    rewards, losses = [], []
    for i in range(len(phi)):
        white, white_gt = whiten_one(phi[i], gt[i : i + 1])
        alignment = torch.cosine_similarity(white, white_gt.expand_as(white))
        products = white @ white.T
        diversity = (products.sum(1) - products.diagonal()) / (NUM_SAMPLES - 1)
        rewards.append(2 * alignment - 2 * diversity)
        unit = torch.nn.functional.normalize(torch.cat([phi[i], gt[i : i + 1]]), dim=-1)
        losses.append((unit[:-1].mean(0) - unit[-1]).square().sum())
    return torch.stack(rewards), torch.stack(losses)


def package_whitening(phi: Tensor, gt: Tensor) -> tuple[Tensor, Tensor]:
    """The package's whitening of all groups."""
    return whiten_embeddings_batched(phi, gt.unsqueeze(1), TOL)


def package_rewards(phi: Tensor, gt: Tensor) -> tuple[Tensor, Tensor]:
    """The package's rewards of all groups, products included."""
    rewards = compute_rewards(group_gram(phi, gt), whiten_tol=TOL)
    return rewards.reward, rewards.cfm


def best_time(work: Callable[[], object], repeats: int) -> float:
    """Shortest CPU time of the process in seconds."""
    times = []
    for _ in range(repeats):
        start = time.process_time()
        work()
        times.append(time.process_time() - start)
    return min(times)


def compare(
    size: Size, loop: Callable, package: Callable, phi: Tensor, gt: Tensor, repeats: int
) -> tuple[float, float]:
    """(seconds of the loop scaled to all groups, seconds of the package), after checking that they agree."""
    part = size.loop_groups
    for right, ours in zip(loop(phi[:part], gt[:part]), package(phi[:part], gt[:part]), strict=True):
        difference = (right - ours).abs().max().item() / right.abs().max().item()
        if difference > 1e-4:
            raise SystemExit(f"{size.name}: results differ by {difference:.1e} of their scale")
    slow = best_time(lambda: loop(phi[:part], gt[:part]), size.loop_repeats) * NUM_GROUPS / part
    return slow, best_time(lambda: package(phi, gt), repeats)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=20, help="runs of the package's version, the best counts")
    parser.add_argument("--sizes", type=int, nargs="+", default=[size.dim for size in SIZES], help="D of the lines")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, 1 thread, {NUM_GROUPS} groups of {NUM_SAMPLES}, float32", flush=True)
    for size in (size for size in SIZES if size.dim in arguments.sizes):
        torch.manual_seed(0)
        phi, gt = torch.randn(NUM_GROUPS, NUM_SAMPLES, size.dim), torch.randn(NUM_GROUPS, size.dim)
        for what, loop, package, goal in (
            ("whitening", loop_whitening, package_whitening, size.whiten_goal),
            ("rewards", loop_rewards, package_rewards, size.rewards_goal),
        ):
            slow, fast = compare(size, loop, package, phi, gt, arguments.repeats)
            scaled = "" if size.loop_groups == NUM_GROUPS else " (scaled)"
            print(
                f"{size.name:24} {what:10} loop {slow:8.3f} s{scaled:9} package {fast:8.4f} s "
                f"ratio {slow / fast:6.0f}x (goal {goal}x)",
                flush=True,
            )


if __name__ == "__main__":
    main()
