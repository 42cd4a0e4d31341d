"""The worker of examples/embed_lines.py is interrupted and killed: nothing that it accepted is lost, nothing comes twice."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "embed_lines.py"
ENVIRONMENT = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(EXAMPLE.parents[1])}
LINES = 4_000


def start(source: Path, target: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-W", "error", str(EXAMPLE), str(source), str(target)],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def read_until(process: subprocess.Popen[str], words: str) -> None:
    assert process.stderr is not None
    for line in process.stderr:
        if words in line:
            return
    raise AssertionError(f"it ended without {words!r}")


@pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGINT for one process")
def test_an_interrupt_finishes_what_was_read_and_the_next_run_goes_on(tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    with source.open("w") as out:
        for number in range(LINES):
            pixels = [(number * (at + 3)) % 17 for at in range(64)]
            out.write(json.dumps({"id": f"n{number}", "pixels": pixels}) + "\n")
    written = []
    for how in (signal.SIGINT, signal.SIGKILL, None):
        process = start(source, target)
        try:
            if how is not None:
                read_until(process, " lines")
                process.send_signal(how)
            stdout, stderr = process.communicate(timeout=100)
        finally:
            process.kill()
        assert process.returncode == (-9 if how == signal.SIGKILL else 0), stderr
        if how == signal.SIGINT:
            assert "what was read is finished first" in stderr
            assert stdout.startswith("stopped after")
            assert target.read_text().endswith("\n")
            written.append(len(target.read_text().splitlines()))
            assert 64 <= written[0] < LINES
            assert f"stopped after {written[0]} lines" in stdout
    found = [json.loads(line) for line in target.read_text().splitlines()]
    assert [each["id"] for each in found] == [f"n{number}" for number in range(LINES)]
    assert all(len(each["vector"]) == 10 for each in found)
