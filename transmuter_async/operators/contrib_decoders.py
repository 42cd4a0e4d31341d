"""Decoders of the text generation operators, over their subgraphs: what they are fed, and the caches between two steps.

A model here holds no state: what changes from step to step is a `Cache`, so that a step may be part of a program.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from transmuter_async.graph import TensorType
from transmuter_async.operators.context import Subgraph
from transmuter_async.operators.registry import xp

__all__ = ["Cache", "Call", "Decoder", "DecoderOnly", "EncoderDecoder", "Reader"]


class Cache(NamedTuple):
    """What a decoder carries from one step to the next.

    Attributes:
        past: Keys and values of each layer; they grow by the tokens of a step.
        positions: Position of the next token of each row, `(rows, 1)`; of all of them before the first step. None where
            the decoder takes none.
        mask: `(rows, tokens)` of the past and of the next step; None where the decoder takes none.
    """

    past: tuple[Any, ...]
    positions: Any = None
    mask: Any = None


@dataclass(frozen=True, slots=True)
class Call:
    """A subgraph that a search wants to be run: the attribute that holds it, its inputs, and the step's number."""

    attribute: str
    inputs: tuple[Any, ...]
    iteration: int | None = None


def _empty_cache(subgraph: Subgraph, index: int, rows: int, batch_axis: int) -> np.ndarray:
    """A cache without tokens, of the sizes that the subgraph declares."""
    declared = subgraph.inputs[index].type
    if not isinstance(declared, TensorType) or declared.shape is None:
        raise ValueError(f"the decoder's input {subgraph.inputs[index].name!r} has no declared shape")
    shape = list(declared.shape)
    shape[batch_axis], shape[batch_axis + 2] = rows, 0
    if any(not isinstance(size, int) for size in shape):
        raise ValueError(f"the decoder's input {subgraph.inputs[index].name!r} has no fixed heads and head size")
    return np.zeros([int(size) for size in shape if size is not None], declared.dtype or np.float32)


def _last(logits: Any) -> Any:
    """`(rows, vocabulary)` float32, of the last token."""
    return logits[:, -1].astype(np.float32)


def _taken(values: Sequence[Any], rows: Any, axis: int) -> tuple[Any, ...]:
    return tuple(xp(value, rows).take(value, rows, axis=axis) for value in values)


@dataclass(frozen=True, slots=True)
class DecoderOnly:
    """GPT-2's kind: tokens of all rows, positions, a mask and caches `(2, rows, heads, tokens, size)` in.

    Attributes:
        subgraph: The decoder.
        first: The name of the attribute with the decoder of the first step.
        positions: Of the prompt, `(rows, tokens)` int32.
        mask: Of the prompt, int32.
    """

    subgraph: Subgraph
    first: str
    positions: Any
    mask: Any

    def begin(self, rows: int) -> Cache:
        """Before the first step."""
        count = len(self.subgraph.inputs) - 3
        past = tuple(_empty_cache(self.subgraph, 3 + i, rows, 1) for i in range(count))
        return Cache(past, self.positions, self.mask)

    def call(self, cache: Cache, tokens: Any, sequences: Any, number: int) -> Call | None:
        """The run of a step."""
        inputs = (tokens, cache.positions, cache.mask, *cache.past)
        return Call("decoder" if number else self.first, inputs, number)

    def take(self, cache: Cache, outputs: Sequence[Any], rows: int) -> tuple[Any, Cache]:
        """What a step gave: logits `(rows, vocabulary)`, and the cache for the next."""
        logits, *past = outputs
        m = xp(cache.positions, cache.mask)
        positions = cache.positions.max(axis=1, keepdims=True) + np.int32(1)
        mask = m.concatenate([cache.mask, np.ones((rows, 1), np.int32)], axis=1)
        return _last(logits), Cache(tuple(past), positions, mask)

    def reorder(self, cache: Cache, rows: Any) -> Cache:
        """Go on with these rows: beams that were chosen."""
        (positions, mask) = _taken((cache.positions, cache.mask), rows, 0)
        return Cache(_taken(cache.past, rows, 1), positions, mask)


@dataclass(frozen=True, slots=True)
class EncoderDecoder:
    """T5's and Whisper's kind: an encoder's states, and a decoder over them.

    Attributes:
        fixed: What each step takes besides tokens and caches, in the decoder's order: mask, encoder states.
        past: Of self attention, `(rows, heads, tokens, size)`, key and value of each layer.
        cross: Of cross attention.
        logits: Of the first step, where the encoder has computed them already.
        whole: Whether the decoder takes all tokens so far at each step (its `input_ids` are declared longer than one
            token), not the last one.
    """

    fixed: tuple[Any, ...]
    past: tuple[Any, ...]
    cross: tuple[Any, ...]
    logits: Any
    whole: bool

    def begin(self, rows: int) -> Cache:
        """Before the first step."""
        return Cache(self.past)

    def call(self, cache: Cache, tokens: Any, sequences: Any, number: int) -> Call | None:
        """The run of a step; None where its logits are known."""
        if number == 0 and self.logits is not None:
            return None
        given = sequences if self.whole else tokens
        return Call("decoder", (given, *self.fixed, *cache.past, *self.cross), number)

    def take(self, cache: Cache, outputs: Sequence[Any], rows: int) -> tuple[Any, Cache]:
        """What a step gave: logits `(rows, vocabulary)`, and the cache for the next."""
        if not outputs:
            return self.logits, cache
        logits, *past = outputs
        return _last(logits), Cache(tuple(past))

    def reorder(self, cache: Cache, rows: Any) -> Cache:
        """Go on with these rows; what comes from the encoder is the same for all beams of an input."""
        return Cache(_taken(cache.past, rows, 0))


Decoder = DecoderOnly | EncoderDecoder


