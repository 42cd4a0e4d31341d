"""`Runtime`: the one task group, and everything wired together.

    async with Runtime() as runtime:                    asyncio or trio
        compiled = await runtime.compile("model.onnx")
        outputs = await compiled.run({"x": array})

Whatever the runtime starts (tasks, threads, actors, a client of the Hub) ends when its block is left: nothing outlives it.
"""

from __future__ import annotations

import os
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO, Self, TypeVar

import anyio
import jax
from anyio.abc import TaskGroup

from transmuter_async import logs
from transmuter_async.actors import ActorStatistics, Compiled, ModelActor, Threads
from transmuter_async.bridge import Loop, current_loop
from transmuter_async.compiler import Batching, Options, Spec, prepare
from transmuter_async.errors import ActorStopped, InputError, InvalidModel, MisuseError
from transmuter_async.graph import Model, Source, external_locations
from transmuter_async.hub import (
    HubClient,
    HubFile,
    TokenArgument,
    Variant,
    parse_reference,
)
from transmuter_async.sources import folder, is_repository, kept_small, read_fetched, read_local, told
from transmuter_async.telemetry import Telemetry

if TYPE_CHECKING:
    import onnx  # for the annotation only: protobuf is the reader's business

__all__ = ["DeviceMemory", "Runtime", "RuntimeStatistics"]

T = TypeVar("T")


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


@dataclass(frozen=True, slots=True)
class RuntimeStatistics:
    """What lives in a runtime: its actors, and loads that are under way."""

    actors: tuple[ActorStatistics, ...]
    loading: int


