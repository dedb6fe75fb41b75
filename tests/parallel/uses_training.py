"""Uses in the training loop: how gradients are made, changed, sent and applied."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import horovod.torch as stock
import numpy as np
import torch
from problem import batch, loss_of, make_model, weights_of
from serial import Change, accumulating, make_workers, total
from torch import nn
from torch.optim import LBFGS, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.checkpoint import checkpoint
from uses import STRATEGIES, Use
from uses_common import (
    COCOD,
    FLOAT32,
    FORWARD,
    MERGED,
    PIPE,
    PLAIN,
    PROCESS_SETS,
    STEPS,
    Array,
    Pair,
    Script,
    clear,
    make_float32,
    make_momentum,
    make_sgd,
    nothing,
    wrap,
)

import hvd_pipe.torch as hvd

# Models: of several dtypes, compiled, with recomputed or shared parts, in autocast.

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class Mixed(nn.Module):
    """A linear map of each dtype; they share nothing, so that each has its own dtype's errors."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(13)
        self.maps = nn.ModuleList(nn.Linear(6, 3).to(dtype) for dtype in DTYPES)

    @property
    def dtypes(self) -> list[torch.dtype]:
        return [next(each.parameters()).dtype for each in self.maps]

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        parts = [
            each(inputs.to(dtype)) for each, dtype in zip(self.maps, self.dtypes, strict=True)
        ]
        return torch.stack([part.double() for part in parts])


def mixed_loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    inputs, targets = batch(rank, step)
    return nn.functional.mse_loss(model(inputs), targets.expand(len(DTYPES), -1, -1))


def mixed(strategy: str) -> Array:
    """In units of the dtype's precision: what a rounding of a weight near 1 may change."""
    model = Mixed()

    def loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
        for p in model.parameters():
            assert p.grad is None or p.grad.dtype == p.dtype
        return mixed_loss(model, rank, step)

    return Script(make=lambda: model, loss=loss).run(strategy) / precisions(model)


def simulate_mixed(strategy: str, n: int) -> Array:
    """The same model, all of it in float64."""
    weights = Script(make=lambda: Mixed().double(), loss=mixed_loss).expected(strategy, n)
    return weights / precisions(Mixed())


def precisions(model: nn.Module) -> Array:
    return np.concatenate(
        [np.full(p.numel(), torch.finfo(p.dtype).eps) for p in model.parameters()]
    )


def compiled(strategy: str) -> Array:
    torch.compiler.reset()
    make: Any = partial(torch.compile, make_model(), backend="aot_eager")
    return Script(make=make).run(strategy)


def checkpointed_loss(model: nn.Module, rank: int, step: int, use_reentrant: bool) -> torch.Tensor:
    assert isinstance(model, nn.Sequential)
    inputs, targets = batch(rank, step)
    hidden = checkpoint(model[1:4], model[0](inputs), use_reentrant=use_reentrant)
    return nn.functional.mse_loss(model[4](hidden), targets)


def autocast_loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return loss_of(model, rank, step)


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(14)
        self.first, self.last = nn.Linear(6, 6).double(), nn.Linear(6, 6).double()
        self.last.weight = self.first.weight

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(inputs)))[:, :3]


# How gradients are reduced.


def adasum(strategy: str) -> Array:
    """Beside stock Horovod's own."""
    ours = Script(arguments={"op": hvd.Adasum}).run(strategy)
    model = make_model()
    optimizer = stock.DistributedOptimizer(
        make_momentum(model), model.named_parameters(), op=stock.Adasum
    )
    for number in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, hvd.rank(), number).backward()
        optimizer.step()
        np.testing.assert_allclose(ours[number], weights_of(model), rtol=0, atol=1e-12)
    return ours


def in_groups(strategy: str, groups: Callable[[list[nn.Parameter]], Any]) -> Array:
    model = make_model()
    arguments = {"groups": groups(list(model.parameters()))}
    return Script(make=lambda: model, arguments=arguments).run(strategy)


LARGEST_GRADIENT = 0.8
LOSSES = {"fp16": 3 * 2.0**-11, "int8": 2 / 254}
"""What a compressor may lose of a gradient, as a part of the largest one in a message.

float16: one rounding of each worker's, one of the sum, one of the average. Codecs: one of each
worker's and one of the average.
"""


def compressed(strategy: str, kind: str) -> Array:
    def loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
        for p in model.parameters():
            assert p.grad is None or float(p.grad.abs().max()) < LARGEST_GRADIENT
        return loss_of(model, rank, step)

    arguments = {"compression": getattr(hvd.Compression, kind)}
    return Script(make_optimizer=make_sgd, loss=loss, arguments=arguments).run(strategy)


