"""What the scheduler keeps: the parts that wait, by bucket, and the requests and batches that they belong to.

All of it has one owner, the scheduler, and changes with each of its decisions.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field

from transmuter_async.serving.decisions import Batch, Part, Request

__all__ = ["Pending", "Queue", "Running", "Waiting"]


@dataclass(slots=True, eq=False)
class Waiting:
    """A part that waits.

    Attributes:
        part: Its rows.
        request: Of which it is a part.
        entered: Batches that had left its queue when it came.
        waiting: Off once it runs, or never will.
    """

    part: Part
    request: Request
    entered: int
    waiting: bool = True


@dataclass(slots=True, eq=False)
class Queue:
    """Parts of one bucket, by age and by turn.

    Attributes:
        key: Of the bucket.
        number: Of the queue, unique.
        limit: Rows of a full batch.
        by_age: Parts as they came.
        by_turn: A heap of `(virtual time, number, part)`. Both lists hold parts that wait no longer, until they are tidied.
        rows: That wait.
        count: Parts that wait.
        since: Batches of all queues that had gone when a batch of it went last, or when it was new: what went since has passed
            it over. While it is held: how many fewer than had gone then.
        now: Virtual time, in rows.
        turns: Up to when each caller has rows waiting, in virtual time.
        held: Batches whose program compiles.
        paused: Requests whose deadlines stand still until then.
        batches: That have left it.
        favoured: Whether the last batch started with the oldest part because of its age.
    """

    key: Hashable
    number: int
    limit: int
    by_age: deque[Waiting] = field(default_factory=deque)
    by_turn: list[tuple[int, int, Waiting]] = field(default_factory=list)
    rows: int = 0
    count: int = 0
    since: int = 0
    now: int = 0
    turns: dict[Hashable, int] = field(default_factory=dict)
    held: int = 0
    paused: list[Pending] = field(default_factory=list)
    batches: int = 0
    favoured: bool = False

    def oldest(self) -> Waiting | None:
        """The part that has waited longest; None where none waits."""
        while self.by_age and not self.by_age[0].waiting:
            self.by_age.popleft()
        return self.by_age[0] if self.by_age else None

    def next_rows(self) -> int:
        """Rows of the part whose turn it is."""
        while self.by_turn and not self.by_turn[0][2].waiting:
            heapq.heappop(self.by_turn)
        return self.by_turn[0][2].part.rows if self.by_turn else 0

    def turn(self, caller: Hashable, rows: int) -> int:
        """When a part is to go, in virtual time: one row after now, or behind all rows that its caller has waiting."""
        if caller is None:
            return self.now + 1
        turn = max(self.now, self.turns.get(caller, 0)) + 1
        self.turns[caller] = turn - 1 + rows
        if len(self.turns) > 64 + 2 * len(self.by_age):
            self.turns = {who: at for who, at in self.turns.items() if at > self.now}
        return turn


@dataclass(slots=True, eq=False)
class Pending:
    """A request that is not answered.

    Attributes:
        request: As it was sent.
        deadline: When nobody wants the answer any more; moved on by the time in which a program compiled. None: never.
        left: Rows that are not computed yet.
        pieces: Its parts; none while it waits for room.
        paused: Since when its deadline stands still; None: it does not.
        place: In the line; 0 while it is in none.
        batches: That rows of it are, or were, in.
    """

    request: Request
    deadline: int | None
    left: int
    pieces: list[Waiting] = field(default_factory=list)
    paused: int | None = None
    place: int = 0
    batches: list[int] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Running:
    """A batch that is not finished.

    Attributes:
        batch: What was decided.
        live: Requests in it that somebody still waits for.
        began: When.
        held: Whether it gave its slot back until its program is compiled.
        compiling: Whether its program compiles, so that deadlines stand still.
    """

    batch: Batch
    live: set[int]
    began: int
    held: bool = False
    compiling: bool = False
