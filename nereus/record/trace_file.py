"""A trace as Chrome's JSON, which Perfetto opens: complete events of many processes on one clock.

Events are appended as they come, so a run that dies leaves them; Perfetto reads an array that is not closed,
`close` makes it strict JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

TRACE_FILE = "trace.json"


class TraceFile:
    """Writes events of processes (`pid`) and threads or rows (`tid`); microseconds since the trace began."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: IO[str] = path.open("w", encoding="utf-8")
        self._any = False
        self._file.write("[")

    def name(self, pid: int, text: str, tid: int | None = None) -> None:
        """Name a process, or one of its rows."""
        event: dict[str, Any] = {"ph": "M", "pid": pid, "args": {"name": text}}
        event["name"] = "process_name" if tid is None else "thread_name"
        self._write(event | ({} if tid is None else {"tid": tid}))

    def span(
        self,
        pid: int,
        tid: int,
        name: str,
        category: str,
        start_us: float,
        end_us: float,
        args: Mapping[str, object] | None = None,
    ) -> None:
        """One span."""
        self._write(
            {
                "ph": "X",
                "pid": pid,
                "tid": tid,
                "name": name,
                "cat": category,
                "ts": round(start_us, 3),
                "dur": round(max(0.0, end_us - start_us), 3),
                "args": dict(args or {}),
            }
        )

    def close(self) -> None:
        """End the array and the file."""
        self._file.write("\n]\n")
        self._file.close()

    def _write(self, event: Mapping[str, object]) -> None:
        self._file.write((",\n" if self._any else "\n") + json.dumps(event, separators=(",", ":")))
        self._any = True
        self._file.flush()
