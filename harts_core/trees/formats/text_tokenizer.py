"""Tokenizers for rollouts that are text: a Hugging Face tokenizer file or directory, or a bundled name.

Both kinds encode text with or without reading special tokens in it, so that a message that happens to
contain ``<|im_end|>`` stays text.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from harts_core.errors import ConfigError, MissingBackendError

INSTALL_HINT = 'pip install "harts[text]"'


@dataclass(frozen=True, slots=True, kw_only=True)
class TextTokenizer:
    """A tokenizer, as far as rendering messages needs one.

    Attributes:
        vocab_size: ids are below it.
        encode_text: token ids of text, special tokens in it read as text.
        encode_special: token ids of text, special tokens in it read as such.
        special_id: the id of one special token; None: not in the vocabulary.
        chat_template: the tokenizer's own Jinja template; None: ChatML is used.
        template_values: strings that templates refer to (``bos_token``, ``eos_token``, …).
    """

    vocab_size: int
    encode_text: Callable[[str], list[int]]
    encode_special: Callable[[str], list[int]]
    special_id: Callable[[str], int | None]
    chat_template: str | None
    template_values: dict[str, str]


def tokenizer_name(argument: str) -> str:
    """What to call a tokenizer in metadata: the name of its directory, never a path of this machine."""
    path = Path(argument)
    if not path.exists():
        return argument
    path = path.resolve()
    return path.parent.name if path.name == "tokenizer.json" else path.name


@lru_cache(maxsize=4)
def load_tokenizer(argument: str) -> TextTokenizer:
    """A tokenizer from a ``tokenizer.json``, a directory that holds one, or the name of a bundled encoding.

    Raises:
        ConfigError: nothing of that name, or not a tokenizer.
        MissingBackendError: the package that reads it is not installed.
    """
    path = Path(argument)
    if path.is_dir():
        return _from_file(path / "tokenizer.json")
    return _from_file(path) if path.exists() else _bundled(argument)


def _from_file(path: Path) -> TextTokenizer:
    if not path.is_file():
        raise ConfigError("no tokenizer.json in the directory", where=str(path.parent))
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise MissingBackendError("rendering text needs the package tokenizers", hint=INSTALL_HINT) from error
    try:
        plain, special = Tokenizer.from_file(str(path)), Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises bare Exception
        raise ConfigError(f"not a tokenizer file ({error})", where=str(path)) from error
    plain.encode_special_tokens = True
    for tokenizer in (plain, special):
        tokenizer.no_truncation()
        tokenizer.no_padding()
    template, values = _template(path.parent)
    return TextTokenizer(
        vocab_size=special.get_vocab_size(with_added_tokens=True),
        encode_text=lambda text: list(plain.encode(text, add_special_tokens=False).ids),
        encode_special=lambda text: list(special.encode(text, add_special_tokens=False).ids),
        special_id=special.token_to_id,
        chat_template=template,
        template_values=values,
    )


def _template(folder: Path) -> tuple[str | None, dict[str, str]]:
    """The chat template of a model directory, and the special tokens that it may name."""
    config: dict[str, Any] = {}
    try:
        if (folder / "tokenizer_config.json").is_file():
            config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        if (folder / "chat_template.jinja").is_file():
            config["chat_template"] = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    except (ValueError, OSError) as error:
        raise ConfigError(
            f"the tokenizer's configuration cannot be read ({error})", where=str(folder)
        ) from error
    template = config.get("chat_template")
    if isinstance(template, list):  # several named ones
        named = {t["name"]: t["template"] for t in template if isinstance(t, dict)}
        template = named.get("default")
    values = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        token = config.get(name)
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            values[name] = token
    return template if isinstance(template, str) else None, values


def _bundled(name: str) -> TextTokenizer:
    try:
        quicktok = importlib.import_module("quicktok")
    except ImportError as error:
        raise ConfigError(
            f"no tokenizer file or directory {name!r}",
            where="--tokenizer",
            hint="name a tokenizer.json; for bundled names such as qwen3: pip install quicktok-v1",
        ) from error
    try:
        encoding = quicktok.get_encoding(name)
    except (ValueError, KeyError, OSError, RuntimeError) as error:
        raise ConfigError(f"no tokenizer {name!r} ({error})", where="--tokenizer") from error

    def special_id(token: str) -> int | None:
        return int(encoding.encode_single_token(token)) if token in encoding.special_tokens_set else None

    return TextTokenizer(
        vocab_size=int(encoding.n_vocab),
        encode_text=encoding.encode_ordinary,
        encode_special=encoding.encode_with_special,
        special_id=special_id,
        chat_template=None,
        template_values={},
    )
