"""The scripts of torch_examples/clients on two ranks, beside one process that has both shards.

docs/clients.md describes these clients. Each of them trains under each strategy as the simulation
of that strategy does. The cheapest run of a client is in ``make test``.
"""

from __future__ import annotations

import copy
import importlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from on_ranks import gather, on_ranks
from problem import Weights, weights_of
from serial import make_workers
from torch import nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import Dataset, default_collate

import hvd_pipe.torch as hvd
from hvd_pipe.torch.strategies.forward_overlap import ForwardOverlapEngine

FOLDER = Path(__file__).resolve().parents[2] / "torch_examples" / "clients"


def script(name: str) -> Any:
    """Return a script of torch_examples/clients as a module; its imports take seconds."""
    if str(FOLDER) not in sys.path:
        sys.path.insert(0, str(FOLDER))
    return importlib.import_module(name)


class Recorded(Dataset[Any]):
    """A data set that keeps in which order a rank has taken its items.

    Args:
        items: The items.
    """

    def __init__(self, items: Sequence[Any]) -> None:
        self.items = items
        self.order: list[int] = []

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        self.order.append(index)
        return self.item(index, len(self.order) - 1)

    def item(self, index: int, number: int) -> Any:
        """Return an item that a rank takes after so many others."""
        return self.items[index]

    def batches(self, size: int) -> list[list[Any]]:
        """Return all ranks' batches, by rank; the last batch of an epoch may be smaller."""
        orders = gather(self.order)
        epoch = len(self) // len(orders)
        for first in range(0, len(orders[0]), epoch):  # the ranks share the items of an epoch
            taken = [index for order in orders for index in order[first : first + epoch]]
            assert sorted(taken) == list(range(len(self)))
        assert orders[0][:epoch] != orders[0][epoch : 2 * epoch]
        return [
            [
                default_collate([self.item(order[n], n) for n in range(first, end)])
                for begin in range(0, len(order), epoch)
                for first in range(begin, begin + epoch, size)
                for end in [min(first + size, begin + epoch)]
            ]
            for order in orders
        ]


def grouped(epochs: int, batches: int, accumulation: int) -> list[range]:
    """Return the numbers of each step's batches; the last step of an epoch may have fewer."""
    return [
        range(first, min(first + accumulation, end))
        for end in range(batches, (epochs + 1) * batches, batches)
        for first in range(end - batches, end, accumulation)
    ]


@dataclass(frozen=True)
class Training:
    """A client's training without the client.

    Args:
        model: The model before its first step.
        optimizer: Makes the optimizer of a model.
        loss: The loss of a step: of a model and of the batches of a rank.
        batches: By rank.
        steps: The numbers of each step's batches.
        schedule: Makes the learning-rate schedule of an optimizer.
        change: What happens to a model's gradients before an update.
        after: What happens to a model after a step, called with the number of the step.
        result: What is compared, of the model of the first rank.
    """

    model: nn.Module
    optimizer: Callable[[nn.Module], Optimizer]
    loss: Callable[[nn.Module, list[Any]], torch.Tensor]
    batches: Sequence[Sequence[Any]]
    steps: Sequence[range]
    schedule: Callable[[Optimizer], Any] = lambda _: None
    change: Callable[[nn.Module], object] = lambda _: None
    after: Callable[[nn.Module, int], object] = lambda *_: None
    result: Callable[[nn.Module], nn.Module] = lambda model: model

    def simulated(self, strategy: str) -> nn.Module:
        """Return what training by a strategy's equation makes."""
        ranks = len(self.batches)
        workers = make_workers(strategy, ranks, lambda: copy.deepcopy(self.model), self.optimizer)
        schedules = [self.schedule(each) for each in workers.optimizers]

        def loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
            return self.loss(model, [self.batches[rank][i] for i in self.steps[step]])

        for step in range(len(self.steps)):
            workers.backward(loss, step)
            workers.step(self.change)
            for model, schedule in zip(workers.models, schedules, strict=True):
                if schedule is not None:
                    schedule.step()
                self.after(model, step)
        workers.synchronize()
        return self.result(workers.models[0])


