"""A process that dies or hangs ends the whole job, with its rank and event named."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from harts_core.plan.bundle_file import write_bundle
from harts_core.trees.tree_file import write_tree
from tests.distributed.launch import run
from tests.support_train import TOML, plan_of, random_tree


@pytest.mark.slow
@pytest.mark.parametrize("hang", [False, True], ids=["dies", "hangs"])
def test_lost_process(tmp_path: Path, hang: bool) -> None:
    tree = write_tree(tmp_path / "tree.arrow", random_tree(0))
    write_bundle(tmp_path / "plan", plan_of(tree, dp=2, slots=2))
    text = (
        TOML.format(dtype="float32", every=0, keep=1)
        .replace("kl_coef = 0.05", "")
        .replace(
            "[objective]", f'[objective]\nname = "tests.distributed.lost:Lost"\nhang = {str(hang).lower()}'
        )
    )
    (tmp_path / "train.toml").write_text(text + "\n[parallel]\ndp = 2\nep = 2\ntimeout_s = 15\n")
    files = ["--tree", str(tmp_path / "tree.arrow"), "--config", str(tmp_path / "train.toml")]
    arguments = ["train", str(tmp_path / "plan"), *files, "--out", str(tmp_path / "run")]
    start = time.monotonic()
    codes = run(["-m", "harts_cli.main", *arguments], 2, folder=tmp_path)
    logs = [(tmp_path / f"rank-{rank}.log").read_text() for rank in range(2)]
    assert codes == [5, 5 if hang else 9], logs
    assert "another process died or did not answer within 15 s" in logs[0]
    assert re.search(r"rank 1 was last in step 1, forward of unit \d+", logs[0]), logs[0]
    assert "Traceback" not in logs[0]
    if hang:
        assert re.search(r"rank 1 has been in step 1, forward of unit \d+ for \d+ s", logs[1])
    assert time.monotonic() - start < 200
