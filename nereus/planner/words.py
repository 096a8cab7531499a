"""The words of `nereus plan` read into a request; mistakes are named with what would be right."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from nereus.emu.decoder import DecoderConfig
from nereus.errors import ConfigError, explain
from nereus.planner.calibration import NEUTRAL, Calibration
from nereus.planner.fixed import Fix, parse_fixes
from nereus.planner.layouts import Space
from nereus.planner.lengths import LengthDistribution
from nereus.planner.models import model_shape
from nereus.planner.profile import ClusterProfile
from nereus.planner.request import Placement, PlanRequest, Turns
from nereus.planner.workload import Algorithm, Model, ModelShapes, Schedule, Workload

Word = TypeVar("Word", Algorithm, Schedule, Placement, Turns, Space)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanWords:
    """What the command line says, unread."""

    model: str
    critic: str | None
    reference: str | None
    reward: str | None
    cluster: str
    algo: str
    prompt_len: str
    response_len: str
    batch: int
    samples: int | None
    mini_batches: int
    epochs: int
    calibration: Path | None
    schedule: str
    placement: str
    turns: str
    share: tuple[str, ...]
    space: str
    fix: tuple[str, ...]


def read_request(words: PlanWords) -> PlanRequest:
    """Build the request. Raises ConfigError or ModelError for anything that cannot be read."""
    algorithm = _one_of(Algorithm, "--algo", words.algo)
    samples = words.samples if words.samples is not None else 8 if algorithm is Algorithm.GRPO else 1
    workload = Workload(
        algorithm=algorithm,
        models=_models(words, algorithm),
        num_prompts=words.batch,
        num_samples=samples,
        prompt_tokens=tokens("--prompt-len", words.prompt_len),
        response=response_lengths(words.response_len),
        schedule=_one_of(Schedule, "--schedule", words.schedule),
        num_mini_batches=words.mini_batches,
        num_epochs=words.epochs,
    )
    placement = None if words.placement == "auto" else _one_of(Placement, "--placement", words.placement)
    if placement is Placement.COLOCATED and workload.schedule is not Schedule.SYNC:
        raise ConfigError(
            explain(
                f"cannot use --placement colocated with --schedule {words.schedule}",
                rule="generation beside training needs GPUs of its own",
                remedy="use --placement auto, or --schedule sync",
            )
        )
    return PlanRequest(
        workload=workload,
        cluster=ClusterProfile.load(words.cluster),
        space=_one_of(Space, "--space", words.space),
        placement=placement,
        share=frozenset(_trained(name) for name in words.share),
        turns=_one_of(Turns, "--turns", words.turns),
        calibration=NEUTRAL if words.calibration is None else saved_calibration(words.calibration),
        fixed=tuple(fix for text in words.fix for fix in parse_fixes(text)),
    )


def _trained(name: str) -> Model:
    if name not in (Model.ACTOR, Model.CRITIC):
        raise ConfigError(
            explain(f"cannot read --share {name!r}", rule="the actor and the critic are trained")
        )
    return Model(name)


def _models(words: PlanWords, algorithm: Algorithm) -> ModelShapes:
    """The four shapes; without a name of its own a model has the actor's shape, "none" leaves it out."""
    actor = model_shape(words.model)

    def other(name: str | None) -> DecoderConfig | None:
        if name == "none":
            return None
        return actor if name is None else model_shape(name)

    def scalar(shape: DecoderConfig | None) -> DecoderConfig | None:
        return None if shape is None else shape.with_head("value")

    has_critic = algorithm is Algorithm.PPO
    if words.critic is not None and not has_critic:
        raise ConfigError(explain("cannot use --critic", rule=f"{algorithm} has no critic"))
    return ModelShapes(
        actor=actor,
        critic=scalar(other(words.critic)) if has_critic else None,
        reference=other(words.reference),
        reward=scalar(other(words.reward)),
    )


def saved_calibration(path: Path) -> Calibration:
    """What a job saved about its system. Raises ConfigError where the file is not of that kind."""
    from nereus.planner.calibration_store import System, load

    try:
        system = System(**json.loads(path.read_text())["system"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            explain(
                f"cannot read --calibration {path}",
                values=repr(error),
                rule="it must be a calibration file that a job has saved",
            )
        ) from error
    if path.name != system.file_name:
        raise ConfigError(
            explain(
                f"cannot read --calibration {path}",
                rule=f"what belongs to {system} is named {system.file_name}",
                remedy="give it back its name",
            )
        )
    return load(path.parent, system).calibration


def response_lengths(text: str) -> LengthDistribution:
    """Read "mean,p95,max" or one constant length. Raises ConfigError."""
    parts = [part for part in text.split(",") if part.strip()]
    numbers = [tokens("--response-len", part) for part in parts]
    if len(numbers) == 1:
        return LengthDistribution.constant(numbers[0])
    if len(numbers) != 3:
        raise ConfigError(
            explain(
                f"cannot read --response-len {text!r}",
                rule="give mean,p95,max in tokens, or one length for all responses",
                remedy="for example --response-len 1k,2k,4k",
            )
        )
    return LengthDistribution.from_mean_p95_max(*numbers)


def tokens(option: str, text: str) -> int:
    """Read a number of tokens, "1500" or "2k" (2,048). Raises ConfigError."""
    plain = text.strip().lower()
    factor = 1024 if plain.endswith("k") else 1
    try:
        value = float(plain.removesuffix("k")) * factor
    except ValueError:
        value = 0.0
    if not 1 <= value < 1e9:
        raise ConfigError(
            explain(f"cannot read {option} {text!r}", rule="give a number of tokens of at least 1, e.g. 2k")
        )
    return round(value)


def sweep_values(text: str, names: tuple[str, ...]) -> tuple[str, tuple[float, ...]]:
    """Read "name=low..high" (two points an octave) or "name=a,b,c". Raises ConfigError."""
    name, _, values = (part.strip() for part in text.partition("="))
    what = f"cannot read --sweep {text!r}"
    if name not in names or not values:
        raise ConfigError(
            explain(
                what,
                rule=f"write NAME=LOW..HIGH or NAME=A,B,C with a name of {', '.join(names)}",
                remedy="for example --sweep response-len=1k..32k",
            )
        )
    if ".." not in values:
        return name, tuple(float(tokens("--sweep", part)) for part in values.split(","))
    low, high = (tokens("--sweep", part) for part in values.split("..", 1))
    if low >= high:
        raise ConfigError(explain(what, rule="the range must rise"))
    points = [float(low)]
    while points[-1] * 2**0.5 < high * 0.999:
        points.append(low * 2 ** (len(points) / 2))
    return name, (*(float(round(point)) for point in points), float(high))


def plot_path(text: Path | None, name: str) -> Path:
    """Where a sweep's picture goes. Raises ConfigError for a folder that does not exist."""
    path = text or Path(f"nereus-plan-{name}.png")
    if not path.parent.is_dir():
        raise ConfigError(explain(f"cannot write {path}", rule=f"the folder {path.parent} does not exist"))
    return path


def _one_of(kind: type[Word], option: str, text: str) -> Word:
    try:
        return kind(text)
    except ValueError:
        raise ConfigError(
            explain(f"cannot read {option} {text!r}", rule=f"choose one of {', '.join(kind)}")
        ) from None


def fixes_of(text: str) -> tuple[Fix, ...]:
    """Read what --compare fixes."""
    fixes = parse_fixes(text)
    if not fixes:
        raise ConfigError(explain("--compare fixes nothing", remedy="for example --compare tp=4,pp=1"))
    return fixes
