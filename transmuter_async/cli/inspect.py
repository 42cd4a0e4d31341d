"""Show what a model takes, gives and consists of, and whether it can run here.

Nothing is compiled. Exit code 1 when an operator is missing.
"""

from __future__ import annotations

import argparse
from collections import Counter

import anyio

from transmuter_async.cli.inputs import declared
from transmuter_async.cli.output import Output, size
from transmuter_async.runtime import Runtime


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `inspect`."""
    parser.add_argument("model", help="an ONNX file, or hf://owner/repository@revision/path")


async def execute(options: argparse.Namespace, output: Output) -> int:
    """Load, look, print."""
    async with Runtime() as runtime:
        with output.working(f"loading {options.model}"):
            model = await runtime.load(options.model)
        report = await anyio.to_thread.run_sync(model.check)
    operators = Counter(node.operator for node in model.graph.walk())
    weights = sum(array.nbytes for array in model.graph.initializers.values())
    output.data = {
        "model": options.model,
        "producer": model.producer,
        "ir_version": model.ir_version,
        "opsets": {domain or "ai.onnx": version for domain, version in model.opsets.items()},
        "node_count": model.node_count,
        "weight_bytes": weights,
        "inputs": [{"name": value.name, "type": declared(value)} for value in model.inputs],
        "outputs": [{"name": value.name, "type": declared(value)} for value in model.outputs],
        "operators": dict(operators.most_common()),
        "ok": report.ok,
        "check": str(report),
    }
    output.fields(
        {
            "model": options.model,
            "producer": model.producer or "not said",
            "opsets": ", ".join(f"{domain or 'ai.onnx'} {version}" for domain, version in model.opsets.items()),
            "nodes": model.node_count,
            "weights": size(weights),
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
    output.line(str(report))
    return 0 if report.ok else 1
