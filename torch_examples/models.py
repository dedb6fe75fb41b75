"""A small model zoo in plain torch: nothing to download, no torchvision needed.

The ImageNet models have the layers and the parameter counts of torchvision's, so that timings can
be compared; their weights are torch's default initialisation.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

Shape = tuple[int, int, int]  # channels, height, width


class DigitsNet(nn.Module):
    """Three convolutions with BatchNorm and one linear layer, for any image of 8x8 or more."""

    def __init__(self, num_classes: int = 10, in_channels: int = 1) -> None:
        super().__init__()
        self.features = nn.Sequential(
            _conv_bn(in_channels, 32, 3),
            nn.ReLU(inplace=True),
            _conv_bn(32, 64, 3),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            _conv_bn(64, 64, 3),
            nn.ReLU(inplace=True),
            nn.AdaptiveAvgPool2d(4),  # of every size of image
        )
        self.classifier = nn.Linear(64 * 4 * 4, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x).flatten(1))


def _conv_bn(
    n_in: int, n_out: int, kernel: int, stride: int = 1, padding: int | None = None
) -> nn.Sequential:
    padding = kernel // 2 if padding is None else padding
    conv = nn.Conv2d(n_in, n_out, kernel, stride, padding, bias=False)  # BatchNorm has the bias
    return nn.Sequential(conv, nn.BatchNorm2d(n_out))


class _Residual(nn.Module):
    """``relu(body(x) + shortcut(x))``"""

    def __init__(self, body: nn.Module, shortcut: nn.Module) -> None:
        super().__init__()
        self.body, self.shortcut = body, shortcut

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


def _basic(n_in: int, width: int, stride: int) -> nn.Sequential:
    return nn.Sequential(
        _conv_bn(n_in, width, 3, stride), nn.ReLU(inplace=True), _conv_bn(width, width, 3)
    )


def _bottleneck(n_in: int, width: int, stride: int) -> nn.Sequential:
    return nn.Sequential(
        _conv_bn(n_in, width, 1),
        nn.ReLU(inplace=True),
        _conv_bn(width, width, 3, stride),
        nn.ReLU(inplace=True),
        _conv_bn(width, 4 * width, 1),
    )


def _resnet(
    block: Callable[[int, int, int], nn.Module],
    expansion: int,
    depths: tuple[int, ...],
    num_classes: int,
    in_channels: int,
) -> nn.Sequential:
    layers: list[nn.Module] = [
        _conv_bn(in_channels, 64, 7, stride=2),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, stride=2, padding=1),
    ]
    n_in = 64
    for stage, depth in enumerate(depths):
        width = 64 * 2**stage
        for i in range(depth):
            stride = 2 if stage > 0 and i == 0 else 1
            n_out = width * expansion
            same = stride == 1 and n_in == n_out
            shortcut = nn.Identity() if same else _conv_bn(n_in, n_out, 1, stride)
            layers.append(_Residual(block(n_in, width, stride), shortcut))
            n_in = n_out
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(n_in, num_classes)]
    return nn.Sequential(*layers)


def resnet18(num_classes: int, image: Shape) -> nn.Module:
    return _resnet(_basic, 1, (2, 2, 2, 2), num_classes, image[0])


def resnet50(num_classes: int, image: Shape) -> nn.Module:
    return _resnet(_bottleneck, 4, (3, 4, 6, 3), num_classes, image[0])


def vgg16(num_classes: int, image: Shape) -> nn.Module:
    """138 million parameters, 74 % of them in one linear layer: hard on every network."""
    layers: list[nn.Module] = []
    n_in = image[0]
    for width, depth in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(depth):
            layers += [nn.Conv2d(n_in, width, 3, padding=1), nn.ReLU(inplace=True)]
            n_in = width
        layers.append(nn.MaxPool2d(2))
    layers += [nn.AdaptiveAvgPool2d(7), nn.Flatten()]
    for n_in, n_out in ((512 * 7 * 7, 4096), (4096, 4096)):
        layers += [nn.Linear(n_in, n_out), nn.ReLU(inplace=True), nn.Dropout()]
    return nn.Sequential(*layers, nn.Linear(4096, num_classes))


class _DenseLayer(nn.Sequential):
    """Appends ``growth`` channels to its input."""

    def __init__(self, n_in: int, growth: int) -> None:
        super().__init__(
            nn.BatchNorm2d(n_in),
            nn.ReLU(inplace=True),
            _conv_bn(n_in, 4 * growth, 1),
            nn.ReLU(inplace=True),
            nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, super().forward(x)], dim=1)


def densenet121(num_classes: int, image: Shape) -> nn.Module:
    """364 small parameter tensors: what merging gradients is for."""
    layers: list[nn.Module] = [
        _conv_bn(image[0], 64, 7, stride=2),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, stride=2, padding=1),
    ]
    n, growth = 64, 32
    for depth in (6, 12, 24, 16):
        if len(layers) > 3:  # between two dense blocks: half the channels, half the size
            layers += [nn.BatchNorm2d(n), nn.ReLU(inplace=True)]
            layers += [nn.Conv2d(n, n // 2, 1, bias=False), nn.AvgPool2d(2)]
            n //= 2
        layers += [_DenseLayer(n + i * growth, growth) for i in range(depth)]
        n += depth * growth
    layers += [nn.BatchNorm2d(n), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(n, num_classes))


def mlp(num_classes: int, image: Shape) -> nn.Module:
    channels, height, width = image
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(channels * height * width, 1024),
        nn.ReLU(inplace=True),
        nn.Linear(1024, 1024),
        nn.ReLU(inplace=True),
        nn.Linear(1024, num_classes),
    )


def digitsnet(num_classes: int, image: Shape) -> nn.Module:
    return DigitsNet(num_classes, in_channels=image[0])


MODELS: dict[str, Callable[[int, Shape], nn.Module]] = {
    f.__name__: f for f in (resnet50, resnet18, vgg16, densenet121, mlp, digitsnet)
}


def build(name: str, num_classes: int = 1000, image: Shape = (3, 224, 224)) -> nn.Module:
    """The model called ``name`` for images of shape ``image``."""
    if name not in MODELS:
        raise ValueError(f"no model is called {name!r}; there are: {', '.join(MODELS)}")
    return MODELS[name](num_classes, image)
