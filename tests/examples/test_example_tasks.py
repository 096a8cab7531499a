"""The example tasks: their rewards by hand-made cases, and their files through the ordinary loaders."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from nereus.config import PromptsConfig, PythonData
from nereus.data.dataset import load_prompts
from nereus.data.generated import load_function
from nereus.data.tokenizer import load_tokenizer
from nereus.rewards.function import RewardRequest
from nereus.rewards.process import ProcessReward

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
COUNT = EXAMPLES / "count"
EOS = 2


def cycle_from(letter: str, length: int) -> list[int]:
    return [4 + (ord(letter) - ord("a") + 1 + i) % 16 for i in range(length)]


@pytest.mark.parametrize(
    ("letter", "tokens", "wanted"),
    [
        ("a", [5, 6, 7, EOS], 3 / 128),
        ("p", [4, 5], 2 / 128),  # the cycle closes, and no <eos> was reached
        ("a", [], 0.0),
        ("a", [EOS], 0.0),
        ("a", [9, EOS], -0.25 / 128),
        ("a", [5, 6, 9, 8, 9, EOS], (2 - 0.25 * 3) / 128),  # right again after an error does not count
        ("a", [5, EOS, 6, EOS], (1 - 0.25 * 2) / 128),  # an <eos> inside is a wrong token
        ("c", cycle_from("c", 128), 1.0),
        ("a", [3] * 1000, -1.0),
    ],
)
def test_the_count_reward_is_the_correct_prefix_less_the_penalty(
    letter: str, tokens: list[int], wanted: float
) -> None:
    reward = load_function(f"{COUNT / 'reward.py'}:reward")
    assert reward(tokens, letter) == pytest.approx(wanted)


def test_count_prompts_are_seeded_letters_with_themselves_as_answer() -> None:
    prompts = load_function(f"{COUNT / 'prompts.py'}:prompts")
    first, again = list(prompts(num_prompts=200, seed=1)), list(prompts(num_prompts=200, seed=1))  # type: ignore[call-overload]
    assert first == again != list(prompts(num_prompts=200, seed=2))  # type: ignore[call-overload]
    assert {record["prompt"] for record in first} == set("abcdefghijklmnop")
    assert all(record["prompt"] == record["answer"] for record in first)


@pytest.fixture
def make_model(monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    monkeypatch.syspath_prepend(str(COUNT))
    spec = importlib.util.spec_from_file_location("make_model", COUNT / "make_model.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_count_tokenizer_frames_a_letter_and_round_trips(make_model, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    make_model.write_tokenizer(tmp_path)
    configured = load_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    bare = load_tokenizer(tmp_path)
    for tokenizer in (configured, bare):
        assert tokenizer.encode(["a", "p"], add_special_tokens=True) == [(1, 4, 3), (1, 19, 3)]
        assert tokenizer.decode([5, 6, 7, EOS]) == "bcd"
    assert configured.eos_token_ids == (EOS,)


def test_warm_start_batches_hold_right_answers_and_hide_the_prompt(make_model) -> None:  # type: ignore[no-untyped-def]
    import random

    ids_bs, labels_bs = make_model.batch(random.Random(0))
    reward = load_function(f"{COUNT / 'reward.py'}:reward")
    lengths = []
    for ids, labels in zip(ids_bs.tolist(), labels_bs.tolist(), strict=True):
        answer = [label for label in labels if label != -100]
        assert ids[3 : 3 + len(answer)] == answer
        assert answer[-1] == EOS
        assert reward(answer, "abcdefghijklmnop"[ids[1] - 4]) == pytest.approx((len(answer) - 1) / 128)
        lengths.append(len(answer) - 1)
    assert max(lengths) <= 24
    assert 5 < sum(lengths) / len(lengths) < 11


def test_the_count_model_has_the_recipes_shape(make_model) -> None:  # type: ignore[no-untyped-def]
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM(make_model.configuration())
    assert sum(parameter.numel() for parameter in model.parameters()) == 367_232


@pytest.mark.slow
def test_the_count_model_is_made_once_and_counts_a_little(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    command = [sys.executable, str(COUNT / "make_model.py"), "--output", str(folder)]
    first, second = (subprocess.run(command, capture_output=True, text=True, check=True) for _ in range(2))
    assert "wrote" in first.stdout
    assert "complete already" in second.stdout
    other = subprocess.run([*command, "--seed", "9"], capture_output=True, text=True, check=False)
    assert other.returncode == 1
    assert "was not made by this recipe" in other.stderr
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"]

    from transformers import AutoModelForCausalLM

    tokenizer, model = load_tokenizer(folder), AutoModelForCausalLM.from_pretrained(folder)
    source = PythonData(function=f"{COUNT / 'prompts.py'}:prompts", arguments={"num_prompts": 64})
    prompts = load_prompts(PromptsConfig(source=source), tokenizer).prompts(range(64))
    torch.manual_seed(0)
    ids_bs = torch.tensor([prompt.token_ids for prompt in prompts])
    out_bs = model.generate(
        ids_bs, attention_mask=torch.ones_like(ids_bs), max_new_tokens=128, do_sample=True, top_k=0
    )
    answers = [[*row[3:].tolist(), EOS] for row in out_bs]
    answers = [answer[: answer.index(EOS) + 1] for answer in answers]
    asked = [
        RewardRequest(
            sample_id=prompt.sample_id, prompt=prompt.text, response=tokenizer.decode(answer),
            response_token_ids=tuple(answer), ground_truth=prompt.ground_truth,
        )
        for prompt, answer in zip(prompts, answers, strict=True)
    ]  # fmt: skip
    with ProcessReward(target=f"{COUNT / 'reward.py'}:reward", limit_s=10) as reward:
        values = [result.value for result in reward.score(asked)]
    lengths = [len(answer) for answer in answers]
    right = [value == (length - 1) / 128 for value, length in zip(values, lengths, strict=True)]
    assert 4 < sum(lengths) / 64 < 16  # the warm start's mean is 9 with <eos>
    assert sum(right) / 64 > 0.8


def test_the_stories_reward_counts_stems_up_to_twelve() -> None:
    reward = load_function(f"{EXAMPLES / 'stories.py'}:reward")
    assert reward("The dog was grey.") == 0.0
    assert reward("Tim SMILED. He was happy and unhappy; friends hugged.") == pytest.approx(5 / 12)
    assert reward("love " * 40) == 1.0
    prompts = load_function(f"{EXAMPLES / 'stories.py'}:prompts")
    assert len(prompts()) == 4  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("response", "truth", "wanted"),
    [
        ("so it is 72.\n#### 72", "... <<1+1=2>>\n#### 72", 1.0),
        ("#### 1,000", "1000", 1.0),
        ("#### $1,000.00", "#### 1,000", 1.0),
        ("#### 5 wait #### 6", "6", 1.0),
        ("#### -3", "-3", 1.0),
        ("#### 73", "72", 0.0),
        ("the answer is 72", "72", 0.0),
        ("####", "72", 0.0),
        ("", "72", 0.0),
    ],
)
def test_the_gsm8k_reward_compares_the_final_number(response: str, truth: str, wanted: float) -> None:
    assert load_function(f"{EXAMPLES / 'gsm8k.py'}:reward")(response, truth) == wanted


def test_every_reference_solution_of_gsm8k_scores_one_and_none_scores_for_its_neighbour(
    shared_data: Path,
) -> None:
    reward = load_function(f"{EXAMPLES / 'gsm8k.py'}:reward")
    lines = (shared_data / "real" / "gsm8k" / "test.jsonl").read_text().splitlines()
    answers = [json.loads(line)["answer"] for line in lines]
    assert all(reward(answer, answer) == 1.0 for answer in answers)
    shifted = [reward(answer, other) for answer, other in pairwise(answers)]
    assert sum(shifted) / len(shifted) < 0.05  # neighbours that happen to share their number


def test_a_gsm8k_reference_without_a_number_is_an_exception_and_not_a_zero() -> None:
    with pytest.raises(ValueError, match="holds no number"):
        load_function(f"{EXAMPLES / 'gsm8k.py'}:reward")("#### 1", "unknown")


def test_rows_of_q_and_k_return_from_ggufs_order() -> None:
    without_rope_order = load_function(f"{EXAMPLES / 'smollm2.py'}:without_rope_order")
    heads, head_dim, columns = 3, 8, 5
    weight = torch.arange(heads * head_dim * columns, dtype=torch.float32).reshape(-1, columns)
    halves = weight.reshape(heads, 2, head_dim // 2, columns)  # what llama.cpp's converter does
    stored = halves.swapaxes(1, 2).reshape(-1, columns)
    assert not torch.equal(stored, weight)
    assert torch.equal(without_rope_order(stored, heads), weight)  # type: ignore[arg-type]


CALCULATOR = EXAMPLES / "calculator"


@pytest.mark.parametrize(
    ("turn", "told"),
    [("(37+58)", "095="), ("12(0+7)", "007="), ("(37+)", "="), ("095", None), ("", None)],
)
def test_the_calculator_answers_what_stands_in_parentheses_at_the_end(turn: str, told: str | None) -> None:
    assert load_function(f"{CALCULATOR / 'tool.py'}:calculator")(turn) == told


def test_the_calculator_reward_goes_by_the_models_own_last_turn() -> None:
    reward = load_function(f"{CALCULATOR / 'reward.py'}:reward")
    assert reward(turns=["(37+58)", "095"], ground_truth="095") == 1.0
    assert reward(turns=["(37+58)", ""], ground_truth="095") == 0.0
    assert reward(turns=["095"], ground_truth="095") == 1.0


def test_calculator_prompts_are_seeded_sums_and_their_answers() -> None:
    prompts = load_function(f"{CALCULATOR / 'prompts.py'}:prompts")
    first, again = list(prompts(num_prompts=50, seed=1)), list(prompts(num_prompts=50, seed=1))  # type: ignore[call-overload]
    assert first == again != list(prompts(num_prompts=50, seed=2))  # type: ignore[call-overload]
    for record in first:
        a, b = record["prompt"].rstrip("=").split("+")
        assert int(a) + int(b) == int(record["answer"])
