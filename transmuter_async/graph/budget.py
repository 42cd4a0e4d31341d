"""How much a model may ask for. A model is data from strangers: sizes are checked before anything is allocated."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Budget"]


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits that `read_model` holds a file to. A file over one of them is an `InvalidModel` that names it.

    Attributes:
        nodes: Nodes of the whole model after functions are expanded, subgraphs included.
        nesting: Depth of subgraphs and function bodies inside each other.
        rank: Dimensions of one tensor (numpy holds at most 64).
        elements: Elements of one tensor that is stored whole. Its bytes must be in the file, so this is a second line.
        sparse_elements: Elements that one sparse tensor has when it is written out; its file may be tiny.
        rest_bytes: Bytes of the file without its large tensors, which protobuf parses in one go.
        strings: Elements of one string tensor.
    """

    nodes: int = 250_000
    nesting: int = 48
    rank: int = 32
    elements: int = 1 << 36
    sparse_elements: int = 1 << 28
    rest_bytes: int = 1 << 30
    strings: int = 1 << 24
