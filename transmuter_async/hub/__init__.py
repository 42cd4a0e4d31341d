"""The Hugging Face Hub: files of repositories, through the cache that all its tools share.

What: an asynchronous client, for asyncio and trio, that downloads several files at once, resumes, retries, verifies every content by its
hash, works offline, and tells what it does through telemetry. Layout and meaning of the cache are the official ones, so what another tool
has downloaded is found, and the other way round.

Why our own: no asynchronous Hub client exists, and the official one checks sizes only.

Not: uploading, datasets and spaces, the Xet protocol (its files come over plain HTTP), OAuth.
"""

from __future__ import annotations

from transmuter_async.hub.client import FetchedModel, HubClient
from transmuter_async.hub.environment import Environment, TokenArgument
from transmuter_async.hub.errors import (
    CacheError,
    ChecksumError,
    DisabledRepoError,
    DiskFullError,
    EntryNotFoundError,
    FileTooLargeError,
    GatedRepoError,
    HubAuthError,
    HubConnectionError,
    HubConsistencyError,
    HubError,
    HubHTTPError,
    InvalidReferenceError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from transmuter_async.hub.listing import FileInfo, Listing
from transmuter_async.hub.load import Verify
from transmuter_async.hub.maintenance import (
    CachedFile,
    CachedRepo,
    CachedRevision,
    Removed,
    Verified,
    cache_path,
    list_cache,
    remove_from_cache,
    verify_cache,
)
from transmuter_async.hub.reference import DEFAULT_REVISION, HubFile, is_local_folder, parse_reference
from transmuter_async.hub.variants import Variant
from transmuter_async.hub.workers import Stop, Stopped

__all__ = [
    "DEFAULT_REVISION",
    "CacheError",
    "CachedFile",
    "CachedRepo",
    "CachedRevision",
    "ChecksumError",
    "DisabledRepoError",
    "DiskFullError",
    "EntryNotFoundError",
    "Environment",
    "FetchedModel",
    "FileInfo",
    "FileTooLargeError",
    "GatedRepoError",
    "HubAuthError",
    "HubClient",
    "HubConnectionError",
    "HubConsistencyError",
    "HubError",
    "HubFile",
    "HubHTTPError",
    "InvalidReferenceError",
    "Listing",
    "LocalEntryNotFoundError",
    "Removed",
    "RepositoryNotFoundError",
    "RevisionNotFoundError",
    "Stop",
    "Stopped",
    "TokenArgument",
    "Variant",
    "Verified",
    "Verify",
    "cache_path",
    "is_local_folder",
    "list_cache",
    "parse_reference",
    "remove_from_cache",
    "verify_cache",
]
