"""A campaign's part of a pool that a broker shares out: its bid, and the grant that it follows.

    campaign ─ bid: what it holds, what a GPU is worth ─▶ variable nereus_bid_POOL_NAME
    broker   ─ all grants ─▶ variable nereus_grants_POOL ─▶ campaign, at its next boundary

Each variable has one writer, so nothing needs a lock. A bid is renewed every few seconds; one that is not any
more is of a campaign that is gone.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import VariableCreate, VariableUpdate
from prefect.exceptions import PrefectHTTPStatusError

from nereus.config import CampaignConfig
from nereus.errors import ConfigError, explain
from nereus.planner.broker import Bid, Grant
from nereus.record.listener import current_listener

BEAT_S = 2.0
SILENT_S = 60.0  # a bid that is older is of a campaign that is gone


@dataclass(frozen=True, slots=True, kw_only=True)
class Signed:
    """A bid, when its campaign arrived and when it was renewed, in seconds since the epoch."""

    bid: Bid
    since_s: float
    at_s: float


class Share:
    """The bid of one campaign, renewed in a thread, and its grant as last read."""

    def __init__(self, pool: str, bid: Bid) -> None:
        self._pool, self._bid, self._since_s = pool, bid, time.time()
        self._granted: int | None = None
        self._lock = threading.Lock()

    @property
    def granted(self) -> int | None:
        """The GPUs that the campaign may hold; None before the broker has seen it."""
        with self._lock:
            return self._granted

    @property
    def bid(self) -> Bid:
        """The bid as it stands."""
        with self._lock:
            return self._bid

    def put(self, bid: Bid) -> None:
        """Bid so from now on."""
        with self._lock:
            self._bid = bid

    def renew(self, client: SyncPrefectClient) -> None:
        """Write the bid and read the grant, once."""
        signed = Signed(bid=self.bid, since_s=self._since_s, at_s=time.time())
        write(client, bid_name(self._pool, signed.bid.name), asdict(signed))
        grant = read_grants(client, self._pool).get(signed.bid.name)
        with self._lock:
            self._granted = None if grant is None else grant.gpus

    def keep_renewed(self, ended: threading.Event) -> None:
        """Renew the bid until the campaign ends; a server that restarts is asked again."""
        with get_client(sync_client=True) as client:
            while not ended.wait(BEAT_S):
                try:
                    self.renew(client)
                except (httpx.HTTPError, PrefectHTTPStatusError):
                    continue


@contextmanager
def gpus_shared(config: CampaignConfig) -> Iterator[Share | None]:
    """Bid in the pool's broker while the block runs; it begins once `cluster.gpus` are granted.

    None, and no wait, for a campaign that does not share. Raises ConfigError for one that cannot.
    """
    cluster = config.cluster
    if cluster.broker is None:
        yield None
        return
    if config.adaptation is None:
        raise ConfigError(
            explain(
                f"cannot run {config.name} with cluster.broker",
                rule="only a campaign with `adaptation` takes and gives GPUs while it runs",
                remedy="give adaptation: {}, or leave cluster.broker out",
            )
        )
    most = cluster.max_gpus or cluster.gpus
    first = Bid(name=config.name, held=0, least=cluster.gpus, most=most)
    share = Share(cluster.gpu_limit, first)
    ended = threading.Event()
    with get_client(sync_client=True) as client:
        share.renew(client)
        renewer = threading.Thread(target=share.keep_renewed, args=(ended,), name="bid", daemon=True)
        renewer.start()
        try:
            _wait_for_least(share, cluster.gpus)
            yield share
        finally:
            ended.set()
            renewer.join(30)
            client.delete_variable_by_name(bid_name(cluster.gpu_limit, config.name))


def _wait_for_least(share: Share, least: int) -> None:
    said_s = 0.0
    while (share.granted or 0) < least:
        if time.monotonic() - said_s > SILENT_S:
            said_s = time.monotonic()
            current_listener.get().on_message(f"waiting for the broker to grant {least} GPUs")
        time.sleep(BEAT_S / 4)
    share.put(replace(share.bid, held=least))


def read_bids(client: SyncPrefectClient, pool: str, *, now_s: float) -> list[Bid]:
    """The bids of the campaigns that live, in the order in which these arrived."""
    prefix = bid_name(pool, "")
    signed = [
        Signed(bid=Bid(**value["bid"]), since_s=value["since_s"], at_s=value["at_s"])
        for name, value in _values(client).items()
        if name.startswith(prefix)
    ]
    living = [one for one in signed if now_s - one.at_s < SILENT_S]
    return [one.bid for one in sorted(living, key=lambda one: (one.since_s, one.bid.name))]


def read_grants(client: SyncPrefectClient, pool: str) -> dict[str, Grant]:
    """The broker's grants by campaign."""
    found = client.read_variable_by_name(grants_name(pool))
    value: Any = {} if found is None else found.value
    return {name: Grant(**grant) for name, grant in value.items()}


def write_grants(client: SyncPrefectClient, pool: str, grants: Mapping[str, Grant]) -> None:
    """Put the grants where campaigns read them. Only the broker does."""
    write(client, grants_name(pool), {name: asdict(grant) for name, grant in grants.items()})


def _values(client: SyncPrefectClient) -> dict[str, Any]:
    return {variable.name: variable.value for variable in client.read_variables()}


def write(client: SyncPrefectClient, name: str, value: dict[str, Any]) -> None:
    """Set a variable, whether it exists or not."""
    if client.read_variable_by_name(name) is None:
        client.create_variable(VariableCreate(name=name, value=value, tags=["nereus"]))
    else:
        client.update_variable(VariableUpdate(name=name, value=value))


def bid_name(pool: str, campaign: str) -> str:
    """The variable of a bid. Prefect takes lower-case letters, digits and underscores."""
    return f"nereus_bid_{_plain(pool)}_{_plain(campaign)}"


def grants_name(pool: str) -> str:
    """The variable of a pool's grants."""
    return f"nereus_grants_{_plain(pool)}"


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "_", name.lower())
