"""When to ask again, and after how long."""

from __future__ import annotations

import logging
import random
from collections.abc import Awaitable, Callable

from transmuter_async.hub.errors import HubConnectionError, HubError, HubHTTPError

__all__ = ["LIMIT", "Retries", "Sleep"]

LIMIT = 5
_WAITS = (1.0, 2.0, 4.0, 8.0, 8.0)  # seconds
_JITTER = 0.2
_logger = logging.getLogger("transmuter_async.hub")

Sleep = Callable[[float], Awaitable[None]]


class Retries:
    """The attempts of one request, or of one file: at most `limit` in a row without progress."""

    def __init__(self, sleep: Sleep, limit: int = LIMIT) -> None:
        self._sleep = sleep
        self._limit = limit
        self._failed = 0
        self._expired = False

    def progress(self) -> None:
        """New bytes came: counting starts again."""
        self._failed = 0
        self._expired = False

    async def wait(self, error: HubError) -> None:
        """Waits before the next attempt.

        Args:
            error: Why the last one failed.

        Raises:
            HubError: `error`, when asking again does not help or was tried often enough.
        """
        if isinstance(error, HubHTTPError) and error.expired and self._limit:
            if self._expired:
                raise error
            self._expired = True
            return  # the next attempt asks the Hub for a fresh link: nothing to wait for
        retryable = isinstance(error, (HubHTTPError, HubConnectionError)) and error.retryable
        if not retryable or self._failed >= self._limit:
            raise error
        asked = error.wait if isinstance(error, HubHTTPError) else None
        jitter = random.uniform(1 - _JITTER, 1 + _JITTER)  # noqa: S311  # spreads clients, hides nothing
        seconds = _WAITS[min(self._failed, len(_WAITS) - 1)] * jitter if asked is None else asked
        self._failed += 1
        _logger.info("attempt %d failed, the next in %.1f s: %s", self._failed, seconds, error)
        await self._sleep(seconds)
