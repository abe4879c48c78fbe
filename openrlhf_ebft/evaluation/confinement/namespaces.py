"""Namespaces of its own for a process: other processes, the network and mounts are out of its sight."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from openrlhf_ebft.evaluation.confinement.kernel import check, libc

_NEWNS, _NEWUTS, _NEWIPC, _NEWUSER, _NEWPID, _NEWNET = (1 << bit for bit in (17, 26, 27, 28, 29, 30))
_PRIVATE_TREE = (1 << 14) | (1 << 18)  # MS_REC | MS_PRIVATE
_NO_DEVICES = 2 | 4 | 8  # MS_NOSUID | MS_NODEV | MS_NOEXEC


def enter_namespaces() -> None:
    """Moves this process to new namespaces; its next child is process 1 of a new process namespace.

    Raises:
        OSError: the kernel refuses, as in many containers.
    """
    user, group = os.getuid(), os.getgid()
    check(libc.unshare(_NEWUSER | _NEWNS | _NEWPID | _NEWNET | _NEWIPC | _NEWUTS), "unshare")
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1")


def mount_scratch(folder: Path, size_bytes: int) -> None:
    """Puts an empty file system of limited size, in memory, over `folder`, for this process and its children alone.

    Raises:
        OSError: the kernel refuses.
    """
    check(libc.mount(b"none", b"/", None, ctypes.c_ulong(_PRIVATE_TREE), None), "mount")
    options = f"size={size_bytes},nr_inodes=4096,mode=700".encode()
    target = os.fsencode(folder)
    check(libc.mount(b"tmpfs", target, b"tmpfs", ctypes.c_ulong(_NO_DEVICES), options), "mount")
