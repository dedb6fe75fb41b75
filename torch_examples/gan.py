"""A generator and a discriminator of handwritten digits: two optimizers in one script.

    horovodrun -np 2 python torch_examples/gan.py
    horovodrun -np 2 python torch_examples/gan.py --strategy merged-gradient --plot samples.png

What a script with several optimizers has to see to: names that no two parameters share, and that
a backward pass for one optimizer leaves no gradients with the other. Lines marked "hvd_pipe:" are
all that hvd_pipe asks for; those marked "Horovod:" are in every Horovod script.
"""

import argparse
import os
import sys
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import hvd_pipe.torch as hvd  # hvd_pipe: was "import horovod.torch as hvd"
from report import picture, progress

NOISE = 32  # numbers that the generator makes an image of
SIDE = 8  # scikit-learn's digits are 8x8, their pixels 0 to 16


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a generator of handwritten digits against a discriminator.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--strategy",
        help="of both optimizers: merged-gradient, pipe-sgd, cocod:period=4, ...; "
        "without it HVD_PIPE_STRATEGY decides, else merged-gradient",
    )
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--evaluate", type=int, default=300, metavar="STEPS", help="how often")
    parser.add_argument("--batch-size", type=int, default=32, help="images a worker and step")
    parser.add_argument("--lr", type=float, default=0.001)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--plot", type=picture, default="gan.png", help='real and made digits; "" for none'
    )
    args = parser.parse_args()
    for name in ("steps", "evaluate", "batch_size"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)}: 1 or more")
    return args


def generator(width: int = 256) -> nn.Module:
    return nn.Sequential(
        nn.Linear(NOISE, width),
        nn.BatchNorm1d(width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.BatchNorm1d(width),
        nn.ReLU(),
        nn.Linear(width, SIDE * SIDE),
        nn.Tanh(),
        nn.Unflatten(1, (1, SIDE, SIDE)),
    )


def discriminator(width: int = 256) -> nn.Module:
    """How real an image looks, as a logit. No BatchNorm: it would mix real and made images."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(SIDE * SIDE, width),
        nn.LeakyReLU(0.2),
        nn.Dropout(0.3),  # or it learns the few real images by heart
        nn.Linear(width, width),
        nn.LeakyReLU(0.2),
        nn.Dropout(0.3),
        nn.Linear(width, 1),
    )


# Data and quality --------------------------------------------------------------------------------


def load() -> tuple[Tensor, Tensor, np.ndarray]:
    """Images (-1 to 1) to train on, and held-out ones with their labels."""
    from sklearn.datasets import load_digits  # noqa: PLC0415 - --help shall not wait for it

    x, y = load_digits(return_X_y=True)
    # RandomState, not default_rng: numpy promises that its stream never changes.
    order = np.random.RandomState(0).permutation(len(x))
    images = torch.tensor(x[order] / 8 - 1, dtype=torch.float32).view(-1, 1, SIDE, SIDE)
    split = len(x) // 2  # many held out: a distance between few images is mostly their noise
    return images[:split], images[split:], y[order][split:]


def frechet(a: np.ndarray, b: np.ndarray) -> float:
    """Distance between two sets of points, each taken for a Gaussian.

    |mean_a - mean_b|^2 + tr(A + B - 2 sqrt(A B)) with covariances A, B. In pixels of width 2; FID
    is the same in the features of a network.
    """
    difference = a.mean(0) - b.mean(0)
    cov_a, cov_b = np.cov(a, rowvar=False), np.cov(b, rowvar=False)
    # tr sqrt(A B) is the sum of the roots of A B's eigenvalues, which are real and not negative.
    roots = np.sqrt(np.linalg.eigvals(cov_a @ cov_b).real.clip(min=0)).sum()
    return float(difference @ difference + np.trace(cov_a) + np.trace(cov_b) - 2 * roots)


class Judge:
    """Compares images with digits that are held out from all training."""

    def __init__(self, train_x: Tensor, held_out: Tensor, labels: np.ndarray) -> None:
        self.held_out, self.labels = held_out.flatten(1), labels
        # As near to a held-out digit as nine of ten other real digits are.
        self.near = torch.cdist(train_x.flatten(1), self.held_out).amin(1).quantile(0.9)

    def __call__(self, images: Tensor) -> tuple[float, float, float]:
        """The share that is near some real digit, how many digits there are, Frechet distance.

        The number of digits is 2 to the entropy (in bits) of how often each is made: 10 when all
        are equally frequent, 1 when the generator makes one only.
        """
        pixels = images.flatten(1)
        distance, neighbour = torch.cdist(pixels, self.held_out).min(1)
        near = distance <= self.near
        often = np.bincount(self.labels[neighbour[near]], minlength=10) / max(1, int(near.sum()))
        digits = 2 ** -sum(p * np.log2(p) for p in often if p > 0) if near.any() else 0.0
        far = frechet(pixels.numpy(), self.held_out.numpy())
        return float(near.float().mean()), float(digits), far


def plot(real: Tensor, made: Tensor, path: Path, title: str) -> None:
    """A grid of 8 x 8 real images beside one of as many made ones."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - as above

    figure = Figure(figsize=(9, 5), layout="constrained")
    figure.suptitle(title)
    for axes, images, name in zip(
        figure.subplots(1, 2), (real, made), ("real", "made"), strict=True
    ):
        # A frame of one pixel around each image keeps neighbours apart.
        framed = nn.functional.pad(images[:64, 0], (1, 1, 1, 1), value=-0.5)
        rows = framed.view(8, 8, SIDE + 2, SIDE + 2).permute(0, 2, 1, 3)
        axes.imshow(rows.reshape(8 * (SIDE + 2), -1), cmap="gray", vmin=-1, vmax=1)
        axes.set_title(name)
        axes.set_axis_off()
    figure.savefig(path, dpi=120)


# Training ----------------------------------------------------------------------------------------


def say(text: str) -> None:
    """Print on rank 0; in one write, which horovodrun's prefixes leave in one piece."""
    if hvd.rank() == 0:
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()


def train_step(
    g: nn.Module,
    d: nn.Module,
    g_optimizer: torch.optim.Optimizer,
    d_optimizer: torch.optim.Optimizer,
    real: Tensor,
) -> tuple[Tensor, Tensor]:
    """One step of each; returns the losses of the discriminator and the generator."""
    loss_of = nn.functional.binary_cross_entropy_with_logits
    ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)

    d_optimizer.zero_grad()
    made = g(torch.randn(len(real), NOISE))
    # detach: this backward pass ends before the generator.
    d_loss = loss_of(d(real), ones) + loss_of(d(made.detach()), zeros)
    d_loss.backward()
    d_optimizer.step()

    g_optimizer.zero_grad()
    # Frozen: the backward pass goes through the discriminator and leaves no gradients there, which
    # its optimizer would send.
    d.requires_grad_(False)
    g_loss = loss_of(d(made), ones)
    g_loss.backward()
    d.requires_grad_(True)
    g_optimizer.step()
    return d_loss.detach(), g_loss.detach()


