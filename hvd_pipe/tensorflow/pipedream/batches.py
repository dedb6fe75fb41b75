"""A dataset's minibatches, cut into microbatches."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from hvd_pipe.pipeline.feed import Piece
from hvd_pipe.tensorflow.pipedream.graph import Graph

__all__ = ["split"]


def split(graph: Graph, batch: Any, pieces: int) -> list[Piece]:
    """Cut a minibatch into microbatches along the first dimension, as `numpy.array_split` does.

    Args:
        graph: The model, which knows what it takes.
        batch: (x, y): tensors or arrays, or what Keras' ``fit`` takes of several.
        pieces: How many microbatches; no more than there are samples.

    Raises:
        TypeError, ValueError: No such pair, or too few samples.

    Example:
        >>> from hvd_pipe.tensorflow.pipedream.graph import graph_of
        >>> graph = graph_of(keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]))
        >>> first, last = split(graph, (tf.zeros((3, 2)), tf.range(3)), 2)
        >>> first.inputs[0].shape, last.targets.numpy(), last.samples
        (TensorShape([2, 2]), array([2], dtype=int32), 1)
    """
    if not isinstance(batch, Sequence) or len(batch) != 2:
        what = f"{len(batch)} items" if isinstance(batch, Sequence) else type(batch).__name__
        raise TypeError(
            f"the dataset must yield (x, y), got {what}: give several inputs or targets as a "
            "tuple or a dict, ((ids, lengths), y); weights of samples belong in loss_fn."
        )
    inputs = graph.feed(batch[0])
    targets = keras.tree.map_structure(tf.convert_to_tensor, batch[1])
    samples = int(inputs[0].shape[0])
    named = [(value.name, each) for value, each in zip(graph.values, inputs, strict=False)]
    named += [("targets", each) for each in keras.tree.flatten(targets)]
    for name, tensor in named:
        if not tensor.shape.rank or tensor.shape[0] != samples:
            raise ValueError(
                f"a minibatch of {samples} samples has {name} of shape {list(tensor.shape)}: "
                "inputs and targets have the samples as their first dimension."
            )
    if samples < pieces:
        raise ValueError(
            f"a minibatch of {samples} samples cannot be cut into {pieces} microbatches: make "
            "larger batches, leave the last one out (dataset.batch(..., drop_remainder=True)), "
            "or ask for fewer microbatches."
        )
    bounds = [at * (samples // pieces) + min(at, samples % pieces) for at in range(pieces + 1)]

    def part(first: int, end: int) -> Piece:
        own = keras.tree.map_structure(lambda each: each[first:end], targets)
        cut = tuple(each[first:end] for each in inputs)
        return Piece(cut, own, end - first, (end - first) / samples, _digest(own))

    return [part(first, end) for first, end in itertools.pairwise(bounds)]


def _digest(targets: Any) -> int:
    """Return a checksum of all targets."""
    digest = 0
    for each in keras.tree.flatten(targets):
        digest = zlib.crc32(each.numpy().tobytes(), digest)
    return digest
