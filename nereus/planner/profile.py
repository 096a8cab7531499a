"""What the hardware is: GPU kinds, links, clusters, from small YAML files or "4x8xH200"."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

import yaml

from nereus.errors import ConfigError, explain


class LinkClass(StrEnum):
    """What a message crosses: nothing, the links inside a node, the network, or the bus to host memory."""

    SCALE_UP = "scale-up"
    SCALE_OUT = "scale-out"
    HOST = "host"


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkProfile:
    """One link class as one GPU sees it. `bandwidth_Bps` is one-way, per GPU; `latency_s` is of one message.

    `efficiency` is the share of the bandwidth that a large transfer reaches; `collectives` names a measured
    table of all-reduce times (None: the two-protocol formula with the numbers above).
    """

    name: str
    bandwidth_Bps: float  # noqa: N815 - bytes a second, as everywhere in the field
    latency_s: float
    efficiency: float
    collectives: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuProfile:
    """One kind of accelerator. Peaks are the vendor's dense figures; `kernels` names its fitted kernel table.

    `link` and `host_link` name what it has by default inside a node and towards host memory; `network` what a
    node of it usually has per GPU.
    """

    name: str
    peak_flops: float
    memory_bytes: int
    memory_bandwidth_Bps: float  # noqa: N815
    compute_units: int
    kernels: str
    link: str
    network: str
    host_link: str
    gpus_per_node: int = 8
    fixed_share: float = 1.0
    """Share of a GPU's fixed memory (context, captured graphs, communicators) that such a device has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuPool:
    """Equal nodes of one GPU kind."""

    num_nodes: int
    gpus_per_node: int
    gpu: GpuProfile
    scale_up: LinkProfile

    @property
    def num_gpus(self) -> int:
        """GPUs in the pool."""
        return self.num_nodes * self.gpus_per_node


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterProfile:
    """Pools of nodes joined by one network. One pool for each GPU kind."""

    name: str
    pools: tuple[GpuPool, ...]
    scale_out: LinkProfile
    host: LinkProfile

    def __post_init__(self) -> None:
        kinds = [pool.gpu.name for pool in self.pools]
        sizes = [size for pool in self.pools for size in (pool.num_nodes, pool.gpus_per_node)]
        if not kinds or len(set(kinds)) != len(kinds) or min(sizes) < 1:
            raise ConfigError(
                explain(
                    "cannot build a cluster profile",
                    values=", ".join(f"{p.num_nodes}x{p.gpus_per_node}x{p.gpu.name}" for p in self.pools),
                    rule="each GPU kind appears once, with at least one node and one GPU a node",
                )
            )

    @property
    def num_gpus(self) -> int:
        """GPUs in the cluster, of every kind."""
        return sum(pool.num_gpus for pool in self.pools)

    @property
    def gpu_kinds(self) -> tuple[str, ...]:
        """Names of the GPU kinds, in the order in which they were given."""
        return tuple(pool.gpu.name for pool in self.pools)

    def pool(self, gpu_kind: str) -> GpuPool:
        """The pool of a GPU kind. Raises ConfigError for a stranger."""
        for pool in self.pools:
            if pool.gpu.name == gpu_kind:
                return pool
        raise ConfigError(
            explain(f"no GPU of kind {gpu_kind}", values=f"the cluster has {', '.join(self.gpu_kinds)}")
        )

    def link(self, gpu_kind: str, link_class: LinkClass) -> LinkProfile:
        """The link of a class as a GPU of this kind sees it."""
        if link_class is LinkClass.SCALE_UP:
            return self.pool(gpu_kind).scale_up
        return self.scale_out if link_class is LinkClass.SCALE_OUT else self.host

    @classmethod
    def parse(cls, text: str) -> ClusterProfile:
        """Read "4x8xH200" (nodes x GPUs a node x kind), "16xH100" (GPUs x kind), pools joined with "+".

        "2x8xH100+4x8xA100-80" has two pools; the slowest of the networks joins them.
        Raises ConfigError for anything else.
        """
        pools = [_parse_pool(part, text) for part in text.replace(" ", "").split("+")]
        networks = [link_profile(pool.gpu.network) for pool in pools]
        hosts = [link_profile(pool.gpu.host_link) for pool in pools]
        return cls(
            name=text,
            pools=tuple(pools),
            scale_out=min(networks, key=lambda link: link.bandwidth_Bps),
            host=min(hosts, key=lambda link: link.bandwidth_Bps),
        )

    @classmethod
    def from_yaml(cls, path: Path) -> ClusterProfile:
        """Read a cluster file: `pools` (nodes, gpus_per_node, gpu, link), `network`, `host`, `gpus`, `links`.

        A GPU or link is a built-in name or one defined in the same file under `gpus` or `links`; a table that
        one of these names as a `.json` file counts from the folder of the cluster file.
        Raises ConfigError for an unknown key or name.
        """
        try:
            tree = yaml.load(Path(path).read_text(), Loader=_LOADER)
        except (OSError, yaml.YAMLError) as error:
            raise ConfigError(explain(f"cannot read the cluster file {path}", values=str(error))) from error
        return _cluster_from_tree(Path(path).stem, tree, Path(path).absolute().parent)

    @classmethod
    def load(cls, text: str) -> ClusterProfile:
        """A path of a YAML file, or the short form that `parse` reads."""
        if text.endswith((".yaml", ".yml")):
            return cls.from_yaml(Path(text))
        return cls.parse(text)


def gpu_profile(name: str) -> GpuProfile:
    """A built-in GPU kind by name (case does not matter). Raises ConfigError with the known names."""
    return _named(name, builtin_gpus(), "GPU kind")


