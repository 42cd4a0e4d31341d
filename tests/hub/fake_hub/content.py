"""What files hold, and the hashes by which the Hub knows them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property


class Content:
    """Bytes, and their hashes."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    @property
    def size(self) -> int:
        return len(self._data)

    def read(self, start: int, stop: int) -> bytes:
        return self._data[start:stop]

    @cached_property
    def sha256(self) -> str:
        return self._hash(hashlib.sha256())

    @cached_property
    def git_sha1(self) -> str:
        return self._hash(hashlib.sha1(b"blob %d\0" % self.size))

    def _hash(self, digest) -> str:
        for start in range(0, self.size, 1 << 20):
            digest.update(self.read(start, start + (1 << 20)))
        return digest.hexdigest()


class Repeated(Content):
    """Much content that needs little memory: a block, again and again, with its number in front."""

    def __init__(self, size: int, seed: bytes = b"") -> None:
        self._size = size
        self._block = hashlib.shake_256(seed).digest((1 << 20) - 8)

    @property
    def size(self) -> int:
        return self._size

    def read(self, start: int, stop: int) -> bytes:
        stop = min(stop, self._size)
        parts = []
        while start < stop:
            number, offset = divmod(start, 1 << 20)
            block = number.to_bytes(8, "little") + self._block
            part = block[offset : offset + stop - start]
            parts.append(part)
            start += len(part)
        return b"".join(parts)


@dataclass(frozen=True)
class Lfs:
    """Marks a file that is stored in LFS (`xet`: in Xet)."""

    data: bytes | Content
    xet: bool = False


@dataclass(frozen=True)
class Stored:
    """A file of a commit."""

    content: Content
    lfs: bool
    xet: bool

    @property
    def etag(self) -> str:
        return self.content.sha256 if self.lfs else self.content.git_sha1

    @property
    def pointer(self) -> bytes:
        """The text that git has in place of an LFS file."""
        return b"version https://git-lfs.github.com/spec/v1\noid sha256:%s\nsize %d\n" % (
            self.content.sha256.encode(),
            self.content.size,
        )

    @property
    def blob_id(self) -> str:
        return git_sha1(self.pointer) if self.lfs else self.content.git_sha1


def store(value: bytes | Content | Lfs) -> Stored:
    lfs = isinstance(value, Lfs)
    data = value.data if isinstance(value, Lfs) else value
    return Stored(data if isinstance(data, Content) else Content(data), lfs, isinstance(value, Lfs) and value.xet)


def git_sha1(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