@dataclass(frozen=True, slots=True)
class Reader:
    """What has to be read before the first step: a prompt, or an encoder's input.

    Attributes:
        bodies: `decoder`, `encoder` and `init_decoder`, None where there is none.
        kind: `model_type`.
        pad: The padding token.
        ids: Token ids, or audio features.
        mask: Which of them count, None where nobody says.
        start: `(batch, tokens)` int32 that the decoder starts with, where an encoder reads `ids`.
        copies: Rows of the search for each row of `ids`.
    """

    bodies: dict[str, Subgraph | None]
    kind: int
    pad: int
    ids: Any
    mask: Any
    start: Any
    copies: int

    def __post_init__(self) -> None:
        encoder = self.bodies["encoder"]
        if self.kind == 0 and encoder is not None:
            raise ValueError("model_type 0 is a decoder only, but an encoder is given")
        if self.kind != 0 and encoder is None:
            raise ValueError(f"model_type {self.kind} needs an encoder")

    @property
    def prompt(self) -> Any:
        """The tokens `(batch, tokens)` that the search starts with."""
        return self.ids if self.kind == 0 else self.start

    def sequences(self) -> Any:
        """They as int32, for each row of the search."""
        return xp(self.prompt).repeat(self.prompt.astype(np.int32), self.copies, axis=0)

    def call(self) -> Call | None:
        """The run of the encoder; None where there is none."""
        encoder = self.bodies["encoder"]
        if encoder is None:
            return None
        feeds = [self.ids]
        live = self._live()
        if live is not None:
            feeds.append(live)
        feeds.append(self.start)
        if len(encoder.inputs) > len(feeds):
            names = [value.name for value in encoder.inputs]
            raise ValueError(
                f"the encoder's inputs are {names}; ids or features, a mask for ids, and the decoder's ids are known"
            )
        return Call("encoder", tuple(feeds[: len(encoder.inputs)]))

    def _live(self) -> Any:
        """The mask of an encoder's ids; where none is given only padding before the first token is masked."""
        if self.ids.dtype.kind not in "iu":
            return None
        if self.mask is not None:
            return self.mask.astype(np.int32)
        m = xp(self.ids)
        return (m.cumsum((self.ids != self.pad).astype(np.int32), axis=1, dtype=np.int32) > 0).astype(np.int32)

    def model(self, outputs: Sequence[Any]) -> Decoder:
        """The decoder, given what the encoder gave."""
        decoder = self.bodies["decoder"]
        assert decoder is not None
        return self._decoder_only(decoder) if self.kind == 0 else self._encoder_decoder(decoder, outputs)

    def _decoder_only(self, decoder: Subgraph) -> DecoderOnly:
        names = [value.name for value in decoder.inputs]
        if len(names) < 4 or len(names) != len(decoder.outputs) + 2:
            raise ValueError(
                f"the decoder's inputs are {names}; token ids, position ids, attention mask and one past for each layer "
                "are needed (a cache shared between steps is not supported)"
            )
        live = self.ids != self.pad if self.mask is None else self.mask != 0
        m = xp(live)
        mask = live.astype(np.int32) if self.mask is None else self.mask.astype(np.int32)
        count = m.cumsum(live.astype(np.int32), axis=1, dtype=np.int32)
        places = m.where(live, count - np.int32(1), np.int32(0))
        first = "decoder" if self.bodies["init_decoder"] is None else "init_decoder"
        return DecoderOnly(decoder, first, m.repeat(places, self.copies, axis=0), m.repeat(mask, self.copies, axis=0))

    def _encoder_decoder(self, decoder: Subgraph, outputs: Sequence[Any]) -> EncoderDecoder:
        live = self._live()
        layers = len(decoder.outputs) - 1  # keys and values
        logits, hidden, past, cross = None, None, (), tuple(outputs)
        if len(outputs) == 2 * layers + 2:
            first, hidden, *rest = outputs
            logits, past, cross = _last(first), tuple(rest[:layers]), tuple(rest[layers:])
        elif len(outputs) != layers:
            raise ValueError(
                f"the encoder has {len(outputs)} outputs; {layers} keys and values of cross attention are needed, "
                f"or logits, encoder states and all {2 * layers} caches"
            )
        rows, fixed, places = self.start.shape[0] * self.copies, [], []
        for index in range(1, len(decoder.inputs)):
            rank, integers = _rank(decoder, index)
            if rank == 4:
                places.append(index)
            elif integers and live is not None:
                fixed.append(live)
            elif rank == 3 and hidden is not None:
                fixed.append(hidden)
            else:
                raise ValueError(f"nothing is known for the decoder's input {decoder.inputs[index].name!r}")
        if len(places) != 2 * layers:
            raise ValueError(
                f"the decoder has {len(places)} caches as inputs and {layers} as outputs; twice as many are needed"
            )
        declared = decoder.inputs[0].type
        last_only = isinstance(declared, TensorType) and declared.shape is not None and declared.shape[1] == 1
        return EncoderDecoder(
            self._repeated(fixed),
            self._repeated(past) or tuple(_empty_cache(decoder, index, rows, 0) for index in places[:layers]),
            self._repeated(cross),
            None if logits is None else self._repeated([logits])[0],
            not last_only,
        )

    def _repeated(self, values: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(xp(value).repeat(value, self.copies, axis=0) for value in values)


def _rank(subgraph: Subgraph, index: int) -> tuple[int, bool]:
    """Declared rank of a decoder's input, and whether it holds integers."""
    declared = subgraph.inputs[index].type
    if not isinstance(declared, TensorType) or declared.shape is None or declared.dtype is None:
        raise ValueError(f"the decoder's input {subgraph.inputs[index].name!r} has no declared type and shape")
    return len(declared.shape), declared.dtype.kind in "iu"
