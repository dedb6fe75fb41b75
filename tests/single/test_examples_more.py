"""torch_examples/: the functions of language_model.py, gan.py and resume.py, on one process."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

pytestmark = pytest.mark.slow

torch = pytest.importorskip("torch")
pytest.importorskip("hvd_pipe.torch", exc_type=ImportError)
for needed in ("sklearn", "matplotlib", "tqdm"):
    pytest.importorskip(needed)

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


lm, gan, resume = (_load(name) for name in ("language_model", "gan", "resume"))


# Command lines ----------------------------------------------------------------------------------


def _run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(FOLDER / script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.nightly  # each starts a script
@pytest.mark.parametrize(
    ("script", "arguments", "error"),
    [
        ("language_model.py", ["--width", "10", "--heads", "4"], "no multiple of --heads 4"),
        ("language_model.py", ["--text", "/missing.txt"], "--text /missing.txt: "),
        ("gan.py", ["--plot", "gan.doc"], "must end in one of .png"),
        ("resume.py", ["--die-at", "5"], "after the first checkpoint"),
    ],
)
def test_a_bad_option_ends_in_one_line(script: str, arguments: list[str], error: str) -> None:
    ended = _run(script, *arguments)
    assert ended.returncode != 0
    assert "Traceback" not in ended.stderr
    assert error in ended.stderr.splitlines()[-1]


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


def test_the_text_is_split_and_can_be_read_again() -> None:
    text = lm.Text(lm.SONNETS.read_text(encoding="utf-8"))
    whole = text.decode(text.train) + text.decode(text.held_out)
    assert whole == lm.SONNETS.read_text(encoding="utf-8")
    assert len(text.held_out) == len(whole) // 10
    assert whole.startswith("From fairest creatures we desire increase,\n")
    sonnets = whole.strip().split("\n\n")
    assert {len(sonnet.splitlines()) for sonnet in sonnets} == {14}
    assert len(set(sonnets)) == 55


def test_shares_are_equal_and_disjoint() -> None:
    ids = torch.arange(101)
    shares = [lm.share(ids, rank, 3, context=4).tolist() for rank in range(3)]
    assert [len(share) for share in shares] == [33, 33, 33]
    assert [i for share in shares for i in share] == list(range(99))
    with pytest.raises(SystemExit, match=r"33 each, --context 33"):
        lm.share(ids, 0, 3, context=33)


def test_a_batch_is_pieces_of_the_text_and_any_piece_can_come() -> None:
    generator = torch.Generator().manual_seed(0)
    pieces = lm.batch(torch.arange(7), 200, 3, generator)
    assert pieces.shape == (200, 4)
    assert (pieces.diff(dim=1) == 1).all()
    assert set(pieces[:, 0].tolist()) == {0, 1, 2, 3}


def test_the_learning_rate_rises_then_falls() -> None:
    rates = [lm.learning_rate(step, 10, 100) for step in range(101)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == rates[9] == rates[10] == 1
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[100] == pytest.approx(0.1)
    assert lm.learning_rate(0, 0, 1) == 1  # no warm-up at all


def test_writing_begins_with_the_start_and_repeats_itself(transformer: torch.nn.Module) -> None:
    start = torch.tensor([1, 2, 3])
    written = lm.write(transformer, start, 20, seed=1)
    assert len(written) == 23
    assert written[:3].tolist() == [1, 2, 3]
    assert torch.equal(written, lm.write(transformer, start, 20, seed=1))


# The GAN ----------------------------------------------------------------------------------------


def test_the_frechet_distance_is_that_of_gaussians() -> None:
    # With diagonal covariances: |difference of means|^2 + sum of (sigma_a - sigma_b)^2.
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(200_000, 2)), rng.normal(size=(200_000, 2))
    assert gan.frechet(a, b * [2, 3] + [1, 0]) == pytest.approx(1 + 1 + 4, rel=0.02)
    assert gan.frechet(a, a) == pytest.approx(0, abs=1e-9)


def test_the_judge_tells_digits_from_noise_and_from_one_digit_only() -> None:
    train_x, held_out, labels = gan.load()
    judge = gan.Judge(train_x, held_out, labels)
    near, digits, distance = judge(train_x)
    assert near == pytest.approx(0.9, abs=0.01)
    assert digits > 9.5
    zeros = judge(held_out[labels == 0])
    assert zeros[:2] == (1.0, 1.0)
    noise = judge(torch.rand(100, 1, 8, 8) * 2 - 1)
    assert noise[:2] == (0.0, 0.0)
    assert distance < zeros[2] < noise[2]


def test_a_generators_step_leaves_no_gradient_with_the_discriminator() -> None:
    g, d = gan.generator(8), gan.discriminator(8)
    optimizers = [torch.optim.Adam(model.parameters()) for model in (g, d)]
    d_optimizer = optimizers[1]
    seen = {}
    update = d_optimizer.step

    def step() -> None:
        update()
        seen.update({p: p.grad.clone() for p in d.parameters()})

    d_optimizer.step = step
    gan.train_step(g, d, *optimizers, torch.zeros(4, 1, 8, 8))
    assert all(torch.equal(p.grad, seen[p]) for p in d.parameters())
    assert all(p.requires_grad for p in d.parameters())
    assert all(p.grad is not None for p in g.parameters())


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


def test_rank_0s_checkpoints_count_where_it_alone_saves(
    tmp_path: Path, two_ranks: list[list[int] | None]
) -> None:
    checkpoints = resume.Checkpoints(tmp_path, each_rank=False)
    two_ranks.append(None)
    checkpoints.save(20, {"step": 20, "run": {"lr": 0.1}})
    assert checkpoints.newest() == 20
    assert checkpoints.load(20, {"lr": 0.1})["step"] == 20
    with pytest.raises(SystemExit, match=r"another run: .*0\.1.*0\.2.*--checkpoints"):
        checkpoints.load(20, {"lr": 0.2})


def test_one_bit_of_one_weight_changes_the_fingerprint() -> None:
    model = torch.nn.Linear(3, 2)
    before = resume.fingerprint(model)
    assert before == resume.fingerprint(model)
    with torch.no_grad():
        weight = model.weight.view(-1)
        weight[0] = torch.nextafter(weight[0], torch.tensor(9.0))
    assert before != resume.fingerprint(model)
