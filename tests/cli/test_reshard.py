"""`nereus reshard`: the plan it shows, the checkpoint it writes, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from nereus.cli.app import main
from nereus.cli.reshard import read_layout
from nereus.emu.checkpoint.source import open_checkpoint
from nereus.emu.decoder import EMBED, DecoderConfig, decoder_spec
from nereus.emu.hf_folder import write_hf_folder
from nereus.emu.tensor import whole
from nereus.errors import ConfigError, InvalidLayout
from tests.emu.test_checkpoint import Numbers

CONFIG = DecoderConfig(
    vocab_size=37,
    hidden_size=12,
    num_layers=5,
    num_heads=6,
    num_kv_heads=3,
    head_dim=2,
    intermediate_size=22,
)
SPEC = decoder_spec(CONFIG)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_hf_folder(Numbers(SPEC, {"theta": torch.float32}), CONFIG, tmp_path / "model")
    return tmp_path / "model"


def nereus(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["reshard", *arguments])
    return int(ended.value.code or 0)


def test_dry_run_shows_every_file_and_writes_nothing(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert nereus(str(model), str(tmp_path / "out"), "--to", "tp=2,pp=2,layers=2+3", "--dry-run") == 0
    shown = capsys.readouterr().out
    assert "huggingface" in shown
    assert f"{SPEC.num_elements:,} weights" in shown
    for line in ("part-00000", "part-00003", "0-1", "2-4", "theta float32"):
        assert line in shown
    assert not (tmp_path / "out").exists()


def test_the_checkpoint_holds_the_same_numbers(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert nereus(str(model), str(tmp_path / "out"), "--to", "tp=3", "--as", "critic") == 0
    assert "ok: " in capsys.readouterr().out.replace("\n", " ")
    checkpoint = open_checkpoint(tmp_path / "out" / "step-000000")
    assert checkpoint.models == ("critic",)
    found = checkpoint.source("critic").read("theta", EMBED, whole((37, 12)))
    assert torch.equal(found, Numbers(SPEC, {"theta": torch.float32}).tensors["theta", EMBED])


def test_bad_input_exits_with_two_and_a_remedy(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert nereus(str(model), str(tmp_path / "out"), "--to", "tp=4") == 2
    assert "Remedy" in capsys.readouterr().err
    assert nereus(str(tmp_path / "nowhere"), str(tmp_path / "out"), "--to", "tp=1") == 2
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("text", ["", "tp", "tp=two", "tp=1,tp=2", "dp=2", "tp=-1"])
def test_layout_words_that_mean_nothing_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="it is tp=N,pp=N"):
        read_layout(text, SPEC)


def test_layout_words() -> None:
    layout = read_layout("tp=2, pp=2", SPEC)
    assert (layout.tp, layout.pp, layout.layers) == (2, 2, (3, 2))
    assert read_layout("layers=1+4", SPEC).pp == 2
    with pytest.raises(InvalidLayout, match="must be split over"):
        read_layout("tp=1,pp=2,layers=1+1", SPEC)
