"""Text to token ids and back, by the tokenizer of a Hugging Face folder.

A folder with `tokenizer_config.json` is loaded by transformers and may have a chat template. A bare
folder, with only `tokenizer.json` (and `config.json` beside it), is loaded by the `tokenizers` library.
Nothing is ever fetched.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from nereus.data.schema import Message
from nereus.errors import DataError, explain


class Tokenizer(Protocol):
    """Encodes prompts and decodes responses. Responses are never encoded again: their ids are the engine's
    own.
    """

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The ids that end a response, from generation_config.json, config.json and the tokenizer,
        ascending.
        """
        ...

    def encode(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[tuple[int, ...]]:
        """The ids of each text; with special tokens, what the tokenizer itself puts around a text."""
        ...

    def render(self, messages: Sequence[Message]) -> str:
        """The chat as text, up to where the model's turn begins. Raises DataError without a chat template."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of a response, without special tokens."""
        ...


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a model folder. Raises DataError if there is none or it cannot be read."""
    if (folder / "tokenizer_config.json").is_file():
        return _FullTokenizer(folder)
    if (folder / "tokenizer.json").is_file():
        return _BareTokenizer(folder)
    raise DataError(
        explain(
            "cannot load a tokenizer",
            values=f"{folder} has neither tokenizer_config.json nor tokenizer.json"
            if folder.is_dir()
            else f"{folder} is not a folder",
            remedy="set models.tokenizer to a folder that has one",
        )
    )


class _FullTokenizer:
    """By transformers."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer

        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        except (OSError, ValueError, ImportError) as error:
            raise DataError(explain(f"cannot load the tokenizer of {folder}", values=str(error))) from error
        self._folder = folder
        own = [] if self._tokenizer.eos_token_id is None else [int(self._tokenizer.eos_token_id)]
        self._eos_token_ids = tuple(sorted({*_configured(folder, "eos_token_id"), *own}))

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return self._eos_token_ids

    def encode(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[tuple[int, ...]]:
        if not texts:
            return []
        return [
            tuple(ids)
            for ids in self._tokenizer(list(texts), add_special_tokens=add_special_tokens)["input_ids"]
        ]

    def render(self, messages: Sequence[Message]) -> str:
        from jinja2 import TemplateError

        if self._tokenizer.chat_template is None:
            raise _no_chat_template(self._folder)
        turns = [{"role": message.role, "content": message.content} for message in messages]
        try:
            return str(self._tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))
        except TemplateError as error:
            roles = [message.role for message in messages]
            raise DataError(
                explain(
                    f"cannot apply the chat template of {self._folder}",
                    values=f"{error}; the turns' roles are {roles}",
                )
            ) from error

    def decode(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))


class _BareTokenizer:
    """By the `tokenizers` library.

    Where `tokenizer.json` puts no special tokens around a text and `config.json` names a
    beginning-of-sequence token, that one is put first, as transformers does for Llama.
    """

    def __init__(self, folder: Path) -> None:
        from tokenizers import Tokenizer as Backend

        self._backend = Backend.from_file(str(folder / "tokenizer.json"))
        self._backend.no_padding()
        self._backend.no_truncation()
        self._folder = folder
        self._eos_token_ids = tuple(sorted(_configured(folder, "eos_token_id")))
        puts_none = self._backend.num_special_tokens_to_add(False) == 0
        self._bos = tuple(_configured(folder, "bos_token_id")[:1]) if puts_none else ()

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return self._eos_token_ids

    def encode(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[tuple[int, ...]]:
        bos = self._bos if add_special_tokens else ()
        encoded = self._backend.encode_batch(list(texts), add_special_tokens=add_special_tokens)
        return [(*bos, *encoding.ids) for encoding in encoded]

    def render(self, messages: Sequence[Message]) -> str:
        raise _no_chat_template(self._folder)

    def decode(self, token_ids: Sequence[int]) -> str:
        return str(self._backend.decode(list(token_ids), skip_special_tokens=True))


def _configured(folder: Path, name: str) -> list[int]:
    """The ids that generation_config.json names, else config.json; either may hold one or a list."""
    for file in ("generation_config.json", "config.json"):
        path = folder / file
        value = json.loads(path.read_text()).get(name) if path.is_file() else None
        if value is not None:
            return [int(item) for item in (value if isinstance(value, list) else [value])]
    return []


def _no_chat_template(folder: Path) -> DataError:
    return DataError(
        explain(
            "cannot render chat prompts",
            values=f"the tokenizer of {folder} has no chat template",
            remedy="set prompts.chat_template to false and give plain text, or use an instruct model",
        )
    )
