"""What `transmuter cache ls | verify | rm | path` do: look at the cache as a whole, and clean it.

Plain functions that block; they work on what any tool has put there.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from filelock import FileLock, Timeout

from transmuter_async.hub.disk import RepoDisk
from transmuter_async.hub.environment import Environment
from transmuter_async.hub.errors import InvalidReferenceError, LocalEntryNotFoundError
from transmuter_async.hub.layout import RepoFolder
from transmuter_async.hub.listing import Listing, parse_official_tree, parse_saved
from transmuter_async.hub.names import check_file, check_repo, check_revision, is_commit, is_etag
from transmuter_async.hub.partial import DEAD_AFTER
from transmuter_async.hub.reference import DEFAULT_REVISION
from transmuter_async.hub.workers import Stop

__all__ = [
    "CachedFile",
    "CachedRepo",
    "CachedRevision",
    "Removed",
    "Verified",
    "cache_path",
    "list_cache",
    "remove_from_cache",
    "verify_cache",
]

_PREFIX = "models--"


@dataclass(frozen=True, slots=True)
class CachedFile:
    """A file of a snapshot.

    Attributes:
        file: Name in the repository.
        size: Bytes.
        etag: Hash that its blob's name claims, or that our record has; None for a file without either.
        checked: Whether we have hashed it, and it has not changed since.
    """

    file: str
    size: int
    etag: str | None
    checked: bool


@dataclass(frozen=True, slots=True)
class CachedRevision:
    """A commit of which files are cached.

    Attributes:
        commit: Its hash.
        refs: Branches and tags that are at it, as last seen.
        files: Its files that are there.
    """

    commit: str
    refs: tuple[str, ...]
    files: tuple[CachedFile, ...]


@dataclass(frozen=True, slots=True)
class CachedRepo:
    """A model repository in the cache.

    Attributes:
        repo: `namespace/name`.
        folder: Its folder.
        size: Bytes of its contents, each counted once.
        partial: Bytes of unfinished downloads.
        revisions: Its commits.
    """

    repo: str
    folder: Path
    size: int
    partial: int
    revisions: tuple[CachedRevision, ...]


@dataclass(frozen=True, slots=True)
class Verified:
    """What the check of one content found.

    Attributes:
        repo: `namespace/name`.
        file: A name that it has in the repository; its hash where no snapshot has it.
        path: Where it lies.
        result: `"right"`; `"wrong"`: it is downloaded again at the next load; `"unknown"`: nothing says which hash it must have.
        expected: The hash it must have, None when unknown.
    """

    repo: str
    file: str
    path: Path
    result: Literal["right", "wrong", "unknown"]
    expected: str | None


@dataclass(frozen=True, slots=True)
class Removed:
    """What was removed.

    Attributes:
        size: Bytes that are free now.
        files: Number of contents.
        kept: Contents that stay because somebody is loading them just now.
    """

    size: int
    files: int
    kept: int


def list_cache(cache: Path | None = None, repo: str | None = None) -> tuple[CachedRepo, ...]:
    """The repositories in the cache.

    Args:
        cache: Root of the cache; by default where the environment variables say.
        repo: Only this one.

    Raises:
        LocalEntryNotFoundError: `repo` is not in the cache.
    """
    return tuple(_describe(folder) for folder in _folders(cache, repo))


def verify_cache(
    cache: Path | None = None,
    repo: str | None = None,
    *,
    report: Callable[[Verified], object] | None = None,
    stop: Stop | None = None,
) -> tuple[Verified, ...]:
    """Hashes every content, once. What is right is recorded, what is wrong loses its record, so that the next load replaces it.

    Args:
        cache: Root of the cache; by default where the environment variables say.
        repo: Only this one.
        report: Called with each result as it is found.
        stop: Set from elsewhere, it ends the check with `Stopped` (within a MiB).

    Raises:
        LocalEntryNotFoundError: `repo` is not in the cache.
    """
    results: list[Verified] = []
    for folder in _folders(cache, repo):
        for result in _verify(folder, Stop() if stop is None else stop):
            results.append(result)
            if report is not None:
                report(result)
    return tuple(results)


def remove_from_cache(repo: str, revision: str | None = None, *, cache: Path | None = None) -> Removed:
    """Removes a repository, or a revision of it and what only that one needs.

    Args:
        repo: `namespace/name`.
        revision: Branch, tag or commit; None for all of the repository.
        cache: Root of the cache; by default where the environment variables say.

    Raises:
        LocalEntryNotFoundError: It is not in the cache.
    """
    folder = _folder(cache, repo)
    if not folder.root.is_dir():
        raise LocalEntryNotFoundError(f"{repo} is not in the cache {folder.cache}.", repo=repo)
    commits = [path.name for path in _listdir(folder.snapshots)] if revision is None else [_commit(folder, revision)]
    for path in [*_files_below(folder.root / "refs"), *_files_below(folder.records / "heads")]:
        if revision is None or _text(path) in commits:
            path.unlink(missing_ok=True)
    size = files = kept = 0
    for commit in commits:
        for pointer in _files_below(folder.snapshots / commit):
            if not pointer.is_symlink():
                size, files = size + pointer.stat().st_size, files + 1
        shutil.rmtree(folder.snapshots / commit, ignore_errors=True)
        shutil.rmtree(folder.records / "etags" / commit, ignore_errors=True)
        folder.info(commit).unlink(missing_ok=True)
    needed = {_target(path) for path in _files_below(folder.snapshots)}
    for blob in _listdir(folder.blobs):
        if blob.name.endswith(".incomplete"):
            if revision is None and _is_dead(blob):
                size += blob.lstat().st_size
                blob.unlink(missing_ok=True)
        elif os.path.normpath(blob) not in needed and is_etag(blob.name):
            freed = 0 if blob.is_symlink() else blob.stat().st_size  # the shared store is not ours
            if _remove_blob(folder, blob):
                size, files = size + freed, files + 1
            else:
                kept += 1
    if revision is None and not kept and not any(blob.name.endswith(".incomplete") for blob in _listdir(folder.blobs)):
        shutil.rmtree(folder.root, ignore_errors=True)
    return Removed(size, files, kept)


def cache_path(
    repo: str | None = None, file: str | None = None, revision: str = DEFAULT_REVISION, *, cache: Path | None = None
) -> Path:
    """Where something lies: the cache, a repository's snapshot, or a file of it. Asks nobody, checks nothing.

    Raises:
        LocalEntryNotFoundError: It is not in the cache.
    """
    if repo is None:
        return _root(cache)
    folder = _folder(cache, repo)
    snapshot = folder.snapshots / _commit(folder, revision)
    path = snapshot if file is None else folder.pointer(snapshot.name, check_file(file))
    if not path.exists():
        raise LocalEntryNotFoundError(
            f"{repo}@{revision}{'' if file is None else '/' + file} is not in the cache {folder.cache}.",
            repo=repo,
            file=file or "",
        )
    return path


def _root(cache: Path | None) -> Path:
    return Environment.read().cache if cache is None else cache


def _folder(cache: Path | None, repo: str) -> RepoFolder:
    return RepoFolder(_root(cache), check_repo(repo))


def _folders(cache: Path | None, repo: str | None) -> Iterator[RepoFolder]:
    root = _root(cache)
    if repo is not None and not RepoFolder(root, check_repo(repo)).root.is_dir():
        raise LocalEntryNotFoundError(f"{repo} is not in the cache {root}.", repo=repo)
    for path in _listdir(root):
        if path.name.startswith(_PREFIX) and path.is_dir():
            name = path.name.removeprefix(_PREFIX).replace("--", "/")
            with contextlib.suppress(InvalidReferenceError):
                if repo in (None, check_repo(name)):
                    yield RepoFolder(root, name)


def _describe(folder: RepoFolder) -> CachedRepo:
    disk = RepoDisk(folder)
    refs: dict[str, list[str]] = {}
    for path in _files_below(folder.root / "refs"):
        refs.setdefault(_text(path), []).append(path.relative_to(folder.root / "refs").as_posix())
    contents: dict[str, int] = {}
    revisions: list[CachedRevision] = []
    for snapshot in _listdir(folder.snapshots):
        files: list[CachedFile] = []
        for pointer in _files_below(snapshot):
            name = pointer.relative_to(snapshot).as_posix()
            look = disk.look(snapshot.name, name)
            if look.size is not None:
                contents[os.path.realpath(pointer)] = look.size
                files.append(CachedFile(name, look.size, look.recorded or look.named, look.recorded is not None))
        revisions.append(CachedRevision(snapshot.name, tuple(sorted(refs.get(snapshot.name, ()))), tuple(files)))
    partial = 0
    for blob in _listdir(folder.blobs):
        if blob.name.endswith(".incomplete"):
            partial += blob.lstat().st_size
        elif blob.is_file():
            contents[os.path.realpath(blob)] = blob.stat().st_size
    return CachedRepo(folder.repo, folder.root, sum(contents.values()), partial, tuple(revisions))


def _verify(folder: RepoFolder, stop: Stop) -> Iterator[Verified]:
    disk = RepoDisk(folder)
    done: set[tuple[str, str | None]] = set()
    for snapshot in _listdir(folder.snapshots):
        listing = _saved(folder, snapshot.name)
        for pointer in _files_below(snapshot):
            file = pointer.relative_to(snapshot).as_posix()
            look = disk.look(snapshot.name, file)
            known = listing.files.get(file) if listing is not None else None
            # What the Hub said comes first: a link may lead to a blob that is right for another file.
            expected = (known.etag if known is not None else None) or look.named or look.recorded
            content = os.path.realpath(pointer), expected
            if content in done or not look:
                continue
            done.add(content)
            if expected is None:
                yield Verified(folder.repo, file, pointer, "unknown", None)
            elif look.named not in (None, expected):
                yield Verified(folder.repo, file, pointer, "wrong", expected)
            elif disk.verify_pointer(snapshot.name, file, expected, stop):
                yield Verified(folder.repo, file, pointer, "right", expected)
            else:
                record = folder.blob_record(expected) if look.named else folder.file_record(snapshot.name, file)
                record.unlink(missing_ok=True)
                yield Verified(folder.repo, file, pointer, "wrong", expected)
    for blob in _listdir(folder.blobs):  # those that no snapshot needs just now may be linked again
        if is_etag(blob.name) and blob.is_file() and (os.path.realpath(blob), blob.name) not in done:
            right = disk.verify_blob(blob.name, stop)
            if not right:
                folder.blob_record(blob.name).unlink(missing_ok=True)
            yield Verified(folder.repo, blob.name, blob, "right" if right else "wrong", blob.name)


def _saved(folder: RepoFolder, commit: str) -> Listing | None:
    for path, parse in ((folder.info(commit), parse_saved), (folder.tree(commit), parse_official_tree)):
        with contextlib.suppress(OSError):
            listing = parse(path.read_bytes(), folder.repo, commit)
            if listing is not None:
                return listing
    return None


def _commit(folder: RepoFolder, revision: str) -> str:
    check_revision(revision)
    found = [revision, *(_text(path) for path in (folder.head(revision), folder.ref(revision)))]
    for commit in found:
        if is_commit(commit) and (folder.snapshots / commit).is_dir():
            return commit
    raise LocalEntryNotFoundError(f"{folder.repo}@{revision} is not in the cache {folder.cache}.", repo=folder.repo)


def _remove_blob(folder: RepoFolder, blob: Path) -> bool:
    """Unless somebody holds its lock: they are about to link it."""
    try:
        path = folder.lock(blob.name)
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path, mode=0o664, thread_local=False).acquire(blocking=False):
            blob.unlink(missing_ok=True)
            folder.blob_record(blob.name).unlink(missing_ok=True)
    except Timeout:
        return False
    return True


def _is_dead(partial: Path) -> bool:
    return time.time() - partial.lstat().st_mtime > DEAD_AFTER


def _target(pointer: Path) -> str:
    return os.path.normpath(pointer.parent / pointer.readlink()) if pointer.is_symlink() else os.path.normpath(pointer)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""


def _listdir(path: Path) -> list[Path]:
    return sorted(path.iterdir()) if path.is_dir() else []


def _files_below(path: Path) -> list[Path]:
    return sorted(Path(parent, name) for parent, _, names in os.walk(path) for name in names)
