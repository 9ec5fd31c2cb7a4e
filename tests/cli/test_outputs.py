"""Where the program writes: never over its inputs, never over something else, and how it is stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cli.program import ROOT, run_harts, run_harts_process


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with rows.parquet, tree.arrow and plan/."""
    folder = tmp_path_factory.mktemp("files")
    rows, tree, plan = folder / "rows.parquet", folder / "tree.arrow", folder / "plan"
    for arguments in (
        ("synth", "-o", rows, "--rows", "12"),
        ("ingest", rows, "-o", tree),
        ("plan", tree, "-o", plan, "--planner", "harts-l1", "--dp", "2", "--capacity", "1024"),
    ):
        result = run_harts(*arguments)
        assert result.returncode == 0, result.stderr
    (folder / "model.toml").write_text('[model]\npreset = "cpu-dense"\n')
    (folder / "cost.toml").write_text(
        "alpha_forward = 1\nbeta_forward = 0\nalpha_backward = 2\nbeta_backward = 0\n"
    )
    return folder


def listing(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize(
    "command",
    [
        "ingest rows.parquet -o rows.parquet",
        "ingest rows.* -o rows.parquet",
        "plan tree.arrow -o tree.arrow --dp 1 --capacity 1024",
        "plan tree.arrow -o cost.toml --dp 1 --capacity 1024 --cost-model cost.toml",
        "inspect tree tree.arrow --html tree.arrow",
        "inspect plan plan --html plan/plan.json",
        "inspect plan plan --tree tree.arrow --html tree.arrow",
        "inspect diff plan plan --html plan/spans.arrow",
        "inspect schedule plan --html plan/units.arrow",
        "logprob plan --tree tree.arrow --config model.toml --as old -o plan/units.arrow",
        "logprob plan --tree tree.arrow --config model.toml --as old -o model.toml",
        "calibrate --config model.toml -o model.toml",
        "train plan --tree tree.arrow --config model.toml --out plan",
    ],
)
def test_an_input_is_never_the_output(files: Path, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    monkeypatch.chdir(files)
    before = listing(files)
    result = run_harts(*command.split())
    assert result.returncode == 2, result.stderr
    assert "the input " in result.stderr
    assert listing(files) == before


def test_html_replaces_pages_only(files: Path, tmp_path: Path) -> None:
    page, notes = tmp_path / "page.html", tmp_path / "notes.txt"
    notes.write_text("mine")
    for _ in range(2):
        assert run_harts("inspect", "tree", files / "tree.arrow", "--html", page).returncode == 0
    result = run_harts("inspect", "tree", files / "tree.arrow", "--html", notes)
    assert result.returncode == 3
    assert "not an HTML page" in result.stderr
    assert notes.read_text() == "mine"


def test_a_folder_with_a_file_named_plan_json_is_kept(files: Path, tmp_path: Path) -> None:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "plan.json").write_text('{"format": "plan-bundle"}')
    (folder / "thesis.tex").write_text("years of work")
    before = listing(tmp_path)
    result = run_harts("plan", files / "tree.arrow", "-o", folder, "--dp", "1", "--capacity", "1024")
    assert result.returncode == 3
    assert "thesis.tex" in result.stderr
    assert listing(tmp_path) == before


def test_a_pipe_is_not_an_output(files: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.parquet")
    for arguments in (
        ("synth", "-o", tmp_path / "pipe.parquet"),
        ("export", files / "tree.arrow", "-o", tmp_path / "pipe.parquet"),
    ):
        result = run_harts(*arguments)
        assert result.returncode == 3
        assert "not a regular file" in result.stderr
    assert (tmp_path / "pipe.parquet").is_fifo()


def test_what_the_system_refuses_is_an_error_with_its_path(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", "plan.json")

    monkeypatch.setattr("harts_core.plan.bundle_file.read_manifest", refuse)
    result = run_harts_in_file(tmp_path, "inspect", "plan", files / "plan")
    assert result.startswith("3\nerror: reading or writing failed (Permission denied)\n  where: plan.json")


def run_harts_in_file(folder: Path, *arguments: str | Path) -> str:
    """Exit code and stderr of a run in this process whose stdout is a real file."""
    with open(folder / "stdout", "w") as out, pytest.MonkeyPatch.context() as patch:
        patch.setattr("harts_cli.main._discard_stdout", out.flush)
        result = run_harts(*arguments)
    return f"{result.returncode}\n{result.stderr}"


@pytest.mark.parametrize("arguments", [["inspect", "tree", "tree.arrow"], ["--help"]])
def test_a_reader_that_goes_away_is_no_error(files: Path, arguments: list[str]) -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "harts_cli.main", *arguments],
        cwd=files,
        stdout=write,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
        timeout=300,
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (141, b"")


def interrupt(folder: Path, *arguments: str | Path, when: str) -> tuple[int, str]:
    """Start the program, send it Ctrl-C once ``when`` exists in the folder; exit code and stderr."""
    process = subprocess.Popen(
        [sys.executable, "-m", "harts_cli.main", *map(str, arguments)],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 120
    while process.poll() is None and not list(folder.glob(when)) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=120)
    return process.returncode, stderr


def test_an_interrupt_while_writing_leaves_nothing(tmp_path: Path) -> None:
    rows = tmp_path / "rows.parquet"
    code, stderr = interrupt(
        tmp_path, "synth", "-o", rows, "--preset", "paper", "--rows", "40000", when=".rows.parquet.*.tmp"
    )
    assert (code, stderr) == (130, "interrupted; nothing was written\n")
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_while_planning_leaves_nothing(files: Path, tmp_path: Path) -> None:
    tree, plan = files / "tree.arrow", tmp_path / "plan"
    options = ("--dp", "1", "--capacity", "1024", "--time-budget", "60", "--json")
    process = subprocess.Popen(
        [sys.executable, "-m", "harts_cli.main", "plan", str(tree), "-o", str(plan), *options],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    time.sleep(8)  # past the imports and within the search, which goes on for a minute
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 130
    assert stderr.splitlines()[-1] == "interrupted; nothing was written"
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_run_says_what_remains(files: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    config = tmp_path / "train.toml"
    config.write_text('[model]\npreset = "cpu-dense"\n[runtime]\ncheckpoint_every = 1\nthreads = 1\n')
    run = tmp_path / "run"
    train = ("train", files / "plan", "--tree", files / "tree.arrow", "--config", config, "--out", run)
    code, stderr = interrupt(run / "checkpoints", *train, "--steps", "1000", when="step-000002")
    assert code == 130
    line = stderr.strip().splitlines()[-1]
    assert line.startswith(f"interrupted; the newest checkpoint is {run / 'checkpoints' / 'step-'}")
    assert line.endswith("--resume continues from it")
    steps = int(line.split("step-")[1][:6])
    result = run_harts_process(*train, "--resume", "--steps", str(steps + 1))
    assert result.returncode == 0, result.stderr
