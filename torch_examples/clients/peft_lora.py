"""LoRA adapters of PEFT on several ranks: a small GPT-2 learns to write with few parameters.

    horovodrun -np 2 python torch_examples/clients/peft_lora.py
    horovodrun -np 2 python torch_examples/clients/peft_lora.py --strategy pipe-sgd

The optimizer has the adapters alone, so gradients are small. To evaluate, they are merged into the
weights, and taken out again.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from transformers import GPT2Config, GPT2LMHeadModel

import hvd_pipe.torch as hvd
from small_data import share, share_cores, small_gpt2, sonnets


def adapted(configuration: GPT2Config) -> nn.Module:
    """Return a GPT-2 with adapters."""
    lora = LoraConfig(r=4, lora_alpha=8, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True)
    return get_peft_model(GPT2LMHeadModel(configuration), lora)


def train(
    model: nn.Module,
    dataset: Dataset[Any],
    *,
    strategy: str | None = None,
    epochs: int = 3,
    batch_size: int = 8,
    lr: float = 0.01,
    after_step: Callable[[Any, int], object] = lambda *_: None,
) -> None:
    """Train the parameters of a model that are not frozen.

    Args:
        model: The model.
        dataset: What all ranks train on together.
        strategy: As in ``hvd.DistributedOptimizer``.
        epochs: How often all data are used.
        batch_size: Of a rank.
        lr: The learning rate.
        after_step: Called after each step, with the optimizer and the number of the step.
    """
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    optimizer = hvd.DistributedOptimizer(
        torch.optim.AdamW([p for _, p in trained], lr=lr),
        named_parameters=trained,
        strategy=strategy,
    )
    sampler = DistributedSampler(dataset, hvd.size(), hvd.rank(), drop_last=True)
    loader = DataLoader(dataset, batch_size=batch_size, sampler=sampler)
    step = 0
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for batch in loader:
            optimizer.zero_grad()
            model(**batch).loss.backward()
            optimizer.step()
            after_step(optimizer, step)
            step += 1
    optimizer.synchronize()


@torch.no_grad()
def merged_loss(model: Any, dataset: Dataset[Any]) -> float:
    """Return the loss of the model whose weights have the adapters in them, each rank a share."""
    batch = next(iter(DataLoader(share(dataset), batch_size=64)))
    model.merge_adapter()
    model.eval()
    loss = model(**batch).loss
    model.train()
    model.unmerge_adapter()
    return float(hvd.allreduce(loss, name="loss"))


def main() -> None:
    parser = argparse.ArgumentParser(description="Train LoRA adapters of a small GPT-2.")
    parser.add_argument("--strategy", help="merged-gradient, pipe-sgd, cocod:period=4, ...")
    parser.add_argument("--epochs", type=int, default=3)
    options = parser.parse_args()
    hvd.init()
    share_cores()
    pieces, dataset, held_out = sonnets()
    model = adapted(small_gpt2(len(pieces.alphabet)))

    def evaluate(optimizer: Any, step: int) -> None:
        if step % 10 == 9:
            optimizer.synchronize()
            loss = merged_loss(model, held_out)
            if hvd.rank() == 0:
                print(f"step {step + 1}: loss {loss:.3f}")

    train(model, dataset, after_step=evaluate, **vars(options))
    if hvd.rank() == 0:
        model.save_pretrained("adapter")


if __name__ == "__main__":
    main()
