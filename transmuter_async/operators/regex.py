r"""Matches of regular expressions in the syntax of RE2, in time linear in the text.

Python's `re` backtracks: a pattern and a text from strangers can keep it busy for years, and it knows things that RE2
does not have. So the pattern becomes a non-deterministic automaton whose state sets are remembered as they come up.

Syntax: https://github.com/google/re2/wiki/Syntax. Not here, with an error: scripts (`\p{Greek}`), single bytes (`\C`).
"""

from __future__ import annotations

import functools
import sys
import unicodedata
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["full_matcher", "longest_matcher"]

MAX_REPEAT = 1000
MAX_DEPTH = 200
MAX_STATES = 20_000
MAX_REMEMBERED = 10_000

_TOP = sys.maxunicode
Ranges = tuple[tuple[int, int], ...]

_DIGITS: Ranges = ((48, 57),)
_WORD: Ranges = ((48, 57), (65, 90), (95, 95), (97, 122))
_SPACE: Ranges = ((9, 10), (12, 13), (32, 32))
_POSIX: dict[str, Ranges] = {
    "alnum": ((48, 57), (65, 90), (97, 122)),
    "alpha": ((65, 90), (97, 122)),
    "ascii": ((0, 127),),
    "blank": ((9, 9), (32, 32)),
    "cntrl": ((0, 31), (127, 127)),
    "digit": _DIGITS,
    "graph": ((33, 126),),
    "lower": ((97, 122),),
    "print": ((32, 126),),
    "punct": ((33, 47), (58, 64), (91, 96), (123, 126)),
    "space": ((9, 13), (32, 32)),
    "upper": ((65, 90),),
    "word": _WORD,
    "xdigit": ((48, 57), (65, 70), (97, 102)),
}
_CONTROLS = {"a": 7, "f": 12, "t": 9, "n": 10, "r": 13, "v": 11}


def _union(ranges: Sequence[tuple[int, int]]) -> Ranges:
    merged: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(merged[-1][1], high))
        else:
            merged.append((low, high))
    return tuple(merged)


def _complement(ranges: Ranges) -> Ranges:
    out, start = [], 0
    for low, high in _union(ranges):
        if low > start:
            out.append((start, low - 1))
        start = high + 1
    if start <= _TOP:
        out.append((start, _TOP))
    return tuple(out)


@functools.lru_cache(maxsize=64)
def _category(name: str) -> Ranges:
    """Code points whose general category is, or starts with, `name`."""
    found: list[tuple[int, int]] = []
    for code in range(_TOP + 1):
        if unicodedata.category(chr(code)).startswith(name):
            if found and found[-1][1] == code - 1:
                found[-1] = (found[-1][0], code)
            else:
                found.append((code, code))
    return tuple(found)


@functools.lru_cache(maxsize=4096)
def _orbit(code: int) -> frozenset[int]:
    """The code points that differ from one only in case."""
    found, pending = {code}, [code]
    while pending:
        char = chr(pending.pop())
        for other in (char.lower(), char.upper(), char.title()):
            if len(other) == 1 and ord(other) not in found:
                found.add(ord(other))
                pending.append(ord(other))
    return frozenset(found)


class _Set:
    """A set of code points."""

    __slots__ = ("fold", "highs", "lows", "negated")

    def __init__(self, ranges: Ranges, *, negated: bool = False, fold: bool = False) -> None:
        if fold:
            few = [
                other for low, high in ranges if high - low < 512 for c in range(low, high + 1) for other in _orbit(c)
            ]
            ranges = (*ranges, *[(code, code) for code in few])
        ranges = _union(ranges)
        self.lows = [low for low, _ in ranges]
        self.highs = [high for _, high in ranges]
        self.negated = negated
        self.fold = fold

    def __contains__(self, code: int) -> bool:
        codes = _orbit(code) if self.fold else (code,)
        return any(self._has(c) for c in codes) != self.negated

    def _has(self, code: int) -> bool:
        index = bisect_right(self.lows, code) - 1
        return index >= 0 and code <= self.highs[index]


# A parsed pattern: ("set", _Set) | ("assert", kind) | ("concat", nodes) | ("either", nodes) | ("repeat", node, low, high)
_Node = tuple[Any, ...]


