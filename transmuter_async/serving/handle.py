"""`Serving`: the address of a batch worker, which is all that users see of it."""

from __future__ import annotations

import math
from collections.abc import AsyncIterable, Callable, Coroutine, Generator, Iterable, Mapping
from types import TracebackType
from typing import Any, Self

import anyio
from anyio.abc import TaskGroup
from anyio.lowlevel import checkpoint

from transmuter_async.actors import Compiled, Reply
from transmuter_async.errors import MisuseError
from transmuter_async.serving.actor import ServingActor, Ticket
from transmuter_async.serving.mapped import Mapped
from transmuter_async.serving.records import ServingOptions, ServingStatistics
from transmuter_async.serving.warming import warm as warm_up
from transmuter_async.telemetry import Telemetry

__all__ = ["GRACE", "Serving", "Starting", "check_compiled", "close_servings", "start_serving"]

GRACE = 10.0
"""Seconds that closing may take by default."""


def check_compiled(given: object) -> None:
    """Refuse to serve what is no compiled model.

    Raises:
        TypeError: Saying what came.
    """
    if isinstance(given, Compiled):
        return
    if isinstance(given, Serving):
        raise TypeError(
            f"serve takes a compiled model, not the serving {given.name!r}; give it the model that this one stands in front of"
        )
    shown = repr(given)
    shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
    raise TypeError(
        f"serve takes a compiled model, not {shown} of type {type(given).__name__}; write "
        "`compiled = await runtime.compile(model)`, and serve that"
    )


Outputs = dict[str, Any]


class Serving:
    """A handle of a batch worker: cheap, and shareable between the tasks of its event loop.

    Requests of many callers run in shared batches, and each gets what it would get alone. It ends with `aclose`, when
    `async with` is left, or with its runtime.
    """

    __slots__ = ("_actor",)

    def __init__(self, actor: ServingActor) -> None:
        self._actor = actor

    @property
    def name(self) -> str:
        """Of the serving, as events carry it."""
        return self._actor.name

    @property
    def ready(self) -> bool:
        """Whether `warm` has compiled every program, its trial agreed, and the serving runs."""
        return self._actor.is_ready and self._actor.state == "running"

    @property
    def state(self) -> str:
        """`"running"`, `"restarting"` after a crash, `"stopping"` or `"stopped"`."""
        return self._actor.state

    def run(
        self, inputs: Mapping[str, Any], *, timeout: float | None = None, copy: bool | None = None
    ) -> Coroutine[Any, Any, Outputs]:
        """Answer one request of one or more rows: `outputs = await serving.run({"x": rows})`. Waits for room.

        Cancelling it is prompt: rows that still wait are never computed.

        Args:
            inputs: By name, as `Compiled.run` takes them; taken over here and now.
            timeout: Seconds until the caller loses patience; that of `serve` by default. Time in which a program is compiled
                does not count.
            copy: True copies inputs of any size, False none.

        Returns:
            Read-only arrays by output name, of these rows only.

        Raises:
            InputError: The inputs do not fit the graph, or its buckets.
            DeadlineExceeded: `timeout` passed.
            CircuitOpen: Everything has failed just now; `retry_after` says when to try again.
            ActorStopped: The serving has ended, or ends before it answers.
            MisuseError: Another event loop or process.
            TransmuterError: What the graph raises for these very rows.
        """
        return self._run(*self._take(inputs, copy), timeout, nowait=False)

    def run_nowait(
        self, inputs: Mapping[str, Any], *, timeout: float | None = None, copy: bool | None = None
    ) -> Coroutine[Any, Any, Outputs]:
        """As `run`, but never waits for room.

        Raises:
            Overloaded: The queue is full. A `map` by itself never fills it: a quarter of `queue_size` is left to others.
        """
        return self._run(*self._take(inputs, copy), timeout, nowait=True)

    def _take(self, inputs: Mapping[str, Any], copy: bool | None) -> tuple[dict[str, Any] | None, Exception | None]:
        try:
            return self._actor.compiled._prepared.take_inputs(inputs, copy), None
        except Exception as error:
            return None, error

    async def _run(
        self, inputs: dict[str, Any] | None, unfit: Exception | None, timeout: float | None, *, nowait: bool
    ) -> Outputs:
        actor = self._actor
        actor.check_place()
        ticket: Ticket | None = None
        reply: Reply[Outputs] = Reply(actor.loop)
        try:
            if unfit is not None:
                raise unfit
            assert inputs is not None
            ticket = actor.submit(await actor.admit(inputs), reply, timeout=timeout, nowait=nowait)
            del inputs
        except Exception:
            await checkpoint()
            raise
        try:
            await reply.wait_filled()
        except BaseException:
            actor.abandon(ticket, "cancelled")
            raise
        return reply.take()

    def map(
        self,
        source: AsyncIterable[Mapping[str, Any]] | Iterable[Mapping[str, Any]],
        *,
        concurrency: int = 64,
        ordered: bool = True,
        timeout: float | None = None,
        copy: bool | None = None,
        return_exceptions: bool = False,
    ) -> Mapped:
        """Answer every item of a source: `async for outputs in serving.map(source)`.

        No more than `concurrency` items are taken from the source before their results are taken from the iterator, so
        memory is bounded whatever the source's length. All of them together count as one caller where turns are shared, and
        the rows of all maps that wait fill three quarters of `queue_size` at most, so that `run` and `run_nowait` get in.

        Args:
            source: An async or plain iterable of inputs, as for `run`. Iterated in a task of the serving; a plain one must not
                block.
            concurrency: Requests in flight.
            ordered: Results in the order of the source; False gives each as soon as it is there.
            timeout: Of each request, as for `run`.
            copy: As for `run`. A source that writes into the same large array again and again needs True: items are taken
                ahead of their results.
            return_exceptions: Give an item's error as its result. By default it is raised in its place; the iterator can be
                asked on after that.

        Returns:
            An async iterator; leaving it cancels what it had sent. `async with` and `aclose` do so at once.

        Raises:
            ValueError: `concurrency` is less than 1.
            TypeError: The source is no iterable of inputs.
            MisuseError: Another event loop or process.
        """
        return Mapped(
            self._actor,
            source,
            concurrency=concurrency,
            ordered=ordered,
            timeout=timeout,
            copy=copy,
            return_exceptions=return_exceptions,
        )

    async def warm(self, *samples: Mapping[str, Any]) -> None:
        """Compile the program of every bucket and batch size, and compute a batch of each bucket against its rows.

        `ready` is True only after that. What fails is raised here and told by `statistics().warm_failure`. A serving that is
        ready stays so while it is warmed again, and where that is cancelled.

        Args:
            samples: Examples of all inputs; needed where names and declared sizes do not tell how to make some up. Several
                where they differ in more than rows and lengths: for each sample rate.

        Raises:
            InputError: Inputs can't be made up; a sample is needed.
            BatchingRefused: The trial found an output that depends on its batch; it is named. Requests are refused from then
                on, and so is another `warm`.
            CompileError: XLA refused a program.
            ActorStopped: The serving has ended.
        """
        await warm_up(self._actor, samples)

    async def statistics(self) -> ServingStatistics:
        """Counts of requests, rows and batches, and what waits now."""
        self._actor.check_place()
        await checkpoint()
        return self._actor.statistics()

    async def aclose(self, *, drain: bool = False, grace: float = GRACE) -> None:
        """End the serving; the model goes on. New requests are refused at once.

        Args:
            drain: Answer everything that was accepted; else who waits gets `ActorStopped`.
            grace: Seconds that this may take. Then who still waits gets `ActorStopped`.
        """
        self._actor.check_place()
        await close_servings([self._actor], drain=drain, grace=grace)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with anyio.CancelScope(shield=True):
            await self.aclose(drain=kind is None)

    def __repr__(self) -> str:
        return f"<Serving {self.name!r} {self.state}>"


