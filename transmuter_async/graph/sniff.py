"""What a file is when it is no ONNX model: named as such, with what to do."""

from __future__ import annotations

__all__ = ["SNIFFED_BYTES", "explain_foreign"]

SNIFFED_BYTES = 1024

_LFS = b"version https://git-lfs"
_MAGIC: tuple[tuple[bytes, str], ...] = (
    (b"PK\x03\x04", "a ZIP archive (PyTorch checkpoints are ZIP archives too). Unpack it, or export the model to ONNX."),
    (b"PK\x05\x06", "an empty ZIP archive. Fetch the model again."),
    (b"\x1f\x8b", "a gzip file. Unpack it first."),
    (b"\x89HDF", "an HDF5 file (Keras). Export the model to ONNX, for instance with tf2onnx."),
    (b"GGUF", "a GGUF file (llama.cpp). Export the original model to ONNX."),
    (b"ORTM", "an onnxruntime .ort file. Give the .onnx file that it was made from."),
    (b"\x93NUMPY", "a numpy array. Give the model file."),
    (b"%PDF", "a PDF document. Give the model file."),
    (b"\x89PNG", "a PNG image. Give the model file."),
    (b"\x7fELF", "a program. Give the model file."),
)


def explain_foreign(start: bytes, size: int) -> str | None:
    """What a file of `size` bytes that begins with `start` is instead of an ONNX model; None where it may be one.

    An ONNX model begins with a protobuf field of ModelProto: 0x08, the IR version, in nearly all files.
    """
    if size == 0:
        return "the file is empty. Fetch or export it again."
    if start.startswith(_LFS):
        return (
            "this is a Git-LFS pointer, not the model: a text that stands for the file in a repository. "
            "Run `git lfs pull` there, or load the model by its hf:// name."
        )
    for magic, what in _MAGIC:
        if start.startswith(magic):
            return f"this is {what}"
    if start[4:8] == b"TFL3":
        return "this is a TensorFlow Lite file. Export the model to ONNX, for instance with tf2onnx."
    if len(start) >= 9 and start[8:9] == b"{" and int.from_bytes(start[:8], "little") < 100_000_000:
        return "this is a safetensors file: weights without a graph. Export the model to ONNX, for instance with optimum."
    if start[:1] == b"\x80" and start[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05") and start[2:3] in b"\x8a\x95}])cq(":
        return "this is a Python pickle (an old PyTorch checkpoint, perhaps), which is never opened. Export the model to ONNX."
    text = start.removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    if text.startswith((b"<!doctype", b"<html", b"<?xml", b"<head", b"<body")):
        return (
            "this is a web page, not a model: the server answered with HTML, often an error or a login page. "
            "Use the address of the file itself (on the Hub: /resolve/ instead of /blob/)."
        )
    if text.startswith((b"{", b"[")) and _is_text(start):
        return "this is JSON text, not a model: an error of a server, or a configuration file. Give the .onnx file."
    if len(start) >= 8 and _is_text(start):
        return "this is a text file, not a model. Give the .onnx file."
    return None


def _is_text(start: bytes) -> bool:
    """Printable ASCII and white space only."""
    return all(32 <= byte < 127 or byte in b"\t\r\n\f" for byte in start)
