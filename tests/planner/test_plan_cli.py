"""`nereus plan` by itself: output, JSON, picture, mistakes, and what it loads."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer
import yaml
from typer.testing import CliRunner, Result

from nereus.cli.commands import COMMANDS
from nereus.cli.plan import plan
from nereus.config import PlanConfig
from nereus.errors import ConfigError, Infeasible, ModelError, NereusError
from nereus.planner.calibrate import Calibrator
from nereus.planner.calibration_store import System, save

JOB = ["--model", "llama-3.1-8b", "--cluster", "2x8xH100", "--batch", "128", "--response-len", "512,1k,2k"]
CHEAP = ["--runner-ups", "0"]


def tiny_model(folder: Path) -> Path:
    """A model folder that only the planner can use: a config and no weights."""
    folder.mkdir()
    shape = {
        "model_type": "llama",
        "vocab_size": 512,
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "intermediate_size": 176,
    }
    (folder / "config.json").write_text(json.dumps(shape))
    return folder


def run(*words: str) -> Result:
    app = typer.Typer()
    app.command()(plan)
    return CliRunner().invoke(app, list(words), env={"COLUMNS": "160", "NO_COLOR": "1"})


def test_plan_is_shown_with_memory_stages_and_proof() -> None:
    result = run(*JOB)
    assert result.exit_code == 0, result.output
    for word in (
        "s a step",
        "actor.generation",
        "critic.training",
        "Memory of one GPU",
        "Bottleneck",
        "Runner-ups",
        "Optimal in the model",
        "generation",
        "usable",
    ):
        assert word in result.output


def test_json_holds_the_plan_its_ranks_and_the_reasons() -> None:
    result = run(*JOB, "--json", "--runner-ups", "1", "--compare", "tp=4,pp=1")
    tree = json.loads(result.stdout)
    stages = {item["model_stage"]: item for item in tree["plan"]["assignments"]}
    assert len(stages) == 6
    for item in stages.values():
        assert len(item["ranks"]) == item["tp"] * item["pp"] * item["dp"] == item["num_gpus"]
        assert sum(item["latency_terms_s"].values()) == pytest.approx(item["latency_s"])
    assert tree["plan"]["proof"]["lower_bound_s"] == tree["plan"]["step_s"]
    assert len(tree["runner_ups"]) == 1
    assert {family["verdict"] for family in tree["families"]} >= {"slower", "too big"}
    assert tree["compare"]["tp=4,pp=1"]["step_s"] >= tree["plan"]["step_s"]


def test_yaml_is_the_plan_of_a_campaign() -> None:
    result = run(*JOB, "--yaml")
    tree = yaml.safe_load(result.stdout)
    plan_config = PlanConfig.model_validate(tree["plan"])
    assert plan_config.stage("critic.inference") == plan_config.stage("critic.training")
    shared = json.loads(run(*JOB, *CHEAP, "--json", "--share", "critic").stdout)["plan"]["assignments"]
    for item in shared:
        config = plan_config.stage(item["model_stage"])
        assert (config.tp, config.pp, config.dp) == (item["tp"], item["pp"], item["dp"])
        assert list(config.gpu_ids) == item["ranks"]


def test_comparison_that_does_not_fit_says_why() -> None:
    result = run(*JOB, *CHEAP, "--compare", "actor.training.tp=1,actor.training.pp=1")
    assert result.exit_code == 0, result.output
    assert "actor.training needs" in " ".join(result.output.split())


def test_fixed_choice_and_other_models_are_taken(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "tiny")
    words = [
        *JOB,
        *CHEAP,
        "--json",
        "--fix",
        "actor.generation.tp=2",
        "--critic",
        str(folder),
        "--reward",
        "none",
    ]
    tree = json.loads(run(*words).stdout)
    stages = {item["model_stage"]: item for item in tree["plan"]["assignments"]}
    assert stages["actor.generation"]["tp"] == 2
    assert "reward.inference" not in stages
    assert stages["critic.training"]["persistent_bytes"] < 1e8 < stages["actor.training"]["persistent_bytes"]


def test_calibration_of_a_job_changes_the_figures(tmp_path: Path) -> None:
    slow = Calibrator().observed("gemm", [1.0] * 50, [2.0] * 50)
    path = save(tmp_path, System(hardware="H100", engine="torch", model="llama-3.1-8b"), slow)
    words = [*JOB, *CHEAP, "--json"]
    plain = json.loads(run(*words).stdout)["plan"]["step_s"]
    learned = json.loads(run(*words, "--calibration", str(path)).stdout)["plan"]["step_s"]
    assert learned > plain * 1.05
    moved = path.rename(tmp_path / "other.json")
    assert "give it back its name" in str(run(*words, "--calibration", str(moved)).exception)
    moved.write_text("{}")
    assert "cannot read --calibration" in str(run(*words, "--calibration", str(moved)).exception)


@pytest.mark.parametrize(
    "words",
    [
        ["--algo", "grpo"],
        ["--algo", "remax", "--schedule", "one-step-off"],
        ["--algo", "grpo", "--reference", "none", "--reward", "none"],
    ],
)
def test_other_algorithms_have_no_critic(words: list[str]) -> None:
    tree = json.loads(run(*JOB, *CHEAP, "--json", *words).stdout)
    stages = [item["model_stage"] for item in tree["plan"]["assignments"]]
    assert {"actor.generation", "actor.training"} <= set(stages)
    assert not [name for name in stages if name.startswith("critic")]


def test_sweep_writes_a_picture_and_lists_the_points(tmp_path: Path) -> None:
    path = tmp_path / "sweep.png"
    result = run(*JOB, "--sweep", "response-len=1k..4k", "--plot", str(path))
    assert result.exit_code == 0, result.output
    assert path.read_bytes().startswith(b"\x89PNG")
    for value in ("1024", "1448", "2048", "2896", "4096"):
        assert value in result.output


EXAMPLES = next(command.examples for command in COMMANDS if command.name == "plan")


@pytest.mark.parametrize("line", EXAMPLES)
def test_examples_of_the_help_work(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tiny_model(tmp_path / "llama")
    words = shlex.split(line.replace("1k..32k", "1k..2k"))
    assert words[:2] == ["nereus", "plan"]
    result = run(*words[2:])
    assert result.exit_code == 0, result.exception


def test_help_teaches_every_option() -> None:
    output = run("--help").output
    for option in (
        "--model",
        "--cluster",
        "--response-len",
        "--fix",
        "--compare",
        "--sweep",
        "--json",
        "--space",
    ):
        assert option in output


@pytest.mark.parametrize(
    ("words", "kind", "message"),
    [
        (["--model", "llama-9b"], ConfigError, "unknown model 'llama-9b'"),
        (["--model", "./nowhere"], ModelError, "nowhere"),
        (["--cluster", "8xH900"], ConfigError, "H900"),
        (["--cluster", "lots"], ConfigError, "lots"),
        (["--cluster", "nowhere.yaml"], ConfigError, "nowhere.yaml"),
        (["--algo", "dpo"], ConfigError, "ppo, grpo, remax"),
        (["--response-len", "1k,2k"], ConfigError, "mean,p95,max"),
        (["--response-len", "4k,2k,1k"], ConfigError, "mean <= p95 <= max"),
        (["--response-len", "long"], ConfigError, "number of tokens"),
        (["--prompt-len", "0"], ConfigError, "number of tokens"),
        (["--space", "all"], ConfigError, "pow2, general"),
        (["--schedule", "later"], ConfigError, "sync, one-step-off, async"),
        (["--share", "reward"], ConfigError, "actor and the critic are trained"),
        (["--turns", "often"], ConfigError, "never, auto, always"),
        (["--placement", "here"], ConfigError, "colocated, disaggregated"),
        (["--schedule", "async", "--placement", "colocated"], ConfigError, "GPUs of its own"),
        (["--fix", "tp"], ConfigError, "choice=value"),
        (["--fix", "actor.tp=3"], ConfigError, "take one of 1, 2, 4, 8"),
        (["--compare", ","], ConfigError, "fixes nothing"),
        (["--sweep", "speed=1..2"], ConfigError, "response-len, prompt-len, batch"),
        (["--sweep", "batch=64..8"], ConfigError, "must rise"),
        (["--sweep", "batch=8..16", "--plot", "no/such/folder.png"], ConfigError, "does not exist"),
        (["--algo", "grpo", "--critic", "llama-3.1-8b"], ConfigError, "grpo has no critic"),
        (["--model", "llama-3.1-405b"], Infeasible, "Remedy: .*GPUs"),
    ],
)
def test_mistakes_are_named(words: list[str], kind: type[NereusError], message: str) -> None:
    given = [*JOB, *CHEAP]
    for name, value in zip(words[::2], words[1::2], strict=True):
        if name in given:
            given[given.index(name) + 1] = value
        else:
            given += [name, value]
    error = run(*given).exception
    assert isinstance(error, kind), error
    assert message.split(".*")[-1] in str(error)


def test_a_plan_loads_no_torch_ray_prefect_or_matplotlib() -> None:
    program = (
        "import sys, typer; from nereus.cli.plan import plan\n"
        "app = typer.Typer(); app.command()(plan)\n"
        f"app({[*JOB, *CHEAP, '--json']!r}, standalone_mode=False)\n"
        "heavy = {'torch', 'ray', 'prefect', 'matplotlib', 'transformers', 'scipy', 'pandas'}\n"
        "assert not heavy & {name.split('.')[0] for name in sys.modules}, heavy & set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "NO_PROXY": "*", "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
