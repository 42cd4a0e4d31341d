"""Random graphs are the same whole, broken anywhere, on the host, after other shapes, after eviction, from disk, and in onnxruntime."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.compiler.support import Session, assert_same, by_onnxruntime
from tests.properties.graphs import Drawn, graphs

EXAMPLES = int(os.environ.get("TRANSMUTER_EXAMPLES", "15"))
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
    )


def oracle(drawn: Drawn, inputs: Mapping[str, Any], host: Mapping[str, Any]) -> Mapping[str, Any]:
    """onnxruntime's outputs; the host form's where onnxruntime has no answer for such a graph."""
    try:
        return by_onnxruntime(drawn.model, inputs)
    except Exception as error:  # it raises classes of its own, which have no common base
        UNANSWERED.append(str(error)[:200])
        return host


UNANSWERED: list[str] = []


def run(drawn: Drawn, order: Any = range(CALLS), **options: Any) -> tuple[Session, dict[int, dict[str, Any]]]:
    """A session, and what its calls gave, by number."""
    session = Session(drawn.model, **options)
    return session, {number: session(drawn.inputs(number)) for number in order}


def equal(drawn: Drawn, got: Mapping[int, Mapping[str, Any]], want: Mapping[int, Mapping[str, Any]]) -> None:
    for number, outputs in got.items():
        assert_same(outputs, want[number])


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
