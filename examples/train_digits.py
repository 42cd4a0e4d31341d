"""Train the classifier of handwritten digits that the package carries, and write it as ONNX.

A small convolutional network in plain JAX on the 8x8 digits that scikit-learn ships (1797 images, values 0 to 16).
Seeded, so the same machine and versions give the same file. Needs scikit-learn, jax and onnx; half a minute on a laptop.

    python examples/train_digits.py [folder]     # writes digits.onnx and digits_test.npz, by default into the package

The graph takes `image`, float32 (batch, 1, 8, 8) in 0 to 1, and gives `probabilities`, float32 (batch, 10).
"""

from __future__ import annotations

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

SEED = 20
TEST_SHARE = 0.2
EPOCHS = 60
BATCH = 64
LEARNING_RATE = 2e-3
WEIGHT_DECAY = 1e-4
Params = dict[str, jax.Array]


def load_digits() -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """The images, uint8 (n, 8, 8), and labels of the training and of the test split, the same in every run."""
    from sklearn import datasets

    digits = datasets.load_digits()
    images, labels = digits.images.astype(np.uint8), digits.target.astype(np.uint8)
    order = np.random.default_rng(SEED).permutation(len(labels))
    test, train = np.split(order, [round(TEST_SHARE * len(labels))])
    return (images[train], labels[train]), (images[test], labels[test])


def init(key: jax.Array) -> Params:
    """He-initialised weights in the layout of ONNX: convolutions OIHW, dense (out, in)."""
    shapes = {"conv1": (16, 1, 3, 3), "conv2": (32, 16, 3, 3), "dense1": (64, 32 * 4 * 4), "dense2": (10, 64)}
    params: Params = {}
    for name, shape in shapes.items():
        key, use = jax.random.split(key)
        params[f"{name}.weight"] = jax.random.normal(use, shape) * np.sqrt(2 / np.prod(shape[1:]))
        params[f"{name}.bias"] = jnp.zeros(shape[0])
    return params


def forward(params: Params, images: jax.Array) -> jax.Array:
    """Logits (n, 10) of images (n, 1, 8, 8)."""
    x = images
    for name in ("conv1", "conv2"):
        x = jax.lax.conv_general_dilated(x, params[f"{name}.weight"], (1, 1), "SAME")
        x = jax.nn.relu(x + params[f"{name}.bias"][:, None, None])
    x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "VALID")
    x = x.reshape(len(x), -1)
    x = jax.nn.relu(x @ params["dense1.weight"].T + params["dense1.bias"])
    return x @ params["dense2.weight"].T + params["dense2.bias"]


def loss(params: Params, images: jax.Array, labels: jax.Array) -> jax.Array:
    """Mean cross entropy and a little weight decay."""
    chosen = jax.nn.log_softmax(forward(params, images))[jnp.arange(len(labels)), labels]
    decay = sum(jnp.sum(value**2) for name, value in params.items() if name.endswith("weight"))
    return -chosen.mean() + WEIGHT_DECAY * decay


@jax.jit
def step(params: Params, first: Params, second: Params, count: jax.Array, rate: jax.Array, images, labels):
    """One step of Adam. `first` and `second` are the running moments, `count` the step from 1."""
    gradient = jax.grad(loss)(params, images, labels)
    first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, first, gradient)
    second = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g**2, second, gradient)
    scale = rate * jnp.sqrt(1 - 0.999**count) / (1 - 0.9**count)
    params = jax.tree.map(lambda p, m, v: p - scale * m / (jnp.sqrt(v) + 1e-8), params, first, second)
    return params, first, second


def shifted(images: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Each image moved by up to one pixel, so that the network does not learn positions by heart."""
    padded = np.pad(images, ((0, 0), (1, 1), (1, 1)))
    moves = random.integers(0, 3, (len(images), 2))
    return np.stack([image[y : y + 8, x : x + 8] for image, (y, x) in zip(padded, moves, strict=True)])


def scaled(images: np.ndarray) -> np.ndarray:
    """What the graph takes: float32 (n, 1, 8, 8) in 0 to 1."""
    return images[:, None].astype(np.float32) / 16


def train(images: np.ndarray, labels: np.ndarray) -> Params:
    """Parameters after `EPOCHS` passes over the training split."""
    random = np.random.default_rng(SEED)
    params = init(jax.random.key(SEED))
    first = second = jax.tree.map(jnp.zeros_like, params)
    count = 0
    for epoch in range(EPOCHS):
        rate = LEARNING_RATE * 0.5 * (1 + np.cos(np.pi * epoch / EPOCHS))
        order = random.permutation(len(labels))
        for start in range(0, len(order) - BATCH + 1, BATCH):
            chosen = order[start : start + BATCH]
            count += 1
            batch = scaled(shifted(images[chosen], random))
            params, first, second = step(params, first, second, float(count), rate, batch, labels[chosen])
    return params


def to_onnx(params: Params) -> onnx.ModelProto:
    """The network as a graph of the standard's operators, opset 17, with an open batch dimension."""
    conv = {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1]}
    nodes = [
        helper.make_node("Conv", ["image", "conv1.weight", "conv1.bias"], ["conv1"], "conv1", **conv),
        helper.make_node("Relu", ["conv1"], ["relu1"], "relu1"),
        helper.make_node("Conv", ["relu1", "conv2.weight", "conv2.bias"], ["conv2"], "conv2", **conv),
        helper.make_node("Relu", ["conv2"], ["relu2"], "relu2"),
        helper.make_node("MaxPool", ["relu2"], ["pooled"], "pool", kernel_shape=[2, 2], strides=[2, 2]),
        helper.make_node("Flatten", ["pooled"], ["flat"], "flatten"),
        helper.make_node("Gemm", ["flat", "dense1.weight", "dense1.bias"], ["dense1"], "dense1", transB=1),
        helper.make_node("Relu", ["dense1"], ["relu3"], "relu3"),
        helper.make_node("Gemm", ["relu3", "dense2.weight", "dense2.bias"], ["logits"], "dense2", transB=1),
        helper.make_node("Softmax", ["logits"], ["probabilities"], "softmax", axis=-1),
    ]
    graph = helper.make_graph(
        nodes,
        "digits",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["batch", 1, 8, 8])],
        [helper.make_tensor_value_info("probabilities", TensorProto.FLOAT, ["batch", 10])],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in params.items()],
    )
    model = helper.make_model(
        graph,
        opset_imports=[helper.make_opsetid("", 17)],
        ir_version=8,
        producer_name="transmuter_async examples/train_digits.py",
    )
    onnx.checker.check_model(model, full_check=True)
    return model


def main(folder: Path) -> float:
    """Train, write the files into `folder`, and give the accuracy on the test split."""
    (images, labels), (test_images, test_labels) = load_digits()
    params = train(images, labels)
    answers = np.asarray(forward(params, scaled(test_images))).argmax(-1)
    accuracy = float((answers == test_labels).mean())
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "digits.onnx").write_bytes(to_onnx(params).SerializeToString(deterministic=True))
    np.savez_compressed(folder / "digits_test.npz", images=test_images, labels=test_labels)
    return accuracy


if __name__ == "__main__":
    package = Path(__file__).resolve().parents[1] / "transmuter_async" / "demo"
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else package
    print(f"accuracy on {round(TEST_SHARE * 1797)} test images: {main(target):.2%}, written to {target}")
