"""Bytes that tensors are read from, and the aligned memory they are read into.

`device_put` shares a numpy array with a CPU device only when it starts on a 64-byte boundary; inside .onnx files almost no
tensor does. So each tensor is read once, straight from the file, into memory of our own. `os.preadv` holds no GIL while it
copies and leaves no mapped pages behind: a mapped file would be live, and overwriting it would change loaded weights.
"""

from __future__ import annotations

import mmap
import os
from contextlib import suppress
from typing import Protocol

import numpy as np

from ..errors import InvalidModel

__all__ = ["BufferStorage", "FileStorage", "Storage", "aligned_empty", "freeze", "lasting_empty"]

_ALIGNMENT = 64
_OWN_PAGES = 1 << 20  # bytes from which on what is held long has pages of its own
_LARGE_PAGES = 1 << 22  # and from which on these are large ones where the system has them on request, as numpy asks for its own
_STEP = 1 << 24  # bytes per system call: a cancelled thread then ends soon, and the limit of 2 GiB per call is never met


def aligned_empty(count: int, dtype: np.dtype) -> np.ndarray:
    """An uninitialised array of shape `(count,)` that starts on a 64-byte boundary."""
    nbytes = count * dtype.itemsize
    block = np.empty(nbytes + _ALIGNMENT, np.uint8)
    start = -block.ctypes.data % _ALIGNMENT
    return block[start : start + nbytes].view(dtype)


def lasting_empty(count: int, dtype: np.dtype) -> np.ndarray:
    """As `aligned_empty`, for weights: a large one goes back to the system with the array that is made here, and at once.

    The C library keeps freed memory between what was allocated before and after it, so that a process that moves its weights
    would look as large as all of them twice (measured with glibc: 1.8 times 500 MB).

    Raises:
        MemoryError: There is not as much.
    """
    nbytes = count * dtype.itemsize
    if nbytes < _OWN_PAGES or not hasattr(mmap, "MAP_ANONYMOUS"):
        return aligned_empty(count, dtype)
    try:
        pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"no {nbytes} bytes of memory are free") from error
    if nbytes >= _LARGE_PAGES and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            pages.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(pages, np.uint8, nbytes).view(dtype)


def freeze(array: np.ndarray) -> np.ndarray:
    """The same array, read-only."""
    array.flags.writeable = False
    return array


class Storage(Protocol):
    """Random access to the bytes of a file or a buffer."""

    @property
    def size(self) -> int:
        """Bytes there are."""
        ...

    def read(self, start: int, stop: int) -> bytes:
        """The bytes of `start:stop`, copied."""
        ...

    def read_into(self, start: int, target: memoryview) -> None:
        """Fills `target` with the bytes from `start` on."""
        ...

    def check_unchanged(self) -> None:
        """Raises InvalidModel when the file is not any more what it was when it was opened."""
        ...


class BufferStorage:
    """Bytes in memory."""

    def __init__(self, data: bytes | bytearray | memoryview) -> None:
        self._view = memoryview(data).cast("B")

    @property
    def size(self) -> int:
        """Bytes there are."""
        return len(self._view)

    def read(self, start: int, stop: int) -> bytes:
        """The bytes of `start:stop`, copied."""
        return bytes(self._view[start:stop])

    def read_into(self, start: int, target: memoryview) -> None:
        """Fills `target` with the bytes from `start` on. numpy copies, since it lets other threads run meanwhile."""
        source = np.frombuffer(self._view, np.uint8, len(target), start)
        np.copyto(np.frombuffer(target, np.uint8), source)

    def check_unchanged(self) -> None:
        """Memory is the caller's; nothing to compare."""


class FileStorage:
    """An open regular file. Does not own the descriptor.

    Args:
        descriptor: Opened for reading.
        name: As errors call it.
        origin: Byte of the file that counts as 0.
    """

    def __init__(self, descriptor: int, name: str, origin: int = 0) -> None:
        self._descriptor = descriptor
        self._name = name
        self._origin = origin
        self._stamp = self._now()

    def _now(self) -> tuple[int, int]:
        status = os.fstat(self._descriptor)
        return status.st_size, status.st_mtime_ns

    @property
    def size(self) -> int:
        """Bytes from the origin to the end, as they were when it was opened."""
        return max(self._stamp[0] - self._origin, 0)

    def read(self, start: int, stop: int) -> bytes:
        """The bytes of `start:stop`, copied."""
        target = bytearray(max(stop - start, 0))
        self.read_into(start, memoryview(target))
        return bytes(target)

    def read_into(self, start: int, target: memoryview) -> None:
        """Fills `target` with the bytes from `start` on. Raises InvalidModel where the file ends before."""
        done, position = 0, self._origin + start
        while done < len(target):
            piece = target[done : done + _STEP]
            try:
                count = _read_at(self._descriptor, piece, position + done)
            except OSError as error:
                raise InvalidModel(f"reading failed: {error}", source=self._name) from error
            if count == 0:
                raise InvalidModel(
                    f"the file ended at byte {position + done} while it was read; it was cut short meanwhile. "
                    "Write models to a new file and rename it into place.",
                    source=self._name,
                )
            done += count

    def check_unchanged(self) -> None:
        """Raises InvalidModel when size or time of the last change differ from those at the start."""
        now = self._now()
        if now != self._stamp:
            raise InvalidModel(
                f"the file changed while it was read (size {self._stamp[0]} -> {now[0]} bytes). "
                "Write models to a new file and rename it into place, then load again.",
                source=self._name,
            )


if hasattr(os, "preadv"):

    def _read_at(descriptor: int, target: memoryview, position: int) -> int:
        return os.preadv(descriptor, [target], position)

else:  # Windows has neither preadv nor pread; the descriptor is ours alone, so its position may move

    def _read_at(descriptor: int, target: memoryview, position: int) -> int:
        os.lseek(descriptor, position, os.SEEK_SET)
        piece = os.read(descriptor, len(target))
        target[: len(piece)] = piece
        return len(piece)
