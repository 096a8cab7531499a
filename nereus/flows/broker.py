"""The broker of a pool: a flow that lets campaigns give and take GPUs, one mover at a time.

    bids (variables) ─▶ next grants (planner/broker.py, pure) ─▶ grants (one variable) ─▶ campaigns

It holds nothing but the grants, on the server: when it ends, campaigns keep what they have, and the next
broker goes on from there. Two brokers of one pool must not run; the deployment's limit sees to that.
"""

from __future__ import annotations

import threading
import time

from prefect import flow
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.logging import get_run_logger

from nereus.planner.broker import Grant, Rules, next_grants
from nereus.tasks.share import read_bids, read_grants, write_grants

ROUND_S = 2.0


@flow(name="broker", flow_run_name="broker of {pool}")
def broker(gpus: int, pool: str = "nereus-gpus", residence_s: float = 300.0, margin: float = 0.2) -> None:
    """Share out the GPUs of a pool until this run is cancelled.

    Args:
        gpus: GPUs that it shares out among campaigns with `cluster.broker`.
        pool: Name of the pool: `cluster.gpu_limit` of its campaigns.
        residence_s: Least seconds between two changes of what one campaign holds.
        margin: Share by which a GPU must be worth more where it goes than where it is.
    """
    logger = get_run_logger()
    rules = Rules(residence_s=residence_s, margin=margin)
    with get_client(sync_client=True) as client:
        while True:
            for text in one_round(client, pool, gpus, rules):
                logger.info(text)
            time.sleep(ROUND_S)


def share_out(pool: str, num_gpus: int, rules: Rules, ended: threading.Event) -> None:
    """The same as `broker`, until `ended` is set, without a flow run."""
    with get_client(sync_client=True) as client:
        while not ended.wait(ROUND_S / 4):
            one_round(client, pool, num_gpus, rules)


def one_round(client: SyncPrefectClient, pool: str, num_gpus: int, rules: Rules) -> list[str]:
    """Read the bids and write the grants that follow, if they differ; says what changed."""
    now_s = time.time()
    before = read_grants(client, pool)
    after = next_grants(num_gpus, read_bids(client, pool, now_s=now_s), before, now_s=now_s, rules=rules)
    if after == before:
        return []
    write_grants(client, pool, after)
    names = sorted({*before, *after})
    return [
        f"{name}: {_text(before.get(name))} -> {_text(after.get(name))} GPUs"
        for name in names
        if before.get(name) != after.get(name)
    ]


def _text(grant: Grant | None) -> str:
    return "no" if grant is None else str(grant.gpus)
