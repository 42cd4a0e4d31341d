"""Why a call would compile, and the advice after repeated misses on one axis."""

from __future__ import annotations

import numpy as np

from tests.compiler.support import Session, graph, node, proto
from transmuter_async.compiler import CacheAdvice, why

MADE = proto(
    [node("MatMul", ["x", "w"], ["h"]), node("Add", ["h", "y"], ["z"])],
    ["x:float[batch,sequence,3]", "y:float[batch,sequence,3]"],
    ["z:float[batch,sequence,3]"],
    {"w": np.eye(3, dtype=np.float32)},
)


def inputs(batch: int, sequence: int) -> dict[str, np.ndarray]:
    return {name: np.zeros((batch, sequence, 3), np.float32) for name in ("x", "y")}


def test_why_tells_hits_and_what_differs_and_changes_nothing():
    session = Session(MADE)
    assert str(why(session.prepared, session.cache, inputs(1, 37))) == "miss: nothing is compiled at position 0 yet"
    session(inputs(1, 37))
    before = session.cache.statistics()
    assert why(session.prepared, session.cache, inputs(1, 37)).hit == "cached"
    told = why(session.prepared, session.cache, inputs(1, 41))
    assert told.hit is None
    [difference] = told.differences
    assert (difference.dimension, difference.axis, difference.cached, difference.called) == ("sequence", 1, 37, 41)
    assert "sequence 37 → 41" in str(told)
    assert "a bucket of 64 would serve both" in str(told)
    assert session.cache.statistics() == before


def test_why_takes_the_nearest_key():
    session = Session(MADE)
    session(inputs(2, 8))
    session(inputs(1, 40))
    told = why(session.prepared, session.cache, inputs(1, 41))
    assert [d.dimension for d in told.differences] == ["sequence"]
    assert told.differences[0].cached == 40


def test_why_names_static_values():
    branches = {
        "then_branch": graph([node("Concat", ["x", "x"], ["a"], axis=0)], [], ["a:float[m]"]),
        "else_branch": graph([node("Neg", ["x"], ["b"])], [], ["b:float[n]"]),
    }
    made = proto(
        [node("Equal", ["sr", "k"], ["c"]), node("If", ["c"], ["y"], **branches)],
        ["x:float[n]", "sr:int64[]"],
        ["y:float[n]"],
        {"k": np.array(16000)},
    )
    session = Session(made)
    x = np.zeros(3, np.float32)
    session({"x": x, "sr": np.array(16000)})
    told = why(session.prepared, session.cache, {"x": x, "sr": np.array(8000)})
    [difference] = told.differences
    assert (difference.name, int(difference.called)) == ("sr", 8000)
    assert told.advice is None


def test_advice_comes_once_for_an_axis_that_keeps_missing():
    session = Session(MADE)
    given = []
    for sequence in (5, 9, 17, 33, 40, 41, 42, 43):
        session(inputs(1, sequence))
        given += [fact for fact in session.facts if isinstance(fact, CacheAdvice)]
    [advice] = given
    assert (advice.position, advice.axis, advice.count) == (0, "sequence", 4)
    assert advice.advice == "batching=Batching(buckets={'sequence': [8, 16, 32, 64]})"


def test_no_advice_where_more_than_one_axis_moves():
    session = Session(MADE)
    for size in range(1, 9):
        session(inputs(size, 10 + size))
        assert not any(isinstance(fact, CacheAdvice) for fact in session.facts)
