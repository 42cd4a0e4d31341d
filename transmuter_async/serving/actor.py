"""The batch worker: an actor in front of a model actor.

Callers hand requests in and wait for their replies. The scheduler decides; a task *pumps* it once per turn of the loop, so
that everything that came in one turn can share a batch. Each batch is a task: it builds the inputs, calls the model, cuts
the outputs (`computing.py`) and settles the replies. The proof and whatever else takes time happens in a thread.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import anyio
from anyio.abc import TaskGroup

from transmuter_async.actors import AnyReply, Compiled, Threads, again
from transmuter_async.errors import (
    ActorStopped,
    CircuitOpen,
    DeadlineExceeded,
    IndexOutOfRange,
    InputError,
    NeedsValue,
    NonFiniteError,
    OperatorError,
    Overloaded,
    TransmuterError,
)
from transmuter_async.serving.computing import Answer, Computing, Run
from transmuter_async.serving.decisions import Limits, Request
from transmuter_async.serving.records import ServingOptions, ServingStatistics
from transmuter_async.serving.rows import INLINE_BYTES, Item, Piece, Rows, allowed_sizes, plan_rows
from transmuter_async.serving.scheduler import Scheduler
from transmuter_async.telemetry import Telemetry

__all__ = ["ServingActor"]

OWN_FAULT = (InputError, IndexOutOfRange, NonFiniteError, OperatorError, NeedsValue)
"""Errors that lie in what was sent: they say nothing about the model's health."""

FOREVER = 1e9
"""Seconds that are no timeout any more."""


class Ticket:
    """A request on its way.

    Attributes:
        runs: Batches that have rows of it.
        parts: `(start, rows, outputs)` of what is computed.
    """

    __slots__ = ("began", "id", "item", "parts", "reply", "runs")

    def __init__(self, number: int, item: Item, reply: AnyReply, began: int) -> None:
        self.id = number
        self.item = item
        self.reply = reply
        self.began = began
        self.runs: list[Run] = []
        self.parts: list[tuple[int, int, Mapping[str, Any]]] = []


