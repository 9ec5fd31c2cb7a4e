"""Progress bars go to a terminal on stderr; data goes to stdout, wherever that leads."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from contextlib import suppress

CODE = (
    "from harts_cli.output import print_line, progress_bar\n"
    "with progress_bar() as progress:\n"
    "    progress('steps', 0, 2)\n"
    "    print_line('step 1')\n"
    "    progress('steps', 1, 2)\n"
)


def read_terminal(master: int) -> str:
    data = b""
    with suppress(OSError):  # Linux reports the closed end as EIO
        while chunk := os.read(master, 65536):
            data += chunk
    os.close(master)
    return data.decode()


def run_with(*, stdout_is_terminal: bool) -> tuple[str, str]:
    """(what a pipe on stdout got, what the terminal showed)."""
    master, slave = pty.openpty()
    command = [sys.executable, "-c", CODE]
    stdout = slave if stdout_is_terminal else subprocess.PIPE
    process = subprocess.Popen(command, stdout=stdout, stderr=slave, env={**os.environ, "TERM": "xterm"})
    os.close(slave)
    piped, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    return (piped or b"").decode(), read_terminal(master)


def test_piped_data_stays_in_the_pipe() -> None:
    piped, terminal = run_with(stdout_is_terminal=False)
    assert piped == "step 1\n"
    assert "step 1" not in terminal
    assert "steps" in terminal


def test_on_a_terminal_lines_appear_above_the_bars() -> None:
    _, terminal = run_with(stdout_is_terminal=True)
    before = terminal.split("step 1")[0]
    assert before.endswith(("\r\x1b[2K", "\n"))  # at the start of a cleared line
