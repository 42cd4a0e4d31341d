"""The table of operators, and what a definition says about itself.

An operator is a plain function. Its signature *is* the standard's: positional-only parameters are the ONNX inputs in
order under their ONNX names (`=None` where optional, `*xs` where variadic), keyword-only parameters are the ONNX
attributes with ONNX's defaults (none = required; an optional attribute without a default is `None`). A test compares
every definition with the schema of the installed `onnx`.

    @operator("Reshape", since_version=14, static=("shape",))
    def reshape_14(data, shape, /, *, allowzero=0): ...

There is one definition for each *changed* signature or meaning; `resolve` picks the newest one not above the model's
opset. The same function serves both forms: called with numpy arrays it computes on the host, called with JAX values it
traces. `xp(...)` gives the module to compute with.

Facts that the compiler reads from a definition:

- `static`: inputs that must be host values (numpy); computed on the device, they end the segment before the node.
- `host`: the shape of the result depends on values, or it is about strings: runs in numpy, is always a break unless all
  of its inputs are host values.
- `random`: draws from the run's key, so equal nodes are not duplicates and nothing may be folded.
- `loops`: computes with a loop of JAX (`lax.scan`, `map`, `fori_loop`, or inside of what it calls), or runs subgraphs: everything
  else is traced inline.

Two keywords are filled by the runner where the signature has them and are not attributes: `n_outputs` (number of the
node's outputs) and `context` (a `Context`).
"""

from __future__ import annotations

import bisect
import functools
import inspect
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

__all__ = ["Operator", "forced_trace", "invoke", "is_host", "known", "operator", "resolve", "supported", "xp"]

Function = TypeVar("Function", bound=Callable[..., Any])

RUNNER_KEYWORDS = frozenset({"n_outputs", "context"})


@dataclass(frozen=True, slots=True, eq=False)
class Operator:
    """One definition: an operator from `since_version` on.

    Attributes:
        inputs: Names of the positional parameters, a variadic one last.
        required: How many of them must be given.
        variadic: Whether the last of `inputs` takes any number.
        attributes: Default by attribute name; `inspect.Parameter.empty` marks a required one.
        keywords: Those of `RUNNER_KEYWORDS` that the function takes.
        notes: Said in the generated operator page.
    """

    name: str
    domain: str
    since_version: int
    function: Callable[..., Any]
    inputs: tuple[str, ...]
    required: int
    variadic: bool
    attributes: dict[str, Any]
    keywords: frozenset[str]
    static: frozenset[str] = frozenset()
    host: bool = False
    random: bool = False
    loops: bool = False
    notes: str = ""

    def input_name(self, index: int) -> str:
        """The ONNX name of the input at `index` of a node."""
        return self.inputs[min(index, len(self.inputs) - 1)] if self.inputs else ""


_TABLE: dict[tuple[str, str], list[Operator]] = {}

COVERED = {"": 28, "ai.onnx.ml": 5, "ai.onnx.preview": 1, "ai.onnx.preview.training": 1}
"""Version of each domain of the standard up to which every change of an operator is in the definitions."""


