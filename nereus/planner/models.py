"""Model shapes by name: the built-in list, or the config.json of a local folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from difflib import get_close_matches
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from nereus.emu.decoder import DecoderConfig
from nereus.errors import ConfigError, ModelError, explain

_VARIANTS = ("-instruct", "-chat", "-base", "-hf", "-it")
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the C parser is 10x faster where PyYAML has it


def model_shape(name: str) -> DecoderConfig:
    """The shape of a model: a local folder (or its config.json), or a name of the built-in list.

    Names match without owner, case and variant: "llama-3.1-8b" is "meta-llama/Llama-3.1-8B-Instruct".
    Raises ConfigError for an unknown name and ModelError for a folder that cannot be read. Uses no network.
    """
    path = Path(name)
    if path.exists() or name.startswith((".", "/", "~")):
        return _from_folder(path.expanduser())
    known = {_plain(full): full for full in builtin_models()}
    if (full := known.get(_plain(name))) is not None:
        return DecoderConfig.from_hf(_tree()[full])
    near = [known[key] for key in get_close_matches(_plain(name), known, n=3)]
    raise ConfigError(
        explain(
            f"unknown model {name!r}",
            rule="neither a folder with a config.json nor in the built-in list: "
            + ", ".join(near or builtin_models()),
            remedy="give a name of the list or the path of a model folder",
        )
    )


@lru_cache(maxsize=1)
def builtin_models() -> tuple[str, ...]:
    """Names of the built-in list."""
    return tuple(_tree())


def builtin_parameters(name: str) -> int:
    """The published number of weights of a built-in model."""
    return int(_tree()[name]["parameters"])


@lru_cache(maxsize=1)
def _tree() -> Mapping[str, Mapping[str, Any]]:
    text = (resources.files("nereus.planner") / "data/models.yaml").read_text()
    tree: Mapping[str, Mapping[str, Any]] = yaml.load(text, Loader=_LOADER)
    return tree


def _from_folder(path: Path) -> DecoderConfig:
    file = path if path.is_file() else path / "config.json"
    try:
        config = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ModelError(
            explain(
                f"cannot read the model folder {path}",
                values=str(error),
                rule="it must hold a config.json",
            )
        ) from error
    if not isinstance(config, dict):
        raise ModelError(explain(f"cannot read {file}", rule="it must hold a JSON object"))
    return DecoderConfig.from_hf(config)


def _plain(name: str) -> str:
    """The name without owner, case and variant, which do not change the shape."""
    plain = name.rstrip("/").split("/")[-1].lower().removeprefix("meta-")
    for variant in _VARIANTS:
        plain = plain.removesuffix(variant)
    return plain
