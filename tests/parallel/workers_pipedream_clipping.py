"""Clipping over two stages that update at different times, beside the same in one process."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from cases import run_cases
from torch import nn

from hvd_pipe.torch import pipedream

LR, MOST, MINIBATCHES, EPOCHS = 0.3, 0.2, 9, 2


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


def piped() -> dict[str, torch.Tensor]:
    """Train on two ranks and return the whole model's state."""
    pipedream.init()
    engine = engine_of("straight", "stash")
    for _ in range(EPOCHS):
        engine.train_epoch(minibatches())
    return engine.state_dict()


Run = tuple[int, dict[str, torch.Tensor], dict[str, torch.Tensor], dict[str, torch.Tensor]]


def resumed(plan: str, mode: str, folder: Path) -> Run:
    """This worker's stage and layers, the model after an epoch, and that from a checkpoint."""
    engine = engine_of(plan, mode)
    engine.train_epoch(minibatches())
    engine.save(folder)
    engine.train_epoch(minibatches())
    other = engine_of(plan, mode)
    other.load(folder, sample=minibatches()[0])
    other.train_epoch(minibatches())
    own = {name: x.clone() for name, x in engine.module.state_dict().items()}
    return engine.stage, own, engine.state_dict(), other.state_dict()


def all_resumed(plans: list[str], folder: Path) -> dict[tuple[str, str], Run]:
    """Of these plans in each mode that clips by norms it has heard of."""
    pipedream.init()
    cases = {
        (plan, mode): partial(resumed, plan, mode, folder / f"{plan}-{mode}")
        for plan in plans
        for mode in ("stash", "vertical-sync", "2bw")
    }
    return run_cases(cases)


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
