"""What a call tells: exactly the facts that the telemetry page promises, in order, and never more of them."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.compiler.support import Session, node, proto
from transmuter_async.compiler import Missing, Spec, pinned

HIT, BREAK = ["CacheHit"], ["BreakStarted", "BreakDone"]
MISS = ["CacheMiss", "SegmentStarted", "SegmentReady"]
EVICT = ["CacheEvict"]


def smooth(count: int = 25) -> Any:
    names = ["x", *(f"h{i}" for i in range(count - 1)), "y"]
    return proto([node("Tanh", [a], [b]) for a, b in itertools.pairwise(names)], ["x:float[n]"], ["y:float[n]"])


def broken(breaks: int = 2, between: int = 22) -> Any:
    """`breaks` times NonZero, with compiled segments around them."""
    nodes, last = [], "x"
    for step in range(breaks):
        for number in range(between):
            nodes.append(node("Tanh", [last], [f"s{step}_{number}"]))
            last = f"s{step}_{number}"
        nodes += [
            node("NonZero", [last], [f"w{step}"], name=f"break {step}"),
            node("Squeeze", [f"w{step}", "first"], [f"p{step}"]),
            node("Gather", [last, f"p{step}"], [f"g{step}"]),
        ]
        last = f"g{step}"
    for number in range(between):
        nodes.append(node("Sin", [last], [f"e{number}"]))
        last = f"e{number}"
    nodes.append(node("Cos", [last], ["y"]))
    return proto(nodes, ["x:float[n]"], ["y:float[k]"], {"first": np.array([0])})


def rows(count: int, zeros: int = 1) -> dict[str, np.ndarray]:
    x = np.linspace(0.5, 1, count, dtype=np.float32)
    x[:zeros] = 0
    return {"x": x}


def test_a_graph_without_breaks() -> None:
    session = Session(smooth(), cache_size=2)
    session(rows(3))
    assert session.told() == MISS
    session(rows(3, 2))
    assert session.told() == HIT
    session(rows(4))
    session(rows(5))
    assert session.told() == [*MISS, *EVICT]
    ready, evicted = session.facts[2:]
    assert evicted.position == 0 and evicted.cache_size == 2
    assert evicted.shapes == (("x", ((3,), "float")),) and ready.shapes == (("x", ((5,), "float")),)
    assert (ready.stop, ready.reason, ready.compiled, ready.host_values, ready.disk_cache) == ("end", None, True, (), None)


def test_the_kept_function_tells_nothing() -> None:
    session = Session(smooth())
    job = session.prepared.spec_job({"x": Spec((3,), "float32")})
    facts: list[Any] = []
    assert job is not None
    with pinned():
        session.cache.put(job.run(facts.append), facts.append, keep=True)
    assert [type(fact).__name__ for fact in facts] == ["SegmentStarted", "SegmentReady"]
    session(rows(3))
    assert session.told() == []
    session(rows(4))
    assert session.told() == MISS


@pytest.mark.parametrize("breaks", [1, 2, 5])
def test_each_break_gives_two_and_each_segment_one_or_three(breaks: int) -> None:
    session = Session(broken(breaks))
    session(rows(6))
    assert session.told() == [*MISS, *[name for _ in range(breaks) for name in (*BREAK, *MISS)]]
    session(rows(6))
    assert session.told() == [*HIT, *[name for _ in range(breaks) for name in (*BREAK, *HIT)]]
    session(rows(6, 2))  # other values: only what has another shape compiles
    assert session.told() == [*HIT, *BREAK, *MISS, *[name for _ in range(breaks - 1) for name in (*BREAK, *MISS)]]
    positions = [fact.position for fact in session.facts]
    assert positions == sorted(positions)
    named = [fact.node for fact in session.facts if type(fact).__name__ == "BreakStarted"]
    assert named == [f"break {step}" for step in range(breaks)]


def test_a_full_position_evicts_its_own_and_no_other() -> None:
    session = Session(broken(1), cache_size=1)
    session(rows(6))
    session(rows(6, 2))
    assert session.told() == [*HIT, *BREAK, *MISS, *EVICT]
    first = session.facts[-1]
    assert first.position == session.facts[3].position > 0
    assert ((5,), "float") in dict(first.shapes).values() or ((1, 5), "int64") in dict(first.shapes).values()
    session(rows(6))
    assert session.told() == [*HIT, *BREAK, *MISS, *EVICT]


def test_small_segments_have_an_entry_without_a_program() -> None:
    session = Session(broken(1, between=3))
    session(rows(6))
    assert session.told() == [*MISS, *BREAK, *MISS]
    assert [fact.compiled for fact in session.facts if type(fact).__name__ == "SegmentReady"] == [True, False]
    session(rows(6))
    assert session.told() == [*HIT, *BREAK, *HIT]


def test_the_disk_is_told_in_the_span_and_nowhere_else(tmp_path: Path) -> None:
    for outcome in ("miss", "hit", "hit"):
        session = Session(broken(2), cache_dir=str(tmp_path))
        session(rows(6))
        assert session.told() == [*MISS, *BREAK, *MISS, *BREAK, *MISS]
        assert [fact.disk_cache for fact in session.facts if type(fact).__name__ == "SegmentReady"] == [outcome] * 3


def test_a_value_that_no_segment_reads_hides_no_file(tmp_path: Path) -> None:
    """The second segment reads the two positions of either call; `h`, which has another shape, only goes through."""
    made = proto(
        [
            node("Abs", ["x"], ["h"]),
            node("NonZero", ["h"], ["w"]),
            node("Cast", ["w"], ["e"], to=1),
            node("Sin", ["e"], ["y"]),
        ],
        ["x:float[n]"],
        ["y:float[1,k]", "h:float[n]"],
    )
    outcomes = []
    for inputs in (rows(6, 4), rows(5, 3), rows(5, 3)):
        session = Session(made, cache_dir=str(tmp_path), min_segment_nodes=1)
        session(inputs)
        outcomes.append([fact.disk_cache for fact in session.facts if type(fact).__name__ == "SegmentReady"])
    assert outcomes == [["miss", "miss"], ["miss", "hit"], ["hit", "hit"]]


def test_what_was_called_before_hides_no_file(tmp_path: Path) -> None:
    """A name that became static with the first call is in the key of the second; another process starts with the second."""
    made = proto(
        [node("Range", ["zero", "n", "one"], ["r"]), node("Add", ["r", "x"], ["y"])],
        ["n:int64[]", "x:int64[1]"],
        ["y:int64[k]"],
        {"zero": np.array(0), "one": np.array(1)},
    )
    calls = [{"n": np.array(count), "x": np.array([1])} for count in (3, 5)]
    first = Session(made, cache_dir=str(tmp_path))
    for inputs in calls:
        first(inputs)
    for inputs in reversed(calls):
        session = Session(made, cache_dir=str(tmp_path))
        session(inputs)
        assert [fact.disk_cache for fact in session.facts if type(fact).__name__ == "SegmentReady"] == ["hit"]


def test_a_break_that_fails_says_so_last() -> None:
    made = proto(
        [
            node("NonZero", ["x"], ["w"]),
            node("Squeeze", ["w", "first"], ["p"]),
            node("Gather", ["table", "p"], ["g"], name="look"),
            node("NonZero", ["g"], ["y"], name="again"),
        ],
        ["x:float[n]"],
        ["y:int64[1,k]"],
        {"first": np.array([0]), "table": np.ones(3, np.float32)},
    )
    session = Session(made, min_segment_nodes=1)
    with pytest.raises(IndexError):
        session(rows(6))
    assert session.told() == [*BREAK, *MISS], "the alarm rings in the program of the second segment"


def test_a_call_that_is_never_advanced_again_leaves_the_cache_as_it_is() -> None:
    session = Session(broken(1))
    execution = session.prepared.start(session.prepared.take_inputs(rows(6)), seed=0, device=False)
    told: list[Any] = []
    with pinned():
        assert isinstance(execution.advance(session.cache, told.append), Missing)
    del execution
    session(rows(6))
    assert session.told() == [*MISS, *BREAK, *MISS]