def clipping(norm: float) -> Callable[[nn.Module], object]:
    """Return what clips a model's gradients to a norm; 0 leaves them."""
    if not norm:
        return lambda _: None
    return lambda model: nn.utils.clip_grad_norm_(model.parameters(), norm)


def difference(one: Weights, other: Weights) -> float:
    return float(np.abs(one - other).max())


def check(model: nn.Module, training: Training, strategy: str) -> None:
    """Assert that a model is what one process makes of all batches, and not of a rank's alone."""
    alone = [replace(training, batches=[batches]) for batches in training.batches]
    compare(
        model,
        training.simulated(strategy),
        [each.simulated("merged-gradient") for each in alone],
        1e-10,
    )


def compare(
    model: nn.Module, wanted: nn.Module, alone: Sequence[nn.Module], tolerance: float
) -> None:
    """Assert that all ranks have the model that is wanted, and that a rank alone has another."""
    mine, right = weights_of(model), weights_of(wanted)
    for other in gather(mine):
        assert difference(mine, other) <= tolerance
    assert difference(mine, right) <= tolerance
    for other in alone:
        assert difference(weights_of(other), right) > 1000 * tolerance


# Over Gloo: under mpirun, Accelerate takes Open MPI's ranks for its own, see docs/clients.md.
pytestmark = on_ranks(
    2, launcher="gloo", framework="clients", init=hvd.init, env={"HF_HUB_OFFLINE": "1"}
)

TRIED = "merged-gradient:overlap=forward"
"""Tries plans in its first 60 steps, and then defers updates."""

STRATEGIES = (
    "merged-gradient",
    "merged-gradient:overlap=forward,bucket_bytes=4096",  # defers from its second step on
    TRIED,
    "pipe-sgd",
    "cocod:period=4",
)


def cells(*cases: str, all_but_first: Iterable[str] = STRATEGIES) -> pytest.MarkDecorator:
    """Parametrize by case and strategy: the first case under all, others under some.

    All but the first cell are nightly, as each takes seconds: starts of trainers, and 60 steps
    where plans are tried.
    """
    pairs = [(case, strategy) for case in cases for strategy in STRATEGIES]
    parameters = [
        pytest.param(*pair, marks=[pytest.mark.nightly] if number else [])
        for number, pair in enumerate(pairs)
        if pair[0] == cases[0] or pair[1] in all_but_first
    ]
    return pytest.mark.parametrize(("case", "strategy"), parameters)


