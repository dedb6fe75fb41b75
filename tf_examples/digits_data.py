"""Handwritten digits as arrays, without a download: the 1797 inside scikit-learn."""

from typing import NamedTuple

import numpy as np
from sklearn.datasets import load_digits


class Data(NamedTuple):
    """Images are float32 (n, 8, 8, 1) of mean 0 and deviation 1; labels int64."""

    train_x: np.ndarray
    train_y: np.ndarray
    test_x: np.ndarray
    test_y: np.ndarray


def load() -> Data:
    """Return the digits, split as in torch_examples/data.py."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.RandomState(0).permutation(len(images))
    images, labels = images[order].reshape(-1, 8, 8, 1), labels[order].astype(np.int64)
    split = len(images) * 4 // 5
    mean, std = images[:split].mean(), images[:split].std()
    images = ((images - mean) / std).astype(np.float32)
    return Data(images[:split], labels[:split], images[split:], labels[split:])


def share(x: np.ndarray, y: np.ndarray, rank: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return a rank's images: as many on every rank, so that all take as many steps."""
    count = len(x) // size
    return x[rank::size][:count], y[rank::size][:count]
