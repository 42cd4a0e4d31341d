"""Which names from strangers may become names on our disk.

A listing, a model file or a caller gives names; each is checked here before it is joined to a path, under POSIX *and* Windows rules on
every system, so that a cache stays portable and one rule holds everywhere.
"""

from __future__ import annotations

import re
import sys
import unicodedata
from collections.abc import Iterable

from transmuter_async.hub.errors import InvalidReferenceError

__all__ = [
    "check_file",
    "check_repo",
    "check_revision",
    "find_collision",
    "is_commit",
    "is_etag",
    "normalize_etag",
    "repo_folder",
]

_COMMIT = re.compile(r"[0-9a-f]{40}")
_ETAG = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_REPO_PART = re.compile(r"[A-Za-z0-9._-]{1,96}")
_DRIVE = re.compile(r"[A-Za-z]:")
_WINDOWS_DEVICE = re.compile(r"(con|prn|aux|nul|com[0-9¹²³]|lpt[0-9¹²³]|conin\$|conout\$)(\..*)?", re.IGNORECASE)
_LONGEST_SEGMENT = 255  # bytes; the limit of every common file system


def is_commit(text: str) -> bool:
    """Whether `text` is a full commit hash: 40 lower-case hex digits. Such a revision can't move."""
    return _COMMIT.fullmatch(text) is not None


def is_etag(text: str) -> bool:
    """Whether `text` is a content hash: sha1 of a git blob (40 hex digits) or sha256 (64)."""
    return _ETAG.fullmatch(text) is not None


def normalize_etag(value: object) -> str | None:
    """The content hash in an ETag header or a JSON field.

    Returns:
        Lower-case hex without quotes, or None for everything else: absent, masked (`****`), another kind of ETag.
    """
    if not isinstance(value, str):
        return None
    text = value.strip().removeprefix("W/").strip('"').lower()
    return text if is_etag(text) else None


def check_repo(repo: str) -> str:
    """Checks a repository name, `name` or `namespace/name`, by the Hub's rules.

    Raises:
        InvalidReferenceError: It can't be the name of a repository.
    """
    parts = repo.split("/")
    for part in parts:
        if (
            len(parts) > 2
            or not _REPO_PART.fullmatch(part)
            or part[0] in ".-"
            or part[-1] in ".-"
            or "--" in part
            or ".." in part
            or part.endswith(".git")
        ):
            raise InvalidReferenceError(
                f"{repo!r} is not the name of a repository on the Hub: it has the form 'namespace/name' "
                "(letters, digits, '-', '_', '.', at most 96 each, no '--' or '..', no '-' or '.' at the ends). "
                "For a local folder give a pathlib.Path, or a text that starts with './' or '/'."
            )
    return repo


def repo_folder(repo: str) -> str:
    """Name of a model repository's folder in the cache: `models--org--name`."""
    return "models--" + check_repo(repo).replace("/", "--")


def check_file(path: str) -> str:
    """Checks the name of a file in a repository: relative, with `/`, and unable to leave the folder that it is joined to.

    Raises:
        InvalidReferenceError: The name is unsafe.
    """
    reason = _unsafe(path)
    if reason is not None:
        raise InvalidReferenceError(
            f"The file name {path!r} is refused: {reason}. It must be a plain relative path with '/'."
        )
    return path


def check_revision(revision: str) -> str:
    """Checks a branch, tag, `refs/pr/N` or commit: it becomes a path under `refs/`.

    Raises:
        InvalidReferenceError: The name is unsafe.
    """
    reason = _unsafe(revision)
    if reason is not None:
        raise InvalidReferenceError(
            f"The revision {revision!r} is refused: {reason}. Give a branch, a tag, 'refs/pr/N' or a commit."
        )
    return revision


def find_collision(names: Iterable[str]) -> tuple[str, str] | None:
    """Two names that are one file on a case-insensitive or normalising disk, or None."""
    seen: dict[str, str] = {}
    for name in names:
        other = seen.setdefault(unicodedata.normalize("NFC", name).casefold(), name)
        if other != name:
            return other, name
    return None


def _unsafe(path: str) -> str | None:
    if not path:
        return "it is empty"
    if any(unicodedata.category(character) in ("Cc", "Cs") for character in path):
        return "it holds control characters"
    if "\\" in path:
        return "it holds a backslash"
    if path.startswith("/"):
        return "it is absolute"
    if _DRIVE.match(path):
        return "it starts with a drive"
    for segment in path.split("/"):
        if segment in ("", ".", ".."):
            return f"it holds the segment {segment!r}"
        if len(segment.encode()) > _LONGEST_SEGMENT:
            return f"a segment is longer than {_LONGEST_SEGMENT} bytes"
        if sys.platform == "win32" and (":" in segment or segment[-1] in ". " or _WINDOWS_DEVICE.fullmatch(segment)):
            return f"Windows can't store the segment {segment!r}"
    return None
