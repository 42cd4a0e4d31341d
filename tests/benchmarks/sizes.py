"""Large models: a graph of 10,000 nodes, and one with 500 MB of weights."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import numpy as np
from onnx import TensorProto, helper, numpy_helper

from tests.benchmarks.build import Draft
from tests.benchmarks.frame import Figure, benchmark, quick
from tests.benchmarks.heartbeat import large
from transmuter_async.compiler import Finished, Options, SegmentCache, pinned, prepare, unobserved
from transmuter_async.sources import read_local

NODES = 10_000
WIDTH = 64
LAYERS = 30
"""Of `heartbeat.large`: 16 MB each."""


def many_nodes(path: Path, count: int = NODES) -> int:
    """Write a graph as exporters make them: encoder layers with norms in pieces and shapes computed in the graph.

    Returns:
        Its number of nodes, `count` or a few more; each layer has 52, of which some are folded.
    """
    rng = np.random.default_rng(0)
    nodes, weights = [], {}

    def weight(name: str, *shape: int) -> str:
        if name not in weights:
            drawn = rng.standard_normal(shape, np.float32) / np.float32(max(1, shape[0]) ** 0.5)
            weights[name] = numpy_helper.from_array(drawn.astype(np.float32), name)
        return name

    def constant(value: object, dtype: type = np.int64) -> str:
        name = f"c{value}".replace(" ", "")
        weights.setdefault(name, numpy_helper.from_array(np.array(value, dtype), name))
        return name

    def add(operator: str, *inputs: str, **attributes: object) -> str:
        nodes.append(helper.make_node(operator, inputs, [f"v{len(nodes)}"], **attributes))
        return str(nodes[-1].output[0])

    def linear(x: str, name: str, rows: int, columns: int) -> str:
        return add("Add", add("MatMul", x, weight(f"{name}w", rows, columns)), weight(f"{name}b", columns))

    def norm(x: str) -> str:
        centred = add("Sub", x, add("ReduceMean", x, axes=[-1]))
        power = add("ReduceMean", add("Pow", centred, constant(2.0, np.float32)), axes=[-1])
        scaled = add("Div", centred, add("Sqrt", add("Add", power, constant(1e-5, np.float32))))
        return add("Add", add("Mul", scaled, weight("scale", WIDTH)), weight("shift", WIDTH))

    def heads(x: str, perm: list[int]) -> str:
        length = add("Unsqueeze", add("Gather", add("Shape", x), constant(1)), constant([0]))
        shape = add("Concat", constant([1]), length, constant([4]), constant([WIDTH // 4]), axis=0)
        return add("Transpose", add("Reshape", x, shape), perm=perm)

    x, layer = "x", 0
    while len(nodes) < count:
        name = f"l{layer % 16}"
        query, key, value = (linear(x, f"{name}{each}", WIDTH, WIDTH) for each in "qkv")
        scores = add("MatMul", heads(query, [0, 2, 1, 3]), heads(key, [0, 2, 3, 1]))
        scores = add("Softmax", add("Div", scores, constant(4.0, np.float32)), axis=-1)
        mixed = add("Transpose", add("MatMul", scores, heads(value, [0, 2, 1, 3])), perm=[0, 2, 1, 3])
        x = norm(add("Add", x, linear(add("Reshape", mixed, constant([1, -1, WIDTH])), f"{name}o", WIDTH, WIDTH)))
        inner = linear(x, f"{name}i", WIDTH, 2 * WIDTH)
        inner = add("Mul", inner, add("Sigmoid", inner))
        x = norm(add("Add", x, linear(inner, f"{name}p", 2 * WIDTH, WIDTH)))
        layer += 1
    nodes.append(helper.make_node("Identity", [x], ["y"]))
    info = [helper.make_tensor_value_info(each, TensorProto.FLOAT, [1, "n", WIDTH]) for each in "xy"]
    graph = helper.make_graph(nodes, "many", info[:1], info[1:], list(weights.values()))
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    path.write_bytes(model.SerializeToString())
    return len(nodes)


@benchmark
def ten_thousand_nodes() -> Iterator[Figure]:
    """A graph of 10,000 nodes: from its file to the first answer, and where the time goes."""
    stages: dict[str, float] = {}

    def told(name: str, seconds: float, **more: object) -> None:
        stages[name.rpartition("/")[2]] = stages.get(name.rpartition("/")[2], 0.0) + seconds

    jax.monitoring.register_event_duration_secs_listener(told)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "many.onnx"
        count = many_nodes(path, 1000 if quick() else NODES)
        times = [time.perf_counter()]
        model = read_local(path)
        times.append(time.perf_counter())
        prepared = prepare(model, Options())
        times.append(time.perf_counter())
        cache = SegmentCache(16)
        inputs = {"x": np.random.default_rng(1).standard_normal((1, 16, WIDTH), np.float32)}
        with pinned(device=prepared.device, precision=prepared.options.precision):
            execution = prepared.start(prepared.take_inputs(inputs), seed=0, device=False)
            step = execution.advance(cache, unobserved)
            assert not isinstance(step, Finished)
            used = time.process_time()
            segment = step.job.run(unobserved)
            used = time.process_time() - used
            times.append(time.perf_counter())
            cache.put(segment, unobserved)
            done = execution.advance(cache, unobserved)
            assert isinstance(done, Finished)
            times.append(time.perf_counter())
    read, prepare_, compile_, run = (b - a for a, b in zip(times, times[1:], strict=False))
    xla = sum(seconds for name, seconds in stages.items() if "backend_compile" in name)
    lowering = sum(seconds for name, seconds in stages.items() if "to_mlir" in name)
    yield Figure("nodes of the graph", count, "")
    yield Figure("nodes traced into the program", segment.node_count, "")
    yield Figure("reading", read, "s")
    yield Figure("passes", prepare_, "s")
    yield Figure("traced and compiled", compile_, "s", bound=None if quick() else 30)
    yield Figure("processor time of that", used, "s", note="of all threads; what a busy machine does not change much")
    yield Figure("of that, XLA", xla, "s")
    yield Figure("of that, lowering to StableHLO", lowering, "s")
    yield Figure("of that, planning and tracing", compile_ - xla - lowering, "s")
    yield Figure("of that, all that is not XLA", compile_ - xla, "s", bound=None if quick() else 8)
    yield Figure("the call then", run * 1e3, "ms")


def layers(path: Path, layers: int, width: int = 1024) -> None:
    """Write a model of layers as PyTorch exports them: x float32 (n, width / 2, 4, 4) through convolutions of 3×3, each with
    BatchNormalization and Relu, then through twice as many of `Gemm`; `layers` of both, rounded down to thirds.
    """
    draft, value, channels = Draft(), "x", width // 2
    for _ in range(max(1, layers // 3)):
        value = draft("Conv", value, draft.weight((channels, channels, 3, 3)), pads=[1, 1, 1, 1])
        factors = draft.rng.uniform(0.5, 1, (4, channels)).astype(np.float32)
        value = draft("Relu", draft("BatchNormalization", value, *map(draft.weight, factors)))
    value = draft("Flatten", draft("GlobalAveragePool", value))
    for index in range(max(1, 2 * layers // 3)):
        weight = draft.weight((width, width if index else channels))
        value = draft("Relu", draft("Gemm", value, weight, draft.weight((width,)), transB=1))
    draft.nodes.append(helper.make_node("Identity", [value], ["y"]))
    shapes = {"x": ["n", channels, 4, 4], "y": ["n", width]}
    info = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items()]
    graph = helper.make_graph(draft.nodes, "layers", info[:1], info[1:], draft.weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    path.write_bytes(model.SerializeToString())


MEASURE = """
import json, sys, time
from pathlib import Path
import anyio
import numpy as np
import transmuter_async as tm