def main() -> None:
    args = arguments()
    hvd.init()  # Horovod: finds the other ranks
    # Ranks on one machine share its cores.
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // hvd.local_size()))
    train_x, held_out, labels = load()
    mine = train_x[hvd.rank() :: hvd.size()]  # Horovod: each rank its own images
    if len(mine) < args.batch_size:
        raise SystemExit(f"{len(mine)} images a worker: --batch-size {len(mine)} or less")

    torch.manual_seed(args.seed + hvd.rank())  # each its own noise; weights are sent below
    g, d = generator(), discriminator()
    for model in (g, d):
        # Horovod: every rank starts from rank 0's weights. (The optimizers have no state yet.)
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)

    def optimizer_of(name: str, model: nn.Module) -> torch.optim.Optimizer:
        return hvd.DistributedOptimizer(
            torch.optim.Adam(model.parameters(), lr=args.lr, betas=(0.5, 0.999)),
            # Horovod: both networks have a parameter "0.weight"; names must tell them apart.
            named_parameters=[(f"{name}.{n}", p) for n, p in model.named_parameters()],
            strategy=args.strategy,  # hvd_pipe: the only new argument
        )

    g_optimizer = optimizer_of("generator", g)
    d_optimizer = optimizer_of("discriminator", d)

    # Generator and discriminator circle around each other; the mean of the generator's last some
    # hundred weights is near the middle and makes better images.
    smooth = AveragedModel(g, multi_avg_fn=get_ema_multi_avg_fn(0.995), use_buffers=True)

    judge = Judge(train_x, held_out, labels) if hvd.rank() == 0 else None
    noise = torch.randn(1000, NOISE, generator=torch.Generator().manual_seed(0))
    columns = f"{'real':>6}  {'digits':>6}  {'Frechet':>7}"
    say(f"{'step':>11}  {'loss D':>7}  {'loss G':>7}  {columns}  {'images/s':>8}  progress")

    def verdict(images: Tensor) -> str:
        if judge is None:
            return ""
        near, digits, distance = judge(images)
        return f"{near:>6.1%}  {digits:>6.1f}  {distance:>7.2f}"

    start, losses, seconds = time.monotonic(), [], 0.0
    for step in range(1, args.steps + 1):
        begin = time.perf_counter()
        real = mine[torch.randint(len(mine), (args.batch_size,))]
        losses.append(torch.stack(train_step(g, d, g_optimizer, d_optimizer, real)))
        smooth.update_parameters(g)
        if step % args.evaluate == 0 or step == args.steps:
            for optimizer in (g_optimizer, d_optimizer):
                # hvd_pipe: before the model is evaluated or saved, take in what is in flight.
                optimizer.synchronize()
            seconds += time.perf_counter() - begin
            d_loss, g_loss = hvd.allreduce(torch.stack(losses).mean(0), name="losses").tolist()
            smooth.eval()
            with torch.no_grad():
                made = smooth(noise)
            speed = len(losses) * args.batch_size * hvd.size() / seconds
            elapsed = time.monotonic() - start
            say(
                f"{step:>5}/{args.steps:<5}  {d_loss:>7.3f}  {g_loss:>7.3f}  {verdict(made)}"
                f"  {speed:>8,.0f}  {progress(step, args.steps, elapsed)}"
            )
            losses, seconds = [], 0.0
        else:
            seconds += time.perf_counter() - begin

    say(
        "\nreal: of 1000 images, those as near to some digit held out from all training as 90 % of"
    )
    say("real digits are; digits: how many kinds are among them, 10 at best; Frechet: distance to")
    say("all held-out digits, 0 at best. For comparison:")
    # Each pixel as often dark as in real images, but independent of all others.
    shuffle = torch.rand(1000, *train_x.shape[1:], generator=torch.Generator().manual_seed(0))
    scrambled = train_x.gather(0, (shuffle * len(train_x)).long())
    for name, images in (
        ("digits trained on", train_x),
        ("made here", made),
        ("pixels shuffled", scrambled),
        ("noise", shuffle * 2 - 1),
    ):
        say(f"{name:<17}  {verdict(images)}")
    if hvd.rank() == 0 and args.plot:
        workers = f"{hvd.size()} worker{'s' if hvd.size() > 1 else ''}"
        plot(held_out, made, args.plot, f"{args.steps} steps, {workers}")
        say(f"real beside made: {args.plot.resolve()}")
    hvd.shutdown()


if __name__ == "__main__":
    main()
