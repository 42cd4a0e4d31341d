"""Every exception of the library.

    TransmuterError
    ├── InvalidModel                     the bytes are not a usable ONNX model
    ├── UnsupportedModel                 a usable model that needs operators we do not have
    ├── InputError (ValueError)          what was given to `run` does not fit the graph
    ├── IndexOutOfRange (IndexError)     Gather and its kin met an index outside of its axis
    ├── NonFiniteError                   the non-finite alarm (`nonfinite="error"`)
    ├── OperatorError                    an operator refuses its inputs, or failed on them
    ├── NeedsValue                       a node needs a value on the host that is only known when it runs
    ├── BreakRefused                     `breaks="error"` and the graph would break
    ├── BatchingRefused                  padding or batching would change results
    ├── CompileError                     XLA refused a program
    ├── ActorStopped                     the actor behind a handle has ended
    ├── Overloaded                       no room in a mailbox or queue
    │   └── CircuitOpen                  a serving refuses work for a moment after failures
    ├── DeadlineExceeded (TimeoutError)  `timeout=` passed before the answer
    ├── MisuseError                      right object, wrong place: other loop, forked process, runtime not entered
    └── HubError                         the Hugging Face Hub, its cache, or the way there; see `hub/errors.py`

A text says what happened with names, shapes and values, why, and one thing to do. The facts are attributes too.
"""

from __future__ import annotations

__all__ = [
    "ActorStopped",
    "BatchingRefused",
    "BreakRefused",
    "CircuitOpen",
    "CompileError",
    "DeadlineExceeded",
    "HubError",
    "IndexOutOfRange",
    "InputError",
    "InvalidModel",
    "MisuseError",
    "NeedsValue",
    "NonFiniteError",
    "NonFiniteWarning",
    "OperatorError",
    "Overloaded",
    "TransmuterError",
    "UnsupportedModel",
]


class TransmuterError(Exception):
    """Base of every exception that this library raises on purpose."""


class InvalidModel(TransmuterError):
    """The bytes are not a usable ONNX model: damaged, something else altogether, over budget, or escaping its folder.

    Attributes:
        source: What was being read, as text, or None for bytes.
    """

    def __init__(self, message: str, *, source: str | None = None) -> None:
        super().__init__(message if source is None else f"{source}: {message}")
        self.source = source


class UnsupportedModel(TransmuterError):
    """The model needs operators (or an opset) that are not implemented. All of them are listed at once.

    Attributes:
        missing: One `(domain, operator, opset, node names)` for each operator without a definition.
    """

    def __init__(
        self, message: str, *, missing: tuple[tuple[str, str, int, tuple[str, ...]], ...] = ()
    ) -> None:
        super().__init__(message)
        self.missing = missing


class InputError(TransmuterError, ValueError):
    """What was given does not fit the graph: names, dtypes, ranks, fixed dimensions. One error lists everything."""


class IndexOutOfRange(TransmuterError, IndexError):
    """An index of Gather, GatherElements, ScatterND, … lies outside of its axis.

    Attributes:
        node: Name of the node (or its first output where it has no name).
        input: Name of the operator's input that holds the index.
        axis: Axis that is indexed, None where the operator indexes several.
        size: Size of that axis, None where it is not known any more.
    """

    def __init__(
        self, message: str, *, node: str, input: str, axis: int | None, size: int | None
    ) -> None:
        super().__init__(message)
        self.node = node
        self.input = input
        self.axis = axis
        self.size = size


class NonFiniteError(TransmuterError):
    """A node's result holds NaN or infinity and `nonfinite="error"` was asked for.

    Attributes:
        node: Name of the first such node.
    """

    def __init__(self, message: str, *, node: str) -> None:
        super().__init__(message)
        self.node = node


class NonFiniteWarning(RuntimeWarning):
    """A node's result holds NaN or infinity and `nonfinite="warn"` was asked for."""


class OperatorError(TransmuterError):
    """A node refuses its inputs: shapes, dtypes or attribute values that its operator does not allow.

    Attributes:
        node: Name of the node.
        operator: `"domain:Name"`, the standard domain is `"ai.onnx"`.
    """

    def __init__(self, message: str, *, node: str, operator: str) -> None:
        super().__init__(message)
        self.node = node
        self.operator = operator


class NeedsValue(TransmuterError):
    """A node needs a value on the host that is only known when the program runs: the graph breaks there.

    Attributes:
        node: Name of the node.
        operator: `"domain:Name"` of the node.
        position: Index of the top-level node in the file's sorted graph; for a node in a subgraph, of the node around it.
        value: Name of the tensor that is needed.
        producer: Name of the node that computes it, None for a graph input.
        reason: The value in words: "the If condition", "the shape of Reshape 'x'".
        hint: One thing the user can do.
    """

    def __init__(
        self,
        *,
        node: str,
        operator: str,
        position: int,
        value: str,
        producer: str | None,
        reason: str,
        hint: str,
    ) -> None:
        origin = "a graph input" if producer is None else f"computed by {producer!r}"
        super().__init__(
            f"{operator} {node!r} needs {reason} on the host, but {value!r} ({origin}) "
            f"is only known when the program runs. {hint}"
        )
        self.node = node
        self.operator = operator
        self.position = position
        self.value = value
        self.producer = producer
        self.reason = reason
        self.hint = hint


class BreakRefused(TransmuterError):
    """`breaks="error"` was asked for and the graph breaks. The text is the explanation of the first break."""


class BatchingRefused(TransmuterError):
    """Padding or batching was asked for and the graph mixes rows, or reads padding.

    Attributes:
        mixes: A record for each such operator, with `node`, `op_type`, `axis` and `why`.
    """

    def __init__(self, message: str, *, mixes: tuple[object, ...] = ()) -> None:
        super().__init__(message)
        self.mixes = mixes


class CompileError(TransmuterError):
    """XLA refused a program. The cause is chained."""


class ActorStopped(TransmuterError):
    """The actor behind the handle has ended: it was closed, its runtime was left, or it crashed (then the cause is chained)."""


class Overloaded(TransmuterError):
    """No room in a mailbox or queue, and the caller asked not to wait."""


class CircuitOpen(Overloaded):
    """A serving refuses work for a moment, because everything it tried just failed.

    Attributes:
        retry_after: Seconds until it tries again.
    """

    def __init__(self, message: str, *, retry_after: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class DeadlineExceeded(TransmuterError, TimeoutError):
    """The `timeout=` of a call passed before its answer was ready."""


class MisuseError(TransmuterError):
    """The right object in the wrong place: another event loop, a forked process, a runtime that was not entered."""


class HubError(TransmuterError):
    """Something about the Hugging Face Hub, its file cache, or the way there. The subclasses live in `hub/errors.py`."""
