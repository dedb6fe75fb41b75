"""The handwritten digits inside scikit-learn as tensors, without a download."""

from typing import NamedTuple

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor


class Data(NamedTuple):
    """Images are float32 (n, 1, 8, 8) of mean 0 and deviation 1; labels int64."""

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


def load() -> Data:
    """Return the 1797 digits, a fifth of them for tests."""
    images, labels = load_digits(return_X_y=True)
    # RandomState, not default_rng: numpy promises that its stream never changes, so neither does
    # this split.
    order = np.random.RandomState(0).permutation(len(images))
    images, labels = images[order].reshape(-1, 1, 8, 8), labels[order].astype(np.int64)
    split = len(images) * 4 // 5
    mean, std = images[:split].mean(), images[:split].std()
    x, y = torch.from_numpy(((images - mean) / std).astype(np.float32)), torch.from_numpy(labels)
    return Data(x[:split], y[:split], x[split:], y[split:])
