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


def rows_attention(device: torch.device) -> str:
    """transformers' attention implementation for plain causal rows: flash-attn where it can run."""
    if device.type == "cuda":
        from transformers.utils import is_flash_attn_2_available

        if is_flash_attn_2_available():
            return "flash_attention_2"
    return "sdpa"


def set_compute_threads(threads: int) -> int:
    """Sets this process's CPU threads (0: every core that it may run on) and returns the number."""
    count = threads or len(os.sched_getaffinity(0))
    torch.set_num_threads(count)
    return count
