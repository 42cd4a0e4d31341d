"""The environment variables, each of them; and proxies."""

from __future__ import annotations

import os
import urllib.request
from pathlib import Path

import pytest

from tests.hub.fake_hub import FakeHub
from tests.hub.support import World
from transmuter_async.hub import Environment, HubClient, HubConnectionError, HubHTTPError, InvalidReferenceError

HOME = {"HF_HOME": "/h"}


def test_the_cache() -> None:
    user = Path("~").expanduser()
    for variables, cache in (
        ({}, user / ".cache/huggingface/hub"),
        ({"XDG_CACHE_HOME": "/x"}, Path("/x/huggingface/hub")),
        ({"HF_HOME": "/h", "XDG_CACHE_HOME": "/x"}, Path("/h/hub")),
        ({"HUGGINGFACE_HUB_CACHE": "/old", "HF_HOME": "/h"}, Path("/old")),
        ({"HF_HUB_CACHE": "~/c", "HUGGINGFACE_HUB_CACHE": "/old"}, user / "c"),
        ({"HF_HUB_CACHE": ""}, user / ".cache/huggingface/hub"),
    ):
        assert Environment.read(variables).cache == cache


def test_the_endpoint() -> None:
    assert Environment.read({}).endpoint == "https://huggingface.co"
    assert Environment.read({"HF_ENDPOINT": "http://mirror/hf/"}).endpoint == "http://mirror/hf"
    with pytest.raises(InvalidReferenceError, match="HF_ENDPOINT must be a URL"):
        Environment.read({"HF_ENDPOINT": "mirror"})


@pytest.mark.parametrize("value", ["1", "on", "YES", "True"])
def test_switches(value: str) -> None:
    assert Environment.read({"HF_HUB_OFFLINE": value}).offline
    assert Environment.read({"TRANSFORMERS_OFFLINE": value, "HF_HUB_OFFLINE": ""}).offline
    assert not Environment.read({"HF_HUB_OFFLINE": "0", "TRANSFORMERS_OFFLINE": value}).offline
    assert not Environment.read({"HF_HUB_DISABLE_SYMLINKS": value}).symlinks
    assert Environment.read({"HF_TOKEN": "t", "HF_HUB_DISABLE_IMPLICIT_TOKEN": value, **HOME}).token is None


