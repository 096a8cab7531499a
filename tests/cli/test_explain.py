"""`nereus explain` shows a transition and starts nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from nereus.cli.app import main
from nereus.emu.decoder import DecoderConfig, decoder_spec
from nereus.record.transitions import OperationRecord, TransitionRecord, append_transition

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 16,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}


@pytest.fixture(scope="module")
def campaign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A campaign file and a model folder of zeros; there is no prompt, which explaining does not need."""
    folder = tmp_path_factory.mktemp("campaign")
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(CONFIG))
    spec = decoder_spec(DecoderConfig.from_hf(CONFIG))
    tensors = {tensor.name: torch.zeros(tensor.shape) for tensor in spec.tensors}
    save_file(tensors, folder / "model" / "model.safetensors", metadata={"format": "pt"})
    path = folder / "campaign.yaml"
    path.write_text(
        "name: tiny\n"
        "models: {actor: model}\n"
        "prompts: {source: {kind: file, path: prompts.jsonl}}\n"
        'reward: {kind: python, function: "reward.py:score"}\n'
        "cluster: {gpus: 4, device: cpu}\n"
        "plan: {actor_training: {tp: 2}}\n"
    )
    return path


def run(*arguments: str) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["explain", *arguments])
    assert stopped.value.code in (0, None)


def test_explain_lists_the_operations_and_draws_them(
    campaign: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "transition.svg"
    run(str(campaign), "plan.actor_training.tp=4", "--svg", str(picture))
    shown = capsys.readouterr().out
    assert "Extend actor.training#0" in shown
    assert "Merge actor.training#0" in shown
    assert picture.read_text().startswith("<svg")


def test_explain_says_when_nothing_changes(campaign: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(str(campaign))
    assert "nothing changes" in capsys.readouterr().out


def test_explain_says_what_memory_is_missing(campaign: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["explain", str(campaign), "plan.actor_training.tp=4", "--memory-gb", "0.000001"])
    assert stopped.value.code == 2
    assert "must fit on every rank" in " ".join(capsys.readouterr().err.split())


def test_explain_of_two_trained_models_on_the_same_gpus_shows_both(
    campaign: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(str(campaign), "algorithm={kind: ppo}", "plan.critic_training={tp: 1, dp: 2}")
    shown = capsys.readouterr().out
    assert "Split critic.training#0" in shown


def test_explain_of_a_run_lists_what_its_transitions_took(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(str(tmp_path))
    assert "no transition" in capsys.readouterr().out
    operation = {
        "kind": "split",
        "model_stage": "actor.training",
        "gpus": [0, 1],
        "bytes": 10,
        "planned_bytes": 10,
        "seconds": 0.5,
    }
    first = OperationRecord(id="a 0", text="Split one", after=[], carrier=None, **operation)
    second = OperationRecord(id="a 1", text="Destroy other", after=["a 0"], carrier="a 0", **operation)
    append_transition(
        tmp_path,
        TransitionRecord(
            step=4,
            epoch=2,
            outcome="abort",
            reason="worker 1 was late",
            seconds=1.5,
            bytes=10,
            lower_bound=10,
            before={},
            after={},
            operations=[first, second],
            picture="transitions/a.svg",
            retry_step=6,
        ),
    )
    run(str(tmp_path))
    shown = capsys.readouterr().out
    assert "before step 4: abort in 1.5 s" in shown
    assert "worker 1 was late; not tried again before step 6" in shown
    assert "(0) Split one; sent 10 B in 0.5 s" in shown
    assert "(1) Destroy other; after (0)" in shown
