"""A seccomp filter for the sandbox: no way to new namespaces, mounts, or memory that no limit counts.

A program in a user namespace of its own could mount a tmpfs without a size; memory of `memfd_create` and of
System V segments counts in no limit on address space. The filter is classic BPF over `struct seccomp_data`
(Linux: Documentation/userspace-api/seccomp_filter.rst), as bytes that the launcher installs.
"""

from __future__ import annotations

import struct
from errno import ENOSYS, EPERM

# <linux/audit.h> and the system call tables
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
REFUSED = {
    "x86_64": {
        "shmget": 29,
        "ptrace": 101,
        "pivot_root": 155,
        "mount": 165,
        "add_key": 248,
        "keyctl": 250,
        "unshare": 272,
        "perf_event_open": 298,
        "setns": 308,
        "memfd_create": 319,
        "bpf": 321,
        "userfaultfd": 323,
        "io_uring_setup": 425,
        "fsopen": 430,
        "memfd_secret": 447,
    },
    "aarch64": {
        "mount": 40,
        "pivot_root": 41,
        "unshare": 97,
        "ptrace": 117,
        "shmget": 194,
        "add_key": 217,
        "keyctl": 219,
        "perf_event_open": 241,
        "setns": 268,
        "memfd_create": 279,
        "bpf": 280,
        "userfaultfd": 282,
        "io_uring_setup": 425,
        "fsopen": 430,
        "memfd_secret": 447,
    },
}
CLONE = {"x86_64": 56, "aarch64": 220}
CLONE3 = 435  # its flags lie in memory, which a filter can't read; libc then uses clone
NEW_NAMESPACES = 0x7E020080  # every CLONE_NEW* flag
X32 = 0x40000000  # the second table of x86_64

LOAD, JUMP_EQUAL, JUMP_AT_LEAST, JUMP_ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
NUMBER, ARCHITECTURE, FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data
ALLOW, KILL, ERROR = 0x7FFF0000, 0x80000000, 0x00050000


def syscall_filter(machine: str) -> bytes:
    """The filter of `platform.machine()` as `struct sock_filter[]`. Raises KeyError for other machines than
    x86_64 and aarch64.
    """
    program = [
        _step(LOAD, ARCHITECTURE),
        _step(JUMP_EQUAL, ARCHITECTURES[machine], 1, 0),
        _step(RETURN, KILL),
        _step(LOAD, NUMBER),
        *_if(JUMP_EQUAL, CLONE3, ERROR | ENOSYS),
    ]
    if machine == "x86_64":
        program += _if(JUMP_AT_LEAST, X32, ERROR | ENOSYS)
    for number in REFUSED[machine].values():
        program += _if(JUMP_EQUAL, number, ERROR | EPERM)
    program += [
        _step(JUMP_EQUAL, CLONE[machine], 0, 3),
        _step(LOAD, FIRST_ARGUMENT),
        *_if(JUMP_ANY_BIT, NEW_NAMESPACES, ERROR | EPERM),
        _step(RETURN, ALLOW),
    ]
    return b"".join(program)


def _if(test: int, value: int, result: int) -> list[bytes]:
    """End with `result` where the test holds, else go on."""
    return [_step(test, value, 0, 1), _step(RETURN, result)]


def _step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("<HBBI", code, if_true, if_false, value)
