"""What the threads of a model actor do: plain functions on what they are handed. Nothing here runs on the loop.

The run threads own the segment cache and the calls that hold a slot; a compile thread owns its job.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from transmuter_async.actors.calls import Call
from transmuter_async.actors.compiles import Compile
from transmuter_async.actors.events import Untouched
from transmuter_async.actors.messages import ClearCache, Explain, Message, WhyMiss
from transmuter_async.compiler import (
    CompileJob,
    Finished,
    Missing,
    Observe,
    Prepared,
    Segment,
    SegmentCache,
    Timings,
    explain,
    heard,
    scout,
    why,
)

__all__ = ["advance", "advance_listening", "answer", "holds", "install", "release", "run_job", "spec_jobs"]


def advance(prepared: Prepared, call: Call, cache: SegmentCache) -> Finished | Missing:
    """Take a call as far as programs are cached.

    Raises:
        Abandoned: Nobody waits for it any more; `Untouched` where that was so before anything was done for it here.
    """
    observer = call.observer
    observer.check(Untouched)
    execution = call.execution
    if execution is None:
        message = call.message
        if message is None:
            raise Untouched
        execution = call.execution = prepared.start(message.inputs, seed=message.seed, device=message.device)
    else:
        observer.resumed()
    step = execution.advance(cache, observer)
    if observer.position is not None:
        observer.ended()
    if isinstance(step, Finished) and step.wanted:
        for job in step.wanted:  # compiled later, when the caller may write to its arrays
            job.lighten()
    return step


def advance_listening(prepared: Prepared, call: Call, cache: SegmentCache) -> Finished | Missing:
    """`advance` with `nonfinite="warn"`: warnings belong to the caller, not to this thread."""
    with heard() as texts:
        try:
            return advance(prepared, call, cache)
        finally:
            if texts:
                call.heard = [*dict.fromkeys([*(call.heard or ()), *texts])]


def answer(prepared: Prepared, message: Message, cache: SegmentCache, timings: Timings) -> Any:
    """Answer what is asked about the cache."""
    if isinstance(message, Explain):
        return explain(prepared, cache, timings)
    if isinstance(message, WhyMiss):
        return why(prepared, cache, message.inputs)
    if isinstance(message, ClearCache):
        cache.clear()
        return None
    return cache.statistics(), *_sizes(prepared, cache)


def run_job(job: CompileJob, observe: Observe) -> Segment:
    """Compile, in a compile thread."""
    return job.run(observe)


def install(prepared: Prepared, cache: SegmentCache, segment: Segment, compile: Compile) -> tuple[int, int]:
    """Put a program into the cache; bytes of weights and programs then."""
    cache.put(segment, compile.observer, keep=compile.keep)
    return _sizes(prepared, cache)


def release(prepared: Prepared, cache: SegmentCache, what: str) -> int:
    """Drop "programs" or "weights", as the memory budget asks for; how many bytes that were."""
    weights, programs = _sizes(prepared, cache)
    if what == "programs":
        cache.clear()
        return programs
    prepared.release()
    return weights


def spec_jobs(prepared: Prepared, specs: Mapping[str, Any]) -> list[tuple[CompileJob, Mapping[str, Any]]] | None:
    """The jobs of a signature, each with values that stand for what enters it. In a compile thread: it may trace.

    Only the first segment's where a `Spec` is among the specs; None where the graph reads the value of such an input. Given
    the values of all inputs of a graph that breaks, those of all segments, for which the graph is run on the host.
    """
    valued = bool(specs) and all(isinstance(value, (np.ndarray, jax.Array, list)) for value in specs.values())
    if valued and prepared.graph_break is not False and prepared.options.compiler != "eager":
        return [(job, job.values) for job in scout(prepared, specs)]
    job = prepared.spec_job(specs)
    return None if job is None else [(job, prepared._samples(specs))]


def holds(cache: SegmentCache, job: CompileJob, values: Mapping[str, Any]) -> bool:
    """Whether the program of a job is there already."""
    return (job.place == (0,) and cache.kept(values) is not None) or cache.find(job.place, values) is not None


def _sizes(prepared: Prepared, cache: SegmentCache) -> tuple[int, int]:
    # Never on the loop: the table of weights is locked while one of them is copied to the device.
    return prepared.weight_bytes(), cache.code_bytes