def compression_tolerance(kind: str) -> float:
    """The sum of the errors of all updates; the descent does not make them larger.

    Under CoCoD it is models that lose as much: of a round, a part of what it moved the model by,
    which is the updates in it.
    """
    return STEPS * 0.05 * LOSSES[kind] * LARGEST_GRADIENT


def rows(model: nn.Module, optimizer: Any, step: Callable[[int], object]) -> Array:
    """The weights after every step, and after a ``synchronize()`` at the end."""
    records = []
    for number in range(STEPS):
        step(number)
        records.append(weights_of(model))
    optimizer.synchronize()
    records.append(weights_of(model))
    return np.array(records)


# Learning-rate schedules.


def schedule(model: nn.Module, optimizer: Any, number: int) -> None:
    model.schedule = LambdaLR(optimizer, lambda step: 0.6 ** (step // 2))  # type: ignore[assignment]


def make_scheduled(model: nn.Module) -> Optimizer:
    optimizer = make_momentum(model)
    schedule(model, optimizer, -1)
    return optimizer


def end_epoch(model: Any, optimizer: Any, number: int) -> None:
    """The last gradient of Pipe-SGD is applied at the rate after the last call."""
    model.schedule.step()


# Clipping.


def clip(model: nn.Module, optimizer: Any = None, number: int = 0) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.3)


CLIPPED = Script(prepared=clip)


def unprepared(strategy: str) -> None:
    """``skip_synchronize()`` where there was no ``synchronize()``."""
    model = make_model()
    optimizer = wrap(model, make_momentum(model), strategy)
    loss_of(model, hvd.rank(), 0).backward()
    with optimizer.skip_synchronize():
        optimizer.step()


# Accumulation.

PASSES = {
    "backward_passes_per_step=2": [2] * STEPS,
    "set_backward_passes_per_step()": [2] * 4 + [3] * 4 + [1] * 3,
}


def accumulated(strategy: str, schedule: list[int]) -> Array:
    model = make_model()
    optimizer = wrap(model, make_momentum(model), strategy, backward_passes_per_step=schedule[0])
    numbers = accumulating(schedule)

    def step(number: int) -> None:
        if number and schedule[number] != schedule[number - 1]:
            optimizer.set_backward_passes_per_step(schedule[number])
        optimizer.zero_grad()
        for each in numbers[number]:
            loss_of(model, hvd.rank(), each).backward()
        optimizer.step()

    return rows(model, optimizer, step)


def simulate_accumulation(strategy: str, n: int, schedule: list[int]) -> Array:
    workers = make_workers(strategy, n, make_model, make_momentum)
    for numbers in accumulating(schedule):
        workers.backward(loss_of, *numbers)
        workers.step()
        workers.record()
    workers.synchronize()
    workers.record()
    return workers.trajectory


# Loss scaling. A row is the weights and the binary logarithm of the scale.

FIRST_SCALE, GROWTH_INTERVAL = 2.0**10, 3


def maybe_infinite(model: nn.Module, rank: int, number: int, overflow: int | None) -> torch.Tensor:
    """On rank 1, at the step ``overflow``, a loss whose gradient is not finite."""
    loss = loss_of(model, rank, number)
    return loss * torch.inf if (rank, number) == (1, overflow) else loss


def scaled(
    strategy: str,
    *,
    overflow: int | None = None,
    clips: bool = False,
    says_scale: bool = True,
    synchronizes: bool = True,
) -> Array:
    """The loop of a GradScaler, plain or with ``unscale_`` and clipping and what that may lack."""
    model = make_float32()
    optimizer = wrap(model, make_momentum(model), strategy)
    scaler = torch.amp.GradScaler("cpu", init_scale=FIRST_SCALE, growth_interval=GROWTH_INTERVAL)
    records = []
    for number in range(STEPS):
        optimizer.zero_grad()
        scaler.scale(maybe_infinite(model, hvd.rank(), number, overflow)).backward()
        with ExitStack() as context:
            if clips and synchronizes:
                optimizer.synchronize(*([scaler.get_scale()] if says_scale else []))
                context.enter_context(optimizer.skip_synchronize())
            if clips:
                scaler.unscale_(optimizer)
                clip(model)
            scaler.step(optimizer)
        scaler.update()
        records.append([*weights_of(model), np.log2(scaler.get_scale())])
    optimizer.synchronize()
    records.append([*weights_of(model), np.log2(scaler.get_scale())])
    return np.array(records)


def simulate_scaling(
    strategy: str, n: int, *, overflow: int | None = None, change: Change | None = None
) -> Array:
    """A run without any scale; the scale is known by torch's rule.

    It is halved when a gradient that is not finite is due: under Pipe-SGD one step after it was
    computed, and if that was the last step, not at all. The gradient that was computed in between
    has the old scale and is applied. Under CoCoD each rank has gradients and a scale of its own.
    """
    workers = make_workers(strategy, n, make_float32, make_momentum)
    exponents, good_steps = [int(np.log2(FIRST_SCALE))] * n, [0] * n
    for number in range(STEPS):
        workers.backward(partial(maybe_infinite, overflow=overflow), number)
        workers.step(change)
        for rank, overflowed in enumerate(workers.overflowed):
            good_steps[rank] = 0 if overflowed else good_steps[rank] + 1
            exponents[rank] += (good_steps[rank] == GROWTH_INTERVAL) - overflowed
            good_steps[rank] %= GROWTH_INTERVAL
        workers.record(exponents)
    workers.synchronize()
    workers.record(exponents)
    return workers.trajectory


# Closures.


def with_closure(strategy: str) -> Array:
    model = make_model()
    optimizer = wrap(model, make_momentum(model), strategy)

    def step(number: int) -> None:
        losses = []

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            losses.append(loss_of(model, hvd.rank(), number))
            losses[-1].backward()
            return losses[-1]

        assert optimizer.step(closure) is losses[0]
        assert len(losses) == 1, "the closure was called again"

    return rows(model, optimizer, step)


def make_lbfgs(model: nn.Module) -> Optimizer:
    options = {"max_iter": 4, "history_size": 5, "line_search_fn": "strong_wolfe"}
    return LBFGS(model.parameters(), lr=0.3, **options)  # its search compares losses


def train_by_lbfgs(model: nn.Module, optimizer: Any, loss: Callable[[], torch.Tensor]) -> Array:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        found = loss()
        found.backward()
        return found

    records = []
    for _ in range(STEPS):
        optimizer.step(closure)
        records.append(weights_of(model))
    return np.array(records)


def with_lbfgs(strategy: str) -> Array:
    model = make_model()
    optimizer = wrap(model, make_lbfgs(model), strategy)
    return train_by_lbfgs(model, optimizer, lambda: loss_of(model, hvd.rank(), 0))


def simulate_lbfgs(strategy: str, n: int) -> list[Array]:
    """One process that has all workers' data."""
    assert strategy == MERGED
    model = make_model()

    def loss() -> torch.Tensor:
        return torch.stack([loss_of(model, rank, 0) for rank in range(n)]).mean()

    return [train_by_lbfgs(model, make_lbfgs(model), loss)] * n


# Two optimizers: a generator of six numbers out of two, and a discriminator.


def make_generator() -> nn.Module:
    torch.manual_seed(11)
    return nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 6)).double()


