"""The line in front of the queues: requests that wait for room, in the order in which they came.

Those of maps have a line of their own, for their share of the room may be full where there is room for others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable

from transmuter_async.serving.queues import Pending

__all__ = ["Line"]


class Line:
    """Who waits for room. `len` of it is how many do."""

    def __init__(self) -> None:
        self._lines: dict[bool, deque[Pending]] = {False: deque(), True: deque()}
        self._keys: dict[Hashable, dict[int, Pending]] = {}
        self._places = 0
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, state: Pending) -> None:
        """A request comes last."""
        self._places += 1
        state.place = self._places
        self._count += 1
        self._lines[state.request.bulk].append(state)
        self._keys.setdefault(state.request.key, {})[state.place] = state

    def remove(self, state: Pending) -> None:
        """A request has room now, or has left."""
        bulk, key = state.request.bulk, state.request.key
        of_key = self._keys[key]
        del of_key[state.place]
        if not of_key:
            del self._keys[key]
        state.place = 0
        self._count -= 1
        if len(self._lines[bulk]) > 64 + 4 * self._count:
            self._lines[bulk] = deque(each for each in self._lines[bulk] if each.place)

    def first(self, *, bulk: bool) -> Pending | None:
        """Who has waited longest, of those of maps or of the others."""
        line = self._lines[bulk]
        while line and not line[0].place:
            line.popleft()
        return line[0] if line else None

    def of(self, key: Hashable) -> Iterable[Pending]:
        """Who waits for room in one queue."""
        return self._keys.get(key, {}).values()
