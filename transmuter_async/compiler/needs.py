"""What a node must know on the host, and what becomes of a need: a folded value, a static argument, or a break."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from transmuter_async.compiler.run import FOLD_BYTES, LIFT_BYTES, Run, has_traced, is_opaque
from transmuter_async.errors import NeedsValue
from transmuter_async.graph import Node
from transmuter_async.operators import PREPARED_INPUTS, Operator

__all__ = ["admit", "depends_on_values", "first_traced", "known_value", "needs_value"]


def admit(run: Run, node: Node, definition: Operator, values: list[Any]) -> tuple[list[Any], bool]:
    """Make a node's inputs fit for a trace.

    Args:
        run: The trace.
        node: Whose inputs.
        definition: Of its operator; says which inputs must be known.
        values: Of its inputs, known or traced.

    Returns:
        The values, with needs met and large known arrays lifted to arguments of the program, and whether the result is to be
        traced although all of them are known.

    Raises:
        NeedsValue: One must be known and is not: the segment ends before the node.
    """
    if any(map(is_opaque, values)):
        index = next(i for i, v in enumerate(values) if is_opaque(v))
        raise needs_value(run, node, index, f"the {definition.input_name(index)} of {node.op_type} {node.name!r}")
    large = any(isinstance(v, np.ndarray) and v.nbytes > FOLD_BYTES and v.dtype != object for v in values)
    traced = [has_traced(v) for v in values]
    if definition.host:
        if any(traced):
            value = node.inputs[traced.index(True)]
            raise depends_on_values(node, value, run.producers.get(value))
        return values, False
    if not any(traced) and not large and not definition.random:
        return values, False
    if any(isinstance(v, np.ndarray) and v.dtype == object for v in values) or any(isinstance(v, dict) for v in values):
        if any(traced):
            raise needs_value(run, node, traced.index(True), f"{node.op_type} of strings")
        return values, False
    admitted = list(values)
    for index, value in enumerate(values):
        name = definition.input_name(index)
        if name in definition.static:
            if traced[index]:
                admitted[index] = known_value(run, node, index, value, f"the {name} of {node.op_type} {node.name!r}")
        elif isinstance(value, np.ndarray):
            if any(traced) and (definition.domain, definition.name, name) in PREPARED_INPUTS:
                continue
            admitted[index] = run.lift(value) if value.nbytes > LIFT_BYTES else value
        elif isinstance(value, list):
            admitted[index] = [
                run.lift(v) if isinstance(v, np.ndarray) and v.nbytes > LIFT_BYTES and v.dtype != object else v
                for v in value
            ]
    forced = definition.random or (large and not any(has_traced(v) for v in admitted))
    return admitted, forced


def known_value(run: Run, node: Node, index: int, value: Any, reason: str) -> Any:
    """The value of a traced input by its shadow, which makes its ancestors static; `NeedsValue` where it has none."""
    if isinstance(value, list):
        return [known_value(run, node, index, item, reason) if has_traced(item) else item for item in value]
    if run.shadows is not None:
        entry = run.shadows.get(id(value))
        if entry is not None:
            run.statics |= entry[2]
            return entry[1]
    raise needs_value(run, node, index, reason)


def needs_value(run: Run, node: Node, index: int, reason: str) -> NeedsValue:
    """The break at a node that needs its input `index` on the host."""
    value = node.inputs[index] if index < len(node.inputs) else ""
    return _missing_value(node, value, run.producers.get(value), reason)


def _missing_value(node: Node, value: str, producer: Node | None, reason: str) -> NeedsValue:
    hint = (
        f"Pass static_inputs=[{value!r}] to compile for each of its values."
        if producer is None
        else "Export the model with fixed sizes or without the value-dependent operator."
    )
    return NeedsValue(
        node=node.name,
        operator=node.operator,
        position=node.position,
        value=value,
        producer=None if producer is None else producer.name,
        reason=reason,
        hint=hint,
    )


def depends_on_values(node: Node, value: str, producer: Node | None) -> NeedsValue:
    """The break at an operator whose output shape depends on its data, for one of its run-time inputs."""
    return _missing_value(node, value, producer, f"{node.op_type}: output shape depends on values")


def first_traced(values: Sequence[Any]) -> int:
    """The index of the first value that is not known on the host; 0 where all are."""
    return next((i for i, v in enumerate(values) if has_traced(v) or is_opaque(v)), 0)
