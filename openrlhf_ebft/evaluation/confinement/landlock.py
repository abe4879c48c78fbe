"""Landlock: which files a process may read or write, for itself and for ever. Linux 5.13 or newer.

Source: the kernel's documentation of Landlock's system calls (userspace-api/landlock).
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable
from pathlib import Path

from openrlhf_ebft.evaluation.confinement.kernel import check, libc

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # the same on every architecture
_PATH_BENEATH = 1
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR, _TRUNCATE = 1 << 0, 1 << 1, 1 << 2, 1 << 3, 1 << 14
_RIGHTS_BY_VERSION = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}
_ON_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE
_NEEDED_VERSION = 3  # older ones let a process cut files off that it may not write


class _RulesetAttributes(ctypes.Structure):
    _fields_ = (("files", ctypes.c_uint64), ("network", ctypes.c_uint64), ("scoped", ctypes.c_uint64))


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _layout_ = "ms"
    _fields_ = (("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32))


def restrict_files(readable: Iterable[Path], writable: Iterable[Path]) -> int:
    """Leaves this process, and its children, `readable` to read and `writable` to read and write; nothing else.

    The process must have set no_new_privs. Paths that do not exist are left out. Returns the kernel's version of
    Landlock.

    Raises:
        OSError: the kernel has no Landlock, an old one, or refuses.
    """
    version = check(libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), 1), "landlock")
    if version < _NEEDED_VERSION:
        raise OSError(f"landlock: version {version} of the kernel's, {_NEEDED_VERSION} is needed")
    rights = max(value for key, value in _RIGHTS_BY_VERSION.items() if key <= version)
    network = 3 if version >= 4 else 0  # bind and connect of TCP
    scoped = 3 if version >= 6 else 0  # abstract sockets and signals stay inside
    attributes = _RulesetAttributes(rights, network, scoped)
    size = 8 * (3 if version >= 6 else 2 if version >= 4 else 1)
    ruleset = check(libc.syscall(_CREATE_RULESET, ctypes.byref(attributes), ctypes.c_size_t(size), 0), "landlock")
    try:
        for path in readable:
            _allow(ruleset, path, (_EXECUTE | _READ_FILE | _READ_DIR) & rights)
        for path in writable:
            _allow(ruleset, path, rights)
        check(libc.syscall(_RESTRICT_SELF, ruleset, 0), "landlock")
    finally:
        os.close(ruleset)
    return version


def _allow(ruleset: int, path: Path, rights: int) -> None:
    try:
        handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        allowed = rights if path.is_dir() else rights & _ON_FILES
        rule = _PathBeneath(allowed, handle)
        check(libc.syscall(_ADD_RULE, ruleset, _PATH_BENEATH, ctypes.byref(rule), 0), f"landlock rule for {path}")
    finally:
        os.close(handle)
