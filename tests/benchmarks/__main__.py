"""Run benchmarks, print what they found, and hold it to its bounds.

python -m tests.benchmarks                        all of them
python -m tests.benchmarks segments cold.models   a module, or one function of a module
python -m tests.benchmarks --check                exit status 1 when a bound is missed
python -m tests.benchmarks --json figures.json    write the figures, too
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks.frame import Benchmark, find

LIMIT = 1800
"""Seconds that one benchmark may take."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is asked for; the exit status: 0, 1 for a missed bound with `--check`, 2 for a benchmark that failed."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="a module of tests/benchmarks, or module.function")
    parser.add_argument("--check", action="store_true", help="exit status 1 when a figure misses its bound")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    parser.add_argument("--list", action="store_true", help="only name the benchmarks")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    try:
        chosen = find(options.names)
    except LookupError as error:
        parser.error(str(error))
    if options.list:
        for each in chosen:
            print(f"{each.name:32} {each.title}")
        return 0
    if options.here:
        for each in chosen:
            _measure(each)
        return 0
    results = []
    for each in chosen:
        results.append(_apart(each))
        _print(results[-1])
    if options.json is not None:
        options.json.write_text(json.dumps({"machine": _machine(), "benchmarks": results}, indent=1) + "\n", "utf-8")
    missed = [
        f"{each['name']}: {figure['name']}" for each in results for figure in each["figures"] if not figure["met"]
    ]
    failed = [each["name"] for each in results if each["failed"]]
    for text in missed:
        print(f"missed its bound: {text}")
    for text in failed:
        print(f"failed: {text}")
    return 2 if failed else 1 if missed and options.check else 0


def _measure(each: Benchmark) -> None:
    """In the benchmark's own process: one line of JSON for each figure."""
    try:
        for figure in each.run():
            print(json.dumps({"figure": figure.to_dict()}), flush=True)
    except pytest.skip.Exception as skipped:
        print(json.dumps({"skipped": str(skipped)}), flush=True)


def _apart(each: Benchmark) -> dict[str, Any]:
    """Run a benchmark in a process of its own."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "tests.benchmarks", "--here", each.name]
    failed = None
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)
        output = done.stdout
        if done.returncode:
            failed = done.stderr.strip()
    except subprocess.TimeoutExpired as error:
        output = error.stdout.decode() if isinstance(error.stdout, bytes) else error.stdout or ""
        failed = f"it took more than {LIMIT} s"
    said = [json.loads(line) for line in output.splitlines() if line.startswith('{"')]
    return {
        "name": each.name,
        "title": each.title,
        "figures": [line["figure"] for line in said if "figure" in line],
        "skipped": next((line["skipped"] for line in said if "skipped" in line), None),
        "failed": failed,
        "seconds": round(time.perf_counter() - began, 1),
    }


def _print(result: dict[str, Any]) -> None:
    print(f"\n{result['name']}: {result['title']} ({result['seconds']} s)")
    for figure in result["figures"]:
        bound = figure["bound"]
        kept = (
            ""
            if bound is None
            else f"{'≥' if figure['least'] else '≤'} {bound:g}  {'ok' if figure['met'] else 'MISSED'}"
        )
        note = f"  ({figure['note']})" if figure["note"] else ""
        print(f"  {figure['name']:64} {_number(figure['value']):>9} {figure['unit']:6} {kept}{note}")
    if result["skipped"]:
        print(f"  skipped: {result['skipped']}")
    if result["failed"]:
        print(f"  failed: {result['failed']}")
    sys.stdout.flush()


def _number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.3g}"


def _machine() -> dict[str, Any]:
    return {
        "python": platform.python_version(),
        "system": platform.platform(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        **{name: version(name) for name in ("jax", "numpy", "onnx", "onnxruntime")},
    }


if __name__ == "__main__":
    sys.exit(main())