def make_discriminator() -> nn.Module:
    torch.manual_seed(12)
    return nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def judge(generator: nn.Module, discriminator: nn.Module, rank: int, step: int) -> torch.Tensor:
    """The discriminator's loss."""
    real, noise = batch(rank, step)
    fake = generator(noise[:, :2]).detach()
    return nn.functional.softplus(torch.cat([-discriminator(real), discriminator(fake)])).mean()


def fool(generator: nn.Module, discriminator: nn.Module, rank: int, step: int) -> torch.Tensor:
    """The generator's loss."""
    noise = batch(rank, step)[1]
    return nn.functional.softplus(-discriminator(generator(noise[:, :2]))).mean()


def adversarial(freeze: bool) -> dict[str, Any]:
    """A discriminator and a generator in turn."""
    makes = (make_generator, make_discriminator)
    optimizers = ((make_momentum, make_momentum),) * 2
    return Pair(makes, makes, optimizers, ((judge, [1]), (fool, [0])), freeze).sides


# Process sets.


def in_process_set(strategy: str) -> Array:
    """Ranks 0 and 2 train together, rank 1 alone."""
    mine = next(each for each in PROCESS_SETS[3] if each.included())
    weights = Script(arguments={"process_set": mine}).run(strategy)
    hvd.barrier()  # a rank that is done first ends Horovod for all
    return weights


def simulate_process_sets(strategy: str, n: int) -> list[Array]:
    def run(*ranks: int) -> Array:
        script = Script(loss=lambda model, i, step: loss_of(model, ranks[i], step))
        return script.expected(strategy, len(ranks))

    together, alone = run(0, 2), run(1)
    trajectories = [together[0], alone[0], together[1]]
    assert len(trajectories) == n
    return trajectories


NO_GRADIENTS_SENT = "which averages models, not gradients: use"

