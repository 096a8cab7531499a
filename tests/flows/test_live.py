"""A running campaign has one artifact on the server, which is updated in place and tells the last step."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey

from nereus.config import CampaignConfig
from nereus.flows.campaign import campaign
from nereus.flows.live import artifact_key


@pytest.mark.usefixtures("server", "ray_pool")
def test_a_campaign_keeps_one_live_artifact(
    make_config: Callable[..., CampaignConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nereus.flows.live.UPDATE_S", 0.1)
    config = make_config(name="Shown_live", steps=2, tracking="step", dashboard={})
    campaign(config)
    key = artifact_key(config.name)
    assert key == "campaign-shown-live"
    with get_client(sync_client=True) as client:
        found = client.read_artifacts(artifact_filter=ArtifactFilter(key=ArtifactFilterKey(any_=[key])))
    assert len(found) == 1
    assert "**2 of 2 steps**" in str(found[0].data)
    assert "data:image/svg+xml;base64," in str(found[0].data)
