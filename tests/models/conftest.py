"""Real models run on asyncio and trio; uvloop and eager tasks are covered by the smaller tests."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture(
    params=[
        pytest.param(("asyncio", {"use_uvloop": False}), id="asyncio"),
        pytest.param(("trio", {}), id="trio"),
    ],
    scope="module",
)
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    return request.param
