"""A small transformer that learns to write, one character after the other.

    horovodrun -np 2 python torch_examples/language_model.py
    horovodrun -np 2 python torch_examples/language_model.py --strategy cocod:period=4
    horovodrun -np 2 python torch_examples/language_model.py --strategy pipe-sgd --lr 0.001
    horovodrun -np 2 python torch_examples/language_model.py --text my_book.txt --steps 2000

It shows what larger language models need: AdamW, a learning rate that warms up and decays, clipped
gradients, compressed messages. Lines marked "hvd_pipe:" are all that hvd_pipe asks for; those
marked "Horovod:" are in every Horovod script.
"""

import argparse
import math
import os
import time
from pathlib import Path

import torch
from torch import Tensor, nn

import hvd_pipe.torch as hvd  # hvd_pipe: was "import horovod.torch as hvd"
from report import progress, require_positive, say

# 55 of Shakespeare's sonnets (1609), which belong to everybody.
SONNETS = Path(__file__).with_name("text.txt")
HELD_OUT = 0.1  # the last part of the text, which no rank trains on


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a small transformer on the characters of a text.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--text", type=Path, default=SONNETS, metavar="FILE", help="UTF-8")
    parser.add_argument(
        "--strategy",
        help="merged-gradient, pipe-sgd, cocod:period=4, ...; "
        "without it HVD_PIPE_STRATEGY decides, else merged-gradient",
    )
    parser.add_argument(
        "--compression",
        default="none",
        choices=("none", "fp16", "bf16", "int8"),
        help="how gradients travel",
    )
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--evaluate", type=int, default=50, metavar="STEPS", help="how often")
    parser.add_argument("--batch-size", type=int, default=16, help="sequences a worker and step")
    parser.add_argument("--context", type=int, default=64, help="characters a sequence")
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--lr", type=float, default=0.003, help="the highest, after the warm-up")
    parser.add_argument("--warmup-steps", type=int, default=50)
    parser.add_argument("--clip", type=float, default=1.0, help="largest norm of all gradients")
    parser.add_argument("--sample", type=int, default=300, help="characters to write at the end")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    positive = ("steps", "evaluate", "batch_size", "context", "width", "layers", "heads")
    require_positive(parser, args, *positive)
    if args.width % args.heads:
        parser.error(f"--width {args.width} is no multiple of --heads {args.heads}")
    if not hasattr(hvd.Compression, args.compression):
        parser.error(f"--compression {args.compression}: this hvd_pipe does not have it")
    return args


# The text --------------------------------------------------------------------------------------


class Text:
    """A text as numbers, one a character: the first part to train on, the rest held out."""

    def __init__(self, text: str) -> None:
        self.characters = sorted(set(text))
        self._number = {character: i for i, character in enumerate(self.characters)}
        ids = self.encode(text)
        split = len(ids) - int(len(ids) * HELD_OUT)
        self.train, self.held_out = ids[:split], ids[split:]

    def encode(self, text: str) -> Tensor:
        return torch.tensor([self._number[character] for character in text])

    def decode(self, ids: Tensor) -> str:
        return "".join(self.characters[i] for i in ids.tolist())


def share(ids: Tensor, rank: int, size: int, context: int) -> Tensor:
    """This rank's own, equally long part of the text."""
    length = len(ids) // size
    if length <= context:
        raise SystemExit(
            f"{len(ids)} characters for {size} workers are {length} each, --context {context} "
            "needs one more than that: a longer --text or a shorter --context"
        )
    return ids[rank * length : (rank + 1) * length]


def batch(ids: Tensor, size: int, context: int, generator: torch.Generator) -> Tensor:
    """Random pieces of ``context + 1`` characters: inputs, and one further on the targets."""
    starts = torch.randint(len(ids) - context, (size, 1), generator=generator)
    return ids[starts + torch.arange(context + 1)]


# The model -------------------------------------------------------------------------------------


