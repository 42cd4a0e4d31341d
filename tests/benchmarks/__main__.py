"""Run benchmarks, print what they found, and hold it to its bounds.

python -m tests.benchmarks                        all of them
python -m tests.benchmarks zoo cold.minilm        a module, or one benchmark of a module
python -m tests.benchmarks --quick                a short run: fewer sizes, fewer calls
python -m tests.benchmarks --check                exit status 1 when a bound is missed
python -m tests.benchmarks --json figures.json    write the figures, too
python -m tests.benchmarks zoo --into old.json    put the new figures in place of those of a run before
python -m tests.benchmarks compare A.json B.json  what changed between two runs
python -m tests.benchmarks page                   docs/benchmarks.md and its picture from docs/benchmarks.json
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks import report
from tests.benchmarks.frame import QUICK, Benchmark, find
from tests.benchmarks.machine import load, machine

LIMIT = 900
"""Seconds that one benchmark may take."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what is asked for; the exit status: 0, 1 for a missed bound with `--check`, 2 for a benchmark that failed."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if arguments[:1] == ["compare"]:
        return _compare(arguments[1:])
    if arguments[:1] == ["page"]:
        return _page(arguments[1:])
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="a module of tests/benchmarks, or module.benchmark")
    parser.add_argument("--check", action="store_true", help="exit status 1 when a figure misses its bound")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    parser.add_argument("--into", type=Path, metavar="FILE", help="write these figures over those of an earlier run")
    parser.add_argument("--quick", action="store_true", help="fewer sizes, fewer calls")
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
    if options.quick:
        os.environ[QUICK] = "1"
    earlier = json.loads(options.into.read_text("utf-8")) if options.into is not None else None
    began = load()
    results = []
    for each in chosen:
        results.append(_apart(each))
        _print(results[-1])
        flags = [f"--{flag}" for flag in ("check", "quick") if getattr(options, flag)]  # where it was written is of no matter
        shown = shlex.join(["python", "-m", "tests.benchmarks", *options.names, *flags])
        run = {"command": shown, "machine": {**machine(), "load_at_start": began}, "benchmarks": results}
        if options.json is not None:  # after each: a run that is cut off has told what it found until then
            _write(options.json, report.summed(run))
    run = report.summed(run)
    for each in run["benchmarks"][len(results) :]:
        _print(each)
    if earlier is not None:
        _write(options.into, report.merged(earlier, run))
    missed = [
        f"{each['name']}: {figure['name']}"
        for each in run["benchmarks"]
        for figure in each["figures"]
        if not figure["met"]
    ]
    failed = [each["name"] for each in results if each["failed"]]
    for text in missed:
        print(f"missed its bound: {text}")
    for text in failed:
        print(f"failed: {text}")
    return 2 if failed else 1 if missed and options.check else 0


def _compare(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks compare", description="What changed between runs."
    )
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--all", action="store_true", help="also what changed by less than a tenth")
    options = parser.parse_args(arguments)
    for each in (options.before, options.after):
        if not each.is_file():
            parser.error(f"{each} is no file")
    runs = [json.loads(each.read_text("utf-8")) for each in (options.before, options.after)]
    print(report.difference(*runs, least=0.0 if options.all else 0.1))
    return 0


def _page(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks page", description="The page of the last full run."
    )
    parser.add_argument("run", type=Path, nargs="?", help="a run to become the last full run; else the one that is")
    options = parser.parse_args(arguments)
    if options.run is not None:
        report.RUN.write_text(options.run.read_text("utf-8"), "utf-8")
    run = json.loads(report.RUN.read_text("utf-8"))
    for file, text in report.pages(run).items():
        file.write_text(text, "utf-8")
        print(file)
    return 0


def _write(file: Path, run: dict[str, Any]) -> None:
    file.write_text(json.dumps(run, indent=1, ensure_ascii=False) + "\n", "utf-8")


def _measure(each: Benchmark) -> None:
    """In the benchmark's own process: one line of JSON for each figure."""
    try:
        for figure in each.run():
            print(json.dumps({"figure": figure.to_dict()}), flush=True)
    except pytest.skip.Exception as skipped:
        print(json.dumps({"skipped": str(skipped)}), flush=True)


def _apart(each: Benchmark) -> dict[str, Any]:
    """Run a benchmark in a process of its own."""
    began, before = time.perf_counter(), load()
    command = [sys.executable, "-m", "tests.benchmarks", "--here", each.name]
    failed = None
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)
        output = done.stdout
        if done.returncode:
            failed = done.stderr.strip() or f"exit status {done.returncode}"
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
        "load": [before, load()],
    }


def _print(result: dict[str, Any]) -> None:
    print(f"\n{result['name']}: {result['title']} ({result['seconds']} s)")
    for figure in result["figures"]:
        note = f"  ({figure['note']})" if figure["note"] else ""
        number = report.number(figure["value"])
        print(f"  {figure['name']:64} {number:>9} {figure['unit']:6} {report.kept(figure)}{note}")
    if result["skipped"]:
        print(f"  skipped: {result['skipped']}")
    if result["failed"]:
        print(f"  failed: {result['failed']}")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
