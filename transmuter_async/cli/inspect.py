"""Show what a model takes, gives and consists of, and whether it can run here.

Nothing is compiled. Exit code 1 when an operator is missing.
"""

from __future__ import annotations

import argparse
from collections import Counter

import anyio

from transmuter_async.cli.inputs import declared
from transmuter_async.cli.output import Output, size
from transmuter_async.cli.progress import downloads
from transmuter_async.runtime import Runtime


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `inspect`."""
    parser.add_argument("model", help="an ONNX file, or hf://owner/repository@revision/path")


async def execute(options: argparse.Namespace, output: Output) -> int:
    """Load, look, print."""
    async with Runtime() as runtime:
        async with downloads(runtime.telemetry, output, f"loading {options.model}"):
            model = await runtime.load(options.model)
        report = await anyio.to_thread.run_sync(model.check)
    operators = Counter({f"{use.domain or 'ai.onnx'}:{use.op_type}": use.count for use in report.operators})
    output.data = {
        "model": options.model,
        "producer": model.producer,
        "ir_version": model.ir_version,
        "opsets": {domain or "ai.onnx": version for domain, version in model.opsets.items()},
        "node_count": model.node_count,
        "weight_bytes": report.weight_bytes,
        "prepared_bytes": report.prepared_bytes,
        "inputs": [{"name": value.name, "type": declared(value)} for value in model.inputs],
        "outputs": [{"name": value.name, "type": declared(value)} for value in model.outputs],
        "operators": dict(operators.most_common()),
        "ok": report.ok,
        "missing": [str(use) for use in (*report.missing, *report.unvouched)],
        "notes": report.notes,
    }
    output.fields(
        {
            "model": options.model,
            "producer": model.producer or "not said",
            "opsets": ", ".join(f"{domain or 'ai.onnx'} {version}" for domain, version in model.opsets.items()),
            "nodes": model.node_count,
            "weights": f"{size(report.weight_bytes)}, {size(report.prepared_bytes)} in memory",
        }
    )
    for title, values in (("inputs", model.inputs), ("outputs", model.outputs)):
        output.line()
        output.heading(title)
        output.table(("name", "type"), [(value.name, declared(value)) for value in values])
    output.line()
    output.heading("operators")
    output.table(("operator", "count"), operators.most_common(), right=("count",))
    output.line()
    output.heading("check")
    for note in report.notes:
        output.line(f"note: {note}")
    for use in report.missing:
        output.line(f"missing: {use}")
    for use in report.unvouched:
        output.line(f"newer than the installed onnx: {use}")
    if report.ok:
        output.line("ok: every operator has a definition")
    return 0 if report.ok else 1
