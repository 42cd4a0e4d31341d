"""A folder on this disk as a repository: the same files under the same names, no cache, no events, no socket."""

from __future__ import annotations

import os
import posixpath
from collections.abc import Iterable
from pathlib import Path

from transmuter_async.errors import InvalidModel
from transmuter_async.hub.errors import EntryNotFoundError, InvalidReferenceError
from transmuter_async.hub.listing import FileInfo, Listing
from transmuter_async.hub.names import check_file, is_etag
from transmuter_async.hub.reference import is_pattern, matches

__all__ = ["external_file", "list_folder", "pick", "snapshot_links"]


def list_folder(folder: Path) -> Listing:
    """The files of a folder, hidden ones left out.

    Raises:
        EntryNotFoundError: It is not a folder.
    """
    if not folder.is_dir():
        raise EntryNotFoundError(
            f"{folder} is not a folder. Without './' or '/' in front, a name is looked up on the Hub.", repo=str(folder)
        )
    files: dict[str, FileInfo] = {}
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            path = Path(parent, name)
            if path.is_file():
                files[path.relative_to(folder).as_posix()] = FileInfo(path.stat().st_size)
    return Listing(str(folder), "", files)


def pick(listing: Listing, wanted: Iterable[str] | None, optional: Iterable[str]) -> list[str]:
    """The files of a listing that names and patterns stand for, in the order asked for, each once.

    Args:
        listing: Where to look.
        wanted: Names and patterns (`*.json`, `onnx/`), None for all files.
        optional: Names and patterns that may stand for nothing.

    Raises:
        EntryNotFoundError: A pattern among `wanted` stands for nothing. (A name that is absent is kept: whoever fetches it refuses it.)
    """
    chosen: dict[str, None] = {}
    if wanted is None:
        chosen.update(dict.fromkeys(listing.files))
    for name in wanted or ():
        found = _expand(listing, name)
        if not found and is_pattern(name):
            raise EntryNotFoundError(
                f"{listing.repo} has no file like {name!r}; it has {len(listing.files)} files.",
                repo=listing.repo,
                file=name,
            )
        chosen.update(dict.fromkeys(found or [name]))
    for name in optional:
        chosen.update(dict.fromkeys(_expand(listing, name)))
    return list(chosen)


def external_file(model: str, location: str) -> str:
    """Path in the repository of a model's external data.

    Args:
        model: Path of the model in the repository.
        location: As written in the model, relative to the model's folder.

    Raises:
        InvalidModel: It leads out of that folder, or is no plain relative path.
    """
    try:
        check_file(location)
    except InvalidReferenceError as error:
        raise InvalidModel(f"its external data is at {location!r}, which is refused: {error}", source=model) from error
    return posixpath.join(posixpath.dirname(model), location)


def snapshot_links(folder: Path, files: Iterable[str]) -> frozenset[Path]:
    """Those of the files that are links as a Hugging Face cache makes them: from a snapshot to a blob of the same repository.

    A folder given by the user may be such a snapshot; any other link in it may lead anywhere and is not for a model to follow.
    """
    links: set[Path] = set()
    for file in files:
        path = folder / file
        if path.is_symlink():
            target = Path(os.path.normpath(path.parent / path.readlink()))
            root = Path(os.path.abspath(target.parent.parent))
            if (
                target.parent.name == "blobs"
                and is_etag(target.name)
                and Path(os.path.abspath(path)).is_relative_to(root / "snapshots")
            ):
                links.add(path)
    return frozenset(links)


def _expand(listing: Listing, name: str) -> list[str]:
    if name in listing.files:
        return [name]
    return [file for file in listing.files if matches(file, name)] if is_pattern(name) else []
