"""External data: known keys, inside of the file, inside of the folder, and no links but those that were allowed."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper

from tests.graph.build import everything, model, same
from transmuter_async.errors import InvalidModel
from transmuter_async.graph import Model, read_model

DATA = np.arange(64, dtype=np.float32)


def tensor(**entries: str) -> TensorProto:
    proto = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[16], data_location=TensorProto.EXTERNAL)
    for key, value in entries.items():
        proto.external_data.add(key=key, value=value)
    return proto


def write(folder: Path, **entries: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "weights.bin").write_bytes(DATA.tobytes())
    path = folder / "model.onnx"
    path.write_bytes(model([helper.make_node("Identity", ["x"], ["y"])], initializers=[tensor(**entries)]).SerializeToString())
    return path


def load(path: Path, **options: object) -> Model:
    return read_model(path, known=everything, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("entries", "start"),
    [
        ({"location": "weights.bin"}, 0),
        ({"location": "./weights.bin", "offset": "64", "length": "64"}, 16),
        ({"location": "weights.bin", "offset": "192", "checksum": "x", "prepacked_0": "a|1|2"}, 48),
    ],
)
def test_reads_its_part_of_the_file(tmp_path: Path, entries: dict[str, str], start: int) -> None:
    array = load(write(tmp_path, **entries)).graph.initializers["w"]
    assert same(array, DATA[start : start + 16])
    assert array.ctypes.data % 64 == 0
    assert not array.flags.writeable


@pytest.mark.parametrize(
    ("entries", "text"),
    [
        ({"location": "missing.bin"}, "there is no .*missing.bin"),
        ({"offset": "0"}, "names no file"),
        ({"location": "weights.bin", "offset": "200"}, "has only 256"),
        ({"location": "weights.bin", "offset": "99999999999999999999999"}, "no byte count"),
        ({"location": "weights.bin", "offset": "-4"}, "no byte count"),
        ({"location": "weights.bin", "length": "60"}, "takes 64 bytes"),
        ({"location": "weights.bin", "length": "²"}, "no byte count"),
        ({"location": "weights.bin", "codec": "zip"}, "unknown key 'codec'"),
        ({"location": "/etc/passwd"}, "not a plain path"),
        ({"location": "../weights.bin"}, "not a plain path"),
        ({"location": "a/../../weights.bin"}, "not a plain path"),
        ({"location": "..\\weights.bin"}, "not a plain path"),
        ({"location": "C:weights.bin"}, "not a plain path"),
        ({"location": "\\\\host\\share"}, "not a plain path"),
        ({"location": "a//b"}, "not a plain path"),
        ({"location": "a\0b"}, "not a plain path"),
        ({"location": "."}, "not a plain path"),
        ({"location": "folder"}, "not a regular file"),
        ({"location": "pipe"}, "not a regular file"),
    ],
)
def test_refuses(tmp_path: Path, entries: dict[str, str], text: str) -> None:
    path = write(tmp_path / "m", **entries)
    (tmp_path / "weights.bin").write_bytes(DATA.tobytes())
    (path.parent / "folder").mkdir()
    os.mkfifo(path.parent / "pipe")
    with pytest.raises(InvalidModel, match=text):
        load(path)


def test_a_key_twice_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, location="weights.bin")
    proto = tensor(location="weights.bin")
    proto.external_data.add(key="location", value="other.bin")
    path.write_bytes(model([helper.make_node("Identity", ["x"], ["y"])], initializers=[proto]).SerializeToString())
    with pytest.raises(InvalidModel, match="repeats key 'location'"):
        load(path)


def test_links_are_followed_only_when_allowed(tmp_path: Path) -> None:
    path = write(tmp_path / "m", location="link.bin")
    (tmp_path / "blob").write_bytes(DATA.tobytes())
    link = path.parent / "link.bin"
    link.symlink_to(tmp_path / "blob")
    with pytest.raises(InvalidModel, match=r"link\.bin is a link"):
        load(path)
    assert same(load(path, allowed_links=frozenset({str(link)})).graph.initializers["w"], DATA[:16])
    with pytest.raises(InvalidModel, match="is a link"):
        load(path, allowed_links=frozenset({str(tmp_path / "blob")}))


def test_a_link_on_the_way_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "m", location="sub/weights.bin")
    (tmp_path / "else").mkdir()
    (tmp_path / "else" / "weights.bin").write_bytes(DATA.tobytes())
    (path.parent / "sub").symlink_to(tmp_path / "else")
    with pytest.raises(InvalidModel, match="sub is a link"):
        load(path)


def test_a_folder_below_is_fine(tmp_path: Path) -> None:
    path = write(tmp_path / "m", location="sub/weights.bin")
    (path.parent / "sub").mkdir()
    (path.parent / "weights.bin").rename(path.parent / "sub" / "weights.bin")
    assert same(load(path).graph.initializers["w"], DATA[:16])


def test_the_model_itself_may_be_a_link(tmp_path: Path) -> None:
    """In the Hub's cache it always is; the folder is then that of the link."""
    path = write(tmp_path / "m", location="weights.bin")
    path.rename(tmp_path / "blob")
    path.symlink_to(tmp_path / "blob")
    assert same(load(path).graph.initializers["w"], DATA[:16])


def test_bytes_need_a_folder(tmp_path: Path) -> None:
    data = write(tmp_path, location="weights.bin").read_bytes()
    with pytest.raises(InvalidModel, match="base_dir"):
        read_model(data, known=everything)
    assert same(read_model(data, known=everything, base_dir=tmp_path).graph.initializers["w"], DATA[:16])


def test_a_change_while_reading_is_noticed(tmp_path: Path) -> None:
    path = write(tmp_path, location="weights.bin")

    def touch(domain: str, name: str, opset: int) -> bool:
        (tmp_path / "weights.bin").write_bytes(b"new" * 100)
        return True

    with pytest.raises(InvalidModel, match="changed while it was read"):
        read_model(path, known=touch)


def test_no_descriptor_stays_open(tmp_path: Path) -> None:
    path = write(tmp_path, location="weights.bin")
    bad = write(tmp_path / "bad", location="weights.bin", offset="250")
    before = len(list(Path("/proc/self/fd").iterdir()))
    load(path)
    with pytest.raises(InvalidModel):
        load(bad)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
