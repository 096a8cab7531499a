"""A campaign file becomes a config, or a message: place, key, value, rule, remedy."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from nereus.config import CampaignConfig, GrpoConfig, PpoConfig
from nereus.config.load import load_campaign
from nereus.errors import ConfigError

Write = Callable[[str], Path]
BASE = """\
name: count
steps: 30
models:
  actor: model
prompts:
  source: {kind: python, function: "prompts.py:prompts"}
reward: {kind: python, function: "reward.py:score"}
algorithm:
  kind: grpo
  normalize_std: true
optimizer:
  learning_rate: 1e-4
cluster: {gpus: 4}
plan:
  actor_training: {tp: 2}
"""


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write_text(text: str) -> Path:
        path = tmp_path / "job" / "campaign.yaml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return path

    return write_text


def mistakes(path: Path, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_campaign(path, overrides)
    return str(caught.value).splitlines()


def test_a_campaign_file_is_read(write: Write) -> None:
    config = load_campaign(write(BASE))
    assert isinstance(config.algorithm, GrpoConfig)
    assert config.optimizer.learning_rate == 1e-4
    assert config.plan.stage("actor.generation").text == "tp2 pp1 dp1"


def test_files_count_from_the_folder_of_the_campaign(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(BASE)
    monkeypatch.chdir(path.parent.parent)
    config = load_campaign(Path("job/campaign.yaml"))
    assert config.models.actor == str(path.parent / "model")
    assert config.reward.model_dump()["function"] == f"{path.parent / 'reward.py'}:score"
    assert config.prompts.source.model_dump()["function"] == f"{path.parent / 'prompts.py'}:prompts"


def test_overrides_and_the_output_count_from_the_current_folder(
    write: Write, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = write(BASE + "output: results\n")
    monkeypatch.chdir(tmp_path)
    config = load_campaign(path, ["models.actor=other", "models.critic=~/critic"])
    assert config.models.actor == str(tmp_path / "other")
    assert config.models.critic == os.path.expanduser("~/critic")
    assert config.run_folder == tmp_path / "results" / "count"
    assert load_campaign(write(BASE)).run_folder == tmp_path / "runs" / "count"


def test_a_function_in_a_package_is_not_a_path(write: Write) -> None:
    config = load_campaign(write(BASE), ["reward.function=my_rewards.math:score"])
    assert config.reward.model_dump()["function"] == "my_rewards.math:score"


def test_overrides_are_typed_by_yaml_and_the_last_wins(write: Write) -> None:
    config = load_campaign(
        write(BASE),
        [
            "steps=3",
            "batch.samples=4",
            "batch.samples=2",
            "optimizer.learning_rate=2e-5",
            "prompts.shuffle=false",
            "algorithm.dual_clip=null",
            "plan.actor_generation={tp: 1, dp: 2}",
            "plan.actor_generation.gpus=[2, 3]",
        ],
    )
    assert (config.steps, config.batch.samples, config.optimizer.learning_rate) == (3, 2, 2e-5)
    assert config.prompts.shuffle is False
    assert config.algorithm.dual_clip is None
    assert config.plan.stage("actor.generation").gpu_ids == (2, 3)


def test_an_override_can_replace_a_whole_part(write: Write) -> None:
    config = load_campaign(write(BASE), ["algorithm={kind: ppo, gamma: 0.9}"])
    assert config.algorithm == PpoConfig(gamma=0.9)


def test_an_unknown_key_names_the_nearest_in_the_whole_tree(write: Write) -> None:
    path = write(BASE + "learning_rate: 1.0\noptimiser: {}\nbatch: {lr: 1, prompt: 3, batch_size: 8}\n")
    lines = mistakes(path)
    assert f"{path}:16: learning_rate: unknown key. Remedy: did you mean optimizer.learning_rate?" in lines
    assert f"{path}:17: optimiser: unknown key. Remedy: did you mean optimizer?" in lines
    assert f"{path}:18: batch.lr: unknown key. Remedy: did you mean optimizer.learning_rate?" in lines
    assert f"{path}:18: batch.prompt: unknown key. Remedy: did you mean batch.prompts?" in lines
    assert f"{path}:18: batch.batch_size: unknown key. Remedy: did you mean batch.prompts?" in lines


def test_an_unknown_key_like_no_other_lists_the_known_ones(write: Write) -> None:
    (line,) = mistakes(write(BASE + "checkpoint: {zzz: 1}\n"))
    assert "known keys here: every_steps, keep_last" in line


def test_a_key_of_another_kind_names_its_kind(write: Write) -> None:
    (line,) = mistakes(write(BASE), "algorithm.kind=ppo")
    assert "algorithm.normalize_std: unknown key" in line
    assert "belongs to algorithm.kind grpo, gspo and cispo; take it out" in line


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("batch.samples=0", "batch.samples: 0; must be greater than or equal to 1"),
        ("steps=true", "steps: true; must be a valid integer"),
        ('steps="8"', 'steps: "8"; must be a valid integer. Remedy: leave out the quotes'),
        ("steps=2.5", "steps: 2.5; must be a valid integer"),
        ("name=7", 'name: 7; must be a valid string. Remedy: quote it: "7"'),
        ("name=a/b", "name: \"a/b\"; must match pattern '^[A-Za-z0-9][A-Za-z0-9._-]*$'"),
        ("prompts.shuffle=no", 'prompts.shuffle: "no"; must be a valid boolean. Remedy: write true or false'),
        (
            "algorithm.dual_clip=none",
            'algorithm.dual_clip: "none"; must be a valid number. Remedy: write null',
        ),
        ("cluster.timeout_s=.inf", "cluster.timeout_s: Infinity; must be a finite number"),
        ("cluster.device=cpus", "\"cpus\"; must be 'auto', 'cpu' or 'cuda'. Remedy: did you mean cpu?"),
        ("models.precision=fp8", "models.precision: \"fp8\"; must be 'fp32', 'bf16' or 'fp16'"),
        ("algorithm.kind=gppo", "algorithm.kind: \"gppo\"; must be one of 'grpo', 'ppo', 'remax', "),
        ("reward={}", "reward.kind: absent; must be one of 'python', 'reasoning_gym', 'code', "),
        ("models={}", "models.actor: absent; this key is required. Remedy: add it: The policy to train."),
        ("name.x=1", "cannot set name.x: name is 'count'; only a mapping has keys below it"),
        ("steps", "cannot read 'steps'; an override has the form key.sub=value"),
        ("a..b=1", "an override has the form key.sub=value"),
        ("steps=[", "not valid YAML"),
        ("batch.samples=1", "grpo compares the samples of a prompt"),
        ("plan.actor_training.tp=8", "raise cluster.gpus to at least 8"),
        ("plan.actor_training.gpus=[1]", "plan.actor_training: gpus=[1] but tp*pp*ep*cp*dp = 2"),
        ("cluster.max_gpus=1", "max_gpus = 1 but gpus = 4"),
        ("cluster.max_gpus=9", "without adaptation a job takes no further GPUs"),
        ("cluster.schedule=[{before_step: 2, max_gpus: 2}]", "a job without adaptation keeps its GPUs"),
        (
            "cluster.schedule=[{before_step: 5, max_gpus: 2}, {before_step: 5, max_gpus: 4}]",
            "before steps [5, 5]; give them in rising order",
        ),
    ],
)
def test_a_bad_value_says_key_value_rule_and_remedy(write: Write, override: str, expected: str) -> None:
    (line,) = mistakes(write(BASE), override)
    assert expected in line


def test_a_job_that_adapts_has_no_changes_beforehand(write: Write) -> None:
    change = "changes=[{before_step: 2, plan: {actor_training: {tp: 1}}}]"
    (line,) = mistakes(write(BASE), "adaptation={}", change)
    assert "changes and adaptation are both given" in line


def test_a_schedule_of_gpus_holds_from_its_steps_on_and_never_exceeds_the_most(write: Write) -> None:
    schedule = "cluster.schedule=[{before_step: 3, max_gpus: 2}, {before_step: 6, max_gpus: 8}]"
    cluster = load_campaign(write(BASE), ["adaptation={}", "plan={}", schedule]).cluster
    assert [cluster.most_at(step) for step in (0, 2, 3, 5, 6, 9)] == [4, 4, 2, 2, 4, 4]


def test_all_mistakes_are_told_at_once_in_the_order_of_the_file(write: Write) -> None:
    path = write(
        BASE.replace("steps: 30", "steps: 0").replace("tp: 2", "tp: x").replace("gpus: 4", "gpus: 0")
    )
    lines = mistakes(path)
    assert [line.split(":")[1] for line in lines] == ["2", "13", "15"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "not a campaign: empty"),
        ("- 1\n", "not a campaign: a list"),
        ("a: [1\n", "campaign.yaml:2: not valid YAML"),
        ("a: 1\n---\nb: 2\n", "expected a single document"),
        (BASE + "steps: 4\n", "campaign.yaml:16: steps is given twice: first in line 2"),
        (
            BASE.replace("tp: 2", "tp: 2, tp: 4"),
            "plan.actor_training.tp is given twice",
        ),
        ("a: &x [*x]\n", "contains itself"),
    ],
)
def test_broken_yaml_is_refused_with_its_line(write: Write, text: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_campaign(write(text))
    assert expected in str(caught.value)


def test_an_absent_file_names_its_neighbours(write: Write) -> None:
    path = write(BASE)
    with pytest.raises(ConfigError, match=r"no such file\. Remedy: its folder has campaign\.yaml"):
        load_campaign(path.with_name("campain.yaml"))
    with pytest.raises(ConfigError, match="cannot read"):
        load_campaign(path.parent)


def test_a_config_survives_yaml(write: Write) -> None:
    config = load_campaign(
        write(BASE + "output: /results\n"),
        ["algorithm.kl={coefficient: 1e-3}", "sampling.stop_token_ids=[1, 2]"],
    )
    again = load_campaign(write(yaml.safe_dump(config.model_dump(mode="json"))))
    assert again == config
    assert CampaignConfig.model_validate_json(config.model_dump_json()) == config
