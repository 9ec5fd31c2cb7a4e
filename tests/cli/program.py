"""Run the real program in a subprocess: the error boundary and the exit codes are part of what is tested."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run_harts(
    *arguments: str | Path, cwd: Path | None = None, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run ``harts`` with the arguments; stdout and stderr are captured, nothing is raised."""
    return subprocess.run(
        [sys.executable, "-m", "harts_cli.main", *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=cwd or ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "120", **(env or {})},
        check=False,
        timeout=300,
    )
