"""Memory of devices: what they hold, and the budget that takes programs and weights from models that nobody calls."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax

from transmuter_async.actors.model import ModelActor
from transmuter_async.compiler import start_client
from transmuter_async.errors import ActorStopped
from transmuter_async.telemetry import Telemetry

__all__ = ["Budget", "DeviceMemory", "bytes_held", "read_memory", "tell_memory"]


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Memory of one device, in bytes; None where the platform does not tell.

    Attributes:
        active_memory: In use now. On CPU: our weights and live programs.
        peak_memory: The most that was in use, by the whole process.
        cache_memory: Reserved by the allocator and free.
        limit_memory: What the process may use.
    """

    device: str
    active_memory: int
    peak_memory: int | None = None
    cache_memory: int | None = None
    limit_memory: int | None = None


class Budget:
    """Keeps what all models together hold on each device under a limit: one release at a time, and again when it is done.

    Args:
        limit: Bytes on one device.
        actors: Those of the runtime, by name.
    """

    def __init__(self, limit: int, actors: Mapping[str, ModelActor]) -> None:
        self.limit = limit
        self._actors = actors
        self._releasing = False

    def balance(self) -> None:
        """Release something where a device holds too much. On the loop."""
        if self._releasing:
            return
        by_device: dict[jax.Device, list[ModelActor]] = {}
        for actor in sorted(self._actors.values(), key=lambda actor: actor.used):
            for device in () if actor.prepared is None else actor.prepared.placement.devices:
                by_device.setdefault(device, []).append(actor)
        for actors in by_device.values():
            if sum(actor.weight_bytes + actor.program_bytes for actor in actors) > self.limit:
                for actor in actors[:-1]:  # the last one has just compiled, or is about to be called
                    for what in ("programs", "weights"):
                        if actor.release(what, self._released):
                            self._releasing = True
                            return

    def _released(self) -> None:
        self._releasing = False
        self.balance()


async def bytes_held(actors: Iterable[ModelActor]) -> dict[jax.Device, int]:
    """Bytes of weights and programs of these actors on each device. Asks their threads."""
    held: dict[jax.Device, int] = {}
    for actor in actors:
        prepared = actor.prepared
        if prepared is None:
            continue
        try:
            counts = await actor.statistics()
        except ActorStopped:
            continue
        for device in prepared.placement.devices:
            held[device] = held.get(device, 0) + counts.weight_bytes + counts.program_bytes
    return held


def read_memory(devices: tuple[jax.Device, ...] | None, ours: Mapping[jax.Device, int]) -> tuple[DeviceMemory, ...]:
    """Memory of each device as the platform tells it, else what is ours. May wait for the device: for a thread."""
    start_client()
    found = []
    for device in tuple(jax.local_devices()) if devices is None else devices:
        stats: Mapping[str, Any] | None = device.memory_stats()
        if stats is None:
            found.append(DeviceMemory(str(device), ours.get(device, 0)))
            continue
        in_use = int(stats.get("bytes_in_use", 0))
        reserved = stats.get("pool_bytes", stats.get("bytes_reserved"))
        found.append(
            DeviceMemory(
                str(device),
                in_use,
                stats.get("peak_bytes_in_use"),
                None if reserved is None else max(0, int(reserved) - in_use),
                stats.get("bytes_limit"),
            )
        )
    return tuple(found)


def tell_memory(telemetry: Telemetry, memory: Iterable[DeviceMemory]) -> None:
    """Emit `transmuter.memory.stats` for each device."""
    for each in memory:
        if telemetry.wants("transmuter.memory.stats"):
            names = ("active_memory", "peak_memory", "cache_memory", "limit_memory")
            numbers = {name: getattr(each, name) for name in names if getattr(each, name) is not None}
            telemetry.emit("transmuter.memory.stats", numbers, {"device": each.device})
