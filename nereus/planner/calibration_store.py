"""Keep calibrations between jobs: one JSON file for each (system, engine, model); an old one weighs less."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nereus.errors import ConfigError, explain
from nereus.planner.calibrate import CLASSES, Calibrator, Gain, StageFit
from nereus.planner.scalars import GENERATION, SCORING, TRAINING

_FORMAT = 2
_RELOAD = 0.5  # a reloaded estimate starts with half its weight ...
_HALF_LIFE_S = 30 * 86400.0  # ... and loses half of that every thirty days


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """What a calibration belongs to: GPU kind and links, engine with version, model name."""

    hardware: str
    engine: str
    model: str

    @property
    def file_name(self) -> str:
        """A name that any file system takes."""
        words = (re.sub(r"[^A-Za-z0-9.+-]+", "-", word) for word in (self.hardware, self.engine, self.model))
        return "__".join(words) + ".json"


def save(folder: Path, system: System, calibrator: Calibrator, *, now_s: float | None = None) -> Path:
    """Write the calibration and return its path; an earlier file of the same system is replaced in one
    step.
    """
    tree = {
        "format": _FORMAT,
        "system": asdict(system),
        "saved_s": time.time() if now_s is None else now_s,
        "gains": {name: asdict(gain) for name, gain in calibrator.gains.items()},
        "correction": calibrator.correction,
        "generation": asdict(calibrator.generation),
        "scoring": asdict(calibrator.scoring),
        "training": asdict(calibrator.training),
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / system.file_name
    draft = path.with_suffix(".tmp")
    draft.write_text(json.dumps(tree, indent=1) + "\n")
    draft.replace(path)
    return path


def load(folder: Path, system: System, *, now_s: float | None = None) -> Calibrator:
    """The saved calibration as a faded prior, or a fresh one when the system is new.

    Raises ConfigError when the file is damaged or of another format.
    """
    path = folder / system.file_name
    if not path.is_file():
        return Calibrator()
    try:
        tree = json.loads(path.read_text())
        if tree["format"] != _FORMAT or tree["system"] != asdict(system):
            raise ValueError(f"format {tree['format']}, system {tree['system']}")
        saved = _from_tree(tree)
        age_s = max((time.time() if now_s is None else now_s) - float(tree["saved_s"]), 0.0)
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            explain(
                f"cannot read the calibration {path}",
                values=repr(error),
                rule=f"it must be JSON of format {_FORMAT}",
                remedy="delete the file; it is learned again",
            )
        ) from error
    return saved.faded(_RELOAD * 0.5 ** (age_s / _HALF_LIFE_S))


def _from_tree(tree: Mapping[str, Any]) -> Calibrator:
    return Calibrator(
        gains={
            name: Gain(log_gain=float(gain["log_gain"]), weight=float(gain["weight"]))
            for name, gain in tree["gains"].items()
            if name in CLASSES
        },
        correction=float(tree["correction"]),
        generation=_stage_from_tree(tree["generation"], GENERATION),
        scoring=_stage_from_tree(tree["scoring"], SCORING),
        training=_stage_from_tree(tree["training"], TRAINING),
    )


def _stage_from_tree(tree: Mapping[str, Any], names: tuple[str, ...]) -> StageFit:
    if tuple(tree["names"]) != names:
        raise ValueError(f"scalars {tree['names']}")
    return StageFit(
        names=names,
        prior=tuple(float(value) for value in tree["prior"]),
        prior_weight=float(tree["prior_weight"]),
        rows=tuple(tuple(float(value) for value in row) for row in tree["rows"]),
        seconds=tuple(float(value) for value in tree["seconds"]),
        values=tuple(float(value) for value in tree["values"]),
    )
