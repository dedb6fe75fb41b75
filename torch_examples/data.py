"""Images as tensors, without a download.

The digits inside scikit-learn, or MNIST or CIFAR-10 files that are already on your disk.
"""

import gzip
import pickle
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

MNIST_FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
CIFAR_FILES = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")
CIFAR_BINARY = tuple(f"{name}.bin" for name in CIFAR_FILES)
CIFAR_ARCHIVES = ("cifar-10-python.tar.gz", "cifar-10-binary.tar.gz")


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
    """scikit-learn's digits, or the MNIST or CIFAR-10 files found in ``data_dir``."""
    if data_dir is None:
        return _digits()
    root = Path(data_dir)
    for folder in (root / "MNIST" / "raw", root):
        if files := _mnist_files(folder):
            return _mnist(files)
    for folder in (root / "cifar-10-batches-py", root / "cifar-10-batches-bin", root):
        for names, read in ((CIFAR_FILES, _cifar_pickle), (CIFAR_BINARY, _cifar_records)):
            if all((folder / name).is_file() for name in names):
                return _cifar10([read(folder / name) for name in names])
    for archive in (root / name for name in CIFAR_ARCHIVES):
        if archive.is_file():
            raise FileNotFoundError(f"{archive} is still packed: tar -xzf {archive} -C {root}")
    raise FileNotFoundError(
        f"--data {root}: no complete data set there. Expected either\n"
        f"  MNIST, in {root / 'MNIST' / 'raw'} or {root}, plain or .gz:\n"
        f"    {', '.join(MNIST_FILES)}\n"
        f"  CIFAR-10, in {root / 'cifar-10-batches-py'} or {root}:\n"
        f"    {', '.join(CIFAR_FILES)}\n"
        f"  or the same in binary, {CIFAR_BINARY[0]} and so on\n"
        "Without --data the 1797 digits that come with scikit-learn are used."
    )


def _digits() -> Data:
    from sklearn.datasets import load_digits  # noqa: PLC0415 - MNIST and CIFAR-10 go without

    images, labels = load_digits(return_X_y=True)
    # RandomState, not default_rng: numpy promises that its stream never changes, so neither does
    # this split.
    order = np.random.RandomState(0).permutation(len(images))
    images, labels = images[order].reshape(-1, 1, 8, 8), labels[order]
    split = len(images) * 4 // 5
    return _normalise(images[:split], labels[:split], images[split:], labels[split:])


def _mnist_files(folder: Path) -> list[Path] | None:
    """The four files, each plain or packed; None if one is missing."""
    plain = [folder / name for name in MNIST_FILES]
    files = [path if path.is_file() else path.with_name(f"{path.name}.gz") for path in plain]
    return files if all(path.is_file() for path in files) else None


def _mnist(files: list[Path]) -> Data:
    train_x, train_y, test_x, test_y = (_read_idx(path) for path in files)
    return _normalise(train_x[:, None], train_y, test_x[:, None], test_y)


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


class _ArraysOnly(pickle.Unpickler):
    """A pickle may run any code when it is loaded; this one may only make numpy arrays."""

    allowed = frozenset(
        {
            ("numpy._core.multiarray", "_reconstruct"),
            ("numpy", "ndarray"),
            ("numpy", "dtype"),
            ("_codecs", "encode"),
        }
    )

    def find_class(self, module: str, name: str) -> Any:
        module = module.replace("numpy.core", "numpy._core")  # files from before numpy 2
        if (module, name) not in self.allowed:
            raise pickle.UnpicklingError(
                f"refused: the file asks for {module}.{name}, CIFAR-10's own files do not"
            )
        return super().find_class(module, name)


def _cifar_pickle(path: Path) -> tuple[np.ndarray, np.ndarray]:
    with path.open("rb") as file:
        batch = _ArraysOnly(file, encoding="latin1").load()  # written by Python 2
    return batch["data"], np.asarray(batch["labels"])


def _cifar_records(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """A byte for the label, then 3072 for the image: red, green, blue, each by rows."""
    raw = np.fromfile(path, np.uint8)
    if raw.size == 0 or raw.size % 3073:
        raise ValueError(f"{path} holds {raw.size} bytes, no multiple of 3073: download it again")
    records = raw.reshape(-1, 3073)
    return records[:, 1:], records[:, 0]


def _cifar10(batches: list[tuple[np.ndarray, np.ndarray]]) -> Data:
    images = [images.reshape(-1, 3, 32, 32) for images, _ in batches]
    labels = [labels for _, labels in batches]
    return _normalise(
        np.concatenate(images[:-1]), np.concatenate(labels[:-1]), images[-1], labels[-1]
    )


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
