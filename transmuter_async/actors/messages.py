"""What can be asked of a model actor. Frozen: a message is not changed once it is sent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transmuter_async.compiler import Spec

__all__ = ["ActorStatistics", "ClearCache", "Explain", "Message", "Run", "Statistics", "Warm", "WhyMiss"]


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """Answer one call. The reply is the outputs by name.

    Attributes:
        inputs: Taken over and checked.
        device: Whether the outputs stay on the device.
        seed: Of random operators.
        deadline: `time.monotonic_ns()` after which nobody wants the answer.
    """

    inputs: Mapping[str, Any]
    device: bool
    seed: int
    deadline: int | None = None


@dataclass(frozen=True, slots=True)
class Warm:
    """Compile these signatures. The reply is None, when all are ready.

    Attributes:
        signatures: For each, a `Spec` by input name.
    """

    signatures: tuple[Mapping[str, Spec], ...]


@dataclass(frozen=True, slots=True)
class Explain:
    """The reply is the compiler's `Explanation`."""


@dataclass(frozen=True, slots=True, eq=False)
class WhyMiss:
    """The reply is the compiler's `Why` for a call of these inputs, which is not made.

    Attributes:
        inputs: As for `Run`, but not taken over.
    """

    inputs: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Statistics:
    """The reply is what the cache holds, and the bytes of its programs."""


@dataclass(frozen=True, slots=True)
class ClearCache:
    """Drop every compiled segment, the one kept for the shapes given to `compile` too. The reply is None."""


Message = Warm | Explain | WhyMiss | Statistics | ClearCache


@dataclass(frozen=True, slots=True)
class ActorStatistics:
    """Counts of a model actor since it was compiled, restarts included.

    Attributes:
        calls: Calls that were accepted.
        answered: Calls that returned outputs.
        failed: Calls that were answered with an error.
        abandoned: Calls whose caller left first: cancelled, or past the deadline.
        rejected: Calls that were refused because the mailbox was full.
        waiting: Calls in the mailbox now, those that wait for a compile included.
        running: Calls that hold a slot now; one whose caller has left holds it until its thread is done.
        peak_running: The most that ever did at once.
        hits, misses, evictions: Of the segment cache.
        compiles: Programs that were compiled, and
        compile_failures: that could not be.
        compile_time: Nanoseconds spent compiling.
        restarts: Times that the actor was started again after a crash.
        cache: What the cache holds now; the compiler's own record.
        weight_bytes: Bytes of weights on the device now.
        program_bytes: Bytes of the programs' code, where jax tells.
    """

    name: str
    state: str
    calls: int
    answered: int
    failed: int
    abandoned: int
    rejected: int
    waiting: int
    running: int
    peak_running: int
    max_concurrency: int
    mailbox: int
    hits: int
    misses: int
    evictions: int
    compiles: int
    compile_failures: int
    compile_time: int
    restarts: int
    cache: Any
    weight_bytes: int
    program_bytes: int
