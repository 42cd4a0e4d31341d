r"""Measure latency and throughput of a model by batch size and by concurrent callers; with --serve through a batch worker.

  transmuter bench model.onnx --fill random --dim sequence=64 --batch 1,8,32 --concurrency 1,4
  transmuter bench model.onnx --fill random --serve --lengths sequence=4-256 \
      --buckets sequence=16,64,256 --mask attention_mask --concurrency 1,16,64 --plot out.svg
  transmuter bench model.onnx --fill random --tune --cache-dir ~/programs

With --tune each program is first compiled in a few other ways, and the fastest with the same results is measured; what was tried
is shown. With --cache-dir the choice is kept there for every process that compiles the model with autotune=True and that folder.
Each line of the table is measured for --seconds. Compiles are done before and not counted.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import anyio
import numpy as np

from transmuter_async.cli.chart import chart
from transmuter_async.cli.inputs import add_input_arguments, gather, replacing, shapes
from transmuter_async.cli.output import Output, seconds
from transmuter_async.cli.progress import downloads
from transmuter_async.compiler import Batching, TunedRow
from transmuter_async.errors import InputError
from transmuter_async.graph import Model
from transmuter_async.runtime import Runtime

Inputs = dict[str, np.ndarray]
REQUESTS = 64
"""Different requests that callers of --serve send, again and again."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `bench`."""
    parser.add_argument("model", help="an ONNX file, or hf://owner/repository@revision/path")
    add_input_arguments(parser)
    parser.add_argument("--batch", default="1,2,4,8,16,32", metavar="N,N", help="batch sizes (default 1,2,4,8,16,32)")
    parser.add_argument(
        "--batch-dim", metavar="NAME", help="the batch dimension; by default the first one of the inputs"
    )
    parser.add_argument("--concurrency", default="1,4", metavar="N,N", help="concurrent callers (default 1,4)")
    parser.add_argument("--seconds", type=float, default=2.0, metavar="S", help="time for each line (default 2)")
    parser.add_argument("--serve", action="store_true", help="requests of one row through a batch worker, and directly")
    parser.add_argument("--batch-size", type=int, default=32, metavar="N", help="of the batch worker (default 32)")
    parser.add_argument("--max-padded", type=int, metavar="N", help="elements of a batch of the worker, after padding")
    parser.add_argument(
        "--lengths",
        action="append",
        default=[],
        metavar="DIM=A-B",
        help="with --serve: requests of random size along DIM",
    )
    parser.add_argument(
        "--buckets",
        action="append",
        default=[],
        metavar="DIM=N,N",
        help="sizes that DIM is padded to; may be given several times",
    )
    parser.add_argument(
        "--mask", action="append", default=[], metavar="INPUT", help="input that is 1 on data, 0 on padding"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="draw throughput and latency")
    parser.add_argument(
        "--tune", action="store_true", help="choose the fastest of a few ways to compile each program, and show them"
    )
    parser.add_argument(
        "--cache-dir",
        type=Path,
        metavar="DIR",
        help="folder in which compiled programs, and what --tune chose, are kept",
    )
    parser.add_argument("--compiler", choices=("xla", "eager"), default="xla", help="eager: numpy, nothing is compiled")


def numbers(option: str, text: str) -> list[int]:
    """`1,2,4`, ascending."""
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise InputError(f"{option} {text}: write numbers as in 1,8,32")
    return sorted({int(part) for part in parts})


def pairs(option: str, given: Sequence[str], separator: str) -> dict[str, list[int]]:
    """`DIM=A-B` or `DIM=N,N` options by dimension."""
    found = {}
    for pair in given:
        name, equals, text = pair.rpartition("=")
        parts = text.split(separator)
        if not equals or not all(part.isdecimal() and int(part) > 0 for part in parts):
            raise InputError(f"{option} {pair}: write a dimension and sizes, as in {option} sequence=4{separator}256")
        found[name] = [int(part) for part in parts]
    return found


def batch_dimension(model: Model, asked: str | None) -> str | None:
    """The dimension that rows are along: the one asked for, or the first dimension that the inputs share by name.

    Raises:
        InputError: No input has the one asked for.
    """
    declared = shapes(model)
    names = {dim for shape in declared for dim in shape if isinstance(dim, str)}
    if asked is not None:
        if asked not in names:
            raise InputError(
                f"--batch-dim {asked}: no input has it; the inputs name {sorted(names) or 'no dimensions'}"
            )
        return asked
    leading = [shape[0] for shape in declared if isinstance(shape[0], str)]
    return max(leading, key=lambda name: sum(name in shape for shape in declared)) if leading else None


