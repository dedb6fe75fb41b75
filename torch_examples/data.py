"""Images as tensors, without a download.

The digits inside scikit-learn, or MNIST's files that are already on your disk.
"""

import gzip
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

MNIST_FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)


class Data(NamedTuple):
    """Images are float32 (n, channels, height, width) of mean 0 and deviation 1; labels int64."""

    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor

    @property
    def image(self) -> tuple[int, int, int]:
        _, channels, height, width = self.train_x.shape
        return channels, height, width

    @property
    def num_classes(self) -> int:
        return int(self.train_y.max()) + 1


def load(data_dir: str | Path | None = None) -> Data:
    """scikit-learn's digits, or the MNIST files found in ``data_dir``, plain or packed."""
    if data_dir is None:
        return _digits()
    root = Path(data_dir)
    for folder in (root / "MNIST" / "raw", root):
        plain = [folder / name for name in MNIST_FILES]
        files = [path if path.is_file() else path.with_name(f"{path.name}.gz") for path in plain]
        if all(path.is_file() for path in files):
            train_x, train_y, test_x, test_y = (_read_idx(path) for path in files)
            return _normalise(train_x[:, None], train_y, test_x[:, None], test_y)
    raise FileNotFoundError(
        f"--data {root}: no MNIST there. Expected in {root / 'MNIST' / 'raw'} or {root}, plain "
        f"or .gz: {', '.join(MNIST_FILES)}. Without --data, scikit-learn's 1797 digits are used."
    )


def _digits() -> Data:
    from sklearn.datasets import load_digits  # noqa: PLC0415 - MNIST goes without

    images, labels = load_digits(return_X_y=True)
    # RandomState, not default_rng: numpy promises that its stream never changes, so neither does
    # this split.
    order = np.random.RandomState(0).permutation(len(images))
    images, labels = images[order].reshape(-1, 1, 8, 8), labels[order]
    split = len(images) * 4 // 5
    return _normalise(images[:split], labels[:split], images[split:], labels[split:])


def _read_idx(path: Path) -> np.ndarray:
    """idx: two zero bytes, 8 for uint8, the number of dimensions, each as a big-endian int32."""
    raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    if len(raw) < 4 or raw[:3] != b"\0\0\x08":
        raise ValueError(f"{path} is not an idx file of bytes: download it again")
    ndim = raw[3]
    shape = np.frombuffer(raw, ">i4", count=ndim, offset=4)
    values = np.frombuffer(raw, np.uint8, offset=4 + 4 * ndim)
    if values.size != shape.prod():
        raise ValueError(
            f"{path} holds {values.size} bytes, its header says {shape.prod()}: download it again"
        )
    return values.reshape(shape)


def _normalise(
    train_x: np.ndarray, train_y: np.ndarray, test_x: np.ndarray, test_y: np.ndarray
) -> Data:
    """Each channel to mean 0 and deviation 1, by the training images alone."""
    mean = train_x.mean(axis=(0, 2, 3), keepdims=True)
    std = train_x.std(axis=(0, 2, 3), keepdims=True)

    def tensor(x: np.ndarray) -> Tensor:
        return torch.from_numpy(((x - mean) / std).astype(np.float32))

    def label(y: np.ndarray) -> Tensor:
        return torch.from_numpy(y.astype(np.int64))

    return Data(tensor(train_x), label(train_y), tensor(test_x), label(test_y))
