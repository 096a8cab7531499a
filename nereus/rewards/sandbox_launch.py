"""The program between a sandbox's owner and the program inside: takes everything away, then runs it.

    owner --- job (JSON on a descriptor) --> launcher -- unshare, mounts, pivot_root
                                                │ fork: the first process of a PID namespace
                                                ▼
    owner <-- status (JSON on a descriptor) -- init -- fork --> program: limits, execve

The standard library only, run as a file with `python -I -S`. Linux 5.14 or newer. Whoever of the three dies
takes along all to its right: the launcher ends with the owner, init with the launcher, and the kernel ends a
PID namespace with its init.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import resource
import signal
import stat
import sys
from collections.abc import Mapping
from typing import Any, NoReturn

# <linux/sched.h>, <linux/mount.h>, <linux/prctl.h>
NEW_MOUNTS, NEW_UTS, NEW_IPC = 0x00020000, 0x04000000, 0x08000000
NEW_USERS, NEW_PIDS, NEW_NETWORK = 0x10000000, 0x20000000, 0x40000000
NO_SUID, NO_DEVICES, BIND, RECURSIVE, PRIVATE, DETACH = 0x2, 0x4, 0x1000, 0x4000, 0x40000, 0x2
DIE_WITH_PARENT, DUMPABLE, SECCOMP, FILTER, NO_NEW_PRIVILEGES = 1, 4, 22, 2, 38
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
MOUNT_SETATTR, AT_RECURSIVE, HERE = 442, 0x8000, -100
READ_ONLY, ATTR_NO_SUID, ATTR_NO_DEVICES = 0x1, 0x2, 0x4

FIRST_UID = 1_000_000_000  # of nobody else: the kernel counts processes by user, and never those of root
DEVICES = ("null", "zero", "full", "random", "urandom")
FILE_BYTES = 16 << 20
NUM_FILES = 64
WORK = "/tmp"
ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": WORK,
    "TMPDIR": WORK,
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}

libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Run one job. What can't be set up is told on the status descriptor; nothing runs then."""
    job_file, status = int(sys.argv[1]), int(sys.argv[2])
    os.set_inheritable(status, False)
    with os.fdopen(job_file) as file:
        job: dict[str, Any] = json.load(file)
    try:
        _must(libc.prctl(DIE_WITH_PARENT, signal.SIGKILL), "follow the owner's death")
        if os.getppid() != job["owner"]:
            sys.exit(1)
        if job["isolated"]:
            _isolated(job, status)
        else:
            _limited(job, status)
    except (OSError, KeyError) as error:
        _tell(status, {"failed": f"{type(error).__name__}: {error}"})


def _isolated(job: Mapping[str, Any], status: int) -> None:
    user = FIRST_UID + os.getpid() if os.geteuid() == 0 else os.geteuid()
    group = user if os.geteuid() == 0 else os.getegid()
    _enter_namespaces()
    _build_root(job, user, group)
    init = os.fork()
    if init:
        os.waitpid(init, 0)
        return
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(group, group, group)
        os.setresuid(user, user, user)
    _must(libc.prctl(DIE_WITH_PARENT, signal.SIGKILL), "follow the launcher's death")
    _must(libc.prctl(DUMPABLE, 0), "close init's memory to the program")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _limited(job, status)
    os._exit(0)


def _enter_namespaces() -> None:
    apart = NEW_MOUNTS | NEW_UTS | NEW_IPC | NEW_PIDS | NEW_NETWORK
    if os.geteuid() == 0:
        _must(libc.unshare(apart), "make namespaces as root (needs CAP_SYS_ADMIN)")
    else:
        user, group = os.geteuid(), os.getegid()
        _must(libc.unshare(apart | NEW_USERS), "make namespaces (needs unprivileged user namespaces)")
        for name, text in (
            ("uid_map", f"{user} {user} 1"),
            ("setgroups", "deny"),
            ("gid_map", f"{group} {group} 1"),
        ):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    _must(libc.mount(b"none", b"/", None, RECURSIVE | PRIVATE, None), "detach the mounts")


