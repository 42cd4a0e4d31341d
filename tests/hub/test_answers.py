"""What answers mean: pure functions on status and headers."""

from __future__ import annotations

import logging
import threading
from email.utils import formatdate

import anyio
import pytest
from filelock import FileLock

from tests.hub.fake_hub import Lfs, sha256
from tests.hub.support import World, wait_for
from transmuter_async.hub import (
    DisabledRepoError,
    EntryNotFoundError,
    GatedRepoError,
    HubAuthError,
    HubHTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
    locks,
)
from transmuter_async.hub.answers import Asked, content_start, error_of, next_page, read_facts, server_wait

NOW = 1_700_000_000.0
ASKED = Asked("https://huggingface.co", "org/m", "main", "p")
SHA1, SHA256 = "a" * 40, "b" * 64


@pytest.mark.parametrize(
    ("status", "headers", "kind"),
    [
        (404, {"X-Error-Code": "RevisionNotFound"}, RevisionNotFoundError),
        (404, {"X-Error-Code": "EntryNotFound"}, EntryNotFoundError),
        (401, {"X-Error-Code": "GatedRepo"}, GatedRepoError),
        (403, {"X-Error-Code": "GatedRepo"}, GatedRepoError),
        (403, {"X-Error-Message": "Access to this resource is disabled."}, DisabledRepoError),
        (404, {"X-Error-Code": "RepoNotFound"}, RepositoryNotFoundError),
        (401, {}, RepositoryNotFoundError),
        (401, {"X-Error-Message": "Invalid username or password."}, RepositoryNotFoundError),
        (401, {"X-Error-Message": "Invalid credentials in Authorization header"}, HubAuthError),
        (403, {}, HubHTTPError),
        (400, {}, HubHTTPError),
        (404, {}, HubHTTPError),
        (500, {}, HubHTTPError),
    ],
)
def test_errors(status: int, headers: dict[str, str], kind: type[Exception]) -> None:
    error = error_of(status, headers, b"", ASKED, from_hub=True, now=NOW)
    assert type(error) is kind
    retryable = isinstance(error, HubHTTPError) and error.retryable
    assert retryable == (status in (408, 429, 500, 502, 503, 504))


def test_the_cdn_is_never_gated() -> None:
    error = error_of(403, {"X-Error-Code": "GatedRepo"}, b"", ASKED, from_hub=False, now=NOW)
    assert type(error) is HubHTTPError
    assert error.expired


def test_texts_show_what_the_server_said_and_no_pages() -> None:
    said = error_of(400, {"X-Amz-Cf-Id": "id-1"}, b'{"error": "bad\\u0007 day"}', ASKED, from_hub=True, now=NOW)
    assert str(said) == 'org/m@main/p: the Hub answered 400. It says: "bad  day". (X-Amz-Cf-Id: id-1)'
    page = error_of(502, {}, b"<html>oops</html>", ASKED, from_hub=True, now=NOW)
    assert str(page) == "org/m@main/p: the Hub answered 502."


@pytest.mark.parametrize(
    ("status", "headers", "seconds"),
    [
        (429, {"RateLimit": '"resolvers";r=0;t=55'}, 56),
        (429, {"RateLimit": '"api";r=12;t=55', "Retry-After": "3"}, 4),
        (503, {"Retry-After": "7"}, 8),
        (503, {"Retry-After": formatdate(NOW + 20)}, 21),
        (503, {"Retry-After": formatdate(NOW - 20)}, 1),
        (503, {"Retry-After": "9999"}, 301),
        (503, {"Retry-After": "later"}, None),
        (503, {}, None),
        (404, {"Retry-After": "7"}, None),
    ],
)
def test_waits(status: int, headers: dict[str, str], seconds: float | None) -> None:
    assert server_wait(status, headers, NOW) == seconds


def test_facts() -> None:
    linked = {
        "X-Linked-ETag": f'"{SHA256}"',
        "X-Linked-Size": "7",
        "ETag": f'"{SHA1}"',
        "X-Repo-Commit": SHA1,
        "Content-Length": "9",
    }
    facts = read_facts(302, linked)
    assert (facts.commit, facts.etag, facts.size) == (SHA1, SHA256, 7)
    facts = read_facts(200, {"ETag": f'W/"{SHA1}"', "Content-Length": "9", "X-Repo-Commit": "main"})
    assert (facts.commit, facts.etag, facts.size) == (None, SHA1, 9)
    facts = read_facts(200, {"Content-Length": "9", "Content-Encoding": "gzip"})
    assert facts.size is None
    facts = read_facts(307, {"ETag": f'"{SHA1}"', "Content-Length": "9"})
    assert (facts.etag, facts.size) == (None, None)


def test_where_a_body_starts() -> None:
    assert content_start(200, {}, 0, 10) == 0
    assert content_start(200, {}, 5, 10) == 0
    assert content_start(206, {"Content-Range": "bytes 5-9/10"}, 5, 10) == 5
    assert content_start(206, {"Content-Range": "bytes 5-9/10"}, 5, None) == 5
    assert content_start(200, {"Content-Encoding": "gzip"}, 0, 10) == 0
    for headers in (
        {"Content-Range": "bytes 4-9/10"},
        {"Content-Range": "bytes 5-9/11"},
        {"Content-Range": "bytes 5-9/*"},
        {"Content-Range": "bytes 5-9/10", "Content-Encoding": "gzip"},
        {},
    ):
        assert content_start(206, headers, 5, 10) is None
    assert content_start(200, {"Content-Encoding": "gzip"}, 5, 10) is None


def test_pages() -> None:
    assert next_page({"Link": '<https://h/a?cursor=x>; rel="next"'}) == "https://h/a?cursor=x"
    assert next_page({"Link": '<https://h/b>; rel="prev", <https://h/c>; rel="next"'}) == "https://h/c"
    assert next_page({"Link": '<https://h/b>; rel="prev"'}) is None
    assert next_page({}) is None


async def test_waiting_for_a_lock_is_told(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(locks, "_SAY_EVERY", 0.0)
    world.fake.repo().commit({"p": Lfs(b"weights")})
    path = world.cache / ".locks" / "models--org--m" / f"{sha256(b'weights')}.lock"
    path.parent.mkdir(parents=True)
    held, let_go = threading.Event(), threading.Event()

    def hold() -> None:
        with FileLock(path):
            held.set()
            let_go.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    await anyio.to_thread.run_sync(held.wait)
    with caplog.at_level(logging.INFO, "transmuter_async.hub"):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(world.load)
            await wait_for(lambda: "another process downloads the same file" in caplog.text)
            assert world.fake.asked("resolve") == []
            let_go.set()
    thread.join()
    assert world.told() == [("info", "fetched"), ("dl", "p", 7)]


async def test_without_a_place_for_locks_it_works_all_the_same(world: World) -> None:
    world.fake.repo().commit({"p": Lfs(b"weights")})
    world.cache.mkdir()
    (world.cache / ".locks").write_text("in the way")
    await world.load()
    assert world.told() == [("info", "fetched"), ("dl", "p", 7)]
