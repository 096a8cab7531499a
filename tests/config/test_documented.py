"""Every campaign that the documentation and the examples show can be loaded."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from nereus.config.load import load_campaign

ROOT = Path(__file__).resolve().parents[2]
BLOCKS = [
    pytest.param(block, id=f"{name}-{number}")
    for name in ("README.md", "docs/campaign.md", "docs/algorithms.md")
    for number, block in enumerate(re.findall(r"```yaml\n(.*?)```", (ROOT / name).read_text(), re.DOTALL))
]
EXAMPLES = sorted((ROOT / "examples").rglob("*.yaml"))


@pytest.mark.parametrize("block", BLOCKS)
def test_a_documented_campaign_loads(block: str, tmp_path: Path) -> None:
    path = tmp_path / "campaign.yaml"
    path.write_text(block)
    assert load_campaign(path).steps > 0


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_campaign_loads(path: Path) -> None:
    assert load_campaign(path).cluster.gpus > 0


def test_there_are_documented_campaigns_and_examples() -> None:
    assert len(BLOCKS) >= 2
    assert len(EXAMPLES) >= 2
