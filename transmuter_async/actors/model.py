"""The model actor: it owns the programs of one compiled model, and everything that runs them.

Who may touch what:

- The loop: calls, slots, waiters, counters. Plain functions that never wait.
- The run threads (`max_concurrency` of them): the segment cache, and the calls that hold a slot. See `work.py`.
- The compile threads: a compile job, while it runs. See `compiles.py` for which one is next.

The way of a call. `submit` puts it into a run thread's queue at once when a slot is free, else into the mailbox. The
thread advances it as far as programs are cached; `_settle` answers it. Where a program is missing the call gives its slot
back and waits for the one compile of that key; `_compiled` has the program put into the cache and queues the call again,
in front. So a cached call costs one hop, and is never behind somebody else's compile. A cold call (`cold="interpret"`) is
answered without the program, and says which one it missed; that is compiled behind it. With `autotune` what was compiled is
tuned behind all of this, see `tuning.py`.

A slot is held until the thread is done, also when the caller has left. A caller that leaves marks its call: queued, it is
never run; running, it ends before its next step, unheard.
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, TypeVar

from anyio.lowlevel import checkpoint

from transmuter_async.actors import ahead, work
from transmuter_async.actors.actor import Actor
from transmuter_async.actors.calls import Call, SharedCache, deadline_exceeded
from transmuter_async.actors.compiles import Compile, CompileBook, Rank
from transmuter_async.actors.events import Abandoned, Observer, Untouched
from transmuter_async.actors.messages import ActorStatistics, ClearCache, Explain, Message, Statistics, Warm
from transmuter_async.actors.reply import Reply, again
from transmuter_async.actors.threads import Threads
from transmuter_async.actors.tuning import Tuner, swap, to_tune, tune
from transmuter_async.compiler import (
    CompileJob,
    Finished,
    Missing,
    Observe,
    Prepared,
    Segment,
    SegmentCache,
    Spec,
    cores,
    pinned,
)
from transmuter_async.errors import ActorStopped, Overloaded
from transmuter_async.telemetry import Telemetry

__all__ = ["ModelActor"]

T = TypeVar("T")


class ModelActor(Actor):
    """The actor of one compiled model.

    Args:
        name: Of the actor.
        telemetry: The bus.
        make: Makes the prepared model; called once, in a compile thread.
        source: The model's source, for events.
        specs: Signature to compile at the start, and to keep outside of the cache.
        cache_size: Segments kept for each position.
        compile_after: Cold calls that a key takes before its program is compiled behind them.
        max_concurrency: Calls that compute at once.
        mailbox: Calls that may wait before `nowait` is refused.
        span: The span of the compile that this actor starts in, for the events of its first segment.
        compiling: Programs that are compiled at once, at most; None for one on each core.

    Attributes:
        prepared: The model, ready to compile; set when the actor is ready.
        metadata: Of every event: `source` and `actor`.
        seeds: Where the seed of a call that gives none comes from.
        run_job: Runs a compile job in a compile thread. Tests hold it here.
        used: `time.monotonic_ns()` of the last call.
        weight_bytes: Of the weights on the device, and
        program_bytes: of the programs that are held, as far as jax tells; as of the last look that a thread took.
        grown: Called on the loop when programs were added, and when nothing is asked any more. The runtime keeps its budget.
    """

    def __init__(
        self,
        name: str,
        telemetry: Telemetry,
        make: Callable[[], Prepared],
        *,
        source: Any,
        specs: Mapping[str, Spec] | None,
        cache_size: int,
        compile_after: int = 1,
        max_concurrency: int = 1,
        mailbox: int = 256,
        span: int | None = None,
        compiling: int | None = None,
    ) -> None:
        super().__init__(name, telemetry, {"source": source})
        self.prepared: Prepared | None = None
        self.max_concurrency = max_concurrency
        self.mailbox = mailbox
        self.seeds = random.Random()  # noqa: S311 - of random operators; our own, so that the application's stays its own
        self.run_job: Callable[[CompileJob, Observe], Segment] = work.run_job
        self.used = time.monotonic_ns()
        self.weight_bytes = 0
        self.program_bytes = 0
        self.grown: Callable[[], None] = _nobody
        self._losses = 0
        self._gone: set[str] = set()  # what the budget took and no compile has brought back
        self._make = make
        self._specs = specs
        self._cache_size = cache_size
        self._compile_after = compile_after
        self._advance = work.advance
        self._span = span
        self._compiling = compiling
        self.metadata: dict[str, Any] = {"source": source, "actor": name}
        self._generation = 0
        self._run_threads: Threads | None = None
        self._compile_threads: Threads | None = None
        self._cache = self._new_cache()
        self._calls: set[Call] = set()  # everything not answered
        self._asks: set[Reply[Any]] = set()
        self._mail: deque[Call] = deque()
        self._queued = 0  # entries of `_mail` that somebody still waits for
        self._paused = 0  # calls that wait for a compile
        self._running = 0
        self._book = CompileBook()
        self._tuner = Tuner()
        self._tunes = False
        self._timings: dict[tuple[str, int], tuple[int, int]] = {}
        self._counts = dict.fromkeys(
            ("calls", "answered", "failed", "abandoned", "rejected", "peak_running", "hits", "misses", "evictions"), 0
        ) | {"compiles": 0, "compile_failures": 0, "compile_time": 0}

    def tell_device(self, device: str) -> None:
        """Name the device in every event, where a model is on several."""
        self.metadata["device"] = device
        self.facts = {**self.facts, "device": device}

    @property
    def losses(self) -> int:
        """Changes when programs that were compiled may be gone."""
        return self._generation + self._counts["evictions"] + self._losses

    # Messages, on the loop.

    def submit(self, call: Call, *, nowait: bool = False) -> None:
        """Take a call in.

        Raises:
            ActorStopped: The actor takes nothing any more.
            Overloaded: `nowait`, and the mailbox is full.
        """
        if self.state not in ("running", "restarting"):
            raise self.stopped_error()
        if nowait and self._queued + self._paused >= self.mailbox:
            self._counts["rejected"] += 1
            self._reject(call, "overloaded")
            raise Overloaded(
                f"the mailbox of {self.name!r} is full: {self._queued + self._paused} calls wait and {self._running} run; "
                "await run() to wait for room, or send fewer at once"
            )
        self._counts["calls"] += 1
        self.used = call.began
        self._calls.add(call)
        try:
            self.checkpoint()
            if self._running < self.max_concurrency and not self._queued and self.state == "running":
                self._start(call)
            else:
                self._mail.append(call)
                self._queued += 1
        except Exception as error:
            self.crash(error)

    def abandon(self, call: Call, why: str) -> None:
        """The caller has left. Never raises."""
        call.observer.stopped = True
        if call not in self._calls:
            return
        self._counts["abandoned"] += 1
        if call.place == "waiting":
            self._queued -= 1  # its entry in the mailbox is skipped later
            self._reject(call, why)
        elif call.place == "compiling":
            self._paused -= 1
            self._reject(call, why)
            for compile in list(self._book.current.values()):
                if compile.waiters.pop(call, call) is None:
                    self._book.drop_unwanted(compile)
        else:
            call.observer.left = why
        self._forget(call)

    async def ask(self, message: Message) -> Any:
        """Send a message and wait for its answer."""
        self.check_place()
        if self.state not in ("running", "restarting") or self._run_threads is None:
            await checkpoint()
            raise self.stopped_error()
        if isinstance(message, Warm):
            return await ahead.warm(self, message)
        timings = dict(self._timings) if isinstance(message, Explain) else {}
        if isinstance(message, ClearCache):
            self._timings.clear()
            self._losses += 1
        return await self._ask_thread(self._run_threads, work.answer, self.prepared, message, self._cache, timings)

    async def statistics(self) -> ActorStatistics:
        """Counts up to now."""
        held, self.weight_bytes, self.program_bytes = await self.ask(Statistics())
        return ActorStatistics(
            name=self.name,
            state=self.state,
            waiting=self._queued + self._paused,
            running=self._running,
            max_concurrency=self.max_concurrency,
            mailbox=self.mailbox,
            restarts=self.restarts,
            cache=held,
            weight_bytes=self.weight_bytes,
            program_bytes=self.program_bytes,
            **self._counts,
        )

    async def _ask_thread(self, threads: Threads | None, work: Callable[..., T], *arguments: Any) -> T:
        """As `Threads.run`, but the end of the actor answers it."""
        if threads is None:
            raise self.stopped_error()
        reply: Reply[T] = Reply(self.loop)
        generation = self._generation
        self._asks.add(reply)
        try:
            threads.submit(work, *arguments, done=reply.settle)
            answer = await reply.wait()
        finally:
            self._asks.discard(reply)
        if generation != self._generation:  # answered, and then it crashed: whoever goes on would go on in another one
            raise self.stopped_error()
        return answer

    def owns_thread(self, thread: threading.Thread) -> bool:
        """Whether `thread` computes or compiles for this actor. From any thread."""
        return any(each is not None and each.owns(thread) for each in (self._run_threads, self._compile_threads))

    @property
    def load(self) -> int:
        """Calls that wait or run now; one whose caller has left runs until its thread is done. From any thread."""
        return self._queued + self._paused + self._running

    # Calls.

    def _start(self, call: Call) -> None:
        assert self._run_threads is not None
        call.place = "running"
        call.installed = self._book.installed
        self._running += 1
        self._counts["peak_running"] = max(self._counts["peak_running"], self._running)
        if call.queued is None:
            call.queued = time.monotonic_ns() - call.began
        done = partial(self._settle, call, self._generation)
        self._run_threads.submit(self._advance, self.prepared, call, self._cache, done=done)

    def _settle(
        self, call: Call, generation: int, step: Finished | Missing | None, error: BaseException | None
    ) -> None:
        if generation != self._generation:
            call.observer.leave()
            return  # of before a crash: everybody was answered then, and its slot went with the threads
        self._running -= 1
        self._count(call.observer)
        self.checkpoint()
        if isinstance(error, Untouched):
            self._reject(call, call.observer.left or "deadline")  # or the thread has seen that before the caller
        if call in self._calls:
            # It is done in the thread, or as it was before; what follows may give it another place.
            call.place = "waiting" if isinstance(error, Untouched) else "done"
            if error is not None:
                late = isinstance(error, Abandoned)
                self._give(call, None, deadline_exceeded(self.name, call) if late else error)
            elif isinstance(step, Missing):
                self._miss(call, step.job)
            elif step is not None:
                call.tier = step.tier
                self._give(call, step.outputs, None)
                if step.wanted and self.state == "running":
                    self._want(step.wanted, call.installed)
        else:
            call.observer.leave()
        self._next()

    def _count(self, observer: Observer) -> None:
        counts = self._counts
        counts["hits"] += observer.hits
        counts["misses"] += observer.misses
        counts["evictions"] += observer.evictions
        observer.hits = observer.misses = observer.evictions = 0
        if observer.timings:
            for kind, position, nanoseconds in observer.timings:
                count, total = self._timings.get((kind, position), (0, 0))
                self._timings[kind, position] = (count + 1, total + nanoseconds)
            observer.timings.clear()

    def _next(self) -> None:
        while self._mail and self._running < self.max_concurrency and self.works:
            call = self._mail.popleft()
            if call in self._calls and call.place == "waiting":
                self._queued -= 1
                self._start(call)

    def _requeue(self, call: Call) -> None:
        call.place = "waiting"
        self._mail.appendleft(call)
        self._queued += 1

    def _give(self, call: Call, outputs: Mapping[str, Any] | None, error: BaseException | None) -> None:
        self._counts["answered" if error is None else "failed"] += 1
        self._forget(call)
        call.reply.settle(outputs, error)

    def _forget(self, call: Call) -> None:
        self._calls.discard(call)
        if call.place != "running":  # else the thread holds it, and lets go of it by itself
            call.execution = None
            call.observer.leave()
        call.place = "done"
        call.message = None
        self._settled()
        if not self._calls:
            self.grown()

    def _reject(self, call: Call, why: str) -> None:
        """Tell that a call is not computed, or not any further: refused, or left while it waited."""
        if self.telemetry.wants("transmuter.queue.rejected"):
            facts = {**self.metadata, **call.observer.where(), "serving": None, "why": why}
            self.telemetry.emit("transmuter.queue.rejected", {"count": 1}, facts)

    # Compiles.

    def _miss(self, call: Call, job: CompileJob) -> None:
        key = job.key
        failed = self._book.failure(key)
        if failed is not None:
            self._give(call, None, again(failed))
            return
        if self._book.came(key, call.installed):
            self._requeue(call)  # it came while another run thread looked
            return
        call.place = "compiling"
        call.paused = time.monotonic_ns()
        self._paused += 1
        observer = Observer(self.telemetry, self.metadata, call=call.observer.call, parent=call.observer.inner)
        self._compile(job, observer, Rank.CALL).waiters[call] = None

    def _want(self, jobs: Iterable[CompileJob], installed: int) -> None:
        """Compile behind what a cold call has missed, once it was asked for often enough. Nobody waits for it."""
        for job in jobs:
            if not self._book.came(job.key, installed) and self._book.want(job.key, self._compile_after):
                self._compile(job, Observer(self.telemetry, self.metadata, extra={"background": True}), Rank.BEHIND)

    def _compile(self, job: CompileJob, observer: Observer, rank: Rank, *, keep: bool = False) -> Compile:
        compile = self._book.current.get(job.key)
        if compile is None:
            compile = Compile(job, observer, rank, keep=keep)
            self._book.add(compile)
        else:
            self._book.promote(compile, rank)
        self._next_compile()
        return compile

    def _next_compile(self) -> None:
        assert self._compile_threads is not None
        while (compile := self._book.start(self._compile_threads.limit - self._tunes)) is not None:
            self._compile_threads.submit(
                self._run_job,
                compile,
                self._generation,
                done=partial(self._compiled, compile, self._generation),
            )
        if self._tunes and not self._book.current and self._run_threads is not None:
            observer = Observer(self.telemetry, self.metadata, extra={"background": True})
            run = partial(tune, observe=observer, facts=self.metadata)
            assert self.prepared is not None
            put = partial(swap, self.prepared, self._cache)
            self._tuner.start(self._compile_threads, run, self._run_threads, put, partial(self._tuned, observer))

    def _run_job(self, compile: Compile, generation: int) -> Segment | None:
        """In a compile thread. None when the actor has ended meanwhile: the program is let go of here, which takes a while."""
        segment = self.run_job(compile.job, compile.observer)
        if generation != self._generation:
            return None
        if self._tunes:
            compile.tuning = to_tune(compile.job, segment, self.metadata)
        return segment

    def _count_compiles(self, observer: Observer) -> None:
        for name in ("compiles", "compile_failures", "compile_time"):
            self._counts[name] += getattr(observer, name)

    def _tuned(self, observer: Observer, sizes: tuple[int, int] | None) -> None:
        self._count_compiles(observer)
        self.checkpoint()
        if sizes is not None:
            self.weight_bytes, self.program_bytes = sizes
        self._next_compile()
        self.grown()

    def _compiled(
        self, compile: Compile, generation: int, segment: Segment | None, error: BaseException | None
    ) -> None:
        if generation != self._generation:
            return
        self._book.ended(compile)
        self._count_compiles(compile.observer)
        self.checkpoint()
        if segment is None:
            assert error is not None
            self._installed(compile, generation, None, error)
        elif self._run_threads is not None:
            self._run_threads.submit(
                work.install,
                self.prepared,
                self._cache,
                segment,
                compile,
                done=lambda sizes, error: self._installed(compile, generation, segment, error, sizes),
            )
        self._next_compile()

    def _installed(
        self,
        compile: Compile,
        generation: int,
        segment: Segment | None,
        error: BaseException | None,
        sizes: tuple[int, int] | None = None,
    ) -> None:
        if generation != self._generation:
            return
        self.checkpoint()
        self._count(compile.observer)
        self._book.settle(compile, error)
        if compile.tuning is not None and error is None:
            self._tuner.add(compile.tuning)
        now = time.monotonic_ns()
        if sizes is not None and error is None:
            self._restored(*sizes)
        for reply in compile.replies:
            reply.settle(segment, None if error is None else again(error))
        for call in reversed(compile.waiters):
            self._paused -= 1
            call.compiling += now - call.paused
            if error is None:
                if call.execution is not None:
                    call.execution.given = segment  # before the call runs, another's may push it out
                self._requeue(call)
            else:
                self._give(call, None, again(error))
        self._next()
        self._next_compile()
        if error is None:
            self.grown()

    # Memory.

    @property
    def idle(self) -> bool:
        """Whether it has no call and no compile now."""
        return self.state == "running" and not self._calls and not self._book.current and not self._tuner.busy

    def release(self, what: str, then: Callable[[], None]) -> bool:
        """Give "programs" or "weights" back, for the memory budget; they come back with the next call.

        Args:
            what: Which. Programs hold weights, so they go first.
            then: Called on the loop when it is done.

        Returns:
            False when there is nothing to give, or the actor is not idle.
        """
        nothing = not (self.weight_bytes if what == "weights" else self._book.installed) or what in self._gone
        if nothing or not self.idle or self._run_threads is None:
            return False
        generation = self._generation

        def done(size: int | None, error: BaseException | None) -> None:
            if generation == self._generation:
                if what == "weights":
                    self.weight_bytes = 0
                else:
                    self.program_bytes = 0
                self._told("release", what, size or 0)
            then()

        self._gone.add(what)
        self._losses += 1
        self._run_threads.submit(work.release, self.prepared, self._cache, what, done=done)
        return True

    def _restored(self, weights: int, programs: int) -> None:
        self.weight_bytes, self.program_bytes = weights, programs
        for what in sorted(self._gone):
            self._told("restore", what, programs if what == "programs" else weights)
        self._gone.clear()

    def _told(self, how: str, what: str, size: int) -> None:
        if self.telemetry.wants(f"transmuter.memory.{how}"):
            self.telemetry.emit(f"transmuter.memory.{how}", {"bytes": size}, {**self.metadata, "what": what})

    # Life cycle; see `Actor`.

    async def _open(self) -> None:
        self._generation += 1
        self._cache = self._new_cache()
        self._compile_threads = Threads(
            self.loop, f"{self.name}-compile", self._compiling or cores(), crashed=self.crash
        )
        if self.prepared is None:
            self.prepared = await self._compile_threads.run(self._prepare)
        self._tunes = self.prepared.options.autotune
        self._compile_threads.limit += self._tunes  # the one that tunes, so that no compile waits for it
        self._advance = work.advance_listening if self.prepared.options.nonfinite == "warn" else work.advance
        self._run_threads = Threads(
            self.loop, f"{self.name}-run", self.max_concurrency, crashed=self.crash, around=self._around, near=True
        )
        if self._specs is not None and not self.restarts and self.prepared.options.compiler != "eager":
            await ahead.compile_signature(self, self._specs, keep=True)
            await self._tuner.wait(self.loop, self._asks)
        self.checkpoint()

    def _prepare(self) -> Prepared:
        prepared = self._make()
        if self._specs is None and prepared.options.compiler != "eager" and prepared.graph_break is None:
            prepared.find_break()
        return prepared

    def _new_cache(self) -> SegmentCache:
        return SegmentCache(self._cache_size) if self.max_concurrency == 1 else SharedCache(self._cache_size)

    def _around(self) -> AbstractContextManager[Any]:
        assert self.prepared is not None
        return pinned(device=self.prepared.device, precision=self.prepared.options.precision)

    def _opened(self) -> None:
        self.checkpoint()
        self._next()

    def _busy(self) -> bool:
        return bool(self._calls)

    def _abort(self, reason: ActorStopped) -> None:
        self._generation += 1  # what threads still bring is of the past
        calls, asks = list(self._calls), list(self._asks)
        self._calls.clear()
        self._asks.clear()
        self._mail.clear()
        self._book.clear()
        self._tuner.clear()
        self._timings.clear()
        self._gone.clear()
        self.program_bytes = 0
        self._queued = self._paused = self._running = 0
        for call in calls:
            call.observer.stopped = True
            if call.place != "running":
                call.observer.leave()
            call.place = "done"
            call.message = None
            self._counts["failed"] += 1
            call.reply.settle(None, again(reason))
        for reply in asks:
            reply.settle(None, again(reason))

    async def _close(self, *, final: bool) -> None:
        cache = self._cache
        self._tuner.clear()
        run_threads, self._run_threads = self._run_threads, None
        compile_threads, self._compile_threads = self._compile_threads, None
        if run_threads is not None:
            run_threads.submit(cache.clear, done=_nothing)  # the thread that owns it drops it
            if final and self.prepared is not None:
                run_threads.submit(self.prepared.release, done=_nothing)
            run_threads.close()
        if compile_threads is not None:
            compile_threads.close()
            await compile_threads.wait_ended()
        if run_threads is not None:
            await run_threads.wait_ended()


def _nobody() -> None:
    return None


def _nothing(result: Any, error: BaseException | None) -> None:
    return None
