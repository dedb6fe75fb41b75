"""Tensors and multiply-adds of published networks, for which no measured profile is at hand.

A tensor's time is its share of the network's multiply-adds: batch normalisation, activations and
concatenations, which a real profile charges for, take none. The counts of tensors and parameters
that MG-WFBP (arXiv 1912.09268, table 4) gives for the same networks check the transcription.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from hvd_pipe.planning.profile import LayerProfile, ModelProfile

FORWARD = 1 / 3  # of a step: the backward pass computes two products where the forward has one


@dataclass
class Network:
    """A network's tensors in forward order: (values, multiply-adds a sample)."""

    tensors: list[tuple[int, int]] = field(default_factory=list)

    @property
    def parameters(self) -> int:
        """How many values the network has."""
        return sum(values for values, _ in self.tensors)

    def conv(self, inputs: int, outputs: int, side: int, kernel: tuple[int, int]) -> None:
        """Add a convolution without bias that makes images of ``side`` times ``side``."""
        values = inputs * outputs * kernel[0] * kernel[1]
        self.tensors.append((values, values * side * side))

    def norm(self, channels: int) -> None:
        """Add a batch normalisation."""
        self.tensors += [(channels, 0), (channels, 0)]

    def unit(self, inputs: int, outputs: int, side: int, kernel: tuple[int, int] = (1, 1)) -> int:
        """Add a convolution and its normalisation; return the channels that it makes."""
        self.conv(inputs, outputs, side, kernel)
        self.norm(outputs)
        return outputs

    def dense(self, inputs: int, outputs: int) -> None:
        """Add a fully connected layer."""
        self.tensors += [(inputs * outputs, inputs * outputs), (outputs, 0)]

    def profile(self, step_s: float, value_bytes: int = 4) -> ModelProfile:
        """The network on a worker whose step takes so long."""
        total = sum(work for _, work in self.tensors)
        layers = (
            LayerProfile(
                f"{index}",
                value_bytes * values,
                backward_s=(1 - FORWARD) * step_s * work / total,
                forward_s=FORWARD * step_s * work / total,
            )
            for index, (values, work) in enumerate(self.tensors)
        )
        return ModelProfile(tuple(layers))


def resnet152() -> Network:
    """ResNet-152 on images of 224 x 224 (arXiv 1512.03385)."""
    net = Network()
    channels = net.unit(3, 64, 112, (7, 7))
    for stage, blocks in enumerate((3, 8, 36, 3)):
        width, side = 64 * 2**stage, 56 // 2**stage
        for block in range(blocks):
            reduce_side = 2 * side if stage and not block else side
            net.unit(channels, width, reduce_side)
            net.unit(width, width, side, (3, 3))
            net.unit(width, 4 * width, side)
            if not block:
                net.unit(channels, 4 * width, side)
            channels = 4 * width
    net.dense(channels, 1000)
    return net


def _densenet(blocks: tuple[int, ...], growth: int, channels: int) -> Network:
    net, side = Network(), 56
    net.unit(3, channels, 112, (7, 7))
    for number, layers in enumerate(blocks):
        for _ in range(layers):
            net.norm(channels)
            net.conv(channels, 4 * growth, side, (1, 1))
            net.norm(4 * growth)
            net.conv(4 * growth, growth, side, (3, 3))
            channels += growth
        net.norm(channels)
        if number < len(blocks) - 1:
            net.conv(channels, channels // 2, side, (1, 1))
            channels, side = channels // 2, side // 2
    net.dense(channels, 1000)
    return net


def densenet161() -> Network:
    """DenseNet-161 on images of 224 x 224 (arXiv 1608.06993)."""
    return _densenet((6, 12, 36, 24), growth=48, channels=96)


def densenet201() -> Network:
    """DenseNet-201 on images of 224 x 224 (arXiv 1608.06993)."""
    return _densenet((6, 12, 48, 32), growth=32, channels=64)


# Inception-v4's branches: what each convolution makes, and its kernel.
_Branch = tuple[tuple[int, tuple[int, int]], ...]
_1, _3, _17, _71, _13, _31 = (1, 1), (3, 3), (1, 7), (7, 1), (1, 3), (3, 1)
_A: tuple[_Branch, ...] = (
    ((96, _1),),
    ((64, _1), (96, _3)),
    ((64, _1), (96, _3), (96, _3)),
    ((96, _1),),
)
_B: tuple[_Branch, ...] = (
    ((384, _1),),
    ((192, _1), (224, _17), (256, _71)),
    ((192, _1), (192, _71), (224, _17), (224, _71), (256, _17)),
    ((128, _1),),
)


def inception_v4() -> Network:
    """Inception-v4 on 224 x 224, as MG-WFBP counts it (arXiv 1602.07261)."""
    net = Network()

    def branches(inputs: int, side: int, which: tuple[_Branch, ...]) -> None:
        for branch in which:
            channels = inputs
            for outputs, kernel in branch:
                channels = net.unit(channels, outputs, side, kernel)

    net.unit(3, 32, 111, _3)
    net.unit(32, 32, 109, _3)
    net.unit(32, 64, 109, _3)
    net.unit(64, 96, 54, _3)
    net.unit(160, 64, 54)
    net.unit(64, 96, 52, _3)
    branches(160, 54, (((64, _1), (64, _17), (64, _71)),))
    net.unit(64, 96, 52, _3)
    net.unit(192, 192, 25, _3)
    for _ in range(4):
        branches(384, 25, _A)
    net.unit(384, 384, 12, _3)
    branches(384, 25, (((192, _1), (224, _3)),))
    net.unit(224, 256, 12, _3)
    for _ in range(7):
        branches(1024, 12, _B)
    branches(1024, 12, (((192, _1),),))
    net.unit(192, 192, 5, _3)
    branches(1024, 12, (((256, _1), (256, _17), (320, _71)),))
    net.unit(320, 320, 5, _3)
    for _ in range(3):
        branches(1536, 5, (((256, _1),), ((384, _1),)))
        branches(384, 5, (((256, _13),), ((256, _31),)))
        branches(1536, 5, (((384, _1), (448, _31), (512, _13)),))
        branches(
            512,
            5,
            (
                ((256, _13),),
                ((256, _31),),
            ),
        )
        branches(1536, 5, (((256, _1),),))
    net.dense(1536, 1000)
    return net


NETWORKS: dict[str, Callable[[], Network]] = {
    "resnet152": resnet152,
    "densenet161": densenet161,
    "densenet201": densenet201,
    "inception-v4": inception_v4,
}
