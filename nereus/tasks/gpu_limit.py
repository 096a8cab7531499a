"""GPUs that several campaigns share, counted by a global concurrency limit of the Prefect server.

A campaign holds as many slots as it may ever use, from before its workers start until they have ended; one
that takes part in a broker's sharing holds its least, and the broker counts the rest (`tasks/share.py`).
Another one that finds too few free waits and says for what. Ray's own counting stays the hard guard below
it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from prefect.client.orchestration import get_client
from prefect.client.schemas.responses import GlobalConcurrencyLimitResponse
from prefect.concurrency.sync import concurrency
from prefect.exceptions import ObjectNotFound

from nereus.config import CampaignConfig
from nereus.errors import ConfigError, explain
from nereus.record.listener import current_listener

ASK_AGAIN_S = 2.0  # between two looks at a limit that is full
TRY_S = 15.0  # for slots that were free when we looked, and that another may have taken since


@contextmanager
def gpus_held(config: CampaignConfig) -> Iterator[None]:
    """Hold the campaign's GPUs of `cluster.gpu_limit`; where the server has no such limit, nothing.

    Raises ConfigError when the limit is smaller than what the campaign may use.
    """
    cluster = config.cluster
    name = cluster.gpu_limit
    wanted = cluster.gpus if cluster.broker is not None else cluster.max_gpus or cluster.gpus
    limit = _find(name)
    if limit is None or not limit.active:
        yield
        return
    if limit.limit < wanted:
        raise ConfigError(
            explain(
                f"cannot run {config.name}",
                values=f"it may use {wanted} GPUs, the limit {name} has {limit.limit}",
                rule="a campaign holds cluster.max_gpus (or cluster.gpus) of its limit",
                remedy=f"use fewer GPUs, or raise the limit: nereus deploy --gpus {wanted}",
            )
        )
    with ExitStack() as stack:
        told = ""
        while not _entered(stack, name, wanted):
            if (missing := _missing(name, wanted)) != told:
                current_listener.get().on_message(missing)
                told = missing
            time.sleep(ASK_AGAIN_S)  # which a stop ends at once; a wait inside of Prefect it does not
        yield


def _entered(stack: ExitStack, name: str, wanted: int) -> bool:
    """Take the slots if so many are free; whether that was done."""
    limit = _find(name)
    if limit is not None and limit.limit - limit.active_slots < wanted:
        return False
    slots = concurrency(
        name,
        occupy=wanted,
        timeout_seconds=TRY_S,
        strict=True,
        raise_on_lease_renewal_failure=False,  # a server that restarts must not end a campaign
    )
    try:
        stack.enter_context(slots)
    except TimeoutError:
        return False
    return True


def _missing(name: str, wanted: int) -> str:
    """What a campaign waits for."""
    limit = _find(name)
    if limit is None:
        return f"waiting for {wanted} GPUs: the limit {name} is gone"
    return f"waiting for {wanted} GPUs: {limit.active_slots} of {limit.limit} of {name} are in use"


def _find(name: str) -> GlobalConcurrencyLimitResponse | None:
    with get_client(sync_client=True) as client:
        try:
            return client.read_global_concurrency_limit_by_name(name)
        except ObjectNotFound:
            return None
