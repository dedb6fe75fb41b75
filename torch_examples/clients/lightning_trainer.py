"""Lightning's Trainer on several ranks: a small network reads digits.

    horovodrun -np 2 python torch_examples/clients/lightning_trainer.py
    horovodrun -np 2 python torch_examples/clients/lightning_trainer.py --strategy pipe-sgd

Trainer has one device, and believes that it trains alone. So the loader has this rank's share of
the data, the logged accuracy is the mean over ranks, and rank 0 alone shows progress and saves.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import hvd_pipe.torch as hvd
from small_data import digits, network, share, share_cores


class Classifier(lightning.LightningModule):
    """A network and its optimizer.

    Args:
        network: The network.
        strategy: As in ``hvd.DistributedOptimizer``.
        accumulation: Batches a step.
        lr: The learning rate, which decays.
    """

    def __init__(
        self, network: nn.Module, strategy: str | None, accumulation: int, lr: float
    ) -> None:
        super().__init__()
        self.network = network
        self._options = {"strategy": strategy, "backward_passes_per_step": accumulation}
        self._lr = lr

    def configure_optimizers(self) -> Any:
        self._optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(self.parameters(), lr=self._lr, momentum=0.9),
            named_parameters=self.named_parameters(),
            **self._options,
        )
        schedule = torch.optim.lr_scheduler.ExponentialLR(self._optimizer, 0.99)
        return [self._optimizer], [{"scheduler": schedule, "interval": "step"}]

    def on_fit_start(self) -> None:
        hvd.broadcast_parameters(self.state_dict(), root_rank=0)

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.network(x), y)

    def on_validation_start(self) -> None:
        self._optimizer.synchronize()

    def on_train_end(self) -> None:
        self._optimizer.synchronize()

    def validation_step(self, batch: Any, _: int) -> None:
        x, y = batch
        right = (self.network(x).argmax(1) == y).double().mean()
        self.log("accuracy", hvd.allreduce(right, name="accuracy"), prog_bar=True)


def train(
    network: nn.Module,
    dataset: Dataset[Any],
    *,
    evaluation: Dataset[Any] | None = None,
    strategy: str | None = None,
    accumulation: int = 1,
    clip: float = 1.0,
    epochs: int = 10,
    batch_size: int = 32,
    lr: float = 0.05,
    folder: Path | None = None,
    **options: Any,
) -> None:
    """Train a network on a data set of all ranks.

    Args:
        network: The network.
        dataset: Inputs and labels.
        evaluation: What all ranks evaluate on together, each a share.
        strategy: As in ``hvd.DistributedOptimizer``.
        accumulation: Batches a step.
        clip: The largest norm of the gradients; 0 for any.
        epochs: How often all data are used.
        batch_size: Of a rank.
        lr: The learning rate of the first step.
        folder: Where rank 0 saves the best model.
        options: For Lightning's ``Trainer``.
    """
    first = hvd.rank() == 0
    saves = folder is not None and first
    trainer = lightning.Trainer(
        devices=1,
        plugins=[LightningEnvironment()],  # or it looks for MPI's ranks, or Slurm's
        max_epochs=epochs,
        accumulate_grad_batches=accumulation,
        gradient_clip_val=clip or None,
        logger=False,
        enable_checkpointing=saves,
        callbacks=[ModelCheckpoint(folder, monitor="accuracy", mode="max")] if saves else [],
        enable_progress_bar=first,
        enable_model_summary=False,
        **options,
    )
    sampler = DistributedSampler(dataset, hvd.size(), hvd.rank(), drop_last=True)
    loader = DataLoader(dataset, batch_size=batch_size, sampler=sampler)
    held_out = None if evaluation is None else DataLoader(share(evaluation), batch_size=60)
    trainer.fit(Classifier(network, strategy, accumulation, lr), loader, held_out)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train on digits with Lightning's Trainer.")
    parser.add_argument("--strategy", help="merged-gradient, pipe-sgd, cocod:period=4, ...")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--accumulation", type=int, default=1, help="batches a step")
    parser.add_argument("--folder", type=Path, default=Path("checkpoints"))
    options = parser.parse_args()
    hvd.init()
    share_cores()
    dataset, held_out = digits()
    train(network(), dataset, evaluation=held_out, **vars(options))


if __name__ == "__main__":
    main()