async def close_servings(actors: Iterable[ServingActor], *, drain: bool = False, grace: float = GRACE) -> None:
    """End several, all within `grace` seconds."""
    actors = list(actors)
    for actor in actors:
        actor.stop(drain=drain)
    with anyio.move_on_after(grace if drain else math.inf):
        for actor in actors:
            await actor.wait_stopped()
    for actor in actors:
        actor.stop()
        await actor.wait_stopped()


async def start_serving(
    group: TaskGroup,
    telemetry: Telemetry,
    servings: dict[str, ServingActor],
    compiled: Compiled,
    options: ServingOptions,
    name: str,
) -> ServingActor:
    """Start the actor of a serving in a task group, and wait until it takes requests.

    Args:
        group: In which it runs.
        telemetry: The bus.
        servings: Where it stands under its name as long as it lives.
        compiled: The model.
        options: As asked for.
        name: Of the serving.

    Raises:
        TransmuterError: Why it could not start; see `Runtime.serve`.
    """
    actor = servings[name] = ServingActor(name, telemetry, compiled, options)

    async def serve() -> None:
        try:
            await actor.serve()
        finally:
            servings.pop(name, None)

    group.start_soon(serve, name=f"serving {name}")
    try:
        await actor.ready.wait()
    except Exception:  # it could not start, and ends by itself
        await actor.wait_stopped()
        servings.pop(name, None)
        raise
    except BaseException:
        actor.stop()
        raise
    return actor


class Starting:
    """What `Runtime.serve` gives: `serving = await runtime.serve(…)`, or `async with runtime.serve(…) as serving`."""

    __slots__ = ("_make", "_serving")

    def __init__(self, make: Callable[[], Coroutine[Any, Any, ServingActor]]) -> None:
        self._make = make
        self._serving: Serving | None = None

    def __await__(self) -> Generator[Any, Any, Serving]:
        return self._started().__await__()

    async def _started(self) -> Serving:
        return Serving(await self._make())

    async def __aenter__(self) -> Serving:
        if self._serving is not None:
            await checkpoint()
            raise MisuseError("this serve(…) was entered before; write runtime.serve(…) again for another serving")
        self._serving = await self._started()
        return self._serving

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._serving is not None
        await self._serving.__aexit__(kind, error, trace)
