"""A subscriber that logs compile work: one structured line for each event that explains where time went."""

from __future__ import annotations

import logging
from typing import Any

import structlog

from transmuter_async.actors import Threads
from transmuter_async.bridge import Loop
from transmuter_async.telemetry import Event, Telemetry

__all__ = ["CompileLog"]

_log = logging.getLogger("transmuter_async")

_LOGGED = (
    "transmuter.compile.stop",
    "transmuter.cache.miss",
    "transmuter.cache.evict",
    "transmuter.cache.advice",
    "transmuter.segment.compile.stop",
    "transmuter.break.stop",
    "transmuter.disk_cache",
    "transmuter.hub.download.stop",
    "transmuter.actor.restarted",
    "transmuter.load.exception",
    "transmuter.compile.exception",
    "transmuter.call.exception",
    "transmuter.segment.compile.exception",
    "transmuter.break.exception",
    "transmuter.hub.download.exception",
    "transmuter.hub.info.exception",
    "transmuter.batch.exception",
)
_LEFT_OUT = frozenset({"span", "parent", "call", "stacktrace"})


class CompileLog:
    """Logs until it is closed. The logger is called in a thread of its own: it may write to a slow place.

    Args:
        telemetry: The bus.
        loop: The loop that `serve` runs in.
        logger: A structlog logger, or None for the application's own.
    """

    def __init__(self, telemetry: Telemetry, loop: Loop, logger: Any) -> None:
        self._subscription = telemetry.subscribe(*_LOGGED).open()
        self._logger = structlog.get_logger("transmuter_async") if logger is None else logger
        self._threads = Threads(loop, "transmuter-log", 1)
        self._failed = False

    async def serve(self) -> None:
        """The task: one event after the other."""
        try:
            async for event in self._subscription:
                await self._threads.run(self._log, event)
        finally:
            self._subscription.close()
            self._threads.close()

    async def aclose(self) -> None:
        """Log what is buffered, then end."""
        self._subscription.finish()
        await self._threads.wait_ended()

    def _log(self, event: Event) -> None:
        try:
            self._write(event)
        except Exception:  # a logger that fails must not end the runtime
            if not self._failed:
                self._failed = True
                _log.exception("the logger given to log_compiles failed; further failures are not told")

    def _write(self, event: Event) -> None:
        facts = {name: _short(value) for name, value in event.metadata.items() if name not in _LEFT_OUT}
        if "duration" in event.measurements:
            facts["duration_ms"] = round(event.measurements["duration"] / 1e6, 3)
        for name in ("bytes", "count"):
            if name in event.measurements:
                facts[name] = event.measurements[name]
        level = self._logger.warning if event.name.endswith(".exception") else self._logger.info
        level(event.name, **facts)


def _short(value: Any) -> Any:
    if isinstance(value, BaseException):
        return f"{type(value).__name__}: {value}"
    return value
