"""Where programs run: on one device, or over a mesh of devices that split the rows of a batch; and what they consume."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from transmuter_async.compiler.batching import Plan
from transmuter_async.compiler.cores import start_client
from transmuter_async.compiler.values import abstract
from transmuter_async.errors import InputError, MisuseError

__all__ = [
    "Placement",
    "arrived",
    "batch_axes",
    "check_devices",
    "laid_out",
    "launcher",
    "own_copies",
    "place",
    "spread_rows",
    "unwrapped",
    "usable_donations",
]

ROWS = "batch"
"""Name of the mesh's one axis."""

_TURN = threading.Lock()
"""Programs over several devices run one after the other, in the whole process: two that are started in another order on one
device than on the next may wait for each other for ever, once they exchange anything."""


@dataclass(frozen=True, slots=True)
class Placement:
    """The devices of one model actor.

    Attributes:
        devices: One, or all of the mesh.
        mesh: Over which the rows of a batch are split; None for one device.
    """

    devices: tuple[jax.Device, ...]
    mesh: Mesh | None = None

    @property
    def device(self) -> jax.Device:
        """The first device."""
        return self.devices[0]

    @property
    def home(self) -> Any:
        """Where weights go, in the words of `jax.device_put`: the device, or each device of the mesh."""
        return self.devices[0] if self.mesh is None else NamedSharding(self.mesh, PartitionSpec())  # type: ignore[no-untyped-call]

    def argument(self, axis: int | None) -> Any:
        """Where an argument of a program goes whose batch axis is `axis`; None: it has none."""
        if self.mesh is None or axis is None:
            return self.home
        return NamedSharding(self.mesh, PartitionSpec(*[None] * axis, ROWS))  # type: ignore[no-untyped-call]

    @property
    def foreign_arrays(self) -> bool:
        """Whether the process may hold jax arrays that live elsewhere."""
        device = self.devices[0]
        return device.platform != "cpu" or jax.default_backend() != "cpu" or device.client.device_count() > 1

    def __str__(self) -> str:
        return ", ".join(map(str, self.devices))


def check_devices(devices: Sequence[Any] | None) -> tuple[jax.Device, ...] | None:
    """What a caller gives as `devices`, as a tuple.

    Raises:
        MisuseError: Something else than a device, one twice, or one of another process.
    """
    if devices is None:
        return None
    if isinstance(devices, (str, jax.Device)):
        raise MisuseError(f"devices={devices!r} is not a list; write devices=jax.devices(), or a part of it")
    found = tuple(devices)
    for device in found:
        if not isinstance(device, jax.Device):
            raise MisuseError(
                f"devices={list(found)!r}: {device!r} is no jax device; take them from jax.devices(), as in devices=jax.devices()[:2]"
            )
        if device.process_index != device.client.process_index():
            raise MisuseError(
                f"{device} belongs to another process; a Runtime computes on devices of its own, jax.local_devices()"
            )
    if len(set(found)) < len(found):
        raise MisuseError(f"devices={[str(device) for device in found]} names a device twice; name each one once")
    return found


def place(
    devices: tuple[jax.Device, ...] | None, *, replicas: int, sharding: str | None, threads: int | None = None
) -> tuple[Placement, ...]:
    """Where the actors of one model live, one placement for each. May start jax's backend: for a thread.

    Args:
        devices: As checked; None for all that jax has here.
        replicas: How many actors; they take the devices in order.
        sharding: "batch" for one actor over all devices.
        threads: That compute on the CPU; None for as many as there are.

    Raises:
        MisuseError: There are not as many devices, or threads, or they can't work on one batch together.
    """
    start_client(threads)
    known = tuple(jax.local_devices()) if devices is None else devices
    if not known:
        raise MisuseError("devices=() leaves no device to compute on; leave it out for jax's own")
    if replicas > len(known):
        raise MisuseError(
            f"replicas={replicas} need a device each, and there are {len(known)}: {', '.join(map(str, known))}. For more calls at "
            "once on a device give max_concurrency="
        )
    if sharding is None:
        return tuple(Placement((device,)) for device in known[:replicas])
    kinds = sorted({f"{device.platform} {device.device_kind}" for device in known})
    if len(kinds) > 1:
        raise MisuseError(
            f"sharding={sharding!r} splits a batch over equal devices, and these are of {len(kinds)} kinds: {', '.join(kinds)}; "
            "give Runtime(devices=…) one kind"
        )
    return (Placement(known, Mesh(np.array(known, object), (ROWS,))),)