@pytest.fixture(autouse=True)
def deferred(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Return for each step under overlap=forward whether it left updates to the next one."""
    steps, plain = [], ForwardOverlapEngine.prepare

    def prepare(self: Any, shown_in: Any) -> bool:
        updates = plain(self, shown_in)
        steps.append(self._deferred)
        return updates

    monkeypatch.setattr(ForwardOverlapEngine, "prepare", prepare)
    return steps


def epochs_of(strategy: str, batches: int, accumulation: int = 1) -> int:
    """Return so many epochs that plans were tried where the strategy tries some."""
    steps = 80 if strategy == TRIED else 12
    return -(-steps * accumulation // batches)


# transformers.Trainer ----------------------------------------------------------------------------

SENTENCES, SIZE = 44, 4  # 22 a rank: five batches of 4 and one of 2
TRAINER = {
    "clip": {"max_grad_norm": 0.5},
    "no clip": {"max_grad_norm": 0.0},
    "accumulation": {"max_grad_norm": 0.5, "accumulation": 4},
}


def gpt2() -> nn.Module:
    from transformers import GPT2LMHeadModel  # noqa: PLC0415 - takes seconds

    torch.manual_seed(0)
    configuration = script("small_data").small_gpt2(40, width=16, dropout=0.0)
    model: nn.Module = GPT2LMHeadModel(configuration)
    return model.double()


def sentences() -> Recorded:
    """Return sentences some of whose tokens count for nothing, more in the second half of them."""
    generator = torch.Generator().manual_seed(1)
    items = []
    for number in range(SENTENCES):
        tokens = torch.randint(0, 15 + 15 * (number % 2), (12,), generator=generator)
        labels = tokens.clone()
        labels[: number % 5] = -100
        items.append({"input_ids": tokens, "labels": labels})
    return Recorded(items)


def language_loss(model: nn.Module, batches: list[Any]) -> torch.Tensor:
    """Return the loss of a step: the mean over the tokens of all its batches that count."""
    count = sum((batch["labels"] != -100).sum() for batch in batches)
    losses = [model(**batch, num_items_in_batch=count).loss for batch in batches]
    return torch.stack(losses).sum()


def adamw(model: nn.Module, lr: float = 1e-3) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)


def linear(steps: int) -> Any:
    from transformers import get_scheduler  # noqa: PLC0415 - takes seconds

    return lambda optimizer: get_scheduler("linear", optimizer, 0, steps)


@cells(*TRAINER)
def test_the_trainer_of_transformers(case: str, strategy: str, tmp_path: Path) -> None:
    options = {"accumulation": 1, "max_grad_norm": 1.0, **TRAINER[case]}
    model = gpt2()
    before, dataset = copy.deepcopy(model), sentences()
    epochs = epochs_of(strategy, 6, options["accumulation"])
    script("transformers_trainer").train(
        model,
        dataset,
        strategy=strategy,
        folder=tmp_path,
        num_train_epochs=epochs,
        per_device_train_batch_size=SIZE,
        save_strategy="no",
        use_cpu=True,
        **options,
    )
    steps = grouped(epochs, 6, options["accumulation"])
    training = Training(
        before,
        adamw,
        language_loss,
        dataset.batches(SIZE),
        steps,
        linear(len(steps)),
        clipping(options["max_grad_norm"]),
    )
    check(model, training, strategy)


@pytest.mark.nightly  # trains twice
@cells("every rank", all_but_first=())
def test_a_trainer_of_transformers_that_resumes(case: str, strategy: str, tmp_path: Path) -> None:
    """Training goes on as if it had not ended; under cocod from a checkpoint of each rank."""
    folder = hvd.broadcast_object(tmp_path, root_rank=0)
    dataset, begun = sentences(), 6  # batches of an epoch
    epochs = 2 * epochs_of(strategy, begun)
    for resume in (False, True):
        model = gpt2()
        script("transformers_trainer").train(
            model,
            dataset,
            strategy=strategy,
            folder=folder,
            every_rank_saves=strategy.startswith("cocod"),
            resume=resume,
            num_train_epochs=epochs if resume else epochs // 2,
            per_device_train_batch_size=SIZE,
            lr_scheduler_type="constant",
            save_strategy="epoch",
            save_total_limit=1,
            use_cpu=True,
        )
    check(model, trainer_training(dataset, epochs), strategy)


def trainer_training(dataset: Recorded, epochs: int, lr: float = 1e-3, **options: Any) -> Training:
    """Return the training of the tests that clip to 1 and have a constant learning rate."""
    return Training(
        gpt2(),
        lambda model: adamw(model, lr),
        language_loss,
        dataset.batches(SIZE),
        grouped(epochs, 6, 1),
        change=clipping(1.0),
        **options,
    )


# Networks for digits -----------------------------------------------------------------------------

DIGITS, BATCH = 36, 4  # 18 a rank: four batches of 4 and one of 2
NETWORKS = {
    "clip, accumulation": {"clip": 0.5, "accumulation": 2},
    "clip": {"clip": 0.5},
    "no clip": {"clip": 0.0},
    "accumulation": {"clip": 0.0, "accumulation": 2},
}


def network() -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = script("small_data").network(width=12)
    return model.double()


def digits() -> Recorded:
    """Return random digits, of which each other one is brighter."""
    generator = torch.Generator().manual_seed(1)
    return Recorded(
        [
            (torch.randn(64, generator=generator).double() + number % 2, number % 10)
            for number in range(DIGITS)
        ]
    )


def mean_loss(accumulation: int) -> Any:
    """Return the loss of a step: a part of it for each batch, also where batches are missing."""

    def loss(model: nn.Module, batches: list[Any]) -> torch.Tensor:
        losses = [nn.functional.cross_entropy(model(x), y) for x, y in batches]
        return torch.stack(losses).sum() / accumulation

    return loss


def decaying(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def networks_training(
    dataset: Recorded, epochs: int, clip: float, accumulation: int = 1, **options: Any
) -> Training:
    """Return the training of a client that has a network for digits."""
    return Training(
        network(),
        momentum,
        mean_loss(accumulation),
        dataset.batches(BATCH),
        grouped(epochs, 5, accumulation),
        decaying,
        clipping(clip),
        **options,
    )


def assert_deferred(steps: list[bool], options: dict[str, Any], strategy: str) -> None:
    """Assert that steps left updates where nobody read their gradients; others cannot."""
    if "overlap" in strategy and not options["clip"]:
        assert sum(steps) > 5


def check_network(name: str, case: str, strategy: str, deferred: list[bool], **more: Any) -> None:
    """Assert that a script which trains a network does so as one process."""
    options, model, dataset = NETWORKS[case], network(), digits()
    epochs = epochs_of(strategy, 5, options.get("accumulation", 1))
    script(name).train(
        model, dataset, strategy=strategy, epochs=epochs, batch_size=BATCH, **options, **more
    )
    check(model, networks_training(dataset, epochs, **options), strategy)
    assert_deferred(deferred, options, strategy)


@cells(*NETWORKS)
def test_the_loop_of_accelerate(case: str, strategy: str, deferred: list[bool]) -> None:
    check_network("accelerate_loop", case, strategy, deferred)


@cells(*NETWORKS)
def test_the_trainer_of_lightning(case: str, strategy: str, deferred: list[bool]) -> None:
    more = {"accelerator": "cpu", "precision": "64-true"}
    check_network("lightning_trainer", case, strategy, deferred, **more)


@pytest.fixture
def double() -> Iterator[None]:
    """Fabric casts what a model returns to the default dtype."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@cells(*NETWORKS)
@pytest.mark.usefixtures("double")
def test_the_loop_of_fabric(case: str, strategy: str, deferred: list[bool]) -> None:
    check_network("lightning_fabric", case, strategy, deferred, precision="64-true")


# PEFT --------------------------------------------------------------------------------------------


@cells("merge, unmerge", all_but_first=())
def test_adapters_of_peft(case: str, strategy: str) -> None:
    """They are merged into the weights while updates may be pending, and taken out again."""
    peft = script("peft_lora")

    def make_model() -> nn.Module:
        torch.manual_seed(0)
        model: nn.Module = peft.adapted(script("small_data").small_gpt2(40, 16, dropout=0.0))
        return model.double()

    def merge(model: Any, step: int) -> None:
        if step % 5 == 2:
            model.merge_adapter()
            model.unmerge_adapter()

    model, dataset, epochs = make_model(), sentences(), epochs_of(strategy, 6)
    peft.train(
        model,
        dataset,
        strategy=strategy,
        epochs=epochs,
        batch_size=SIZE,
        after_step=lambda _, step: merge(model, step),
    )
    training = Training(
        make_model(),
        lambda model: adamw(model, 0.01),
        lambda model, batches: model(**batches[0]).loss,
        dataset.batches(SIZE),
        grouped(epochs, 6, 1),
        after=merge,
    )
    check(model, training, strategy)


# A loop as timm's --------------------------------------------------------------------------------


class Overflowing(Recorded):
    """Digits of which one gives the rank that takes it infinite gradients, in the first epoch."""

    def item(self, index: int, number: int) -> Any:
        x, y = self.items[index]
        return (x * torch.inf if index == 7 and number < DIGITS // 2 else x), y


AVERAGES = {
    "overflow": {"clip": 0.5},
    "no clip": {"clip": 0.0, "scaled": False},
}


@cells(*AVERAGES)
def test_a_loop_with_a_scaler_and_averaged_weights(case: str, strategy: str) -> None:
    options, model = AVERAGES[case], network()
    dataset = (Overflowing if case == "overflow" else Recorded)(digits().items)
    epochs = epochs_of(strategy, 5)
    smooth = script("ema_scaler").train(
        model, dataset, strategy=strategy, epochs=epochs, batch_size=BATCH, **options
    )
    averages: dict[nn.Module, AveragedModel] = {}

    def average(model: nn.Module, _: int) -> None:
        if model not in averages:
            averages[model] = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.95))
        averages[model].update_parameters(model)

    def both(model: nn.Module) -> nn.Module:
        if strategy.startswith("cocod"):  # each rank averages the weights of its own replica
            return model
        return nn.ModuleList([model, averages[model]])

    training = Training(
        network(),
        lambda model: torch.optim.AdamW(model.parameters(), lr=0.005, weight_decay=0.05),
        mean_loss(1),
        dataset.batches(BATCH),
        grouped(epochs, 5, 1),
        lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(
            optimizer, 5 * epochs, eta_min=0.0001
        ),
        clipping(options["clip"]),
        average,
        result=both,
    )
    mine = model if strategy.startswith("cocod") else nn.ModuleList([model, smooth])
    check(mine, training, strategy)