def _build_root(job: Mapping[str, Any], user: int, group: int) -> None:
    """A root of system folders, read-only, with an empty work folder; the old root is gone afterwards."""
    root: str = job["folder"]
    _mount("tmpfs", root, NO_SUID | NO_DEVICES, b"size=1m,mode=0755")
    os.makedirs(root + WORK)
    _mount(
        "tmpfs",
        root + WORK,
        NO_SUID | NO_DEVICES,
        f"size={job['disk_bytes']},nr_inodes=4096,mode=0700,uid={user},gid={group}".encode(),
    )
    for path in job["folders"]:  # after the work folder is there: an installation may lie below it
        _bind(path, root)
    for name in DEVICES:
        _bind(f"/dev/{name}", root, devices=True)
    for name, text in job["files"].items():
        with open(f"{root}{WORK}/{name}", "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(file.name, 0o644)
    _set_read_only(root, recursive=False)
    os.chdir(root)
    # "." twice puts the old root on top of the new one, from where it is taken off; see pivot_root(2).
    _must(libc.syscall(PIVOT_ROOT[platform.machine()], b".", b"."), "change the root")
    _must(libc.umount2(b".", DETACH), "take the old root away")
    os.chdir(WORK)


def _bind(path: str, root: str, *, devices: bool = False) -> None:
    """Show a file or folder of the machine at the same place, read-only; a link is made anew."""
    if not os.path.lexists(path):
        return
    place = root + path
    os.makedirs(os.path.dirname(place), exist_ok=True)
    if os.path.lexists(place) and not os.path.isdir(place):
        return
    if os.path.islink(path):
        os.symlink(os.readlink(path), place)
        return
    if stat.S_ISDIR(os.stat(path).st_mode):
        os.makedirs(place, exist_ok=True)
    else:
        os.close(os.open(place, os.O_CREAT | os.O_WRONLY, 0o644))
    _must(libc.mount(path.encode(), place.encode(), None, BIND | RECURSIVE, None), f"bind {path}")
    if not devices:
        _set_read_only(place, recursive=True)


class _Attributes(ctypes.Structure):
    """`struct mount_attr`."""

    _fields_ = [(name, ctypes.c_uint64) for name in ("set", "clear", "propagation", "user_namespace")]


def _set_read_only(path: str, *, recursive: bool) -> None:
    wanted = _Attributes(READ_ONLY | ATTR_NO_SUID | (ATTR_NO_DEVICES if recursive else 0), 0, 0, 0)
    flags = AT_RECURSIVE if recursive else 0
    done = libc.syscall(
        MOUNT_SETATTR, HERE, path.encode(), flags, ctypes.byref(wanted), ctypes.sizeof(wanted)
    )
    _must(done, f"make {path} read-only")


def _mount(kind: str, place: str, flags: int, options: bytes) -> None:
    _must(libc.mount(kind.encode(), place.encode(), kind.encode(), flags, options), f"mount {kind}")


def _limited(job: Mapping[str, Any], status: int) -> None:
    """Run the program under its limits, wait for it, tell how it ended."""
    program = os.fork()
    if program == 0:
        _become_program(job, status)
    ended = -1
    while ended != program:  # init also collects what the program left behind
        ended, code = os.waitpid(-1, 0)
    _tell(status, {"code": os.waitstatus_to_exitcode(code)})


def _become_program(job: Mapping[str, Any], status: int) -> NoReturn:
    try:
        if not job["isolated"]:
            _must(libc.prctl(DIE_WITH_PARENT, signal.SIGKILL), "follow the launcher's death")
            os.chdir(job["folder"])
        _must(libc.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0), "give up new privileges")
        for kind, limit in (
            (resource.RLIMIT_CPU, job["cpu_s"]),
            (resource.RLIMIT_AS, job["memory_bytes"]),
            (resource.RLIMIT_FSIZE, FILE_BYTES),
            (resource.RLIMIT_NOFILE, NUM_FILES),
            (resource.RLIMIT_CORE, 0),
            (resource.RLIMIT_MSGQUEUE, 0),
        ):
            resource.setrlimit(kind, (limit, limit))
        if job["isolated"]:  # elsewhere it would count all that the user runs
            most = job["num_processes"] + 1  # and init
            resource.setrlimit(resource.RLIMIT_NPROC, (most, most))
            _install_filter(bytes.fromhex(job["filter"]))
        home = {} if job["isolated"] else {"HOME": job["folder"], "TMPDIR": job["folder"]}
        _tell(status, {"started": True})
        os.execve(job["command"][0], job["command"], ENVIRONMENT | home)
    except BaseException as error:
        _tell(status, {"failed": f"{type(error).__name__}: {error}"})
    os._exit(1)


class _Filter(ctypes.Structure):
    """`struct sock_fprog`."""

    _fields_ = [("length", ctypes.c_ushort), ("steps", ctypes.c_char_p)]


def _install_filter(steps: bytes) -> None:
    program = _Filter(len(steps) // 8, steps)
    _must(libc.prctl(SECCOMP, FILTER, ctypes.byref(program)), "install the filter of system calls")


def _must(result: int, what: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"cannot {what}: {os.strerror(number)}")


def _tell(status: int, message: Mapping[str, object]) -> None:
    os.write(status, json.dumps(message).encode() + b"\n")


if __name__ == "__main__":
    main()