def link_profile(name: str) -> LinkProfile:
    """A built-in link by name. Raises ConfigError with the known names."""
    return _named(name, builtin_links(), "link")


def builtin_gpus() -> Mapping[str, GpuProfile]:
    """The GPU kinds that ship with the package, by name."""
    return _builtin()[0]


def builtin_links() -> Mapping[str, LinkProfile]:
    """The links that ship with the package, by name."""
    return _builtin()[1]


_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the C parser is 10x faster where PyYAML has it


@lru_cache(maxsize=1)
def _builtin() -> tuple[Mapping[str, GpuProfile], Mapping[str, LinkProfile]]:
    tree = yaml.load((resources.files("nereus.planner") / "data/hardware.yaml").read_text(), Loader=_LOADER)
    return _gpus(tree["gpus"]), _links(tree["links"])


def _table_name(name: str, folder: Path | None) -> str:
    """The name of a table; the path of a file counts from `folder`."""
    return name if folder is None or not name.endswith(".json") else str(folder / name)


def _gpus(tree: Mapping[str, Mapping[str, Any]], folder: Path | None = None) -> dict[str, GpuProfile]:
    return {
        name: GpuProfile(
            name=name,
            peak_flops=float(row["peak_tflops"]) * 1e12,
            memory_bytes=int(float(row["memory_gb"]) * 1e9),
            memory_bandwidth_Bps=float(row["memory_gbps"]) * 1e9,
            compute_units=int(row["compute_units"]),
            kernels=_table_name(str(row["kernels"]), folder),
            link=str(row["link"]),
            network=str(row["network"]),
            host_link=str(row["host_link"]),
            gpus_per_node=int(row.get("gpus_per_node", 8)),
            fixed_share=float(row.get("fixed_share", 1.0)),
        )
        for name, row in tree.items()
    }


def _links(tree: Mapping[str, Mapping[str, Any]], folder: Path | None = None) -> dict[str, LinkProfile]:
    return {
        name: LinkProfile(
            name=name,
            bandwidth_Bps=float(row["gbps"]) * 1e9,
            latency_s=float(row["latency_us"]) * 1e-6,
            efficiency=float(row["efficiency"]),
            collectives=_table_name(row["collectives"], folder) if row.get("collectives") else None,
        )
        for name, row in tree.items()
    }


T = TypeVar("T")


def _named(name: str, known: Mapping[str, T], what: str) -> T:
    for key, value in known.items():
        if key.lower() == name.lower():
            return value
    raise ConfigError(explain(f"unknown {what} {name!r}", rule=f"known are {', '.join(known)}"))


def _parse_pool(part: str, text: str) -> GpuPool:
    pieces = part.split("x")
    numbers, kind = pieces[:-1], pieces[-1]
    if not 1 <= len(numbers) <= 2 or not all(number.isdigit() and int(number) > 0 for number in numbers):
        raise ConfigError(
            explain(
                f"cannot read the cluster {text!r}",
                values=part,
                rule="write nodes x GPUs-a-node x kind, as in 4x8xH200, or GPUs x kind",
                remedy="a YAML file describes anything else",
            )
        )
    gpu = gpu_profile(kind)
    counts = [int(number) for number in numbers]
    if len(counts) == 1:
        per_node = min(counts[0], gpu.gpus_per_node)
        if counts[0] % per_node:
            raise ConfigError(
                explain(
                    f"cannot read the cluster {text!r}",
                    values=f"{counts[0]} GPUs in nodes of {per_node}",
                    rule="the GPUs must fill whole nodes",
                    remedy="write nodes x GPUs-a-node x kind",
                )
            )
        counts = [counts[0] // per_node, per_node]
    return GpuPool(num_nodes=counts[0], gpus_per_node=counts[1], gpu=gpu, scale_up=link_profile(gpu.link))


def _cluster_from_tree(name: str, tree: object, folder: Path) -> ClusterProfile:
    what = f"cannot read the cluster file {name}"
    known = {"name", "pools", "network", "host", "gpus", "links"}
    if not isinstance(tree, dict) or not tree.get("pools") or set(tree) - known:
        keys = sorted(tree) if isinstance(tree, dict) else type(tree).__name__
        raise ConfigError(
            explain(what, values=f"{keys}", rule=f"keys are {sorted(known)}, pools is required")
        )
    try:
        gpus = {**builtin_gpus(), **_gpus(tree.get("gpus", {}), folder)}
        links = {**builtin_links(), **_links(tree.get("links", {}), folder)}
        pools = [_pool_from_row(row, gpus, links) for row in tree["pools"]]
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            explain(what, values=repr(error), rule="a key is missing or not a number")
        ) from error
    return ClusterProfile(
        name=str(tree.get("name", name)),
        pools=tuple(pools),
        scale_out=_slowest(tree.get("network"), [pool.gpu.network for pool in pools], links),
        host=_slowest(tree.get("host"), [pool.gpu.host_link for pool in pools], links),
    )


def _pool_from_row(
    row: Mapping[str, Any], gpus: Mapping[str, GpuProfile], links: Mapping[str, LinkProfile]
) -> GpuPool:
    gpu = _named(str(row["gpu"]), gpus, "GPU kind")
    return GpuPool(
        num_nodes=int(row["nodes"]),
        gpus_per_node=int(row.get("gpus_per_node", gpu.gpus_per_node)),
        gpu=gpu,
        scale_up=_named(str(row.get("link", gpu.link)), links, "link"),
    )


def _slowest(given: str | None, defaults: Sequence[str], links: Mapping[str, LinkProfile]) -> LinkProfile:
    names = [given] if given else defaults
    return min((_named(str(name), links, "link") for name in names), key=lambda link: link.bandwidth_Bps)
