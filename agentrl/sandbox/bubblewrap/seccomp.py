"""System calls that code in a sandbox may not make, as a filter for the kernel (classic BPF, no library)."""

from __future__ import annotations

import os
import platform
import struct
from functools import cache

from agentrl.errors import SandboxUnavailable

EPERM, ENOSYS, EAFNOSUPPORT = 1, 38, 97
ALLOW, KILL, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
LOAD, JUMP_EQUAL, JUMP_GREATER_EQUAL, JUMP_ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
NUMBER, ARCH, ARG0, ARG1 = 0, 4, 16, 24  # offsets in struct seccomp_data; the low words, both machines little-endian
NAMESPACES = 0x7E020080  # CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET, NEWTIME
FAMILIES = (1, 2, 10, 16)  # AF_UNIX, AF_INET, AF_INET6, AF_NETLINK (of its own network namespace)
TERMINAL = (0x5412, 0x541C)  # TIOCSTI, TIOCLINUX: typing into the terminal of whoever started us

# name: (number on x86_64, number on aarch64); from the kernel's syscall tables. None: it does not exist there.
DENIED: dict[str, tuple[int | None, int | None]] = {
    # kernel programs, tracing, other processes
    "bpf": (321, 280), "perf_event_open": (298, 241), "ptrace": (101, 117), "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271), "pidfd_getfd": (438, 438), "kcmp": (312, 272), "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    "fanotify_init": (300, 262), "lookup_dcookie": (212, 18), "syslog": (103, 116), "process_madvise": (440, 440),
    # keys
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
    # file systems and namespaces
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "unshare": (272, 97),
    "setns": (308, 268), "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430),
    "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442),
    "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265), "quotactl": (179, 60), "quotactl_fd": (443, 443),
    "swapon": (167, 224), "swapoff": (168, 225), "acct": (163, 89), "uselib": (134, None), "ustat": (136, None),
    "sysfs": (139, None), "nfsservctl": (180, 42), "vhangup": (153, 58),
    # the machine
    "reboot": (169, 142), "kexec_load": (246, 104), "kexec_file_load": (320, 294), "init_module": (175, 105),
    "finit_module": (313, 273), "delete_module": (176, 106), "iopl": (172, None), "ioperm": (173, None),
    "modify_ldt": (154, None), "settimeofday": (164, 170), "clock_settime": (227, 112), "adjtimex": (159, 171),
    "clock_adjtime": (305, 266), "sethostname": (170, 161), "setdomainname": (171, 162), "_sysctl": (156, None),
    # where memory and processes live: the limits on processors would be undone
    "sched_setaffinity": (203, 122), "mbind": (237, 235), "set_mempolicy": (238, 237), "migrate_pages": (256, 238),
    "move_pages": (279, 239), "memfd_secret": (447, 447),
}  # fmt: skip

# Memory that no process's size shows: denied where no cgroup counts it. The first has a fall-back in every library.
UNCOUNTED: dict[str, tuple[int | None, int | None]] = {
    "memfd_create": (319, 279), "shmget": (29, 194), "msgget": (68, 186), "semget": (64, 190),
}  # fmt: skip

MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
CLONE, CLONE3, SOCKET, SOCKETPAIR, IOCTL = (56, 220), (435, 435), (41, 198), (53, 199), (16, 29)


@cache
def program(*, counted: bool, machine: str | None = None) -> bytes:
    """The filter for this machine: what is denied gives EPERM (ENOSYS where libraries then try something else).

    `counted`: a cgroup limits memory. SandboxUnavailable on a machine whose system calls have no table here.
    """
    name = machine or platform.machine()
    if name not in MACHINES:
        known = " and ".join(MACHINES)
        raise SandboxUnavailable(
            f"The bubblewrap sandbox knows the system calls of {known}, not of {name}; use Docker."
        )
    column, arch = MACHINES[name]
    code = [_op(LOAD, ARCH), _op(JUMP_EQUAL, arch, 1, 0), _op(RETURN, KILL), _op(LOAD, NUMBER)]
    if name == "x86_64":  # the x32 numbers are a second way to every call
        code += [_op(JUMP_GREATER_EQUAL, 0x40000000, 0, 1), _op(RETURN, ERRNO | ENOSYS)]
    code += [*_deny(CLONE3[column], ENOSYS)]  # its flags lie in memory, where no filter can look; glibc then uses clone
    for numbers in [*DENIED.values(), *(() if counted else UNCOUNTED.values())]:
        if (number := numbers[column]) is not None:
            code += _deny(number, EPERM)
    code += _if(CLONE[column], [_op(LOAD, ARG0), _op(JUMP_ANY_BIT, NAMESPACES, 0, 1), _op(RETURN, ERRNO | EPERM)])
    for call in (SOCKET, SOCKETPAIR):
        code += _if(call[column], [_op(LOAD, ARG0), *_one_of(FAMILIES, EAFNOSUPPORT)])
    code += _if(IOCTL[column], [_op(LOAD, ARG1), *(line for value in TERMINAL for line in _deny(value, EPERM))])
    return b"".join([*code, _op(RETURN, ALLOW)])


def filter_fd(*, counted: bool) -> int:
    """An open pipe from which the filter can be read once; bwrap's --seccomp takes it."""
    read, write = os.pipe()
    os.write(write, program(counted=counted))  # about 1.5 kB: a pipe holds 64
    os.close(write)
    return read


def _op(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("<HBBI", code, if_true, if_false, value)


def _deny(number: int, error: int) -> list[bytes]:
    return [_op(JUMP_EQUAL, number, 0, 1), _op(RETURN, ERRNO | error)]


def _if(number: int, then: list[bytes]) -> list[bytes]:
    """`then` for this call; it ends with allowing the call where nothing in it returns."""
    return [_op(JUMP_EQUAL, number, 0, len(then) + 1), *then, _op(RETURN, ALLOW)]


def _one_of(values: tuple[int, ...], error: int) -> list[bytes]:
    jumps = [_op(JUMP_EQUAL, value, len(values) - index, 0) for index, value in enumerate(values)]
    return [*jumps, _op(RETURN, ERRNO | error)]
