"""What breaks and segments cost in a cached call, beside the same programs and numpy calls written out by hand."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from tests.benchmarks.frame import Figure, benchmark
from tests.compiler.support import Session, node, proto
from tests.compiler.test_facts import broken, rows
from transmuter_async.compiler import pinned, unobserved

ROUNDS, CALLS = 15, 40
FEW, MANY = 2, 10


def _call(session: Session, inputs: dict[str, np.ndarray]) -> Callable[[], Any]:
    """A cached call as the run thread makes it, without the thread."""

    def call() -> Any:
        execution = session.prepared.start(session.prepared.take_inputs(inputs), seed=0, device=False)
        return execution.advance(session.cache, unobserved)

    return call


def _by_hand(session: Session, inputs: dict[str, np.ndarray]) -> Callable[[], Any]:
    """The same programs, one after the other, with `numpy.nonzero` between them."""
    segments = session.cache.segments()
    nodes = session.prepared.nodes
    plan = [(each, None if each.needs is None else nodes[each.stop]) for each in segments]
    [output] = session.prepared.outputs

    def call() -> Any:
        values: dict[str, Any] = dict(inputs)
        for segment, stop in plan:
            outputs, alarm = segment.program(segment.weights, tuple([values[name] for name in segment.arguments]), None)
            if alarm is not None:
                assert int(alarm) == 0
            values.update(zip(segment.outputs, outputs, strict=True))
            if stop is not None:
                values[stop.outputs[0]] = np.array(np.nonzero(np.asarray(values[stop.inputs[0]])))
        return np.asarray(values[output])

    return call


def _times(*calls: Callable[[], Any]) -> list[float]:
    """Seconds of each call: medians of rounds that take turns, so that a busy machine is as hard on all of them."""
    found: list[list[float]] = [[] for _ in calls]
    for call in calls:
        call()
    for _ in range(ROUNDS):
        for call, times in zip(calls, found, strict=True):
            began = time.perf_counter()
            for _ in range(CALLS):
                call()
            times.append((time.perf_counter() - began) / CALLS)
    return [statistics.median(times) for times in found]


def _compressed(breaks: int) -> Any:
    """`breaks` times Compress, which is a break each, with no segment between them."""
    nodes = [node("Abs", ["x"], ["v0"])]
    nodes += [node("Compress", [f"v{i}", "mask"], [f"v{i + 1}"], axis=0, name=f"break {i}") for i in range(breaks)]
    return proto([*nodes, node("Abs", [f"v{breaks}"], ["y"])], ["x:float[n]", "mask:bool[m]"], ["y:float[k]"])


@benchmark
def cached() -> Iterator[Figure]:
    """A cached call of a graph with breaks, for each break and segment, against the same by hand."""
    inputs = rows(12)
    few, many = (Session(broken(count)) for count in (FEW, MANY))
    alone = [Session(_compressed(count)) for count in (FEW, MANY)]
    masked = {"x": inputs["x"], "mask": np.ones(12, bool)}
    with pinned():
        for session in (few, many):
            session(inputs)
        for session in alone:
            session(masked)
        calls = [_call(few, inputs), _call(many, inputs), _by_hand(few, inputs), _by_hand(many, inputs)]
        np.testing.assert_array_equal(calls[1]().outputs["y"], calls[3]())
        ours, ours_many, hand, hand_many, *breaks = _times(*calls, *(_call(session, masked) for session in alone))
    steps = MANY - FEW
    both, by_hand, one = (ours_many - ours) / steps, (hand_many - hand) / steps, (breaks[1] - breaks[0]) / steps
    yield Figure("each break", one * 1e6, "µs", note="Compress on the host, no segment between")
    yield Figure("each segment", (both - one) * 1e6, "µs", note="22 nodes, looked up, run, and its result read")
    yield Figure("each break with its segment", both * 1e6, "µs")
    yield Figure("the same by hand", by_hand * 1e6, "µs")
    yield Figure("each break with its segment, against by hand", both / by_hand, "×")
    yield Figure(f"a call with {MANY} breaks, against by hand", ours_many / hand_many, "×")
