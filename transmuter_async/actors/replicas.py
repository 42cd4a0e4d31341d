"""Several actors of one model, each on a device of its own, behind one handle.

An actor stays what it is: it owns its weights, its programs and its threads, and shares none of them. What the replicas
share is read only: the graph after passes and folding, and the proof for its padding. The handle sends each call to one of
them, the least busy one, and asks all of them where a question is about all.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import anyio
import jax

from transmuter_async.actors.handle import Compiled, Outputs
from transmuter_async.actors.messages import ActorStatistics
from transmuter_async.actors.model import ModelActor
from transmuter_async.actors.reply import again
from transmuter_async.compiler import (
    CacheStatistics,
    Explanation,
    Options,
    Placement,
    PositionStatistics,
    Prepared,
    Why,
    prepare,
    replicate,
)
from transmuter_async.errors import ActorStopped
from transmuter_async.graph import Model

__all__ = ["Preparation", "ReplicaStatistics", "Replicas", "replica_names"]


def replica_names(name: str, count: int) -> tuple[str, ...]:
    """Names of the actors of a model: its own, or for several of them one with the number of each."""
    return (name,) if count == 1 else tuple(f"{name}[{index}]" for index in range(count))


class Preparation:
    """Prepares a model once for all of its replicas. Called in their compile threads, in any order.

    Args:
        model: As loaded.
        options: Of all replicas.
        find_break: Look for breaks over the declared dimensions.
        sole: Nobody else needs the model; see `prepare`.
    """

    def __init__(self, model: Model, options: Options, *, find_break: bool, sole: bool = False) -> None:
        self._model = model
        self._options = options
        self._find_break = find_break
        self._sole = sole
        self._lock = threading.Lock()
        self._first: Prepared | None = None
        self._error: BaseException | None = None

    def on(self, placement: Placement) -> Prepared:
        """The prepared model for one replica; whoever comes first does the work, the others wait for it.

        Raises:
            TransmuterError: As `prepare` raises it, for every replica.
        """
        with self._lock:
            if self._error is not None:
                raise again(self._error)
            if self._first is not None:
                return replicate(self._first, placement)
            try:
                prepared = prepare(self._model, self._options, placement=placement, sole=self._sole)
                if self._find_break:
                    prepared.find_break()
            except BaseException as error:
                self._error = error
                raise
            self._first, self._model = prepared, prepared.model  # whose weights other models may have, too
            return prepared


@dataclass(frozen=True, slots=True)
class ReplicaStatistics(ActorStatistics):
    """Counts of all replicas together: sums, also of `peak_running`, which each reached at a time of its own.

    Attributes:
        replicas: Those of each, in the order of the devices. One that is just starting again is left out.
    """

    replicas: tuple[ActorStatistics, ...] = ()


class Replicas(Compiled):
    """The handle of a model that runs on several devices; see `Compiled` for what it answers.

    A call goes to the replica with the fewest calls, the first of several. One that starts again after a crash is passed
    over while another one runs. A call that brings back a donated input goes where that lives, so that nothing is moved.
    """

    __slots__ = ("_handles", "_lock", "_name", "_on_way")

    def __init__(self, name: str, actors: Sequence[ModelActor]) -> None:
        super().__init__(actors[0])
        self._name = name
        self._handles = tuple(Compiled(actor) for actor in actors)
        self._on_way = [0] * len(actors)  # calls that were sent and are not answered
        self._lock = threading.Lock()  # `call_from_thread` sends from any thread

    @property
    def name(self) -> str:
        """The name of the model; each actor's has its number in brackets."""
        return self._name

    @property
    def graph_break(self) -> bool | None:
        """Whether the graph breaks at a value that is only known when it runs; None while that is not known."""
        found = {handle.graph_break for handle in self._handles}
        return True if True in found else False if False in found else None

    @property
    def state(self) -> str:
        """That of the replica which is best off: `"running"` while one of them runs."""
        return self._actors[min(range(len(self._handles)), key=self._rank)].state

    @property
    def devices(self) -> tuple[jax.Device, ...]:
        """Of the replicas, in their order."""
        return tuple(handle._prepared.device for handle in self._handles)

    @property
    def _actors(self) -> tuple[ModelActor, ...]:
        return tuple(handle._actor for handle in self._handles)

    # Which one.

    def _rank(self, index: int) -> tuple[int, int, int]:
        actor = self._handles[index]._actor
        state = 0 if actor.state == "running" else 1 if actor.state in ("starting", "restarting") else 2
        return state, max(actor.load, self._on_way[index]), index

    def _home(self, inputs: Mapping[str, Any]) -> int | None:
        """The replica on whose device the donated inputs are, if it still runs."""
        held: dict[int, int] = {}
        for name in self._prepared.options.donate:
            value = inputs.get(name)
            if isinstance(value, jax.Array) and len(value.sharding.device_set) == 1:
                for index, handle in enumerate(self._handles):
                    if handle._prepared.device in value.sharding.device_set and self._rank(index)[0] < 2:
                        held[index] = held.get(index, 0) + value.nbytes
        return max(held, key=held.__getitem__) if held else None

    def _which(self, inputs: Mapping[str, Any]) -> int:
        home = self._home(inputs)
        return min(range(len(self._handles)), key=self._rank) if home is None else home

    def _send(self, inputs: Mapping[str, Any]) -> int:
        with self._lock:
            index = self._which(inputs)
            self._on_way[index] += 1
            return index

    def _left(self, index: int) -> None:
        with self._lock:
            self._on_way[index] -= 1

    # Calls.

    def run(
        self,
        inputs: Mapping[str, Any],
        *,
        device: bool = False,
        copy: bool | None = None,
        seed: int | None = None,
        timeout: float | None = None,
    ) -> Coroutine[Any, Any, Outputs]:
        """Answer one call, on the least busy device. See `Compiled.run`."""
        return self._routed(Compiled.run, inputs, copy, {"device": device, "seed": seed, "timeout": timeout})

    def run_nowait(
        self,
        inputs: Mapping[str, Any],
        *,
        device: bool = False,
        copy: bool | None = None,
        seed: int | None = None,
        timeout: float | None = None,
    ) -> Coroutine[Any, Any, Outputs]:
        """As `run`, but never waits for room.

        Raises:
            Overloaded: The mailbox of the least busy replica is full.
        """
        return self._routed(Compiled.run_nowait, inputs, copy, {"device": device, "seed": seed, "timeout": timeout})

    def _routed(
        self,
        method: Callable[..., Coroutine[Any, Any, Outputs]],
        inputs: Mapping[str, Any],
        copy: bool | None,
        options: Mapping[str, Any],
    ) -> Coroutine[Any, Any, Outputs]:
        try:
            taken = self._prepared.take_inputs(inputs, copy)  # now; the coroutine may start later
        except Exception:  # found again, and told, where it is awaited
            return method(self._handles[0], inputs, copy=copy, **options)
        return self._run_one(method, taken, options)

    async def _run_one(
        self, method: Callable[..., Coroutine[Any, Any, Outputs]], taken: dict[str, Any], options: Mapping[str, Any]
    ) -> Outputs:
        index = self._send(taken)
        try:
            return await method(self._handles[index], taken, copy=False, **options)
        finally:
            self._left(index)

    def call_from_thread(
        self,
        inputs: Mapping[str, Any],
        *,
        device: bool = False,
        copy: bool | None = None,
        seed: int | None = None,
        timeout: float | None = None,
    ) -> Outputs:
        """`run` for code that is not async. See `Compiled.call_from_thread`."""
        thread = threading.current_thread()
        own = next((handle for handle in self._handles if handle._actor.owns_thread(thread)), None)
        options: dict[str, Any] = {"device": device, "seed": seed, "timeout": timeout}
        if own is not None:  # it refuses
            return own.call_from_thread(inputs, copy=copy, **options)
        try:
            taken = self._prepared.take_inputs(inputs, copy)
        except Exception:  # found again, and told
            return self._handles[0].call_from_thread(inputs, copy=copy, **options)
        index = self._send(taken)
        try:
            return self._handles[index].call_from_thread(taken, copy=False, **options)
        finally:
            self._left(index)

    # Questions.

    async def warm(self, specs: Mapping[str, Any] | Iterable[Mapping[str, Any]]) -> None:
        """Compile signatures on every replica ahead of traffic. See `Compiled.warm`."""
        signatures = (specs,) if isinstance(specs, Mapping) else tuple(specs)
        await self._each(lambda handle: handle.warm(signatures))

    async def why(self, inputs: Mapping[str, Any]) -> Why:
        """As of the replica that a call of these inputs would go to now. See `Compiled.why`."""
        return await self._handles[self._which(inputs)].why(inputs)

    async def explain(self, *, verbose: bool = False) -> Explanation:
        """As of the replica that holds the most programs; breaks are the same for all. See `Compiled.explain`."""
        found: dict[int, Explanation] = await self._each(lambda handle: handle.explain(verbose=verbose), some=True)
        fullest = max(found, key=lambda index: (len(found[index].segments), -index))
        names = ", ".join(map(str, self.devices))
        note = f"{len(self._handles)} replicas, on {names}; what follows is that of {self.devices[fullest]}."
        return replace(found[fullest], notes=(note, *found[fullest].notes))

    async def statistics(self) -> ReplicaStatistics:
        """Counts of all replicas together, and of each. See `Compiled.statistics`."""
        found = await self._each(Compiled.statistics, some=True)
        return _summed(self._name, self.state, [found[index] for index in sorted(found)])

    async def clear_cache(self) -> None:
        """Drop every compiled program of every replica."""
        await self._each(Compiled.clear_cache)

    async def aclose(self) -> None:
        """End all replicas. See `Compiled.aclose`."""
        for actor in self._actors:
            actor.check_place()
        for actor in self._actors:
            actor.stop()
        for actor in self._actors:
            await actor.wait_stopped()

    async def _each(self, ask: Callable[[Compiled], Coroutine[Any, Any, Any]], *, some: bool = False) -> dict[int, Any]:
        """The answers of all replicas by number. The first error is raised once all have answered.

        Args:
            ask: Asks one.
            some: Leave out those that start again, or have ended, where others answer.
        """
        answers: dict[int, Any] = {}
        errors: list[Exception] = []

        async def one(index: int) -> None:
            try:
                answers[index] = await ask(self._handles[index])
            except Exception as error:
                errors.append(error)

        async with anyio.create_task_group() as group:
            for index in range(len(self._handles)):
                group.start_soon(one, index)
        if errors and not (some and answers and all(isinstance(error, ActorStopped) for error in errors)):
            raise errors[0]
        return answers


_TOLD = ("name", "state", "cache", "mailbox", "replicas")


def _summed(name: str, state: str, each: Sequence[ActorStatistics]) -> ReplicaStatistics:
    numbers = {
        field.name: sum(getattr(counts, field.name) for counts in each)
        for field in fields(ActorStatistics)
        if field.name not in _TOLD
    }
    return ReplicaStatistics(
        name=name,
        state=state,
        cache=_summed_cache([counts.cache for counts in each]),
        mailbox=sum(counts.mailbox for counts in each),
        replicas=tuple(each),
        **numbers,
    )


def _summed_cache(each: Sequence[CacheStatistics]) -> CacheStatistics:
    places: dict[tuple[Any, ...], list[PositionStatistics]] = {}
    for counts in each:
        for row in counts.positions:
            places.setdefault(row.place, []).append(row)
    return CacheStatistics(
        **{
            name: sum(getattr(c, name) for c in each)
            for name in ("segments", "programs", "kept", "hits", "misses", "evictions")
        },
        positions=tuple(
            replace(
                rows[0], **{n: sum(getattr(r, n) for r in rows) for n in ("segments", "hits", "misses", "evictions")}
            )
            for rows in places.values()
        ),
        made=tuple(row for counts in each for row in counts.made),
    )