class _SpreadRows(Plan):
    """A plan that pads the batch to a multiple of the number of devices, too."""

    __slots__ = ("_multiple",)
    _multiple: int

    def targets(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """As `Plan.targets`, the batch rounded up to a multiple."""
        found = Plan.targets(self, sizes)
        if self.batch in found:
            found[self.batch] += -found[self.batch] % self._multiple
        return found

    def describe(self) -> str:
        """In words, for `explain`."""
        return f"{Plan.describe(self)} They are split over {self._multiple} devices, spare ones added where they do not divide."


def spread_rows(plan: Plan, count: int) -> Plan:
    """The same plan for a batch that is split over `count` devices.

    Raises:
        InputError: The plan has no batch.
    """
    if plan.batch is None:
        raise InputError('sharding="batch" splits the batch, and the batching names none: Batching(batch="N")')
    spread = _SpreadRows(**{field.name: getattr(plan, field.name) for field in fields(plan)})
    spread._multiple = count
    return spread


def batch_axes(plan: Plan | None) -> dict[str, int]:
    """The batch axis of each input that has one."""
    if plan is None:
        return {}
    return {name: at for name, places in plan.places.items() for at, dim in places.items() if dim == plan.batch}


def laid_out(value: Any, sharding: Any) -> Any:
    """Shape and dtype of a value for tracing, and where it will be."""
    if isinstance(value, list):
        return [laid_out(item, sharding) for item in value]
    struct = abstract(value)
    return struct if sharding is None else jax.ShapeDtypeStruct(struct.shape, struct.dtype, sharding=sharding)  # type: ignore[no-untyped-call]


def arrived(inputs: Mapping[str, Any], placement: Placement, axes: Mapping[str, int]) -> dict[str, Any]:
    """A call's inputs with the arrays of other devices brought to the ones that compute."""
    return {name: _arrived(value, placement.argument(axes.get(name))) for name, value in inputs.items()}


def _arrived(value: Any, target: Any) -> Any:
    if isinstance(value, list):
        return [_arrived(item, target) for item in value]
    if not isinstance(value, jax.Array):
        return value
    if isinstance(target, NamedSharding):
        # By way of the host: jax would compile a program for each shape to cut it up, and rows may have to be padded first.
        return value if value.sharding.is_equivalent_to(target, value.ndim) else np.asarray(value)
    return value if value.sharding.device_set == {target} else jax.device_put(value, target)


# --- donation ---------------------------------------------------------------------------------------------------------


def usable_donations(
    names: Iterable[str], values: Mapping[str, Any], outputs: Iterable[tuple[Any, Any]]
) -> tuple[str, ...]:
    """Those arguments whose memory can hold an output: of its shape and dtype, and each output is held once.

    Args:
        names: Arguments that may be consumed.
        values: What they are.
        outputs: Shape and dtype of each output.
    """
    free = Counter((tuple(shape), np.dtype(dtype)) for shape, dtype in outputs)
    usable = []
    for name in names:
        value = values[name]
        if isinstance(value, list):
            continue
        kind = (tuple(value.shape), np.dtype(value.dtype))
        if free[kind]:
            free[kind] -= 1
            usable.append(name)
    return tuple(usable)


def own_copies(inputs: Mapping[str, Any], donate: Sequence[str]) -> dict[str, Any]:
    """A call's inputs, with a copy of each donated array whose memory is given under another name, too.

    Raises:
        InputError: An array was consumed by an earlier call.
    """
    arrays = {name: value for name, value in inputs.items() if isinstance(value, jax.Array)}
    for name, value in arrays.items():
        if value.is_deleted():
            raise _gone(f"the array given for {name!r} is")
    taken = dict(inputs)
    if len(arrays) > 1:
        memory = {name: _memory(name, value) for name, value in arrays.items()}
        held = Counter(memory.values())
        for name in donate:
            if name in arrays and held[memory[name]] > 1:
                taken[name] = np.array(arrays[name])  # on the host: numpy inputs are never consumed
    return taken


def _gone(what: str) -> InputError:
    return InputError(
        f"{what} gone: another call was given it for an input that is donated, and has used its memory; give what that call returned"
    )


def _memory(name: str, value: jax.Array) -> int:
    """What two arrays of the same memory have in common."""
    if not value.nbytes or len(value.sharding.device_set) > 1:
        return id(value)
    try:
        return value.unsafe_buffer_pointer()
    except (RuntimeError, ValueError) as error:  # another call has just consumed it
        raise _gone(f"the array given for {name!r} is") from error


class _Donating:
    """A program that consumes some of its arguments. Called like any other."""

    __slots__ = ("__weakref__", "_donated", "_others", "program")

    def __init__(self, program: Any, count: int, donated: tuple[int, ...]) -> None:
        self.program = program
        self._donated = donated
        self._others = tuple(index for index in range(count) if index not in donated)

    def __call__(self, weights: Any, arguments: tuple[Any, ...], seed: Any) -> Any:
        given = tuple([arguments[index] for index in self._donated])
        # jax says which arrays are gone: `delete` here would pull one from under a call of it in another thread. One that
        # numpy looks at it keeps as it is.
        try:
            return self.program(weights, tuple([arguments[index] for index in self._others]), seed, given)
        except (RuntimeError, ValueError) as error:
            if "deleted" in str(error) or "donate" in str(error):  # another call at the same time was first
                raise _gone("an array given for an input is") from error
            raise

    def memory_analysis(self) -> Any:
        """As of the program."""
        return self.program.memory_analysis()


class _InTurn:
    """A program over several devices. See `_TURN`."""

    __slots__ = ("__weakref__", "program")

    def __init__(self, program: Any) -> None:
        self.program = program

    def __call__(self, weights: Any, arguments: tuple[Any, ...], seed: Any) -> Any:
        with _TURN:
            return jax.block_until_ready(self.program(weights, arguments, seed))  # type: ignore[no-untyped-call]

    def memory_analysis(self) -> Any:
        """As of the program."""
        return self.program.memory_analysis()


def launcher(program: Any, *, arguments: Sequence[str], donated: Sequence[str], mesh: Mesh | None) -> Any:
    """What a segment calls for an XLA program: the program itself where nothing is special.

    Args:
        program: As XLA compiled it.
        arguments: Names of the segment's arguments, in order.
        donated: Of these, the ones whose memory it consumes; the program takes them apart from the others, in this order.
        mesh: Devices that it runs on together; None for one.
    """
    if donated:
        program = _Donating(program, len(arguments), tuple(arguments.index(name) for name in donated))
    return program if mesh is None else _InTurn(program)


def unwrapped(program: Any) -> Any:
    """The XLA program under a launcher."""
    while isinstance(program, (_Donating, _InTurn)):
        program = program.program
    return program