# DCGAN -------------------------------------------------------------------------------------------


@cells("two passes", all_but_first=())
def test_the_tutorial_of_dcgan(case: str, strategy: str) -> None:
    """Two networks, of which one has two backward passes a step, and is part of the other's."""
    dcgan, dataset, epochs = script("dcgan"), digits(), epochs_of(strategy, 5)

    def networks() -> tuple[nn.Module, nn.Module]:
        torch.manual_seed(0)
        return dcgan.generator(width=6).double(), dcgan.discriminator(width=6).double()

    def noise(x: torch.Tensor) -> torch.Tensor:  # a function of the batch
        return x.view(len(x), -1)[:, : dcgan.NOISE, None, None].roll(1, 0)

    net_g, net_d = networks()
    dcgan.train(
        net_g,
        net_d,
        dataset,
        strategy=strategy,
        epochs=epochs,
        batch_size=BATCH,
        noise=noise,
    )
    batches = dataset.batches(BATCH)

    def simulated(batches: list[list[Any]], strategy: str) -> nn.Module:
        def workers(number: int) -> Any:
            return make_workers(
                strategy,
                len(batches),
                lambda: networks()[number],
                lambda net: torch.optim.Adam(net.parameters(), lr=0.002, betas=(0.5, 0.999)),
            )

        g, d = workers(0), workers(1)
        criterion = nn.functional.binary_cross_entropy_with_logits

        def loss_d(net: nn.Module, rank: int, step: int) -> torch.Tensor:
            x = batches[rank][step][0]
            fake = g.models[rank](noise(x)).detach()
            real = net(x.view(-1, 1, 8, 8))
            return criterion(real, x.new_ones(len(x))) + criterion(net(fake), x.new_zeros(len(x)))

        def loss_g(net: nn.Module, rank: int, step: int) -> torch.Tensor:
            x = batches[rank][step][0]
            return criterion(d.models[rank](net(noise(x))), x.new_ones(len(x)))

        for step in range(5 * epochs):
            for each, loss in ((d, loss_d), (g, loss_g)):
                each.backward(loss, step)
                each.step()
        for each in (d, g):
            each.synchronize()
        return nn.ModuleList([g.models[0], d.models[0]])

    compare(
        nn.ModuleList([net_g, net_d]),
        simulated(batches, strategy),
        [simulated([each], "merged-gradient") for each in batches],
        1e-10,
    )
