"""The compiler's front door: a model made ready, the calls of it, and the jobs that compile it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from transmuter_async.compiler.common import share_weights
from transmuter_async.compiler.cores import start_client
from transmuter_async.compiler.execute import Execution
from transmuter_async.compiler.inputs import PlainInputs, describe_type, take_inputs
from transmuter_async.compiler.job import CompileJob
from transmuter_async.compiler.layouts import lay_out, lay_out_in_place, with_arrays
from transmuter_async.compiler.options import Options, Spec
from transmuter_async.compiler.placement import Placement, arrived, own_copies
from transmuter_async.compiler.prepare import PreparedGraph, prepare_graph
from transmuter_async.errors import BreakRefused, InputError, TransmuterError
from transmuter_async.graph import Graph, Model, TensorType

__all__ = ["Prepared", "prepare", "replicate"]


class Prepared(PreparedGraph):
    """A model ready to be called: checks inputs, starts calls, makes the jobs that compile ahead of them."""

    def __init__(
        self, model: Model, options: Options, graph: Graph, placement: Placement, first: Prepared | None = None
    ) -> None:
        super().__init__(model, options, graph, placement, first)
        self._plain = PlainInputs(graph.inputs)

    def take_inputs(self, inputs: Mapping[str, Any], copy: bool | None = None) -> dict[str, Any]:
        """Check a call's inputs and take them over; see `inputs.take_inputs`. Cheap: for the caller's task.

        Raises:
            InputError: They do not fit the graph; everything is listed.
        """
        taken = self._plain.take(inputs, copy)
        if taken is not None:
            return taken
        return take_inputs(
            self.graph.inputs, inputs, copy=copy, outputs=self.outputs, replaceable=self.declared.replaceable
        )

    def admitted(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """What the graph would see of a call's inputs: checked, and padded where buckets ask for it. For `why`."""
        values = self.take_inputs(inputs, copy=False)
        return values if self.padding is None else self.padding.pad(values)[0]

    def start(self, inputs: Mapping[str, Any], *, seed: int, device: bool) -> Execution:
        """A call of inputs from `take_inputs`.

        Args:
            inputs: By name.
            seed: Of the random operators, 64 bits.
            device: Give JAX arrays instead of numpy ones.

        Raises:
            InputError: An input is longer than the largest bucket, or inputs disagree on a dimension.
            BatchingRefused: At these sizes the graph mixes rows or reads padding.
        """
        if self.padding is None:
            return Execution(self, inputs, seed=seed, device=device)
        padded, cut = self.padding.pad(inputs)
        return Execution(self, padded, seed=seed, device=device, cut=cut)

    def spec_job(self, specs: Mapping[str, Any]) -> CompileJob | None:
        """The job that compiles the first segment for given shapes. May trace: for a worker thread.

        Args:
            specs: By input name a `Spec`, or an array where the value matters too.

        Returns:
            None where the graph reads an input on the host of which only a `Spec` was given: its value decides the
            program, so the first call compiles it.

        Raises:
            InputError: Specs that do not fit the graph; everything is listed.
        """
        samples = self._samples(specs)
        valued = {name for name, spec in specs.items() if not isinstance(spec, Spec)}
        statics = frozenset(self.options.static_inputs)
        if statics - valued:
            return None
        job = CompileJob(self, 0, samples, frozenset(), statics, first=True)
        if (self.dim_like & samples.keys()) - valued and job.statics() - valued:
            return None
        return job

    def find_break(self) -> None:
        """Trace over the declared dimensions, and set `graph_break`. Traces: for a worker thread.

        It stays None where an input has an open dimension or a value that the graph reads on the host, and where the trace
        meets an error: that one belongs to the call that will meet it, too.

        Raises:
            BreakRefused: The graph breaks and the options refuse breaks.
        """
        specs = {}
        for value in self.graph.inputs:
            if not isinstance(value.type, TensorType) or value.type.dtype is None or value.type.shape is None:
                return
            dims = [dim for dim in value.type.shape if isinstance(dim, int) and dim >= 0]
            if len(dims) != len(value.type.shape):
                return
            specs[value.name] = Spec(dims, value.type.dtype)
        try:
            job = self.spec_job(specs)
            if job is not None:
                self.graph_break = job.breaks()
        except BreakRefused:
            raise
        except (TransmuterError, RuntimeError, ValueError, TypeError):
            return

    def _samples(self, specs: Mapping[str, Any]) -> dict[str, Any]:
        """Arrays without data that stand for the inputs; numpy views of one zero, so they take no memory."""
        samples: dict[str, Any] = {}
        declared = {value.name: value for value in self.graph.inputs}
        problems = [f"{name!r} is not an input" for name in specs if name not in declared]
        for name, value in declared.items():
            spec = specs.get(name)
            if spec is None:
                if isinstance(value.type, TensorType):
                    problems.append(f"{name!r} is missing, expected {describe_type(value.type)}")
                continue
            if not isinstance(spec, Spec):
                samples.update(take_inputs([value], {name: spec}))
                continue
            if isinstance(value.type, TensorType):
                want = value.type
                if want.dtype is not None and spec.dtype != want.dtype:
                    problems.append(f"{name!r}: dtype {spec.dtype} was given, expected {describe_type(want)}")
                if want.shape is not None and (
                    len(want.shape) != len(spec.shape)
                    or any(
                        isinstance(w, int) and w >= 0 and w != g for w, g in zip(want.shape, spec.shape, strict=True)
                    )
                ):
                    problems.append(f"{name!r}: shape {spec.shape} was given, expected {describe_type(want)}")
            samples[name] = np.broadcast_to(np.zeros((), spec.dtype), spec.shape)
        if problems:
            expected = ", ".join(f"{name}: {describe_type(value.type)}" for name, value in declared.items())
            raise InputError(f"the specs do not fit the graph: {'; '.join(problems)}. The graph expects {expected}")
        return samples if self.padding is None else self.padding.pad_samples(samples)


