"""What can go wrong with one answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Fault:
    """Changes one answer. What is not set stays as it is.

    Attributes:
        status: Answer with this status and `body` instead.
        headers: Added to the answer (None removes one), whatever else is asked for.
        body: Instead of the body.
        cut: Close the connection after so many bytes of the body.
        stall: Send nothing more after so many bytes of the body.
        flip: Change the byte at this position of the body.
        short: Leave out so many bytes at the end, with a Content-Length that fits.
        long: So many bytes too many, with a Content-Length that fits.
        ignore_range: 200 and the whole, though a range was asked for.
        wrong_range: 206 with the bytes asked for, and a Content-Range that states others.
        gzip: Code the body, whatever the client accepts.
        chunked: No Content-Length.
        etag: Another ETag (and X-Linked-ETag); `""` leaves it out.
        commit: Another X-Repo-Commit; `""` leaves it out.
        location: Another target of the redirect.
        expired: The signed link that is issued is refused by the CDN.
        refuse: Close the connection without an answer.
        hold: Wait with the answer until `FakeHub.release` is called.
    """

    status: int | None = None
    headers: Mapping[str, str | None] = field(default_factory=dict)
    body: bytes | None = None
    cut: int | None = None
    stall: int | None = None
    flip: int | None = None
    short: int = 0
    long: int = 0
    ignore_range: bool = False
    wrong_range: bool = False
    gzip: bool = False
    chunked: bool = False
    etag: str | None = None
    commit: str | None = None
    location: str | None = None
    expired: bool = False
    refuse: bool = False
    hold: bool = False


NONE = Fault()
