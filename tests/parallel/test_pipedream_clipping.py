"""Clipping by the norm over all stages, where each knows of the others what messages have said."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from on_ranks import gather, on_ranks
from torch import nn

from hvd_pipe.torch import pipedream

LR, MOST, MINIBATCHES, EPOCHS = 0.3, 0.2, 9, 2
ON = {workers: on_ranks(workers, init=pipedream.init) for workers in (2, 3)}
DAILY = {("1-1", "2bw"), ("2-1", "stash"), ("2-1", "2bw"), ("1-2", "vertical-sync")}
CASES = [
    pytest.param(
        plan,
        mode,
        # nightly: every mode, and every kind of plan, is in DAILY
        marks=[
            ON[sum(map(int, plan.split("-")))],
            *([] if (plan, mode) in DAILY else [pytest.mark.nightly]),
        ],
    )
    for plan in ("1-1", "2-1", "1-2")
    for mode in ("stash", "vertical-sync", "2bw")
]


def network() -> nn.Sequential:
    """Two layers, a stage each."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 1)).double()


def minibatches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Some of a regression, whose gradients are often longer than the limit."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(MINIBATCHES, 6, 4, generator=generator, dtype=torch.float64)
    return [(x, x.sum(1, keepdim=True).sin()) for x in inputs]


def engine_of(plan: str, mode: str) -> pipedream.PipeDream:
    """A pipeline that clips."""
    return pipedream.PipeDream(
        network(),
        nn.functional.mse_loss,
        lambda parameters: torch.optim.SGD(parameters, lr=LR),
        plan=plan,
        mode=mode,
        bandwidth=1e9,
        in_transit=0,  # else what this machine takes decides
        max_grad_norm=MOST,
        progress=False,
    )


def serial() -> tuple[dict[str, torch.Tensor], int]:
    """Return what two stages come to that tell each other their norms, and how often they clip.

    ``norms[s][b]`` is of minibatch b's gradient at stage s. A message says what its sender knows::

        stage 0  F0 F1 B0 U1 F2 B1 U2 F3    the activation of b leaves before update b, so stage 1
                                            hears of the norm of minibatch b - 2
        stage 1        F0 B0 U1 F1 B1 U2    the gradient of b leaves before update b + 1, so stage
                                            0 hears of the norm of minibatch b - 1
    """
    model = network()
    names = {name: int(name[0]) for name, _ in model.named_parameters()}
    newest = {name: p.detach().clone() for name, p in model.named_parameters()}
    norms: list[list[float]] = [[], []]
    clipped = 0
    for _ in range(EPOCHS):
        first = len(norms[0])
        before = dict(newest)  # stage 0's weights of one update ago
        for b, (inputs, targets) in enumerate(minibatches()):
            seen = {name: (before, newest)[stage][name] for name, stage in names.items()}
            leaves = {name: x.clone().requires_grad_() for name, x in seen.items()}
            output = torch.func.functional_call(model, leaves, (inputs,))
            nn.functional.mse_loss(output, targets).backward()
            grads = {name: x.grad for name, x in leaves.items()}
            for stage in (0, 1):
                parts = [grads[name].square().sum() for name, at in names.items() if at == stage]
                norms[stage].append(float(sum(parts)))
            at = first + b
            # What is known goes on from one epoch to the next.
            other = [norms[1][at - 1] if at >= 1 else 0.0, norms[0][at - 2] if b >= 2 else 0.0]
            if b < 2 and first:
                other[1] = norms[0][first - 1]
            before = dict(newest)
            for stage in (0, 1):
                total = (norms[stage][at] + other[stage]) ** 0.5
                factor = min(1.0, MOST / (total + 1e-6))
                clipped += factor < 1.0
                for name, where in names.items():
                    if where == stage:
                        newest[name] = newest[name] - LR * factor * grads[name]
    return newest, clipped


@ON[2]
def test_stages_clip_by_the_newest_norms_that_they_have_heard_of() -> None:
    engine = engine_of("straight", "stash")
    for _ in range(EPOCHS):
        engine.train_epoch(minibatches())
    expected, clipped = serial()
    assert clipped > 10
    state = engine.state_dict()
    for name, value in expected.items():
        torch.testing.assert_close(state[name], value, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("plan", "mode"), CASES)
def test_what_is_known_of_norms_is_in_checkpoints(plan: str, mode: str, tmp_path: Path) -> None:
    """Replicas clip alike, although neighbours may have told them of unlike norms."""
    folder = Path(gather(tmp_path)[0])
    engine, other = engine_of(plan, mode), engine_of(plan, mode)
    engine.train_epoch(minibatches())
    engine.save(folder)
    engine.train_epoch(minibatches())
    other.load(folder, sample=minibatches()[0])
    other.train_epoch(minibatches())
    kept, again = engine.state_dict(), other.state_dict()
    for name, value in kept.items():
        assert torch.equal(again[name], value), name
    layers: dict[int, dict[str, torch.Tensor]] = {}
    for stage, own in gather((engine.stage, dict(engine.module.state_dict()))):
        for name, value in layers.setdefault(stage, own).items():
            assert torch.equal(own[name], value)
    assert len(layers) == 2
