"""TensorFlow's twin of `emulated.py`: blocks of layers that take their times without computing.

A block is a call out of the graph, which costs more than a layer of torch does, so neighbouring
layers share one: their gradients are ready when the block's backward pass is over.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf
from emulated import Device

from hvd_pipe.planning.profile import LayerProfile, ModelProfile

BLOCKS = 16


class EmulatedModel:
    """The layers of a profile, as float32 variables, in blocks of about equal time."""

    def __init__(self, profile: ModelProfile, compute_s: float, gradient_bytes: int) -> None:
        speed = compute_s / (profile.forward_s + profile.backward_s)
        size = gradient_bytes / float(profile.gradient_bytes().sum())
        self._device = Device()
        self._blocks: list[Callable[[Any], Any]] = []
        self.variables: list[tf.Variable] = []
        for layers in in_blocks(profile, BLOCKS):
            mine = [
                tf.Variable(tf.zeros([max(1, round(layer.gradient_bytes * size / 4))]), name=name)
                for layer in layers
                if layer.gradient_bytes
                for name in [layer.name.replace(".", "/")]
            ]
            forward_s, backward_s = (
                speed * sum(getattr(layer, part) for layer in layers)
                for part in ("forward_s", "backward_s")
            )
            self.variables += mine
            self._blocks.append(self._block(mine, forward_s, backward_s))
        self.nbytes = 4 * sum(int(each.shape[0]) for each in self.variables)

    def loss(self, x: tf.Tensor) -> tf.Tensor:
        """One forward pass, in a graph."""
        x = tf.numpy_function(partial(_begin, self._device), [x], tf.float32, stateful=False)
        x.set_shape([])
        for block in self._blocks:
            x = block(x)
        return x

    def _block(
        self, weights: list[tf.Variable], forward_s: float, backward_s: float
    ) -> Callable[[Any], Any]:
        device = self._device

        def take(seconds: float, *after: tf.Tensor) -> tf.Tensor:
            work = partial(_work, device, seconds)
            done = tf.numpy_function(work, after, tf.float32, stateful=False)
            done.set_shape([])
            return done

        @tf.custom_gradient
        def run(x: tf.Tensor, *values: tf.Tensor) -> Any:
            output = take(forward_s, x)

            def backward(upstream: tf.Tensor) -> Any:
                # The loss's gradient is a constant: what depends on no more is computed once.
                done = take(backward_s, upstream, output)
                # Equal ones of one size would be sent once: TensorFlow merges equal operations.
                gradients = [
                    tf.fill(value.shape, 1e-3 * (i + 1) * done) for i, value in enumerate(values)
                ]
                return (done, *gradients)

            return output, backward

        return lambda x: run(x, *(each.read_value() for each in weights))


# No methods of the model: TensorFlow keeps what a graph calls for ever.
def _begin(device: Device, x: Any) -> Any:
    device.begin()
    return np.float32(x)


def _work(device: Device, seconds: float, x: Any, *after: Any) -> Any:
    device.work(seconds)
    return np.float32(x)


def in_blocks(profile: ModelProfile, count: int) -> list[list[LayerProfile]]:
    """Cut the layers into so many runs of about equal time, or fewer."""
    whole = profile.forward_s + profile.backward_s
    blocks: list[list[LayerProfile]] = []
    passed = 0.0
    for layer in profile.layers:
        if not blocks or passed >= len(blocks) * whole / count:
            blocks.append([])
        blocks[-1].append(layer)
        passed += layer.forward_s + layer.backward_s
    return blocks
