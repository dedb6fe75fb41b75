"""Killed, and continued as if nothing had happened: checkpoints that resume bit for bit.

    horovodrun -np 2 python torch_examples/resume.py --die-at 70   # is killed at step 70
    horovodrun -np 2 python torch_examples/resume.py --die-at 70   # continues from step 60

The second command continues from the newest checkpoint, as every run does that finds one. Its last
line is the SHA-256 of the weights, which is that of an undisturbed run (--checkpoints elsewhere).

Four things make that work, numbered in the code:

1. A checkpoint is whole or not there: it is written beside its place, then renamed.
2. It holds all that the next step depends on. optimizer.state_dict() includes what the strategy
   has in flight: pipe-sgd's gradient of the step before, cocod's round.
3. The data of a step is a function of the seed and the step, so no reader's position is saved.
4. Where replicas are equal, rank 0 alone saves and loads, and the others hear it from rank 0.
   Under cocod each replica is a little different until synchronize(), so each rank has its file.

Lines marked "hvd_pipe:" are all that hvd_pipe asks for; those marked "Horovod:" are in every
Horovod script.
"""

import argparse
import hashlib
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import hvd_pipe.torch as hvd  # hvd_pipe: was "import horovod.torch as hvd"
from data import Data, load
from models import DigitsNet
from report import progress, require_positive, say


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train on handwritten digits with checkpoints; continue from the newest one.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--strategy",
        default=os.environ.get("HVD_PIPE_STRATEGY") or "merged-gradient",
        help="merged-gradient, pipe-sgd, cocod:period=4, ...",
    )
    parser.add_argument(
        "--checkpoints",
        type=Path,
        default=Path("checkpoints"),
        metavar="DIR",
        help="a folder that all ranks see; delete it to start anew",
    )
    parser.add_argument("--every", type=int, default=20, metavar="STEPS", help="save this often")
    parser.add_argument(
        "--die-at",
        type=int,
        metavar="STEP",
        help="be killed in the middle of this step, unless the run continues a checkpoint",
    )
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--batch-size", type=int, default=32, help="images a worker and step")
    parser.add_argument("--lr", type=float, default=0.005, help="at the start")
    parser.add_argument("--momentum", type=float, default=0.8)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    require_positive(parser, args, "every", "steps", "batch_size")
    if args.die_at is not None and not args.every < args.die_at <= args.steps:
        parser.error(
            f"--die-at {args.die_at}: after the first checkpoint (--every {args.every}) and not "
            f"after the last step (--steps {args.steps})"
        )
    return args


# Checkpoints -----------------------------------------------------------------------------------


def save(path: Path, checkpoint: dict[str, Any]) -> None:
    """(1) Write a file that is whole or not there, even if power fails."""
    temporary = path.with_suffix(".part")
    with temporary.open("wb") as file:
        torch.save(checkpoint, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)  # noqa: PTH105 - the name says that it replaces, in one step


class Checkpoints:
    """A folder of files step-000060.pt, or step-000060.rank1.pt where each rank has its own."""

    def __init__(self, folder: Path, each_rank: bool) -> None:
        self.folder, self.each_rank = folder, each_rank
        self._end = f".rank{hvd.rank()}.pt" if each_rank else ".pt"
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def writes(self) -> bool:
        """Whether this rank has a file to write and read."""
        return self.each_rank or hvd.rank() == 0

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:06d}{self._end}"

    def steps(self) -> list[int]:
        """Return the steps of which this rank has a file, oldest first."""
        found = (path.name.removesuffix(self._end) for path in self.folder.glob("step-*.pt"))
        numbers = (name.removeprefix("step-") for name in found)
        return sorted(int(number) for number in numbers if number.isdigit())

    def newest(self) -> int | None:
        """Return the newest step that every rank has saved; None where there is none.

        A rank may have been killed before it wrote its last file, so all ranks are asked.
        """
        everyone = hvd.allgather_object(self.steps() if self.writes else None, name="steps")
        saved = [set(steps) for steps in everyone if steps is not None]
        return max(set.intersection(*saved), default=None)

    def save(self, step: int, checkpoint: dict[str, Any]) -> None:
        save(self.path(step), checkpoint)
        # One before the newest stays: another rank may be killed before it has the newest.
        for old in self.steps()[:-2]:
            self.path(old).unlink()

    def load(self, step: int, expected: dict[str, Any]) -> dict[str, Any]:
        checkpoint = torch.load(self.path(step), weights_only=True)
        if checkpoint["run"] != expected:
            raise SystemExit(
                f"{self.path(step)} is of another run: {checkpoint['run']}, this one is "
                f"{expected}. Continue with the same arguments, or use another --checkpoints"
            )
        return checkpoint


# Training --------------------------------------------------------------------------------------


def batch(n: int, size: int, step: int, seed: int, rank: int, workers: int) -> Tensor:
    """(3) The images of a step, as indices: a function of its arguments and of nothing else.

    All ranks draw the same permutation each epoch, and each takes its own part of it.
    """
    steps = n // (size * workers)
    if steps == 0:
        raise SystemExit(
            f"{n} images do not fill one step of {workers} workers x {size} images: "
            f"--batch-size {max(1, n // workers)} or less"
        )
    epoch, step = divmod(step, steps)
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed * 1000 + epoch))
    first = (step * workers + rank) * size
    return order[first : first + size]


