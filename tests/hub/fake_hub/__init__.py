"""A Hub on loopback: two origins, every form of redirect, and every fault that HUB's cases name.

It is only as good as it is true: `test_official_client.py` runs the official client against it.
"""

from __future__ import annotations

from tests.hub.fake_hub.content import Content, Lfs, Repeated, git_sha1, sha256
from tests.hub.fake_hub.faults import Fault
from tests.hub.fake_hub.repository import FakeRepo
from tests.hub.fake_hub.server import FakeHub, Request

__all__ = ["Content", "FakeHub", "FakeRepo", "Fault", "Lfs", "Repeated", "Request", "git_sha1", "sha256"]
