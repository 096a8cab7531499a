"""Runs a program that nobody trusts: own namespaces, limits on everything, and what it printed comes back.

Under `namespaces` the program sees system folders read-only, the Python installation, an empty `/tmp` of its
own, and nothing else: no file of the user, no network, no process of others, no variable of the environment.
Under `limits` it has the limits on time, memory and file size and the empty environment alone.
"""

from __future__ import annotations

import json
import os
import platform
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import IO, Literal

from nereus.rewards.syscall_filter import ARCHITECTURES, syscall_filter

LAUNCHER = Path(__file__).with_name("sandbox_launch.py")
SYSTEM_FOLDERS = (
    "/usr",
    "/bin",
    "/sbin",
    "/lib",
    "/lib32",
    "/lib64",
    "/etc/ld.so.cache",
    "/etc/alternatives",
)
MAX_OUTPUT_BYTES = 1 << 20
DISK_BYTES = 64 << 20
CHUNK_BYTES = 1 << 16
START_LIMIT_S = 60.0  # three processes have to start, perhaps on a busy machine

Isolation = Literal["namespaces", "limits"]
Ending = Literal["exit", "time", "output"]
"""How a program ended: by itself or by a limit of the kernel; stopped at the time limit; stopped because it
printed too much.
"""


class SandboxError(Exception):
    """The sandbox cannot be made on this machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sandbox:
    """What a program may use. Memory is the address space of each of its processes."""

    isolation: Isolation = "namespaces"
    memory_bytes: int = 1 << 30
    num_processes: int = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """`output` is what it printed on stdout; `code` as of `subprocess`, None where it was stopped."""

    output: bytes
    ending: Ending
    code: int | None = None


def run_program(files: Mapping[str, str], *, stdin: str, time_s: float, sandbox: Sandbox) -> Outcome:
    """Run `main.py` of `files` with the Python that runs this, for at most `time_s` seconds, counted from its
    start; its processes may take as many seconds of CPU time each. Whatever it started has ended when this
    returns.

    Under `limits` only what stayed in its process group has. Raises SandboxError when the sandbox cannot be
    made; nothing has run then.
    """
    folder = tempfile.mkdtemp(prefix="nereus-sandbox-")
    try:
        if sandbox.isolation == "limits":
            for name, text in files.items():
                Path(folder, name).write_text(text, encoding="utf-8")
        job: dict[str, object] = {
            "owner": os.getpid(),
            "isolated": sandbox.isolation == "namespaces",
            "folder": folder,
            "folders": visible_folders(),
            "files": files,
            "command": [sys.executable, "-P", "-s", "-B", "main.py"],
            "cpu_s": ceil(time_s),
            "memory_bytes": sandbox.memory_bytes,
            "num_processes": sandbox.num_processes,
            "disk_bytes": DISK_BYTES,
            "filter": "",
        }
        if sandbox.isolation == "namespaces":
            job["filter"] = _filter().hex()
        return _launched(job, stdin, time_s)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def visible_folders() -> list[str]:
    """What of the machine's files a program sees: system libraries, and the installation of this Python."""
    seen = [*SYSTEM_FOLDERS]
    for prefix in dict.fromkeys((os.path.realpath(sys.base_prefix), sys.base_prefix, sys.prefix)):
        if not any(prefix == folder or prefix.startswith(f"{folder}/") for folder in seen):
            seen.append(prefix)
    return seen


def check_sandbox(sandbox: Sandbox) -> None:
    """Run a program that does nothing. Raises SandboxError when that is not possible here."""
    outcome = run_program({"main.py": "print('in')"}, stdin="", time_s=60, sandbox=sandbox)
    if outcome.output != b"in\n":
        raise SandboxError(f"a program that prints 'in' gave {outcome}")


def _filter() -> bytes:
    if (machine := platform.machine()) not in ARCHITECTURES:
        raise SandboxError(f"no filter of system calls for {machine}; there are {', '.join(ARCHITECTURES)}")
    return syscall_filter(machine)


def _launched(job: Mapping[str, object], stdin: str, time_s: float) -> Outcome:
    status_read, status_write = os.pipe()
    with (
        _file(json.dumps(job)) as job_file,
        _file(stdin) as stdin_file,
        os.fdopen(status_read, "rb") as status,
    ):
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(LAUNCHER), str(job_file.fileno()), str(status_write)],
            stdin=stdin_file,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            pass_fds=(job_file.fileno(), status_write),
            start_new_session=True,
            env={},
        )
        os.close(status_write)
        try:
            if not _told(status, START_LIMIT_S).get("started"):
                raise SandboxError(f"the launcher did not start the program in {START_LIMIT_S:g} s")
            output, ending = _watched(process, time.monotonic() + time_s)
        finally:
            # The group is killed before the launcher is waited for: until then nobody else can own the id.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        code = _told(status, 0.0).get("code") if ending == "exit" else None
    return Outcome(output=output, ending=ending, code=None if code is None else int(code))


def _told(status: IO[bytes], limit_s: float) -> dict[str, int]:
    """The launcher's next message; nothing at its end or after the limit. Raises SandboxError if it
    failed.
    """
    with selectors.DefaultSelector() as selector:
        selector.register(status, selectors.EVENT_READ)
        line = status.readline() if selector.select(limit_s) else b""
    message: dict[str, int] = json.loads(line or b"{}")
    if "failed" in message:
        raise SandboxError(str(message["failed"]))
    return message


def _watched(process: subprocess.Popen[bytes], deadline_s: float) -> tuple[bytes, Ending]:
    """What was printed until all who hold stdout have closed it, and the launcher has ended with it."""
    assert process.stdout is not None, "Popen was asked for a pipe"
    output = bytearray()
    with process.stdout, selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while True:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or not selector.select(left_s):
                return bytes(output), "time"
            chunk = os.read(process.stdout.fileno(), CHUNK_BYTES)
            if not chunk:
                break
            output += chunk
            if len(output) > MAX_OUTPUT_BYTES:
                return bytes(output[:MAX_OUTPUT_BYTES]), "output"
    try:
        process.wait(max(0.0, deadline_s - time.monotonic()))
    except subprocess.TimeoutExpired:
        return bytes(output), "time"
    return bytes(output), "exit"


def _file(text: str) -> IO[bytes]:
    """A file without a name, at its beginning."""
    file = tempfile.TemporaryFile()  # noqa: SIM115  # the caller closes it
    file.write(text.encode())
    file.seek(0)
    return file
