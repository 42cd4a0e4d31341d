"""Fixtures of the Hub tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hub.fake_hub import FakeHub
from tests.hub.support import World


@pytest.fixture
def fake() -> Iterator[FakeHub]:
    with FakeHub() as hub:
        yield hub


@pytest.fixture
def world(fake: FakeHub, tmp_path: Path) -> World:
    return World(fake, tmp_path / "cache")
