"""What text generation does with a decoder's logits: rules for the next token, the most likely one, draws, and beams.

Everything here is one step: arrays of fixed shapes in, arrays out, in numpy or in a program.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from jax import lax

from transmuter_async.operators.context import Context
from transmuter_async.operators.contrib_tokens import n_gram_repeat_block_1
from transmuter_async.operators.numeric import first_highest
from transmuter_async.operators.random import uniform
from transmuter_async.operators.registry import is_host, xp
from transmuter_async.operators.threefry import fold_in

__all__ = ["Beams", "Choice", "Draws", "Greedy", "Rules"]

LOWEST = np.finfo(np.float32).min


@dataclass(frozen=True, slots=True)
class Rules:
    """What is allowed as the next token.

    Attributes:
        eos: The token that ends an answer.
        pad: The token behind it.
        ngram: Size of the n-grams that may not occur twice; 0 for none.
        minimum: Tokens, the prompt's included, before which an answer may not end, int32 scalar.
        repetition: Factor against tokens that the row holds already, float32 scalar.
        vocab_mask: `(vocabulary,)`, 0 for what is never allowed.
        prefix_mask: `(batch, vocabulary)`, 0 for what is not allowed at the first step.
        temperature: Divides the logits, float32 scalar; 0 and 1 leave them.
        presence: `(batch, vocabulary)` float32, taken off the logits.
    """

    eos: int
    pad: int
    ngram: int
    minimum: Any
    repetition: Any
    vocab_mask: Any = None
    prefix_mask: Any = None
    temperature: Any = None
    presence: Any = None

    def apply(self, scores: Any, sequences: Any, number: int, context: Context) -> Any:
        """`scores` `(rows, vocabulary)` changed by the rules, in onnxruntime's order, for the next token of each row."""
        m = xp(scores, sequences)
        count, vocabulary = scores.shape
        tokens = np.arange(vocabulary)
        if not (is_host(self.repetition) and self.repetition == 1):
            rows = np.arange(count)[:, None]
            places = m.clip(sequences, 0, vocabulary - 1)
            if m is np:
                seen: Any = np.zeros(scores.shape, bool)
                seen[rows, places] = True
            else:
                seen = m.zeros(scores.shape, bool).at[rows, places].set(True, mode="promise_in_bounds")
            scores = m.where(seen, m.where(scores < 0, scores * self.repetition, scores / self.repetition), scores)
        if self.ngram > 0:
            scores = m.maximum(n_gram_repeat_block_1(sequences, scores, ngram_size=self.ngram, context=context), LOWEST)
        if self.vocab_mask is not None:
            scores = xp(scores, self.vocab_mask).where(self.vocab_mask.reshape(1, -1) == 0, LOWEST, scores)
        if self.prefix_mask is not None and number == 0:
            m = xp(scores, self.prefix_mask)
            mask = self.prefix_mask.reshape(-1, vocabulary)
            mask = m.repeat(mask, count // max(1, mask.shape[0]), axis=0)
            scores = m.where(mask == 0, LOWEST, scores)
        early = self.minimum > sequences.shape[1]
        if not is_host(early) or early:
            scores = xp(scores, early).where((tokens == self.eos) & early, LOWEST, scores)
        if self.temperature is not None:
            scores = scores / xp(self.temperature).where(self.temperature == 0, np.float32(1), self.temperature)
        if self.presence is not None:
            scores = scores - self.presence
        return scores


class Choice(NamedTuple):
    """What a step chose.

    Attributes:
        tokens: `(rows,)` int32.
        rows: `(rows,)` which row each of them continues; None where each its own.
        state: What the chooser carries on.
        done: `(batch,)` bool: nothing can change any more.
        shown: Scores that the operator gives out, None where it does not.
    """

    tokens: Any
    rows: Any
    state: Any
    done: Any
    shown: Any = None


# --- one answer a row -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Greedy:
    """The most likely token.

    Each chooser has `begin`, what is carried to the first step, and `choose`. That takes what was carried, the decoder's logits
    `(rows, vocabulary)`, the sequences so far `(rows, tokens)`, which inputs are done, the step's number and the node's context.
    """

    rules: Rules

    def begin(self, rows: int) -> Any:
        """What is carried to the first step."""
        return ()

    def choose(self, state: Any, logits: Any, sequences: Any, done: Any, number: int, context: Context) -> Choice:
        """The next token of each row."""
        scores = self.rules.apply(logits, sequences, number, context)
        return _one_each(first_highest(scores, 1), done, self.rules, ())


def _one_each(tokens: Any, done: Any, rules: Rules, state: Any) -> Choice:
    """A row ends with its end token, which itself becomes padding."""
    m = xp(tokens, done)
    done = done | (tokens == rules.eos)
    return Choice(m.where(done, np.int32(rules.pad), tokens.astype(np.int32)), None, state, done)


@dataclass(frozen=True, slots=True)
class Draws:
    """A token drawn from the smallest set of likely ones whose probabilities add up to `top_p`; carries the logits.

    Attributes:
        key: Of the node, (2,) uint32; a step folds its number in.
        filler: The logit of what is outside of the set.
        keep: Tokens that are in it at least.
        custom: Whether the set is found from the most likely token on; else from the least likely one.
    """

    rules: Rules
    key: Any
    top_p: float
    filler: np.float32
    keep: int
    custom: bool

    def begin(self, rows: int) -> Any:
        """What is carried to the first step."""
        return np.zeros((rows, 0), np.float32)

    def choose(self, state: Any, logits: Any, sequences: Any, done: Any, number: int, context: Context) -> Choice:
        """The next token of each row."""
        scores = self._filtered(self.rules.apply(logits, sequences, number, context))
        draws = uniform(fold_in(self.key, number), (scores.shape[0],))
        m = xp(scores, draws)
        total = _running_sum(scores)
        tokens = m.minimum((total <= draws[:, None]).sum(1), scores.shape[1] - 1)
        return _one_each(tokens, done, self.rules, scores)

    def _filtered(self, scores: Any) -> Any:
        if self.top_p <= 0 or self.top_p >= 1:
            return scores
        m = xp(scores)
        order = _ascending(-scores if self.custom else scores)
        ranked = m.take_along_axis(scores, order, axis=1)
        total, place = _running_sum(ranked), np.arange(scores.shape[1])
        if self.custom:  # from the most likely on: what comes after the sum is reached
            before = m.concatenate([m.zeros((total.shape[0], 1), total.dtype), total[:, :-1]], axis=1)
            dropped = (before > np.float32(self.top_p)) & (place >= self.keep)
        else:
            dropped = (total <= np.float32(1 - self.top_p)) & (place < scores.shape[1] - max(1, self.keep))
        return m.take_along_axis(m.where(dropped, self.filler, ranked), _ascending(order), axis=1)


def _ascending(values: Any) -> Any:
    """The order in which the rows rise; of equal ones the first comes first."""
    if is_host(values):
        return np.argsort(values, axis=1, kind="stable")
    return xp(values).argsort(values, axis=1, stable=True)


def _running_sum(logits: Any) -> Any:
    """Running sums of the probabilities, float32."""
    m = xp(logits)
    powers = m.exp(logits - logits.max(1, keepdims=True))
    return m.cumsum(powers / powers.sum(1, keepdims=True), axis=1)


# --- beams ------------------------------------------------------------------------------------------------------------


class Kept(NamedTuple):
    """The best finished answers of each input, best first.

    Attributes:
        points: `(batch, beams)` float32.
        tokens: `(batch, beams, max_length)` int32, padding behind.
        filled: `(batch, beams)` bool: whether there is one.
    """

    points: Any
    tokens: Any
    filled: Any


class _Running(NamedTuple):
    totals: Any  # (batch, beams) float32
    kept: Kept


@dataclass(frozen=True, slots=True)
class Beams:
    """The best continuations of `beams` answers at once.

    Attributes:
        beams: Answers that run at once for each input, and finished ones that are kept.
        longest: `max_length`.
        penalty: Exponent of the length that a sum of log probabilities is divided by, float32 scalar.
        early: Whether an input is done with its `beams`-th finished answer, however good a running one may become.
        shows: Whether the scores of all tokens are given out.
    """

    rules: Rules
    beams: int
    longest: int
    penalty: Any
    early: bool
    shows: bool

    def begin(self, rows: int) -> Any:
        """What is carried to the first step: all beams of an input are equal, so that only one of them counts."""
        batch = rows // self.beams
        totals = np.full((batch, self.beams), -1e9, np.float32)
        totals[:, 0] = 0
        kept = Kept(
            np.zeros((batch, self.beams), np.float32),
            np.full((batch, self.beams, self.longest), self.rules.pad, np.int32),
            np.zeros((batch, self.beams), bool),
        )
        return _Running(totals, kept)

    def choose(self, state: Any, logits: Any, sequences: Any, done: Any, number: int, context: Context) -> Choice:
        """The next token of each beam, and the beam that it continues."""
        scores = self.rules.apply(_log_softmax(logits), sequences, number, context)
        vocabulary, batch = scores.shape[1], scores.shape[0] // self.beams
        scores = scores + state.totals.reshape(-1, 1)
        values, best = _highest(scores.reshape(batch, self.beams * vocabulary), 2 * self.beams)
        m = xp(best, done)
        first = (np.arange(batch) * self.beams)[:, None]
        rows, tokens = (best // vocabulary).astype(np.int64) + first, best % vocabulary
        ended = tokens == self.rules.eos
        # An end that is not among the best does not count.
        finished = ended & (np.arange(values.shape[1]) < self.beams) & ~done[:, None]
        kept = self._merged(state.kept, values, rows, finished, sequences)
        order = _ascending(ended)[:, : self.beams]
        tokens, rows, totals, free = (m.take_along_axis(x, order, axis=1) for x in (tokens, rows, values, ~ended))
        free = free & ~done[:, None]
        shown = scores.reshape(batch, self.beams, vocabulary) if self.shows else None
        return Choice(
            m.where(free, tokens, self.rules.pad).astype(np.int32).reshape(-1),
            m.where(free, rows, first).reshape(-1),
            _Running(m.where(free, totals, np.float32(0)), kept),
            done | self._closed(kept, values[:, 0], sequences.shape[1]),
            shown,
        )

    def answers(self, state: Any, sequences: Any, done: Any) -> Kept:
        """The kept answers at the end: what still runs counts as well."""
        batch = done.shape[0]
        rows = np.arange(batch * self.beams).reshape(batch, self.beams)
        running = np.broadcast_to(~done[:, None], rows.shape) if is_host(done) else ~done[:, None] & (rows >= 0)
        return self._merged(state.kept, state.totals, rows, running, sequences)

    def _divisor(self, length: int) -> Any:
        power = xp(self.penalty).power(np.float64(length), self.penalty.astype(np.float64))
        return power.astype(np.float32)

    def _merged(self, kept: Kept, totals: Any, rows: Any, entering: Any, sequences: Any) -> Kept:
        """`kept` with those of the answers at `rows` that are `entering`; of equal ones the older comes first."""
        m = xp(totals, rows, entering, sequences)
        length = sequences.shape[1]
        tokens = m.pad(
            m.take(sequences, rows, axis=0, mode="clip"),
            ((0, 0), (0, 0), (0, self.longest - length)),
            constant_values=np.int32(self.rules.pad),
        )
        points = m.concatenate([kept.points, totals / self._divisor(length)], axis=1)
        filled = m.concatenate([kept.filled, entering], axis=1)
        merged = m.concatenate([kept.tokens, tokens], axis=1)
        # What is not there comes after the worst, and what is not a number with the worst.
        rank = m.where(filled, m.where(m.isnan(points), LOWEST, m.maximum(points, LOWEST)), np.float32(-np.inf))
        order = _ascending(-rank)[:, : self.beams]
        return Kept(
            m.take_along_axis(points, order, axis=1),
            m.take_along_axis(merged, order[:, :, None], axis=1),
            m.take_along_axis(filled, order, axis=1),
        )

    def _closed(self, kept: Kept, best: Any, length: int) -> Any:
        """Whether no running beam can still improve on what is kept."""
        m = xp(kept.filled, best)
        full = m.all(kept.filled, axis=1)
        return full if self.early else full & (kept.points[:, -1] >= best / self._divisor(length))


def _log_softmax(logits: Any) -> Any:
    m = xp(logits)
    shifted = logits - logits.max(1, keepdims=True)
    return shifted - m.log(m.exp(shifted).sum(1, keepdims=True))


def _highest(values: Any, count: int) -> tuple[Any, Any]:
    """The highest of each row and where they are, best first; of equal ones the first, what is no number last."""
    m, count = xp(values), min(count, values.shape[1])
    clean = m.where(m.isnan(values), np.float32(-np.inf), values)
    if m is np:
        order: Any = np.argsort(-clean, axis=1, kind="stable")[:, :count]
    else:
        order = lax.top_k(clean, count)[1]
    return m.take_along_axis(values, order, axis=1), order
