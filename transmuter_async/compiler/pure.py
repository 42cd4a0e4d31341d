"""A graph as a pure function: `apply(params, inputs)`, for `jax.jit`, `jax.vmap` and `jax.grad`.

Whatever surrounds it, `apply` computes as one program of its own: under a trace a nested `jit`, outside of one a program
for each signature. Never operator by operator on the device.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from transmuter_async.compiler.frames import run_key
from transmuter_async.compiler.inputs import Misfit, check_shape, describe_type, take_value
from transmuter_async.compiler.options import Options
from transmuter_async.compiler.prepare import PreparedGraph, prepare_graph
from transmuter_async.compiler.run import Run, Scope
from transmuter_async.compiler.settings import pinned
from transmuter_async.compiler.trace import run_nodes
from transmuter_async.compiler.values import fingerprint, signature
from transmuter_async.errors import InputError, NeedsValue
from transmuter_async.graph import Graph, Model, OptionalType, TensorType
from transmuter_async.operators import compile_program, resolve

__all__ = ["Apply", "to_jax"]

PROGRAMS = 16
"""Signatures whose programs `apply` keeps when it is called outside of a trace."""

Apply = Callable[..., dict[str, Any]]


def to_jax(
    model: Model,
    *,
    bounds: str = "clamp",
    static_inputs: Mapping[str, Any] | None = None,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
    lowerings: tuple[str, ...] | None = None,
) -> tuple[Apply, dict[str, jax.Array]]:
    """A model as a pure function of its weights and inputs.

    Args:
        model: As loaded.
        bounds: What an out-of-range index of Gather and its kin gives: "clamp" the nearest element, "nan" NaN (for
            integers the dtype's minimum). A pure function cannot raise.
        static_inputs: Values of inputs that the graph reads on the host (a sample rate that an If tests). They are
            left out of `inputs`.
        around: Makes a context that surrounds each run of the graph.
        lowerings: Names of the forms that operators take; None: those for the platform.

    Returns:
        `(apply, params)`. `apply(params, inputs, seed=None)` gives a dict of outputs; `inputs` maps names to arrays,
        `seed` is an integer, a threefry key or (2,) uint32 for random operators (None: zero, so that it stays pure).
        `params` holds the floating-point weights by name, those of branches and loop bodies included, so that `jax.grad`
        can differentiate by them. Integer weights, and floats that decide a shape (the scales of a Resize), belong to
        the function.

    Raises:
        UnsupportedModel: Operators are missing.
        InputError: `static_inputs` names something that is no input.
        TypeError: `model` is no `Model`.
        ValueError: `bounds` is neither.

    `apply` raises `NeedsValue` under a trace where the graph breaks, and `InputError` for inputs that do not fit.

    64-bit integers and floats are computed as such whatever the application's `jax_enable_x64` says, and `apply` takes
    32-bit arrays where the graph says 64. What cannot be made safe here: with x64 off, `jax.jit(apply)` gets numpy
    int64 arrays only after jax has wrapped them to 32 bits; ids above 2^31 have lost their value before `apply` sees
    them. Make them true 64-bit arrays first with `device_put` of this library, or keep them below.
    """
    if bounds not in ("clamp", "nan"):
        raise ValueError(f"bounds={bounds!r} is not one of 'clamp', 'nan'")
    if not isinstance(model, Model):
        raise TypeError(f"to_jax takes a Model, not {type(model).__name__}; `await runtime.load(source)` gives one")
    fixed = dict(static_inputs or {})
    names = {value.name: value for value in model.graph.inputs}
    strangers = [name for name in fixed if name not in names]
    if strangers:
        raise InputError(f"static_inputs={strangers} are no inputs of the model; it has {list(names)}")
    for name, value in fixed.items():
        try:
            fixed[name] = take_value(np.asarray(value) if isinstance(value, jax.Array) else value, names[name].type, True)
        except Misfit as problem:
            raise InputError(f"static_inputs do not fit the graph: {name!r}: {problem}") from None
    options = Options(lowerings=lowerings, scales=False)  # the params are those of the file
    prepared = PreparedGraph(model, options, prepare_graph(model, options), jax.local_devices()[0])
    fixed_weights = _read_on_the_host(prepared.graph)
    weights: dict[str, np.ndarray] = {}
    numbers: set[int] = set()
    for name, array in _weights(prepared.graph, fixed_weights):
        if jnp.issubdtype(array.dtype, jnp.floating) and id(array) not in numbers:  # a tied weight is one parameter
            numbers.add(id(array))
            weights[name] = array
    with pinned():
        params = {name: jax.device_put(array, prepared.device) for name, array in weights.items()}
    function = _Function(prepared, fixed, bounds, {name: id(array) for name, array in weights.items()})

    def apply(params: Mapping[str, Any], inputs: Mapping[str, Any], seed: Any = None) -> dict[str, Any]:
        with pinned(), around():
            return function(params, inputs, seed)

    return apply, params


class _Function:
    """The state behind an `apply`: programs by signature, for calls outside of a trace."""

    def __init__(
        self, prepared: PreparedGraph, fixed: Mapping[str, Any], bounds: str, weights: Mapping[str, int]
    ) -> None:
        self.prepared = prepared
        self.fixed = dict(fixed)
        self.bounds = bounds
        self.weights = weights
        self._programs: OrderedDict[Any, Any] = OrderedDict()
        self._lock = threading.Lock()

    def __call__(self, params: Mapping[str, Any], inputs: Mapping[str, Any], seed: Any) -> dict[str, Any]:
        values = self._check(params, inputs)
        seed = _key(seed)
        leaves = jax.tree.leaves((dict(params), values, seed))
        known = {
            name: value
            for name, value in values.items()
            if value is None or isinstance(value, np.ndarray) and (value.dtype == object or name in self.prepared.dim_like)
        }
        traced = {name: self._wide(name, value) for name, value in values.items() if name not in known}
        if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
            return dict(jax.jit(self._body(known))(dict(params), traced, seed))
        key = (
            tuple(sorted((name, fingerprint(value)) for name, value in known.items())),
            tuple(sorted((name, signature(value)) for name, value in traced.items())),
            tuple(sorted((name, signature(value)) for name, value in params.items())),
            tuple(getattr(leaf, "sharding", None) for leaf in leaves),
        )
        with self._lock:
            program = self._programs.get(key)
        if program is None:  # two threads may both compile it; neither waits for the other
            program = compile_program(jax.jit(self._body(known)).lower(dict(params), traced, seed), self.prepared.platform)
        with self._lock:
            self._programs[key] = program
            self._programs.move_to_end(key)
            while len(self._programs) > PROGRAMS:
                self._programs.popitem(last=False)
        return dict(program(dict(params), traced, seed))

    def _body(self, known: Mapping[str, Any]) -> Callable[..., dict[str, Any]]:
        prepared = self.prepared

        def body(params: dict[str, Any], inputs: dict[str, Any], seed: Any) -> dict[str, Any]:
            run = Run(
                tracing=True,
                seed=jnp.asarray(seed, jnp.uint32),
                bounds=self.bounds,
                platform=prepared.platform,
                producers=prepared.producers,
                weights={self.weights[name]: value for name, value in params.items()},
                lowerings=prepared.lowerings,
                prepare=prepared.rearranged,
            )
            outer = Scope({k: run.weights.get(id(v), v) for k, v in prepared.graph.initializers.items()})
            given = {name: self._cast(name, value) for name, value in inputs.items()}
            scope = Scope({**self.fixed, **known, **given}, outer=outer)
            try:
                run_nodes(run, prepared.nodes, scope)
            except NeedsValue as need:
                raise self._advised(need, inputs) from None
            return {name: jax.tree.map(self._give, scope.read(name)) for name in prepared.outputs}

        return body

    def _cast(self, name: str, value: Any) -> Any:
        if isinstance(value, list):
            return value
        type = next(v.type for v in self.prepared.graph.inputs if v.name == name)
        want = type.dtype if isinstance(type, TensorType) and type.dtype is not None else value.dtype
        return value if value.dtype == want else value.astype(want)

    @staticmethod
    def _give(value: Any) -> Any:
        return jnp.asarray(value)

    def _advised(self, need: NeedsValue, traced: Mapping[str, Any]) -> NeedsValue:
        """The same break, with the inputs to fix where its value follows from a few small ones."""
        producers, found, left, seen = self.prepared.producers, set[str](), [need.value], set[str]()
        while left:
            name = left.pop()
            if name in seen:
                continue
            seen.add(name)
            if name in traced:
                found.add(name)
            elif name in producers:
                left.extend(filter(None, producers[name].inputs))
        small = ", ".join(f"{name!r}: …" for name in sorted(found)) if found and found <= self.prepared.dim_like else ""
        return NeedsValue(
            node=need.node,
            operator=need.operator,
            position=need.position,
            value=need.value,
            producer=need.producer,
            reason=need.reason,
            hint=f"Fix it with to_jax(model, static_inputs={{{small}}}), or give it as a numpy value outside of a trace."
            if small
            else "A pure function can't break there: run the model in a Runtime, or export it without this operator.",
        )

    def _check(self, params: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
        for what, given in (("params", params), ("inputs", inputs)):
            if not isinstance(given, Mapping):
                raise InputError(f"{what} are a mapping from names to arrays, not {type(given).__name__}")
        strangers = [name for name in params if name not in self.weights]
        absent = [name for name in self.weights if name not in params]
        if strangers or absent:
            said = [f"{each} {names}" for each, names in (("unknown are", strangers), ("missing are", absent)) if names]
            raise InputError(f"these are not the params that to_jax gave: {'; '.join(said)}")
        declared = {value.name: value for value in self.prepared.graph.inputs if value.name not in self.fixed}
        problems = [f"{name!r} is not an input" for name in inputs if name not in declared]
        values: dict[str, Any] = {}
        for name, value in declared.items():
            if name in inputs:
                try:
                    values[name] = _take(inputs[name], value.type)
                except Misfit as problem:
                    problems.append(f"{name!r}: {problem}")
            elif isinstance(value.type, OptionalType):
                values[name] = None
            else:
                problems.append(f"{name!r} is missing, expected {describe_type(value.type)}")
        if problems:
            expected = ", ".join(f"{name}: {describe_type(value.type)}" for name, value in declared.items()) or "no inputs"
            raise InputError(f"the inputs do not fit the graph: {'; '.join(problems)}. The graph expects {expected}")
        return values

    def _wide(self, name: str, value: Any) -> Any:
        """An input on the device in the graph's dtype: 32-bit ones become 64-bit where the graph says so."""
        if isinstance(value, list):
            return [jnp.asarray(item) for item in value]
        type = next(v.type for v in self.prepared.graph.inputs if v.name == name)
        want = type.dtype if isinstance(type, TensorType) and type.dtype is not None else value.dtype
        if isinstance(value, np.ndarray):
            return jax.device_put(value.astype(want), self.prepared.device)
        return value


def _take(given: Any, type: Any) -> Any:
    """One input: an array of jax as it is, where it fits; everything else as a call of a compiled model takes it."""
    if isinstance(type, OptionalType):
        if given is None:
            return None
        type = type.element
    if not isinstance(given, jax.Array):
        return take_value(given, type, False)
    if isinstance(type, TensorType):
        if type.shape == () and given.shape == (1,):
            given = given.reshape(())
        check_shape(given, type)
        if type.dtype is not None and not _accepts(given.dtype, type.dtype):
            raise Misfit(f"dtype {given.dtype} was given, expected {describe_type(type)}")
    return given


def _key(seed: Any) -> Any:
    """(2,) uint32 from what `apply` takes as a seed, traced or not."""
    if seed is None:
        return np.zeros(2, np.uint32)
    if isinstance(seed, (int, np.integer)) and not isinstance(seed, bool):
        return run_key(int(seed))
    if not isinstance(seed, jax.Array):
        seed = np.asarray(seed)
    if jnp.issubdtype(seed.dtype, jax.dtypes.prng_key):
        seed = jax.random.key_data(seed)
    if seed.shape == () and seed.dtype.kind in "iu":
        bits = jnp.asarray(seed).astype(jnp.uint64)
        return jnp.stack([bits >> 32, bits & 0xFFFFFFFF]).astype(jnp.uint32)
    if seed.shape != (2,) or seed.dtype != np.uint32:
        raise InputError(
            f"seed is {seed.dtype} of shape {seed.shape}; give an integer, uint32 of shape (2,), or a threefry key of jax"
        )
    return seed


def _weights(graph: Graph, without: set[str], path: str = "") -> Iterator[tuple[str, np.ndarray]]:
    """Initializers and Constants by a name of their own: of a body, the names of the nodes around it stand before its own."""
    for name, array in graph.initializers.items():
        if name not in without:
            yield f"{path}{name}", array
    for index, node in enumerate(graph.nodes):
        value = node.attributes.get("value")
        if node.op_type == "Constant" and isinstance(value, np.ndarray) and node.outputs[0] not in without:
            yield f"{path}{node.outputs[0]}", value
        for number, body in enumerate(node.subgraphs()):
            yield from _weights(body, without, f"{path}{node.name or index}/{number}/")


def _read_on_the_host(graph: Graph) -> set[str]:
    """Names whose values may decide a shape or a branch: those that lead into an input that must be a host value."""
    nodes = list(graph.walk())
    wanted: set[str] = set()
    for node in nodes:
        definition = resolve(node.domain, node.op_type, node.opset)
        for index, name in enumerate(node.inputs):
            if definition is None or definition.host or definition.input_name(index) in definition.static:
                wanted.add(name)
        if any(True for _ in node.subgraphs()):
            wanted.update(node.inputs[:2])  # the condition of If, the count and condition of Loop
    while True:
        before = len(wanted)
        for node in reversed(nodes):
            if node.op_type in ("Shape", "Size") or not wanted.intersection(node.outputs):
                continue
            wanted.update(node.inputs)
            for body in node.subgraphs():
                wanted.update(value.name for value in body.outputs)
        if len(wanted) == before:
            return wanted


def _accepts(given: np.dtype, want: np.dtype) -> bool:
    if given == want:
        return True
    floating = jnp.issubdtype(given, jnp.floating) and jnp.issubdtype(want, jnp.floating)
    return (given.kind == want.kind or bool(floating)) and given.itemsize < want.itemsize

