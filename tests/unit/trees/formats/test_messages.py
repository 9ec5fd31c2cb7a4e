"""Chat messages: rendering, samplings, search trees, against a byte-level tokenizer made here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from harts_core.errors import ConfigError, DataError
from harts_core.trees.formats import sniff_format
from harts_core.trees.formats.text_tokenizer import load_tokenizer, tokenizer_name
from harts_core.trees.rollout_tree import RolloutTree
from tests.unit.trees.ingest_helpers import ingest_rows

tokenizers = pytest.importorskip("tokenizers")

SPECIAL = ["<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A directory with a tokenizer of single bytes and a few special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    folder = tmp_path / "tiny-model"
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def texts(tree: RolloutTree, model: Path) -> dict[str, tuple[str, list[str]]]:
    """trajectory_id → (text, trained parts)."""
    decode = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json")).decode
    out = {}
    for i, name in enumerate(tree.trajectory_id):
        ids = tree.tokens(i)
        spans = tree.loss_spans[i].reshape(-1, 2)
        trained = [decode(ids[a:b].tolist(), skip_special_tokens=False) for a, b in spans]
        out[name] = (decode(ids.tolist(), skip_special_tokens=False), trained)
    return out


def chat(**more: Any) -> dict[str, Any]:
    messages = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "say <|im_end|>"},
        {
            "role": "assistant",
            "content": "A",
            "tool_calls": [{"function": {"name": "f", "arguments": '{"x":1}'}}],
        },
        {"role": "tool", "content": "T"},
        {"role": "assistant", "content": [{"type": "text", "text": "é"}]},
    ]
    return {"id": "c", "messages": messages} | more


CALL = 'A\n<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call><|im_end|>'
START = "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nsay <|im_end|><|im_end|>\n<|im_start|>assistant\n"
RESULT = "\n<|im_start|>user\n<tool_response>\nT\n</tool_response><|im_end|>\n<|im_start|>assistant\n"


def test_chatml_trajectory(tmp_path: Path, model: Path) -> None:
    tree, report = ingest_rows(tmp_path, [chat(task_id=7, reward=1.0)], tokenizer=str(model))
    assert texts(tree, model) == {"c": (START + CALL + RESULT + "é<|im_end|>", [CALL, "é<|im_end|>"])}
    assert tree.group_id == ("7",)
    assert tree.metadata["tokenizer"] == "tiny-model"
    assert tree.metadata["vocab_size"] == 256 + len(SPECIAL)
    assert not report.warnings
    # What the user wrote is text: only the four real message ends are the special token.
    end = load_tokenizer(str(model)).special_id("<|im_end|>")
    assert tree.tokens(0).tolist().count(end) == 5


def test_steps_append_and_share(tmp_path: Path, model: Path) -> None:
    tree, report = ingest_rows(tmp_path, [chat()], tokenizer=str(model), sampling="step")
    assert texts(tree, model) == {
        "c#0": (START + CALL, [CALL]),
        "c#1": (START + CALL + RESULT + "é<|im_end|>", ["é<|im_end|>"]),
    }
    assert tree.lcp[1] == tree.length[0]
    assert report.lost_sharing.step_pairs == 0
    assert tree.metadata["sampling"] == "step"


def test_the_models_vocabulary_may_be_larger(tmp_path: Path, model: Path) -> None:
    tree, _ = ingest_rows(tmp_path, [chat()], tokenizer=str(model), vocab_size=300)
    assert tree.metadata["vocab_size"] == 300
    with pytest.raises(DataError, match="not below the vocabulary size 257"):
        ingest_rows(tmp_path, [chat()], tokenizer=str(model), vocab_size=257)


def test_demonstrations_are_not_trained(tmp_path: Path, model: Path) -> None:
    record = chat()
    record["messages"][2]["is_demo"] = True
    tree, _ = ingest_rows(tmp_path, [record], tokenizer=str(model))
    assert texts(tree, model)["c"][1] == ["é<|im_end|>"]


QWEN = (
    "{% for m in messages %}{% if m.role == 'assistant' and not loop.last %}"
    "<|im_start|>assistant\n{{ m.content.split('!')[-1] }}<|im_end|>\n"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Like templates that drop an assistant's thinking (here: up to "!") from the history."""


def test_the_tokenizers_own_template(tmp_path: Path, model: Path) -> None:
    (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": QWEN}))
    load_tokenizer.cache_clear()
    messages = [
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "think!a"},
        {"role": "user", "content": "v"},
        {"role": "assistant", "content": "b"},
    ]
    record = {"id": "c", "messages": messages}
    tree, report = ingest_rows(tmp_path, [record], tokenizer=str(model), sampling="step")
    prompt = "<|im_start|>user\nu<|im_end|>\n<|im_start|>assistant\n"
    second = prompt + "a<|im_end|>\n<|im_start|>user\nv<|im_end|>\n<|im_start|>assistant\n"
    assert texts(tree, model) == {
        "c#0": (prompt + "think!a<|im_end|>", ["think!a<|im_end|>"]),
        "c#1": (second + "b<|im_end|>", ["b<|im_end|>"]),
    }
    assert report.lost_sharing.step_pairs == 1  # the dropped thinking is a fork, and is reported
    with pytest.raises(DataError, match="the chat template rewrites earlier messages") as error:
        ingest_rows(tmp_path, [record], tokenizer=str(model), sampling="trajectory")
    assert error.value.hint == "use --sampling step"
    del messages[2:]
    tree, _ = ingest_rows(tmp_path, [record], tokenizer=str(model))
    assert texts(tree, model)["c"] == (prompt + "think!a<|im_end|>", ["think!a<|im_end|>"])


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('no tools') }}", "the chat template fails on these messages .no tools."),
        ("{{ messages.append(1) }}", "the chat template fails"),
        ("{{ ''.__class__.__mro__ }}", "the chat template fails"),
        ("{% for m in %}", "the chat template is not valid Jinja"),
    ],
)
def test_templates_run_in_a_sandbox(tmp_path: Path, model: Path, template: str, message: str) -> None:
    (model / "chat_template.jinja").write_text(template)
    load_tokenizer.cache_clear()
    with pytest.raises((DataError, ConfigError), match=message):
        ingest_rows(tmp_path, [chat()], tokenizer=str(model))


