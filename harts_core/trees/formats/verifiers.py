"""verifiers / prime-rl v1 ``traces.jsonl``: one episode per line, each trace a tree of token nodes.

``traces[].nodes[]`` hold ``token_ids``, ``mask``, ``logprobs`` (one per true mask), ``parent`` (absent on
roots) and optionally ``advantages`` and ``reference_logprobs``. Every root-to-leaf path is a trajectory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from harts_core.errors import DataError
from harts_core.trees.formats.record import (
    Format,
    RawRecord,
    ReadOptions,
    lookup,
    required_list,
    required_mapping,
)

VALUES = {"old_logprobs": "logprobs", "ref_logprobs": "reference_logprobs", "advantages": "advantages"}


def sniff(record: Mapping[str, Any]) -> bool:
    """Whether the record is an episode with traces."""
    return "traces" in record


def read(record: Mapping[str, Any], name: str, options: ReadOptions) -> Iterator[RawRecord]:
    """The root-to-leaf paths of every trace of an episode."""
    for t, trace in enumerate(required_list(record, "traces")):
        part = f"trace {t}"
        trace = required_mapping(trace, "traces", part)
        nodes = [required_mapping(n, "nodes", part) for n in required_list(trace, "nodes", part)]
        parents = _parents(nodes, part)
        inner = set(parents)
        leaves = [i for i in range(len(nodes)) if i not in inner]
        columns = [_node(node, f"{part}, node {i}") for i, node in enumerate(nodes)]
        shared = {
            "reward": _reward(trace.get("rewards"), part),
            "group_id": lookup(record, "group.id"),
            "rollout_id": trace.get("id") or f"{record.get('id') or name}/{t}",
            "policy_version": lookup(record, "run.work.policy.end"),
        }
        trained = lookup(trace, "agent.trainable") is not False
        for k, leaf in enumerate(leaves):
            path = [leaf]
            while parents[path[-1]] >= 0:
                path.append(parents[path[-1]])
            yield RawRecord(
                part=part if len(leaves) == 1 else f"{part}, path {k}",
                branch=str(k) if len(leaves) > 1 else "",
                **_path(columns, path[::-1], trained, part),
                **shared,
            )


def _parents(nodes: list[Mapping[str, Any]], part: str) -> list[int]:
    parents = []
    for i, node in enumerate(nodes):
        parent = node.get("parent")
        if parent is None:
            parent = -1
        elif isinstance(parent, bool) or not isinstance(parent, int) or not 0 <= parent < i:
            raise DataError(f"parent {parent!r} is not an earlier node", where=f"{part}, node {i}")
        parents.append(parent)
    return parents


def _node(node: Mapping[str, Any], part: str) -> dict[str, Any]:
    """The node's lists; values are one per true mask, or None."""
    tokens, mask = required_list(node, "token_ids", part), required_list(node, "mask", part)
    if len(mask) != len(tokens):
        raise DataError(f"mask has {len(mask)} values for {len(tokens)} token_ids", where=part)
    flags = np.array([bool(m) for m in mask], np.bool_)
    out: dict[str, Any] = {"tokens": tokens, "mask": mask, "trained": int(flags.sum())}
    for field, key in VALUES.items():
        values = node.get(key)
        if values is not None and not isinstance(values, list):
            raise DataError(f"{key} is {type(values).__name__}, not a list", where=part)
        if values and len(values) == len(tokens) != out["trained"]:
            values = [v for v, trained in zip(values, flags, strict=True) if trained]
        if values and len(values) != out["trained"]:
            raise DataError(
                f"{key} has {len(values)} values for {out['trained']} true mask values"
                f" ({len(tokens)} token_ids)",
                where=part,
            )
        out[field] = values or None
    return out


def _path(columns: list[dict[str, Any]], path: list[int], trained: bool, part: str) -> dict[str, Any]:
    """The concatenated lists of a path; a value list counts only where every trained node has it."""
    tokens: list[Any] = [t for i in path for t in columns[i]["tokens"]]
    mask: list[Any] = [m for i in path for m in columns[i]["mask"]]
    out: dict[str, Any] = {
        "tokens": tokens,
        "loss_mask": mask,
        "loss_spans": None if trained else [],
        "old_logprobs": None,
    }
    nodes = [i for i in path if columns[i]["trained"]]
    for field, key in VALUES.items():
        missing = [i for i in nodes if columns[i][field] is None]
        if missing and len(missing) < len(nodes):
            raise DataError(f"{key} is missing on a node that is trained", where=f"{part}, node {missing[0]}")
        out[field] = (
            [v for i in nodes for v in columns[i][field]] if nodes and not missing and trained else None
        )
    return out


def _reward(rewards: Any, part: str) -> float | None:
    """Σ score · weight over a dict of rewards."""
    if not rewards:
        return None
    total = 0.0
    for key, entry in required_mapping(rewards, "rewards", part).items():
        pair: list[Any] = [entry, 1.0]
        if isinstance(entry, Mapping):
            pair = [entry.get("score"), entry.get("weight", 1.0)]
        if any(isinstance(v, bool) or not isinstance(v, int | float) for v in pair):
            raise DataError(f"rewards.{key} has no numeric score and weight", where=part)
        try:
            total += float(pair[0]) * float(pair[1])
        except OverflowError as error:
            raise DataError(f"rewards.{key} is too large", where=part) from error
    return total


FORMAT = Format(
    name="verifiers",
    summary="verifiers / prime-rl v1 traces.jsonl (token trees)",
    sniff=sniff,
    read=read,
)
