"""torch_examples/: reading data, the model zoo, the report. Runs with horovodrun are elsewhere."""

import argparse
import gzip
import importlib.util
import pickle
import struct
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

torch = pytest.importorskip("torch")

FOLDER = Path(__file__).resolve().parents[2] / "torch_examples"


def _load(name: str) -> ModuleType:
    """A module of the folder, under a name that other folders' ``data.py`` cannot take."""
    spec = importlib.util.spec_from_file_location(f"torch_examples_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


data, models = _load("data"), _load("models")


@pytest.fixture(scope="module")
def report() -> ModuleType:
    pytest.importorskip("matplotlib")
    return _load("report")


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


def _write_cifar(folder: Path) -> None:
    folder.mkdir()
    rng = np.random.default_rng(0)
    for i, name in enumerate(data.CIFAR_FILES):
        images = rng.integers(0, 256, (3, 3072), dtype=np.uint8)
        raw = pickle.dumps({"data": images, "labels": [i, i, 9]}, protocol=2)
        (folder / name).write_bytes(raw)


def test_digits_are_split_the_same_way_every_time() -> None:
    pytest.importorskip("sklearn")
    first, again = data.load(), data.load()
    assert first.train_x.shape == (1437, 1, 8, 8)
    assert first.test_x.shape == (360, 1, 8, 8)
    assert first.image == (1, 8, 8)
    assert first.num_classes == 10
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert first.train_y[:8].tolist() == [2, 8, 2, 6, 6, 7, 1, 9]


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


@pytest.mark.parametrize("folder", ["cifar-10-batches-py", "."])
def test_cifar10_is_read_packed_or_not_in_its_folder(tmp_path: Path, folder: str) -> None:
    _write_cifar(tmp_path / "cifar-10-batches-py")
    root = tmp_path if folder != "." else tmp_path / "cifar-10-batches-py"
    loaded = data.load(root)
    assert loaded.train_x.shape == (15, 3, 32, 32)
    assert loaded.test_x.shape == (3, 3, 32, 32)
    assert loaded.train_y.tolist()[:6] == [0, 0, 9, 1, 1, 9]
    assert loaded.train_x.mean(dim=(0, 2, 3)).abs().max() < 1e-5


@pytest.mark.parametrize("folder", ["cifar-10-batches-bin", "."])
def test_cifar10_in_binary_is_the_same(tmp_path: Path, folder: str) -> None:
    _write_cifar(tmp_path / "pickled")
    (tmp_path / "binary" / folder).mkdir(parents=True, exist_ok=True)
    for name in data.CIFAR_FILES:
        batch = pickle.loads((tmp_path / "pickled" / name).read_bytes())
        records = np.column_stack([np.array(batch["labels"], np.uint8), batch["data"]])
        (tmp_path / "binary" / folder / f"{name}.bin").write_bytes(records.tobytes())
    pickled, binary = data.load(tmp_path / "pickled"), data.load(tmp_path / "binary")
    assert all(torch.equal(a, b) for a, b in zip(pickled, binary, strict=True))


def test_a_damaged_binary_cifar_file_is_named(tmp_path: Path) -> None:
    for name in data.CIFAR_BINARY:
        (tmp_path / name).write_bytes(bytes(3073))
    (tmp_path / data.CIFAR_BINARY[2]).write_bytes(bytes(3000))
    with pytest.raises(ValueError, match=f"{data.CIFAR_BINARY[2]} holds 3000 bytes"):
        data.load(tmp_path)


def test_a_cifar_file_cannot_run_code(tmp_path: Path) -> None:
    class Attack:
        def __reduce__(self) -> tuple:
            return print, ("gotcha",)

    _write_cifar(tmp_path / "cifar-10-batches-py")
    (tmp_path / "cifar-10-batches-py" / "data_batch_1").write_bytes(pickle.dumps(Attack()))
    with pytest.raises(pickle.UnpicklingError, match=r"refused.*print"):
        data.load(tmp_path)


def test_a_folder_without_data_names_the_files_expected(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        data.load(tmp_path)
    message = str(caught.value)
    assert str(tmp_path) in message
    assert "train-images-idx3-ubyte" in message
    assert "data_batch_1" in message
    (tmp_path / data.CIFAR_ARCHIVES[1]).touch()
    with pytest.raises(FileNotFoundError, match="tar -xzf"):
        data.load(tmp_path)


@pytest.mark.parametrize(
    ("raw", "message"),
    [(b"<html>", "not an idx file"), (_idx(np.zeros((6, 28, 28), np.uint8))[:-5], "4699 bytes")],
    ids=["another kind", "cut short"],
)
def test_a_damaged_mnist_file_is_named(tmp_path: Path, raw: bytes, message: str) -> None:
    _write_mnist(tmp_path / "raw", packed=False)
    (tmp_path / "raw" / data.MNIST_FILES[0]).write_bytes(raw)
    with pytest.raises(ValueError, match=f"{data.MNIST_FILES[0]}.*{message}"):
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


@pytest.mark.parametrize("name", ["resnet18", "resnet50", "vgg16", "densenet121", "mlp"])
def test_models_map_images_to_classes(name: str) -> None:
    with torch.device("meta"):
        model = models.build(name, num_classes=7, image=(3, 64, 64))
        assert model(torch.empty(2, 3, 64, 64)).shape == (2, 7)


@pytest.mark.parametrize("image", [(1, 8, 8), (1, 28, 28), (3, 32, 32)])
def test_digitsnet_takes_digits_mnist_and_cifar(image: tuple[int, int, int]) -> None:
    model = models.build("digitsnet", num_classes=10, image=image)
    assert model(torch.randn(2, *image)).shape == (2, 10)


def test_an_unknown_model_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'resnet51'.*resnet50.*vgg16"):
        models.build("resnet51")


# Report -----------------------------------------------------------------------------------------


@pytest.fixture
def runs(report: ModuleType) -> list:
    good = report.Run("horovod")
    for accuracy in (0.3, 0.95, 0.99):
        good.epochs.append(report.Epoch(loss=0.5, accuracy=accuracy, images=1000, seconds=0.5))
    slow = report.Run("cocod:period=4", [report.Epoch(1.0, 0.9, images=1000, seconds=2.0)])
    return [good, slow]


def test_seconds_to_the_target_count_training_only(runs: list) -> None:
    good, slow = runs
    assert good.seconds_to(0.95) == pytest.approx(1.0)
    assert slow.seconds_to(0.95) is None
    assert good.images_per_second == pytest.approx(2000)


def test_the_table_is_aligned_and_complete(report: ModuleType, runs: list) -> None:
    lines = report.table(runs).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert lines[0].split("  ")[0].strip() == "strategy"
    assert lines[2].split() == ["horovod", "2,000", "99.00%", "1.00"]
    assert lines[3].split() == ["cocod:period=4", "500", "90.00%", "not", "reached"]


def test_a_table_of_one_strategy(report: ModuleType, runs: list) -> None:
    assert len(report.table(runs[:1]).splitlines()) == 3


def test_progress_has_a_bar_and_the_time_that_remains(report: ModuleType) -> None:
    assert report.progress(1, 4, 10.0) == " 25% |####            | 00:10<00:30"
    assert report.progress(4, 4, 40.0) == "100% |################| 00:40<00:00"


def test_epoch_lines_stand_under_their_header(report: ModuleType, runs: list) -> None:
    header, line = report.epoch_header(20), report.epoch_line(runs[0], epochs=3, width=20)
    assert header.index("  progress") == len(line)
    assert line.split() == ["horovod", "3/3", "0.5000", "99.00%", "2,000", "0.50"]


@pytest.mark.parametrize("name", ["accuracy.png", "accuracy.svg"])
def test_the_picture_is_written(report: ModuleType, runs: list, tmp_path: Path, name: str) -> None:
    report.plot(runs, tmp_path / name, "title")
    assert (tmp_path / name).stat().st_size > 5000


def test_a_picture_that_cannot_be_written_is_refused_before_training(
    report: ModuleType, tmp_path: Path
) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=r"\.png"):
        report.picture("accuracy.doc")
    with pytest.raises(argparse.ArgumentTypeError, match="make it first"):
        report.picture(str(tmp_path / "missing" / "a.png"))
    assert report.picture("") is None
