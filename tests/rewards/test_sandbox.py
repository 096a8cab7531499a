"""The sandbox against programs that mean ill. Real processes and namespaces throughout."""

from __future__ import annotations

import os
import platform
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nereus.rewards.sandbox import (
    MAX_OUTPUT_BYTES,
    Outcome,
    Sandbox,
    SandboxError,
    check_sandbox,
    run_program,
)
from nereus.rewards.syscall_filter import ARCHITECTURES, syscall_filter

LIMITS = Sandbox(isolation="limits")
SLEEPER = "import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'"


@pytest.fixture(scope="session", autouse=True)
def sandboxes_are_possible() -> None:
    """Where the machine forbids namespaces there is nothing to test."""
    try:
        check_sandbox(Sandbox())
    except SandboxError as error:
        pytest.skip(f"no sandbox on this machine: {error}")


def run(source: str, *, stdin: str = "", time_s: float = 20, sandbox: Sandbox | None = None) -> Outcome:
    return run_program({"main.py": source}, stdin=stdin, time_s=time_s, sandbox=sandbox or Sandbox())


def printed(source: str, **how: object) -> str:
    outcome = run(source, **how)  # type: ignore[arg-type]
    assert outcome.ending == "exit", outcome
    return outcome.output.decode().strip()


def processes_with(mark: str) -> list[str]:
    """Ids of the processes whose command line has the mark."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if mark.encode() in (entry / "cmdline").read_bytes():
                    found.append(entry.name)
            except OSError:  # it ended meanwhile
                continue
    return found


@pytest.mark.parametrize("sandbox", [Sandbox(), LIMITS], ids=["namespaces", "limits"])
def test_a_program_reads_stdin_and_its_output_and_code_come_back(sandbox: Sandbox) -> None:
    outcome = run("import sys; print(input()[::-1]); sys.exit(3)", stdin="héllo\n", sandbox=sandbox)
    assert outcome == Outcome(output="olléh\n".encode(), ending="exit", code=3)


@pytest.mark.parametrize("sandbox", [Sandbox(), LIMITS], ids=["namespaces", "limits"])
def test_an_endless_loop_is_stopped(sandbox: Sandbox) -> None:
    began_s = time.monotonic()
    assert run("print('on', flush=True)\nwhile True: pass", time_s=1, sandbox=sandbox).ending == "time"
    assert time.monotonic() - began_s < 30  # one second, and starting three processes on a busy machine


def test_a_sleeping_program_is_stopped_and_leaves_no_process() -> None:
    mark = f"mark-{os.getpid()}-{time.monotonic_ns()}"
    source = f"{SLEEPER}, '{mark}'])"
    assert run(source, time_s=1).ending == "time"
    deadline_s = time.monotonic() + 10  # killed already; whoever inherited them has yet to collect them
    while processes_with(mark) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert processes_with(mark) == []


@pytest.mark.parametrize("sandbox", [Sandbox(), LIMITS], ids=["namespaces", "limits"])
def test_memory_above_the_limit_is_refused(sandbox: Sandbox) -> None:
    source = "try:\n    bytearray(1 << 31)\nexcept MemoryError:\n    print('refused')"
    assert printed(source, sandbox=sandbox) == "refused"


def test_a_fork_bomb_gets_as_many_processes_as_allowed_and_no_more() -> None:
    source = """
import os, time
started = 0
try:
    while True:
        if os.fork() == 0:
            time.sleep(60)
        started += 1
except OSError:
    print(started, flush=True)
"""
    started = int(printed(source, sandbox=Sandbox(num_processes=5)))
    assert 3 <= started <= 5  # itself is one; init is counted with an own user only


def test_a_program_that_splits_without_end_is_stopped() -> None:
    source = "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass"
    assert run(source, time_s=2).ending == "time"


def test_files_of_the_user_are_not_there(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("x")
    home = str(Path.home())
    roots = (Path(path).parts for path in (sys.prefix, sys.base_prefix, __file__))
    installed = {parts[2] for parts in roots if parts[1] == "tmp"}  # what the sandbox runs on may lie there
    source = f"""
import os
print(os.path.exists({str(tmp_path)!r}), os.path.exists({__file__!r}), os.path.exists("/etc/passwd"),
      os.path.exists("/proc"), [n for n in os.listdir("/tmp") if n not in {installed!r}],
      [n for n in os.listdir("/") if n in ("home", "var")],
      os.path.exists({home!r} + "/.ssh"))
"""
    assert printed(source) == "False False False False ['main.py'] [] False"


def test_nothing_but_the_work_folder_can_be_written() -> None:
    source = """
for path in ("/x", "/usr/x", "/dev/x", "/etc/x", "/tmp/x"):
    try:
        open(path, "w").write("x")
        print(path)
    except OSError:
        pass
