"""The options of `nereus plan`, with their help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

_WORK, _SPACE, _SHOW = "The work", "What may be chosen", "What is shown"

Model = Annotated[
    str,
    typer.Option(
        help="The actor: a built-in name (meta-llama/Llama-3.1-8B, Qwen/Qwen3-32B, ...) or a folder with a "
        "config.json. The other models have its shape unless named.",
        show_default=False,
        rich_help_panel=_WORK,
    ),
]
Cluster = Annotated[
    str,
    typer.Option(
        help="Nodes x GPUs a node x kind, kinds joined by +: 4x8xH200, 2x8xH100+4x8xA100-80; or a YAML file.",
        show_default=False,
        rich_help_panel=_WORK,
    ),
]
Algo = Annotated[str, typer.Option(help="ppo, grpo or remax.", rich_help_panel=_WORK)]
PromptLen = Annotated[str, typer.Option(help="Tokens of a prompt, e.g. 1k.", rich_help_panel=_WORK)]
ResponseLen = Annotated[
    str,
    typer.Option(help="Tokens of the responses: mean,p95,max, or one length for all.", rich_help_panel=_WORK),
]
Batch = Annotated[int, typer.Option(min=1, help="Prompts a step.", rich_help_panel=_WORK)]
Samples = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Responses to a prompt; by default 1, for grpo 8.",
        show_default=False,
        rich_help_panel=_WORK,
    ),
]
MiniBatches = Annotated[int, typer.Option(min=1, help="Optimizer steps an epoch.", rich_help_panel=_WORK)]
Epochs = Annotated[int, typer.Option(min=1, help="Passes over the batch.", rich_help_panel=_WORK)]
Critic = Annotated[
    str | None,
    typer.Option(help="Another shape for the critic.", show_default=False, rich_help_panel=_WORK),
]
Reference = Annotated[
    str | None,
    typer.Option(
        help="Another shape for the reference policy; none: no KL term.",
        show_default=False,
        rich_help_panel=_WORK,
    ),
]
Reward = Annotated[
    str | None,
    typer.Option(
        help="Another shape for the reward model; none: a rule gives the reward.",
        show_default=False,
        rich_help_panel=_WORK,
    ),
]
CalibrationFile = Annotated[
    Path | None,
    typer.Option(
        "--calibration",
        help="What was learned from measured times on this system, as a job saved it.",
        show_default=False,
        rich_help_panel=_WORK,
    ),
]
ScheduleName = Annotated[
    str,
    typer.Option(
        "--schedule",
        help="sync: the stages follow one another. one-step-off, async: generation runs beside the rest.",
        rich_help_panel=_SPACE,
    ),
]
PlacementName = Annotated[
    str,
    typer.Option(
        "--placement",
        help="colocated: generation takes turns with the rest on the same GPUs. disaggregated: it has its "
        "own. auto: whichever is faster.",
        rich_help_panel=_SPACE,
    ),
]
TurnsName = Annotated[
    str,
    typer.Option(
        "--turns",
        help="never: the models of a stage run side by side on GPUs of their own. always: one after another "
        "on the same GPUs. auto: whichever is faster.",
        rich_help_panel=_SPACE,
    ),
]
Share = Annotated[
    list[str] | None,
    typer.Option(
        help="A model, actor or critic, that must serve and train with one layout. Repeatable.",
        show_default=False,
        rich_help_panel=_SPACE,
    ),
]
SpaceName = Annotated[
    str,
    typer.Option(
        "--space",
        help="pow2: powers of two. general: any dp, any divisor of the layers as pp.",
        rich_help_panel=_SPACE,
    ),
]
FixedChoices = Annotated[
    list[str] | None,
    typer.Option(
        "--fix",
        help="A choice made beforehand, [model[.stage].]choice=value: actor.generation.tp=2, "
        "critic.gpu=L40S, recompute=full. Choices: tp, pp, dp, gpus, gpu, micro_batch, recompute, "
        "max_resident. Repeatable.",
        show_default=False,
        rich_help_panel=_SPACE,
    ),
]
Compare = Annotated[
    list[str] | None,
    typer.Option(
        help="Show the best plan with these choices fixed beside the best, e.g. tp=4,pp=2. Repeatable.",
        show_default=False,
        rich_help_panel=_SHOW,
    ),
]
SweepRange = Annotated[
    str | None,
    typer.Option(
        "--sweep",
        help="Plan over a range of response-len, prompt-len or batch and draw it: response-len=1k..32k.",
        show_default=False,
        rich_help_panel=_SHOW,
    ),
]
Plot = Annotated[
    Path | None,
    typer.Option(
        help="The PNG of a sweep; by default nereus-plan-NAME.png.", show_default=False, rich_help_panel=_SHOW
    ),
]
RunnerUps = Annotated[
    int, typer.Option(min=0, max=20, help="How many next best plans to show.", rich_help_panel=_SHOW)
]
Explain = Annotated[
    bool,
    typer.Option("--explain", help="Say for every tp and pp of the actor why not.", rich_help_panel=_SHOW),
]
AsYaml = Annotated[
    bool,
    typer.Option(
        "--yaml",
        help="Print the plan as the `plan` of a campaign file. There the critic has one layout.",
        rich_help_panel=_SHOW,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, reasons included.", rich_help_panel=_SHOW)]
