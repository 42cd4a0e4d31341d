"""Which programs a call would need, all of them at once: found by running it on the host.

A call finds its next segment when it has run the one before, since what follows a break depends on values. Where the values
are there ahead of traffic, the graph is run once in numpy instead, and every segment on the way is planned, not compiled.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transmuter_async.compiler.cache import SegmentCache
from transmuter_async.compiler.execute import Execution, Finished, Missing, run_on_host
from transmuter_async.compiler.facts import Observe, unobserved
from transmuter_async.compiler.frames import Frame
from transmuter_async.compiler.job import CompileJob
from transmuter_async.compiler.prepared import Prepared
from transmuter_async.compiler.settings import pinned

__all__ = ["scout"]


class _Scout(Execution):
    """A call whose segments are all missing, and that goes on without them."""

    waits = False

    def _interpret(self, frame: Frame, missing: Missing, cache: SegmentCache, observe: Observe) -> None:
        job = missing.job
        self._wanted.append(job)
        frame.missed = False
        stop, known = job.outlook()
        run_on_host(frame, frame.index, stop)
        # What the program's trace knows is known to the next segment, as it is after the program.
        frame.values.update(known)
        frame.known |= known.keys()
        frame.index = stop
        if stop < len(frame.prepared.nodes):
            self._break(frame, observe)


def scout(prepared: Prepared, inputs: Mapping[str, Any]) -> list[CompileJob]:
    """The jobs of all segments that a call of these inputs runs, in order; each once. For a worker thread: it runs the graph.

    Args:
        prepared: The model.
        inputs: As for a call; nothing of them is kept.

    Raises:
        InputError: They do not fit the graph.
        BreakRefused: The graph breaks and the options refuse breaks.
        OperatorError: A node refuses its inputs.
    """
    values = prepared.take_inputs(inputs)
    if prepared.padding is not None:
        values = prepared.padding.pad(values)[0]
    with pinned(device=prepared.device, precision=prepared.options.precision):
        found = _Scout(prepared, values, seed=0, device=False).advance(SegmentCache(1), unobserved)
    assert isinstance(found, Finished)  # it waits for nothing
    jobs = {job.key: job for job in found.wanted}
    for job in jobs.values():
        job.lighten()
    return list(jobs.values())
