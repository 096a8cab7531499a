"""DeepSpeed's universal checkpoint as a way to change layout: ZeRO-1 with automatic tensor parallelism.

The state of the same model is saved at one (tp, dp), converted by `ds_to_universal` and loaded at another.
Engine start is left out of the time; a converter process of its own is what DeepSpeed provides, so it is in.
Only changes of tp and dp over all processes can be expressed.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.reshard_cases import CASES as ALL
from benchmarks.reshard_cases import CONFIG, Case

CASES = ("Split tp4 -> 2 x tp2", "Merge 2 x tp2 -> tp4")
LIMIT_S = 400.0


def measure(name: str) -> dict[str, Any]:
    """Wall seconds and bytes (written plus read) of save, conversion and load; or why there are none."""
    if find_spec("deepspeed") is None:
        return {"remark": "deepspeed is not installed"}
    case = next(case for case in ALL if case.name == name)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        start = time.monotonic()
        save_s = _spawn(case, case.old[0], folder, saving=True)
        convert_s = _convert(Path(folder))
        load_s = _spawn(case, case.new[0], folder, saving=False)
        saved, universal = _size(Path(folder) / "step"), _size(Path(folder) / "universal")
        print(f"# {name}: DeepSpeed {time.monotonic() - start:.0f} s in all", flush=True)
    return {
        "wall_s": save_s + convert_s + load_s,
        "best_s": save_s + convert_s + load_s,
        "megabytes": (2 * saved + 2 * universal) / 1e6,
        "remark": f"save {save_s:.1f}, convert {convert_s:.1f}, load {load_s:.1f} s",
    }


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def _convert(folder: Path) -> float:
    """Run the converter; returns its wall seconds."""
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal"]
    command += ["--input_folder", str(folder / "step"), "--output_folder", str(folder / "universal")]
    command += ["--num_extract_workers", "2", "--num_merge_workers", "2", "--inject_missing_state"]
    start = time.perf_counter()
    subprocess.run(
        command, check=True, timeout=LIMIT_S, capture_output=True, env={**os.environ, "DS_ACCELERATOR": "cpu"}
    )
    taken = time.perf_counter() - start
    for file in ("latest", "latest_universal"):
        (folder / file).write_text("universal")
    return taken


def _spawn(case: Case, tp: int, folder: str, *, saving: bool) -> float:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    mp.spawn(_work, (case.processes, port, tp, folder, saving), nprocs=case.processes)
    return float((Path(folder) / "seconds").read_text())


def _work(rank: int, processes: int, port: int, tp: int, folder: str, saving: bool) -> None:
    os.environ |= {
        "DS_ACCELERATOR": "cpu",
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    torch.set_num_threads(1)
    engine = _engine(tp, loading=not saving)
    if saving:
        tokens = torch.randint(0, CONFIG.vocab_size, (1, 8), generator=torch.Generator().manual_seed(0))
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()
    dist.barrier()
    start = time.perf_counter()
    if saving:
        engine.save_checkpoint(folder, tag="step")
    else:
        engine.load_checkpoint(folder, tag="universal")
    dist.barrier()
    if rank == 0:
        (Path(folder) / "seconds").write_text(str(time.perf_counter() - start))
    dist.barrier()
    os._exit(0)  # DeepSpeed's shared-memory helper does not always let the interpreter end


def _engine(tp: int, *, loading: bool) -> Any:
    import deepspeed
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = CONFIG.to_hf()
    model = LlamaForCausalLM(LlamaConfig(**{k: v for k, v in config.items() if k != "architectures"}))
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 1},
        "bf16": {"enabled": True},
        "tensor_parallel": {"autotp_size": tp},
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "checkpoint": {"load_universal": loading},
    }
    engine, *_ = deepspeed.initialize(model=model, config=settings, dist_init_required=True)
    return engine