USES: list[Use] = [
    Use("a plain loop", **PLAIN.sides),
    *(
        Use(f"`{text}`", **Script(clear=clear).sides)
        for text, clear in (
            ("optimizer.zero_grad(set_to_none=False)", lambda _, o, __: o.zero_grad(False)),
            ("model.zero_grad()", lambda model, *_: model.zero_grad()),
        )
    ),
    Use("`zero_grad()` after `step()`", **Script(clear=nothing, after=clear).sides),
    Use(
        "a learning-rate schedule made after wrapping",
        **Script(setup=schedule, after=end_epoch).sides,
    ),
    Use(
        "a learning-rate schedule made before wrapping",
        **Script(make_optimizer=make_scheduled, after=end_epoch).sides,
    ),
    Use(
        "gradient clipping: `synchronize()`, clip, `step()` in `skip_synchronize()`",
        **CLIPPED.sides,
    ),
    Use(
        "`skip_synchronize()` without `synchronize()`",
        run=unprepared,
        expected=PLAIN.expected,
        refused=dict.fromkeys(STRATEGIES, "call optimizer.synchronize() after backward()"),
    ),
    *(
        Use(
            f"accumulation: `{how}`",
            run=partial(accumulated, schedule=schedule),
            expected=partial(simulate_accumulation, schedule=schedule),
        )
        for how, schedule in PASSES.items()
    ),
    Use("`step(closure)`", run=with_closure, expected=PLAIN.expected),
    Use(
        "LBFGS",
        run=with_lbfgs,
        expected=simulate_lbfgs,
        refused=dict.fromkeys((PIPE, COCOD), "use strategy='merged-gradient'")
        | {FORWARD: "leave overlap='forward' out"},
        tolerance=1e-9,
    ),
    Use("GradScaler", run=scaled, expected=simulate_scaling, tolerance=FLOAT32),
    *(
        Use(
            f"GradScaler, one rank overflows{when}",
            run=partial(scaled, overflow=step),
            expected=partial(simulate_scaling, overflow=step),
            tolerance=FLOAT32,
            has_own_column=True,
        )
        for when, step in (("", 5), (" in the last step", STEPS - 1))
    ),
    Use(
        "GradScaler with clipping, one rank overflows",
        run=partial(scaled, clips=True, overflow=5),
        expected=partial(simulate_scaling, overflow=5, change=clip),
        tolerance=FLOAT32,
        has_own_column=True,
    ),
    Use(
        "GradScaler with clipping, `synchronize()` without `loss_scale`",
        run=partial(scaled, clips=True, says_scale=False),
        expected=partial(simulate_scaling, change=clip),
        tolerance=FLOAT32,
    ),
    Use(
        "GradScaler with clipping, without `synchronize()`",
        run=partial(scaled, clips=True, synchronizes=False),
        expected=partial(simulate_scaling, change=clip),
        tolerance=FLOAT32,
    ),
    Use(
        "autocast to bfloat16",
        **Script(make=make_float32, loss=autocast_loss).sides,
        tolerance=FLOAT32,
    ),
    Use(
        "two optimizers, as for a GAN; the other model is frozen",
        **adversarial(freeze=True),
    ),
    Use(
        "two optimizers, as for a GAN; the other model is not frozen",
        **adversarial(freeze=False),
    ),
    Use(
        "`process_set`",
        run=in_process_set,
        expected=simulate_process_sets,
        ranks=3,
        replicas=(0, 2),
    ),
    Use(
        "float64, float32, bfloat16 and float16 in one model",
        run=mixed,
        expected=simulate_mixed,
        # A step rounds a weight, which is below 1/2, by eps / 8, and an update, which is smaller.
        tolerance=STEPS / 4,
    ),
    Use("`torch.compile`", run=compiled, expected=PLAIN.expected),
    *(
        Use(
            f"gradient checkpointing, `use_reentrant={value}`",
            **Script(loss=partial(checkpointed_loss, use_reentrant=value)).sides,
        )
        for value in (False, True)
    ),
    Use("shared weights", **Script(make=Tied).sides),
    Use(
        "`op=hvd.Sum`",
        **Script(arguments={"op": hvd.Sum}, reduce=total).sides,
        refused={COCOD: NO_GRADIENTS_SENT},
    ),
    Use(
        "`op=hvd.Adasum`",
        run=adasum,
        expected=lambda strategy, n: PLAIN.expected("adasum", n),
        refused=dict.fromkeys(
            (FORWARD, PIPE, COCOD), "use 'merged-gradient' as it is, or op=hvd.Average"
        ),
    ),
    Use(
        "`gradient_predivide_factor`",
        **Script(arguments={"gradient_predivide_factor": 2.0}).sides,
        refused={COCOD: NO_GRADIENTS_SENT},
    ),
    Use(
        "`groups`, a list",
        run=partial(in_groups, groups=lambda p: [[p[5], p[0]], [p[2], p[3], p[4]]]),
        expected=PLAIN.expected,
        refused={COCOD: NO_GRADIENTS_SENT},
    ),
    *(
        Use(
            f"`compression=hvd.Compression.{kind}`",
            run=partial(compressed, kind=kind),
            expected=Script(make_optimizer=make_sgd).expected,
            tolerance=compression_tolerance(kind),
        )
        for kind in LOSSES
    ),
]