class Runtime:
    """Owner of actors, threads, the event bus, and the client of the Hub.

    Args:
        devices: jax devices for the models; the first one is used. None: jax's own first.
        hub: A `HubClient` to use; None makes one when it is needed. One that is not entered yet is entered, and left again.
        telemetry: A bus to emit to; None makes one, which is closed at the end.
        precision: Of float32 products where `compile` does not say: "highest" is full float32 on every platform, "platform"
            leaves it to jax.
        memory_limit: Bytes that all models together may hold on the device, weights and programs. Above it, models that nobody
            asks anything of give their programs and then their weights back, the least recently used first; both come back
            with the next call. A model in use is never touched, so the limit can be exceeded. None: no limit.
    """

    def __init__(
        self,
        *,
        devices: Sequence[jax.Device] | None = None,
        hub: HubClient | None = None,
        telemetry: Telemetry | None = None,
        precision: str = "highest",
        memory_limit: int | None = None,
    ) -> None:
        if memory_limit is not None and memory_limit < 0:
            raise ValueError(f"memory_limit={memory_limit} is negative")
        Options(precision=precision)  # refuses a wrong word now
        self.telemetry: Telemetry = Telemetry() if telemetry is None else telemetry
        self._owns_telemetry = telemetry is None
        self._devices = None if devices is None else tuple(devices)
        self._hub = hub
        self._leaves_hub = False
        self._hub_lock = anyio.Lock()
        self._precision = precision
        self._loop: Loop | None = None
        self._pid = 0
        self._group: TaskGroup | None = None
        self._closing = False
        self._left = False
        self._actors: dict[str, ModelActor] = {}
        self._threads: Threads | None = None
        self._memory_limit = memory_limit
        self._releasing = False
        self._loads: set[anyio.CancelScope] = set()
        self._loaded = anyio.Event()
        self._logs: list[logs.CompileLog] = []

    # Life cycle.

    async def __aenter__(self) -> Self:
        if self._loop is not None:
            raise MisuseError("a Runtime can be entered once; make another one")
        self._loop = current_loop()
        self._pid = os.getpid()
        self._group = anyio.create_task_group()
        await self._group.__aenter__()
        self._threads = Threads(self._loop, "transmuter-load", 2)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        assert self._group is not None
        with anyio.CancelScope(shield=True):
            await self._end()
        try:
            return await self._group.__aexit__(kind, error, trace)
        except BaseExceptionGroup as group:
            # A group of one says no more than the error itself, which callers can catch by its class.
            if len(group.exceptions) == 1:
                only = group.exceptions[0]
                if only is error:
                    return False
                raise only from only.__cause__
            raise

    async def aclose(self, *, drain: bool = False) -> None:
        """Stop: answer everyone who waits with `ActorStopped`, and end every actor. Leaving the block does the same.

        Args:
            drain: First finish the calls that were accepted; new ones are refused at once.
        """
        self._check_place()
        self._closing = True
        actors = list(self._actors.values())
        for actor in actors:
            actor.stop(drain=drain)
        for actor in actors:
            await actor.wait_stopped()

    async def _end(self) -> None:
        self._closing = True
        try:
            for actor in list(self._actors.values()):
                actor.stop()
            for actor in list(self._actors.values()):
                await actor.wait_stopped()
            for scope in list(self._loads):
                scope.cancel()
            while self._loads:
                self._loaded = anyio.Event()
                await self._loaded.wait()
            if self._hub is not None and self._leaves_hub:
                await self._hub.aclose()
            assert self._threads is not None
            self._threads.close()
            await self._threads.wait_ended()
            for log in self._logs:
                await log.aclose()
        finally:
            self._left = True
            if self._owns_telemetry:
                self.telemetry.close()

    def _check_place(self) -> None:
        if self._loop is None or self._group is None:
            raise MisuseError("the runtime was not entered: write `async with Runtime() as runtime:` around its use")
        if os.getpid() != self._pid:
            raise MisuseError(f"the runtime belongs to process {self._pid} and was used in its fork {os.getpid()}")
        if not self._loop.is_current():
            raise MisuseError(
                f"the runtime belongs to the {self._loop.backend} event loop in which it was entered, and was used from another "
                "one (or none)"
            )

    def _check(self) -> tuple[TaskGroup, Threads]:
        self._check_place()
        if self._closing:
            raise ActorStopped("the runtime was closed; enter a new one")
        assert self._group is not None
        assert self._threads is not None
        return self._group, self._threads

    # Loading.

    async def load(
        self,
        source: str | os.PathLike[str] | bytes | bytearray | memoryview | BinaryIO | onnx.ModelProto,
        *,
        revision: str | None = None,
        variant: str | None = None,
        token: TokenArgument = None,
        prepare: str = "speed",
        optimize: bool = True,
    ) -> Model:
        """Read a model. Nothing is compiled.

        Args:
            source: A path; the bytes of a file, or an open binary file; a ModelProto; `"hf://org/name@revision/path.onnx"`,
                `"org/name"`, or a local folder with one model in it. A text with one slash is a repository unless it ends like
                a model file or starts like a path (`./`, `/`, `~`).
            revision: Branch, tag or commit of a Hub source.
            variant: `"fp16"`, `"q4"`, …: which of several models of a repository or folder.
            token: Of the Hub. None: the user's; False: none.
            prepare: "speed" computes once what follows from weights alone, which may make them larger. "memory" does not: a
                quantized weight stays as it is in the file, and each call pays for making it wider.
            optimize: Off, the plain graph runs: no folding, no passes.

        Returns:
            The frozen graph with its weights, in the file's dtypes and in this process's memory; nothing on a device.

        Raises:
            InvalidModel: These are no bytes of a usable model.
            HubError: Something is not to be had from the Hub.
            MisuseError: The runtime was not entered, or is used from elsewhere.
        """
        _, threads = self._check()
        if prepare not in ("speed", "memory"):
            raise ValueError(f"prepare={prepare!r} is not one of 'speed', 'memory'")
        model = await self._answered(self._load(source, revision, variant, token, threads))
        return replace(model, optimize=optimize, prepare=prepare)

    async def _load(
        self,
        source: Any,
        revision: str | None,
        variant: str | None,
        token: TokenArgument,
        threads: Threads,
    ) -> Model:
        reference = await self._reference(source, revision, variant)
        with self.telemetry.span("transmuter.load", {"source": told(source, reference)}) as span:
            if reference is None:
                model = await threads.run(read_local, source)
            else:
                client = await self._client()
                fetched = await client.fetch_model(reference, external_locations, variant=variant, token=token)
                span.metadata["source"] = fetched.source
                try:
                    model = await threads.run(read_fetched, fetched)
                except InvalidModel:
                    # A Hub file that can't be read is not believed any more, whatever our records say of it.
                    repaired = await client.repair_model(fetched, token=token)
                    if repaired is None:
                        raise
                    model = await threads.run(read_fetched, repaired)
            span.metadata["node_count"] = model.node_count
            span.metadata["opset"] = model.opset
        return model

    async def _reference(
        self, source: Any, revision: str | None, variant: str | None
    ) -> HubFile | os.PathLike[str] | None:
        """What the Hub client has to find, None for a source that is read as it is."""
        if isinstance(source, str):
            if is_repository(source):
                return parse_reference(source, revision=revision)
        if isinstance(source, HubFile):
            return parse_reference(source, revision=revision)
        if revision is not None:
            what = repr(source) if isinstance(source, (str, os.PathLike)) else f"a {type(source).__name__}"
            raise InputError(f"revision={revision!r} was given, but {what} is no source of the Hub; leave it out")
        if isinstance(source, (str, os.PathLike)):
            assert self._threads is not None
            found = await self._threads.run(folder, source)
            if found is not None or variant is None:
                return found
        if variant is not None:
            raise InputError(
                f"variant={variant!r} chooses among the models of a repository or folder; this is one model"
            )
        return None

    async def _answered(self, work: Coroutine[Any, Any, T]) -> T:
        """`await work`, but leaving the runtime ends it."""
        scope = anyio.CancelScope()
        self._loads.add(scope)
        try:
            with scope:
                return await work
        finally:
            self._loads.discard(scope)
            if not self._loads:
                self._loaded.set()
        raise ActorStopped("the runtime was closed before it was loaded; enter a new one")

    async def _client(self) -> HubClient:
        async with self._hub_lock:
            if self._hub is None:
                self._hub = HubClient(telemetry=self.telemetry)
            if not self._leaves_hub and not self._hub.entered:
                await self._hub.__aenter__()
                self._leaves_hub = True
            return self._hub

    async def download(
        self,
        repo: str | os.PathLike[str],
        files: str | Iterable[str] | None = None,
        *,
        revision: str = "main",
        token: TokenArgument = None,
    ) -> dict[str, Path]:
        """Files of a repository, on this disk and known to be right. See `HubClient.download`."""
        self._check()
        client = await self._client()
        return await self._answered(client.download(repo, files, revision=revision, token=token))

    async def variants(
        self, repo: str | os.PathLike[str], *, revision: str = "main", token: TokenArgument = None
    ) -> tuple[Variant, ...]:
        """The ONNX files of a repository, with size and precision. See `HubClient.variants`."""
        self._check()
        client = await self._client()
        return await self._answered(client.variants(repo, revision=revision, token=token))

    # Compiling.

    async def compile(
        self,
        model: Model | str | os.PathLike[str] | bytes | bytearray | memoryview | BinaryIO | onnx.ModelProto,
        specs: Mapping[str, Spec] | None = None,
        *,
        outputs: Sequence[str] | None = None,
        static_inputs: Sequence[str] = (),
        compiler: str = "xla",
        cache_size: int = 16,
        min_segment_nodes: int = 20,
        breaks: str = "allow",
        cold: str = "compile",
        compile_after: int = 1,
        cache_dir: str | os.PathLike[str] | None = None,
        batching: Batching | None = None,
        bounds: str = "check",
        nonfinite: str = "ignore",
        precision: str | None = None,
        autotune: bool = False,
        donate: Sequence[str] = (),
        replicas: int = 1,
        max_concurrency: int = 1,
        name: str | None = None,
    ) -> Compiled:
        """Start an actor that answers calls of a model.

        Args:
            model: From `load`, or a source as `load` takes it.
            specs: A `Spec` for each input: compiled now, and kept for as long as the actor lives. Without, the first call
                compiles.
            outputs: Only these outputs; what no output needs is left out.
            static_inputs: Inputs whose value is part of a program's key.
            compiler: "xla", or "eager": every call runs in numpy.
            cache_size: Programs kept for each position of the graph, least recently used out first.
            min_segment_nodes: After a break, a run of fewer nodes is not compiled.
            breaks: "allow", or "error" to refuse a graph that breaks.
            bounds: "check" raises `IndexOutOfRange`, "clamp" takes the nearest element.
            nonfinite: "ignore"; "error" for `NonFiniteError` at the first NaN or infinity; "warn" for a `NonFiniteWarning` at the
                line that awaits the call.
            precision: As for `Runtime`, which says the default.
            max_concurrency: Calls that compute at once; each holds its slot until its outputs are ready.
            name: Of the actor, in events and errors; made from the source by default.
            cold: Where a program is missing, "compile" has the call wait for it. "interpret" answers it at once on the host,
                in numpy, while the program is compiled behind; later calls use it.
            compile_after: With `cold="interpret"`: a signature is compiled only once it was asked for so many times.
            cache_dir: Folder in which programs outlive the process; see the page on segments. None for none. It
                is a trust boundary: give it to nobody else.
            batching: Dimensions that calls are padded along, to which sizes; refused where the graph mixes rows or reads
                padding. See `Batching`.
            autotune: Not available yet.
            donate: Not available yet.
            replicas: Not available yet.

        Returns:
            A handle to the running actor; cheap, and to be shared between tasks.

        Raises:
            UnsupportedModel: Operators are missing; all are listed.
            BatchingRefused: Padding or batching would change results; the operators are named.
            InputError: Specs or names that do not fit the graph.
            BreakRefused: The graph breaks and `breaks` is "error".
            CompileError: XLA refused a program.
            MisuseError: The runtime was not entered, or an option is not available.
        """
        group, threads = self._check()
        later = {
            "autotune": autotune,
            "donate": bool(donate),
            "replicas": replicas != 1,
        }
        for option, used in later.items():
            if used:
                raise _not_yet(option)
        if max_concurrency < 1:
            raise ValueError(f"max_concurrency={max_concurrency} must be at least 1")
        if compile_after < 1:
            raise ValueError(f"compile_after={compile_after} must be at least 1")
        if compile_after > 1 and cold == "compile":
            raise MisuseError(
                f'compile_after={compile_after} has calls answered without a program: add cold="interpret"'
            )
        for option, names in (("outputs", outputs), ("static_inputs", static_inputs)):
            if isinstance(names, str):
                raise InputError(f"{option}={names!r} is one text; give a list of names, [{names!r}]")
        if name is not None and name in self._actors:
            raise MisuseError(
                f"there is an actor named {name!r} in this runtime already; close it, or take another name"
            )
        if not isinstance(model, Model):
            model = await self.load(model)
        loaded: Model = model
        options = Options(
            outputs=None if outputs is None else tuple(outputs),
            static_inputs=tuple(static_inputs),
            overrides=tuple(each for each in specs or () if each in loaded.graph.overridable),
            compiler=compiler,
            cache_size=cache_size,
            min_segment_nodes=min_segment_nodes,
            breaks=breaks,
            cold=cold,
            bounds=bounds,
            nonfinite=nonfinite,
            precision=self._precision if precision is None else precision,
            optimize=loaded.optimize,
            **kept_small(loaded),
            batching=batching,
            cache_dir=None if cache_dir is None else os.fspath(cache_dir),
        )
        device = await threads.run(self._device)
        if self._closing:
            raise ActorStopped("the runtime was closed; enter a new one")
        name = self._name(loaded.source) if name is None else name
        facts = {"source": loaded.source, "compiler": compiler, "platform": device.platform, "actor": name}
        with self.telemetry.span("transmuter.compile", facts) as span:
            actor = ModelActor(
                name,
                self.telemetry,
                lambda: prepare(loaded, options, device=device),
                source=loaded.source,
                specs=specs,
                cache_size=cache_size,
                compile_after=compile_after,
                max_concurrency=max_concurrency,
                span=span.id,
            )
            if self._memory_limit is not None:
                actor.grown = self._balance
            self._actors[name] = actor
            group.start_soon(self._serve, actor, name=f"actor {name}")
            try:
                await actor.ready.wait()
            except BaseException:
                actor.stop()  # cancelled, or the actor is ending by itself already
                raise
            compiled = Compiled(actor)
            span.metadata["graph_break"] = compiled.graph_break
        self._balance()
        return compiled

    def _balance(self) -> None:
        """Keep the memory budget: one release at a time, and again when it is done."""
        actors = sorted(self._actors.values(), key=lambda actor: actor.used)
        held = sum(actor.weight_bytes + actor.program_bytes for actor in actors)
        if self._memory_limit is None or self._releasing or held <= self._memory_limit:
            return
        newest = actors[-1]  # it has just compiled, or is about to be called
        for actor in actors:
            for what in ("programs", "weights"):
                if actor is not newest and actor.release(what, self._released):
                    self._releasing = True
                    return

    def _released(self) -> None:
        self._releasing = False
        self._balance()

    async def _serve(self, actor: ModelActor) -> None:
        try:
            await actor.serve()
        finally:
            self._actors.pop(actor.name, None)

    def _device(self) -> jax.Device:
        devices = tuple(jax.local_devices()) if self._devices is None else self._devices
        if not devices:
            raise MisuseError("devices=() leaves no device to compute on; leave it out for jax's own")
        return devices[0]

    def _name(self, source: Source) -> str:
        if source is None:
            stem = "model"
        else:
            stem = Path(source).stem if isinstance(source, str) else source[1].rpartition("/")[2]
        name, number = stem, 1
        while name in self._actors:
            number += 1
            name = f"{stem}-{number}"
        return name

    # Telling.

    async def statistics(self) -> RuntimeStatistics:
        """What lives here, with the counts of every actor."""
        _, threads = self._check()
        found = []
        for actor in list(self._actors.values()):
            try:
                found.append(await actor.statistics())
            except ActorStopped:
                continue
        return RuntimeStatistics(tuple(found), threads.unfinished)

    async def memory_statistics(self) -> tuple[DeviceMemory, ...]:
        """Memory of each device in bytes; also emitted as `transmuter.memory.stats`."""
        _, threads = self._check()
        ours: dict[Any, int] = {}
        for actor in list(self._actors.values()):
            prepared = actor.prepared
            if prepared is None:
                continue
            try:
                counts = await actor.statistics()
            except ActorStopped:
                continue
            ours[prepared.device] = ours.get(prepared.device, 0) + counts.weight_bytes + counts.program_bytes
        memory = await threads.run(_memory, self._devices, ours)
        for each in memory:
            if self.telemetry.wants("transmuter.memory.stats"):
                names = ("active_memory", "peak_memory", "cache_memory", "limit_memory")
                numbers = {name: getattr(each, name) for name in names if getattr(each, name) is not None}
                self.telemetry.emit("transmuter.memory.stats", numbers, {"device": each.device})
        return memory

    def log_compiles(self, logger: Any = None) -> None:
        """Log the events that show compile work, one line each, until the runtime is left.

        Args:
            logger: A structlog logger; `structlog.get_logger()` by default. It is called in a thread of its own.
        """
        group, _ = self._check()
        assert self._loop is not None
        log = logs.CompileLog(self.telemetry, self._loop, logger)
        self._logs.append(log)
        group.start_soon(log.serve, name="log_compiles")


def _not_yet(option: str) -> MisuseError:
    return MisuseError(f"{option} is not available in this version; leave it out")


def _memory(devices: tuple[jax.Device, ...] | None, ours: Mapping[Any, int]) -> tuple[DeviceMemory, ...]:
    found = []
    for device in tuple(jax.local_devices()) if devices is None else devices:
        stats = device.memory_stats()
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
