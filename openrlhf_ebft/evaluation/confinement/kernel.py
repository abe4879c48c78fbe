"""System calls that the standard library does not offer."""

from __future__ import annotations

import ctypes
import os

libc = ctypes.CDLL(None, use_errno=True)

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_SECCOMP = 22
PR_CAPBSET_DROP = 24
PR_SET_NO_NEW_PRIVS = 38
_CAPABILITY_VERSION_3 = 0x20080522


def check(result: int, what: str) -> int:
    """Returns `result`, or raises OSError with the kernel's reason when it is negative."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def prctl(option: int, argument: int, what: str) -> None:
    """Raises OSError when the kernel refuses."""
    zero = ctypes.c_ulong(0)
    check(libc.prctl(option, ctypes.c_ulong(argument), zero, zero, zero), what)


def drop_capabilities() -> None:
    """Gives up every capability, for good: a root user's process becomes an ordinary one with root's files."""
    capability = 0
    while libc.prctl(PR_CAPBSET_DROP, ctypes.c_ulong(capability), 0, 0, 0) == 0:
        capability += 1
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    check(libc.capset(header, (ctypes.c_uint32 * 6)()), "capset")
