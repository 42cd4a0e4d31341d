"""A file on its way into the cache: `blobs/<etag>.<8 hex>.incomplete`.

The name is of one writer only, so that two writers (where locks do nothing: Lustre, some NFS) waste bandwidth and never mix. Content gets
its final name by an atomic rename after size and hash were found right; nothing wrong is ever called by a hash.

What a crashed or cancelled writer left is taken over by rename (one winner) and *copied* while it is hashed: if its writer lives after all,
the two still share no file. Everything here blocks and runs in a worker thread, one call at a time.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import time
from collections.abc import Iterable
from pathlib import Path

from transmuter_async.hub.content import Digest, hash_file, new_digest
from transmuter_async.hub.errors import CacheError, ChecksumError, DiskFullError
from transmuter_async.hub.workers import Stop, Stopped

__all__ = ["DEAD_AFTER", "SMALLEST_KEPT", "Partial", "replace"]

SMALLEST_KEPT = 8 << 20  # bytes; less is fetched again sooner than it is looked for
DEAD_AFTER = 60.0  # seconds without a write after which a partial file has no writer
_FORGOTTEN_AFTER = 3600.0  # seconds; longer than any wait that a server can ask for
_CHUNK = 1 << 20
_SUFFIX = ".incomplete"
_OUT_OF_SPACE = frozenset({errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC)})


class Partial:
    """One writer's partial file.

    Attributes:
        position: Bytes that are written and hashed.
    """

    def __init__(self, blobs: Path, etag: str | None, size: int | None) -> None:
        self._blobs = blobs
        self._etag = etag
        self._size = size
        self._path = blobs / f"{etag or 'unknown'}.{secrets.token_hex(4)}{_SUFFIX}"
        self._fd: int | None = None
        self._digest: Digest | None = None
        self.position = 0

    @property
    def size(self) -> int | None:
        """Size of the whole content, None until somebody has said it."""
        return self._size

    def open(self, stop: Stop) -> None:
        """Makes the file, with what an earlier writer has left if there is any.

        Raises:
            CacheError: The cache can't be written.
            DiskFullError: There is no room.
        """
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
            self._fd = os.open(self._path, flags, 0o666)
        except OSError as error:
            raise self._failed(error) from error
        self._restart_digest()
        if self._etag is not None and self._size is not None:
            self._take_over(self._etag, self._size, stop)

    def expect(self, size: int | None) -> None:
        """Sets the size, when only the answer told it."""
        if self._size is None and size is not None:
            self._size = size
            self.restart()

    def write(self, chunks: Iterable[bytes]) -> None:
        """Appends to the file and to the hash.

        Raises:
            DiskFullError: There is no room.
        """
        assert self._fd is not None
        try:
            for chunk in chunks:
                view = memoryview(chunk)
                while view:
                    view = view[os.write(self._fd, view) :]
                if self._digest is not None:
                    self._digest.update(chunk)
                self.position += len(chunk)
        except OSError as error:
            raise self._failed(error) from error

    def restart(self) -> None:
        """Back to nothing: the server sends the whole again, or what is there is wrong."""
        assert self._fd is not None
        os.ftruncate(self._fd, 0)
        os.lseek(self._fd, 0, os.SEEK_SET)
        self.position = 0
        self._restart_digest()

    def touch(self) -> None:
        """Says that the writer lives, before a time in which it writes nothing."""
        with contextlib.suppress(OSError):
            os.utime(self._path)

    def check(self, stop: Stop) -> None:
        """Compares the hash of what is written with the one it must have.

        Raises:
            ChecksumError: It is another.
        """
        if self._etag is None:
            return
        # Without a size beforehand (nobody stated one) there is no running hash: git's begins with the size.
        actual = hash_file(self._path, self._etag, stop) if self._digest is None else self._digest.hexdigest()
        if actual != self._etag:
            raise ChecksumError(
                f"The content received has the hash {actual}, the metadata says {self._etag}.",
                expected=self._etag,
                actual=actual,
            )

    def publish(self, destination: Path) -> None:
        """Gives the file its final name, durably and at once.

        Raises:
            FileNotFoundError: Another writer has taken the file over, since it believed this one dead.
            CacheError: It can't be renamed.
            DiskFullError: There is no room after all.
        """
        assert self._fd is not None
        try:
            os.fsync(self._fd)
            self.close()
            replace(self._path, destination)
        except FileNotFoundError:
            raise
        except OSError as error:
            self.close()
            self._path.unlink(missing_ok=True)
            raise self._failed(error) from error
        if self._etag is not None:
            self._sweep(self._etag)

    def close(self) -> None:
        """Closes the file; it stays."""
        if self._fd is not None:
            fd, self._fd = self._fd, None
            os.close(fd)

    def leave(self, *, keep: bool) -> None:
        """Ends without a result. Keeps what is worth to be resumed.

        Args:
            keep: Whether the content written so far is believed to be right.
        """
        if self._fd is None:
            return
        self.close()
        with contextlib.suppress(OSError):
            if keep and self._etag is not None and self.position >= SMALLEST_KEPT:
                # An old date says that nobody writes here any more: the next load need not wait to be sure.
                dead = time.time() - 2 * DEAD_AFTER
                os.utime(self._path, (dead, dead))
            else:
                self._path.unlink()

    def free_space(self) -> int | None:
        """Bytes free where the file lies, None when that can't be told."""
        try:
            return shutil.disk_usage(self._blobs).free
        except OSError:
            return None

    def _restart_digest(self) -> None:
        self._digest = None if self._etag is None or self._size is None else new_digest(self._etag, self._size)

    def _take_over(self, etag: str, size: int, stop: Stop) -> None:
        """Copies (and hashes) what a writer that is dead has left."""
        for length, left in self._dead_files(etag):
            if not SMALLEST_KEPT <= length <= size:
                continue
            try:
                claimed = left.with_name(f"{etag}.{secrets.token_hex(4)}{_SUFFIX}")
                left.rename(claimed)
            except OSError:
                continue  # somebody else was faster
            try:
                with claimed.open("rb", buffering=0) as file:
                    while chunk := file.read(_CHUNK):
                        self.write((chunk,))
                        stop.check()
            except Stopped:
                self.restart()  # and the whole is still there for the next load
                raise
            except (OSError, CacheError, DiskFullError):
                self.restart()
            claimed.unlink(missing_ok=True)
            if self.position:
                return

    def _dead_files(self, pattern: str, after: float = DEAD_AFTER) -> list[tuple[int, Path]]:
        """Sizes and paths of partial files that nobody has written for so many seconds, the largest first."""
        now = time.time()
        dead: list[tuple[int, Path]] = []
        for path in self._blobs.glob(f"{pattern}.*{_SUFFIX}"):
            with contextlib.suppress(OSError):
                status = path.lstat()
                if path != self._path and now - status.st_mtime > after and not path.is_symlink():
                    dead.append((status.st_size, path))
        return sorted(dead, reverse=True)

    def _sweep(self, etag: str) -> None:
        """Removes what dead writers have left: of this content, since it is complete; of others, what is too little to be resumed."""
        useless = [path for _, path in self._dead_files(etag)]
        useless += [path for size, path in self._dead_files("*", _FORGOTTEN_AFTER) if size < SMALLEST_KEPT]
        for path in useless:
            with contextlib.suppress(OSError):
                path.unlink()

    def _failed(self, error: OSError) -> CacheError | DiskFullError:
        if error.errno in _OUT_OF_SPACE:
            needed = (self._size or 0) - self.position
            free = self.free_space() or 0
            return DiskFullError(
                f"No room in {self._blobs}: {needed} more bytes are needed, {free} are free. Make room, or set HF_HUB_CACHE.",
                needed=needed,
                free=free,
            )
        return CacheError(
            f"{self._blobs} can't be written ({error.strerror}). Check its permissions, or set HF_HUB_CACHE."
        )


def replace(source: Path, destination: Path) -> None:
    """A rename that replaces, patient with scanners that hold a new file for a moment on Windows."""
    for attempt in range(6):
        try:
            source.replace(destination)
        except PermissionError:
            if os.name != "nt" or attempt == 5:
                raise
            time.sleep(0.05)
        else:
            return
