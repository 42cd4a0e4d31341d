"""The ONNX files of a repository by what they are: which model, at which precision. And which one is meant by `org/name`."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable
from dataclasses import dataclass

from transmuter_async.hub.errors import EntryNotFoundError, InvalidReferenceError
from transmuter_async.hub.listing import Listing

__all__ = ["Variant", "choose_variant", "list_variants"]

_PRECISIONS = {
    "": "fp32",
    "fp32": "fp32",
    "fp16": "fp16",
    "bf16": "bf16",
    "int8": "int8",
    "uint8": "uint8",
    "quantized": "int8",
    "q8": "int8",
    "q4": "q4",
    "q4f16": "q4f16",
    "bnb4": "bnb4",
    "int4": "int4",
    "o1": "fp32",
    "o2": "fp32",
    "o3": "fp32",
    "o4": "fp16",
}
_QUANTIZED_FOR = re.compile(r"q(u?)int8(_\w+)*", re.IGNORECASE)  # qint8_avx512_vnni, quint8_avx2
_DATA = re.compile(r"(.*\.onnx)(?:_data|\.data)(?:_\d+)?", re.DOTALL)
_NAMES_SHOWN = 30


@dataclass(frozen=True, slots=True)
class Variant:
    """One ONNX file of a repository.

    Attributes:
        file: Path in the repository.
        model: Name without the variant: `model`, `decoder_model_merged`.
        variant: What follows the model's name: `""`, `fp16`, `q4`, `O3`; `variant=` takes it.
        precision: What that usually means: `fp32`, `fp16`, `bf16`, `int8`, `uint8`, `q4`, `q4f16`, `bnb4`, `int4`.
        size: Bytes of the file, None when the Hub does not say.
        data_size: Bytes of the files beside it that look like its external data.
    """

    file: str
    model: str
    variant: str
    precision: str
    size: int | None
    data_size: int


def list_variants(listing: Listing) -> tuple[Variant, ...]:
    """All ONNX files of a commit, in the order of their names."""
    data: dict[str, int] = {}
    for name, info in listing.files.items():
        beside = _DATA.fullmatch(name)
        if beside:
            data[beside[1]] = data.get(beside[1], 0) + (info.size or 0)
    files = sorted(file for file in listing.files if file.endswith(".onnx"))
    return tuple(_variant(file, listing.files[file].size, data.get(file, 0)) for file in files)


def choose_variant(listing: Listing, file: str | None, variant: str | None) -> str:
    """The ONNX file that is meant.

    Args:
        listing: The commit.
        file: A file that was named, None for a bare repository. With a variant: that variant of the same model in the same folder.
        variant: As in `Variant.variant`, None for what is obvious: the only ONNX file, or the only `model.onnx` without a variant.

    Raises:
        EntryNotFoundError: There is no such file. The text says which exist.
        InvalidReferenceError: Several are meant. The text says which.
    """
    if file is not None and variant is None:
        return file
    found = list_variants(listing)
    if not found:
        raise EntryNotFoundError(
            f"{listing.repo} has no ONNX file. Look for an export of it on the Hub (often under onnx-community/ or Xenova/), or export it.",
            repo=listing.repo,
        )
    meant = [each for each in found if variant is None or each.variant == variant or _stem(each.file) == variant]
    if file is not None:
        model = _split(_stem(file))[0]
        meant = [
            each for each in meant if each.model == model and posixpath.dirname(each.file) == posixpath.dirname(file)
        ]
    for narrower in (
        meant,
        [each for each in meant if each.model == "model"],
        [each for each in meant if _stem(each.file) == "model"],
    ):
        if len(narrower) == 1:
            return narrower[0].file
    names = _names(meant or found)
    what = "no variant" if variant is None else f"no variant {variant!r}"
    if not meant:
        raise EntryNotFoundError(
            f"{listing.repo} has {what} of the model asked for; it has {names}.", repo=listing.repo, file=file or ""
        )
    raise InvalidReferenceError(
        f"{listing.repo} has several ONNX files that may be meant: {names}. Name one: 'hf://{listing.repo}/{meant[0].file}'."
    )


def _names(variants: Iterable[Variant]) -> str:
    files = [each.file for each in variants]
    more = len(files) - _NAMES_SHOWN
    return ", ".join(files[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _stem(file: str) -> str:
    return posixpath.basename(file).removesuffix(".onnx")


def _split(stem: str) -> tuple[str, str]:
    """Model and variant in a file's name."""
    for position in [found.start() for found in re.finditer("_", stem)]:
        rest = stem[position + 1 :]
        if rest.lower() in _PRECISIONS or _QUANTIZED_FOR.fullmatch(rest):
            return stem[:position], rest
    return stem, ""


def _variant(file: str, size: int | None, data_size: int) -> Variant:
    model, variant = _split(_stem(file))
    quantized = _QUANTIZED_FOR.fullmatch(variant)
    precision = _PRECISIONS.get(variant.lower()) or ("uint8" if quantized and quantized[1] else "int8")
    return Variant(file, model, variant, precision, size, data_size)
