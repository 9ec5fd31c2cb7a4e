"""Messages to tokens and a loss mask: ChatML, or the tokenizer's own chat template."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Protocol

from harts_core.errors import ConfigError, DataError, MissingBackendError
from harts_core.trees.formats.chat import Chat, ChatRow, Message
from harts_core.trees.formats.text_tokenizer import INSTALL_HINT, TextTokenizer


class Renderer(Protocol):
    """Turns rows of one chat into tokens."""

    def render(self, row: ChatRow, part: str) -> tuple[list[int], list[bool]]:
        """(token ids, whether each is trained)."""


def make_renderer(tokenizer: TextTokenizer, chat: Chat) -> Renderer:
    """The tokenizer's own template where it has one, else ChatML."""
    return ChatML(tokenizer, chat) if tokenizer.chat_template is None else Template(tokenizer, chat)


class ChatML:
    """``<|im_start|>role\\ncontent<|im_end|>``, messages joined by a newline.

    Tool calls and results are written in Qwen's tags. Trained are the content and the end mark of a message,
    as they would be sampled after the header. Every message is encoded once, so rows only ever append.
    """

    def __init__(self, tokenizer: TextTokenizer, chat: Chat) -> None:
        self._tokenizer = tokenizer
        self._chat = chat
        self._encoded: dict[int, tuple[list[int], list[int]]] = {}
        ids = [tokenizer.special_id(t) for t in ("<|im_start|>", "<|im_end|>")]
        if None in ids:
            raise ConfigError(
                "the tokenizer has no <|im_start|> and <|im_end|>",
                where="--tokenizer",
                hint="name a directory whose tokenizer_config.json holds a chat_template",
            )
        self._start, self._end = (i for i in ids if i is not None)

    def render(self, row: ChatRow, part: str) -> tuple[list[int], list[bool]]:
        """See :class:`Renderer`."""
        tokens: list[int] = []
        mask: list[bool] = []
        for node in row.nodes:
            if node not in self._encoded:
                self._encoded[node] = self._encode(self._chat.messages[node])
            header, body = self._encoded[node]
            if tokens:
                header = [*self._tokenizer.encode_text("\n"), *header]
            tokens += header + body
            mask += [False] * len(header) + [node in row.trained] * len(body)
        return tokens, mask

    def _encode(self, message: Message) -> tuple[list[int], list[int]]:
        """(header, body): the body is what a model samples, or reads as one text with its header."""
        if message.role == "assistant":
            header = [self._start, *self._tokenizer.encode_text("assistant\n")]
            return header, [*self._pieces(_assistant_pieces(message)), self._end]
        if message.role == "tool":
            pieces = ["user\n", "<tool_response>", f"\n{message.content}\n", "</tool_response>"]
        else:
            pieces = [f"{message.role}\n{message.content}"]
        return [self._start], [*self._pieces(pieces), self._end]

    def _pieces(self, pieces: Sequence[str]) -> list[int]:
        """Token ids of texts and tags; a tag is one token where the vocabulary has it."""
        out: list[int] = []
        for piece in pieces:
            tag = self._tokenizer.special_id(piece) if piece in TAGS else None
            out += self._tokenizer.encode_text(piece) if tag is None else [tag]
        return out


TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")


def _assistant_pieces(message: Message) -> list[str]:
    """Texts and tags; text is not cut where no tag stands, as tokens may span the cut."""
    if not message.tool_calls:
        return [message.content]
    pieces = [f"{message.content}\n"] if message.content else []
    for i, (name, arguments) in enumerate(message.tool_calls):
        call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
        pieces += ["\n"] if i else []
        pieces += ["<tool_call>", f"\n{call}\n", "</tool_call>"]
    return pieces


class Template:
    """A Jinja chat template, run in a sandbox.

    A trained message is what the template adds to its own generation prompt. Where the template rewrites
    earlier messages (drops their thinking), a whole trajectory is not one token sequence: an error that asks
    for step-wise rows, each of which is exactly what the model read and sampled.
    """

    def __init__(self, tokenizer: TextTokenizer, chat: Chat) -> None:
        try:
            from jinja2 import TemplateSyntaxError
            from jinja2.sandbox import ImmutableSandboxedEnvironment
        except ImportError as error:
            raise MissingBackendError("chat templates need the package jinja2", hint=INSTALL_HINT) from error
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.filters["tojson"] = lambda x, **kw: json.dumps(x, ensure_ascii=False, **kw)
        environment.globals["raise_exception"] = _raise
        try:
            self._template = environment.from_string(tokenizer.chat_template or "")
        except TemplateSyntaxError as error:
            what = f"the chat template is not valid Jinja ({error})"
            raise ConfigError(what, where="--tokenizer") from error
        self._tokenizer = tokenizer
        self._chat = chat

    def render(self, row: ChatRow, part: str) -> tuple[list[int], list[bool]]:
        """See :class:`Renderer`."""
        text = ""
        tokens: list[int] = []
        mask: list[bool] = []

        def extend(longer: str, trained: bool) -> None:
            nonlocal text
            if not longer.startswith(text):
                raise DataError(
                    "the chat template rewrites earlier messages, so the rollout is not one token sequence",
                    where=part,
                    hint="use --sampling step",
                )
            ids = self._tokenizer.encode_special(longer[len(text) :])
            tokens.extend(ids)
            mask.extend([trained] * len(ids))
            text = longer

        for at, node in enumerate(row.nodes):
            if node in row.trained:
                extend(self._text(row.nodes[:at], prompt=True, part=part), False)
                extend(self._text(row.nodes[: at + 1], prompt=False, part=part).rstrip(), True)
        return tokens, mask

    def _text(self, nodes: Sequence[int], *, prompt: bool, part: str) -> str:
        from jinja2 import TemplateError

        messages = [_as_dict(self._chat.messages[n]) for n in nodes]
        try:
            return self._template.render(
                messages=messages,
                tools=self._chat.tools,
                add_generation_prompt=prompt,
                **self._tokenizer.template_values,
            )
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise DataError(f"the chat template fails on these messages ({error})", where=part) from error


def _raise(message: str) -> None:
    raise ValueError(message)


def _as_dict(message: Message) -> dict[str, Any]:
    out: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        out["tool_calls"] = [
            {"type": "function", "function": {"name": n, "arguments": a}} for n, a in message.tool_calls
        ]
    return out
