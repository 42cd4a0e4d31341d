"""What the forms that operators take on a CPU gain: plain programs against ours, both of this library, in one process, in turns.

Processor time of all threads together, medians over blocks: that is what a program costs, also where others use the machine.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from tests import zoo
from tests.benchmarks.frame import Figure, each, only_in_full, quick
from tests.benchmarks.light import filled
from tests.benchmarks.versus import Ours
from tests.benchmarks.zoo import MODELS
from transmuter_async.compiler import Options, prepare

PUBLIC = (
    "ocr_detector",
    "ocr_recogniser",
    "ocr_classifier",
    "magika",
    "silero_vad",
    "silero_vad_openvino_16k",
    "minilm_int8",
)
LIGHT = ("squeezenet", "resnet50", "shufflenet")
BLOCK = 0.1
"""Seconds of processor time that one side computes before the other's turn."""


@each({name: name for name in (*PUBLIC, *LIGHT)})
def forms(name: str) -> Iterator[Figure]:
    """{}: a call with every operator in its plain form, against a call with the forms for a CPU."""
    if name in LIGHT:
        only_in_full()
        network = filled(name)
        [value] = network.graph.input
        shape = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
        inputs = {value.name: np.random.default_rng(1).standard_normal(shape, np.float32)}
        source: Path | bytes = onnx.ModelProto.SerializeToString(network)
    else:
        public = MODELS[name]
        source = zoo.path(public.package, public.file)
        inputs = next(iter(public.calls.values()))(np.random.default_rng(0))
    taken, plain = Ours(source), Ours(source)
    plain.prepared = prepare(plain.model, Options(lowerings=()))
    with taken.pinned():
        _same(taken(inputs), plain(inputs))
        ratios = list(_in_turns(lambda: taken(inputs), lambda: plain(inputs), rounds=5 if quick() else 15))
    ours, theirs = (statistics.median(side) for side in zip(*ratios, strict=True))
    note = f"{theirs * 1e3:.3g} ms against {ours * 1e3:.3g} ms"
    yield Figure("processor time, plain against taken", theirs / ours, "×", note=note)


def _in_turns(*calls: Callable[[], Any], rounds: int) -> Iterator[list[float]]:
    """Seconds of processor time for a call of each, round by round."""
    counts = []
    for call in calls:
        call()
        began = time.process_time()
        call()
        counts.append(max(1, round(BLOCK / max(time.process_time() - began, 1e-6))))
    for _ in range(rounds):
        took = []
        for call, count in zip(calls, counts, strict=True):
            call()  # threads of the other side settle
            began = time.process_time()
            for _ in range(count):
                call()
            took.append((time.process_time() - began) / count)
        yield took


def _same(ours: Mapping[str, Any], plain: Mapping[str, Any]) -> None:
    for name, value in ours.items():
        np.testing.assert_allclose(value, plain[name], rtol=1e-2, atol=1e-3)
