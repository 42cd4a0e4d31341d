"""What every actor is: one owner of some state, its life cycle, and the rule for failures.

An actor's code runs on the loop, in plain functions that never wait: callers call them to send a message, threads post
to them when work has ended. What waits is the actor's *task*: it opens the actor, waits for its end, supervises.

    starting ──► running ──► stopping ──► stopped
                  ▲   │crash
                  └───┘ restarting, at most RESTARTS times within WINDOW seconds

The failure rule: an error in handling a message goes to its asker. An error outside of any message, that is in the
actor's own code, ends the actor: everyone who waits gets `ActorStopped` from it, state is thrown away, and the
supervisor starts it anew. One crash too many ends it for good, and is raised out of the task: loudly.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import Any, Literal

import anyio

from transmuter_async.actors.reply import Reply
from transmuter_async.bridge import Loop, current_loop
from transmuter_async.errors import ActorStopped, MisuseError
from transmuter_async.telemetry import Telemetry, detached

__all__ = ["RESTARTS", "WINDOW", "Actor"]

RESTARTS = 3
"""Restarts that are granted …"""

WINDOW = 30.0
"""… within this many seconds."""

State = Literal["starting", "running", "restarting", "stopping", "stopped"]


class Actor:
    """Life cycle and supervision. Subclasses own the state: `_open`, `_abort`, `_idle`, `_close`.

    Attributes:
        name: In every event and error.
        state: See the picture above.
    """

    def __init__(self, name: str, telemetry: Telemetry, facts: Mapping[str, Any]) -> None:
        self.name = name
        self.state: State = "starting"
        self.telemetry = telemetry
        self.facts = facts
        self.loop: Loop = current_loop()
        self.restarts = 0
        self._pid = os.getpid()
        self._thread = threading.get_ident()
        self._failure: BaseException | None = None
        self._fatal: BaseException | None = None
        self._drain = False
        self._is_open = False
        self.ready: Reply[None] = Reply(self.loop)
        self._scope = anyio.CancelScope()
        self._signal = anyio.Event()
        self._stopped = anyio.Event()
        self._crashes: deque[float] = deque()

    # What a subclass provides.

    async def _open(self) -> None:
        """Get ready to run. Called at the start and after each crash."""

    def _opened(self) -> None:
        """Running now: take up what waits."""

    def _abort(self, reason: ActorStopped) -> None:
        """Answer everyone who waits with `reason`. Never raises."""

    def _busy(self) -> bool:
        """Whether something accepted is not answered yet."""
        return False

    async def _close(self, *, final: bool) -> None:
        """Wait until nothing of this generation runs any more; `final`: give everything back. Not cancelled."""

    # The task.

    async def serve(self) -> None:
        """The actor's task: from its start to its end. `ready` is filled once it runs, or could not start.

        Raises:
            ActorStopped: It crashed once too often.
        """
        reason, how = "runtime left", "started"
        try:
            while True:
                cause, self._failure = self._failure, None
                self._scope = anyio.CancelScope()
                if self.state == "stopping" and not self._drain:
                    self._scope.cancel()
                try:
                    with self._scope:
                        await self._open()
                except Exception as error:
                    if how == "started":
                        reason = "failed"
                        self.ready.settle(None, error)
                        return
                    self.crash(error)
                else:
                    self._begin(how, cause)
                failure = await self._end()
                if failure is None:
                    reason = "closed"
                    return
                with anyio.CancelScope(shield=True):
                    await self._close(final=False)
                if self._spent():
                    reason = "crashed"
                    self._fatal = failure
                    raise ActorStopped(
                        f"the actor {self.name!r} crashed {RESTARTS + 1} times within {WINDOW:g} s and is not started again; "
                        f"the last error was {type(failure).__name__}: {failure}. This is a defect: please report it"
                    ) from failure
                self.restarts += 1
                how = "restarted"
        finally:
            self.state = "stopping"
            self.ready.settle(None, self.stopped_error())
            self._abort(self.stopped_error())
            with anyio.CancelScope(shield=True):
                await self._close(final=True)
            self.state = "stopped"
            self._stopped.set()
            if self.telemetry.wants("transmuter.actor.stopped"):
                self.telemetry.emit(
                    "transmuter.actor.stopped", {"count": 1}, {"actor": self.name, **self.facts, "reason": reason}
                )

    async def _end(self) -> BaseException | None:
        """Wait until there is nothing left to run for: the crash to recover from, or None to end."""
        while True:
            stopping = self.state == "stopping"
            if stopping and not (self._drain and self._busy()):
                return None
            if self._failure is not None:
                return self._failure
            await self._signal.wait()
            self._signal = anyio.Event()

    def _begin(self, how: str, failure: BaseException | None) -> None:
        if self.state != "stopping":
            self.state = "running"
        elif not self._drain:  # asked to stop while it opened
            return
        if self.telemetry.wants(f"transmuter.actor.{how}"):
            self.telemetry.emit(
                f"transmuter.actor.{how}",
                {"count": 1},
                {"actor": self.name, **self.facts, "reason": None if failure is None else detached(failure)},
            )
        self.ready.settle(None, None)
        self._is_open = True
        try:
            self._opened()
        except Exception as error:
            self.crash(error)

    def _spent(self) -> bool:
        now = time.monotonic()
        self._crashes.append(now)
        while self._crashes and self._crashes[0] < now - WINDOW:
            self._crashes.popleft()
        return len(self._crashes) > RESTARTS

    def _settled(self) -> None:
        """To be called when an answer was given: a drain may be waiting for it."""
        if self._drain and not self._busy():
            self._signal.set()

    def checkpoint(self) -> None:
        """Stands at the start of every function of the actor's own code: where tests inject a crash."""

    # For everybody on the loop.

    def crash(self, error: BaseException) -> None:
        """The actor's own code failed: answer everyone, and have the task see to it."""
        if self._failure is None and self.state != "stopped":
            self._failure = error
            self._is_open = False
            if self.state == "running":
                self.state = "restarting"
            stopped = ActorStopped(
                f"the actor {self.name!r} crashed: {type(error).__name__}: {error}. Calls made from now on are answered again"
            )
            stopped.__cause__ = error
            self._abort(stopped)
            self._signal.set()

    @property
    def works(self) -> bool:
        """Whether it may take up what waits: it is open, also while it drains; not between a crash and its restart."""
        return self._is_open and self.state in ("running", "stopping")

    def stop(self, *, drain: bool = False) -> None:
        """Refuse what comes from now on and end; answer who waits with `ActorStopped`, or with `drain` finish first.

        What came after a crash is finished, too: once it has started again.
        """
        if self.state in ("stopping", "stopped"):
            if not drain and self._drain:  # no more patience
                self._drain = False
                self._scope.cancel()
                self._abort(self.stopped_error())
                self._signal.set()
            return
        self._drain = drain and self.state in ("running", "restarting")
        self.state = "stopping"
        if not self._drain:
            self._scope.cancel()
            self._abort(self.stopped_error())
        self._signal.set()

    async def aclose(self, *, drain: bool = False) -> None:
        """`stop`, and wait until the actor has ended: also the XLA call that it may be in."""
        self.check_place()
        self.stop(drain=drain)
        await self._stopped.wait()

    async def wait_stopped(self) -> None:
        """Wait until the actor has ended, after `stop`."""
        await self._stopped.wait()

    def stopped_error(self) -> ActorStopped:
        """What whoever asks a closed actor gets."""
        if self._fatal is not None:
            stopped = ActorStopped(
                f"the actor {self.name!r} crashed {RESTARTS + 1} times and was given up; the last error was "
                f"{type(self._fatal).__name__}: {self._fatal}. Enter a new Runtime and compile the model again"
            )
            stopped.__cause__ = self._fatal
            return stopped
        if self.state in ("running", "restarting"):
            return ActorStopped(f"the actor {self.name!r} crashed meanwhile and is started again; ask once more")
        return ActorStopped(f"the actor {self.name!r} was closed, and its cache with it; compile the model again")

    def check_place(self) -> None:
        """Refuse a caller of another loop or process.

        Raises:
            MisuseError: The handle belongs elsewhere.
        """
        if threading.get_ident() == self._thread and self.loop.is_current() and os.getpid() == self._pid:
            return
        self.check_process()
        raise MisuseError(
            f"{self.name!r} belongs to the {self.loop.backend} event loop in which it was compiled, and was used from "
            "another one (or none); compile it there, or use call_from_thread"
        )

    def check_process(self) -> None:
        """Refuse a caller in a forked child.

        Raises:
            MisuseError: The process is another one.
        """
        if os.getpid() != self._pid:
            raise MisuseError(
                f"{self.name!r} belongs to process {self._pid} and was used in its fork {os.getpid()}, where its threads do "
                "not exist; compile it in the child, or start workers with the spawn method"
            )
