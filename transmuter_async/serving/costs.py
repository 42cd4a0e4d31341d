"""How long batches take, as they were seen to, and whether spare rows pay."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["Costs"]

WORTH = 0.9
"""A smaller batch has to be better by a tenth, for the rows that it leaves wait longer."""

KEPT = 1024
"""Kinds of batches of which it is remembered how long they take."""

NEWEST = 0.25
"""What the newest batch counts."""


class Costs:
    """Nanoseconds by elements of a row and rows of a program."""

    def __init__(self) -> None:
        self._took: dict[tuple[int, int], float] = {}

    def seen(self, elements: int, program: int, took: int) -> None:
        """A batch has taken so long."""
        place = (elements, program)
        if place in self._took:
            self._took[place] += NEWEST * (took - self._took[place])
            return
        if len(self._took) >= KEPT:
            self._took.clear()
        self._took[place] = float(took)

    def fewer(self, elements: int, rows: int, program: int, sizes: Sequence[int]) -> int | None:
        """The smaller batch that computes more of `rows` in the same time than one batch with spare rows; None: none does.

        Args:
            elements: Of a row.
            rows: That wait.
            program: Rows of the batch that holds all of them.
            sizes: That batches can have, ascending.
        """
        whole = self._took.get((elements, program))
        rates = {size: size / took for size in sizes if size < rows and (took := self._took.get((elements, size), 0.0))}
        if not whole or not rates:
            return None
        good = max(rates.values()) * WORTH
        return max(size for size, rate in rates.items() if rate >= good) if good > rows / whole else None