def search_node(kind: str, text: str, children: list[Any], **more: Any) -> dict[str, Any]:
    return {"node_type": kind, "description": text, "children": children, **more}


def search() -> dict[str, Any]:
    """One thought, then two calls; the second follows a thought that was revised."""
    calls = [
        search_node("Action", "f", [search_node("Action Input", "{}", [], observation="o")]),
        search_node(
            "Thought", "again", [search_node("Action", "g", [search_node("Action Input", "bad{", [])])]
        ),
    ]
    root = search_node("Action Input", "", [search_node("Thought", "hm", calls)])
    prompt = [{"role": "system", "content": "S"}, {"role": "user", "content": "q"}]
    generation = {"train_messages": [[*prompt, {"role": "assistant", "content": "x"}]]}
    return {"tree": {"tree": root}, "answer_generation": generation}


def test_search_trees(tmp_path: Path, model: Path) -> None:
    prompt = "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"
    first = 'hm\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call><|im_end|>'
    tail = "\n<|im_start|>user\n<tool_response>\no\n</tool_response><|im_end|>"
    second = 'again\n<tool_call>\n{"name": "g", "arguments": "bad{"}\n</tool_call><|im_end|>'
    between = "\n<|im_start|>assistant\n"
    tree, report = ingest_rows(tmp_path, [search()], tokenizer=str(model), sampling="tree")
    assert texts(tree, model) == {
        "rows.jsonl:1/0": (prompt + first + tail, [first]),
        "rows.jsonl:1/1": (prompt + "hm<|im_end|>" + between + second, ["hm<|im_end|>", second]),
    }
    assert (report.rollouts, report.roots) == (1, 1)
    tree, report = ingest_rows(tmp_path, [search()], tokenizer=str(model), sampling="tree-step")
    assert sorted(t[1][0] for t in texts(tree, model).values()) == sorted([first, "hm<|im_end|>", second])
    assert tree.step is not None
    trained = [parts[0] for _, parts in texts(tree, model).values()]
    assert dict(zip(trained, tree.step.tolist(), strict=True)) == {first: 0, "hm<|im_end|>": 0, second: 1}
    assert (report.stepwise_rows, report.rollouts, report.lost_sharing.step_pairs) == (3, 1, 0)
    tree, _ = ingest_rows(tmp_path, [search()], tokenizer=str(model), sampling="step")
    assert set(tree.trajectory_id) == {"rows.jsonl:1/0#0", "rows.jsonl:1/1#0", "rows.jsonl:1/1#1"}


def test_where_messages_lie(tmp_path: Path, model: Path) -> None:
    messages = chat()["messages"]
    records = [
        {"task_id": 3, "trial": 1, "reward": 0.5, "traj": messages},
        {"simulations": [{"id": "sim", "task_id": 4, "reward_info": {"reward": 1.0}, "messages": messages}]},
        {"history": messages, "trajectory": [], "environment": "swe_main"},
    ]
    for record in records:
        assert sniff_format(record).name == "messages"
    tree, report = ingest_rows(tmp_path, records, tokenizer=str(model), format="messages")
    groups = dict(zip(tree.trajectory_id, tree.group_id, strict=True))
    assert groups == {"3/1": "3", "sim": "4", "rows.jsonl:3": "rows.jsonl:3"}
    assert report.duplicates == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"role": "wizard"}, "a message has the role 'wizard'"),
        ({"content": [{"type": "image_url"}]}, "a message has content that is not text"),
        ({"tool_calls": [{"function": {}}]}, "a tool call has no function name"),
    ],
)
def test_wrong_messages(tmp_path: Path, model: Path, change: dict[str, Any], message: str) -> None:
    record = chat()
    record["messages"][4] |= change
    with pytest.raises(DataError, match=message) as error:
        ingest_rows(tmp_path, [record], tokenizer=str(model))
    assert error.value.where == "rows.jsonl, line 1, message 4"


def test_usage(tmp_path: Path, model: Path) -> None:
    with pytest.raises(ConfigError, match="these rollouts are text and need a tokenizer"):
        ingest_rows(tmp_path, [chat()])
    with pytest.raises(ConfigError, match="'beam' is no sampling of messages"):
        ingest_rows(tmp_path, [chat()], tokenizer=str(model), sampling="beam")
    with pytest.raises(ConfigError, match=r"no tokenizer(| file or directory) 'nothing'"):
        ingest_rows(tmp_path, [chat()], tokenizer="nothing")
    with pytest.raises(ConfigError, match=r"no tokenizer.json in the directory"):
        ingest_rows(tmp_path, [chat()], tokenizer=str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="not a tokenizer file"):
        ingest_rows(tmp_path, [chat()], tokenizer=str(tmp_path / "tokenizer.json"))
    assert tokenizer_name(str(model / "tokenizer.json")) == "tiny-model"