class Block(nn.Module):
    """Characters look at those before them, then each thinks for itself."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, nn.Dropout(dropout)
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm_attention(x)).view(batch, length, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each: batch, head, place, feature
        seen = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(seen.transpose(1, 2).reshape(batch, length, width)))
        return x + self.dropout(self.mlp(self.norm_mlp(x)))


class Transformer(nn.Module):
    """Logits of the next character after each of at most ``context``."""

    def __init__(
        self, characters: int, context: int, width: int, layers: int, heads: int, dropout: float
    ) -> None:
        super().__init__()
        self.context = context
        self.characters = nn.Embedding(characters, width)
        self.places = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, characters)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1], device=ids.device)
        x = self.blocks(self.characters(ids) + self.places(places))
        return self.head(self.norm(x))


def loss_of(model: nn.Module, ids: Tensor, reduction: str = "mean") -> Tensor:
    logits = model(ids[:, :-1])
    return nn.functional.cross_entropy(
        logits.flatten(0, 1), ids[:, 1:].flatten(), reduction=reduction
    )


@torch.no_grad()
def write(model: Transformer, start: Tensor, length: int, seed: int) -> Tensor:
    """``start`` and ``length`` more characters, each drawn from what the model expects."""
    model.eval()
    generator = torch.Generator().manual_seed(seed)
    ids = start
    for _ in range(length):
        logits = model(ids[None, -model.context :])[0, -1]
        # Below 1: somewhat more of the likely characters, as a small model's unlikely ones err.
        probabilities = (logits / 0.8).softmax(0)
        ids = torch.cat([ids, torch.multinomial(probabilities, 1, generator=generator)])
    return ids


# Training --------------------------------------------------------------------------------------


def learning_rate(step: int, warmup: int, steps: int) -> float:
    """The share of the highest learning rate: up in a line, then down along half a cosine."""
    if step < warmup:
        return (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return 0.1 + 0.9 * (1 + math.cos(math.pi * min(done, 1.0))) / 2


@torch.no_grad()
def bits_per_character(model: nn.Module, ids: Tensor, context: int) -> float:
    """How badly the model guesses the held-out text, a share of its pieces on each rank.

    8 is a plain file; log2 of the number of characters is guessing; about 2 is what good
    compression reaches on English, 1 what people do.
    """
    model.eval()
    pieces = ids.unfold(0, context + 1, context)[hvd.rank() :: hvd.size()]
    nats = sum(float(loss_of(model, some, "sum")) for some in pieces.split(64))
    mine = torch.tensor([nats, len(pieces) * context], dtype=torch.float64)
    # Horovod: shares can differ by a piece, so add, then divide.
    nats, characters = hvd.allreduce(mine, op=hvd.Sum, name="evaluation").tolist()
    model.train()
    return nats / characters / math.log(2)


def main() -> None:
    args = arguments()
    try:
        text = Text(args.text.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise SystemExit(f"--text {args.text}: {error}") from None
    hvd.init()  # Horovod: finds the other ranks
    # Ranks on one machine share its cores.
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // hvd.local_size()))
    mine = share(text.train, hvd.rank(), hvd.size(), args.context)  # Horovod: each its own part
    if len(text.held_out) <= args.context * hvd.size():
        raise SystemExit(
            f"{len(text.held_out)} characters are held out, too few for {hvd.size()} workers "
            f"x --context {args.context}: a longer --text or a shorter --context"
        )

    torch.manual_seed(args.seed + hvd.rank())  # dropout differs by rank; weights are sent below
    model = Transformer(
        len(text.characters), args.context, args.width, args.layers, args.heads, args.dropout
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.1)
    # Horovod: every rank starts from rank 0's weights. (The optimizer has no state yet.)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=getattr(hvd.Compression, args.compression),
        strategy=args.strategy,  # hvd_pipe: the only new argument
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: learning_rate(step, args.warmup_steps, args.steps)
    )

    size = sum(p.numel() for p in model.parameters())
    guess = math.log2(len(text.characters))
    say(
        f"{len(text.train):,} characters to train on, {len(text.held_out):,} held out, "
        f"{len(text.characters)} different; {size:,} parameters; "
        f"guessing costs {guess:.2f} bits a character"
    )
    say(f"{'step':>11}  {'loss':>6}  {'held-out bits':>13}  {'tokens/s':>8}  {'lr':>7}  progress")

    generator = torch.Generator().manual_seed(args.seed * 1000 + hvd.rank())
    start, losses, seconds = time.monotonic(), [], 0.0
    for step in range(1, args.steps + 1):
        begin = time.perf_counter()
        optimizer.zero_grad()
        loss = loss_of(model, batch(mine, args.batch_size, args.context, generator))
        loss.backward()
        # Horovod's pattern for clipping: finish the exchange, clip what it brought, then step.
        optimizer.synchronize()
        nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        with optimizer.skip_synchronize():
            optimizer.step()
        scheduler.step()
        losses.append(loss.detach())
        if step % args.evaluate == 0 or step == args.steps:
            # hvd_pipe: before the model is evaluated or saved, take in what is still in flight:
            # pipe-sgd's last gradient; cocod's replicas become one model.
            optimizer.synchronize()
            seconds += time.perf_counter() - begin
            bits = bits_per_character(model, text.held_out, args.context)
            mean = hvd.allreduce(torch.stack(losses).mean(), name="loss").item()
            speed = len(losses) * args.batch_size * args.context * hvd.size() / seconds
            elapsed = time.monotonic() - start
            say(
                f"{step:>5}/{args.steps:<5}  {mean:>6.3f}  {bits:>13.3f}  {speed:>8,.0f}"
                f"  {scheduler.get_last_lr()[0]:>7.5f}  {progress(step, args.steps, elapsed)}"
            )
            losses, seconds = [], 0.0
        else:
            seconds += time.perf_counter() - begin

    if hvd.rank() == 0 and args.sample:
        opening = text.held_out[: min(args.context, 40)]
        written = text.decode(write(model, opening, args.sample, args.seed))
        say(f"\nA sample, begun by the {len(opening)} held-out characters up to |:\n")
        say(f"{written[: len(opening)]}|{written[len(opening) :]}")
    hvd.shutdown()


if __name__ == "__main__":
    main()
