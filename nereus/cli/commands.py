"""The commands of `nereus`: a line for each, and where its function is. None is imported before use."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command or a group of commands."""

    name: str
    target: str
    """`package.module:attribute`; the attribute is a function, or a typer.Typer for a group."""
    line: str
    """What it does, for `nereus --help`."""
    examples: tuple[str, ...] = ()


COMMANDS = (
    Command(
        name="run",
        target="nereus.cli.run:run",
        line="Run a campaign from its YAML file.",
        examples=(
            "nereus run examples/count/grpo.yaml",
            "nereus run examples/count/grpo.yaml steps=10 name=short optimizer.learning_rate=3e-5",
            'nereus run examples/count/grpo.yaml "plan.actor_training={tp: 4}" cluster.gpus=4',
            "nereus run examples/count/grpo.yaml --resume",
        ),
    ),
    Command(
        name="validate",
        target="nereus.cli.validate:validate",
        line="Check a campaign without starting anything.",
        examples=(
            "nereus validate examples/count/grpo.yaml",
            "nereus validate examples/count/grpo.yaml plan.actor_training.tp=4",
        ),
    ),
    Command(
        name="plan",
        target="nereus.cli.plan:plan",
        line="Find the best parallelism for a job, and say why.",
        examples=(
            "nereus plan --model meta-llama/Llama-3.1-8B --cluster 4x8xH200 --response-len 1k,2k,4k",
            "nereus plan --model Qwen/Qwen3-32B --cluster 8x8xH100 --algo grpo --reward none --space general",
            "nereus plan --model ./llama --cluster 2x8xH100+4x8xA100-80 --fix critic.gpu=A100-80 --explain",
            "nereus plan --model llama-3.1-8b --cluster 2x8xH100 --compare tp=4,pp=1 --compare actor.tp=2",
            "nereus plan --model llama-3.1-8b --cluster 2x8xH100 --sweep response-len=1k..32k",
        ),
    ),
    Command(
        name="explain",
        target="nereus.cli.explain:explain",
        line="Show how a campaign would move to another plan.",
        examples=(
            "nereus explain examples/count/grpo.yaml plan.actor_training.tp=1 plan.actor_training.dp=2",
            "nereus explain campaign.yaml plan.actor_generation.tp=8 --memory-gb 70 --svg transition.svg",
        ),
    ),
    Command(
        name="calibrate",
        target="nereus.cli.calibrate:calibrate",
        line="Measure this machine, and what a job on it has taught, for the planner.",
        examples=(
            "nereus calibrate",
            "nereus calibrate examples/count/grpo.yaml --out calibration",
            "nereus plan --model llama-3.1-8b --cluster calibration/profile.yaml",
        ),
    ),
    Command(
        name="replay",
        target="nereus.cli.replay:replay",
        line="Play a job over a trace of GPUs and lengths, policy against policy.",
        examples=(
            "nereus replay spot --model llama-3.1-8b --cluster 8x8xH100 --policy payback,fixed,oracle",
            "nereus replay p3trace.csv --model llama-3.1-70b --cluster 32x8xH100 --plot timeline.png",
            "nereus replay steady --model llama-3.1-8b --cluster 2x8xH100 --mean-len 512..8k --decisions",
        ),
    ),
    Command(
        name="reshard",
        target="nereus.cli.reshard:reshard",
        line="Cut a stored model for another layout.",
        examples=(
            "nereus reshard Qwen2.5-7B/ checkpoints/ --to tp=4,pp=2 --dry-run",
            "nereus reshard dcp/step-100 checkpoints/ --to tp=2 --model Qwen2.5-7B/",
            "nereus reshard verl/checkpoints/gsm8k/run checkpoints/ --to tp=2",
        ),
    ),
    Command(
        name="export",
        target="nereus.cli.export:export",
        line="Write a stored model as another trainer loads it.",
        examples=(
            "nereus export runs/gsm8k/checkpoints verl-run/ --for verl --ranks 8 --model Qwen2.5-7B/",
            "nereus export runs/gsm8k/checkpoints ckpt/ --for openrlhf --model Qwen2.5-7B/",
        ),
    ),
    Command(
        name="adopt",
        target="nereus.cli.adopt:adopt",
        line="Turn a verl or OpenRLHF job into a campaign file.",
        examples=(
            "nereus adopt verl ppo_trainer.yaml data.train_batch_size=256 -o campaign.yaml",
            "nereus adopt openrlhf train_ppo.sh -o campaign.yaml",
        ),
    ),
    Command(
        name="watch",
        target="nereus.cli.watch:watch",
        line="Watch a run, from its folder.",
        examples=("nereus watch demo-grpo", "nereus watch /runs/llama-3.1-8b-ppo --once"),
    ),
    Command(
        name="pause",
        target="nereus.cli.intervene:pause",
        line="Pause a running campaign before its next step; it keeps its GPUs.",
        examples=("nereus pause demo-grpo",),
    ),
    Command(
        name="suspend",
        target="nereus.cli.intervene:suspend",
        line="Suspend a running campaign: checkpoint, free the GPUs, end.",
        examples=("nereus suspend demo-grpo",),
    ),
    Command(
        name="resume",
        target="nereus.cli.intervene:resume",
        line="Resume a paused or suspended campaign, changed if you like.",
        examples=(
            "nereus resume demo-grpo",
            "nereus resume demo-grpo learning_rate=1e-6 steps=2000",
            'nereus resume demo-grpo max_gpus=8 "forbid=[actor.training=tp8pp1]"',
            'nereus resume demo-grpo "plan.actor_training={tp: 4, dp: 2}"',
        ),
    ),
    Command(
        name="deploy",
        target="nereus.cli.deploy:deploy",
        line="Put campaigns on a Prefect server: pool, limit, deployments, schedules.",
        examples=(
            "nereus deploy --gpus 8",
            'nereus deploy examples/count/grpo.yaml --cron "0 2 * * *" --max-steps 10',
            "nereus deploy campaign.yaml steps=2000 --every 6h --dry-run",
        ),
    ),
    Command(
        name="config",
        target="nereus.cli.config:app",
        line="Look up keys of the configuration, show a whole one, print its schema.",
    ),
    Command(
        name="doctor",
        target="nereus.cli.doctor:doctor",
        line="Check this machine, and say what to do about what is missing.",
        examples=("nereus doctor",),
    ),
)
