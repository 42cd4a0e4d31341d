"""Telemetry as a trace that Perfetto and chrome://tracing open: the JSON of the trace event format.

A process of the trace is an actor (or the runtime), a thread of it is a lane: what overlaps lies in different lanes, what
happened inside something lies below it. In a call that is its time in the queue, its segments, breaks and compiles.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from transmuter_async.cli.output import plain
from transmuter_async.telemetry import Event

__all__ = ["Slice", "chrome_trace", "slices"]

RUNTIME = "runtime"
_TIED = frozenset({"span", "parent", "call", "actor", "stacktrace", "dropped"})


@dataclass(slots=True)
class Slice:
    """Something that took time.

    Attributes:
        kind: `call`, `queue`, `segment`, `break`, `compile`, …: the trace's category.
        begin, end: Of the monotonic clock, in nanoseconds.
        inside: What happened within, each within the times of this one.
    """

    name: str
    kind: str
    actor: str
    begin: int
    end: int
    facts: Mapping[str, Any] = field(default_factory=dict)
    inside: list[Slice] = field(default_factory=list)

    def holds(self, other: Slice) -> bool:
        """Whether `other` lies within the times of this one."""
        return self.begin <= other.begin and other.end <= self.end


def slices(events: Iterable[Event]) -> list[Slice]:
    """The outermost slices, in order of their begin. A span that has not ended is left out."""
    starts: dict[int, Event] = {}
    spans: dict[int, Slice] = {}
    marks: dict[int, list[tuple[int, str, Event]]] = {}
    parents: dict[int, int | None] = {}
    for event in events:
        base, _, last = event.name.rpartition(".")
        time, call = event.measurements.get("monotonic_time"), event.metadata.get("call")
        if last == "start":
            starts[event.metadata["span"]] = event
        elif last in ("stop", "exception"):
            start = starts.pop(event.metadata["span"], None)
            if start is not None:
                spans[event.metadata["span"]] = _span(base, start, event)
                parents[event.metadata["span"]] = event.metadata.get("parent")
        if call is not None and time is not None and base != "transmuter.call":
            marks.setdefault(call, []).append((int(time), event.name, event))
    for number, each in spans.items():
        if each.kind == "call":
            each.inside += _of_call(each, sorted(marks.get(number, ()), key=lambda mark: mark[0]))
    roots: list[Slice] = []
    for number, each in spans.items():
        parent = spans.get(parents[number] or 0)
        # A compile whose caller has left outlives the call: then it stands for itself.
        (parent.inside if parent is not None and parent.holds(each) else roots).append(each)
    return sorted(roots, key=lambda each: each.begin)


def _span(base: str, start: Event, stop: Event) -> Slice:
    facts = stop.metadata
    kind = {"segment.compile": "compile", "compile": "prepare"}.get(name := base.removeprefix("transmuter."), name)
    if kind == "compile":
        name = f"compile {facts['position']} – {facts.get('stop', '?')}"
    elif kind == "break":
        name = f"break {facts['op_type']}"
    elif kind == "prepare":
        name = "runtime.compile"
    if stop.name.endswith(".exception"):
        name += f" ({facts['kind']})"
    return Slice(
        name,
        kind,
        str(facts.get("actor", RUNTIME)),
        int(start.measurements["monotonic_time"]),
        int(stop.measurements["monotonic_time"]),
        {
            **{key: value for key, value in facts.items() if key not in _TIED},
            **{key: value for key, value in stop.measurements.items() if key not in ("duration", "monotonic_time")},
        },
    )


def _of_call(call: Slice, marks: Sequence[tuple[int, str, Event]]) -> list[Slice]:
    """The queue and the segments of a call: from where an event says that one begins to the next event of the call."""
    found: list[Slice] = []
    queued = call.facts.get("queued")
    opened: tuple[str, int, Mapping[str, Any]] | None = None
    if queued is not None:  # else it failed; nobody has said how long it waited
        found.append(Slice("queue", "queue", call.actor, call.begin, min(call.end, call.begin + int(queued))))
        tier = call.facts.get("tier")
        opened = ("segment 0, kept" if tier == "compiled" else "host form", found[0].end, {})
        if any(name.startswith(("transmuter.cache.hit", "transmuter.cache.miss")) for _, name, _ in marks):
            opened = None
    missed: tuple[str, int, Mapping[str, Any]] | None = None

    def close(time: int) -> None:
        nonlocal opened, missed
        found.extend(
            Slice(each[0], "segment", call.actor, each[1], min(time, call.end), each[2])
            for each in (opened, missed)
            if each is not None
        )
        opened = missed = None

    for time, name, event in marks:
        if time > call.end:
            break
        facts = {key: value for key, value in event.metadata.items() if key in ("position", "shapes", "cold")}
        if name == "transmuter.segment.compile.start":
            missed = None
        elif name == "transmuter.segment.compile.stop":
            opened = (f"segment {facts['position']}", time, facts)
        else:
            close(time)
            if name == "transmuter.cache.hit":
                opened = (f"segment {facts['position']}", time, facts)
            elif name == "transmuter.cache.miss" and facts.get("cold"):
                opened = (f"host form from {facts['position']}", time, facts)
            elif name == "transmuter.cache.miss":
                missed = (f"compile of another call, then segment {facts['position']}", time, facts)
    close(call.end)
    return found


def chrome_trace(events: Iterable[Event], **about: Any) -> dict[str, Any]:
    """The trace of some events, ready for JSON.

    Args:
        events: In any order.
        about: Facts of the whole.

    Returns:
        An object of the trace event format. Times are microseconds since the first slice, to the nanosecond.
    """
    roots = slices(events)
    origin = roots[0].begin if roots else 0
    actors = sorted({each.actor for each in roots}, key=lambda name: (name != RUNTIME, name))
    written: list[dict[str, Any]] = []
    for process, actor in enumerate(actors, 1):
        written.append(_named("process_name", process, 0, actor))
        first = 1
        for group in ("call", "compile", ""):
            mine = [each for each in roots if each.actor == actor and _group(each) == group]
            lanes = _lanes(mine)
            for lane, held in enumerate(lanes):
                label = {"call": "calls", "compile": "compiles"}.get(group, "work")
                written.append(_named("thread_name", process, first + lane, f"{label} {lane + 1}" if lane else label))
                for each in held:
                    written += _written(each, process, first + lane, origin)
            first += len(lanes)
    return {"traceEvents": written, "displayTimeUnit": "ms", "otherData": plain(about)}


def _group(each: Slice) -> str:
    return each.kind if each.kind in ("call", "compile") else ""


def _lanes(roots: Iterable[Slice]) -> list[list[Slice]]:
    """Slices in as few lanes as there are at once, in each one after the other."""
    lanes: list[list[Slice]] = []
    for each in roots:
        free = next((lane for lane in lanes if lane[-1].end <= each.begin), None)
        if free is None:
            lanes.append([each])
        else:
            free.append(each)
    return lanes


def _written(each: Slice, process: int, lane: int, origin: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [
        {
            "name": each.name,
            "cat": each.kind,
            "ph": "X",
            "ts": (each.begin - origin) / 1000,
            "dur": (each.end - each.begin) / 1000,
            "pid": process,
            "tid": lane,
            "args": plain(each.facts),
        }
    ]
    for inner in sorted(each.inside, key=lambda inner: (inner.begin, -inner.end)):
        found += _written(inner, process, lane, origin)
    return found


def _named(what: str, process: int, lane: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": process, "tid": lane, "args": {"name": name}}
