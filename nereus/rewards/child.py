"""One process of a user's function as its parent sees it: start, send a line, read lines, kill.

Non-blocking on both pipes, so that no child, however stuck, can stop the loop that watches all of them.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

WORKER = Path(__file__).with_name("worker.py")
CHUNK_BYTES = 1 << 16
END_S = 1.0  # a worker ends by itself when its pipe closes, unless the user's code holds it


class Child:
    """A process that runs `worker.py`. The owner polls `stdout` for reading, and `stdin` while `unsent` is
    not empty.
    """

    def __init__(
        self,
        *,
        target: str,
        kind: str,
        batched: bool,
        environment: Mapping[str, str],
        arguments: Mapping[str, object],
    ) -> None:
        # A session of its own: Ctrl-C does not reach it, and a kill takes along what the user's code started.
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=dict(environment),
            start_new_session=True,
            bufsize=0,
        )
        assert self._process.stdin is not None, "Popen was asked for pipes"
        assert self._process.stdout is not None, "Popen was asked for pipes"
        self.stdin, self.stdout = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self.stdin, False)
        os.set_blocking(self.stdout, False)
        self.unsent = b""
        self._unread = b""
        start = {"target": target, "kind": kind, "batched": batched, "arguments": arguments}
        self.send(start | {"sys_path": [*sys.path]})

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def send(self, message: Mapping[str, object]) -> None:
        """Queue one line and write what the pipe takes now."""
        self.unsent += json.dumps(message).encode() + b"\n"
        self.flush()

    def flush(self) -> None:
        """Write what the pipe takes. A closed pipe loses the rest: `receive` then reports the end."""
        try:
            while self.unsent:
                self.unsent = self.unsent[os.write(self.stdin, self.unsent[:CHUNK_BYTES]) :]
        except BlockingIOError:
            pass
        except BrokenPipeError:
            self.unsent = b""

    def receive(self) -> dict[str, Any] | None:
        """The next whole line, or None if there is none yet. Raises EOFError, with the exit code, at the
        end.
        """
        while b"\n" not in self._unread:
            try:
                chunk = os.read(self.stdout, CHUNK_BYTES)
            except BlockingIOError:
                return None
            if not chunk:
                raise EOFError(f"the process ended with code {self.kill()}")
            self._unread += chunk
        line, _, self._unread = self._unread.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        return message

    def end(self) -> None:
        """Close the request pipe, so that the worker leaves its loop; kill it if it is still there after
        `END_S`.
        """
        assert self._process.stdin is not None, "Popen was asked for pipes"
        self._process.stdin.close()
        with selectors.DefaultSelector() as selector:
            selector.register(self.stdout, selectors.EVENT_READ)
            selector.select(END_S)
        self.kill()

    def kill(self) -> int:
        """End this process and whatever it started, by the id of its group; returns its exit code.

        The group is killed before the process is waited for: until then nobody else can own the id.
        """
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        code = self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        return code
