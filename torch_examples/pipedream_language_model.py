"""A transformer that learns to write, in a pipeline: each worker holds some of its blocks.

    horovodrun -np 4 python torch_examples/pipedream_language_model.py
    horovodrun -np 4 python torch_examples/pipedream_language_model.py --plan straight --mode flush
    horovodrun -np 2 python torch_examples/pipedream_language_model.py --text book.txt
    python torch_examples/pipedream_language_model.py

The model, the text and the learning rates are those of language_model.py, where each worker holds
all layers. Sequences are drawn anew in each epoch; no state is carried from one to the next. Lines
marked "hvd_pipe:" are what makes it a pipeline.
"""

import argparse
import math
import os
import time
from pathlib import Path

import torch
from torch import Tensor, nn

import hvd_pipe.torch as hvd
from hvd_pipe.torch import pipedream  # hvd_pipe: the pipeline
from language_model import SONNETS, Text, Transformer, batch, learning_rate
from report import progress, require_positive, say

MODES = ("stash", "vertical-sync", "2bw", "flush", "gpipe")
Minibatch = tuple[Tensor, Tensor]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a small transformer, its blocks shared out over the workers.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--text", type=Path, default=SONNETS, metavar="FILE", help="UTF-8")
    parser.add_argument(
        "--plan",
        default="auto",
        help="auto, straight (a stage a worker), workers by stage as 3-1, or a plan's file",
    )
    parser.add_argument("--mode", default="2bw", choices=MODES, help="when weights are updated")
    parser.add_argument(
        "--microbatches", type=int, help="of a minibatch, in the last three modes (default: least)"
    )
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--steps", type=int, default=50, help="minibatches an epoch")
    parser.add_argument("--batch-size", type=int, default=32, help="sequences a minibatch")
    parser.add_argument("--context", type=int, default=64, help="characters a sequence")
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--dropout", type=float, default=0.1)
    # Lower than language_model.py's, as a pipeline's gradients are some updates old.
    parser.add_argument("--lr", type=float, default=0.002, help="the highest, after the warm-up")
    parser.add_argument("--warmup-steps", type=int, default=50)
    parser.add_argument("--clip", type=float, default=1.0, help="largest norm of all gradients")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    positive = ("epochs", "steps", "batch_size", "context", "width", "layers", "heads")
    require_positive(parser, args, *positive)
    if args.width % args.heads:
        parser.error(f"--width {args.width} is no multiple of --heads {args.heads}")
    return args


def pair(ids: Tensor) -> Minibatch:
    """Inputs, and one character further on the targets."""
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def drawn(ids: Tensor, args: argparse.Namespace, epoch: int) -> list[Minibatch]:
    """An epoch of random sequences; hvd_pipe: the same on every rank."""
    generator = torch.Generator().manual_seed(args.seed * 1000 + epoch)
    size, context = args.batch_size, args.context
    return [pair(batch(ids, size, context, generator)) for _ in range(args.steps)]


def held_out(ids: Tensor, args: argparse.Namespace) -> list[Minibatch]:
    """The whole held-out text, in minibatches as equal as can be, none of them larger."""
    pieces = ids.unfold(0, args.context + 1, args.context)
    return [pair(some) for some in pieces.tensor_split(-(-len(pieces) // args.batch_size))]


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def main() -> None:
    args = arguments()
    try:
        text = Text(args.text.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise SystemExit(f"--text {args.text}: {error}") from None
    if len(text.held_out) <= args.context:
        raise SystemExit(
            f"{len(text.held_out)} characters are held out, too few for --context "
            f"{args.context}: a longer --text or a shorter --context"
        )
    pipedream.init()  # hvd_pipe: as hvd.init(), and lets the workers talk two by two
    # Ranks on one machine share its cores.
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // hvd.local_size()))

    torch.manual_seed(args.seed + hvd.rank())  # dropout differs by rank; weights are rank 0's
    model = Transformer(
        len(text.characters), args.context, args.width, args.layers, args.heads, args.dropout
    )
    size, steps = sum(p.numel() for p in model.parameters()), args.epochs * args.steps
    engine = pipedream.PipeDream(  # hvd_pipe: takes the place of the loop over minibatches
        model,
        mean_loss,
        lambda parameters: torch.optim.AdamW(parameters, lr=args.lr, weight_decay=0.1),
        plan=args.plan,
        mode=args.mode,
        microbatches=args.microbatches,
        sample=drawn(text.train, args, 0)[0],
        max_grad_norm=args.clip,  # hvd_pipe: over all layers, wherever they are
        scheduler_fn=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: learning_rate(step, args.warmup_steps, steps)
        ),
        schedule_by="minibatch",
    )
    say(
        f"{len(text.train):,} characters to train on, {len(text.held_out):,} held out, "
        f"{len(text.characters)} different; {size:,} parameters; workers: {hvd.size()}, "
        f"mode {args.mode}; guessing has perplexity {len(text.characters)}"
    )
    say(
        f"{'epoch':>9}  {'loss':>6}  {'perplexity':>10}  {'tokens/s':>8}  {'progress':<32}"
        "  utilisation by worker, %"
    )
    test, start = held_out(text.held_out, args), time.monotonic()
    for epoch in range(args.epochs):
        # hvd_pipe: all forward, backward and update passes
        stats = engine.train_epoch(drawn(text.train, args, epoch))
        found = engine.evaluate(test)
        used = " ".join(f"{100 * share:>3.0f}" for share in stats.utilisation)
        bar = progress(epoch + 1, args.epochs, time.monotonic() - start)
        speed = stats.samples * args.context / stats.seconds
        say(
            f"{epoch + 1:>4}/{args.epochs:<4}  {stats.loss:>6.3f}  {math.exp(found.loss):>10.3f}"
            f"  {speed:>8,.0f}  {bar:<32}  {used}"
        )
    bits = found.loss / math.log(2)
    say(f"held-out perplexity {math.exp(found.loss):.3f}, {bits:.3f} bits a character")
    hvd.shutdown()


if __name__ == "__main__":
    main()
