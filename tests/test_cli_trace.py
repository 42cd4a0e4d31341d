"""`transmuter profile` writes a trace whose slices nest; `explain --svg` a picture; `run --log-compiles` a log."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from importlib import resources
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

import transmuter_async as tm
from tests.test_runtime import affine, breaking, rows
from transmuter_async.cli import main
from transmuter_async.cli.trace import chrome_trace, slices
from transmuter_async.testing import HeldCompiler, Recorder

DIGITS = str(resources.files("transmuter_async") / "demo" / "digits.onnx")


def nested(trace: dict[str, Any]) -> list[tuple[str, ...]]:
    """The way to each slice, outermost first. Fails where two of a lane overlap without one holding the other."""
    found = []
    lanes: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for event in trace["traceEvents"]:
        assert event["ph"] in "XM"
        if event["ph"] == "M":
            assert event["args"]["name"]
            continue
        assert event["ts"] >= 0
        assert event["dur"] >= 0
        lanes.setdefault((event["pid"], event["tid"]), []).append(event)
    for lane in lanes.values():
        stack: list[dict[str, Any]] = []
        for event in sorted(lane, key=lambda event: (event["ts"], -event["dur"])):
            while stack and stack[-1]["ts"] + stack[-1]["dur"] <= event["ts"] + 1e-6:
                stack.pop()
            assert not stack or event["ts"] + event["dur"] <= stack[-1]["ts"] + stack[-1]["dur"] + 1e-6, event
            stack.append(event)
            found.append(tuple(each["name"] for each in stack))
    return found


def test_profile_writes_a_trace_that_nests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = ["profile", DIGITS, "--fill", "ones", "--dim", "batch=2", "--repeat", "5", "--callers", "3"]
    assert main([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["trace"] == "digits.trace.json"
    trace = json.loads((tmp_path / "digits.trace.json").read_text("utf-8"))
    assert trace["otherData"] == {"model": DIGITS, "lost_events": 0}
    ways = nested(trace)
    assert ways.count(("call", "compile 0 – end")) == 1
    assert ways.count(("call", "queue")) == ways.count(("call", "segment 0")) == ways.count(("call",)) == 16
    assert ("load",) in ways
    names = {(each["pid"], each["args"]["name"]) for each in trace["traceEvents"] if each["ph"] == "M"}
    assert {(1, "runtime"), (2, "digits"), (2, "calls"), (2, "calls 3")} <= names
    assert main([*arguments, "--trace", "mine.json"]) == 0
    out = capsys.readouterr().out
    assert "segment.compile at 0" in out
    assert "mine.json" in out
    nested(json.loads((tmp_path / "mine.json").read_text("utf-8")))


async def test_breaks_segments_and_compiles_lie_inside_their_call() -> None:
    x = np.array([1, -2, 3, -4], np.float32)
    async with tm.Runtime() as runtime, Recorder(runtime.telemetry) as recorder:
        compiled = await runtime.compile(breaking(), {"x": tm.Spec((4,), "float32")}, min_segment_nodes=1, name="b")
        recorder.clear()
        for _ in range(2):
            await compiled.run({"x": x})
        first, second = slices(recorder.events)
        # Position 0 is compiled ahead, what follows the break by the first call.
        inside = [each.name for each in sorted(first.inside, key=lambda each: each.begin)]
        assert inside == ["queue", "segment 0", "break NonZero", "compile 2 – end", "segment 2"]
        inside = [each.name for each in sorted(second.inside, key=lambda each: each.begin)]
        assert inside == ["queue", "segment 0", "break NonZero", "segment 2"]
        assert all(second.holds(each) for each in second.inside)
        assert len(nested(chrome_trace(recorder.events))) == 2 + 5 + 4


async def test_what_outlives_its_call_stands_for_itself() -> None:
    async with tm.Runtime() as runtime, Recorder(runtime.telemetry) as recorder:
        compiled = await runtime.compile(affine(), name="a")
        with HeldCompiler(compiled) as held:
            async with anyio.create_task_group() as leaving:
                leaving.start_soon(compiled.run, {"x": rows(2)})
                await held.wait_started()
                leaving.cancel_scope.cancel()
            async with anyio.create_task_group() as group:
                group.start_soon(compiled.run, {"x": rows(2)})
                group.start_soon(compiled.run, {"x": rows(2)})
                await anyio.wait_all_tasks_blocked()
                held.release()
        await compiled.run({"x": rows(2)})
        ways = nested(trace := chrome_trace(recorder.events))
        assert ("call (cancelled)",) in ways
        assert ("compile 0 – end",) in ways
        assert ways.count(("call", "compile of another call, then segment 0")) == 2
        assert ways.count(("call", "segment 0")) == 1
        lanes = {each["args"]["name"] for each in trace["traceEvents"] if each["name"] == "thread_name"}
        assert {"calls", "calls 2", "compiles"} <= lanes


async def test_cold_eager_and_kept_calls_have_their_slice() -> None:
    async with tm.Runtime() as runtime, Recorder(runtime.telemetry) as recorder:
        kept = await runtime.compile(affine(), {"x": tm.Spec((2, 4), "float32")}, name="kept")
        eager = await runtime.compile(affine(), compiler="eager", name="eager")
        cold = await runtime.compile(affine(), cold="interpret", compile_after=9, name="cold")
        for each in (kept, eager, cold):
            await each.run({"x": rows(2)})
        found = {each.actor: each.inside[1].name for each in slices(recorder.events) if each.kind == "call"}
        assert found == {"kept": "segment 0, kept", "eager": "host form", "cold": "host form from 0"}
        nested(json.loads(json.dumps(chrome_trace(recorder.events))))


def test_an_empty_trace_is_one_too() -> None:
    assert chrome_trace([])["traceEvents"] == []


def test_explain_draws(tmp_path: Path, capsys) -> None:
    target = tmp_path / "graph.svg"
    assert main(["explain", DIGITS, "--fill", "ones", "--dim", "batch=1", "--svg", str(target)]) == 0
    assert f"written: {target}" in capsys.readouterr().out
    text = "".join(ET.fromstring(target.read_text("utf-8")).itertext())
    assert "no breaks: one program" in text
    assert "ran 1 times" in text


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_run_logs_compiles_beside_its_output(backend: str, capsys) -> None:
    arguments = ["run", DIGITS, "--fill", "ones", "--dim", "batch=1", "--log-compiles", "--json", "--backend", backend]
    assert main(arguments) == 0
    told = capsys.readouterr()
    assert json.loads(told.out)["outputs"][0]["name"] == "probabilities"
    lines = [line for line in told.err.splitlines() if "transmuter." in line]
    assert [line.split("]")[1].split()[0] for line in lines] == [
        "transmuter.compile.stop",
        "transmuter.cache.miss",
        "transmuter.segment.compile.stop",
    ]