class ServingActor(Computing):
    """The actor of one serving.

    Args:
        name: Of the serving, in events and errors.
        telemetry: The bus.
        compiled: The model.
        options: As asked for.

    Attributes:
        is_ready: Whether a `warm` has succeeded.
        warm_failure: What the last `warm` failed with, in words.
        refusal: Why nothing is answered any more: a trial has failed.
    """

    def __init__(self, name: str, telemetry: Telemetry, compiled: Compiled, options: ServingOptions) -> None:
        super().__init__(name, telemetry, compiled, options)
        self.is_ready = False
        self.refusal: TransmuterError | None = None
        self.warm_failure: str | None = None
        self._generation = 0
        self._group: TaskGroup | None = None
        self._numbers = itertools.count()
        self._tickets: dict[int, Ticket] = {}
        self._runs: dict[int, Run] = {}
        self._ended = anyio.Event()
        self._moved: anyio.Event | None = None  # who waits for room with `wait_room`

    # Life cycle; see `Actor`.

    async def serve(self) -> None:
        """The actor's task, and those of its batches.

        Raises:
            ActorStopped: It crashed once too often.
        """
        fatal: ActorStopped | None = None
        async with anyio.create_task_group() as group:
            self._group = group
            group.start_soon(self._pumping, name=f"pump of {self.name}")
            try:
                await super().serve()
            except ActorStopped as error:
                fatal = error
            group.cancel_scope.cancel()
        if fatal is not None:
            raise fatal

    async def _open(self) -> None:
        self._generation += 1
        self._threads = Threads(self.loop, f"{self.name}-rows", 1, crashed=self.crash)
        if self._rows is None:
            if self.compiled.state in ("stopping", "stopped"):
                raise ActorStopped(
                    f"the model {self.compiled.name!r} was closed, and can't be served; compile it again"
                )
            self._rows, self._limits = await self._threads.run(self._planned)
            self._scheduler = Scheduler(self.limits)
        self.known.clear()
        self.checkpoint()

    def _planned(self) -> tuple[Rows, Limits]:
        options, prepared = self.options, self.compiled._prepared
        plan = plan_rows(prepared)
        eager = prepared.options.compiler == "eager"
        sizes = allowed_sizes(
            options.batch_size,
            plan,
            max_padded=options.max_padded,
            programs=None if eager else prepared.options.cache_size,
        )
        most = sum(actor.max_concurrency for actor in self._models())
        concurrency = most if options.concurrency is None else options.concurrency
        if concurrency > most:
            raise InputError(
                f"concurrency={concurrency} batches in flight, but {self.compiled.name!r} computes {most} at once; write "
                f"compile(max_concurrency={concurrency}), or leave it out"
            )
        timeout = int(options.batch_timeout * 1e9)
        return Rows(plan), Limits(sizes, timeout, options.max_padded, options.queue_size, concurrency)

    def _opened(self) -> None:
        self._kick.set()

    def _busy(self) -> bool:
        return bool(self._tickets)

    def _abort(self, reason: ActorStopped) -> None:
        self._generation += 1
        if self._scheduler is not None:
            self._scheduler.close()
            self._scheduler = Scheduler(self.limits)  # takes in what comes before it runs again
        tickets = list(self._tickets.values())
        self._tickets.clear()
        for run in self._runs.values():
            run.scope.cancel()
        for ticket in tickets:
            self._counts["failed"] += 1
            ticket.reply.settle(None, again(reason))
        self._wake()

    async def _close(self, *, final: bool) -> None:
        while self._runs:
            self._ended = anyio.Event()
            await self._ended.wait()
        threads, self._threads = self._threads, None
        if threads is not None:
            threads.close()
            await threads.wait_ended()

    def stop(self, *, drain: bool = False) -> None:
        """See `Actor.stop`. With `drain` nothing waits for others any more."""
        super().stop(drain=drain)
        if self._scheduler is not None and self._drain:
            self._scheduler.draining = True
        self._kick.set()

    def stopped_error(self) -> ActorStopped:
        """What whoever asks a closed serving gets."""
        if self._model_gone is not None:
            error = ActorStopped(
                f"the serving {self.name!r} ended with its model {self.compiled.name!r}, which was closed; compile and "
                "serve it again"
            )
            error.__cause__ = self._model_gone
            return error
        if self._fatal is None and self.state not in ("running", "restarting"):
            return ActorStopped(f"the serving {self.name!r} was closed; serve the model again")
        return super().stopped_error()

    def start_soon(self, work: Callable[..., Any], *arguments: Any) -> None:
        """Run a task that ends with the serving."""
        assert self._group is not None
        self._group.start_soon(work, *arguments)

    # Requests, on the loop.

    async def admit(self, inputs: Mapping[str, Any]) -> Item:
        """Check a request by itself, before it can meet others.

        Raises:
            InputError: See `Rows.admit`.
            BatchingRefused: At these sizes the graph mixes rows.
        """
        if not self.rows.slow:
            return self.rows.admit(inputs)
        if self._threads is None:
            raise self.stopped_error()
        return await self._threads.run(self.rows.admit, inputs)

    def shut_for(self) -> float:
        """Seconds for which the breaker takes nothing in."""
        return 0.0 if self._scheduler is None else self._scheduler.retry_after(self.clock()) / 1e9

    def submit(
        self,
        item: Item,
        reply: AnyReply,
        *,
        caller: Hashable = None,
        timeout: float | None = None,
        nowait: bool = False,
        bulk: bool = False,
    ) -> Ticket:
        """Take a request in. Its reply is settled exactly once, unless it is abandoned.

        Args:
            item: The request.
            reply: Where its answer goes.
            caller: Who shares turns with others; None: somebody of their own.
            timeout: Seconds; None: as the serving has it.
            nowait: Do not wait for room.
            bulk: One of a source of many, which leaves room for others.

        Raises:
            ActorStopped: The serving takes nothing any more.
            CircuitOpen: Everything has failed just now.
            Overloaded: `nowait`, and there is no room.
        """
        if self.state not in ("running", "restarting") or self._scheduler is None:
            raise self.stopped_error()
        if self.refusal is not None:
            raise again(self.refusal)
        scheduler, now = self._scheduler, self.clock()
        timeout = self.options.timeout if timeout is None else timeout
        ticket = Ticket(next(self._numbers), item, reply, now)
        request = Request(
            ticket.id,
            item.key,
            item.rows,
            item.elements,
            now,
            None if timeout is None or timeout > FOREVER else now + int(max(timeout, 0) * 1e9),
            caller,
            item.alone,
            bulk,
        )
        entry = scheduler.submit(request, now, nowait=nowait)
        if entry == "open":
            raise self._refused(scheduler.retry_after(now) / 1e9)
        if entry == "full":
            self._counts["rejected"] += 1
            self._reject("overloaded")
            raise Overloaded(
                f"the queue of {self.name!r} has no room for {item.rows} more: {scheduler.waiting} rows wait, and "
                f"queue_size={self.limits.queue_size}; await run() to wait for room, or send fewer at once"
            )
        self._counts["requests"] += 1
        self._counts["rows"] += item.rows
        self._tickets[ticket.id] = ticket
        self._kick.set()
        return ticket

    async def wait_room(self, ticket: Ticket) -> None:
        """Wait until a request has room in the queues, or is settled."""
        while ticket.id in self._tickets and self._scheduler is not None and self._scheduler.lines_up(ticket.id):
            if self._moved is None:
                self._moved = anyio.Event()
            await self._moved.wait()

    def _wake(self) -> None:
        moved, self._moved = self._moved, None
        if moved is not None:
            moved.set()

    def _refused(self, seconds: float) -> CircuitOpen:
        self._counts["rejected"] += 1
        self._reject("circuit_open")
        return CircuitOpen(
            f"{self.name!r} refuses work for another {seconds:.2f} s, because everything that it tried last has failed; try "
            "again then, and look at the errors before this one",
            retry_after=seconds,
        )

    def abandon(self, ticket: Ticket, why: str) -> None:
        """Nobody waits for a request any more. Never raises."""
        if self._tickets.pop(ticket.id, None) is None:
            return
        self._counts["expired" if why == "deadline" else "cancelled"] += 1
        if self._scheduler is not None:
            running = any(run.go.is_set() for run in self._running(ticket))
            for batch in self._scheduler.cancel(ticket.id, self.clock()):
                self._runs[batch].scope.cancel()
            if not running and sum(rows for _, rows, _ in ticket.parts) < ticket.item.rows:
                self._reject(why)
            self._kick.set()
        self._settled()

    def _running(self, ticket: Ticket) -> list[Run]:
        return [run for run in ticket.runs if self._runs.get(run.batch.id) is run]

    def _reject(self, why: str) -> None:
        if self.telemetry.wants("transmuter.queue.rejected"):
            self.telemetry.emit("transmuter.queue.rejected", {"count": 1}, {**self.metadata, "why": why})

    # The pump.

    async def _pumping(self) -> None:
        while True:
            wake = None
            try:
                if self._scheduler is not None and self.works:
                    self._pump(self._scheduler)
                    wake = self._scheduler.wake(self.clock())
                    self._wake()
            except Exception as error:
                self.crash(error)
            if wake is None:
                await self._kick.wait()
            else:
                with anyio.move_on_after(max(0, wake - self.clock()) / 1e9):
                    await self._kick.wait()
            self._kick = anyio.Event()

    def _pump(self, scheduler: Scheduler) -> None:
        self.checkpoint()
        for number in scheduler.expired(self.clock()):
            ticket = self._tickets[number]
            error = self._late(ticket)
            self.abandon(ticket, "deadline")
            ticket.reply.settle(None, error)
        while (batch := scheduler.next(self.clock())) is not None:
            run = self._runs.get(batch.id)
            if run is None:
                tickets = [self._tickets[part.request] for part in batch.parts]
                pieces = [
                    Piece(ticket.item, part.start, part.rows) for ticket, part in zip(tickets, batch.parts, strict=True)
                ]
                run = self._runs[batch.id] = Run(batch, pieces)
                for ticket in tickets:
                    ticket.runs.append(run)
                self.start_soon(self._run, run, self._generation)
            run.go.set()

    def _late(self, ticket: Ticket) -> DeadlineExceeded:
        where = "it was being computed" if self._running(ticket) else "it was still in the queue"
        waited = (self.clock() - ticket.began) / 1e6
        return DeadlineExceeded(
            f"no answer from {self.name!r} within its timeout: {where}. {waited:.1f} ms have passed; compiles are not counted"
        )

    # Batches, each in a task.

    async def _run(self, run: Run, generation: int) -> None:
        try:
            with run.scope:
                outcomes, answers, errors = await self._outcomes(run)
                if generation == self._generation:
                    await self._finish(run, outcomes, answers, errors)
            if run.scope.cancelled_caught and generation == self._generation and run.batch.id in self._runs:
                assert self._scheduler is not None
                self._scheduler.withdrawn(run.batch.id, self.clock())
        except Exception as error:
            if generation == self._generation:
                self.crash(error)
        finally:
            if self._runs.get(run.batch.id) is run:
                del self._runs[run.batch.id]
            self._ended.set()
            self._kick.set()

    async def _finish(
        self, run: Run, outcomes: list[bool | None], answers: list[Answer], errors: list[Exception | None]
    ) -> None:
        assert self._scheduler is not None
        batch, now = run.batch, self.clock()
        first: dict[int, Exception] = {}
        for part, answer, problem in zip(batch.parts, answers, errors, strict=True):
            ticket = self._tickets.get(part.request)
            if ticket is not None and answer is not None:
                ticket.parts.append((part.start, part.rows, answer))
            if problem is not None:
                first.setdefault(part.request, problem)
        blamed = bool(first) and all(isinstance(each, OWN_FAULT) for each in first.values())
        before = self._scheduler.breaker(now)
        done, failed, opened = self._scheduler.finished(batch.id, outcomes, now, blamed=blamed)
        del self._runs[batch.id]
        self._kick.set()
        if opened:
            self._opened_breaker(next(iter(first.values())))
        elif before != "closed" and self._scheduler.breaker(now) == "closed":
            self._closed_breaker()
        for number in failed:
            ticket = self._tickets.pop(number)
            self._counts["failed"] += 1
            problem = first[number]
            ticket.reply.settle(None, problem if len(failed) == 1 else again(problem))
        for number in done:
            if (ticket := self._tickets.get(number)) is None:
                continue  # its caller left while the rows of another were joined
            held = sum(getattr(value, "nbytes", 0) for _, _, part in ticket.parts for value in part.values())
            large = len(ticket.parts) > 1 and held > INLINE_BYTES
            outputs = await self.in_thread(large, self.rows.rejoin, ticket.item, ticket.parts)
            if self._tickets.pop(number, None) is not None:
                self._counts["answered"] += 1
                ticket.reply.settle(outputs, None)
        self._settled()

    def _closed_breaker(self) -> None:
        if self.telemetry.wants("transmuter.breaker.closed"):
            self.telemetry.emit("transmuter.breaker.closed", {"count": 1}, {**self.metadata, "reason": None})

    def _opened_breaker(self, error: Exception) -> None:
        self._counts["opened"] += 1
        assert self._scheduler is not None
        if self.telemetry.wants("transmuter.breaker.opened"):
            self.telemetry.emit(
                "transmuter.breaker.opened",
                {"count": 1, "retry_after": self._scheduler.retry_after(self.clock())},
                {**self.metadata, "reason": type(error).__name__},
            )

    # Telling.

    def statistics(self) -> ServingStatistics:
        """Counts up to now."""
        scheduler, limits = self._scheduler, self.limits
        assert scheduler is not None
        queues: dict[str, int] = {}
        for key, depth in scheduler.depths().items():
            bucket = str(key[0]) if isinstance(key, tuple) else str(key)
            queues[bucket] = queues.get(bucket, 0) + depth
        return ServingStatistics(
            name=self.name,
            state=self.state,
            ready=self.is_ready,
            warm_failure=self.warm_failure,
            batch=self.rows.batch,
            batch_sizes=limits.batch_sizes,
            concurrency=limits.concurrency,
            queue_size=limits.queue_size,
            padded=self._elements[0] / self._elements[1] if self._elements[1] else 0.0,
            waiting=scheduler.waiting,
            queues=queues,
            waiting_for_room=scheduler.lined,
            running=len(self._runs),
            breaker=scheduler.breaker(self.clock()),
            restarts=self.restarts,
            **self._counts,
        )
