"""The fake Hub is true if the official client works on it; and the two clients share one cache."""

from __future__ import annotations

import os
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants

from tests.hub.fake_hub import FakeHub, Lfs

FILES = {
    "config.json": b'{"a": 1}',
    "onnx/model.onnx": Lfs(b"graph" * 1000),
    "onnx/model.onnx_data": Lfs(b"weights" * 5000, xet=True),
    "empty": b"",
    "a b#c%20é.txt": b"odd name",
}


@pytest.fixture
def hub():
    with FakeHub() as fake:
        yield fake


@pytest.mark.parametrize("direct", [False, True])
def test_the_official_client_works_on_the_fake(hub: FakeHub, tmp_path: Path, direct: bool, monkeypatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    hub.repo().direct = direct
    commit = hub.repo().commit(FILES)
    folder = Path(huggingface_hub.snapshot_download("org/m", endpoint=hub.endpoint, cache_dir=tmp_path, token="secret"))
    assert folder.name == commit
    for name, value in FILES.items():
        assert (folder / name).read_bytes() == (value.data if isinstance(value, Lfs) else value)
        one = huggingface_hub.hf_hub_download("org/m", name, endpoint=hub.endpoint, cache_dir=tmp_path / "2", token=False)
        assert os.path.getsize(one) == (folder / name).stat().st_size
    assert not [each for each in hub.requests if each.kind == "unknown"]
    assert all(each.token is None for each in hub.requests if each.kind == "cdn")
    with pytest.raises(huggingface_hub.errors.EntryNotFoundError):
        huggingface_hub.hf_hub_download("org/m", "absent", endpoint=hub.endpoint, cache_dir=tmp_path)
    with pytest.raises(huggingface_hub.errors.RevisionNotFoundError):
        huggingface_hub.hf_hub_download("org/m", "empty", revision="no", endpoint=hub.endpoint, cache_dir=tmp_path)
    with pytest.raises(huggingface_hub.errors.RepositoryNotFoundError):
        huggingface_hub.hf_hub_download("org/no", "empty", endpoint=hub.endpoint, cache_dir=tmp_path)
