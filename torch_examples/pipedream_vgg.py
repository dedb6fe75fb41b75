"""A VGG-like net in a pipeline: each worker holds some of the layers, not all of them.

    horovodrun -np 4 python torch_examples/pipedream_vgg.py
    horovodrun -np 4 python torch_examples/pipedream_vgg.py --plan straight --mode 2bw
    horovodrun -np 2 python torch_examples/pipedream_vgg.py --checkpoint run1 --resume
    python torch_examples/pipedream_vgg.py

Its two large linear layers have far larger gradients than outputs, so data parallelism would send
far more than a pipeline does. Lines marked "hvd_pipe:" are what makes it a pipeline; the rest is
what a script for one worker has, and alone (the last line) it is that.
"""

import argparse
import math
import os
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hvd_pipe.torch as hvd
from data import Data, load
from hvd_pipe.torch import pipedream  # hvd_pipe: the pipeline
from report import progress, require_positive, say

MODES = ("stash", "vertical-sync", "2bw", "flush", "gpipe")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a VGG-like net on images, its layers shared out over the workers.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--plan",
        default="auto",
        help="auto, straight (a stage a worker), workers by stage as 3-1, or a plan's file",
    )
    parser.add_argument("--mode", default="stash", choices=MODES, help="when weights are updated")
    parser.add_argument(
        "--microbatches", type=int, help="of a minibatch, in the last three modes (default: least)"
    )
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=32, help="images a minibatch")
    # A pipeline's gradients are some updates old. It bears that where one step moves the weights
    # little: with a small lr that warms up, and a momentum of 0.8 rather than 0.9.
    parser.add_argument("--lr", type=float, default=0.02, help="the highest, after the warm-up")
    parser.add_argument("--momentum", type=float, default=0.8)
    parser.add_argument("--warmup-epochs", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--checkpoint", type=Path, metavar="DIR", help="write one here after each epoch"
    )
    parser.add_argument("--resume", action="store_true", help="go on from --checkpoint's, if any")
    parser.add_argument(
        "--recompute", action="store_true", help="less memory: run forward again in backward"
    )
    parser.add_argument(
        "--wire", choices=("bf16",), help="how activations travel (default: as they are)"
    )
    args = parser.parse_args()
    require_positive(parser, args, "epochs", "batch_size")
    if args.resume and args.checkpoint is None:
        parser.error("--resume goes on from a checkpoint: say which by --checkpoint DIR")
    return args


def vgg(num_classes: int, image: tuple[int, int, int]) -> nn.Sequential:
    """Four convolutions, then three linear layers with 96 % of the weights; for 8x8 or more."""
    layers: list[nn.Module] = []
    n_in = image[0]
    for width, pool in ((16, nn.MaxPool2d(2)), (32, nn.AdaptiveMaxPool2d(4))):
        for _ in range(2):
            layers += [nn.Conv2d(n_in, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)]
            layers.append(nn.ReLU(inplace=True))
            n_in = width
        layers.append(pool)
    layers.append(nn.Flatten())
    for n_in, n_out in ((32 * 4 * 4, 512), (512, 256)):
        layers += [nn.Linear(n_in, n_out), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers, nn.Linear(256, num_classes))


def loaders(data: Data, batch_size: int, generator: torch.Generator) -> tuple[DataLoader, list]:
    """Minibatches to train on and to test on; hvd_pipe: the same on every rank, no sampler."""
    if len(data.train_x) < batch_size:
        raise SystemExit(
            f"{len(data.train_x)} images do not fill a minibatch: --batch-size "
            f"{len(data.train_x)} or less"
        )
    train = DataLoader(
        TensorDataset(data.train_x, data.train_y),
        batch_size,
        shuffle=True,
        drop_last=True,
        generator=generator,
    )
    # As equal as can be, so that each can be cut into as many microbatches as the largest.
    count = -(-len(data.test_x) // batch_size)
    test = zip(data.test_x.tensor_split(count), data.test_y.tensor_split(count), strict=True)
    return train, list(test)


def learning_rate(step: int, warmup: int, steps: int) -> float:
    """The share of the highest learning rate: up in a line, then down along half a cosine."""
    if step < warmup:
        return (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return (1 + math.cos(math.pi * min(done, 1.0))) / 2


def accuracy(output: Tensor, targets: Tensor) -> Tensor:
    return (output.argmax(1) == targets).float().mean()


def line(epoch: int, epochs: int, stats: pipedream.EpochStats, test: float, bar: str) -> str:
    used = " ".join(f"{100 * share:>3.0f}" for share in stats.utilisation)
    return (
        f"{epoch:>4}/{epochs:<4}  {stats.loss:>7.4f}  {stats.metric:>8.2%}  {test:>7.2%}"
        f"  {stats.samples / stats.seconds:>9,.0f}  {bar:<32}  {used}"
    )


def main() -> None:
    args = arguments()
    pipedream.init()  # hvd_pipe: as hvd.init(), and lets the workers talk two by two
    # Ranks on one machine share its cores.
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // hvd.local_size()))

    data = load()
    generator = torch.Generator()
    train, test = loaders(data, args.batch_size, generator)
    warmup, steps = round(args.warmup_epochs * len(train)), args.epochs * len(train)
    torch.manual_seed(args.seed)
    engine = pipedream.PipeDream(  # hvd_pipe: takes the place of the loop over minibatches
        vgg(data.num_classes, data.image),
        nn.functional.cross_entropy,
        lambda parameters: torch.optim.SGD(parameters, lr=args.lr, momentum=args.momentum),
        plan=args.plan,
        mode=args.mode,
        microbatches=args.microbatches,
        sample=next(iter(train)),
        recompute=args.recompute,
        wire_dtype="bfloat16" if args.wire else None,
        scheduler_fn=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: learning_rate(step, warmup, steps)
        ),
        schedule_by="minibatch",
        metric_fn=accuracy,
    )
    if args.resume and (args.checkpoint / "pipeline.json").exists():
        engine.load(args.checkpoint)  # hvd_pipe: also where workers or stages have changed
        say(f"goes on after epoch {engine.epoch}, from {args.checkpoint}")

    workers = f"{hvd.size()} worker{'s' if hvd.size() > 1 else ''}"
    say(f"{len(data.train_x):,} images, {workers}, mode {args.mode}, batch size {args.batch_size}")
    say(
        f"{'epoch':>9}  {'loss':>7}  {'accuracy':>8}  {'test':>7}  {'samples/s':>9}  "
        f"{'progress':<32}  utilisation by worker, %"
    )
    found, first, start = None, engine.epoch, time.monotonic()
    while engine.epoch < args.epochs:
        generator.manual_seed(1000 * args.seed + engine.epoch)  # hvd_pipe: alike on every rank
        stats = engine.train_epoch(train)  # hvd_pipe: all forward, backward and update passes
        found = engine.evaluate(test)
        elapsed = time.monotonic() - start
        bar = progress(engine.epoch - first, args.epochs - first, elapsed)
        say(line(engine.epoch, args.epochs, stats, found.metric, bar))
        if args.checkpoint is not None:
            engine.save(args.checkpoint)  # hvd_pipe: model.pt is a plain state_dict()
    found = found or engine.evaluate(test)
    say(f"test accuracy {found.metric:.2%}, loss {found.loss:.4f}")
    hvd.shutdown()


if __name__ == "__main__":
    main()
