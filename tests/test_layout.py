"""Imports run one way only, and importing the package is cheap."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "nereus"

# A folder may import from folders of a lower level only, or from itself.
LEVELS = {
    "cli": 7,
    "flows": 6,
    "tasks": 5,
    "data": 4,
    "rewards": 4,
    "record": 4,
    "planner": 4,
    "integrations": 4,
    "emu": 3,
    "algorithms": 2,
    "kernels": 1,
    "config": 0,
    "errors": -1,
}
# The pure half of emu: all that the planner may use of it.
PURE_EMU = {
    "decoder",
    "lora",
    "engine_limits",
    "serving",
    "tensor",
    "layout",
    "kinds",
    "unit",
    "operations",
    "placement",
    "reshard",
    "rank_plan",
    "partition",
    "sources",
    "balance",
    "regions",
    "report",
    "lowering",
    "streams",
    "refusals",
    "topology",
    "graph",
    "schedule",
    "chains",
    "derivation",
    "precedence",
    "shard_bytes",
    "chain_time",
    "schedule_problem",
    "certificate",
    "spilling",
    "live_spills",
    "list_schedule",
    "target",
    "transition_text",
    "transition_svg",
}
ONLY_IN = {
    "prefect": lambda parts: parts[0] in {"flows", "tasks", "cli"},
    "ray": lambda parts: (
        parts in (("emu", "cluster"), ("emu", "ray_calls"), ("emu", "worker"), ("cli", "doctor"))
    ),
    "triton": lambda parts: parts[0] == "kernels",
}


def modules() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py"))


def imports(path: Path) -> list[str]:
    """Every absolute module name that the file imports, at any depth of the code."""
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.append(node.module or "")
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_run_one_way(path: Path) -> None:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    if parts == ("__init__",):
        return
    level = LEVELS[parts[0]]
    for name in imports(path):
        pieces = name.split(".")
        if pieces[0] == "nereus" and len(pieces) > 1 and pieces[1] in LEVELS and pieces[1] != parts[0]:
            assert LEVELS[pieces[1]] < level, f"{path} imports {name}, which lies above or beside it"
            if parts[0] == "planner" and pieces[1] == "emu" and len(pieces) > 2:
                assert pieces[2] in PURE_EMU, (
                    f"{path} imports {name}: the planner uses only the pure half of emu"
                )
        allowed = ONLY_IN.get(pieces[0])
        assert allowed is None or allowed(parts), f"{path} imports {pieces[0]}"


def loaded_by(statement: str) -> set[str]:
    """The top-level modules that a fresh interpreter holds after the statement."""
    program = f"import sys; {statement}; print(' '.join({{m.split('.')[0] for m in sys.modules}}))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT
    )
    return set(done.stdout.split())


def test_importing_nereus_loads_neither_torch_ray_nor_prefect() -> None:
    assert not loaded_by("import nereus, nereus.errors") & {"torch", "ray", "prefect", "transformers"}


def test_pure_half_loads_neither_torch_ray_nor_prefect() -> None:
    names = [f"nereus.emu.{name}" for name in sorted(PURE_EMU) if (PACKAGE / "emu" / f"{name}.py").exists()]
    planner = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in modules()
        if path.relative_to(PACKAGE).parts[0] == "planner" and path.name != "__init__.py"
    ]
    statement = "import " + ", ".join([*names, *planner, "nereus"])
    assert not loaded_by(statement) & {"torch", "ray", "prefect", "triton"}


def test_the_flow_of_a_deployment_is_cheap_to_import() -> None:
    assert not loaded_by("import nereus.flows.campaign") & {"torch", "ray", "scipy"}