def test_the_token(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    home = {"HF_HOME": str(tmp_path)}
    assert Environment.read(home).token is None
    (tmp_path / "token").write_text(" from file\r\n")
    assert Environment.read(home).token == "from file"
    (tmp_path / "other").write_text("\n")
    assert Environment.read({**home, "HF_TOKEN_PATH": str(tmp_path / "other")}).token is None
    assert Environment.read({**home, "HUGGING_FACE_HUB_TOKEN": "old"}).token == "old"
    assert Environment.read({**home, "HUGGING_FACE_HUB_TOKEN": "old", "HF_TOKEN": "ne\nw\r"}).token == "new"
    assert Environment.read({**home, "HF_TOKEN": " "}).token == "from file"
    assert caplog.text == ""
    assert Environment.read({**home, "HF_TOKEN_PATH": str(tmp_path)}).token is None
    assert "can't be read" in caplog.text
    environment = Environment.read({**home, "HF_TOKEN": "secret", "HTTPS_PROXY": "http://u:secret@p"})
    assert "secret" not in repr(environment)


def test_timeouts(caplog: pytest.LogCaptureFixture) -> None:
    assert Environment.read({}).metadata_timeout == 10
    read = Environment.read({"HF_HUB_ETAG_TIMEOUT": "2.5", "HF_HUB_DOWNLOAD_TIMEOUT": "30"})
    assert (read.metadata_timeout, read.download_timeout) == (2.5, 30)
    assert Environment.read({"HF_HUB_ETAG_TIMEOUT": "0"}).metadata_timeout == 10
    assert caplog.text == ""
    for bad in ("soon", "-1", "nan", "inf"):
        assert Environment.read({"HF_HUB_ETAG_TIMEOUT": bad}).metadata_timeout == 10
        assert f"HF_HUB_ETAG_TIMEOUT='{bad}' is not a number of seconds" in caplog.text


def test_the_user_agent() -> None:
    assert Environment.read({}, version="9").user_agent.startswith("transmuter_async/9; python/3.")
    assert Environment.read({"HF_HUB_USER_AGENT_ORIGIN": "ci\n"}).user_agent.endswith("; origin/ci")
    for name in ("HF_HUB_DISABLE_TELEMETRY", "DISABLE_TELEMETRY", "DO_NOT_TRACK"):
        assert "origin" not in Environment.read({"HF_HUB_USER_AGENT_ORIGIN": "ci", name: "1"}).user_agent


def test_proxies() -> None:
    assert Environment.read({}).proxies == {}
    read = Environment.read({"HTTP_PROXY": "http://big", "http_proxy": "http://small", "NO_PROXY": "a.b"})
    assert read.proxies == {"http": "http://small", "no": "a.b"}
    assert "http" not in Environment.read({"HTTP_PROXY": "http://big", "REQUEST_METHOD": "GET"}).proxies


async def test_the_environment_is_that_of_the_clients_birth(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.fake.repo().commit({"p": b"1"})
    for name, value in (
        ("HF_HUB_CACHE", str(world.cache)),
        ("HF_ENDPOINT", world.fake.endpoint),
        ("HF_TOKEN", "t"),
        ("NO_PROXY", "*"),
    ):
        monkeypatch.setenv(name, value)
    client = HubClient()
    monkeypatch.setenv("HF_ENDPOINT", "http://changed.invalid")
    monkeypatch.delenv("HF_TOKEN")
    async with client as hub:
        found = await hub.download("org/m", "p")
        assert (await hub.environment()).endpoint == world.fake.endpoint
    assert found["p"].is_relative_to(world.cache)
    assert world.fake.requests[0].token == "Bearer t"


async def test_a_proxy_is_used_and_can_be_left_out(world: World) -> None:
    world.fake.repo().commit({"p": b"1"})
    with FakeHub() as proxy:
        proxies = {"http": proxy.endpoint}
        with pytest.raises(
            HubHTTPError, match="404"
        ):  # what our stand-in for a proxy says to an address that it does not know
            await world.load(client={"proxies": proxies})
        (request,) = proxy.requests
        assert request.headers["Host"] == f"127.0.0.1:{world.fake.hub_port}"
        assert world.fake.requests == []
        count = len(proxy.requests)
        await world.load(client={"proxies": {**proxies, "no": "127.0.0.1,localhost"}})
        assert len(proxy.requests) == count
    with pytest.raises(HubConnectionError, match="'socks5', which is not supported"):
        await world.load(client={"proxies": {"all": "socks5://127.0.0.1:1"}}, revision="other")
    with pytest.raises(HubConnectionError, match="the proxy refused") as caught:
        await world.load(client={"proxies": {"http": "http://u:secret@127.0.0.1:9"}}, revision="other")
    assert "secret" not in str(caught.value)
    assert world.naps.seconds == []


@pytest.mark.parametrize(
    "endpoint",
    [
        "http://h:notaport",
        "http://h:99999",
        "http://h:0",
        "http://[::1",
        "http://h/a b",
        "http://h/?x=1",
        "https://h#x",
        "https://user:opensesame@h",
        "ftp://h",
    ],
)
def test_an_endpoint_that_is_none(endpoint: str) -> None:
    with pytest.raises(InvalidReferenceError, match="HF_ENDPOINT must be a URL") as caught:
        Environment.read({"HF_ENDPOINT": endpoint, "HOME": "/nowhere"})
    assert "opensesame" not in str(caught.value)


def test_nobody_knows_a_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # what it does for a user without one
    monkeypatch.setattr(Path, "expanduser", lambda self: (_ for _ in ()).throw(RuntimeError("no home")))
    found = Environment.read({"HF_HUB_CACHE": str(tmp_path)})
    assert found.cache == tmp_path
    assert found.token is None


def test_the_proxies_of_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("getproxies_macosx_sysconf", "getproxies_registry"):
        monkeypatch.delattr(urllib.request, name, raising=False)
    assert Environment.read({}).proxies == {}
    monkeypatch.setattr(urllib.request, "getproxies_registry", lambda: {"https": "http://proxy:1"}, raising=False)
    assert Environment.read({}).proxies == {"https": "http://proxy:1"}
    assert Environment.read({"https_proxy": "http://mine:1"}).proxies == {"https": "http://mine:1"}


@pytest.mark.parametrize("token", ["hf_pässword", "hf_a\x00b", "hf_a\tb"])
def test_a_text_that_can_not_be_sent_is_no_token(token: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert Environment.read({**HOME, "HF_TOKEN": token}).token is None
    (tmp_path / "token").write_text(token)
    assert Environment.read({"HF_HOME": str(tmp_path)}).token is None
    assert [record.getMessage().count("going on without") for record in caplog.records] == [1, 1]
    assert token not in caplog.text
