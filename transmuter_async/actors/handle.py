"""`Compiled`: the address of a model actor, which is all that users see of it."""

from __future__ import annotations

import math
import sys
import threading
import time
import warnings
from collections.abc import Coroutine, Iterable, Mapping
from dataclasses import replace
from typing import Any

import anyio
from anyio.lowlevel import checkpoint

from transmuter_async.actors.calls import Call, deadline_exceeded
from transmuter_async.actors.events import Observer
from transmuter_async.actors.messages import ActorStatistics, ClearCache, Explain, Run, Warm, WhyMiss
from transmuter_async.actors.model import ModelActor
from transmuter_async.actors.reply import AnyReply, Reply, ThreadReply
from transmuter_async.bridge import current_loop_or_none
from transmuter_async.compiler import Explanation, Prepared, Why
from transmuter_async.errors import MisuseError, NonFiniteWarning
from transmuter_async.graph import Model
from transmuter_async.telemetry import Span

__all__ = ["Compiled"]

Outputs = dict[str, Any]

_HERE = __name__.rpartition(".")[0] + "."
"""Modules between `_warn` and the line that awaits."""


class Compiled:
    """A handle of a compiled model: cheap, and shareable between the tasks of its event loop.

    The actor behind it owns the programs and the threads. It ends with `aclose`, or with its runtime.
    """

    __slots__ = ("_actor", "_prepared")

    def __init__(self, actor: ModelActor) -> None:
        assert actor.prepared is not None
        self._actor = actor
        self._prepared: Prepared = actor.prepared

    @property
    def name(self) -> str:
        """The actor's name, as events carry it."""
        return self._actor.name

    @property
    def model(self) -> Model:
        """The model that was loaded, with the graph that programs are made of: constants computed, the passes done.

        Its weights are those in use: what the file held instead of them is not kept. `Runtime.load` reads that.
        """
        return self._prepared.model

    @property
    def graph_break(self) -> bool | None:
        """Whether the graph breaks at a value that is only known when it runs; None while that is not known."""
        return self._prepared.graph_break

    @property
    def state(self) -> str:
        """`"running"`, `"restarting"` after a crash, `"stopping"` or `"stopped"`."""
        return self._actor.state

    def run(
        self,
        inputs: Mapping[str, Any],
        *,
        device: bool = False,
        copy: bool | None = None,
        seed: int | None = None,
        timeout: float | None = None,
    ) -> Coroutine[Any, Any, Outputs]:
        """Answer one call: `outputs = await compiled.run({"x": array})`. Waits for room when the mailbox is full.

        Cancelling it is prompt: work that is still queued is never run; what is running ends in its thread, unheard.

        Args:
            inputs: By name: numpy, JAX, DLPack or ml_dtypes arrays, scalars, lists of strings. They are taken over here and
                now: copied up to 64 KiB each, above that not to be written to until the call returns.
            device: Give JAX arrays instead of numpy ones.
            copy: True copies inputs of any size, False none.
            seed: Of random operators; a fresh one for each call by default.
            timeout: Seconds until the caller loses patience.

        Returns:
            Read-only arrays by output name, in the graph's order.

        Raises:
            InputError: The inputs do not fit the graph; everything is listed.
            ActorStopped: The actor has ended, or ends before it answers.
            DeadlineExceeded: `timeout` passed.
            MisuseError: Another event loop or process, or a forked child.
            TransmuterError: What the graph itself raises: `IndexOutOfRange`, `OperatorError`, …

        Warns:
            NonFiniteWarning: With `nonfinite="warn"`, where this call is awaited.
        """
        return self._run(*self._take(inputs, copy), device, seed, timeout, nowait=False)

    def run_nowait(
        self,
        inputs: Mapping[str, Any],
        *,
        device: bool = False,
        copy: bool | None = None,
        seed: int | None = None,
        timeout: float | None = None,
    ) -> Coroutine[Any, Any, Outputs]:
        """As `run`, but never waits for room.

        Raises:
            Overloaded: The mailbox is full.
        """
        return self._run(*self._take(inputs, copy), device, seed, timeout, nowait=True)

    def _take(self, inputs: Mapping[str, Any], copy: bool | None) -> tuple[dict[str, Any] | None, Exception | None]:
        # Not in the coroutine: it may start later, and the caller may have written to the array by then. An error is
        # raised where it is awaited all the same, as of any async function.
        try:
            return self._prepared.take_inputs(inputs, copy), None
        except Exception as error:
            return None, error

    async def _run(
        self,
        inputs: dict[str, Any] | None,
        unfit: Exception | None,
        device: bool,
        seed: int | None,
        timeout: float | None,
        *,
        nowait: bool,
    ) -> Outputs:
        actor = self._actor
        actor.check_place()
        span = actor.telemetry.span("transmuter.call", actor.metadata).start()
        call: Call | None = None
        try:
            try:
                if unfit is not None:
                    raise unfit
                reply: Reply[Outputs] = Reply(actor.loop)
                call = self._call(inputs, reply, span, device, seed, timeout)
                del inputs
                actor.submit(call, nowait=nowait)
            except Exception:
                # Refused: let others run all the same, or a loop that tries again and again would stop the world.
                await checkpoint()
                raise
            if timeout is None:
                await reply.wait_filled()
            else:
                with anyio.move_on_after(timeout):
                    await reply.wait_filled()
                if not reply.done:
                    error = deadline_exceeded(actor.name, call)
                    actor.abandon(call, "deadline")
                    raise error
            outputs = reply.take()
        except BaseException as error:
            if call is not None:
                actor.abandon(call, "cancelled")
            span.fail(error)
            raise
        self._stop(span, call)
        if call.heard is not None:
            _warn(call.heard)
        return outputs

    def _call(
        self,
        inputs: dict[str, Any] | None,
        reply: AnyReply,
        span: Span,
        device: bool,
        seed: int | None,
        timeout: float | None,
    ) -> Call:
        assert inputs is not None
        actor = self._actor
        deadline = None if timeout is None or timeout == math.inf else time.monotonic_ns() + int(timeout * 1e9)
        message = Run(inputs, device, actor.seeds.getrandbits(64) if seed is None else seed)
        observer = Observer(actor.telemetry, actor.metadata, call=span.id, parent=span.id, deadline=deadline)
        return Call(message, reply, observer)

    def _stop(self, span: Span, call: Call) -> None:
        span.metadata["tier"] = call.tier
        span.measurements["queued"] = call.queued or 0
        span.measurements["compiling"] = call.compiling
        span.stop()

    def call_from_thread(
        self,
        inputs: Mapping[str, Any],
        *,
        device: bool = False,
        copy: bool | None = None,
        seed: int | None = None,
        timeout: float | None = None,
    ) -> Outputs:
        """`run` for code that is not async: blocks this thread until the answer is there.

        Args, returns and errors are those of `run`.

        Raises:
            MisuseError: This thread runs an event loop (it would be blocked), or works for the actor itself.
        """
        actor = self._actor
        actor.check_process()
        if current_loop_or_none() is not None:
            raise MisuseError(
                f"call_from_thread would block the event loop that runs in this thread; write `await {self.name}.run(…)` here"
            )
        if actor.owns_thread(threading.current_thread()):
            raise MisuseError(
                f"call_from_thread of {self.name!r} was called in a thread that works for it: it would wait for itself"
            )
        with actor.telemetry.span("transmuter.call", actor.metadata) as span:
            taken = self._prepared.take_inputs(inputs, copy)
            reply: ThreadReply[Outputs] = ThreadReply()
            call = self._call(taken, reply, span, device, seed, timeout)
            del taken
            if not actor.loop.post(_submit, actor, call):
                raise actor.stopped_error()
            if not reply.wait_while(lambda: actor.loop.post(_nothing), timeout):
                if not actor.loop.post(_nothing):  # it has ended between the post and its turn
                    raise actor.stopped_error()
                error = deadline_exceeded(actor.name, call)
                actor.loop.post(actor.abandon, call, "deadline")
                raise error
            outputs = reply.take()
            span.metadata["tier"] = call.tier
            span.measurements["queued"] = call.queued or 0
            span.measurements["compiling"] = call.compiling
        if call.heard is not None:
            _warn(call.heard)
        return outputs

    async def warm(self, specs: Mapping[str, Any] | Iterable[Mapping[str, Any]]) -> None:
        """Compile signatures ahead of traffic, several at once on idle cores; those that are cached cost nothing.

        Of a graph that breaks, the first segment is compiled: the others depend on values. Given arrays for all inputs, the
        graph is run once on the host, in numpy, and all segments of such a call are compiled, likewise several at once.
        With `autotune` it returns when what has been compiled up to then is tuned, too; `warm(())` waits for just that.

        Args:
            specs: A `Spec` or an array by input name, or several such mappings.

        Raises:
            InputError: Specs that do not fit the graph.
            NeedsValue: The graph reads an input's value on the host, which a spec does not have.
            ActorStopped: The actor has ended.
        """
        signatures = (specs,) if isinstance(specs, Mapping) else tuple(specs)
        await _unwrapped(self._actor.ask(Warm(signatures)))

    async def why(self, inputs: Mapping[str, Any]) -> Why:
        """Tell, without running, whether a call of these inputs would find its program, and if not, what differs from the
        nearest one that is cached, and which buckets would serve both.

        Args:
            inputs: As for `run`; arrays of the right shapes will do, unless a value is part of the key.

        Returns:
            What the call would hit, or how it differs from the nearest cached key, by input, axis and size.

        Raises:
            InputError: The inputs do not fit the graph.
            ActorStopped: The actor has ended.
        """
        return await self._actor.ask(WhyMiss(inputs))  # type: ignore[no-any-return]

    async def explain(self, *, verbose: bool = False) -> Explanation:
        """The segments compiled so far and the breaks between them: where, why, what they cost, and what to do about it.

        Args:
            verbose: The text also tells, for each node, in which form programs compute it where that is not the plain one.
        """
        found: Explanation = await self._actor.ask(Explain())
        return replace(found, verbose=True) if verbose else found

    async def statistics(self) -> ActorStatistics:
        """Counts of calls, cache, compiles and memory. Asks the run thread, so it waits for a call that is running."""
        self._actor.check_place()
        return await self._actor.statistics()

    async def clear_cache(self) -> None:
        """Drop every compiled program; the next call of each signature compiles again."""
        await self._actor.ask(ClearCache())

    async def aclose(self) -> None:
        """End the actor, and its cache with it. Everyone who waits gets `ActorStopped` at once; new calls do, too.

        Returns when a computation that was running has ended.
        """
        await self._actor.aclose()

    def __repr__(self) -> str:
        return f"<Compiled {self.name!r} {self.state}>"


def _warn(texts: Iterable[str]) -> None:
    """Warn at the line that awaits the call, or calls; an error there when the user's filters make it one."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(_HERE):
        level, frame = level + 1, frame.f_back
    for text in texts:
        warnings.warn(text, NonFiniteWarning, stacklevel=level)


def _nothing() -> None:
    return None


def _submit(actor: ModelActor, call: Call) -> None:
    try:
        actor.submit(call)
    except Exception as error:
        call.reply.settle(None, error)


async def _unwrapped(work: Coroutine[Any, Any, Any]) -> Any:
    """A group of one error is that error."""
    try:
        return await work
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup) and error.exceptions:
            error = error.exceptions[0]
        raise error from error.__cause__
