"""Graph to programs: segments of one XLA program each, and the breaks between them.

    prepared = prepare(model, Options(...))          passes, folding, weights on the device once
    prepared.start(inputs, ...).advance(cache, observe)   one call, resumable where a program is missing

Plain synchronous code on values: no event loop, no clock, no events. Facts go to the `observe` callable that the caller
hands in. Everything that calls into JAX runs under `pinned()`, on whatever thread the caller chose.
"""

from __future__ import annotations

from transmuter_async.compiler.advice import Difference, Why, why
from transmuter_async.compiler.alarms import heard
from transmuter_async.compiler.autotune import TuneJob
from transmuter_async.compiler.axes import Mixes
from transmuter_async.compiler.batching import Batching, Cut, Plan, Proof, padding_value, plan_batching
from transmuter_async.compiler.cache import CacheStatistics, PositionStatistics, ProgramStatistics, SegmentCache
from transmuter_async.compiler.cores import cores, start_client
from transmuter_async.compiler.execute import Execution, Finished, Missing
from transmuter_async.compiler.explain import Break, Explanation, Timings, TunedRow, explain
from transmuter_async.compiler.facts import (
    BreakDone,
    BreakFailed,
    BreakStarted,
    CacheAdvice,
    CacheEvict,
    CacheHit,
    CacheMiss,
    DiskEvicted,
    DiskFailed,
    DiskRejected,
    Fact,
    Observe,
    SegmentFailed,
    SegmentReady,
    SegmentStarted,
    Shapes,
    unobserved,
)
from transmuter_async.compiler.inputs import COPY_BYTES, describe_type, take_inputs
from transmuter_async.compiler.job import CompileJob
from transmuter_async.compiler.layouts import lay_out_in_place
from transmuter_async.compiler.options import Options, Spec, check_count, check_together
from transmuter_async.compiler.placement import Placement, check_devices, place
from transmuter_async.compiler.prepared import Prepared, prepare, replicate
from transmuter_async.compiler.pure import to_jax
from transmuter_async.compiler.scout import scout
from transmuter_async.compiler.segment import Making, Segment
from transmuter_async.compiler.settings import pinned
from transmuter_async.compiler.tuning import Trial, Tuning

__all__ = [
    "COPY_BYTES",
    "Batching",
    "Break",
    "BreakDone",
    "BreakFailed",
    "BreakStarted",
    "CacheAdvice",
    "CacheEvict",
    "CacheHit",
    "CacheMiss",
    "CacheStatistics",
    "CompileJob",
    "Cut",
    "Difference",
    "DiskEvicted",
    "DiskFailed",
    "DiskRejected",
    "Execution",
    "Explanation",
    "Fact",
    "Finished",
    "Making",
    "Missing",
    "Mixes",
    "Observe",
    "Options",
    "Placement",
    "Plan",
    "PositionStatistics",
    "Prepared",
    "ProgramStatistics",
    "Proof",
    "Segment",
    "SegmentCache",
    "SegmentFailed",
    "SegmentReady",
    "SegmentStarted",
    "Shapes",
    "Spec",
    "Timings",
    "Trial",
    "TuneJob",
    "TunedRow",
    "Tuning",
    "Why",
    "check_count",
    "check_devices",
    "check_together",
    "cores",
    "describe_type",
    "explain",
    "heard",
    "lay_out_in_place",
    "padding_value",
    "pinned",
    "place",
    "plan_batching",
    "prepare",
    "replicate",
    "scout",
    "start_client",
    "take_inputs",
    "to_jax",
    "unobserved",
    "why",
]
