"""Memory of this host that could still be taken."""

from __future__ import annotations

from pathlib import Path

import psutil

CGROUP = Path("/sys/fs/cgroup")


def free_host_bytes() -> int:
    """By all processes together, within the limit of the container if there is one."""
    free = int(psutil.virtual_memory().available)
    limit, used = CGROUP / "memory.max", CGROUP / "memory.current"
    if limit.is_file() and used.is_file() and (text := limit.read_text().strip()) != "max":
        free = min(free, int(text) - int(used.read_text()))
    return max(0, free)
