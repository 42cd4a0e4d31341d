"""Operators that move, look up, sort and transform; trees; boxes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from onnx import TensorProto

from tests.benchmarks.build import Case, Draft, single

__all__ = ["FAMILIES"]


def _indices(high: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(5).integers(0, high, shape)


def lookups() -> Iterator[Case]:
    """Gather, Scatter and their kin."""
    yield _embedding()
    yield single("Gather axis 1: 128 of 128×4096", "Gather", [(128, 4096), _indices(4096, 128)], axis=1)
    yield single("GatherElements 128×4096", "GatherElements", [(128, 4096), _indices(4096, 128, 1024)], axis=1)
    yield single("GatherND 1000 rows of 64×64×32", "GatherND", [(64, 64, 32), _indices(64, 1000, 2)])
    rows = np.stack([np.arange(1000) // 64, np.arange(1000) % 64], axis=1)
    yield single("ScatterND 1000 rows into 64×64×32", "ScatterND", [(64, 64, 32), rows, (1000, 32)])
    yield single(
        "ScatterND add, 1000 rows",
        "ScatterND",
        [(64, 64, 32), _indices(64, 1000, 2), (1000, 32)],
        opset=18,
        reduction="add",
    )
    spread = np.broadcast_to(_indices(500, 2000, 1), (2000, 64)).copy()
    yield single(
        "ScatterElements add, 2000 rows into 500×64",
        "ScatterElements",
        [(500, 64), spread, (2000, 64)],
        opset=18,
        reduction="add",
        axis=0,
        tolerance=1e-3,
    )
    yield single("OneHot 512 of 1000", "OneHot", [_indices(1000, 512)], [np.array(1000), np.array([0, 1], np.float32)])
    mask = np.random.default_rng(1).random((256, 1024)) > 0.9
    yield single("NonZero 256×1024", "NonZero", [mask], dtype=TensorProto.INT64)
    yield single("Compress 1024 rows of 64", "Compress", [(1024, 64), mask[0]], axis=0)


def _embedding() -> Case:
    draft = Draft()
    ids, table = draft.input(_indices(30000, 1, 128)), draft.weight((30000, 384))
    return draft.case("Gather 128 rows of 30000×384", draft("Gather", table, ids))


def moves() -> Iterator[Case]:
    """Transpose, Concat, Slice, Pad, Tile and their kin."""
    yield single("Transpose 0213 1×128×12×64", "Transpose", [(1, 128, 12, 64)], perm=[0, 2, 1, 3])
    yield single("Transpose to channels last 1×64×112×112", "Transpose", [(1, 64, 112, 112)], perm=[0, 2, 3, 1])
    yield single("Concat 4 × 64×56×56", "Concat", [(1, 64, 56, 56)] * 4, axis=1)
    yield single(
        "Slice every second of 64×112×112",
        "Slice",
        [(1, 64, 112, 112)],
        [np.array([0, 0]), np.array([112, 112]), np.array([2, 3]), np.array([2, 2])],
    )
    yield single(
        "Pad reflect 64×112×112", "Pad", [(1, 64, 112, 112)], [np.array([0, 0, 3, 3, 0, 0, 3, 3])], mode="reflect"
    )
    yield single("Tile 64×56×56 by 2×2", "Tile", [(1, 64, 56, 56)], [np.array([1, 1, 2, 2])])
    yield single("Expand 1×64×1×1 to 56×56", "Expand", [(1, 64, 1, 1)], [np.array([1, 64, 56, 56])])
    yield single("DepthToSpace 64×56×56", "DepthToSpace", [(1, 64, 56, 56)], blocksize=2, mode="CRD")
    yield single(
        "GridSample 32×64×64",
        "GridSample",
        [(1, 32, 64, 64), np.random.default_rng(0).uniform(-1, 1, (1, 64, 64, 2)).astype(np.float32)],
    )
    yield single("Trilu 12×256×256", "Trilu", [(12, 256, 256)])


def sorting() -> Iterator[Case]:
    """TopK and Unique."""
    for shape, count in (((1, 8400), 100), ((128, 1000), 5), ((1, 50000), 50), ((16, 4096), 4096)):
        yield single(
            f"TopK {count} of {'×'.join(map(str, shape))}", "TopK", [shape], [np.array([count])], outputs=2, axis=-1
        )
    yield single("Unique of 10000", "Unique", [_indices(1000, 10000).astype(np.float32)], outputs=4)
    yield _boxes("NonMaxSuppression: 1000 boxes, 1 class", 1000, 1)
    yield _boxes("NonMaxSuppression: 1000 boxes, 20 classes", 1000, 20)
    yield _boxes("NonMaxSuppression: 8400 boxes, 1 class", 8400, 1)


def _boxes(name: str, count: int, classes: int) -> Case:
    rng = np.random.default_rng(0)
    corners = rng.uniform(0, 600, (1, count, 2))
    boxes = np.concatenate([corners, corners + rng.uniform(10, 60, (1, count, 2))], axis=-1).astype(np.float32)
    scores = rng.random((1, classes, count), np.float32)
    limits = [np.array([100]), np.array([0.5], np.float32), np.array([0.3], np.float32)]
    return single(name, "NonMaxSuppression", [boxes, scores], limits, dtype=TensorProto.INT64)


def spectra() -> Iterator[Case]:
    """STFT and DFT."""
    window = np.hanning(400).astype(np.float32)
    yield single(
        "STFT 1 s at 16 kHz, 400 by 160",
        "STFT",
        [(1, 16000, 1)],
        [np.array(160), window, np.array(400)],
        tolerance=1e-3,
    )
    yield single("DFT 100×512", "DFT", [(100, 512, 1)], axis=1, onesided=1, tolerance=1e-3)
    yield _log_mel()


def _log_mel() -> Case:
    draft = Draft()
    window = draft.weight(np.hanning(512).astype(np.float32))
    spectrum = draft(
        "STFT", draft.input((1, 16000, 1)), draft.weight(np.array(160)), window, draft.weight(np.array(512))
    )
    power = draft("ReduceSumSquare", spectrum, axes=[-1], keepdims=0)
    mel = draft.weight(np.random.default_rng(1).random((257, 80), np.float32))
    y = draft("Log", draft("Max", draft("MatMul", power, mel), draft.weight(np.array(1e-5, np.float32))))
    return draft.case("log-mel of 1 s with STFT", y, tolerance=1e-3)


def trees() -> Iterator[Case]:
    """Tree ensembles as skl2onnx writes them."""
    for rows in (1, 100, 1000):
        yield _forest(rows)
    for rows in (1, 1000):
        yield _boosted(rows)


def _converted(name: str, model: object, x: np.ndarray, options: dict[str, object] | None = None) -> Case:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from skl2onnx import to_onnx

        converted = to_onnx(model, x[:1], options=options, target_opset={"": 17, "ai.onnx.ml": 3})
    return Case(name, converted.SerializeToString(), {converted.graph.input[0].name: x}, 1e-4)


def _forest(rows: int) -> Case:
    from sklearn.ensemble import RandomForestClassifier

    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((2000, 20), np.float32), rng.integers(0, 5, 2000)
    forest = RandomForestClassifier(100, max_depth=8, random_state=0, n_jobs=1).fit(x, y)
    options = {id(forest): {"zipmap": False}}
    return _converted(f"random forest: 100 trees, {rows} rows", forest, x[:rows], options)


def _boosted(rows: int) -> Case:
    from sklearn.ensemble import GradientBoostingRegressor

    rng = np.random.default_rng(0)
    x = rng.standard_normal((1000, 20), np.float32)
    boosted = GradientBoostingRegressor(n_estimators=100, random_state=0).fit(x, x[:, 0] * x[:, 1])
    return _converted(f"boosted trees: 100, {rows} rows", boosted, x[:rows])


FAMILIES: dict[str, Callable[[], Iterator[Case]]] = {
    "lookups": lookups,
    "moves": moves,
    "sorting": sorting,
    "spectra": spectra,
    "trees": trees,
}