def memory(what):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(what)) * 1024

async def main():
    small, path = sys.argv[1:]
    async with tm.Runtime() as runtime:
        compiled = await runtime.compile(small)  # libraries are loaded, XLA is up
        inputs = {"x": np.ones([dim if isinstance(dim, int) else 8 for dim in compiled.model.inputs[0].type.shape], np.float32)}
        await compiled.run(inputs)
        await compiled.aclose()
        before = memory("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts again here
        began = time.perf_counter()
        compiled = await runtime.compile(path)
        load_peak, took = memory("VmHWM") - before, time.perf_counter() - began
        prepared = compiled.model.check().prepared_bytes
        await compiled.run(inputs)
        first_peak = memory("VmHWM") - before
        for _ in range(3):
            await compiled.run(inputs)
        steady = memory("VmRSS") - before
    print(json.dumps({"prepared": prepared, "load_peak": load_peak, "first_peak": first_peak, "steady": steady, "load": took}))

anyio.run(main)
"""


def memory(folder: Path, write: Callable[[Path, int], None], count: int) -> dict[str, float]:
    """Bytes that a process grows by while it compiles and calls a model of that many layers, and seconds to load it."""
    small, path = folder / "small.onnx", folder / "large.onnx"
    write(small, 1)
    write(path, count)
    done = subprocess.run([sys.executable, "-c", MEASURE, str(small), str(path)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found | {"file": path.stat().st_size}


def _memory(write: Callable[[Path, int], None], count: int) -> Iterator[Figure]:
    if not Path("/proc/self/clear_refs").exists():
        return
    with tempfile.TemporaryDirectory() as folder:
        found = memory(Path(folder), write, count)
    prepared = found["prepared"]
    yield Figure("the file", found["file"] / 1e6, "MB")
    yield Figure("weights as prepared", prepared / 1e6, "MB")
    yield Figure("peak while it is loaded, against prepared weights", found["load_peak"] / prepared, "×", bound=1.2)
    yield Figure("peak with the first answer", found["first_peak"] / prepared, "×", bound=1.2)
    yield Figure("after four calls", found["steady"] / prepared, "×", bound=1.3)
    yield Figure("loading", found["load"], "s")


@benchmark
def five_hundred_megabytes() -> Iterator[Figure]:
    """The memory that an encoder with 500 MB of weights takes, against its weights as they are prepared."""
    yield from _memory(large, LAYERS)


@benchmark
def layers_of_five_hundred_megabytes() -> Iterator[Figure]:
    """The same of convolutions with BatchNormalization and of `Gemm`, whose weights lie otherwise in the file than in use."""
    yield from _memory(layers, 3 * 29)
