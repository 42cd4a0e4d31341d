"""How a repository, a revision and a file are written: `hf://org/name@revision/path`, `HubFile`, or a bare `org/name`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from urllib.parse import unquote

from transmuter_async.hub.errors import InvalidReferenceError
from transmuter_async.hub.names import check_file, check_repo, check_revision

__all__ = ["DEFAULT_REVISION", "HubFile", "is_local_folder", "is_pattern", "matches", "parse_reference"]

DEFAULT_REVISION = "main"
_SCHEME = "hf://"


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file on the Hub, or a repository whose obvious model file is meant.

    Attributes:
        repo: `name` or `namespace/name`.
        file: Path in the repository, or None: the one that is obvious.
        revision: Branch, tag, `refs/pr/N` or commit hash.
    """

    repo: str
    file: str | None = None
    revision: str = DEFAULT_REVISION

    def __post_init__(self) -> None:
        check_repo(self.repo)
        check_revision(self.revision)
        if self.file is not None:
            check_file(self.file)

    def __str__(self) -> str:
        revision = "" if self.revision == DEFAULT_REVISION else "@" + self.revision.replace("/", "%2F")
        return f"{_SCHEME}{self.repo}{revision}" + ("" if self.file is None else f"/{self.file}")


def parse_reference(text: str | HubFile, *, revision: str | None = None) -> HubFile:
    """Reads `hf://org/name@revision/path` or a bare `org/name`.

    A revision with a slash is written with `%2F`, given as `revision=`, or is one of `refs/pr/N` and `refs/convert/NAME`, which are
    recognised. Everything after the repository (and its revision) is the file; without one, the obvious model file is meant.

    Args:
        text: The reference.
        revision: Overrides the absent revision of the text.

    Raises:
        InvalidReferenceError: The text is none of these, or names two different revisions.
    """
    if isinstance(text, HubFile):
        if revision not in (None, text.revision) and text.revision != DEFAULT_REVISION:
            raise InvalidReferenceError(
                f"{text} already names a revision, and revision={revision!r} names another. Give one."
            )
        return HubFile(text.repo, text.file, revision or text.revision)
    if not text.startswith(_SCHEME):
        return HubFile(check_repo(text), None, DEFAULT_REVISION if revision is None else revision)
    rest = text.removeprefix(_SCHEME)
    parts = rest.split("/")
    if len(parts) < 2 or not all(parts):
        raise InvalidReferenceError(
            f"{text!r} is not a reference to the Hub: write 'hf://namespace/name@revision/path/of/file'."
        )
    namespace, name, *path = parts
    if "@" in namespace:
        raise InvalidReferenceError(
            f"{text!r} has a revision where the namespace is: write 'hf://namespace/name@revision/file'."
        )
    name, at, written = name.partition("@")
    if at and not written:
        raise InvalidReferenceError(f"{text!r} has an '@' without a revision after it.")
    if written == "refs" and len(path) >= 2:
        written, path = "/".join(["refs", *path[:2]]), path[2:]
    written = unquote(written)
    if written and revision is not None and written != revision:
        raise InvalidReferenceError(
            f"{text!r} already names a revision, and revision={revision!r} names another. Give one."
        )
    return HubFile(f"{namespace}/{name}", "/".join(path) or None, written or revision or DEFAULT_REVISION)


def is_local_folder(repo: str | os.PathLike[str]) -> bool:
    """Whether `repo` means a folder on this disk: a `Path`, or a text that starts with `/`, `./`, `../`, `~` or a drive.

    Whether something exists there is not asked: a folder that happens to be called `org/name` must not shadow the Hub.
    """
    if not isinstance(repo, str):
        return True
    return repo in (".", "..") or repo.startswith(("/", "./", "../", "~", ".\\", "..\\")) or bool(Path(repo).drive)


def is_pattern(name: str) -> bool:
    """Whether `name` stands for several files: it holds `*`, `?` or `[`, or ends with `/`."""
    return name.endswith("/") or any(character in name for character in "*?[")


def matches(path: str, pattern: str) -> bool:
    """Whether a file of a repository fits a pattern. `*` also crosses `/`; a trailing `/` means everything below; case counts."""
    pattern = pattern.replace("\\", "/")
    return fnmatchcase(path, pattern + "*" if pattern.endswith("/") else pattern)
