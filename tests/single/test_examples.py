"""torch_examples/: reading data, the model zoo, and the scripts' functions.

Runs with horovodrun are in tests/parallel.
"""

from __future__ import annotations

import gzip
import importlib.util
import os
import struct
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).resolve().parents[2] / "torch_examples"
BESIDE = ("data", "models", "report")  # what the scripts import


def _load(name: str) -> ModuleType:
    """A script of the folder, as Python would run it: with its neighbours in reach."""
    kept = {beside: sys.modules.pop(beside, None) for beside in BESIDE}
    sys.path.insert(0, str(FOLDER))
    try:
        path = FOLDER / f"{name}.py"
        spec = importlib.util.spec_from_file_location(f"torch_examples_{name}", path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        return module
    finally:
        sys.path.remove(str(FOLDER))
        for beside, module in kept.items():
            sys.modules.pop(beside, None)
            if module is not None:
                sys.modules[beside] = module


data, models = _load("data"), _load("models")
lm, resume = _load("language_model"), _load("resume")


# Data -------------------------------------------------------------------------------------------


def _idx(values: np.ndarray) -> bytes:
    shape = struct.pack(f">{values.ndim}i", *values.shape)
    return bytes([0, 0, 8, values.ndim]) + shape + values.tobytes()


def _write_mnist(folder: Path, packed: bool) -> np.ndarray:
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    train, test = (rng.integers(0, 256, (n, 28, 28), dtype=np.uint8) for n in (6, 4))
    arrays = (train, np.arange(6, dtype=np.uint8), test, np.arange(4, dtype=np.uint8))
    for name, array in zip(data.MNIST_FILES, arrays, strict=True):
        raw = _idx(array)
        if packed:
            (folder / f"{name}.gz").write_bytes(gzip.compress(raw))
        else:
            (folder / name).write_bytes(raw)
    return train


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gz"])
@pytest.mark.parametrize("folder", ["MNIST/raw", "."])
def test_mnist_is_read_where_torchvision_puts_it(
    tmp_path: Path, folder: str, packed: bool
) -> None:
    images = _write_mnist(tmp_path / "root" / folder, packed)
    loaded = data.load(tmp_path / "root")
    assert loaded.train_x.shape == (6, 1, 28, 28)
    assert loaded.test_x.shape == (4, 1, 28, 28)
    assert loaded.train_x.dtype == torch.float32
    assert loaded.train_y.tolist() == [0, 1, 2, 3, 4, 5]
    assert loaded.train_y.dtype == torch.int64
    assert loaded.train_x.mean().item() == pytest.approx(0, abs=1e-5)
    assert loaded.train_x.std(correction=0).item() == pytest.approx(1, abs=1e-5)
    normal = (images - images.mean()) / images.std()
    np.testing.assert_allclose(loaded.train_x[:, 0].numpy(), normal, atol=1e-5)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"<html>", "not an idx file"),
        (_idx(np.zeros((6, 28, 28), np.uint8))[:-5], "4699 bytes"),
        (None, ""),
    ],
    ids=["another kind", "cut short", "gone"],
)
def test_a_damaged_mnist_file_is_named(tmp_path: Path, raw: bytes | None, message: str) -> None:
    if raw is not None:
        _write_mnist(tmp_path / "raw", packed=False)
        (tmp_path / "raw" / data.MNIST_FILES[0]).write_bytes(raw)
    error = FileNotFoundError if raw is None else ValueError
    with pytest.raises(error, match=f"(?s){data.MNIST_FILES[0]}.*{message}"):
        data.load(tmp_path / "raw")


# Models -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "tensors", "parameters"),
    [
        ("resnet18", 62, 11_689_512),
        ("resnet50", 161, 25_557_032),
        ("vgg16", 32, 138_357_544),
        ("densenet121", 364, 7_978_856),
    ],
)
def test_imagenet_models_have_their_published_size(
    name: str, tensors: int, parameters: int
) -> None:
    with torch.device("meta"):  # shapes only: no memory, no time
        model = models.build(name)
    sizes = [p.numel() for p in model.parameters()]
    assert (len(sizes), sum(sizes)) == (tensors, parameters)


# The language model -----------------------------------------------------------------------------


@pytest.fixture
def transformer() -> torch.nn.Module:
    torch.manual_seed(0)
    return lm.Transformer(11, context=8, width=16, layers=2, heads=2, dropout=0.1).eval()


def test_a_later_character_does_not_change_what_is_expected_before_it(
    transformer: torch.nn.Module,
) -> None:
    ids = torch.arange(8)[None]
    changed = ids.clone()
    changed[0, 5] = 10
    with torch.no_grad():
        before, after = transformer(ids), transformer(changed)
    torch.testing.assert_close(before[:, :5], after[:, :5])
    assert (before[:, 5:] != after[:, 5:]).any(-1).all()


def test_shares_are_equal_and_disjoint() -> None:
    ids = torch.arange(101)
    shares = [lm.share(ids, rank, 3, context=4).tolist() for rank in range(3)]
    assert [len(share) for share in shares] == [33, 33, 33]
    assert [i for share in shares for i in share] == list(range(99))
    with pytest.raises(SystemExit, match=r"33 each, --context 33"):
        lm.share(ids, 0, 3, context=33)


# Checkpoints ------------------------------------------------------------------------------------


def test_an_epoch_shows_every_rank_other_images_and_no_image_twice() -> None:
    epoch = [resume.batch(50, 4, step, 1, rank, 3) for step in range(4) for rank in range(3)]
    seen = torch.cat(epoch).tolist()
    assert len(seen) == len(set(seen)) == 48
    again = [resume.batch(50, 4, step, 1, rank, 3) for step in range(4) for rank in range(3)]
    assert all(torch.equal(a, b) for a, b in zip(epoch, again, strict=True))
    assert not torch.equal(resume.batch(50, 4, 4, 1, 0, 3), epoch[0])  # the next epoch's first
    with pytest.raises(SystemExit, match="--batch-size 16 or less"):
        resume.batch(50, 17, 0, 1, 0, 3)


def test_a_save_that_fails_leaves_the_checkpoint_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "step-000010.pt"
    resume.save(path, {"step": 10})

    def full(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space"):
        resume.save(path, {"step": 20})
    assert torch.load(path, weights_only=True) == {"step": 10}


@pytest.fixture
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> list[list[int] | None]:
    """Rank 0 of two; the list is what Horovod gathers, rank 0's own put first."""
    others: list[list[int] | None] = []
    monkeypatch.setattr(resume.hvd, "rank", lambda: 0)
    monkeypatch.setattr(resume.hvd, "allgather_object", lambda mine, **_: [mine, *others])
    return others


def test_the_newest_checkpoint_is_the_newest_that_all_ranks_have(
    tmp_path: Path, two_ranks: list[list[int] | None]
) -> None:
    checkpoints = resume.Checkpoints(tmp_path / "new", each_rank=True)
    two_ranks.append([])
    assert checkpoints.newest() is None
    for step in (9, 10, 1_000_000):
        checkpoints.save(step, {"step": step})
    (tmp_path / "new" / "step-000011.rank0.part").touch()  # was being written
    (tmp_path / "new" / "step-000012.rank1.pt").touch()  # is not ours
    assert checkpoints.steps() == [10, 1_000_000]  # the newest and the one before it
    two_ranks[0] = [9, 10]
    assert checkpoints.newest() == 10
