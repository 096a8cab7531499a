"""Tokenizers of folders with and without a configuration."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nereus.data.schema import Message
from nereus.data.tokenizer import load_tokenizer
from nereus.errors import DataError

CHAT = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)
WORDS = {"<s>": 0, "</s>": 1, "one": 2, "two": 3, "<user>": 4, "<a>": 5, "<pad>": 6}


def write_folder(folder: Path, *, config: dict[str, object], full: bool, template: bool = False) -> Path:
    """A word tokenizer; with `template`, tokenizer.json itself puts <s> first."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors

    tokenizer = Tokenizer(models.WordLevel(WORDS, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True) for token in WORDS if token.startswith("<")]
    )
    if template:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps(config))
    if full:
        written = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "</s>",
            "pad_token": "<pad>",
            "chat_template": CHAT,
        }
        (folder / "tokenizer_config.json").write_text(json.dumps(written))
    return folder


def test_a_bare_folder_puts_the_models_first_token_before_a_text(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(
        write_folder(tmp_path, config={"bos_token_id": 0, "eos_token_id": [6, 1]}, full=False)
    )
    assert tokenizer.encode(["one two", "two"], add_special_tokens=True) == [(0, 2, 3), (0, 3)]
    assert tokenizer.encode(["one"], add_special_tokens=False) == [(2,)]
    assert tokenizer.eos_token_ids == (1, 6)
    assert tokenizer.decode([2, 3, 1]) == "one two"


def test_a_bare_folder_whose_tokenizer_puts_it_gets_no_second_one(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_folder(tmp_path, config={"bos_token_id": 0}, full=False, template=True))
    assert tokenizer.encode(["one"], add_special_tokens=True) == [(0, 2)]
    assert tokenizer.eos_token_ids == ()


def test_generation_config_wins_over_config(tmp_path: Path) -> None:
    write_folder(tmp_path, config={"eos_token_id": 1}, full=False)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 6}))
    assert load_tokenizer(tmp_path).eos_token_ids == (6,)


def test_chat_needs_a_template(tmp_path: Path) -> None:
    turns = (Message(role="user", content="one"),)
    with pytest.raises(DataError, match="no chat template"):
        load_tokenizer(write_folder(tmp_path, config={}, full=False)).render(turns)


def test_a_full_folder_renders_chat_up_to_the_models_turn(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_folder(tmp_path, config={"eos_token_id": 6}, full=True))
    assert tokenizer.render((Message(role="user", content="one"),)) == "<user>one<a>"
    assert tokenizer.encode(["<user>one<a>"], add_special_tokens=False) == [(4, 2, 5)]
    assert tokenizer.encode([], add_special_tokens=False) == []
    assert tokenizer.eos_token_ids == (1, 6)  # the model's and the tokenizer's own
    assert tokenizer.decode([2, 1]) == "one"


def test_a_folder_without_a_tokenizer_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"neither tokenizer_config.json nor tokenizer.json"):
        load_tokenizer(tmp_path)
    with pytest.raises(DataError, match="is not a folder"):
        load_tokenizer(tmp_path / "absent")


def test_stories260k_begins_with_its_first_token_and_round_trips(shared_data: Path) -> None:
    tokenizer = load_tokenizer(shared_data / "real" / "stories260K")
    text = "Once upon a time, there was a little girl"
    (ids,) = tokenizer.encode([text], add_special_tokens=True)
    assert ids[0] == 1
    assert tokenizer.decode(ids) == text