class _Parser:
    """Recursive descent over one pattern."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.at = 0
        self.depth = 0
        self.fold = self.lines = self.dot_all = False

    def fail(self, what: str) -> ValueError:
        return ValueError(f"the pattern {self.pattern!r} is no RE2 expression: {what} at character {self.at}")

    def peek(self, count: int = 1) -> str:
        return self.pattern[self.at : self.at + count]

    def take(self, text: str) -> bool:
        if self.pattern.startswith(text, self.at):
            self.at += len(text)
            return True
        return False

    def next(self) -> str:
        if self.at >= len(self.pattern):
            raise self.fail("it ends too early")
        self.at += 1
        return self.pattern[self.at - 1]

    def parse(self) -> _Node:
        node = self.either()
        if self.at < len(self.pattern):
            raise self.fail("a closing parenthesis without an opening one")
        return node

    def either(self) -> _Node:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise self.fail(f"groups nest deeper than {MAX_DEPTH}")
        branches = [self.concat()]
        while self.take("|"):
            branches.append(self.concat())
        self.depth -= 1
        return branches[0] if len(branches) == 1 else ("either", tuple(branches))

    def concat(self) -> _Node:
        parts: list[_Node] = []
        while self.at < len(self.pattern) and self.peek() not in "|)":
            if self.take("\\Q"):
                end = self.pattern.find("\\E", self.at)
                stop = len(self.pattern) if end < 0 else end
                parts += [self.literal(ord(char)) for char in self.pattern[self.at : stop]]
                self.at = stop if end < 0 else end + 2
                if not parts:
                    continue
                parts[-1] = self.repeated(parts[-1])
                continue
            atom = self.atom()
            if atom is not None:
                parts.append(self.repeated(atom))
        return parts[0] if len(parts) == 1 else ("concat", tuple(parts))

    def repeated(self, atom: _Node) -> _Node:
        bounds = self.bounds()
        if bounds is None:
            return atom
        self.take("?")  # lazy or greedy: the same full matches
        if (self.peek() and self.peek() in "*+?") or self.counted() is not None:
            raise self.fail("a repetition of a repetition")
        return ("repeat", atom, *bounds)

    def bounds(self) -> tuple[int, int | None] | None:
        for sign, found in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self.take(sign):
                return found
        counted = self.counted()
        if counted is None:
            return None
        low, high, self.at = counted
        if max(low, high or 0) > MAX_REPEAT or (high is not None and high < low):
            raise self.fail(f"a repetition of {low} to {high}, not within 0 to {MAX_REPEAT}")
        return low, high

    def counted(self) -> tuple[int, int | None, int] | None:
        """`{n}`, `{n,}` or `{n,m}` and where it ends; anything else after a brace is literal text."""
        end = self.pattern.find("}", self.at)
        if self.peek() != "{" or end < 0:
            return None
        low, comma, high = self.pattern[self.at + 1 : end].partition(",")
        if not _is_number(low) or (high and not _is_number(high)):
            return None
        return int(low), (int(high) if high else None) if comma else int(low), end + 1

    def literal(self, code: int) -> _Node:
        return ("set", _Set(((code, code),), fold=self.fold))

    def atom(self) -> _Node | None:
        char = self.next()
        if char in "*+?":
            self.at -= 1
            raise self.fail("a repetition of nothing")
        if char == "(":
            return self.group()
        if char == "[":
            return ("set", self.bracket())
        if char == ".":
            return ("set", _Set(((0, _TOP),) if self.dot_all else ((0, 9), (11, _TOP))))
        if char == "^":
            return ("assert", "line start" if self.lines else "start")
        if char == "$":
            return ("assert", "line end" if self.lines else "end")
        if char != "\\":
            return self.literal(ord(char))
        following = self.peek()
        simple = {"A": "start", "z": "end", "b": "boundary", "B": "no boundary"}
        if following and following in simple:
            self.at += 1
            return ("assert", simple[following])
        known = self.perl_class()
        return ("set", _Set(known, fold=self.fold)) if known is not None else self.literal(self.escape())

    def group(self) -> _Node | None:
        flags = (self.fold, self.lines, self.dot_all)
        if self.take("?"):
            if self.take("P<") or self.take("<"):
                name, closed = self.pattern[self.at :].partition(">")[::2][0], ">" in self.pattern[self.at :]
                if not closed or not name or not all(c.isalnum() or c == "_" for c in name):
                    raise self.fail("a group name that is none")
                self.at += len(name) + 1
            elif not self.flags():
                return None  # "(?i)": for the rest of the group around it
        node = self.either()
        if not self.take(")"):
            raise self.fail("a group without its end")
        self.fold, self.lines, self.dot_all = flags
        return node

    def flags(self) -> bool:
        """Read "i-s:" or "i)"; whether a group follows."""
        value = True
        seen = False
        while True:
            char = self.next()
            if char == ":":
                return True
            if char == ")" and seen:
                return False
            if char == "-" and value:
                value, seen = False, False
                continue
            if char == "i":
                self.fold = value
            elif char == "m":
                self.lines = value
            elif char == "s":
                self.dot_all = value
            elif char != "U":  # lazy and greedy change places: the same full matches
                raise self.fail("an unknown group flag")
            seen = True

    def perl_class(self) -> Ranges | None:
        r"""After a backslash: \d \s \w \p and their negations, or None and nothing is read."""
        char = self.peek()
        classes = {"d": _DIGITS, "s": _SPACE, "w": _WORD}
        if char and char.lower() in classes:
            self.at += 1
            found = classes[char.lower()]
            return found if char.islower() else _complement(found)
        if not char or char not in "pP":
            return None
        self.at += 1
        name = self.next()
        if name == "{":
            name, closed, _ = self.pattern[self.at :].partition("}")
            if not closed:
                raise self.fail("a character property without its end")
            self.at += len(name) + 1
        negated = (char == "P") != name.startswith("^")
        name = name.removeprefix("^")
        if name == "Any":
            found = ((0, _TOP),)
        elif len(name) in (1, 2) and name[:1] in "CLMNPSZ" and _category(name):
            found = _category(name)
        else:
            raise self.fail(f"the character property {name!r}, which is no general category,")
        return _complement(found) if negated else found

    def escape(self) -> int:
        """The code point of an escape; the backslash is read."""
        char = self.next()
        if char in _CONTROLS:
            return _CONTROLS[char]
        if char == "x":
            digits = self.pattern[self.at :].partition("}")[0][1:] if self.peek() == "{" else self.peek(2)
            self.at += len(digits) + (2 if self.peek() == "{" else 0)
            if not digits or any(d not in "0123456789abcdefABCDEF" for d in digits) or int(digits, 16) > _TOP:
                raise self.fail("a hexadecimal escape that is none")
            return int(digits, 16)
        if char in "01234567" and (char == "0" or (self.peek() and self.peek() in "01234567")):
            digits = char
            while len(digits) < 3 and self.peek() and self.peek() in "01234567":
                digits += self.next()
            return int(digits, 8)
        if ord(char) < 128 and not char.isalnum():
            return ord(char)
        raise self.fail(f"the escape \\{char}, which RE2 does not have,")

    def bracket(self) -> _Set:
        negated = self.take("^")
        ranges: list[tuple[int, int]] = []
        first = True
        while first or self.peek() != "]":
            first = False
            if self.take("[:"):
                name, closed, _ = self.pattern[self.at :].partition(":]")
                if not closed or name.removeprefix("^") not in _POSIX:
                    raise self.fail("an unknown character class")
                self.at += len(name) + 2
                found = _POSIX[name.removeprefix("^")]
                ranges += _complement(found) if name.startswith("^") else found
                continue
            low = self.member()
            if isinstance(low, tuple):
                ranges += low
                continue
            high = low
            if self.peek() == "-" and self.peek(2) not in ("-]", "-"):
                self.at += 1
                end = self.member()
                if isinstance(end, tuple) or end < low:
                    raise self.fail("a range that has no end, or runs backwards,")
                high = end
            ranges.append((low, high))
        self.at += 1
        # A negated class still matches a line feed, as in RE2.
        return _Set(tuple(ranges), negated=negated, fold=self.fold)

    def member(self) -> int | Ranges:
        char = self.next()
        if char != "\\":
            return ord(char)
        known = self.perl_class()
        return self.escape() if known is None else known


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 6


class _Automaton:
    """States by number: ("set", set, next) | ("split", states) | ("assert", kind, next) | ("match",)."""

    def __init__(self, node: _Node) -> None:
        self.states: list[_Node] = [("match",)]
        self.asserts = False
        self.start = self.build(node, 0)
        self.remembered: dict[tuple[frozenset[int], frozenset[str], str], frozenset[int]] = {}

    def add(self, state: _Node) -> int:
        if len(self.states) >= MAX_STATES:
            raise ValueError(f"the pattern needs more than {MAX_STATES} states; use smaller repetitions")
        self.states.append(state)
        return len(self.states) - 1

    def build(self, node: _Node, after: int) -> int:
        """The state that matches `node` and goes on with `after`."""
        kind = node[0]
        if kind == "set":
            return self.add(("set", node[1], after))
        if kind == "assert":
            self.asserts = True
            return self.add(("assert", node[1], after))
        if kind == "concat":
            for part in reversed(node[1]):
                after = self.build(part, after)
            return after
        if kind == "either":
            return self.add(("split", tuple(self.build(part, after) for part in node[1])))
        _, inner, low, high = node
        if high is None:
            loop = self.add(("split", ()))
            self.states[loop] = ("split", (self.build(inner, loop), after))
            after = loop
        else:
            for _ in range(high - low):
                after = self.add(("split", (self.build(inner, after), after)))
        for _ in range(low):
            after = self.build(inner, after)
        return after

    def reach(self, states: frozenset[int], holds: frozenset[str]) -> set[int]:
        """What the states lead to without reading, where the assertions `holds` are true."""
        seen, pending = set(states), list(states)
        while pending:
            state = self.states[pending.pop()]
            onward: tuple[int, ...] = ()
            if state[0] == "split":
                onward = state[1]
            elif state[0] == "assert" and state[1] in holds:
                onward = (state[2],)
            for target in onward:
                if target not in seen:
                    seen.add(target)
                    pending.append(target)
        return seen

    def matches(self, text: str) -> bool:
        """Whether the whole text matches."""
        current = frozenset((self.start,))
        for index, char in enumerate(text):
            current = self.step(current, self.holding(text, index), char)
            if not current:
                return False
        return 0 in self.reach(current, self.holding(text, len(text)))

    def longest(self, text: str, start: int) -> int:
        """Where the longest match that begins at `start` ends, -1 where none does."""
        current, end = frozenset((self.start,)), -1
        for index in range(start, len(text) + 1):
            holds = self.holding(text, index)
            if 0 in self.reach(current, holds):
                end = index
            if index == len(text):
                break
            current = self.step(current, holds, text[index])
            if not current:
                break
        return end

    def step(self, current: frozenset[int], holds: frozenset[str], char: str) -> frozenset[int]:
        """The states after `char`."""
        key = (current, holds, char)
        found = self.remembered.get(key)
        if found is None:
            code = ord(char)
            reached = (self.states[number] for number in self.reach(current, holds))
            found = frozenset(state[2] for state in reached if state[0] == "set" and code in state[1])
            if len(self.remembered) >= MAX_REMEMBERED:
                self.remembered.clear()
            self.remembered[key] = found
        return found

    def holding(self, text: str, index: int) -> frozenset[str]:
        """The assertions that hold before `text[index]`."""
        if not self.asserts:
            return frozenset()
        before = text[index - 1] if index else ""
        after = text[index] if index < len(text) else ""
        edge = _is_word(before) != _is_word(after)
        found = {"boundary" if edge else "no boundary"}
        if not before:
            found |= {"start", "line start"}
        if not after:
            found |= {"end", "line end"}
        if before == "\n":
            found.add("line start")
        if after == "\n":
            found.add("line end")
        return frozenset(found)


def _is_word(char: str) -> bool:
    return char.isascii() and (char.isalnum() or char == "_")


@functools.lru_cache(maxsize=64)
def full_matcher(pattern: str) -> Callable[[str], bool]:
    """A function that tells whether a whole text matches `pattern`.

    Raises:
        ValueError: The pattern is no RE2 expression, or over the budget.
    """
    return _Automaton(_Parser(pattern).parse()).matches


@functools.lru_cache(maxsize=64)
def longest_matcher(pattern: str) -> Callable[[str, int], int]:
    """A function of a text and a place: where the longest match that begins there ends, -1 where none does.

    Raises:
        ValueError: The pattern is no RE2 expression, or over the budget.
    """
    return _Automaton(_Parser(pattern).parse()).longest
