"""Digits and text for the scripts of this folder, and each rank's share of data and cores."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset, Subset, TensorDataset

import hvd_pipe.torch as hvd

SONNETS = Path(__file__).parents[1] / "text.txt"


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Return scikit-learn's digits, to train on and held out: 64 pixels and a label each."""
    from sklearn.datasets import load_digits  # noqa: PLC0415 - the scripts for text go without

    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images / 8 - 1, dtype=torch.float32), torch.tensor(labels)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    train, held_out = order[:-360], order[-360:]
    return TensorDataset(x[train], y[train]), TensorDataset(x[held_out], y[held_out])


class Characters(Dataset[dict[str, Any]]):
    """Pieces of a text, as causal language models of transformers take them.

    Args:
        text: The text.
        length: Characters of a piece.
    """

    def __init__(self, text: str, length: int = 64) -> None:
        self.alphabet = sorted(set(text))
        number = {character: i for i, character in enumerate(self.alphabet)}
        ids = torch.tensor([number[character] for character in text])
        self._pieces = ids[: len(ids) // length * length].view(-1, length)

    def __len__(self) -> int:
        return len(self._pieces)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self._pieces[index], "labels": self._pieces[index]}


def sonnets() -> tuple[Characters, Dataset[Any], Dataset[Any]]:
    """Return all pieces of the sonnets, those to train on, and those held out."""
    pieces = Characters(SONNETS.read_text())
    split = len(pieces) * 9 // 10
    return pieces, Subset(pieces, range(split)), Subset(pieces, range(split, len(pieces)))


def share(dataset: Any) -> Subset[Any]:
    """Return this rank's part of a data set; all parts have the same length."""
    length = len(dataset) // hvd.size() * hvd.size()
    return Subset(dataset, range(hvd.rank(), length, hvd.size()))


def hide_mpi() -> None:
    """After ``hvd.init()``: Accelerate takes Open MPI's ranks for those of torch.distributed."""
    for name in [name for name in os.environ if name.startswith("OMPI_COMM_WORLD_")]:
        del os.environ[name]


def share_cores() -> None:
    """Let the ranks of this machine compute on its cores side by side."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // hvd.local_size()))


def network(width: int = 64) -> nn.Module:
    """Return a small network for digits."""
    return nn.Sequential(
        nn.Linear(64, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 10)
    )


@torch.no_grad()
def accuracy(model: nn.Module, dataset: Any) -> float:
    """Return the share of a data set that a model reads right, each rank a part of it."""
    items = share(dataset)
    x, y = (torch.stack(each) for each in zip(*items, strict=True))
    right = (model(x).argmax(1) == y).double().mean()
    return float(hvd.allreduce(right, name="accuracy"))


def small_gpt2(alphabet: int, width: int = 64, dropout: float = 0.1) -> Any:
    """Return the configuration of a GPT-2 with two layers."""
    from transformers import GPT2Config  # noqa: PLC0415 - the scripts for digits go without

    size = {"vocab_size": alphabet, "n_positions": 64, "n_embd": width, "n_layer": 2, "n_head": 2}
    drop = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    return GPT2Config(**size, **drop, bos_token_id=0, eos_token_id=0)
