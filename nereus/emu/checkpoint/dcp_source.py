"""A torch distributed checkpoint of a Hugging Face model, with its optimizer where it is there, as a source.

Tensors are found by their Hugging Face names under any common prefix (`model.`, `app.model.`), and Adam's
moments as `<anything>.<name>.exp_avg`, which is what `get_optimizer_state_dict` gives.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from nereus.emu.checkpoint.dcp_reader import DcpReader
from nereus.emu.tensor import Box, ModelSpec, whole
from nereus.errors import CheckpointError, explain

MOMENTS = ("exp_avg", "exp_avg_sq")
_SHOWN = 4


class DcpSource:
    """Logical tensors of a model in a torch distributed checkpoint.

    Opening reads the index only and raises CheckpointError, naming them, when tensors are absent or
    misshapen. Moments are a kind when every tensor has them.
    """

    def __init__(self, folder: Path | str, spec: ModelSpec) -> None:
        self.folder, self._spec = Path(folder), spec
        self._reader = DcpReader(folder)
        self._stored: dict[str, dict[str, str]] = {"theta": self._weights()}
        for kind in MOMENTS:
            if found := self._moments(kind):
                self._stored[kind] = found
        self._check()

    def __reduce__(self) -> tuple[object, ...]:
        return DcpSource, (self.folder, self._spec)

    def kinds(self) -> tuple[str, ...]:
        """Kinds that are there for every tensor."""
        return tuple(self._stored)

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Logical name to global shape."""
        return {tensor.name: tensor.shape for tensor in self._spec.tensors}

    def read(self, kind: str, name: str, box: Box) -> Tensor:
        """The box of one logical tensor in its stored dtype. Raises CheckpointError when it is not stored."""
        stored = self._stored.get(kind, {}).get(name)
        if stored is None:
            raise CheckpointError(explain(f"cannot read {kind}/{name} from {self.folder}", rule="absent"))
        return self._reader.read(stored, box)

    @property
    def unread(self) -> tuple[str, ...]:
        """Optimizer tensors that are stored and are no kind here: some parameters have none."""
        if "exp_avg" in self._stored:
            return ()
        return tuple(name for name in self._reader.names if name.endswith(MOMENTS))

    def adam_steps(self) -> int | None:
        """Optimizer steps taken, where the checkpoint has them; the highest of all tensors."""
        steps = [
            int(self._reader.read(name, whole(self._reader.shape(name))).max())
            for name in self._reader.names
            if name.endswith(".step") and self._reader.dtype(name) in (torch.float32, torch.int64)
        ]
        return max(steps, default=None)

    def _weights(self) -> dict[str, str]:
        names = set(self._reader.names)
        first = self._spec.tensors[0].name
        prefixes = sorted(
            (name.removesuffix(first) for name in names if name == first or name.endswith("." + first)),
            # The prefix under which most of the model lies; an optimizer may repeat some names.
            key=lambda prefix: (-sum(prefix + tensor.name in names for tensor in self._spec.tensors), prefix),
        )
        prefix = prefixes[0] if prefixes else ""
        return {
            tensor.name: prefix + tensor.name
            for tensor in self._spec.tensors
            if prefix + tensor.name in names
        }

    def _moments(self, kind: str) -> dict[str, str]:
        ends = {f".{tensor.name}.{kind}": tensor.name for tensor in self._spec.tensors}
        found = {
            logical: name
            for name in self._reader.names
            if name.endswith("." + kind)
            for end, logical in ends.items()
            if ("." + name).endswith(end)
        }
        return found if len(found) == len(ends) else {}

    def _check(self) -> None:
        missing = [t.name for t in self._spec.tensors if t.name not in self._stored["theta"]]
        misshapen = [
            f"{stored} is {list(self._reader.shape(stored))}, not {list(self._spec.by_name[name].shape)}"
            for by_name in self._stored.values()
            for name, stored in by_name.items()
            if self._reader.shape(stored) != self._spec.by_name[name].shape
        ]
        parts = (("missing", missing), ("misshapen", misshapen))
        if problems := [
            f"{len(names)} {label}: {', '.join(names[:_SHOWN])}" for label, names in parts if names
        ]:
            held = ", ".join(self._reader.names[:_SHOWN])
            raise CheckpointError(
                explain(
                    f"cannot read the distributed checkpoint {self.folder}",
                    values=f"{'; '.join(problems)}; it holds {held}, ...",
                    rule="it must hold the model's tensors under their Hugging Face names",
                    remedy="give the config.json of the model that was saved",
                )
            )
