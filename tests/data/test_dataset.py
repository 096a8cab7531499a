"""From the configuration to prompts: long ones, suffixes, chat, sample ids, fingerprints."""

from __future__ import annotations

import json
import pickle
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from nereus.config import FileData, LongPrompts, PromptsConfig, PythonData
from nereus.data.dataset import load_prompts
from nereus.data.order import Cursor
from nereus.data.schema import Message
from nereus.data.tokenizer import load_tokenizer
from nereus.errors import DataError


class Letters:
    """A tokenizer of one token a character; 1 comes first, as a special token."""

    eos_token_ids = (0,)

    def encode(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[tuple[int, ...]]:
        first = (1,) if add_special_tokens else ()
        return [(*first, *map(ord, text)) for text in texts]

    def render(self, messages: Sequence[Message]) -> str:
        return "".join(f"[{message.role}]{message.content}" for message in messages) + "[assistant]"

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(map(chr, token_ids))


def config(
    path: Path, rows: list[dict[str, object]], source: dict[str, object] | None = None, **more: object
) -> PromptsConfig:
    path = path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return PromptsConfig.model_validate(
        {"source": {"kind": "file", "path": str(path), **(source or {})}, **more}
    )


ROWS: list[dict[str, object]] = [{"prompt": "ab", "answer": i, "kind": "x"} for i in range(3)]


def test_a_prompt_carries_ids_text_answer_and_the_rest(tmp_path: Path) -> None:
    data = load_prompts(config(tmp_path, ROWS), Letters())
    (prompt,) = data.prompts([7])  # epoch 2, index 1
    assert (prompt.sample_id, prompt.token_ids, prompt.text) == (7, (1, 97, 98), "ab")
    assert (prompt.ground_truth, prompt.extra) == (1, {"kind": "x"})
    assert (data.num_prompts, data.longest, data.highest_token_id) == (3, 3, 98)
    assert pickle.loads(pickle.dumps(prompt)) == prompt  # Ray carries it


def test_sample_ids_of_the_order_lead_to_every_prompt_of_each_epoch(tmp_path: Path) -> None:
    data = load_prompts(config(tmp_path, ROWS), Letters())
    ids, _ = data.order(seed=3, shuffle=True).take(Cursor(), 6)
    answers = [prompt.ground_truth for prompt in data.prompts(ids)]
    assert sorted(answers[:3]) == sorted(answers[3:]) == [0, 1, 2]  # type: ignore[type-var]


def test_long_prompts_are_left_out_and_counted(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [{"prompt": "a" * n} for n in (3, 9, 4, 8)]
    data = load_prompts(config(tmp_path, rows, max_tokens=5), Letters())
    assert [prompt.text for prompt in data.prompts(range(2))] == ["aaa", "aaaa"]
    assert (data.num_prompts, data.num_skipped, data.num_truncated) == (2, 2, 0)


def test_long_prompts_keep_their_last_tokens_and_are_counted(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [{"prompt": "abcdef"}, {"prompt": "xy"}]
    data = load_prompts(config(tmp_path, rows, max_tokens=4, too_long=LongPrompts.truncate_left), Letters())
    assert [Letters().decode(prompt.token_ids) for prompt in data.prompts(range(2))] == ["cdef", "\x01xy"]
    assert (data.num_skipped, data.num_truncated) == (0, 1)


def test_no_prompt_left_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"all above 2 tokens.*truncate_left"):
        load_prompts(config(tmp_path, ROWS, max_tokens=2), Letters())
    with pytest.raises(DataError, match="the source is empty"):
        load_prompts(config(tmp_path, []), Letters())


def test_limit_takes_the_first_rows(tmp_path: Path) -> None:
    data = load_prompts(config(tmp_path, ROWS, {"limit": 2}), Letters())
    assert [prompt.ground_truth for prompt in data.prompts(range(2))] == [0, 1]
    assert data.num_prompts == 2


def test_a_text_becomes_one_users_turn_under_a_chat_template(tmp_path: Path) -> None:
    data = load_prompts(config(tmp_path, ROWS[:1], {"suffix": "!"}, chat_template=True), Letters())
    assert data.prompts([0])[0].text == "[user]ab![assistant]"
    assert data.prompts([0])[0].token_ids[0] == ord("[")  # the template's own special tokens only


def test_a_suffix_goes_to_the_last_turn(tmp_path: Path) -> None:
    turns = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    data = load_prompts(config(tmp_path, [{"prompt": turns}], {"suffix": "!"}, chat_template=True), Letters())
    assert data.prompts([0])[0].text == "[system]s[user]u![assistant]"


def test_turns_without_a_chat_template_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"line 1.*prompts.chat_template to true"):
        load_prompts(config(tmp_path, [{"prompt": [{"role": "user", "content": "u"}]}]), Letters())


def test_the_fingerprint_changes_with_tokens_answers_and_order_only(tmp_path: Path) -> None:
    def fingerprint(rows: list[dict[str, object]]) -> str:
        return load_prompts(config(tmp_path, rows), Letters()).fingerprint

    base = fingerprint(ROWS)
    assert fingerprint([{**row, "kind": "y"} for row in ROWS]) == base
    assert fingerprint(ROWS[::-1]) != base
    assert fingerprint([*ROWS[:2], {"prompt": "ac", "answer": 2}]) != base
    assert fingerprint([*ROWS[:2], {"prompt": "ab", "answer": 9}]) != base


def test_a_python_source_and_its_arguments(tmp_path: Path) -> None:
    (tmp_path / "make.py").write_text(
        "def f(n):\n    return [{'prompt': str(i), 'answer': i} for i in range(n)]\n"
    )
    source = PythonData(function=f"{tmp_path / 'make.py'}:f", arguments={"n": 4})
    data = load_prompts(PromptsConfig(source=source), Letters())
    assert [prompt.ground_truth for prompt in data.prompts(range(4))] == [0, 1, 2, 3]


def test_gsm8k_is_read_in_full_by_named_columns(shared_data: Path) -> None:
    source = FileData(
        path=str(shared_data / "real" / "gsm8k" / "test.jsonl"), prompt="question", answer="answer"
    )
    data = load_prompts(
        PromptsConfig(source=source, max_tokens=4096), load_tokenizer(shared_data / "real" / "stories260K")
    )
    assert (data.num_prompts, data.num_skipped) == (1319, 0)
    assert str(data.prompts([0])[0].ground_truth).endswith("#### 18")
    assert data.highest_token_id < 512


def test_replacing_a_prompt_makes_another_value(tmp_path: Path) -> None:
    (prompt,) = load_prompts(config(tmp_path, ROWS[:1]), Letters()).prompts([0])
    assert replace(prompt, text="z") != prompt
