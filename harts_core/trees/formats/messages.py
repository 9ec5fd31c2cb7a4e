"""Rollouts as chat messages: OpenAI JSONL, tau-bench, tau2, SWE-agent, mini-swe-agent, ToolBench trees.

Text has to be rendered and tokenised (``--tokenizer``). What a model really sampled may have been other
ids for the same text: token ids from the rollout itself are better wherever they can be had.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from harts_core.errors import ConfigError, DataError
from harts_core.trees.formats.chat import Chat, Message, chat_rows, parse_arguments, read_message
from harts_core.trees.formats.chat_render import make_renderer
from harts_core.trees.formats.record import (
    Format,
    RawRecord,
    ReadOptions,
    lookup,
    required_list,
    required_mapping,
    reward_entry,
)
from harts_core.trees.formats.text_tokenizer import load_tokenizer

LISTS = ("messages", "traj", "history")
"""Where a linear chat may lie: OpenAI and mini-swe-agent, tau-bench, SWE-agent."""


def sniff(record: Mapping[str, Any]) -> bool:
    """Whether the record holds a list of messages, tau2 simulations, or a ToolBench search tree."""
    return any(isinstance(record.get(name), list) for name in (*LISTS, "simulations")) or _is_search(record)


def _is_search(record: Mapping[str, Any]) -> bool:
    return "answer_generation" in record and lookup(record, "tree.tree") is not None


def read(record: Mapping[str, Any], name: str, options: ReadOptions) -> Iterator[RawRecord]:
    """The rows of every chat of a record, by ``options.sampling``."""
    if options.tokenizer is None:
        raise ConfigError(
            "these rollouts are text and need a tokenizer",
            where=name,
            hint="add --tokenizer with a tokenizer.json, a model directory, or a name (qwen3)",
        )
    tokenizer = load_tokenizer(options.tokenizer)
    for part, chat in _chats(record, options):
        renderer = make_renderer(tokenizer, chat)
        for row in chat_rows(chat, options.sampling):
            place = ", ".join(p for p in (part, f"path {row.branch}" if row.branch else "") if p)
            tokens, mask = renderer.render(row, place)
            yield RawRecord(
                tokens=tokens,
                part=place,
                loss_mask=mask,
                reward=chat.reward,
                group_id=chat.group_id,
                rollout_id=chat.rollout_id,
                branch=row.branch,
                step=row.step,
                vocab_size=options.vocab_size or tokenizer.vocab_size,
            )


def _chats(record: Mapping[str, Any], options: ReadOptions) -> Iterator[tuple[str, Chat]]:
    if _is_search(record):
        yield "", _search_tree(record)
    elif isinstance(record.get("simulations"), list):
        for i, value in enumerate(record["simulations"]):
            part = f"simulation {i}"
            simulation = required_mapping(value, "simulations", part)
            reward = lookup(simulation, "reward_info.reward")
            yield part, _linear(simulation, "messages", part, reward, options)
    else:
        field = next((n for n in LISTS if isinstance(record.get(n), list)), None)
        if field is None:
            raise DataError("no list of messages: none of " + ", ".join(LISTS))
        yield "", _linear(record, field, "", record.get("reward"), options)


def _linear(record: Mapping[str, Any], field: str, part: str, reward: Any, options: ReadOptions) -> Chat:
    values = required_list(record, field, part)
    messages = tuple(read_message(v, f"{part}, message {i}".removeprefix(", ")) for i, v in enumerate(values))
    task, trial = record.get("task_id"), record.get("trial")
    rollout = next((record[n] for n in ("trajectory_id", "id") if record.get(n) is not None), None)
    if rollout is None and task is not None and trial is not None:
        rollout = f"{task}/{trial}"
    group = next(
        (record[n] for n in ("group_id", "task_id", "instance_id") if record.get(n) is not None), None
    )
    return Chat(
        messages=messages,
        parents=tuple(range(-1, len(messages) - 1)),
        rollout_id=rollout,
        group_id=group,
        reward=reward_entry(reward, options.reward_key, part),
        tools=record.get("tools"),
    )


def _search_tree(record: Mapping[str, Any]) -> Chat:
    """A ToolBench DFS answer. The prompt is that of its training messages; each thought, action and action
    input of the search becomes an assistant message with a tool call, each observation a tool message."""
    prompt = []
    chains = lookup(record, "answer_generation.train_messages")
    if not isinstance(chains, list) or not chains or not isinstance(chains[0], list):
        raise DataError("answer_generation.train_messages is missing or not a list of lists")
    for i, value in enumerate(chains[0]):
        message = read_message(value, f"train message {i}")
        if message.role == "assistant":
            break
        prompt.append(message)
    messages: list[Message] = list(prompt)
    parents = list(range(-1, len(prompt) - 1))
    # (node, message that it continues, thought so far, action named so far); children in their order
    stack: list[tuple[Mapping[str, Any], int, str, str]] = []

    def push(children: Any, parent: int, thought: str, action: str) -> None:
        if not isinstance(children, Sequence) or isinstance(children, str):
            raise DataError("children of a search node is not a list")
        nodes = [required_mapping(c, "a search node") for c in children]
        stack.extend((c, parent, thought, action) for c in reversed(nodes))

    root = required_mapping(lookup(record, "tree.tree"), "tree.tree")
    push(root.get("children") or [], len(prompt) - 1, "", "")

    def append(message: Message, parent: int) -> int:
        messages.append(message)
        parents.append(parent)
        return len(messages) - 1

    while stack:
        node, parent, thought, action = stack.pop()
        kind, text = node.get("node_type"), str(node.get("description") or "")
        children = node.get("children") or []
        if kind == "Action":
            action = text
        elif kind == "Thought":
            if thought:  # nothing was called after the thought before
                parent = append(Message(role="assistant", content=thought, trained=True), parent)
            thought = text
        elif kind == "Action Input":
            call = ((action, parse_arguments(text)),)
            message = Message(role="assistant", content=thought, tool_calls=call, trained=True)
            parent = append(message, parent)
            if node.get("observation"):
                parent = append(Message(role="tool", content=str(node["observation"])), parent)
            thought, action = "", ""
        else:
            raise DataError(f"a search node is of type {kind!r}")
        if thought and not children:
            append(Message(role="assistant", content=thought, trained=True), parent)
        push(children, parent, thought, action)
    return Chat(messages=tuple(messages), parents=tuple(parents), reward=record.get("reward"))


FORMAT = Format(
    name="messages",
    summary="chat messages: OpenAI JSONL, tau-bench, tau2, SWE-agent, ToolBench (needs --tokenizer)",
    sniff=sniff,
    read=read,
)