def made(model: Model, options: argparse.Namespace, sizes: Mapping[str, int], seed: int = 0) -> Inputs:
    """The inputs of one call, with these sizes on top of those of --dim. Masks are ones."""
    chosen = argparse.Namespace(**vars(options))
    chosen.dim = [*options.dim, *(f"{name}={size}" for name, size in sizes.items())]
    chosen.seed = options.seed + seed
    found = gather(model, chosen)
    for name in options.mask:
        if name not in found:
            raise InputError(f"--mask {name}: there is no such input")
        found[name] = np.ones_like(found[name])
    return found


async def measure(
    call: Callable[[Inputs], Awaitable[Any]], inputs: Sequence[Inputs], callers: int, limit: float
) -> dict[str, float]:
    """`callers` tasks that call one after the other for `limit` seconds: calls per second, and the spread of their latency."""
    took: list[int] = []
    number = 0
    end = time.perf_counter_ns() + int(limit * 1e9)

    async def caller() -> None:
        nonlocal number
        while time.perf_counter_ns() < end:
            each = inputs[number % len(inputs)]
            number += 1
            began = time.perf_counter_ns()
            await call(each)
            took.append(time.perf_counter_ns() - began)

    began = time.perf_counter_ns()
    async with anyio.create_task_group() as group:
        for _ in range(callers):
            group.start_soon(caller)
    wall = (time.perf_counter_ns() - began) / 1e9
    p50, p90, p99 = (float(each) for each in np.percentile(took, (50, 90, 99)))
    return {"calls": len(took), "calls_per_second": len(took) / wall, "p50_ns": p50, "p90_ns": p90, "p99_ns": p99}


async def execute(options: argparse.Namespace, output: Output) -> int:
    """Load, compile, measure, tell."""
    if not 0 < options.seconds < math.inf or options.batch_size < 1:
        raise InputError("--seconds and --batch-size must be positive")
    if options.max_padded is not None and options.max_padded < 1:
        raise InputError("--max-padded must be positive; leave it out for no bound")
    if options.tune and options.compiler == "eager":
        raise InputError("--tune measures programs, and --compiler eager has none; leave one of the two out")
    if options.plot is not None and not await anyio.Path(options.plot.parent).is_dir():
        raise InputError(f"--plot {options.plot}: there is no folder {options.plot.parent}; make it first")
    callers = numbers("--concurrency", options.concurrency)
    async with Runtime() as runtime:
        async with downloads(runtime.telemetry, output, f"loading {options.model}"):
            model = await runtime.load(options.model)
        results, tuned = await (_served if options.serve else _direct)(runtime, model, options, callers, output)
    output.data = {"model": options.model, "seconds": options.seconds, "results": results}
    if options.tune:
        output.data["tuned"] = [asdict(row) for row in tuned]
        _show_tuned(output, tuned)
    if options.serve:
        _show_served(output, results)
    else:
        _show_direct(output, results)
    if options.plot is not None:
        await anyio.to_thread.run_sync(options.plot.write_text, _drawn(results, options.serve), "utf-8")
        output.data["plot"] = str(options.plot)
        output.line(f"written: {options.plot}")
    return 0


async def _direct(
    runtime: Runtime, model: Model, options: argparse.Namespace, callers: Sequence[int], output: Output
) -> tuple[list[dict[str, Any]], tuple[TunedRow, ...]]:
    dim = batch_dimension(model, options.batch_dim)
    sizes = numbers("--batch", options.batch) if dim is not None else [1]
    first = await anyio.to_thread.run_sync(made, model, options, {} if dim is None else {dim: sizes[0]})
    compiled = await runtime.compile(
        model,
        replacing(model, first),
        compiler=options.compiler,
        cache_size=len(sizes) + 1,
        max_concurrency=1,
        cache_dir=options.cache_dir,
        autotune=options.tune,
    )
    results = []
    for size in sizes:
        inputs = await anyio.to_thread.run_sync(made, model, options, {} if dim is None else {dim: size})
        with output.working(f"batch {size}"):
            await compiled.run(inputs)
            if options.tune:
                await compiled.warm(())
            for count in callers:
                found = await measure(compiled.run, [inputs], count, options.seconds)
                rows = found["calls_per_second"] * size
                results.append({"batch": size, "concurrency": count, "rows_per_second": rows, **found})
    return results, (await compiled.explain()).tuned


