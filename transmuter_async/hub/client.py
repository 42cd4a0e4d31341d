"""The Hub client: repositories in, paths of verified files out.

One `HubClient` belongs to one event loop, asyncio or trio, and owns every thread that it starts. Each of its calls on a repository is a
*load*: one question for the metadata, then the files, several at once. What may happen for a file is told in `files.py`.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import anyio

from transmuter_async.errors import InvalidModel, MisuseError
from transmuter_async.hub.answers import Asked
from transmuter_async.hub.background import Home, home
from transmuter_async.hub.cache import RepoCache
from transmuter_async.hub.environment import Environment, TokenArgument
from transmuter_async.hub.errors import EntryNotFoundError, InvalidReferenceError
from transmuter_async.hub.events import Events
from transmuter_async.hub.files import Files
from transmuter_async.hub.layout import RepoFolder
from transmuter_async.hub.listing import Listing
from transmuter_async.hub.load import Load, Verify
from transmuter_async.hub.local import external_file, list_folder, pick, snapshot_links
from transmuter_async.hub.locks import Locks
from transmuter_async.hub.metadata import Metadata
from transmuter_async.hub.names import check_file, check_repo, check_revision, find_collision
from transmuter_async.hub.reference import DEFAULT_REVISION, HubFile, is_local_folder, parse_reference
from transmuter_async.hub.retry import Sleep
from transmuter_async.hub.transport import Transport
from transmuter_async.hub.variants import Variant, choose_variant, list_variants
from transmuter_async.hub.workers import Workers
from transmuter_async.telemetry import Telemetry
from transmuter_async.version import __version__

__all__ = ["FetchedModel", "HubClient"]

T = TypeVar("T")
Locations = Callable[[Path], Sequence[str]]


@dataclass(frozen=True, slots=True)
class FetchedModel:
    """A model's files on this disk.

    Attributes:
        path: The graph.
        files: The graph's and its external data's names in the repository, with their paths.
        links: Those of the paths that are links which the reader may follow, since this client has made or checked them.
        source: `("hf", repo, file)`, or the path as text for a local folder: what events call it.
        commit: Commit of the repository, `""` for a local folder.
        revision: As it was asked for, `""` for a local folder.
    """

    path: Path
    files: dict[str, Path] = field(hash=False)
    links: frozenset[Path]
    source: tuple[str, str, str] | str
    commit: str
    revision: str = ""


@dataclass(slots=True)
class _Entered:
    """What exists between entering and leaving, in the loop where the coroutines run."""

    workers: Workers
    locks: Locks
    environment: Environment
    warned: set[str] = field(default_factory=set)


class HubClient:
    """Loads files of repositories, through the cache that all Hugging Face tools share.

    An async context manager; on asyncio and on trio alike. Cancelling a call ends its downloads promptly and keeps what can be resumed.
    """

    def __init__(
        self,
        *,
        telemetry: Telemetry | None = None,
        environment: Environment | None = None,
        verify: Verify = "once",
        concurrency: int = 8,
        sleep: Sleep = anyio.sleep,
    ) -> None:
        """Makes a client. The environment variables are those of this moment.

        Args:
            telemetry: The bus for `transmuter.hub.*`.
            environment: Instead of the environment variables.
            verify: `"once"`: content that was not hashed by us before is hashed before its first use. `"always"`: at every load, also
                offline. `"never"`: the name of a blob is believed, as the official client does.
            concurrency: Files of one load that are worked on at the same time.
            sleep: Waits between attempts; tests give their own.
        """
        if concurrency < 1:
            raise InvalidReferenceError(f"concurrency={concurrency}: at least one file at a time is needed.")
        self._telemetry = Telemetry() if telemetry is None else telemetry
        self._given = environment
        self._variables = dict(os.environ) if environment is None else {}
        self._verify = verify
        self._concurrency = concurrency
        self._sleep = sleep
        self._home: Home | None = None
        self._entered: _Entered | None = None
        self._entering: anyio.Lock | None = None
        self._running: set[anyio.CancelScope] = set()
        self._idle: anyio.Event | None = None

    @property
    def entered(self) -> bool:
        """Whether the client can be used now: between entering and leaving."""
        return self._home is not None

    async def __aenter__(self) -> Self:
        if self._home is not None:
            raise MisuseError("This HubClient is entered already; make another one.")
        self._home = home()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Cancels the calls that are still running (they raise `MisuseError`), and ends the client's threads."""
        if self._home is None:
            return
        place, self._home = self._home, None
        with anyio.CancelScope(shield=True):
            if self._running:
                self._idle = anyio.Event()
                for scope in self._running:
                    scope.cancel()
                await self._idle.wait()
            if self._entered is not None:
                await place.run(self._entered.workers.aclose)
                self._entered = None
            await place.aclose()

    # -- the calls ------------------------------------------------------------------------------------------------

    async def environment(self) -> Environment:
        """What the client was told by the environment variables."""
        return (await self._run(self._enter)).environment

    async def info(
        self, repo: str | os.PathLike[str], *, revision: str = DEFAULT_REVISION, token: TokenArgument = None
    ) -> Listing:
        """The commit that a revision is at, and its files with sizes and hashes.

        Args:
            repo: `namespace/name`, or a local folder (a `Path`, or a text that starts with `./`, `/` or `~`).
            revision: Branch, tag, `refs/pr/N` or commit hash.
            token: A token; None: the user's; False: none; True: the user's, or an error.

        Raises:
            HubError: The repository, the revision or the Hub is not to be had, and nothing is saved.
        """
        return await self._run(self._info, repo, revision, token)

    async def variants(
        self, repo: str | os.PathLike[str], *, revision: str = DEFAULT_REVISION, token: TokenArgument = None
    ) -> tuple[Variant, ...]:
        """The ONNX files of a repository, with size and precision. Arguments and errors as for `info`."""
        return await self._run(self._variants, repo, revision, token)

    async def download(
        self,
        repo: str | os.PathLike[str],
        files: str | Iterable[str] | None = None,
        *,
        optional: Iterable[str] = (),
        revision: str = DEFAULT_REVISION,
        token: TokenArgument = None,
        verify: Verify | None = None,
    ) -> dict[str, Path]:
        """Files of a repository, on this disk and known to be right.

        Args:
            repo: `namespace/name`, or a local folder.
            files: Names and patterns (`"*.json"`, `"onnx/"`), None for all files.
            optional: More of them, that may be absent.
            revision: Branch, tag, `refs/pr/N` or commit hash.
            token: As for `info`.
            verify: Overrides the client's.

        Returns:
            Name in the repository → path.

        Raises:
            EntryNotFoundError: A name or pattern of `files` stands for nothing in the repository.
            HubError: Something is not to be had. The other files of the call are then cancelled.
        """
        wanted = [files] if isinstance(files, str) else None if files is None else list(files)
        return await self._run(self._download, repo, wanted, list(optional), revision, token, verify)

    async def fetch(
        self,
        reference: str | HubFile,
        *,
        revision: str | None = None,
        variant: str | None = None,
        token: TokenArgument = None,
        verify: Verify | None = None,
    ) -> Path:
        """One file: `hf://namespace/name@revision/path`, or the obvious model of a bare `namespace/name`. As `download`."""
        found = await self._run(self._fetch_model, reference, _nothing, revision, variant, token, verify)
        return found.path

    async def fetch_model(
        self,
        reference: str | HubFile | os.PathLike[str],
        external: Locations,
        *,
        revision: str | None = None,
        variant: str | None = None,
        token: TokenArgument = None,
        verify: Verify | None = None,
    ) -> FetchedModel:
        """A model's graph, and then its external data, several files at once.

        Args:
            reference: `hf://namespace/name@revision/path`, a bare `namespace/name`, or a local folder.
            external: Given the path of the graph, the distinct locations of external data in it, as written there. Runs in a thread. When
                it raises `InvalidModel`, the graph's hash is checked; if it is wrong, the graph is downloaded again, once.
            revision: Branch, tag, `refs/pr/N` or commit hash, where the reference has none.
            variant: `"fp16"`, `"q4"`, … as in `Variant.variant`.
            token: As for `info`.
            verify: Overrides the client's.

        Raises:
            InvalidModel: The graph does not parse though its hash is right, or a location leads out of the model's folder.
            HubError: Something is not to be had.
        """
        return await self._run(self._fetch_model, reference, external, revision, variant, token, verify)

    async def repair(
        self, repo: str, file: str, *, revision: str = DEFAULT_REVISION, token: TokenArgument = None
    ) -> bool:
        """For a file that was loaded and does not parse: hashes it, and downloads it again when the hash is wrong.

        Returns:
            True when it was wrong and is right now: parse it again. False when it is what the Hub has (or the Hub gives no hash).
        """
        return await self._run(self._repair, repo, file, revision, token)

    async def repair_model(self, model: FetchedModel, *, token: TokenArgument = None) -> FetchedModel | None:
        """For a model that was fetched and can't be read: hashes its files, and downloads those again that have the wrong hash.

        Returns:
            The model to read again; None when nothing of it was wrong (or it is of a local folder, or offline).

        Raises:
            HubError: A file is wrong, and another one is not to be had.
        """
        return await self._run(self._repair_model, model, token)

    # -- in the loop where the coroutines run -----------------------------------------------------------------------

    async def _run(self, function: Callable[..., Awaitable[T]], *args: object) -> T:
        if self._home is None:
            raise MisuseError("This HubClient is not entered: write `async with HubClient() as hub:`.")
        with anyio.CancelScope() as scope:
            self._running.add(scope)
            try:
                return await self._home.run(function, *args)
            finally:
                self._running.discard(scope)
                if self._idle is not None and not self._running:
                    self._idle.set()
        raise MisuseError("This HubClient was closed while it was loading something.")

    async def _enter(self) -> _Entered:
        if self._entering is None:
            self._entering = anyio.Lock()  # made here, in the loop where it is used
        async with self._entering:
            if self._entered is None:
                workers = Workers(self._concurrency + 2)
                try:
                    environment = await workers.run(self._read_environment)
                except BaseException:
                    await workers.aclose()
                    raise
                self._entered = _Entered(workers, Locks(workers), environment)
        return self._entered

    def _read_environment(self) -> Environment:
        return Environment.read(self._variables, version=__version__) if self._given is None else self._given

    @asynccontextmanager
    async def _load(
        self, repo: str, revision: str, token: TokenArgument, verify: Verify | None, *, told: str | None = None
    ) -> AsyncIterator[Files]:
        entered = await self._enter()
        environment, workers = entered.environment, entered.workers
        check_repo(repo)
        check_revision(revision)
        secret = environment.choose_token(token)
        async with Transport(environment, secret, entered.warned, connections=self._concurrency) as transport:
            load = Load(
                asked=Asked(environment.endpoint, repo, revision, None, secret),
                cache=RepoCache(RepoFolder(environment.cache, repo), workers, symlinks=environment.symlinks),
                events=Events(self._telemetry, repo, revision if told is None else told),
                transport=transport,
                workers=workers,
                locks=entered.locks,
                environment=environment,
                verify=verify or self._verify,
                sleep=self._sleep,
            )
            yield Files(load, await Metadata(load).listing())

    async def _info(self, repo: str | os.PathLike[str], revision: str, token: TokenArgument) -> Listing:
        if is_local_folder(repo):
            return await (await self._enter()).workers.run(list_folder, _folder(repo))
        async with self._load(str(repo), revision, token, None) as files:
            return files.listing

    async def _variants(self, repo: str | os.PathLike[str], revision: str, token: TokenArgument) -> tuple[Variant, ...]:
        listing = await self._info(repo, revision, token)
        return await (await self._enter()).workers.run(list_variants, listing)

    async def _download(
        self,
        repo: str | os.PathLike[str],
        wanted: list[str] | None,
        optional: list[str],
        revision: str,
        token: TokenArgument,
        verify: Verify | None,
    ) -> dict[str, Path]:
        if is_local_folder(repo):
            return await (await self._enter()).workers.run(_local_files, _folder(repo), wanted, optional)
        async with self._load(str(repo), revision, token, verify) as files:
            names = await (await self._enter()).workers.run(pick, files.listing, wanted, optional)
            return await self._obtain(files, names)

    async def _fetch_model(
        self,
        reference: str | HubFile | os.PathLike[str],
        external: Locations,
        revision: str | None,
        variant: str | None,
        token: TokenArgument,
        verify: Verify | None,
    ) -> FetchedModel:
        if not isinstance(reference, HubFile) and is_local_folder(reference):
            return await self._local_model(_folder(reference), external, variant)
        assert isinstance(reference, str | HubFile)
        asked = parse_reference(reference, revision=revision)
        workers = (await self._enter()).workers
        async with self._load(asked.repo, asked.revision, token, verify) as files:
            graph = await workers.run(choose_variant, files.listing, asked.file, variant)
            found = await self._obtain(files, [graph])
            locations = await self._locations(files, graph, found[graph], external)
            data = dict.fromkeys(external_file(graph, location) for location in locations)
            data.pop(graph, None)  # it is there, and told of, already
            found |= await self._obtain(files, list(data))
            links = await workers.run(_links, found.values())
            source = ("hf", asked.repo, graph)
            return FetchedModel(found[graph], found, links, source, files.listing.commit, asked.revision)

    async def _locations(self, files: Files, graph: str, path: Path, external: Locations) -> Sequence[str]:
        assert self._entered is not None
        try:
            return await self._entered.workers.run(external, path)
        except InvalidModel:
            if not await files.repair(graph):
                raise
        return await self._entered.workers.run(external, path)

    async def _local_model(self, folder: Path, external: Locations, variant: str | None) -> FetchedModel:
        workers = (await self._enter()).workers
        listing = await workers.run(list_folder, folder)
        graph = await workers.run(choose_variant, listing, None, variant)
        locations = await workers.run(external, folder / graph)
        names = dict.fromkeys([graph, *(external_file(graph, location) for location in locations)])
        found = {name: _local_file(folder, name, listing) for name in names}
        links = await workers.run(snapshot_links, folder, list(names))
        return FetchedModel(folder / graph, found, links, str(folder / graph), "")

    async def _repair(self, repo: str, file: str, revision: str, token: TokenArgument) -> bool:
        async with self._load(repo, revision, token, None) as files:
            return await files.repair(file)

    async def _repair_model(self, model: FetchedModel, token: TokenArgument) -> FetchedModel | None:
        if isinstance(model.source, str):
            return None
        # The same commit, even where the branch has moved on since.
        async with self._load(model.source[1], model.commit, token, None, told=model.revision) as files:
            if not any((await self._each(list(model.files), files.repair)).values()):
                return None
        links = await (await self._enter()).workers.run(_links, model.files.values())
        return replace(model, links=links)

    async def _obtain(self, files: Files, names: Sequence[str]) -> dict[str, Path]:
        """Several files of a load at once; see `_each`."""
        # There may be tens of thousands. What the listing does not have is said before anything is fetched.
        await (await self._enter()).workers.run(_check_names, files, names)
        return await self._each(names, files.obtain)

    async def _each(self, names: Sequence[str], work: Callable[[str], Awaitable[T]]) -> dict[str, T]:
        """`work` for each file of a load, several at once. The first failure cancels the others and is what is raised."""
        found: dict[str, T] = {}
        failures: list[Exception] = []
        waiting = iter(names)

        async def some(scope: anyio.CancelScope) -> None:
            try:
                for name in waiting:  # shared: each name is taken once
                    found[name] = await work(name)
            except Exception as error:
                failures.append(error)
                scope.cancel()

        async with anyio.create_task_group() as tasks:
            for _ in range(min(self._concurrency, len(names))):
                tasks.start_soon(some, tasks.cancel_scope)
        if failures:
            raise failures[0]
        return {name: found[name] for name in names}


def _check_names(files: Files, names: Sequence[str]) -> None:
    for name in names:
        files.find(name)
    collision = find_collision(names)
    if collision is not None:
        raise InvalidReferenceError(
            f"{collision[0]!r} and {collision[1]!r} are one file on a disk that ignores case or Unicode forms. Ask for one of them."
        )


def _local_files(folder: Path, wanted: list[str] | None, optional: list[str]) -> dict[str, Path]:
    listing = list_folder(folder)
    return {name: _local_file(folder, name, listing) for name in pick(listing, wanted, optional)}


def _local_file(folder: Path, name: str, listing: Listing) -> Path:
    if check_file(name) not in listing.files:
        raise EntryNotFoundError(f"{folder} has no file {name!r}.", repo=str(folder), file=name)
    return folder / name


def _links(paths: Iterable[Path]) -> frozenset[Path]:
    return frozenset(path for path in paths if path.is_symlink())


def _folder(path: str | os.PathLike[str]) -> Path:
    return Path(path).expanduser()


def _nothing(path: Path) -> Sequence[str]:
    return ()
