"""What an operator may ask of the run that it is part of.

A definition with the keyword `context` gets one `Context` for its node. The compiler's tracer provides it; the host
form gets one as well, so an operator never asks which form it is in for these things.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax.numpy as jnp
import numpy as np

from transmuter_async.graph import Node, Value

__all__ = ["Context", "Subgraph", "first_alarm"]


def first_alarm(before: Any, after: Any) -> Any:
    """Of two alarm numbers, int32 scalars, the one to keep: 0 is none, an error (> 0) beats a warning (< 0), then order."""
    return jnp.where((before > 0) | ((after <= 0) & (before != 0)), before, after)


class Subgraph(Protocol):
    """A subgraph attribute, as If, Loop, Scan and their kin receive it.

    Calling it runs its nodes on the given inputs, host or traced, seeing the values of the graphs around it. Inside a
    JAX control-flow primitive wrap the body with `Context.carry`, so that alarms raised inside come out.
    """

    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]

    def __call__(self, *inputs: Any, iteration: Any = None) -> tuple[Any, ...]:
        """Outputs in order. `iteration` (host int or traced int) enters the key of random nodes inside."""
        ...

    def never_stops(self) -> bool:
        """As the body of a Loop: whether its condition is the one that it was given, or one that is always true."""
        ...


class Context(Protocol):
    """The run, seen from one node.

    Attributes:
        node: The node itself, for its name in errors.
        opset: Version of the node's domain.
        platform: "cpu", "gpu" or "tpu": where a traced value will be computed. It decides in which dtype narrow floats are
            computed; forms that are only faster are asked for with `lowers`.
    """

    node: Node
    opset: int
    platform: str

    def lowers(self, name: str) -> bool:
        """Whether the operator takes the form of that name in `lowering.LOWERINGS`; the answer is noted for `explain`.

        Asked last, when the shapes fit.
        """
        ...

    def prepared(self, weight: Any, recipe: str, *arguments: float) -> Any:
        """What the recipe of that name in `recipes.RECIPES` makes of a weight, or of a tuple of weights.

        Of those known on the host it is made once for all programs, and enters a program as an argument where it is large;
        of traced ones in the program, and so where it would take more memory than is wanted.

        Args:
            weight: A weight, or a tuple of some that belong together, None for one that is left out.
            recipe: Its name.
            arguments: What else it takes.
        """
        ...

    def bounded(
        self, indices: Any, size: int | Any, *, input: str, axis: int | None, inclusive: bool = False
    ) -> tuple[Any, Any]:
        """Normalise negative indices and hold them to `[0, size)`, by the run's `bounds` option.

        Args:
            indices: Integers, host or traced, negative ones counting from the end.
            size: Size of the axis; broadcastable against `indices` where several axes are indexed at once.
            input: The operator's input that holds them, for the error.
            axis: The axis, None where several.
            inclusive: `size` itself is allowed (insertion points).

        Returns:
            `(indices, valid)`: indices within bounds, int64 on the host, traced int32 where the axis allows; and None, or a boolean array of the same shape
            where the run wants out-of-range results replaced (`bounds="nan"`): use `fill_invalid` on the result.

        Raises:
            IndexOutOfRange: A host index is out of range and `bounds` is "check". A traced one raises when the program
                has run.
        """
        ...

    def fill_invalid(self, result: Any, valid: Any) -> Any:
        """`result` with NaN (integers: the dtype's minimum) where `valid`, broadcast against it, is false."""
        ...

    def random_key(self, seed: Any = None) -> Any:
        """The key of this node: `(2,)` uint32, host or traced. The operator's own `seed`, a number or a traced scalar,
        wins over the run's.

        The same node of the same model at the same run seed (and loop iteration) has the same key on every tier.
        """
        ...

    def carry(self, body: Callable[..., Any]) -> Callable[..., tuple[Any, Any]]:
        """`body` returning `(result, alarm)`, for use inside cond, while_loop and scan; give the alarm to `absorb`."""
        ...

    def absorb(self, alarm: Any) -> None:
        """Take the alarm (int32 scalar, 0 = none) that came out of a JAX control-flow primitive."""
        ...

    def refuse(self, bad: Any, message: str) -> None:
        """Raise where `bad` (bool array, host or traced) is true anywhere: values for which the operator has no answer.

        Args:
            bad: On the host it raises `OperatorError` at once; traced it raises when the program has run.
            message: What is wrong, without the node's name.
        """
        ...

    def function(self, names: Sequence[str], result: str) -> Callable[..., Any]:
        """A tensor of the graph as a function of others, for Gradient.

        Args:
            names: The tensors that are its arguments.
            result: The tensor that it gives.

        Returns:
            A traceable function that runs the nodes between them again; every other tensor keeps its value.
        """
        ...

    def error(self, message: str) -> Exception:
        """An `OperatorError` that names the node and its operator."""
        ...

    def needs(self, value: Any, index: int, reason: str) -> np.ndarray:
        """The host value of input `index`, or `NeedsValue` with `reason` where it is traced.

        For inputs that must be host values only in some cases; `static=` says it for those that always must.
        """
        ...

    def budget(self, shape: Sequence[int], dtype: Any) -> tuple[int, ...]:
        """`shape` as ints, checked to be non-negative and within the element budget, before anything is allocated."""
        ...