async def _served(
    runtime: Runtime, model: Model, options: argparse.Namespace, callers: Sequence[int], output: Output
) -> tuple[list[dict[str, Any]], tuple[TunedRow, ...]]:
    dim = batch_dimension(model, options.batch_dim)
    if dim is None:
        raise InputError(
            "no input has a named batch dimension, so there is nothing to serve in batches; measure it without --serve"
        )
    spans = pairs("--lengths", options.lengths, "-")
    if any(len(span) != 2 or span[0] > span[1] for span in spans.values()):
        raise InputError("--lengths: write the smallest and the largest size, as in sequence=4-256")
    buckets = pairs("--buckets", options.buckets, ",")
    requests = await anyio.to_thread.run_sync(_requests, model, options, dim, spans)
    combinations = math.prod(len(sizes) for sizes in buckets.values())
    compiled = await runtime.compile(
        model,
        compiler=options.compiler,
        batching=Batching(dim, buckets, mask=options.mask),
        cache_size=max(16, combinations * (options.batch_size.bit_length() + 1)),
        cache_dir=options.cache_dir,
        autotune=options.tune,
    )
    results: list[dict[str, Any]] = []
    async with runtime.serve(
        compiled, batch_size=options.batch_size, max_padded=options.max_padded, queue_size=1 << 16
    ) as serving:
        with output.working("warming up"):
            await serving.warm(*(() if buckets.keys() >= spans.keys() and not options.input else requests[:1]))
            for each in requests:  # shapes without a bucket
                await compiled.run(each)
            if options.tune:
                await compiled.warm(())
        for way, call in (("direct", compiled.run), ("serve", serving.run)):
            for count in callers:
                with output.working(f"{way}, {count} callers"):
                    before = await serving.statistics()
                    found = await measure(call, requests, count, options.seconds)
                    after = await serving.statistics()
                batches = after.batches - before.batches
                rows = (after.batch_rows - before.batch_rows) / batches if batches else 1.0
                results.append({"way": way, "concurrency": count, "mean_batch": rows, **found})
        padded = (await serving.statistics()).padded
    found_at = [{**each, "padded": padded if each["way"] == "serve" else None} for each in results]
    return found_at, (await compiled.explain()).tuned


def _requests(model: Model, options: argparse.Namespace, dim: str, spans: Mapping[str, Sequence[int]]) -> list[Inputs]:
    """Requests of one row, of random sizes: log-uniform, as sentences are."""
    random = np.random.default_rng(options.seed)
    found = []
    for seed in range(REQUESTS if spans else 1):
        sizes = {name: int(math.exp(random.uniform(math.log(a), math.log(b + 1)))) for name, (a, b) in spans.items()}
        found.append(made(model, options, {dim: 1, **sizes}, seed))
    return found


def _show_tuned(output: Output, tuned: Sequence[TunedRow]) -> None:
    for row in tuned:
        for line in row.lines():
            output.line(line.removeprefix("  "))
    output.line()


def _show_direct(output: Output, results: Sequence[Mapping[str, Any]]) -> None:
    columns = ("batch", "callers", "rows/s", "calls/s", "p50", "p90", "p99")
    rows = [
        (
            each["batch"],
            each["concurrency"],
            f"{each['rows_per_second']:.0f}",
            f"{each['calls_per_second']:.0f}",
            *_latency(each),
        )
        for each in results
    ]
    output.table(columns, rows, right=columns)
    best = max(results, key=lambda each: float(each["rows_per_second"]))
    output.line()
    output.line(f"most rows per second: batches of {best['batch']} from {best['concurrency']} callers")


def _show_served(output: Output, results: Sequence[Mapping[str, Any]]) -> None:
    columns = ("way", "callers", "requests/s", "rows in a batch", "p50", "p90", "p99")
    rows = [
        (
            each["way"],
            each["concurrency"],
            f"{each['calls_per_second']:.0f}",
            f"{each['mean_batch']:.1f}",
            *_latency(each),
        )
        for each in results
    ]
    output.table(columns, rows, right=columns[1:])
    output.line()
    output.line(f"{results[-1]['padded']:.0%} of the elements that the worker computed were padding")


def _latency(each: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(seconds(each[name]) for name in ("p50_ns", "p90_ns", "p99_ns"))


def _drawn(results: Sequence[Mapping[str, Any]], served: bool) -> str:
    along, line = ("concurrency", "way") if served else ("batch", "concurrency")
    rate = "calls_per_second" if served else "rows_per_second"
    lines: dict[str, list[tuple[float, float]]] = {}
    late: dict[str, list[tuple[float, float]]] = {}
    for each in results:
        name = str(each[line]) if served else f"{each[line]} callers"
        lines.setdefault(name, []).append((each[along], each[rate]))
        late.setdefault(name, []).append((each[along], each["p50_ns"] / 1e6))
    x = "concurrent callers" if served else "rows in a call"
    what = "requests per second" if served else "rows per second"
    return chart([("Throughput", x, what, lines), ("Latency, median", x, "ms", late)])
