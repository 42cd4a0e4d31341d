"""What can go wrong between us and the Hub. Each text names the cause and one thing to do.

    HubError
    ├── HubHTTPError                     the Hub answered with a status that is an error
    │   ├── RepositoryNotFoundError      no such repository, or a private one without access
    │   │   └── GatedRepoError           access has to be requested on the Hub's web page
    │   ├── RevisionNotFoundError        no such branch, tag or commit
    │   ├── HubAuthError                 the token is bad or expired
    │   └── DisabledRepoError            the Hub has switched the repository off
    ├── EntryNotFoundError               no such file in that revision
    │   └── LocalEntryNotFoundError      offline, and the file is not in the cache
    ├── HubConnectionError               no usable connection: DNS, TLS, refused, timeout, cut
    ├── HubConsistencyError              the answer contradicts the metadata, or is not the Hub's at all
    ├── ChecksumError                    the content does not have the hash that the Hub says it has
    ├── DiskFullError                    no room for the file
    ├── FileTooLargeError                above the Hub's limit for plain HTTP
    ├── CacheError                       the cache folder can't be used: no permission, a planted link
    └── InvalidReferenceError (ValueError)   a name that is no repository, revision, file or token argument

A token never appears in a text, and URLs appear without their query (it may be signed).
"""

from __future__ import annotations

from transmuter_async.errors import HubError

__all__ = [
    "CacheError",
    "ChecksumError",
    "DisabledRepoError",
    "DiskFullError",
    "EntryNotFoundError",
    "FileTooLargeError",
    "GatedRepoError",
    "HubAuthError",
    "HubConnectionError",
    "HubConsistencyError",
    "HubError",
    "HubHTTPError",
    "InvalidReferenceError",
    "LocalEntryNotFoundError",
    "RepositoryNotFoundError",
    "RevisionNotFoundError",
]


class HubHTTPError(HubError):
    """The Hub (or its CDN) answered with an error.

    Attributes:
        status: HTTP status.
        retryable: Whether asking again may help (408, 429, 5xx, an expired CDN link).
        wait: Seconds that the server asks us to wait before the next request, None when it says nothing.
        expired: Whether a signed CDN link was refused: a fresh one from the Hub may work.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int,
        retryable: bool = False,
        wait: float | None = None,
        expired: bool = False,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.retryable = retryable
        self.wait = wait
        self.expired = expired


class RepositoryNotFoundError(HubHTTPError):
    """There is no such repository, or it is private and the token (if any) gives no access. The Hub does not tell which."""


class GatedRepoError(RepositoryNotFoundError):
    """The repository exists, but access has to be requested on its page."""


class RevisionNotFoundError(HubHTTPError):
    """The repository exists, the branch, tag or commit does not."""


class HubAuthError(HubHTTPError):
    """The Hub refuses the token itself: it is wrong or has expired."""


class DisabledRepoError(HubHTTPError):
    """The Hub has disabled access to the repository for everybody."""


class EntryNotFoundError(HubError):
    """The repository has no such file in that revision.

    Attributes:
        repo: The repository asked for.
        file: The file asked for, a path in the repository.
    """

    def __init__(self, message: str, *, repo: str = "", file: str = "") -> None:
        super().__init__(message)
        self.repo = repo
        self.file = file


class LocalEntryNotFoundError(EntryNotFoundError):
    """Offline, and the cache does not have the file (or knows nothing about the repository)."""


class HubConnectionError(HubError):
    """There is no usable connection.

    Attributes:
        retryable: False for what does not change by asking again: a certificate that does not verify, a refused proxy.
    """

    def __init__(self, message: str, *, retryable: bool = True) -> None:
        super().__init__(message)
        self.retryable = retryable


class HubConsistencyError(HubError):
    """An answer contradicts what the Hub said before, or is not the Hub's (a captive portal). Nothing was kept."""


class ChecksumError(HubError):
    """The content of a file does not match the hash in the repository's metadata, also after a second download.

    Attributes:
        expected: Hash in the metadata, lower-case hex.
        actual: Hash of what was received.
    """

    def __init__(self, message: str, *, expected: str, actual: str) -> None:
        super().__init__(message)
        self.expected = expected
        self.actual = actual


class DiskFullError(HubError):
    """There is no room for a file.

    Attributes:
        needed: Bytes that were still to be written.
        free: Bytes that the file system says are free.
    """

    def __init__(self, message: str, *, needed: int, free: int) -> None:
        super().__init__(message)
        self.needed = needed
        self.free = free


class FileTooLargeError(HubError):
    """The file is larger than what the Hub serves over plain HTTP (50·10⁹ bytes)."""


class CacheError(HubError):
    """The cache folder can't be used as it is: no permission, or something in it leads outside of it."""


class InvalidReferenceError(HubError, ValueError):
    """A text that is not a repository, a revision, a file of a repository, or a `token=` argument."""