"""
    assert printed(source) == "/tmp/x"


def test_the_work_folder_is_bounded() -> None:
    source = """
written = 0
try:
    for number in range(20):
        with open(f"file{number}", "wb") as file:
            written += file.write(b"x" * (8 << 20))
            file.flush()
except OSError as error:
    print(written >> 20, error.errno)
"""
    mebibytes, error = printed(source).split()
    assert int(mebibytes) <= 64
    assert error == "28"  # no space left on device


def test_there_is_no_network_not_even_to_this_machine() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        source = f"""
import socket
for place in (("127.0.0.1", {port}), ("192.0.2.1", 80)):
    try:
        socket.create_connection(place, timeout=3)
        print("reached", place)
    except OSError as error:
        print(type(error).__name__)
"""
        assert "reached" not in (text := printed(source))
        assert len(text.splitlines()) == 2
        assert "reached" in printed(source, sandbox=LIMITS)  # what the weaker mode means


def test_too_much_output_stops_the_program() -> None:
    outcome = run("while True: print('x' * 1000)")
    assert outcome.ending == "output"
    assert len(outcome.output) == MAX_OUTPUT_BYTES


def test_other_processes_cannot_be_reached() -> None:
    source = f"""
import os, signal
for pid in ({os.getpid()}, {os.getppid()}):
    try:
        os.kill(pid, 0)
        print("there is", pid)
    except ProcessLookupError:
        pass
os.kill(1, signal.SIGKILL)  # init takes no signal from inside
print("still here")
"""
    assert printed(source) == "still here"


def test_killing_everything_in_reach_ends_only_the_program() -> None:
    source = "import os, signal\nfor pid in range(1, 100):\n    os.kill(pid, signal.SIGKILL)"
    outcome = run(f"import os\nif os.fork() == 0:\n    while True: pass\n{source}")
    assert (outcome.ending, outcome.code) == ("exit", -9)


def test_the_environment_is_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HARMLESS", "x")
    for sandbox in (Sandbox(), LIMITS):
        assert printed("import os; print('HARMLESS' in os.environ)", sandbox=sandbox) == "False"


def test_no_descriptor_of_the_owner_is_open_inside() -> None:
    source = """
import os
for fd in range(3, 64):
    try:
        os.fstat(fd)
        print("open", fd)
    except OSError:
        pass
"""
    read, write = os.pipe()
    os.set_inheritable(write, True)
    try:
        assert printed(source) == ""
    finally:
        os.close(read)
        os.close(write)


def test_new_namespaces_mounts_and_uncounted_memory_are_refused() -> None:
    source = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
print(libc.unshare(0x10000000), libc.mount(b"t", b"/tmp", b"tmpfs", 0, None), libc.shmget(0, 4096, 0o1600))
try:
    os.memfd_create("m")
except OSError as error:
    print(error.errno)
"""
    assert printed(source).split() == ["-1", "-1", "-1", "1"]


def test_threads_and_subprocesses_work_inside() -> None:
    source = """
import subprocess, sys, threading
thread = threading.Thread(target=print, args=("thread",), kwargs={"flush": True})
thread.start()
thread.join()
print(subprocess.run([sys.executable, "-c", "print('process')"], capture_output=True, text=True).stdout)
"""
    assert printed(source).split() == ["thread", "process"]


def test_the_sandbox_ends_when_its_owner_is_killed() -> None:
    mark = f"mark-{os.getpid()}-{time.monotonic_ns()}"
    inner = f"{SLEEPER}, '{mark}'])"
    program = f"""
from nereus.rewards.sandbox import Sandbox, run_program
run_program({{"main.py": {inner!r}}}, stdin="", time_s=60, sandbox=Sandbox())
"""
    root = Path(__file__).resolve().parents[2]
    owner = subprocess.Popen([sys.executable, "-c", program], cwd=root)
    deadline_s = time.monotonic() + 30
    while not (found := set(processes_with(mark)) - {str(owner.pid)}) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert found
    owner.kill()
    owner.wait()
    while processes_with(mark) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert processes_with(mark) == []


def test_what_cannot_be_isolated_is_an_error_and_nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nereus.rewards.sandbox.visible_folders", lambda: ["/usr"])  # no interpreter inside
    with pytest.raises(SandboxError, match="FileNotFoundError"):
        run("print('ran')")
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    with pytest.raises(SandboxError, match="no filter of system calls for riscv64"):
        run("print('ran')")


@pytest.mark.parametrize("machine", list(ARCHITECTURES))
def test_a_filter_is_whole_instructions_and_ends_with_allow(machine: str) -> None:
    steps = syscall_filter(machine)
    assert len(steps) % 8 == 0
    assert steps[-8:] == bytes.fromhex("06000000") + (0x7FFF0000).to_bytes(4, "little")
