"""A seccomp filter: system calls that generated code has no business with fail with EPERM.

Sources: the kernel's seccomp documentation and its system call tables (x86_64, and the generic one of aarch64).
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct

from openrlhf_ebft.evaluation.confinement.kernel import PR_SET_SECCOMP, check, libc

_MODE_FILTER = 2
_LOAD, _JUMP_EQUAL, _JUMP_ANY_BIT, _JUMP_AT_LEAST, _RETURN = 0x20, 0x15, 0x45, 0x35, 0x06
_ALLOW, _FAIL, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_AT_NUMBER, _AT_ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data; low halves of arguments
_CLONE_THREAD = 0x10000
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_X32_BIT = 0x40000000
_CLONE3, _OPENAT2 = 435, 437  # their arguments cannot be seen: libraries fall back to the older calls

_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
# name: (x86_64, aarch64); None where there is no such call
_CALLS: dict[str, tuple[int | None, int | None]] = {
    "socket": (41, 198), "connect": (42, 203), "bind": (49, 200), "listen": (50, 201),
    "fork": (57, None), "vfork": (58, None), "execve": (59, 221), "execveat": (322, 281),
    "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131), "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240), "pidfd_send_signal": (424, 424), "pidfd_open": (434, 434),
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41),
    "chroot": (161, 51), "move_mount": (429, 429), "open_tree": (428, 428), "fsopen": (430, 430),
    "mount_setattr": (442, 442), "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425), "keyctl": (250, 219), "add_key": (248, 217), "request_key": (249, 218),
    "init_module": (175, 105), "finit_module": (313, 273), "kexec_load": (246, 104), "reboot": (169, 142),
    "swapon": (167, 224), "swapoff": (168, 225), "sethostname": (170, 161), "settimeofday": (164, 170),
    "clock_settime": (227, 112), "adjtimex": (159, 171), "shmget": (29, 194), "msgget": (68, 186),
    "semget": (64, 190), "mq_open": (240, 180), "memfd_create": (319, 279), "memfd_secret": (447, 447),
    "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452), "chown": (92, None),
    "fchown": (93, 55), "lchown": (94, None), "fchownat": (260, 54), "setxattr": (188, 5), "lsetxattr": (189, 6),
    "fsetxattr": (190, 7), "removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16),
    "utime": (132, None), "utimes": (235, None), "futimesat": (261, None), "utimensat": (280, 88),
    "setxattrat": (463, 463), "removexattrat": (466, 466), "fsconfig": (431, 431), "fsmount": (432, 432),
    "setpriority": (141, 140), "ioprio_set": (251, 30), "sched_setparam": (142, 118), "sched_setscheduler": (144, 119),
    "sched_setaffinity": (203, 122), "sched_setattr": (314, 274), "migrate_pages": (256, 238),
    "mknod": (133, None), "mknodat": (259, 33), "setuid": (105, 146), "setgid": (106, 144), "setgroups": (116, 159),
    "setreuid": (113, 145), "setregid": (114, 143), "setresuid": (117, 147), "setresgid": (119, 149),
    "setfsuid": (122, 151), "setfsgid": (123, 152), "file_setattr": (469, 469), "move_pages": (279, 239),
    "syslog": (103, 116),
    # With these a program could leave its group of processes and the signal at its parent's death behind.
    "prctl": (157, 167), "setsid": (112, 157), "setpgid": (109, 154),
}  # fmt: skip
_WRITE_CALLS: dict[str, tuple[int | None, int | None]] = {
    "creat": (85, None), "truncate": (76, 45), "unlink": (87, None), "unlinkat": (263, 35), "rename": (82, None),
    "renameat": (264, 38), "renameat2": (316, 276), "mkdir": (83, None), "mkdirat": (258, 34), "rmdir": (84, None),
    "link": (86, None), "linkat": (265, 37), "symlink": (88, None), "symlinkat": (266, 36),
}  # fmt: skip
_CLONE, _OPEN, _OPENAT, _PRLIMIT = (56, 220), (2, None), (257, 56), (302, 261)
_FCNTL, _IOCTL, _SOCKETPAIR = (72, 25), (16, 29), (53, 199)
_OWNER_COMMANDS = 8  # a bit of F_SETOWN, F_SETOWN_EX and F_SETSIG: the kernel sends signals to a handle's owner
_OTHER_IOCTLS = 0xFFFF8000  # all but those of terminals and handles (0x54..): attributes of files, owners of sockets
_NOT_STREAM = 0xE  # bits of the socket types but SOCK_STREAM: a datagram can be sent to a socket of the machine's


def install_filter(*, forbid_writing: bool) -> None:
    """Filters this process's system calls for good. The process must have set no_new_privs.

    No sockets, no new processes (threads are allowed), no signals, no changes of owners, modes, mounts or times.

    Args:
        forbid_writing: also refuse to open a file for writing and to make, rename or remove one.
    Raises:
        OSError: unknown architecture, or the kernel refuses.
    """
    machine = os.uname().machine
    if machine not in _ARCHITECTURES:
        raise OSError(f"seccomp: no table of system calls for {machine}")
    code = b"".join(_program(machine, forbid_writing))
    instructions = ctypes.create_string_buffer(code, len(code))
    program = ctypes.create_string_buffer(struct.pack("@HP", len(code) // 8, ctypes.addressof(instructions)))
    zero = ctypes.c_ulong(0)
    address = ctypes.c_ulong(ctypes.addressof(program))
    check(libc.prctl(PR_SET_SECCOMP, ctypes.c_ulong(_MODE_FILTER), address, zero, zero), "seccomp")


def _program(machine: str, forbid_writing: bool) -> list[bytes]:
    column = list(_ARCHITECTURES).index(machine)
    refused = [pair[column] for pair in _CALLS.values()]
    if forbid_writing:
        refused += [pair[column] for pair in _WRITE_CALLS.values()]
    code = [
        _step(_LOAD, _AT_ARCHITECTURE),
        _step(_JUMP_EQUAL, _ARCHITECTURES[machine], 1, 0),
        _step(_RETURN, _KILL),
        _step(_LOAD, _AT_NUMBER),
    ]
    if machine == "x86_64":  # the x32 calls are the same ones under other numbers
        code += [_step(_JUMP_AT_LEAST, _X32_BIT, 0, 1), _step(_RETURN, _FAIL | errno.ENOSYS)]
    code += _refuse(_CLONE3, errno.ENOSYS)
    if forbid_writing:
        code += _refuse(_OPENAT2, errno.ENOSYS)
    for number in refused:
        if number is not None:
            code += _refuse(number, errno.EPERM)
    code += _by_argument(_CLONE[column], 0, _CLONE_THREAD, refuse_when_set=False)
    code += _by_argument(_PRLIMIT[column], 0, 0xFFFFFFFF, refuse_when_set=True)  # 0 is the process itself
    code += _by_argument(_FCNTL[column], 1, _OWNER_COMMANDS, refuse_when_set=True)
    code += _by_argument(_IOCTL[column], 1, _OTHER_IOCTLS, refuse_when_set=True)
    code += _by_argument(_SOCKETPAIR[column], 1, _NOT_STREAM, refuse_when_set=True)
    if forbid_writing:
        code += _by_argument(_OPEN[column], 1, _WRITING, refuse_when_set=True)
        code += _by_argument(_OPENAT[column], 2, _WRITING, refuse_when_set=True)
    return [*code, _step(_RETURN, _ALLOW)]


def _refuse(number: int, error: int) -> list[bytes]:
    return [_step(_JUMP_EQUAL, number, 0, 1), _step(_RETURN, _FAIL | error)]


def _by_argument(number: int | None, argument: int, bits: int, *, refuse_when_set: bool) -> list[bytes]:
    """Refuses a call by any bit of one argument, and allows it otherwise."""
    if number is None:
        return []
    refuse, allow = _step(_RETURN, _FAIL | errno.EPERM), _step(_RETURN, _ALLOW)
    when_set, when_clear = (refuse, allow) if refuse_when_set else (allow, refuse)
    return [
        _step(_JUMP_EQUAL, number, 0, 4),
        _step(_LOAD, _FIRST_ARGUMENT + 8 * argument),
        _step(_JUMP_ANY_BIT, bits, 0, 1),
        when_set,
        when_clear,
    ]


def _step(code: int, value: int, when_true: int = 0, when_false: int = 0) -> bytes:
    """One instruction of struct sock_filter."""
    return struct.pack("HBBI", code, when_true, when_false, value)