class _Arriving(Prepared):
    """Where arrays of a call may live on other devices, or are consumed by it."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._foreign = self.placement.foreign_arrays

    def start(self, inputs: Mapping[str, Any], *, seed: int, device: bool) -> Execution:
        """See `Prepared.start`.

        Raises:
            InputError: An array was consumed by an earlier call.
        """
        if self.options.donate:
            inputs = own_copies(inputs, self.options.donate)
        if self._foreign:
            inputs = arrived(inputs, self.placement, self.batch_axes)
        return super().start(inputs, seed=seed, device=device)


def _made(
    model: Model, options: Options, graph: Graph, placement: Placement, first: Prepared | None = None
) -> Prepared:
    plain = not options.donate and not placement.foreign_arrays
    return (Prepared if plain else _Arriving)(model, options, graph, placement, first)


def prepare(
    model: Model,
    options: Options,
    *,
    device: jax.Device | None = None,
    placement: Placement | None = None,
    sole: bool = False,
) -> Prepared:
    """Make a model ready: see `prepare_graph` for what is done and raised. Without a device or placement: jax's first one.

    With `sole` nobody else needs the model, which is changed: a weight goes at once when factors of channels are put into it or it
    is laid out.
    """
    start_client()
    shared = replace(model, graph=share_weights(model.graph))
    held = (model.graph.initializers, shared.graph.initializers) if sole else ()
    graph = share_weights(prepare_graph(shared, options, held))
    if placement is None:
        placement = Placement((jax.local_devices()[0] if device is None else device,))
    programs = options.optimize and options.compiler != "eager" and placement.device.platform == "cpu"
    if programs and sole:
        lay_out_in_place(graph, held)
    elif programs and (laid := lay_out(graph)):
        graph = with_arrays(graph, laid)
    return _made(model, options, graph, placement)


def replicate(prepared: Prepared, placement: Placement) -> Prepared:
    """The same prepared graph for another device: nothing is read, folded or proved again."""
    return _made(prepared.model, prepared.options, prepared.graph, placement, prepared)
