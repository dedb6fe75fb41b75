"""transformers.Trainer on several ranks: a small GPT-2 learns to write.

    horovodrun -np 2 python torch_examples/clients/transformers_trainer.py
    horovodrun -np 2 python torch_examples/clients/transformers_trainer.py --strategy pipe-sgd

Trainer believes that it trains alone. So this script gives each rank its share of the data,
averages what the ranks evaluate, and lets rank 0 log, save and choose the best model.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import GPT2LMHeadModel, PrinterCallback, Trainer, TrainingArguments
from transformers.trainer_utils import EvalLoopOutput

import hvd_pipe.torch as hvd
from small_data import hide_mpi, share, share_cores, small_gpt2, sonnets


class AveragingTrainer(Trainer):
    """Evaluates with all updates made, and gives every rank the mean of the ranks' metrics."""

    def __init__(self, optimizer: torch.optim.Optimizer, **arguments: Any) -> None:
        super().__init__(optimizers=(optimizer, None), **arguments)
        self._distributed: Any = optimizer

    def evaluation_loop(self, *arguments: Any, **options: Any) -> EvalLoopOutput:
        self._distributed.synchronize()
        output = super().evaluation_loop(*arguments, **options)
        for name, value in output.metrics.items():
            mean = hvd.allreduce(torch.tensor(value, dtype=torch.float64), name=name)
            output.metrics[name] = float(mean)
        return output


def train(
    model: nn.Module,
    dataset: Dataset[Any],
    *,
    evaluation: Dataset[Any] | None = None,
    strategy: str | None = None,
    accumulation: int = 1,
    lr: float = 1e-3,
    folder: Path = Path("checkpoints"),
    every_rank_saves: bool = False,
    resume: bool = False,
    **arguments: Any,
) -> Trainer:
    """Train a model, and return the trainer.

    Args:
        model: The model.
        dataset: What all ranks train on together.
        evaluation: What all ranks evaluate on together, each a share.
        strategy: As in ``hvd.DistributedOptimizer``.
        accumulation: Batches a step.
        lr: The learning rate of the first step.
        folder: Where checkpoints are, for all ranks to read.
        every_rank_saves: Save a checkpoint of each rank, as ``cocod`` needs it to resume.
        resume: Go on from the last checkpoint.
        arguments: For ``TrainingArguments``.
    """
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=lr),
        named_parameters=model.named_parameters(),
        backward_passes_per_step=accumulation,  # Trainer does not call no_sync()
        strategy=strategy,
    )
    first = hvd.rank() == 0
    best = arguments.pop("load_best_model_at_end", False)
    if not (first or every_rank_saves):
        arguments["save_strategy"] = "no"
    trainer = AveragingTrainer(
        optimizer,
        model=model,
        args=TrainingArguments(
            output_dir=str(folder / f"rank{hvd.rank()}"),
            gradient_accumulation_steps=accumulation,
            load_best_model_at_end=best and first,
            report_to=[],
            disable_tqdm=True,
            **arguments,
        ),
        train_dataset=share(dataset),
        eval_dataset=None if evaluation is None else share(evaluation),
    )
    if not first:
        trainer.remove_callback(PrinterCallback)
    saved = folder / f"rank{hvd.rank() if every_rank_saves else 0}"
    trainer.train(resume_from_checkpoint=_last(saved) if resume else None)
    if best:  # rank 0 has loaded it; nothing that is pending is for this model
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    else:
        optimizer.synchronize()
    hvd.barrier()  # rank 0 has saved
    return trainer


def _last(folder: Path) -> str:
    return str(max(folder.glob("checkpoint-*"), key=lambda each: int(each.name.split("-")[1])))


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small GPT-2 with transformers.Trainer.")
    parser.add_argument("--strategy", help="merged-gradient, pipe-sgd, cocod:period=4, ...")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--accumulation", type=int, default=1, help="batches a step")
    parser.add_argument("--folder", type=Path, default=Path("checkpoints"))
    parser.add_argument("--resume", action="store_true", help="from the last checkpoint")
    options = parser.parse_args()
    hvd.init()
    hide_mpi()
    share_cores()
    pieces, dataset, evaluation = sonnets()
    model = GPT2LMHeadModel(small_gpt2(len(pieces.alphabet)))
    train(
        model,
        dataset,
        evaluation=evaluation,
        strategy=options.strategy,
        accumulation=options.accumulation,
        folder=options.folder,
        every_rank_saves="cocod" in (options.strategy or ""),
        resume=options.resume,
        num_train_epochs=options.epochs,
        per_device_train_batch_size=8,
        eval_strategy="epoch",
        save_strategy="epoch",
        logging_steps=10,
        load_best_model_at_end=True,
        use_cpu=not torch.cuda.is_available(),
    )


if __name__ == "__main__":
    main()
