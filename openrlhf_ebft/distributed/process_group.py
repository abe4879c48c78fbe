"""Lets the ranks of a trainer meet."""

from __future__ import annotations

import deepspeed
import torch
import torch.distributed as dist

from openrlhf_ebft.distributed.device import communication_backend


def join_ranks(device: torch.device) -> None:
    """Joins the process group of RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, unless this process is in one."""
    if dist.is_initialized():
        return
    # DeepSpeed would compile an extension for sums between CPU processes of one machine at its first use. A process
    # killed meanwhile leaves a lock behind on which every later start waits without end; gloo needs no compiler.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend=communication_backend(device))
