"""How a batch is computed: its inputs are built, its program compiled where it is new, its outputs cut; and a second try.

A batch that fails is tried once more, each of its requests alone. What takes time (building and cutting of large batches)
happens in a thread; small copies on the loop.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import anyio

from transmuter_async.actors import Actor, Compiled, ModelActor, Threads
from transmuter_async.errors import ActorStopped, InputError
from transmuter_async.serving import trial
from transmuter_async.serving.decisions import Batch, Limits
from transmuter_async.serving.records import ServingOptions
from transmuter_async.serving.rows import INLINE_BYTES, Piece, Rows
from transmuter_async.serving.scheduler import Scheduler
from transmuter_async.telemetry import Telemetry

__all__ = ["Answer", "Computing", "Run"]

KNOWN = 4096
"""Programs that are remembered as compiled."""

Answer = Mapping[str, Any] | None


class Run:
    """A batch on its way.

    Attributes:
        item: Of its first rows.
        scope: Around all that is done for it.
        go: Set while it has a slot.
    """

    __slots__ = ("batch", "go", "item", "pieces", "scope")

    def __init__(self, batch: Batch, pieces: list[Piece]) -> None:
        self.batch = batch
        self.pieces = pieces
        self.item = pieces[0].item
        self.scope = anyio.CancelScope()
        self.go = anyio.Event()


class Computing(Actor):
    """The part of a serving's actor that computes batches.

    Args:
        name: Of the serving, in events and errors.
        telemetry: The bus.
        compiled: The model.
        options: As asked for.

    Attributes:
        clock: Tells the time in nanoseconds.
        known: Programs that are compiled, by queue and rows.
    """

    def __init__(self, name: str, telemetry: Telemetry, compiled: Compiled, options: ServingOptions) -> None:
        source = compiled.model.source
        super().__init__(name, telemetry, {"source": source})
        self.compiled = compiled
        self.options = options
        self.metadata: dict[str, Any] = {"source": source, "actor": name, "serving": name}
        self.clock: Callable[[], int] = time.monotonic_ns
        self.known: set[Hashable] = set()
        self._rows: Rows | None = None
        self._limits: Limits | None = None
        self._scheduler: Scheduler | None = None
        self._threads: Threads | None = None
        self._kick = anyio.Event()
        self._losses = 0
        self._model_gone: BaseException | None = None
        self._elements = [0.0, 0.0]
        names = ("requests", "rows", "answered", "failed", "cancelled", "expired", "rejected", "batches", "batch_rows")
        self._counts = dict.fromkeys((*names, "retried", "opened"), 0)

    @property
    def rows(self) -> Rows:
        """How requests are joined."""
        assert self._rows is not None
        return self._rows

    @property
    def limits(self) -> Limits:
        """What bounds the batches."""
        assert self._limits is not None
        return self._limits

    def _models(self) -> tuple[ModelActor, ...]:
        """The model's actors; several where it has replicas."""
        actors: tuple[ModelActor, ...] = getattr(self.compiled, "_actors", (self.compiled._actor,))
        return actors

    async def _outcomes(self, run: Run) -> tuple[list[bool | None], list[Answer], list[Exception | None]]:
        """Compute a batch; where it fails, each of its parts alone."""
        assert self._scheduler is not None
        scheduler, batch = self._scheduler, run.batch
        try:
            got: list[Answer] = list(await self._compute(run, run.pieces, batch.program))
            return [True] * len(got), got, [None] * len(got)
        except Exception as error:
            if isinstance(error, ActorStopped) and self.compiled.state in ("stopping", "stopped"):
                self._model_gone = error
                self.stop()
                raise
            if len(run.pieces) == 1:
                return [False], [None], [error]
        self._counts["retried"] += 1
        outcomes: list[bool | None] = []
        answers: list[Answer] = []
        errors: list[Exception | None] = []
        for part, piece in zip(batch.parts, run.pieces, strict=True):
            outcome, answer, problem = None, None, None
            if scheduler.alive(part.request):
                program = piece.rows if piece.item.alone else self.limits.program(piece.rows)
                try:
                    [answer] = await self._compute(run, [piece], program, retry=True)
                    outcome = True
                except Exception as error:
                    outcome, problem = False, error
            outcomes.append(outcome)
            answers.append(answer)
            errors.append(problem)
        return outcomes, answers, errors

    async def _compute(
        self, run: Run, pieces: Sequence[Piece], program: int, *, retry: bool = False
    ) -> Sequence[Mapping[str, Any]]:
        batch, rows = run.batch, self.rows
        count = sum(piece.rows for piece in pieces)
        facts = {
            **self.metadata,
            "bucket": run.item.bucket,
            "program": program,
            "why": "retry" if retry else batch.reason,
        }
        with self.telemetry.span("transmuter.batch", facts) as span:
            padding = rows.padding(pieces, program)
            span.measurements.update(size=count, padding=padding, queue_depth=batch.depth, oldest_wait=batch.oldest)
            large = rows.bytes(pieces, program) > INLINE_BYTES
            inputs = await self.in_thread(large, rows.build, pieces, program)
            await self._compiling(run, inputs, program)
            outputs = await self.compiled.run(inputs, copy=False)
            self._counts["batches"] += 1
            self._counts["batch_rows"] += count
            elements = program * run.item.elements
            self._elements[0] += padding * elements
            self._elements[1] += elements
            large = sum(getattr(value, "nbytes", 0) for value in outputs.values()) > INLINE_BYTES
            answers: Sequence[Mapping[str, Any]] = await self.in_thread(large, rows.cut, outputs, pieces, program)
            return answers

    async def in_thread(self, threaded: bool, work: Callable[..., Any], *arguments: Any) -> Any:
        """`work(*arguments)`: here on the loop, or where it takes time in the serving's thread."""
        if not threaded or self._threads is None:
            return work(*arguments)
        return await self._threads.run(work, *arguments)

    async def _compiling(self, run: Run, inputs: Mapping[str, Any], program: int) -> None:
        """Before the first run of a program: compile it without holding a slot, and have deadlines stand still."""
        options = self.compiled._prepared.options
        key: Hashable = (run.item.key, program)
        if run.item.alone:
            key = tuple((name, getattr(value, "shape", None)) for name, value in inputs.items())
        losses = sum(actor.losses for actor in self._models())
        if losses != self._losses:  # a cache was cleared, or has evicted something: ask again what is there
            self._losses = losses
            self.known.clear()
        if key in self.known or options.compiler == "eager" or options.cold == "interpret":
            return
        assert self._scheduler is not None
        scheduler, batch = self._scheduler, run.batch
        if not run.item.alone and run.go.is_set():
            run.go = anyio.Event()
            scheduler.hold(batch.id, self.clock())
            self._kick.set()
            problem = None
            try:
                await self.compiled.warm(trial.as_specs(self.rows, inputs))
            except InputError:
                pass  # the graph reads a value that only the call has: it compiles then
            except Exception as error:
                problem = error
            scheduler.ready(batch.id, self.clock())
            self._kick.set()
            await run.go.wait()
            if problem is not None:
                raise problem
        if run.item.alone or self.compiled.graph_break is not False:  # then it compiles on the way, too
            scheduler.first(batch.id, self.clock())
        if len(self.known) >= KNOWN:
            self.known.clear()
        self.known.add(key)
