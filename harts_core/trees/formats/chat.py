"""Chats as message trees, and how they become rows: by trajectory, step, tree or tree step."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from harts_core.errors import ConfigError, DataError

SAMPLINGS = ("trajectory", "step", "tree", "tree-step")


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message, normalised.

    Attributes:
        role: "system", "user", "assistant" or "tool".
        content: its text.
        tool_calls: (name, arguments as a JSON value) of the calls that an assistant makes.
        trained: an assistant message that the model sampled (not a demonstration).
    """

    role: str
    content: str
    tool_calls: tuple[tuple[str, Any], ...] = ()
    trained: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """A tree of messages: node i is ``messages[i]`` after ``messages[parents[i]]`` (−1: at the start).

    A linear chat is a chain. Parents come before their children.
    """

    messages: tuple[Message, ...]
    parents: tuple[int, ...]
    rollout_id: Any = None
    group_id: Any = None
    reward: Any = None
    tools: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRow:
    """One row of a chat: nodes from the root on, those of them that are trained, and its place."""

    nodes: tuple[int, ...]
    trained: frozenset[int]
    branch: str
    step: int | None


def chat_rows(chat: Chat, sampling: str | None) -> Iterator[ChatRow]:
    """The rows of a chat.

    trajectory, tree: one row per root-to-leaf path, every trained message of it.
    step: one row per trained message of every path, up to and including it; only that message trained.
    tree-step: one row per trained node; a node that several paths share comes once. A row's step is the
    number of trained messages before its own.

    Raises:
        ConfigError: another sampling.
    """
    sampling = sampling or "trajectory"
    if sampling not in SAMPLINGS:
        raise ConfigError(
            f"{sampling!r} is no sampling of messages",
            where="--sampling",
            hint="one of " + ", ".join(SAMPLINGS),
        )
    trained = frozenset(i for i, m in enumerate(chat.messages) if m.trained)
    if sampling == "tree-step":
        for node in sorted(trained):
            path = _path(chat, node)
            step = sum(before in trained for before in path) - 1
            yield ChatRow(nodes=path, trained=frozenset([node]), branch=f"n{node}", step=step)
        return
    inner = set(chat.parents)
    leaves = [i for i in range(len(chat.messages)) if i not in inner]
    for k, leaf in enumerate(leaves):
        path = _path(chat, leaf)
        branch = str(k) if len(leaves) > 1 else ""
        if sampling != "step":
            yield ChatRow(nodes=path, trained=trained & set(path), branch=branch, step=None)
            continue
        for step, at in enumerate(i for i, node in enumerate(path) if node in trained):
            yield ChatRow(nodes=path[: at + 1], trained=frozenset([path[at]]), branch=branch, step=step)


def _path(chat: Chat, node: int) -> tuple[int, ...]:
    path = [node]
    while chat.parents[path[-1]] >= 0:
        path.append(chat.parents[path[-1]])
    return tuple(path[::-1])


def read_message(value: Any, part: str) -> Message:
    """A message in OpenAI's shape (``tool_calls``, or the older ``function_call``).

    Raises:
        DataError: not a message, an unknown role, or content that is not text.
    """
    if not isinstance(value, Mapping):
        raise DataError(f"a message is {type(value).__name__}, not an object", where=part)
    role = {"function": "tool", "developer": "system"}.get(str(value.get("role")), value.get("role"))
    if role not in ("system", "user", "assistant", "tool"):
        raise DataError(f"a message has the role {value.get('role')!r}", where=part)
    calls = [c.get("function") if isinstance(c, Mapping) else None for c in value.get("tool_calls") or []]
    if value.get("function_call"):
        calls.append(value["function_call"])
    demonstration = bool(value.get("is_demo")) or value.get("weight") == 0
    return Message(
        role=str(role),
        content=_text(value.get("content"), part),
        tool_calls=tuple(_call(c, part) for c in calls),
        trained=role == "assistant" and not demonstration,
    )


def _text(content: Any, part: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list):
        texts = [c.get("text") if isinstance(c, Mapping) else c for c in content]
        if all(isinstance(t, str) for t in texts):
            return "".join(map(str, texts))
    raise DataError("a message has content that is not text", where=part)


def _call(value: Any, part: str) -> tuple[str, Any]:
    if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
        raise DataError("a tool call has no function name", where=part)
    return value["name"], parse_arguments(value.get("arguments"))


def parse_arguments(arguments: Any) -> Any:
    """Arguments as a JSON value; text that is not JSON (models make mistakes) stays text."""
    if not isinstance(arguments, str):
        return {} if arguments is None else arguments
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments
