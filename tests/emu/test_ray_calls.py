"""A private Ray ends with all its processes, and soon, whatever its workers do."""

from __future__ import annotations

import subprocess
import sys

import pytest

FROZEN = """
import os, signal, time
import psutil, ray
from nereus.emu.ray_calls import RAY_FOLDER, end_ray, start_ray

@ray.remote
class Worker:
    def pid(self): return os.getpid()

if __name__ == "__main__":
    start_ray("local", num_gpus=2)
    workers = [Worker.remote() for _ in range(2)]
    pids = ray.get([worker.pid.remote() for worker in workers])
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    waiting = [worker.pid.remote() for worker in workers]
    whole = psutil.Process().children(recursive=True)
    assert len(whole) > len(pids)
    began = time.monotonic()
    for worker in workers:
        ray.kill(worker)
    end_ray()
    took_s = time.monotonic() - began
    _, alive = psutil.wait_procs(whole, timeout=5)
    print(f"{took_s:.2f} s", [" ".join(process.cmdline())[:80] for process in alive])
    assert not alive
    assert not ray.is_initialized()
"""


@pytest.mark.slow
def test_a_private_ray_ends_with_frozen_workers_and_leaves_no_process() -> None:
    done = subprocess.run([sys.executable, "-c", FROZEN], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    print(done.stdout)
