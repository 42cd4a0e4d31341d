"""Decoders of the text generation operators, over their subgraphs: what they are fed, and the caches between two steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from transmuter_async.graph import TensorType
from transmuter_async.operators.context import Subgraph

__all__ = ["prepare"]


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


@dataclass(slots=True)
class _Decoder:
    """A decoder only: tokens of all rows in, logits of the last one out; it keeps its caches."""

    subgraph: Subgraph
    first: Subgraph
    positions: np.ndarray
    mask: np.ndarray
    caches: list[np.ndarray] = field(default_factory=list)
    started: bool = False

    def step(self, tokens: np.ndarray) -> np.ndarray:
        """`(rows, vocabulary)` for `(rows, new tokens)`."""
        if not self.started:
            positions = self.positions
            count = len(self.subgraph.inputs) - 3
            self.caches = [_empty_cache(self.subgraph, 3 + i, len(tokens), 1) for i in range(count)]
            self.positions = positions.max(axis=1, keepdims=True)
        else:
            self.positions = positions = self.positions + 1
            self.mask = np.concatenate([self.mask, np.ones((len(tokens), 1), np.int32)], axis=1)
        run = self.subgraph if self.started else self.first
        logits, *self.caches = (np.asarray(value) for value in run(tokens, positions, self.mask, *self.caches))
        self.started = True
        return logits[:, -1].astype(np.float32)

    def reorder(self, rows: np.ndarray) -> None:
        """Continue with these rows: beams that were chosen."""
        self.caches = [cache[:, rows] for cache in self.caches]
        self.positions, self.mask = self.positions[rows], self.mask[rows]


def _live(ids: np.ndarray, pad: int) -> np.ndarray:
    """The mask of a prompt that comes without one: padding before the first token is masked, and only that."""
    return (np.cumsum(ids != pad, axis=1) > 0).astype(np.int32)


def _decoder_only(
    decoder: Subgraph, init_decoder: Subgraph | None, ids: np.ndarray, mask: np.ndarray | None, pad: int, copies: int
) -> _Decoder:
    names = [value.name for value in decoder.inputs]
    if len(names) < 4 or len(names) != len(decoder.outputs) + 2:
        raise ValueError(
            f"the decoder's inputs are {names}; token ids, position ids, attention mask and one past for each layer "
            "are needed (a cache shared between steps is not supported)"
        )
    live = (ids != pad).astype(np.int32) if mask is None else mask.astype(np.int32)
    places = np.where(live != 0, np.cumsum(live != 0, axis=1) - 1, 0).astype(np.int32)
    repeated = (np.repeat(x, copies, axis=0) for x in (places, live))
    places, live = repeated
    return _Decoder(decoder, init_decoder or decoder, places, live)


@dataclass(slots=True)
class _EncoderDecoder:
    """An encoder's states and a decoder over them.

    Attributes:
        fixed: What each step takes besides tokens and caches, in the decoder's order: mask, encoder states.
        caches: Of self attention, `(rows, heads, tokens, size)`, key and value of each layer; they grow.
        cross: Of cross attention.
        logits: Of the first step, where the encoder has computed them already.
        history: All tokens so far, where the decoder takes them all at each step: its `input_ids` are declared longer than
            one token. None where it takes the last one.
    """

    subgraph: Subgraph
    fixed: list[np.ndarray]
    caches: list[np.ndarray]
    cross: list[np.ndarray]
    logits: np.ndarray | None
    history: np.ndarray | None

    def step(self, tokens: np.ndarray) -> np.ndarray:
        """`(rows, vocabulary)` for `(rows, new tokens)`."""
        if self.history is not None:
            self.history = tokens = np.concatenate([self.history, tokens], axis=1)
        if self.logits is not None:
            logits, self.logits = self.logits, None
            return logits
        feeds = (tokens, *self.fixed, *self.caches, *self.cross)
        logits, *self.caches = (np.asarray(value) for value in self.subgraph(*feeds))
        return logits[:, -1].astype(np.float32)

    def reorder(self, rows: np.ndarray) -> None:
        """Continue with these rows; what comes from the encoder is the same for all beams of an input."""
        self.caches = [cache[rows] for cache in self.caches]
        self.history = None if self.history is None else self.history[rows]


def _rank(subgraph: Subgraph, index: int) -> tuple[int, bool]:
    """Declared rank of a decoder's input, and whether it holds integers."""
    declared = subgraph.inputs[index].type
    if not isinstance(declared, TensorType) or declared.shape is None or declared.dtype is None:
        raise ValueError(f"the decoder's input {subgraph.inputs[index].name!r} has no declared type and shape")
    return len(declared.shape), declared.dtype.kind in "iu"


def _encoder_decoder(
    encoder: Subgraph,
    decoder: Subgraph,
    inputs: np.ndarray,
    mask: np.ndarray | None,
    start: np.ndarray,
    pad: int,
    copies: int,
) -> _EncoderDecoder:
    live = None
    feeds = [inputs]
    if inputs.dtype.kind in "iu":
        live = _live(inputs, pad) if mask is None else mask.astype(np.int32)
        feeds.append(live)
    feeds.append(start)
    if len(encoder.inputs) > len(feeds):
        names = [value.name for value in encoder.inputs]
        raise ValueError(
            f"the encoder's inputs are {names}; ids or features, a mask for ids, and the decoder's ids are known"
        )
    outputs = [np.asarray(value) for value in encoder(*feeds[: len(encoder.inputs)])]
    layers = len(decoder.outputs) - 1  # keys and values
    logits, hidden, caches = None, None, []
    if len(outputs) == 2 * layers + 2:
        first, hidden, *rest = outputs
        logits, caches, cross = first[:, -1].astype(np.float32), rest[:layers], rest[layers:]
    elif len(outputs) == layers:
        cross = outputs
    else:
        raise ValueError(
            f"the encoder has {len(outputs)} outputs; {layers} keys and values of cross attention are needed, "
            f"or logits, encoder states and all {2 * layers} caches"
        )
    rows, fixed, places = len(start) * copies, [], []
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
    fixed, caches, cross = ([np.repeat(x, copies, axis=0) for x in part] for part in (fixed, caches, cross))
    caches = caches or [_empty_cache(decoder, index, rows, 0) for index in places[:layers]]
    declared = decoder.inputs[0].type
    last_only = isinstance(declared, TensorType) and declared.shape is not None and declared.shape[1] == 1
    return _EncoderDecoder(
        decoder,
        fixed,
        caches,
        cross,
        None if logits is None else np.repeat(logits, copies, axis=0),
        None if last_only else np.zeros((rows, 0), np.int32),
    )


def prepare(
    attributes: dict[str, Any], ids: np.ndarray, mask: np.ndarray | None, start: np.ndarray | None, copies: int
) -> tuple[_Decoder | _EncoderDecoder, np.ndarray]:
    """The model, and the sequences `(rows, tokens)` that it starts with."""
    kind, pad = attributes["model_type"], attributes["pad_token_id"]
    if kind == 0:
        if attributes["encoder"] is not None:
            raise ValueError("model_type 0 is a decoder only, but an encoder is given")
        model: Any = _decoder_only(attributes["decoder"], attributes["init_decoder"], ids, mask, pad, copies)
        return model, np.repeat(ids, copies, axis=0)
    if attributes["encoder"] is None:
        raise ValueError(f"model_type {kind} needs an encoder")
    if start is None:
        start = np.full((len(ids), 1), attributes["decoder_start_token_id"], np.int32)
    model = _encoder_decoder(attributes["encoder"], attributes["decoder"], ids, mask, start, pad, copies)
    return model, np.repeat(start, copies, axis=0)
