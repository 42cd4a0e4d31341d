"""Run a model once and show, or write, its outputs.

  transmuter run model.onnx --input x=photo.npy --output results
  transmuter run model.onnx --fill random --dim batch=4 --repeat 20
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import structlog

from transmuter_async.cli.inputs import add_input_arguments, gather, replacing
from transmuter_async.cli.output import Output, seconds
from transmuter_async.cli.progress import downloads
from transmuter_async.errors import InputError
from transmuter_async.runtime import Runtime

SHOWN = 6
"""Values of an output that are shown."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `run`."""
    parser.add_argument("model", help="an ONNX file, or hf://owner/repository@revision/path")
    add_input_arguments(parser)
    parser.add_argument("-o", "--output", type=Path, metavar="DIR", help="write each output to DIR/NAME.npy")
    parser.add_argument("--outputs", metavar="NAMES", help="only these outputs, with commas between")
    parser.add_argument("--compiler", choices=("xla", "eager"), default="xla", help="eager: numpy, nothing is compiled")
    parser.add_argument("--repeat", type=int, default=1, metavar="N", help="run N times and tell the times")
    parser.add_argument(
        "--log-compiles", action="store_true", help="log compiles, cache misses, breaks and downloads to standard error"
    )


def numbers(array: np.ndarray) -> dict[str, object]:
    """Smallest, mean and largest value, where the dtype has them."""
    try:
        wide = array.astype(np.float64)
    except (TypeError, ValueError):
        return {}
    return {"min": wide.min(), "mean": wide.mean(), "max": wide.max()} if wide.size else {}


def write(folder: Path, outputs: dict[str, object]) -> list[Path]:
    """One .npy file for each output, one .npz for a sequence; characters that a file name can't have become `_`. Blocking.

    Dtypes that numpy's format does not know are written as the next wider one that it does: bfloat16 as float32.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths: list[Path] = []
    for name, value in outputs.items():
        ending = ".npz" if isinstance(value, list) else ".npy"
        path = folder / ("".join(c if c.isalnum() or c in "._-" else "_" for c in name) + ending)
        if path in paths:
            raise InputError(f"outputs of different names would both be written to {path}; pick one with --outputs")
        if isinstance(value, list) and all(isinstance(item, np.ndarray) for item in value):
            np.savez(path, **{str(index): _writable(item) for index, item in enumerate(value)})  # type: ignore[arg-type]
        elif isinstance(value, np.ndarray):
            np.save(path, _writable(value), allow_pickle=False)
        else:
            raise InputError(f"output {name!r} is no array and no sequence of arrays; leave it out with --outputs")
        paths.append(path)
    return paths


def _writable(array: np.ndarray) -> np.ndarray:
    if array.dtype == object:
        return array.astype(str)
    if array.dtype.kind == "V" or array.dtype.name not in np.sctypeDict:  # of ml_dtypes
        wider = np.float32 if np.can_cast(array.dtype, np.float32, "safe") and "int" not in array.dtype.name else np.int8
        return array.astype(np.uint8 if array.dtype.name.startswith("uint") else wider)
    return array


def described(name: str, value: object) -> dict[str, object]:
    """An output for `--json`: what it is, its range, its first values."""
    if not isinstance(value, np.ndarray):
        return {"name": name, "type": type(value).__name__, "first": repr(value)[:200]}
    first = value.reshape(-1)[:SHOWN]
    return {"name": name, "dtype": value.dtype.name, "shape": value.shape, **numbers(value), "first": first}


def logger() -> Any:
    """A structlog logger to standard error, where outputs are not."""
    processors: list[Any] = [
        structlog.processors.TimeStamper(fmt="iso"),
        structlog.processors.add_log_level,
        structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty()),
    ]
    return structlog.wrap_logger(structlog.PrintLogger(sys.stderr), processors=processors)


async def execute(options: argparse.Namespace, output: Output) -> int:
    """Load, compile, run."""
    if options.repeat < 1:
        raise InputError("--repeat must be at least 1")
    names = options.outputs.split(",") if options.outputs else None
    async with Runtime() as runtime:
        if options.log_compiles:
            runtime.log_compiles(logger())
        async with downloads(runtime.telemetry, output, f"loading {options.model}"):
            model = await runtime.load(options.model)
        inputs = await anyio.to_thread.run_sync(gather, model, options)
        compiled = await runtime.compile(model, replacing(model, inputs), outputs=names, compiler=options.compiler)
        times = []
        with output.working("compiling and running"):
            for _ in range(options.repeat):
                began = time.perf_counter_ns()
                outputs = await compiled.run(inputs)
                times.append(time.perf_counter_ns() - began)
    results = [described(name, value) for name, value in outputs.items()]
    warm = sorted(times[1:])
    output.data = {
        "model": options.model,
        "outputs": results,
        "first_ns": times[0],
        "warm_ns": warm[len(warm) // 2] if warm else None,
    }
    for each in results:
        first = each["first"]
        numbers_shown = np.array2string(first, precision=5, separator=", ") if isinstance(first, np.ndarray) else first
        output.heading(f"{each['name']}  {each.get('dtype', each.get('type'))} {each.get('shape', '')}")
        if "mean" in each:
            output.line(f"  min {each['min']:.6g}  mean {each['mean']:.6g}  max {each['max']:.6g}")
        output.line(f"  {numbers_shown}")
    output.line(f"first call {seconds(times[0])}" + (f", then {seconds(warm[len(warm) // 2])} (median)" if warm else ""))
    if options.output is not None:
        paths = await anyio.to_thread.run_sync(write, options.output, outputs)
        output.data["files"] = [str(path) for path in paths]
        output.line("written: " + ", ".join(map(str, paths)))
    return 0
