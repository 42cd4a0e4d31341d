"""Random graphs are the same whole, broken anywhere, on the host, after other shapes, after eviction, from disk, and in onnxruntime."""

from __future__ import annotations

import copy
import os
import tempfile
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.compiler.support import Session, assert_same, by_onnxruntime
from tests.properties.graphs import Drawn, graphs
from transmuter_async.compiler.values import fingerprint

EXAMPLES = int(os.environ.get("TRANSMUTER_EXAMPLES", "8"))
"""Graphs of each property; more of them for a long search."""

CALLS = 4


def thorough(examples: int) -> Any:
    """Settings of a property: the same graphs in every run."""
    return settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
        print_blob=False,
        phases=[Phase.generate],  # shrinking a graph compiles for minutes; `repr` shows it whole
    )


UNANSWERED = ("ort_value_tensor_slicer",)
"""What onnxruntime says where it can't run a graph at all: its Scan takes no input without rows."""


def oracle(drawn: Drawn, inputs: Mapping[str, Any], host: Mapping[str, Any]) -> Mapping[str, Any]:
    """onnxruntime's outputs; the host form's where onnxruntime has no answer for such a graph."""
    try:
        return by_onnxruntime(drawn.model, inputs)
    except Exception as error:  # it raises classes of its own, which have no common base
        if not any(word in str(error) for word in UNANSWERED):
            raise
        return host


def run(drawn: Drawn, order: Any = range(CALLS), **options: Any) -> tuple[Session, dict[int, dict[str, Any]]]:
    """A session, and what its calls gave, by number."""
    session = Session(drawn.model, **options)
    return session, {number: session(drawn.inputs(number)) for number in order}


def equal(drawn: Drawn, got: Mapping[int, Mapping[str, Any]], want: Mapping[int, Mapping[str, Any]]) -> None:
    for number, outputs in got.items():
        assert_same(outputs, want[number])


@pytest.mark.slow
@pytest.mark.timeout(600)
@thorough(EXAMPLES)
@given(drawn=graphs(), every=st.integers(1, 5))
def test_every_way_to_run_a_graph_gives_the_same(drawn: Drawn, every: int) -> None:
    onnx.checker.check_model(drawn.model)
    _, host = run(drawn, compiler="eager")
    want = {number: oracle(drawn, drawn.inputs(number), outputs) for number, outputs in host.items()}
    equal(drawn, host, want)
    session, whole = run(drawn, [0, 1, 2, 3, 0, 1], min_segment_nodes=1)
    equal(drawn, whole, want)
    assert session.compiled() == 0, "a shape that was seen compiles nothing"
    _, plain = run(drawn, [3, 0, 1], optimize=False, cache_size=1)
    equal(drawn, plain, want)
    _, broken = run(drawn, [2, 0, 3], force_breaks=range(every - 1, 10_000, every), min_segment_nodes=1)
    equal(drawn, broken, want)
    with tempfile.TemporaryDirectory() as folder:
        _, written = run(drawn, [0, 1], cache_dir=folder, min_segment_nodes=1)
        again, loaded = run(drawn, [1, 0], cache_dir=folder, min_segment_nodes=1)
    equal(drawn, written, want)
    equal(drawn, loaded, want)
    assert all(
        fact.disk_cache == "hit" for fact in again.facts if type(fact).__name__ == "SegmentReady" and fact.compiled
    )


def plan(session: Session) -> list[tuple[Any, ...]]:
    """What a call ran, without what depends on what was called before it: hits, misses, evictions."""
    kept = []
    for fact in session.facts:
        if type(fact).__name__ in ("BreakStarted", "BreakDone"):
            kept.append((type(fact).__name__, fact.position, fact.node))
    return kept


@pytest.mark.timeout(600)
@thorough(max(4, EXAMPLES // 3))
@given(drawn=graphs(nodes=(5, 40)), order=st.permutations(range(CALLS)))
def test_results_breaks_and_programs_do_not_depend_on_the_order_of_calls(drawn: Drawn, order: list[int]) -> None:
    held = []
    for numbers in (list(range(CALLS)), order):
        session = Session(drawn.model, min_segment_nodes=1, cache_size=64)
        outputs: dict[int, Any] = {}
        breaks: dict[int, Any] = {}
        for number in numbers:
            outputs[number] = session(drawn.inputs(number), seed=number)
            breaks[number] = plan(session)
        programs = {
            (each.place, each.stop, each.layout, each.key, each.program is not None) for each in session.cache.segments()
        }
        held.append((outputs, breaks, programs))
    (one, breaks_one, programs_one), (other, breaks_other, programs_other) = held
    for number in range(CALLS):
        assert_same(other[number], one[number], rtol=0, atol=0)
    assert breaks_other == breaks_one
    assert programs_other == programs_one


KNOWN = st.recursive(
    st.one_of(
        st.none(),
        st.tuples(st.sampled_from(["int64", "int32", "bool", "float32"]), st.lists(st.integers(0, 1), max_size=3)).map(
            lambda made: np.array(made[1], made[0])
        ),
        st.lists(st.sampled_from(["", "a", "ab", "ü"]), max_size=3).map(lambda texts: np.array(texts, object)),
    ),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=4,
)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, list) or isinstance(b, list):
        return isinstance(a, list) and isinstance(b, list) and len(a) == len(b) and all(map(same, a, b))
    if a is None or b is None:
        return a is b
    return a.dtype == b.dtype and a.shape == b.shape and a.tolist() == b.tolist()


@thorough(300)
@given(a=KNOWN, b=KNOWN)
def test_two_values_share_a_key_only_if_they_are_the_same(a: Any, b: Any) -> None:
    assert (fingerprint(a) == fingerprint(b)) == same(a, b)
    again = copy.deepcopy(a)
    assert fingerprint(again) == fingerprint(a) and hash(fingerprint(again)) == hash(fingerprint(a))


def test_the_sign_of_zero_and_every_nan_are_values_of_their_own() -> None:
    assert fingerprint(np.float32(0.0)) != fingerprint(np.float32(-0.0))
    assert fingerprint(np.float32(np.nan)) == fingerprint(np.float32(np.nan))
    strings = np.array(["".join(["a", str(number)]) for number in range(3)], object)
    assert fingerprint(strings) == fingerprint(np.array(["a0", "a1", "a2"], object))
