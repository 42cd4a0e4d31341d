"""One writer for each content: a lock in this process, then the lock file that all Hugging Face tools use.

Locks only save work. Where the file lock does nothing, or can't be made, unique temporary names, hashes and atomic renames keep the cache
right all the same. A lock file is never deleted: another process may be waiting for it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import anyio
from filelock import BaseFileLock, FileLock, Timeout

from transmuter_async.hub.workers import Workers

__all__ = ["Locks"]

_POLL = 0.05  # seconds
_SAY_EVERY = 10.0  # seconds
_MODE = 0o664  # users who share a cache wait for each other
_logger = logging.getLogger("transmuter_async.hub")


class Locks:
    """The locks that one client holds or waits for."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self._here: dict[Path, tuple[anyio.Lock, int]] = {}

    @asynccontextmanager
    async def hold(self, path: Path) -> AsyncIterator[None]:
        """Holds the lock file `path`; waits without a limit, telling so every 10 s."""
        async with self._hold_here(path):
            lock = FileLock(path, mode=_MODE, thread_local=False)
            held = False
            try:
                held = await self._acquire(lock, path)
                yield
            finally:
                if held or lock.is_locked:
                    await self._workers.run(_release, lock)

    @asynccontextmanager
    async def _hold_here(self, path: Path) -> AsyncIterator[None]:
        """Among the tasks of this client. The next in line takes over when the holder fails."""
        lock, users = self._here.get(path, (anyio.Lock(), 0))
        self._here[path] = lock, users + 1
        try:
            async with lock:
                yield
        finally:
            lock, users = self._here.pop(path)
            if users > 1:
                self._here[path] = lock, users - 1

    async def _acquire(self, lock: BaseFileLock, path: Path) -> bool:
        began = time.monotonic()
        said = began
        while True:
            outcome = await self._workers.run(_try, lock, path)
            if outcome is not None:
                return outcome
            now = time.monotonic()
            if now - said >= _SAY_EVERY:
                said = now
                _logger.info("waiting for %s since %.0f s: another process downloads the same file", path, now - began)
            await anyio.sleep(_POLL)


def _try(lock: BaseFileLock, path: Path) -> bool | None:
    """True: held. False: there are no locks here. None: another process holds it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire(blocking=False)
    except Timeout:
        return None
    except (OSError, NotImplementedError) as error:
        _logger.debug("no lock %s (%s): going on without", path, error)
        return False
    return True


def _release(lock: BaseFileLock) -> None:
    with suppress(OSError):
        lock.release(force=True)
