"""torch_examples/: reading data, the model zoo, and the scripts' functions.

Runs with horovodrun are in tests/parallel.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

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
demo, demo_course = _load("demo"), _load("demo_course")


# Data -------------------------------------------------------------------------------------------


def test_digits_are_normalised_and_split() -> None:
    loaded = data.load()
    assert (len(loaded.train_x), len(loaded.test_x)) == (1437, 360)
    assert loaded.image == (1, 8, 8)
    assert loaded.num_classes == 10
    assert (loaded.train_x.dtype, loaded.train_y.dtype) == (torch.float32, torch.int64)
    assert loaded.train_x.mean().item() == pytest.approx(0, abs=1e-5)
    assert loaded.train_x.std(correction=0).item() == pytest.approx(1, abs=1e-5)


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


# The demo ----------------------------------------------------------------------------------------


def result_of(**more: Any) -> dict[str, Any]:
    """Three rows of two epochs; a step computes for 0.1 s."""
    seconds = {"stock Horovod": 4.0, "overlap=forward": 3.0, "cocod": 2.0}
    rows = {
        name: [{"seconds": s, "accuracy": 0.5}, {"seconds": s, "accuracy": 0.984}]
        for name, s in seconds.items()
    }
    shared = {"nbytes": 3 * 2**20, "all_reduce_s": 0.099}
    return {"rows": rows, "compute_s": 0.1, "steps": 20, "images": 1280, **shared, **more}


def samples(begun: float) -> list[str]:
    """A thread that computes for 10 ms, then waits for 10 ms while 1 MB leaves."""
    return [
        f"{begun + i / 1e3} {max(0, i - 10) * 100_000} {'R' if i < 10 else 'S'}"
        for i in range(-5, 25)
    ]


def test_the_table_compares_with_the_first_row() -> None:
    head, *rows = demo.table(result_of())
    assert head[1:] == ["accuracy", "images/s", "times stock", "sending costs"]
    assert rows == [
        ["stock Horovod", "98.4%", "320", "1.00", "50%"],
        ["overlap=forward", "98.4%", "427", "1.33", "33%"],
        ["cocod", "98.4%", "640", "2.00", "0%"],
    ]


def test_columns_are_aligned() -> None:
    lines = demo.aligned([["", "n"], ["long name", "1"], ["b", "1,000"]]).splitlines()
    assert lines == ["               n", "-" * 16, "long name      1", "b          1,000"]


@pytest.mark.parametrize("is_limited", [True, False])
def test_the_sentence_about_the_link_says_its_rate(is_limited: bool) -> None:
    text = demo.about_link(result_of(**({"bits": 5.3e8} if is_limited else {})))
    assert text.startswith("A step computes for 100 ms. One all-reduce of all gradients (3.0 MiB)")
    assert ("530 Mbit/s" in text) == is_limited


def test_a_picture_has_a_timeline_for_what_was_watched(tmp_path: Path) -> None:
    one = {"begun": 1.0, "ends": [1.01, 1.02], "forward_ends": [1.003], "waits": [(1.015, 1.02)]}
    one["samples"] = samples(1.0)
    for shown in ({}, {"stock Horovod": one}, {"stock Horovod": one, "overlap=forward": one}):
        path = tmp_path / f"{len(shown)}.svg"
        demo.draw(result_of(shown=shown, bits=8e8), path)
        assert "<svg" in path.read_text()[:400]


@pytest.mark.parametrize("path", ["demo.txt", "demo", "no/such/folder/demo.png"])
def test_a_picture_that_cannot_be_written_is_refused_first(path: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        demo.picture(path)


@pytest.mark.parametrize("overhead", [0.9, 1.0, 1.3])
def test_the_rate_makes_an_all_reduce_as_long_as_a_step(overhead: float) -> None:
    rates: list[float] = []

    def measure() -> float:
        return overhead * 2 * 8 * 3e6 / rates[-1] + 0.001

    bits, taken = demo_course.find_rate(3_000_000, 0.08, rates.append, measure)
    assert bits == rates[-1]
    assert taken == pytest.approx(0.08, rel=0.04)
    assert len(rates) == 4


@pytest.mark.parametrize("times", [[0.5, 0.3, 0.25], [0.2, 0.05, 0.1], [1e-4] * 3])
def test_the_nearest_rate_is_set_where_none_fits(times: list[float]) -> None:
    rates: list[float] = []
    bits, taken = demo_course.find_rate(3_000_000, 0.08, rates.append, iter(times).__next__)
    assert bits == rates[-1] == rates[times.index(taken)]
    assert abs(taken - 0.08) == min(abs(one - 0.08) for one in times)


def test_tools_that_are_missing_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    words, why = demo.own_network()
    assert words == []
    assert "unshare is missing: apt-get install util-linux" in why


def test_a_kernel_that_refuses_is_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo.shutil, "which", lambda tool: tool)
    for said, shown in (
        ("unshare: not permitted\n", "unshare: not permitted; "),
        ("", "ended with 9"),
    ):
        refused = subprocess.CompletedProcess([], 9, "", said)
        monkeypatch.setattr(subprocess, "run", lambda *a, refused=refused, **k: refused)
        words, why = demo.own_network()
        assert words == []
        assert shown in why
        assert "--cap-add" in why


def test_root_that_may_not_makes_a_user_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo.shutil, "which", lambda tool: tool)

    def answer(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(
            command, int("--map-root-user" not in command), "", "no"
        )

    monkeypatch.setattr(subprocess, "run", answer)
    assert demo.own_network() == (["unshare", "--net", "--map-root-user"], "")


def test_only_rank_0_reports(tmp_path: Path) -> None:
    first = demo_course.Reporter(tmp_path, is_first=True)
    other = demo_course.Reporter(tmp_path, is_first=False)
    first("link", total=7)
    first(steps=3)
    other(steps=9)
    first("train", steps=4)
    lines = [json.loads(line) for line in (tmp_path / "progress").read_text().splitlines()]
    assert [line["done"] for line in lines] == [0, 3, 7]
    assert lines[0] == {"done": 0, "say": "link", "total": 7}


def test_the_link_and_the_thread_are_watched(tmp_path: Path) -> None:
    with demo_course.watched(tmp_path, is_first=True) as seen:
        begun = time.perf_counter()
        while time.perf_counter() < begun + 0.2:
            pass
        computed = time.perf_counter()
        with socket.socket() as server, socket.socket() as client:
            server.bind(("127.0.0.1", 0))
            server.listen()
            client.connect(server.getsockname())
            client.sendall(bytes(100_000))
        time.sleep(0.2)
    rows = [(float(moment), int(sent), state) for moment, sent, state in map(str.split, seen)]
    states = [state for moment, _, state in rows if begun < moment < computed]
    assert states.count("R") > len(states) / 2
    assert [state for moment, _, state in rows if moment > computed + 0.05].count("S") > 1
    assert rows[-1][1] - rows[0][1] >= 100_000


def test_epochs_fit_a_minute() -> None:
    assert [demo_course.epochs_that_fit(s) for s in (0.01, 1.0, 2.0, 60.0)] == [6, 4, 2, 2]
