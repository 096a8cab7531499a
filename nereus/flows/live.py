"""How a run shows itself while it runs: one artifact on the Prefect server, and a page of its own.

step ends ─▶ listener ─▶ (thread, at most every 10 s) artifact updated in place
                      ─▶ page rendered when somebody looks
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from uuid import UUID

from prefect.artifacts import create_markdown_artifact
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import ArtifactUpdate
from prefect.context import FlowRunContext

from nereus.config import CampaignConfig
from nereus.record.dashboard import served
from nereus.record.listener import Listener, current_listener
from nereus.record.live_page import live_page
from nereus.record.metrics import METRICS_FILE, read_records
from nereus.record.report import render_report
from nereus.record.step import StepRecord

UPDATE_S = 10.0  # between two updates; a person looks no oftener, and a step of a small model is shorter


@contextmanager
def shown_live(config: CampaignConfig) -> Iterator[None]:
    """Show the run inside: an artifact where a flow run is tracked, a page where one is configured."""
    with ExitStack() as stack:
        inner = current_listener.get()
        if FlowRunContext.get() is not None:
            tee = stack.enter_context(_artifact(config, inner))
            token = current_listener.set(tee)
            stack.callback(current_listener.reset, token)
        if config.dashboard is not None:
            config.run_folder.mkdir(parents=True, exist_ok=True)
            link = stack.enter_context(
                served(
                    config.run_folder,
                    lambda: _report(config),
                    host=config.dashboard.host,
                    port=config.dashboard.port,
                )
            )
            inner.on_message(f"dashboard: {link}")
        yield


def _report(config: CampaignConfig) -> str:
    return render_report(read_records(config.run_folder / METRICS_FILE), config, config.run_folder)


@contextmanager
def _artifact(config: CampaignConfig, inner: Listener) -> Iterator[Listener]:
    made = create_markdown_artifact(
        key=artifact_key(config.name), markdown=live_page(config, ()), description="the campaign, live"
    )
    assert isinstance(made, UUID)
    tee = _Tee(inner)
    ended = threading.Event()
    updater = threading.Thread(
        target=_keep_updated, args=(config, made, tee.changed, ended), name="live artifact", daemon=True
    )
    updater.start()
    try:
        yield tee
    finally:
        ended.set()
        tee.changed.set()
        updater.join(30)


def artifact_key(name: str) -> str:
    """A key that Prefect accepts: lower-case letters, digits and dashes."""
    return "campaign-" + "".join(c if c.isalnum() else "-" for c in name.lower())


def _keep_updated(
    config: CampaignConfig, artifact: UUID, changed: threading.Event, ended: threading.Event
) -> None:
    with get_client(sync_client=True) as client:
        while True:
            changed.wait()
            changed.clear()
            page = live_page(config, read_records(config.run_folder / METRICS_FILE))
            client.update_artifact(artifact, ArtifactUpdate(data=page))
            if ended.wait(UPDATE_S) and not changed.is_set():
                return


class _Tee:
    """Passes everything on, and notes that there is something new to show."""

    def __init__(self, inner: Listener) -> None:
        self._inner = inner
        self.changed = threading.Event()

    def on_stage(self, step: int, stage: str, seconds: float | None) -> None:
        """Pass it on."""
        self._inner.on_stage(step, stage, seconds)

    def on_step(self, record: StepRecord) -> None:
        """Pass it on; the page is behind now."""
        self._inner.on_step(record)
        self.changed.set()

    def on_message(self, text: str) -> None:
        """Pass it on."""
        self._inner.on_message(text)
