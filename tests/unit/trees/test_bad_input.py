"""Every row of the table of things that go wrong in real files: the message, or the count."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harts_core.errors import ConfigError, DataError
from harts_core.trees.ingest import ingest
from harts_core.trees.ingest_options import IngestOptions
from tests.unit.trees.ingest_helpers import ingest_rows, row, write_jsonl

NAN = float("nan")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"loss_mask": [0, 1, 1]}, "loss_mask has 3 values for 4 tokens"),
        ({"loss_mask": [0, 0, 1, 1, 1]}, "loss_mask has 5 values for 4 tokens"),
        ({"loss_mask": [0, 0, 2, 1]}, "loss_mask holds 2 at index 2; a mask holds 0 and 1"),
        ({"loss_mask": ...}, "no loss mask: none of loss_mask, "),
        ({"loss_mask": [[0, 1], [1, 1]]}, r"loss_mask is not a flat list of numbers \(nor \[1, T\]\)"),
        ({"old_logprobs": [-1.0] * 3}, "old_logprobs has 3 values for 4 tokens or 2 trained positions"),
        ({"old_logprobs": [-1.0] * 5}, "old_logprobs has 5 values for 4 tokens or 2 trained positions"),
        ({"ref_logprobs": [-1.0] * 5}, "ref_logprobs has 5 values"),
        ({"advantages": [1.0] * 3}, "advantages has 3 values for 4 tokens or 2 trained positions"),
        ({"old_logprobs": [0, 0, NAN, -1]}, "NaN, infinite or null at 1 of 2 .* first at position 2"),
        ({"old_logprobs": [0, 0, -1, None]}, "NaN, infinite or null at 1 of 2 .* first at position 3"),
        ({"old_logprobs": [0, 0, float("-inf"), NAN]}, "null at 2 of 2 trained positions"),
        ({"advantages": NAN}, "advantages is NaN"),
        ({"advantages": [0, 0, 1e300, 0]}, "advantages is NaN, infinite or null at 1 of 2"),
        ({"old_logprobs": [0, 0, 0.5, -1]}, "old_logprobs is 0.5, above 0, at 1 .* at position 2"),
        ({"old_logprobs": [0, 0, 1.0, 1.0]}, r"old_logprobs is 1 \(1.0 is a common filler\), above 0, at 2"),
        ({"tokens": [5, -6, 7, 8]}, "tokens holds the negative id -6 at index 1"),
        ({"tokens": [5, 6, 7, 2**31]}, "tokens holds id 2147483648 at index 3, not below"),
        ({"tokens": [5, 6, 7, 2**70]}, "tokens holds 1180591620717411303424 at index 3"),
        ({"tokens": [5, 6, 7, "x"]}, "tokens holds 'x' at index 3, which is not an integer"),
        ({"tokens": [5, 6, 7, 8.5]}, "tokens holds 8.5 at index 3, which is not an integer"),
        ({"tokens": [5, 6, None, 8]}, "tokens holds None at index 2"),
        ({"tokens": [True, False, True, True]}, "tokens holds True at index 0"),
        ({"tokens": "5 6 7 8"}, "tokens is text, not a list of numbers"),
        ({"tokens": {"a": 1}}, "tokens is dict, not a list of numbers"),
        ({"tokens": [], "loss_mask": [], "old_logprobs": []}, "tokens is empty"),
        ({"tokens": ..., "prompt_ids": [1]}, "no token ids: none of tokens, "),
        ({"tokens": ..., "prompt_ids": "hi", "response_ids": [1]}, "prompt is text, not token ids"),
        ({"response_length": 2**40}, "the response has 1099511627776 tokens of 4 in all"),
        ({"response_length": -1}, "response_length is -1, not a length"),
        ({"attention_mask": [1, 1]}, "attention_mask has 2 values for 4 tokens"),
        ({"loss_mask": ..., "loss_spans": [[2, 9]]}, r"loss_spans must be .* inside \[0, 4\)"),
        ({"loss_mask": ..., "loss_spans": [[2, 3], [1, 2]]}, "loss_spans must be sorted"),
        ({"loss_mask": ..., "loss_spans": [1, 2]}, "loss_spans must hold start, stop pairs"),
        ({"reward": NAN}, "reward is nan, not a finite number"),
        ({"reward": {"a": 1}}, "reward holds {'a': 1} at index 0, which is not a number"),
        ({"step": 2**31}, "step 2147483648 does not fit 32 bits"),
        ({"step": [1]}, "step is list, not an integer"),
        ({"trajectory_id": ["a"]}, "trajectory_id is list, not a string or integer"),
        ({"group_id": "\ud800"}, "group_id holds a lone surrogate"),
    ],
)
def test_wrong_values_name_record_field_and_lengths(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    records = [row(trajectory_id="fine"), row(**change)]
    with pytest.raises(DataError, match=message) as error:
        ingest_rows(tmp_path, records)
    assert error.value.where is not None
    assert error.value.where.startswith("rows.jsonl, line 2")
    tree, report = ingest_rows(tmp_path, records, on_bad_record="skip")
    assert tree.trajectory_id == ("fine",)
    assert report.dropped["bad record"].count == 1
    assert report.dropped["bad record"].first.startswith("rows.jsonl, line 2")
    assert tree.metadata["dropped"] == {"bad record": 1}


def test_longer_logprobs_than_ids_as_in_the_atif_example(tmp_path: Path) -> None:
    bad = row(tokens=list(range(37)), loss_mask=[0] + [1] * 36, old_logprobs=[-0.1] * 44)
    with pytest.raises(DataError, match="old_logprobs has 44 values for 37 tokens or 36 trained"):
        ingest_rows(tmp_path, [bad])


def test_ids_at_or_above_the_vocabulary_size(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="id 8 at index 3, not below the vocabulary size 8"):
        ingest_rows(tmp_path, [row()], vocab_size=8)
    tree, _ = ingest_rows(tmp_path, [row()], vocab_size=9)
    assert tree.metadata["vocab_size"] == 9


def test_exact_strings_and_integral_floats_are_coerced_with_a_warning(tmp_path: Path) -> None:
    tree, report = ingest_rows(
        tmp_path,
        [
            row(tokens=["5", "6", 7, "8"], old_logprobs=["0", 0, "-0.5", "-0.25"]),
            row(trajectory_id="b", tokens=[5.0, 6.0, 7.0, 9.0], step="3"),
        ],
    )
    assert tree.tokens(0).tolist() == [5, 6, 7, 8]
    assert tree.tokens(1).tolist() == [5, 6, 7, 9]
    assert {k: f.count for k, f in report.warnings.items()} == {
        "tokens: numeric strings read as integers": 3,
        "old_logprobs: numeric strings read as numbers": 3,
        "tokens: integral floats read as integers": 4,
        "step: numeric strings read as integers": 1,
    }


def test_reencoded_text_is_a_fork_and_is_reported(tmp_path: Path) -> None:
    """Step 1 holds the history that step 0 generated in other ids: [393, 30002] for [53122, 316]."""
    tree, report = ingest_rows(
        tmp_path,
        [
            row(
                trajectory_id="r",
                step=0,
                tokens=[1, 2, 53122, 316, 9],
                loss_mask=[0, 0, 1, 1, 1],
                old_logprobs=...,
            ),
            row(
                trajectory_id="r",
                step=1,
                tokens=[1, 2, 393, 30002, 9, 4, 5],
                loss_mask=[0] * 6 + [1],
                old_logprobs=...,
            ),
            row(
                trajectory_id="r",
                step=2,
                tokens=[1, 2, 393, 30002, 9, 4, 5, 6],
                loss_mask=[0] * 7 + [1],
                old_logprobs=...,
            ),
        ],
    )
    assert sorted(tree.trajectory_id) == ["r#0", "r#1", "r#2"]
    lost = report.lost_sharing
    assert (lost.step_pairs, lost.step_tokens) == (1, 3)
    (example,) = lost.examples
    assert (example.first_id, example.second_id) == ("r#0", "r#1")
    assert (example.position, example.lost_tokens, example.context_start) == (2, 3, 0)
    assert example.first_tokens == (1, 2, 53122, 316, 9)
    assert example.second_tokens == (1, 2, 393, 30002, 9, 4)


def test_group_rows_that_part_in_the_prompt_are_reported(tmp_path: Path) -> None:
    _, report = ingest_rows(
        tmp_path,
        [
            row(trajectory_id="a", tokens=[1, 2, 3, 4], loss_mask=[0, 0, 0, 1], old_logprobs=...),
            row(trajectory_id="b", tokens=[1, 9, 3, 4], loss_mask=[0, 0, 0, 1], old_logprobs=...),
            row(trajectory_id="c", tokens=[1, 9, 3, 5], loss_mask=[0, 0, 0, 1], old_logprobs=...),
            row(trajectory_id="d", tokens=[7, 7], loss_mask=[0, 1], old_logprobs=..., group_id="other"),
        ],
    )
    assert (report.lost_sharing.prompt_pairs, report.lost_sharing.prompt_tokens) == (1, 2)
    assert report.lost_sharing.examples[0].position == 1


@pytest.mark.parametrize(
    "untrained",
    [
        row(trajectory_id="u", loss_mask=[0, 0, 0, 0]),
        row(trajectory_id="u", loss_mask=[1, 0, 0, 0]),
        row(
            trajectory_id="u", tokens=..., loss_mask=..., old_logprobs=..., prompt_ids=[1, 2], response_ids=[]
        ),
        row(trajectory_id="u", loss_mask=..., loss_spans=[], old_logprobs=[]),
    ],
)
def test_rows_without_a_trained_position_are_counted(tmp_path: Path, untrained: dict[str, Any]) -> None:
    tree, report = ingest_rows(tmp_path, [row(), untrained])
    assert tree.trajectory_id == ("a",)
    assert report.dropped["no trained position"].count == 1
    assert tree.metadata["dropped"] == {"no trained position": 1}


def test_only_untrained_rows_is_an_error_that_says_so(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no trajectories are left") as error:
        ingest_rows(tmp_path, [row(loss_mask=[0, 0, 0, 0])])
    assert error.value.where == "no trained position: 1"


def test_position_0_is_never_trained(tmp_path: Path) -> None:
    tree, report = ingest_rows(tmp_path, [row(loss_mask=[1, 1, 1, 1], old_logprobs=[-4, -3, -2, -1])])
    assert tree.loss_spans[0].tolist() == [1, 4]
    assert tree.old_logprobs is not None
    assert tree.old_logprobs[0].tolist() == [-3, -2, -1]
    assert list(report.warnings) == ["position 0 has no tokens before it and is not trained"]


def test_nonfinite_positions_are_dropped_by_option(tmp_path: Path) -> None:
    records = [
        row(loss_mask=[0, 1, 1, 1], old_logprobs=[NAN, -1, NAN, -3], advantages=[0, 1, 2, 3]),
        row(trajectory_id="b", advantages=0.5, old_logprobs=[0, 0, None, -1]),
    ]
    tree, report = ingest_rows(tmp_path, records, on_nonfinite="drop")
    assert tree.loss_spans[0].tolist() == [1, 2, 3, 4]
    assert tree.old_logprobs is not None
    assert tree.advantages is not None
    assert tree.old_logprobs[0].tolist() == [-1, -3]
    assert tree.advantages[0].tolist() == [1, 3]
    assert tree.advantages[1].tolist() == [0.5]
    assert report.dropped["non-finite value (positions)"].count == 2


def test_nonfinite_values_at_untrained_positions_do_not_matter(tmp_path: Path) -> None:
    tree, report = ingest_rows(tmp_path, [row(old_logprobs=[NAN, None, -0.5, -0.25])])
    assert tree.old_logprobs is not None
    assert tree.old_logprobs[0].tolist() == [-0.5, -0.25]
    assert not report.dropped
    assert not report.warnings


def test_sentinels_are_counted(tmp_path: Path) -> None:
    n = 12
    records = [
        row(tokens=list(range(n)), loss_mask=[0] + [1] * 11, old_logprobs=[0.0] * 9 + [-1.0, 0.0, 0.0]),
        row(trajectory_id="b", old_logprobs=[0, 0, -9999.0, -0.1]),
    ]
    _, report = ingest_rows(tmp_path, records)
    assert {k: f.count for k, f in report.warnings.items()} == {
        "old_logprobs: runs of 8 or more exact zeros at trained positions": 8,
        "old_logprobs: -9999 or less at trained positions": 1,
    }


def test_duplicates_are_kept_with_their_own_metadata(tmp_path: Path) -> None:
    records = [row(trajectory_id=f"t{i}", advantages=float(i)) for i in range(4)]
    tree, report = ingest_rows(tmp_path, records)
    assert (report.rows, report.trie_tokens, report.duplicates) == (4, 4, 3)
    assert tree.advantages is not None
    assert [tree.advantages[i][0] for i in range(4)] == [0, 1, 2, 3]


def test_duplicate_trajectory_id(tmp_path: Path) -> None:
    records = [row(), row(tokens=[5, 6, 7, 9])]
    with pytest.raises(DataError, match="trajectory_id 'a' appears twice") as error:
        ingest_rows(tmp_path, records)
    assert error.value.where == "rows.jsonl, line 2"
    tree, _ = ingest_rows(tmp_path, records, duplicate_ids="suffix")
    assert tree.trajectory_id == ("a", "a~2")


def test_prefixes_several_roots_and_single_tokens_are_normal(tmp_path: Path) -> None:
    records = [
        row(trajectory_id="long"),
        row(trajectory_id="prefix", tokens=[5, 6], loss_mask=[0, 1], old_logprobs=...),
        row(trajectory_id="root", tokens=[9, 6], loss_mask=[0, 1], old_logprobs=...),
        row(trajectory_id="single", tokens=[5], loss_mask=[1], old_logprobs=[-1.0]),
    ]
    tree, report = ingest_rows(tmp_path, records)
    assert tree.trajectory_id == ("prefix", "long", "root")  # a single token has nothing to train
    assert report.dropped["no trained position"].count == 1
    assert (report.prefix_rows, report.roots, report.forks) == (1, 2, 0)


def test_singleton_groups_everywhere_warn(tmp_path: Path) -> None:
    records = [row(trajectory_id=f"t{i}", group_id=f"u{i}", extra={"task": i // 2}) for i in range(4)]
    _, report = ingest_rows(tmp_path, records)
    assert report.singleton_groups == 4
    assert any("every group has one rollout" in reason for reason in report.warnings)
    tree, report = ingest_rows(tmp_path, records, group_key="extra.task")
    assert sorted(set(tree.group_id)) == ["0", "1"]
    assert not report.warnings
    tree, _ = ingest_rows(tmp_path, records, group_size=2)
    assert sorted(set(tree.group_id)) == ["rows.jsonl:0", "rows.jsonl:1"]
    tree, _ = ingest_rows(tmp_path, records, group_by_prompt=True)
    assert len(set(tree.group_id)) == 1
    with pytest.raises(DataError, match="4 rollouts are not a multiple of the group size 3"):
        ingest_rows(tmp_path, records, group_size=3)
    steps = [row(trajectory_id=f"t{i // 2}", step=i % 2, tokens=[5, 6, 7, i]) for i in range(8)]
    tree, _ = ingest_rows(tmp_path, steps, group_size=2)  # four rollouts of two steps
    assert [tree.group_id.count(f"rows.jsonl:{i}") for i in range(2)] == [4, 4]
    with pytest.raises(ConfigError, match="--group-by-prompt needs whole trajectories"):
        ingest_rows(tmp_path, steps, group_by_prompt=True)
    skipped = [records[0], {"x": 1}, *records[1:3]]
    tree, _ = ingest_rows(tmp_path, skipped, group_size=2, on_bad_record="skip")
    assert sorted(tree.group_id) == ["rows.jsonl:0", "rows.jsonl:1", "rows.jsonl:1"]
    with pytest.raises(DataError, match=r"extra.nothing \(the group key\) is missing or empty"):
        ingest_rows(tmp_path, records, group_key="extra.nothing")


@pytest.mark.parametrize(
    ("field", "values"), [("tokenizer", ["qwen3", "llama3"]), ("vocab_size", [100, 200])]
)
def test_mixed_tokenizers_or_vocabulary_sizes(tmp_path: Path, field: str, values: list[Any]) -> None:
    for i, value in enumerate(values):
        write_jsonl(tmp_path / f"{i}.jsonl", [row(trajectory_id=f"t{i}", **{field: value})])
    for mode in ("error", "skip"):  # never skipped
        with pytest.raises(DataError, match=f"{field} is {values[1]!r} here, but {values[0]!r} in 0.jsonl"):
            ingest([tmp_path / "0.jsonl", tmp_path / "1.jsonl"], IngestOptions(on_bad_record=mode))  # type: ignore[arg-type]
    with pytest.raises(DataError, match=f"{field} is .* but .* in --{field.replace('_', '-')}"):
        ingest([tmp_path / "0.jsonl"], IngestOptions(**{field: values[1]}))


def test_verl_text_dumps_are_refused_with_the_hook(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="verl rollout dump: decoded text") as error:
        ingest_rows(tmp_path, [{"input": "hi", "output": "there", "score": 1.0, "step": 1}])
    assert error.value.hint is not None
    assert "docs/hooks/verl.py" in error.value.hint


def test_unknown_format(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="format is not known from the fields a, b"):
        ingest_rows(tmp_path, [{"a": 1, "b": 2}])
    with pytest.raises(ConfigError, match="no format 'x'"):
        ingest_rows(tmp_path, [row()], format="x")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"advantages": "gae"}, "'gae' is not grpo"),
        ({"on_bad_record": "ignore"}, "'ignore' is not error or skip"),
        ({"group_size": 0}, "must be at least 1"),
        ({"group_size": 2, "group_by_prompt": True}, "exclude each other"),
        ({"fields": {"tokns": "x"}}, "no field 'tokns'"),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        IngestOptions(**options)


def test_missing_paths_empty_globs_and_repeats(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file or directory"):
        ingest([tmp_path / "nothing.jsonl"])
    with pytest.raises(DataError, match="no file matches"):
        ingest([tmp_path / "*.jsonl"])
    with pytest.raises(DataError, match="the directory holds no rollout files"):
        ingest([tmp_path])
    path = write_jsonl(tmp_path / "a.jsonl", [row()])
    with pytest.raises(DataError, match="the file is named twice"):
        ingest([path, tmp_path])


def test_numbers_keep_their_bits(tmp_path: Path, rng: np.random.Generator) -> None:
    values = -rng.random(3).astype(np.float32)
    record = row(loss_mask=[0, 1, 1, 1], old_logprobs=[0.0, *values.tolist()], advantages=values.tolist())
    tree, _ = ingest_rows(tmp_path, [record])
    assert tree.old_logprobs is not None
    assert tree.advantages is not None
    np.testing.assert_array_equal(tree.old_logprobs[0], values)
    np.testing.assert_array_equal(tree.advantages[0], values)


@pytest.mark.parametrize("tokens", [[True, 2, 3], [1, 2, False], [[1, True, 3]]])
def test_booleans_are_no_token_ids(tmp_path: Path, tokens: list[Any]) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [row(tokens=tokens)])
    with pytest.raises(DataError, match=r"tokens holds (True|False) at index \d, which is not a number"):
        ingest([path])


@pytest.mark.parametrize(
    ("options", "message", "where"),
    [
        ({"max_record_mib": float("nan")}, "must be a positive number, not nan", "--max-record-mib"),
        ({"max_record_mib": -1.0}, "must be a positive number, not -1.0", "--max-record-mib"),
        ({"vocab_size": 2**31}, "must be at most 2147483647", "--vocab-size"),
    ],
)
def test_limits_name_their_option(options: dict[str, Any], message: str, where: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        IngestOptions(**options)
    assert error.value.where == where


def test_pipes_are_no_sources(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for source in (tmp_path / "pipe", "-"):
        with pytest.raises(DataError, match="not a regular file") as error:
            ingest([source])
        assert "write the data to a file" in str(error.value.hint)
