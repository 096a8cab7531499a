"""The page on which a run shows itself."""

from __future__ import annotations

from pydantic import Field

from nereus.config.frozen import Frozen


class DashboardConfig(Frozen):
    """Where the run serves its read-only page."""

    host: str = "127.0.0.1"
    """Address to listen on; on any but a loopback address the page needs the token of the printed link."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port; 0 takes a free one, which the run prints."""
