"""Which queue gives the next batch. A decision, and each change of a queue, costs the logarithm of the number of queues at most.

There may be thousands: without buckets, each length has one. So nothing here looks at all of them.
"""

from __future__ import annotations

import heapq

from transmuter_async.serving.queues import Queue

__all__ = ["PATIENCE", "Order"]

PATIENCE = 4
"""Batches that may go before a queue that is due; then it is its turn."""


class Ranks:
    """Queues by a number of each, the least first; of equal ones that which was made first.

    A heap, in which numbers of the past stay until they come to its top, or are too many.
    """

    __slots__ = ("_heap", "_ranks")

    def __init__(self) -> None:
        self._ranks: dict[int, tuple[int, Queue]] = {}
        self._heap: list[tuple[int, int]] = []

    def put(self, queue: Queue, rank: int) -> None:
        """Give a queue its number, a new one or the first."""
        held = self._ranks.get(queue.number)
        if held is not None and held[0] == rank:
            return
        self._ranks[queue.number] = (rank, queue)
        if len(self._heap) > 64 + 4 * len(self._ranks):
            self._heap = [(rank, number) for number, (rank, _) in self._ranks.items()]
            heapq.heapify(self._heap)
        else:
            heapq.heappush(self._heap, (rank, queue.number))

    def drop(self, queue: Queue) -> None:
        """Forget a queue."""
        self._ranks.pop(queue.number, None)

    def first(self) -> Queue | None:
        """The queue with the least number."""
        while self._heap:
            rank, number = self._heap[0]
            held = self._ranks.get(number)
            if held is not None and held[0] == rank:
                return held[1]
            heapq.heappop(self._heap)
        return None


class Order:
    """The queues that have parts to give: those that are held, while a program compiles, are not among them.

    Args:
        timeout: Nanoseconds after which a part waits no longer for others.
    """

    def __init__(self, timeout: int) -> None:
        self._timeout = timeout
        self._gone = 0
        self._horizon: int | None = None
        self._aged = Ranks()  # all of them by the time at which the oldest part came
        self._full = Ranks()  # those that would fill a batch, by the same
        self._fresh = Ranks()  # those whose oldest part came after the horizon, by the same
        self._since = Ranks()  # all of them by the batch since which they are passed over
        self._due = Ranks()  # those that are full or waited for `timeout` at the horizon, by the same

    def update(self, queue: Queue) -> None:
        """A queue has changed."""
        oldest = None if queue.held else queue.oldest()
        if oldest is None:
            for ranks in (self._aged, self._full, self._fresh, self._since, self._due):
                ranks.drop(queue)
            return
        arrived = oldest.request.arrived
        self._aged.put(queue, arrived)
        self._since.put(queue, queue.since)
        full = queue.rows >= queue.limit
        late = self._horizon is not None and arrived <= self._horizon
        if full:
            self._full.put(queue, arrived)
        else:
            self._full.drop(queue)
        if late:
            self._fresh.drop(queue)
        else:
            self._fresh.put(queue, arrived)
        if full or late:
            self._due.put(queue, queue.since)
        else:
            self._due.drop(queue)

    def add(self, queue: Queue) -> None:
        """A queue is new: no batch has gone before it. To be told by `update` when it has parts."""
        queue.since = self._gone

    def went(self, queue: Queue) -> None:
        """A batch of it has gone before all others. To be told by `update` then."""
        self._gone += 1
        queue.since = self._gone

    def hold(self, queue: Queue) -> None:
        """It gives nothing out until `release`, and what goes meanwhile does not pass it over."""
        if not queue.held:
            queue.since -= self._gone
        queue.held += 1
        self.update(queue)

    def release(self, queue: Queue) -> None:
        """One program fewer that it waits for."""
        queue.held -= 1
        if not queue.held:
            queue.since += self._gone
        self.update(queue)

    def choose(self, now: int, why: str | None) -> tuple[Queue | None, str]:
        """The queue whose turn it is, and why it is.

        Args:
            now: The time.
            why: For what reason all of them are due; None: only those that are full or have waited.
        """
        if why is None:
            self._advance(now - self._timeout)
        queue = (self._due if why is None else self._since).first()
        if queue is None or self._gone - queue.since < PATIENCE:
            queue = self._full.first() or self._aged.first()
        oldest = None if queue is None else queue.oldest()
        if queue is None or oldest is None:
            return None, ""
        if queue.rows >= queue.limit:
            return queue, "full"
        if now - oldest.request.arrived >= self._timeout:
            return queue, "timeout"
        return (None, "") if why is None else (queue, why)

    def _advance(self, horizon: int) -> None:
        self._horizon = horizon
        while (queue := self._fresh.first()) is not None:
            oldest = queue.oldest()
            assert oldest is not None
            if oldest.request.arrived > horizon:
                return
            self._fresh.drop(queue)
            self._due.put(queue, queue.since)

    def wake(self) -> int | None:
        """When the first part will have waited long enough."""
        queue = self._aged.first()
        oldest = None if queue is None else queue.oldest()
        return None if oldest is None else oldest.request.arrived + self._timeout
