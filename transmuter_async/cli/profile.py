"""Run a model and show where the time goes: load, compile, waiting, segments and breaks, from the telemetry.

  transmuter profile model.onnx --fill random --dim batch=8 --repeat 50 --callers 4

Prints a table, and writes a trace that https://ui.perfetto.dev and chrome://tracing open, to NAME.trace.json in this folder.

Text in inputs, values and outputs are never recorded, only names, shapes and durations.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import numpy as np

from transmuter_async.cli.inputs import add_input_arguments, gather, replacing
from transmuter_async.cli.output import Output, seconds
from transmuter_async.cli.progress import downloads
from transmuter_async.cli.trace import chrome_trace
from transmuter_async.errors import InputError
from transmuter_async.runtime import Runtime
from transmuter_async.telemetry import Event


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `profile`."""
    parser.add_argument("model", help="an ONNX file, or hf://owner/repository@revision/path")
    add_input_arguments(parser)
    parser.add_argument("--repeat", type=int, default=20, metavar="N", help="calls of each caller (default 20)")
    parser.add_argument("--callers", type=int, default=1, metavar="N", help="concurrent callers (default 1)")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="where the trace goes (default NAME.trace.json)")
    parser.add_argument("--compiler", choices=("xla", "eager"), default="xla", help="eager: numpy, nothing is compiled")


def spread(durations: Sequence[float]) -> dict[str, float]:
    """Count, total, median, 90th percentile and longest of durations in nanoseconds."""
    if not durations:
        return {"count": 0, "total_ns": 0.0, "median_ns": 0.0, "p90_ns": 0.0, "longest_ns": 0.0}
    values = np.asarray(durations, float)
    return {
        "count": len(values),
        "total_ns": float(values.sum()),
        "median_ns": float(np.median(values)),
        "p90_ns": float(np.percentile(values, 90)),
        "longest_ns": float(values.max()),
    }


def grouped(events: Sequence[Event]) -> dict[str, list[float]]:
    """Durations by what they were: breaks by operator, the first calls apart from those that waited for no compile."""
    found: dict[str, list[float]] = {}
    for event in events:
        name = event.name.removeprefix("transmuter.").removesuffix(".stop")
        if not event.name.endswith(".stop") or "duration" not in event.measurements:
            continue
        if name == "break":
            name = f"break {event.metadata['op_type']}"
        elif name == "segment.compile":
            name = f"segment.compile at {event.metadata['position']}"
        elif name == "call":
            name = "call, compiling" if event.measurements["compiling"] else "call"
            found.setdefault("call: waiting", []).append(float(event.measurements["queued"]))
        found.setdefault(name, []).append(float(event.measurements["duration"]))
    return found


async def execute(options: argparse.Namespace, output: Output) -> int:
    """Load, compile, call, tell."""
    if options.repeat < 1 or options.callers < 1:
        raise InputError("--repeat and --callers must be at least 1")
    room = 1000 + 200 * options.repeat * options.callers
    async with Runtime() as runtime, runtime.telemetry.subscribe("transmuter", buffer=room) as subscription:
        async with downloads(runtime.telemetry, output, f"loading {options.model}"):
            model = await runtime.load(options.model)
        inputs = await anyio.to_thread.run_sync(gather, model, options)
        compiled = await runtime.compile(model, replacing(model, inputs), compiler=options.compiler)

        async def caller() -> None:
            for _ in range(options.repeat):
                await compiled.run(inputs)

        with output.working("running"):
            await compiled.run(inputs)  # finds segments and breaks, and compiles
            began = time.perf_counter_ns()
            async with anyio.create_task_group() as group:
                for _ in range(options.callers):
                    group.start_soon(caller)
            took = time.perf_counter_ns() - began
        explanation = await compiled.explain()
        events: list[Event] = []
        while True:
            try:
                events.append(subscription.receive_nowait())
            except anyio.WouldBlock:
                break
    target = Path(f"{compiled.name}.trace.json") if options.trace is None else options.trace
    trace = chrome_trace(events, model=options.model, lost_events=subscription.dropped)
    await anyio.to_thread.run_sync(target.write_text, json.dumps(trace, ensure_ascii=False), "utf-8")
    spreads = {name: spread(values) for name, values in grouped(events).items()}
    calls = options.repeat * options.callers
    output.data = {
        "model": options.model,
        "calls": calls,
        "wall_ns": took,
        "calls_per_second": calls / (took / 1e9),
        "spans": spreads,
        "lost_events": subscription.dropped,
        "trace": str(target),
        "explanation": explanation.to_dict(),
    }
    _show(output, spreads, str(explanation))
    return 0


def _show(output: Output, spreads: dict[str, dict[str, float]], explanation: str) -> None:
    data: dict[str, Any] = output.data
    rows = [
        (name, each["count"], *(seconds(each[key]) for key in ("total_ns", "median_ns", "p90_ns", "longest_ns")))
        for name, each in sorted(spreads.items(), key=lambda item: -item[1]["total_ns"])
    ]
    columns = ("what", "count", "total", "median", "p90", "longest")
    output.table(columns, rows, right=columns[1:])
    output.line()
    output.line(f"{data['calls']} calls after the first, {data['calls_per_second']:.0f} per second")
    if data["lost_events"]:
        output.line(f"{data['lost_events']} events were lost; the table misses them")
    output.line(f"written: {data['trace']}, for https://ui.perfetto.dev or chrome://tracing")
    output.line()
    output.line(explanation)