def fingerprint(model: nn.Module) -> str:
    """SHA-256 of all parameters: equal only if every bit is."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


class Training:
    """A model, its optimizer and scheduler, and the step they have reached."""

    def __init__(self, data: Data, args: argparse.Namespace) -> None:
        self.data, self.args, self.step = data, args, 0
        torch.manual_seed(args.seed)
        self.model = DigitsNet(data.num_classes, data.image[0])
        optimizer = torch.optim.SGD(self.model.parameters(), lr=args.lr, momentum=args.momentum)
        self.optimizer = hvd.DistributedOptimizer(
            optimizer,
            named_parameters=self.model.named_parameters(),
            strategy=args.strategy,  # hvd_pipe: the only new argument
        )
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, args.steps)
        # Horovod: every rank starts from rank 0's weights. (The optimizer has no state yet.)
        hvd.broadcast_parameters(self.model.state_dict(), root_rank=0)

    def state(self) -> dict[str, Any]:
        """(2) All that the next step depends on. (Dropout would add torch.get_rng_state().)"""
        return {
            "step": self.step,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),  # hvd_pipe: with what is in flight
            "scheduler": self.scheduler.state_dict(),
        }

    def resume(self, checkpoint: dict[str, Any] | None, each_rank: bool) -> None:
        """Go on from a checkpoint; (4) a rank without one hears it from rank 0."""
        numbers = None
        if checkpoint is not None:
            self.model.load_state_dict(checkpoint["model"])
            self.optimizer.load_state_dict(checkpoint["optimizer"])
            numbers = checkpoint["step"], checkpoint["scheduler"]
        if not each_rank:
            hvd.broadcast_parameters(self.model.state_dict(), root_rank=0)
            hvd.broadcast_optimizer_state(self.optimizer, root_rank=0)
            numbers = hvd.broadcast_object(numbers, root_rank=0, name="numbers")
        self.step, scheduler = numbers
        self.scheduler.load_state_dict(scheduler)

    def backward(self) -> Tensor:
        """Half a step: the gradients, which are on their way to the other ranks by then."""
        args, data = self.args, self.data
        n = len(data.train_x)
        index = batch(n, args.batch_size, self.step, args.seed, hvd.rank(), hvd.size())
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.model(data.train_x[index]), data.train_y[index])
        loss.backward()
        return loss.detach()

    def update(self) -> None:
        """The other half."""
        self.optimizer.step()
        self.scheduler.step()
        self.step += 1

    def finish(self) -> str:
        """Return the fingerprint of the weights, which must be the same on all ranks."""
        # hvd_pipe: at the end take in what is still in flight. Not before a checkpoint: that would
        # work as well, but it makes saving a part of the training.
        self.optimizer.synchronize()
        prints = hvd.allgather_object(fingerprint(self.model), name="fingerprints")
        if len(set(prints)) > 1:
            raise SystemExit(f"the replicas differ: {', '.join(prints)}")
        return prints[0]

    @torch.no_grad()
    def accuracy(self) -> float:
        self.model.eval()
        right = self.model(self.data.test_x).argmax(1) == self.data.test_y
        return right.float().mean().item()


def die(step: int) -> None:
    """End as if the machine had lost its power: no goodbyes, nothing flushed, nothing closed."""
    say(f"step {step}: killed")
    os.kill(os.getpid(), signal.SIGKILL)


def train(training: Training, checkpoints: Checkpoints, run: dict[str, Any]) -> None:
    """Train to the end with checkpoints, from the newest one if there is any."""
    args = training.args
    newest = checkpoints.newest()
    if newest is not None:
        checkpoint = checkpoints.load(newest, run) if checkpoints.writes else None
        training.resume(checkpoint, checkpoints.each_rank)
        say(f"continuing after step {newest}, from {checkpoints.path(newest)}")
    start, first, losses = time.monotonic(), training.step, []
    while training.step < args.steps:
        losses.append(training.backward())
        if training.step + 1 == args.die_at and newest is None:
            die(args.die_at)
        training.update()
        step = training.step
        if step % args.every == 0 or step == args.steps:
            if checkpoints.writes:
                checkpoints.save(step, {"run": run, **training.state()})
            mean = hvd.allreduce(torch.stack(losses).mean(), name="loss").item()
            bar = progress(step - first, args.steps - first, time.monotonic() - start)
            say(f"step {step:>4}/{args.steps}  loss {mean:.4f}  saved  {bar}")
            losses.clear()


def main() -> None:
    args = arguments()
    hvd.init()  # Horovod: finds the other ranks
    # Ranks on one machine share its cores. Another number of threads adds up in another order.
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // hvd.local_size()))
    data = load()
    batch(len(data.train_x), args.batch_size, 0, args.seed, hvd.rank(), hvd.size())

    # What must be the same for the rest of the run to be the rest of this run.
    same = ("strategy", "steps", "batch_size", "lr", "momentum", "seed")
    run = {name: getattr(args, name) for name in same} | {"workers": hvd.size()}
    training = Training(data, args)
    train(training, Checkpoints(args.checkpoints, args.strategy.startswith("cocod")), run)
    say(f"weights  {training.finish()}  accuracy {training.accuracy():.2%}")
    hvd.shutdown()


if __name__ == "__main__":
    main()
