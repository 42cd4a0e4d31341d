"""Factors and offsets of channels put into the weights of the convolution before them.

    Conv(W, b) -> BatchNormalization -> Mul -> Add    becomes    Conv(W * factor, b * factor + offset)

Only where nothing else sees what lies between, where all of it is known, and where a float of the weights' dtype holds
every result. The new weights are computed in float64 and rounded once. float16 and bfloat16 weights stay: rounding them
anew loses as much as the rounding of the convolution's result that it would save.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from transmuter_async.compiler.common import let_go
from transmuter_async.graph import Graph, Node, freeze, lasting_empty

__all__ = ["merge_scales", "merged"]

MARK = "@scaled"
_BLOCK = 1 << 20  # elements that are float64 at once
_Step = tuple[np.ndarray | float, np.ndarray | float]  # a factor and an offset, for each channel or for all


def merged(graph: Graph) -> tuple[str, ...]:
    """Names of the convolutions, bodies included, that `merge_scales` gave other weights."""
    return tuple(
        node.name
        for node in graph.walk()
        if _is_convolution(node) and any(name.endswith(MARK) for name in node.inputs[1:])
    )


def merge_scales(graph: Graph, held: Sequence[Mapping[str, np.ndarray]] = ()) -> Graph:
    """The graph, bodies included, without what only scales and shifts the channels of a convolution.

    Conv and ConvTranspose, followed by BatchNormalization in inference, or by Add, Sub, Mul and Div with constants that are
    the same for all elements of a channel. Replaceable initializers and weights with another reader stay as they are; the
    new weights take the old ones' place.

    Args:
        graph: With known initializers where they matter.
        held: What holds its initializers and nobody needs. The old weights are taken out of it one by one, so that there is
            never more than one of them beside the new ones.

    Source: ai.onnx BatchNormalization 1, 6, 7, 9, 14, 15; Add, Sub, Mul, Div 7 and above.
    """
    names = {name for node in graph.walk() for name in (*node.inputs, *node.outputs)} | graph.initializers.keys()
    return _merged(graph, {}, names, (graph.initializers, *held) if held else held)


def _merged(
    graph: Graph, around: Mapping[str, np.ndarray], taken: set[str], held: Sequence[Mapping[str, np.ndarray]] = ()
) -> Graph:
    own = {name: array for name, array in graph.initializers.items() if name not in graph.overridable}
    known = {**around, **own}
    nodes: list[Node] = []
    for node in graph.nodes:
        bodies = {
            name: _merged(value, known, taken) for name, value in node.attributes.items() if isinstance(value, Graph)
        }
        changed = any(body is not node.attributes[name] for name, body in bodies.items())
        nodes.append(replace(node, attributes={**node.attributes, **bodies}) if changed else node)
    uses = Counter(value.name for value in graph.outputs)
    reader: dict[str, int] = {}
    for index, node in enumerate(nodes):
        uses.update(node.inputs)
        reader.update(dict.fromkeys(node.inputs, index))
        for body in node.subgraphs():
            uses.update(body.outer_names())
    initializers = dict(graph.initializers)
    gone: set[int] = set()
    for index, node in enumerate(nodes):
        weights = own.get(node.inputs[1]) if _is_convolution(node) and len(node.inputs) > 1 else None
        if weights is None or uses[node.inputs[1]] != 1:
            continue
        found = _Convolution.of(node, weights, known)
        if found is None:
            continue
        steps = []
        name = node.outputs[0]
        while uses[name] == 1 and name in reader and found.take(nodes[reader[name]], name, known):
            steps.append(reader[name])
            name = nodes[steps[-1]].outputs[0]
        made = found.made() if steps else None
        if made is None:
            continue
        inputs = [*node.inputs[:2], ""]
        for place, array in zip((1, 2), made, strict=True):
            if array is not None:
                inputs[place] = _unused(inputs[place] or node.outputs[0], taken)
                initializers[inputs[place]] = array
        if made[0] is not None:
            let_go(node.inputs[1], weights, (initializers, known, own, *held))
        gone.update(steps)
        nodes[index] = replace(node, inputs=tuple(inputs if inputs[2] else inputs[:2]), outputs=(name,))
    if not gone:
        return (
            graph
            if all(new is old for new, old in zip(nodes, graph.nodes, strict=True))
            else replace(graph, nodes=tuple(nodes))
        )
    return replace(
        graph, nodes=tuple(node for index, node in enumerate(nodes) if index not in gone), initializers=initializers
    )


def _unused(name: str, taken: set[str]) -> str:
    while (name := name + MARK) in taken:
        pass
    taken.add(name)
    return name


def _is_convolution(node: Node) -> bool:
    return node.domain == "" and node.op_type in ("Conv", "ConvTranspose")


@dataclass(slots=True)
class _Convolution:
    """A convolution, and by what each of its output channels is to be multiplied and moved: (M,) float64."""

    weights: np.ndarray
    bias: np.ndarray | None
    group: int
    transposed: bool
    factor: np.ndarray
    offset: np.ndarray

    @classmethod
    def of(cls, node: Node, weights: np.ndarray, known: Mapping[str, np.ndarray]) -> _Convolution | None:
        group = node.attributes.get("group", 1)
        if (
            weights.dtype not in (np.float32, np.float64)
            or weights.ndim < 3
            or not weights.size
            or len(node.outputs) != 1
        ):
            return None
        if not isinstance(group, int) or group < 1 or weights.shape[0] % group:
            return None
        transposed = node.op_type == "ConvTranspose"
        channels = weights.shape[1] * group if transposed else weights.shape[0]
        bias = None
        if len(node.inputs) > 2 and node.inputs[2]:
            bias = known.get(node.inputs[2])
            if bias is None or bias.shape != (channels,) or bias.dtype != weights.dtype:
                return None
        return cls(weights, bias, group, transposed, np.ones(channels), np.zeros(channels))

    def take(self, node: Node, name: str, known: Mapping[str, np.ndarray]) -> bool:
        """Add what a node does to the result `name`; False where it is none of those meant, not known, or no number."""
        if node.domain or len(node.outputs) != 1 or node.inputs.count(name) != 1:
            return False
        if node.op_type == "BatchNormalization":
            step: _Step | None = self._normalization(node, known) if node.inputs[0] == name else None
        else:
            step = self._arithmetic(node, name, known)
        if step is None:
            return False
        with np.errstate(all="ignore"):
            factor, offset = self.factor * step[0], self.offset * step[0] + step[1]
        if not (np.isfinite(factor).all() and np.isfinite(offset).all()):
            return False
        self.factor, self.offset = factor, offset
        return True

    def _normalization(self, node: Node, known: Mapping[str, np.ndarray]) -> _Step | None:
        training = not node.attributes.get("is_test", 0) if node.opset < 7 else node.attributes.get("training_mode", 0)
        values = [known.get(each) for each in node.inputs[1:]]
        if training or len(values) != 4 or node.attributes.get("spatial", 1) != 1:
            return None
        wide = [value.astype(np.float64) for value in values if value is not None and value.shape == self.factor.shape]
        epsilon = node.attributes.get("epsilon", 1e-5)
        if len(wide) != 4 or not isinstance(epsilon, (int, float)):
            return None
        scale, bias, mean, variance = wide
        with np.errstate(all="ignore"):
            factor = scale / np.sqrt(variance + epsilon)
            return factor, bias - mean * factor

    def _arithmetic(self, node: Node, name: str, known: Mapping[str, np.ndarray]) -> _Step | None:
        if node.op_type not in ("Add", "Sub", "Mul", "Div") or node.opset < 7 or len(node.inputs) != 2:
            return None
        first = node.inputs[0] == name
        other = known.get(node.inputs[first])
        if other is None or other.dtype != self.weights.dtype or other.ndim > self.weights.ndim:
            return None
        whole = (1,) * (self.weights.ndim - other.ndim) + other.shape
        if whole[1] not in (1, len(self.factor)) or any(size != 1 for size in (whole[0], *whole[2:])):
            return None
        constant = other.reshape(-1).astype(np.float64)
        with np.errstate(all="ignore"):
            match node.op_type, first:
                case "Add", _:
                    return 1.0, constant
                case "Mul", _:
                    return constant, 0.0
                case "Sub", True:
                    return 1.0, -constant
                case "Sub", False:
                    return -1.0, constant
                case "Div", True:
                    return 1 / constant, 0.0
        return None

    def made(self) -> tuple[np.ndarray | None, np.ndarray | None] | None:
        """The new weights, None for the old ones, and the new bias; None where a result is not finite."""
        dtype = self.weights.dtype
        with np.errstate(all="ignore"):
            moved = self.offset if self.bias is None else self.bias.astype(np.float64) * self.factor + self.offset
            bias = lasting_empty(moved.size, dtype)
            bias[...] = moved
            scaled = None if (self.factor == 1).all() else self._scaled()
            if not np.isfinite(bias).all() or (scaled is not None and not np.isfinite(scaled).all()):
                return None
        return scaled, freeze(bias)

    def _scaled(self) -> np.ndarray:
        """The weights by their factors, where the layout "filters last" finds them: programs then take this very memory."""
        weights, factor = self.weights, self.factor
        kernel, rank = weights.shape[2:], weights.ndim - 2
        if self.transposed:
            rows = np.arange(weights.shape[0]) // (weights.shape[0] // self.group)
            factor = factor.reshape(self.group, -1)[rows]
        factor = factor.reshape(weights.shape[0], -1, *(1,) * rank)
        block = lasting_empty(weights.size, weights.dtype)
        if rank <= 2:
            scaled = np.moveaxis(block.reshape(*kernel, weights.shape[1], weights.shape[0]), (-1, -2), (0, 1))
        else:
            scaled = block.reshape(weights.shape)
        step = max(1, _BLOCK // math.prod(weights.shape[1:]))
        for start in range(0, weights.shape[0], step):
            part = slice(start, start + step)
            scaled[part] = weights[part].astype(np.float64) * factor[part]
        return freeze(scaled)
