"""`Runtime`: the one task group, and everything wired together.

    async with Runtime() as runtime:                    asyncio or trio
        compiled = await runtime.compile("model.onnx")
        outputs = await compiled.run({"x": array})

Whatever the runtime starts (tasks, threads, actors, a client of the Hub) ends when its block is left: nothing outlives it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO, Self, TypeVar

import anyio
import jax
from anyio.abc import TaskGroup

from transmuter_async import logs
from transmuter_async.actors import (
    ActorStatistics,
    Budget,
    Compiled,
    DeviceMemory,
    ModelActor,
    Preparation,
    Replicas,
    Threads,
    bytes_held,
    read_memory,
    replica_names,
    tell_memory,
)
from transmuter_async.bridge import Loop, current_loop
from transmuter_async.compiler import (
    Batching,
    Options,
    Spec,
    check_count,
    check_devices,
    check_together,
    lay_out_in_place,
    place,
)
from transmuter_async.errors import ActorStopped, InputError, InvalidModel, MisuseError
from transmuter_async.graph import Model, Source, external_locations
from transmuter_async.hub import (
    HubClient,
    HubFile,
    TokenArgument,
    Variant,
    parse_reference,
)
from transmuter_async.serving import (
    ServingActor,
    ServingOptions,
    Starting,
    check_compiled,
    close_servings,
    start_serving,
)
from transmuter_async.sources import folder, is_repository, kept_small, read_fetched, read_local, stem, told
from transmuter_async.telemetry import Telemetry

if TYPE_CHECKING:
    import onnx  # for the annotation only: protobuf is the reader's business

__all__ = ["DeviceMemory", "Runtime", "RuntimeStatistics"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RuntimeStatistics:
    """What lives in a runtime: its actors, and loads that are under way."""

    actors: tuple[ActorStatistics, ...]
    loading: int


class Runtime:
    """Owner of actors, threads, the event bus, and the client of the Hub.

    Args:
        devices: jax devices for the models; one that asks for a single device gets the first. None: all that jax has here.
        hub: A `HubClient` to use; None makes one when it is needed. One that is not entered yet is entered, and left again.
        telemetry: A bus to emit to; None makes one, which is closed at the end.
        precision: Of float32 products where `compile` does not say: "highest" is full float32 on every platform, "platform"
            leaves it to jax.
        memory_limit: Bytes that all models together may hold on each device, weights and programs. Above it, models that nobody
            asks anything of give their programs and then their weights back, the least recently used first; both come back
            with the next call. A model in use is never touched, so the limit can be exceeded. None: no limit.
        threads: Threads in which programs compute on the CPU, and programs that are compiled at once. The process has one such
            pool, made when jax is first used, so the first model must be compiled before anything else uses jax; else `compile`
            raises. See the page on speed. None: one for each core, or what `NPROC` in the environment says.

    Raises:
        TypeError: `threads` is no whole number.
        ValueError: A number below what makes sense, or an unknown `precision`.
    """

    def __init__(
        self,
        *,
        devices: Sequence[jax.Device] | None = None,
        hub: HubClient | None = None,
        telemetry: Telemetry | None = None,
        precision: str = "highest",
        memory_limit: int | None = None,
        threads: int | None = None,
    ) -> None:
        if memory_limit is not None and memory_limit < 0:
            raise ValueError(f"memory_limit={memory_limit} is negative")
        if threads is not None:
            check_count("threads", threads)
        Options(precision=precision)  # refuses a wrong word now
        self.telemetry: Telemetry = Telemetry() if telemetry is None else telemetry
        self._owns_telemetry = telemetry is None
        self._devices = check_devices(devices)
        self._hub = hub
        self._leaves_hub = False
        self._hub_lock = anyio.Lock()
        self._precision = precision
        self._cpu_threads = threads
        self._loop: Loop | None = None
        self._pid = 0
        self._group: TaskGroup | None = None
        self._closing = False
        self._left = False
        self._actors: dict[str, ModelActor] = {}
        self._servings: dict[str, ServingActor] = {}
        self._threads: Threads | None = None
        self._budget = None if memory_limit is None else Budget(memory_limit, self._actors)
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
        await close_servings(list(self._servings.values()), drain=drain)  # they are in front of the models
        actors = list(self._actors.values())
        for actor in actors:
            actor.stop(drain=drain)
        for actor in actors:
            await actor.wait_stopped()

    async def _end(self) -> None:
        self._closing = True
        try:
            await close_servings(list(self._servings.values()))
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
            The frozen graph with its weights, in the file's dtypes and in this process's memory; nothing on a device. Those of
            `Gemm`, of recurrent layers and of convolutions may be views of memory that lies as programs read it.

        Raises:
            InvalidModel: These are no bytes of a usable model.
            HubError: Something is not to be had from the Hub.
            MisuseError: The runtime was not entered, or is used from elsewhere.
        """
        _, threads = self._check()
        if prepare not in ("speed", "memory"):
            raise ValueError(f"prepare={prepare!r} is not one of 'speed', 'memory'")
        model = await self._answered(self._load(source, revision, variant, token, threads, lays_out=optimize))
        return replace(model, optimize=optimize, prepare=prepare)

    async def _load(
        self,
        source: Any,
        revision: str | None,
        variant: str | None,
        token: TokenArgument,
        threads: Threads,
        *,
        lays_out: bool,
    ) -> Model:
        def read(how: Callable[[Any], Model], source: Any) -> Model:
            model = how(source)
            if lays_out:  # now, since whoever has the model keeps its weights
                lay_out_in_place(model.graph)
            return model

        reference = await self._reference(source, revision, variant)
        with self.telemetry.span("transmuter.load", {"source": told(source, reference)}) as span:
            if reference is None:
                model = await threads.run(read, read_local, source)
            else:
                client = await self._client()
                fetched = await client.fetch_model(reference, external_locations, variant=variant, token=token)
                span.metadata["source"] = fetched.source
                try:
                    model = await threads.run(read, read_fetched, fetched)
                except InvalidModel:
                    # A Hub file that can't be read is not believed any more, whatever our records say of it.
                    repaired = await client.repair_model(fetched, token=token)
                    if repaired is None:
                        raise
                    model = await threads.run(read, read_fetched, repaired)
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
        float16: str | None = None,
        autotune: bool = False,
        donate: Sequence[str] = (),
        replicas: int = 1,
        sharding: str | None = None,
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
            float16: What programs compute the float16 of a graph in. "float32": weights are widened once, and results are rounded
                where they leave a program and where an operator tells something of them. "float16": each operator
                rounds its results. Default: float32 on CPUs, which have no float16 arithmetic, unless the model was loaded with
                `optimize=False`. See the page on lowering.
            max_concurrency: Calls that compute at once on each device; each holds its slot until its outputs are ready.
            name: Of the actor, in events and errors; made from the source by default.
            cold: Where a program is missing, "compile" has the call wait for it. "interpret" answers it at once on the host,
                in numpy, while the program is compiled behind; later calls use it.
            compile_after: With `cold="interpret"`: a signature is compiled only once it was asked for so many times.
            cache_dir: Folder in which programs outlive the process; see the page on segments. None for none. It
                is a trust boundary: give it to nobody else.
            batching: Dimensions that calls are padded along, to which sizes; refused where the graph mixes rows or reads
                padding. See `Batching`.
            autotune: Each program is compiled in a few other ways behind it and timed next to it; the fastest of those with the
                same results is used from then on, and is what `cache_dir` keeps. No call waits for that; a compile for `specs` and
                `warm` do. `explain(verbose=True)` tells what was measured; see the page on lowering.
            donate: Inputs whose memory may become that of an output: state that a call is given and the next one is given anew.
                A jax array given for one of them is consumed.
            replicas: Actors, each with the weights on a device of its own, behind one handle.
            sharding: "batch" splits the rows of each call over all devices; it needs `batching` with a batch dimension, and a
                graph without breaks. See the page on devices.

        Returns:
            A handle to the running actor; cheap, and to be shared between tasks.

        Raises:
            UnsupportedModel: Operators are missing; all are listed.
            BatchingRefused: Padding or batching would change results; the operators are named.
            InputError: Specs or names that do not fit the graph.
            BreakRefused: The graph breaks and `breaks` is "error".
            CompileError: XLA refused a program.
            MisuseError: The runtime was not entered, options that exclude each other, or too few devices.
        """
        group, threads = self._check()
        check_together(
            {"max_concurrency": max_concurrency, "compile_after": compile_after, "replicas": replicas},
            {"outputs": () if outputs is None else outputs, "static_inputs": static_inputs, "donate": donate},
            cold=cold,
            sharding=sharding,
        )
        self._check_name(name)
        loaded, sole = model, False
        if not isinstance(loaded, Model):
            loaded, sole = await self._answered(self._load(model, None, None, None, threads, lays_out=False)), True
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
            float16=float16,
            optimize=loaded.optimize,
            **kept_small(loaded),
            batching=batching,
            sharding=sharding,
            donate=tuple(donate),
            autotune=autotune,
            cache_dir=None if cache_dir is None else os.fspath(cache_dir),
        )
        where = partial(place, self._devices, replicas=replicas, sharding=sharding, threads=self._cpu_threads)
        places = await threads.run(where)
        if self._closing:
            raise ActorStopped("the runtime was closed; enter a new one")
        self._check_name(name)  # again: there were waits
        name = self._name(loaded.source) if name is None else name
        finds = specs is None and compiler != "eager"
        preparation = Preparation(loaded, options, find_break=finds, sole=sole)
        devices = {"devices": tuple(map(str, places))} if len(places) > 1 or sharding is not None else {}
        facts = {"source": loaded.source, "compiler": compiler, "platform": places[0].device.platform, "actor": name}
        with self.telemetry.span("transmuter.compile", {**facts, **devices}) as span:
            actors = []
            for spot, each in zip(places, replica_names(name, len(places)), strict=True):
                actor = ModelActor(
                    each,
                    self.telemetry,
                    partial(preparation.on, spot),
                    source=loaded.source,
                    specs=specs,
                    cache_size=cache_size,
                    compile_after=compile_after,
                    max_concurrency=max_concurrency,
                    span=span.id,
                    compiling=self._cpu_threads,
                )
                if devices:
                    actor.tell_device(str(spot))
                if self._budget is not None:
                    actor.grown = self._budget.balance
                self._actors[each] = actor
                actors.append(actor)
                group.start_soon(self._serve, actor, name=f"actor {each}")
            try:
                for actor in actors:
                    await actor.ready.wait()
            except BaseException:
                for actor in actors:
                    actor.stop()  # cancelled, or one is ending by itself already
                raise
            compiled = Compiled(actors[0]) if len(actors) == 1 else Replicas(name, actors)
            span.metadata["graph_break"] = compiled.graph_break
        if self._budget is not None:
            self._budget.balance()
        return compiled

    async def _serve(self, actor: ModelActor) -> None:
        try:
            await actor.serve()
        finally:
            self._actors.pop(actor.name, None)

    def _check_name(self, name: str | None) -> None:
        if name is not None and self._taken(name):
            raise MisuseError(
                f"there is an actor named {name!r} in this runtime already; close it, or take another name"
            )

    def _taken(self, name: str) -> bool:
        return any(each in self._actors for each in (*replica_names(name, 1), *replica_names(name, 2))) or name in self._servings

    def _name(self, source: Source) -> str:
        name, number = stem(source), 1
        while self._taken(name):
            number += 1
            name = f"{stem(source)}-{number}"
        return name

    # Serving.

    def serve(
        self,
        compiled: Compiled,
        *,
        batch_size: int | Sequence[int] | None = None,
        batch_timeout: float = 0.005,
        max_padded: int | None = None,
        queue_size: int = 1024,
        timeout: float | None = None,
        concurrency: int | None = None,
        name: str | None = None,
    ) -> Starting:
        """Start a batch worker in front of a model: `serving = await runtime.serve(compiled)`, or as `async with`.

        Args:
            compiled: The model. Its `batching` says which dimension is the batch and what is padded; without, the first
                dimension that the inputs share by name.
            batch_size: Rows of the largest batch; programs are compiled for powers of two up to it. A sequence gives the
                sizes to compile for. None: the largest bucket of the batch dimension, else 32.
            batch_timeout: Seconds that a row waits for others while the model is busy and could take one more batch. An idle
                model takes what is there at once.
            max_padded: Elements of a batch after padding: rows × padded sizes of a row (tokens, for text). None: no bound.
            queue_size: Rows that may wait; `run` waits for room, `run_nowait` is refused. Those of `map` fill three quarters
                of it at most.
            timeout: Seconds until a caller loses patience, where `run` does not say. Compiles do not count.
            concurrency: Batches in flight; None: as many calls as the model computes at once.
            name: Of the serving, in events and errors.

        Returns:
            What gives the `Serving` when it is awaited or entered. Then it raises:

        Raises:
            BatchingRefused: The graph mixes the rows of a batch; operators are named.
            InputError: No dimension can be the batch, or the sizes do not fit the buckets or the cache of programs.
            ValueError, TypeError: A number that makes no sense.
            TypeError: At once: this is no compiled model.
            MisuseError: The runtime was not entered, or the name is taken.
            ActorStopped: The runtime or the model was closed.
        """
        check_compiled(compiled)
        options = ServingOptions(batch_size, batch_timeout, max_padded, queue_size, timeout, concurrency)
        return Starting(lambda: self._start_serving(compiled, options, name))

    async def _start_serving(self, compiled: Compiled, options: ServingOptions, name: str | None) -> ServingActor:
        group, _ = self._check()
        found, number = f"{compiled.name}-serving" if name is None else name, 1
        while found in self._servings or self._taken(found):
            if name is not None:
                raise MisuseError(f"there is an actor named {name!r} in this runtime already; close it, or take another name")
            number += 1
            found = f"{compiled.name}-serving-{number}"
        return await start_serving(group, self.telemetry, self._servings, compiled, options, found)

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
        memory = await threads.run(read_memory, self._devices, await bytes_held(list(self._actors.values())))
        tell_memory(self.telemetry, memory)
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
