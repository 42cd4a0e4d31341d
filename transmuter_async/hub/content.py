"""The hash by which the Hub knows a content: sha256 for LFS and Xet files, sha1 of the git blob for ordinary ones."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Protocol

from transmuter_async.hub.workers import Stop

__all__ = ["Digest", "hash_file", "new_digest"]

_CHUNK = 1 << 20


class Digest(Protocol):
    """A running hash."""

    def update(self, data: bytes | bytearray | memoryview, /) -> None:
        """Take more of the content."""

    def hexdigest(self) -> str:
        """The hash of what was taken so far."""


def new_digest(etag: str, size: int) -> Digest:
    """A running hash of the kind of `etag`: by its length.

    Args:
        etag: 64 hex digits (sha256), or 40 (sha1 of a header with the size, and the content, as git does).
        size: Size of the whole content.
    """
    if len(etag) == 64:
        return hashlib.sha256()
    return hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)


def hash_file(path: Path, etag: str, stop: Stop) -> str:
    """Hash of a file, of the kind of `etag`. Blocks; looks at `stop` every MiB.

    Raises:
        OSError: It can't be read.
        Stopped: The caller has gone.
    """
    buffer = bytearray(_CHUNK)
    view = memoryview(buffer)
    with path.open("rb", buffering=0) as file:
        digest = new_digest(etag, os.fstat(file.fileno()).st_size)
        while count := file.readinto(buffer):
            digest.update(view[:count])
            stop.check()
    return digest.hexdigest()
