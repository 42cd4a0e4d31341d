"""Short work on the loop's own core: waking another core can cost more than the work.

A core with nothing to do halts. To wake it takes some 5 µs where it is of metal and 20 to 40 where it is a virtual machine's,
and a call of a sleeping thread on another core pays that twice, there and back. The core of the loop is awake when a call is
submitted, and free as soon as the loop waits for the answer; the answer needs it anyway. So a thread whose work
has been short for a while, and only such a one, follows its loop from core to core, by its affinity. Measured on two virtual
cores, a call of three nodes takes 100 µs instead of 170, and 100 callers at once get 12,000 answers a second instead of 6,000.

Work that is longer gives the thread all its cores back when it ends: there one wake more or less does not count, and other cores
do. So one long work after many short ones is done on the loop's core, where the system lets the loop go first, or moves it.
Only Linux has affinities for single threads; elsewhere nothing happens.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress

__all__ = ["Neighbour"]

SHORT = 100_000
"""Nanoseconds of work up to which waking a core is a matter of the whole."""

IN_A_ROW = 16
"""So many times in a row: work of changing length keeps all its cores."""


def _finder() -> Callable[[], int] | None:
    if sys.platform != "linux":
        return None
    try:
        find = ctypes.PyDLL(None).sched_getcpu  # of the C library: os has none; `PyDLL` keeps the interpreter's lock
    except (AttributeError, OSError):
        return None
    return find if find() >= 0 else None


_current_core = _finder()


class Neighbour:
    """Keeps one thread near the loop, while its work is short. `took` belongs to the thread, `follow` to the loop.

    The loop calls `follow` only while the thread has no work, so the two never meet.
    """

    __slots__ = ("_core", "_cores", "_short")

    def __init__(self) -> None:
        self._short = 0  # how many works in a row were short
        self._core: int | None = None  # the core that the thread is bound to
        self._cores: set[int] = set()  # the cores that it had before

    def took(self, nanoseconds: int) -> None:
        """The thread's last work took so long. In the thread, before the loop hears of the end."""
        if nanoseconds <= SHORT:
            self._short += 1
            return
        self._short = 0
        if self._core is not None:
            self._core = None
            with suppress(OSError):
                os.sched_setaffinity(0, self._cores)

    def follow(self, thread: threading.Thread) -> None:
        """Bind the thread, which has no work, to the core that the loop is on now. On the loop, before it gives work."""
        if self._short < IN_A_ROW or _current_core is None or thread.native_id is None:
            return
        core = _current_core()
        if core != self._core:
            with suppress(OSError):  # the thread has ended, or the system has taken the core away
                if self._core is None:
                    self._cores = os.sched_getaffinity(thread.native_id)
                self._core = core
                os.sched_setaffinity(thread.native_id, {core})