def operator(
    name: str,
    *,
    since_version: int,
    domain: str = "",
    static: Iterable[str] = (),
    host: bool = False,
    random: bool = False,
    loops: bool = False,
    notes: str = "",
) -> Callable[[Function], Function]:
    """Register a function as the definition of an operator from `since_version` on. See the module's text."""

    def register(function: Function) -> Function:
        parameters = list(inspect.signature(function).parameters.values())
        positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.VAR_POSITIONAL)]
        keyword = [p for p in parameters if p.kind is p.KEYWORD_ONLY]
        if len(positional) + len(keyword) != len(parameters):
            raise TypeError(f"{name}: inputs are positional-only and attributes keyword-only parameters")
        variadic = bool(positional) and positional[-1].kind is inspect.Parameter.VAR_POSITIONAL
        # Python cannot name an input like an attribute (Split-1 does): such an input ends in an underscore here.
        inputs = tuple(p.name.removesuffix("_") for p in positional)
        unknown = set(static) - set(inputs)
        if unknown:
            raise TypeError(f"{name}: static names {sorted(unknown)} are no inputs of {function}")
        definition = Operator(
            name=name,
            domain=domain,
            since_version=since_version,
            function=function,
            inputs=inputs,
            required=sum(p.default is p.empty and p.kind is p.POSITIONAL_ONLY for p in positional),
            variadic=variadic,
            attributes={p.name: p.default for p in keyword if p.name not in RUNNER_KEYWORDS},
            keywords=frozenset(p.name for p in keyword) & RUNNER_KEYWORDS,
            static=frozenset(static),
            host=host,
            random=random,
            loops=loops,
            notes=notes,
        )
        versions = _TABLE.setdefault((domain, name), [])
        if any(other.since_version == since_version for other in versions):
            raise TypeError(f"{domain}:{name}-{since_version} is defined twice")
        bisect.insort(versions, definition, key=lambda o: o.since_version)
        resolve.cache_clear()
        return function

    return register


@functools.lru_cache(maxsize=4096)  # asked for each node of each call
def resolve(domain: str, name: str, opset: int) -> Operator | None:
    """The definition that gives `name` its meaning at `opset`, or None. `domain` is `""` for the standard one."""
    found = None
    for candidate in _TABLE.get((domain, name), ()):
        if candidate.since_version > opset:
            break
        found = candidate
    return found


def known(domain: str, name: str, version: int) -> bool:
    """Whether there is a definition of what an operator means since `version`, and that version was looked at."""
    return version <= COVERED.get(domain, version) and resolve(domain, name, version) is not None


def supported() -> tuple[Operator, ...]:
    """Every definition, by domain, name and version."""
    return tuple(o for key in sorted(_TABLE) for o in _TABLE[key])


def invoke(
    definition: Operator, inputs: Iterable[Any], attributes: dict[str, Any], runner: dict[str, Any]
) -> tuple[Any, ...]:
    """Call a definition with a node's inputs (None where left out) and attributes; always a tuple of outputs.

    A definition returns its one output, or a tuple of several. A sequence value is a list, a map a dict, an empty
    optional None.

    Raises:
        TypeError: An input or attribute is missing or unknown, as Python says it for any call.
    """
    arguments = list(inputs)
    while len(arguments) > definition.required and arguments[-1] is None:
        arguments.pop()
    extra = {key: runner[key] for key in definition.keywords}
    # What overflows or is not a number is told by the result, as in the traced form, not by numpy's warnings.
    with np.errstate(all="ignore"):
        result = definition.function(*arguments, **attributes, **extra)
    # numpy turns 0-d arrays into scalars in arithmetic.
    if isinstance(result, tuple):
        return tuple([np.asarray(value) if isinstance(value, np.generic) else value for value in result])
    return (np.asarray(result) if isinstance(result, np.generic) else result,)


# --- numpy or JAX -----------------------------------------------------------------------------------------------------


class _Forced(threading.local):
    on = False


_forced = _Forced()


@contextmanager
def forced_trace(on: bool = True) -> Iterator[None]:
    """Within it `xp` is `jax.numpy` even for host values: a result too large to fold is computed on the device.

    Off for a subgraph of such a node: what its own nodes know, they know.
    """
    before = _forced.on
    _forced.on = on
    try:
        yield
    finally:
        _forced.on = before


def is_host(*values: Any) -> bool:
    """Whether none of the values is a JAX value, so that the result may be computed in numpy."""
    return not _forced.on and not any(isinstance(value, jax.Array) for value in values)


def xp(*values: Any) -> ModuleType:
    """numpy where all values are host values, else `jax.numpy`."""
    return np if is_host(*values) else jnp
