"""What reading costs: memory, measured in a process of its own, and how long other threads wait for the GIL."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from tests.graph.build import model
from transmuter_async.graph import lasting_empty, parse_dtype, wire

MEASURE = """
import sys, threading, time
from transmuter_async.graph import read_model
known = lambda domain, name, opset: True
read_model(sys.argv[2], known=known)  # imports, and pages that any read needs
def peak():  # not ru_maxrss: a child inherits what its parent had when it was started
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) * 1024
late, stop = [0.0], threading.Event()
def heartbeat():
    while not stop.is_set():
        began = time.perf_counter(); stop.wait(0.001); late.append(time.perf_counter() - began - 0.001)
beat = threading.Thread(target=heartbeat); beat.start()
before = peak()
model = read_model(sys.argv[1], known=known)
after = peak()
stop.set(); beat.join()
print(after - before, model.check().prepared_bytes, max(late), sorted(late)[int(len(late) * 0.99)])
"""


def measure(path: Path, small: Path) -> tuple[float, float, float, float]:
    done = subprocess.run([sys.executable, "-c", MEASURE, str(path), str(small)], capture_output=True, text=True, check=True)
    grown, prepared, latest, late = map(float, done.stdout.split())
    return grown, prepared, latest, late


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak is read from /proc")
@pytest.mark.parametrize("kind", ["raw", "four bits", "float_data"])
def test_the_peak_is_little_more_than_the_weights(kind: str, tmp_path: Path) -> None:
    rows = 16
    if kind == "raw":
        tensors = [numpy_helper.from_array(np.full((1200, 2000), n, np.float32), f"w{n}") for n in range(rows)]
    elif kind == "four bits":
        tensors = [
            TensorProto(name=f"w{n}", data_type=TensorProto.UINT4, dims=[9_600_000], raw_data=bytes([n]) * 4_800_000)
            for n in range(rows)
        ]
    else:
        tensors = [TensorProto(name=f"w{n}", data_type=1, dims=[2_400_000]) for n in range(rows)]
        for tensor in tensors:  # field 4, packed: much faster than a list of Python floats
            tensor.MergeFromString(b"\x22" + wire._encode(9_600_000) + np.ones(2_400_000, np.float32).tobytes())
    node = [helper.make_node("Sum", ["x", "w0"], ["y"])]
    big, small = tmp_path / "big.onnx", tmp_path / "small.onnx"
    big.write_bytes(model(node, initializers=tensors).SerializeToString())
    small.write_bytes(model(node, initializers=[numpy_helper.from_array(np.ones(4000, np.float32), "w0")]).SerializeToString())
    del tensors
    grown, prepared, latest, late = measure(big, small)
    assert prepared == pytest.approx(rows * 9_600_000)
    assert 0.95 * prepared < grown <= 1.2 * prepared
    # generous: two busy cores. Parsing this file in one go holds the GIL for about 200 ms.
    assert late < 0.02
    assert latest < 0.1


@pytest.mark.parametrize("kind", ["float", "bfloat16", "int4", "bool"])
@pytest.mark.parametrize("count", [0, 1, 1000, 3_000_001])
def test_memory_for_weights_is_aligned_and_can_be_written(kind: str, count: int) -> None:
    array = lasting_empty(count, parse_dtype(kind))
    assert array.shape == (count,)
    assert array.dtype == parse_dtype(kind)
    assert not count or array.ctypes.data % 64 == 0
    array[...] = np.ones(1, array.dtype)
    assert (array == np.ones(1, array.dtype)).all()


def test_memory_that_is_not_there_is_an_error_that_reading_knows() -> None:
    with pytest.raises(MemoryError):
        lasting_empty(1 << 60, np.dtype(np.uint8))


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="only Linux tells what a process holds, in /proc")
def test_memory_for_weights_goes_back_in_any_order() -> None:
    def held() -> int:
        text = Path("/proc/self/status").read_text()
        return next(int(line.split()[1]) for line in text.splitlines() if line.startswith("RssAnon")) * 1024

    before = held()
    arrays = [lasting_empty(1 << 24, np.dtype(np.uint8)) for _ in range(12)]
    for array in arrays:
        array[...] = 1
    assert held() - before > 190e6
    del arrays[::2]
    assert held() - before < 110e6
