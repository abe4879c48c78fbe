"""The only place where a device or a communication backend is chosen."""

from __future__ import annotations

import os

import torch


def local_device() -> torch.device:
    """The accelerator that this process may use (Ray shows each actor only its own), else the CPU."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def communication_backend(device: torch.device) -> str:
    """Name of the torch.distributed backend for tensors on `device`."""
    return "nccl" if device.type == "cuda" else "gloo"


def plain_attention(mode: str, device: torch.device) -> str:
    """transformers' attention implementation to load a model with, for a value of model.attention.

    Rows are plain causal sequences: flash-attn where it can run. Split and flex attention replace the one that was
    loaded. Raises ValueError for flex on the CPU, where its kernels have no backward pass.
    """
    if mode == "flex" and device.type == "cpu":
        raise ValueError("model.attention = flex needs a GPU, but this process has none: set it to split or sdpa")
    if mode == "rows" and device.type == "cuda":
        from transformers.utils import is_flash_attn_2_available

        if is_flash_attn_2_available():
            return "flash_attention_2"
    return "sdpa" if mode in ("rows", "split", "flex") else mode


def set_compute_threads(threads: int) -> int:
    """Sets this process's CPU threads (0: every core that it may run on) and returns the number."""
    count = threads or len(os.sched_getaffinity(0))
    torch.set_num_threads(count)
    return count
