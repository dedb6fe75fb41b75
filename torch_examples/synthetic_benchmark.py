"""Training speed on random images: how long a step takes, and nothing else.

    horovodrun -np 4 python torch_examples/synthetic_benchmark.py
    horovodrun -np 4 python torch_examples/synthetic_benchmark.py --strategy pipe-sgd
    horovodrun -np 4 python torch_examples/synthetic_benchmark.py --strategy horovod

A run that a laptop's CPU finishes in seconds:

    horovodrun -np 2 python torch_examples/synthetic_benchmark.py --model resnet18 \
        --image-size 64 --batch-size 8 --num-warmup-batches 20 --num-iters 5

Lines marked "hvd_pipe:" are all that hvd_pipe asks for.
"""

import argparse
import os
import sys
import time

import horovod.torch as stock  # only for --strategy horovod
import torch
from torch import Tensor, nn

import hvd_pipe.torch as hvd  # hvd_pipe: was "import horovod.torch as hvd"
import models


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Images per second of a training step on random data.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--model", default="resnet50", help=f"{', '.join(models.MODELS)}, or one of torchvision's"
    )
    parser.add_argument("--batch-size", type=int, default=32, help="images a worker and step")
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--num-classes", type=int, default=1000)
    parser.add_argument(
        "--num-warmup-batches",
        type=int,
        default=64,
        help="not measured; merged-gradient tries its plans in the first 62",
    )
    parser.add_argument("--num-batches-per-iter", type=int, default=10)
    parser.add_argument("--num-iters", type=int, default=10, help="measurements")
    parser.add_argument("--fp16-allreduce", action="store_true", help="gradients travel as fp16")
    parser.add_argument(
        "--strategy",
        help="merged-gradient, pipe-sgd, cocod:period=4, ... or horovod for stock Horovod; "
        "without it HVD_PIPE_STRATEGY decides, else merged-gradient",
    )
    parser.add_argument("--no-cuda", action="store_true", help="stay on the CPU")
    args = parser.parse_args()
    if args.num_iters < 1 or args.num_batches_per_iter < 1 or args.batch_size < 1:
        parser.error("--num-iters, --num-batches-per-iter and --batch-size: 1 or more")
    return args


def build_model(name: str, num_classes: int, image_size: int) -> nn.Module:
    """Ours by that name, else torchvision's if it is installed."""
    if name not in models.MODELS:
        try:
            from torchvision.models import get_model, list_models  # noqa: PLC0415
        except ImportError:
            pass  # models.build says which names there are
        else:
            if name in list_models():
                return get_model(name, num_classes=num_classes)
    return models.build(name, num_classes, (3, image_size, image_size))


def build_optimizer(model: nn.Module, args: argparse.Namespace) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    compression = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none
    if args.strategy == "horovod":
        return stock.DistributedOptimizer(
            optimizer, named_parameters=model.named_parameters(), compression=compression
        )
    return hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=compression,
        strategy=args.strategy,  # hvd_pipe: the only new argument
    )


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor, steps: int
) -> float:
    """Images per second of this worker over ``steps`` steps."""
    start = time.perf_counter()
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    if x.is_cuda:
        torch.cuda.synchronize()  # the GPU may lag behind the Python that feeds it
    return steps * len(x) / (time.perf_counter() - start)


def main() -> None:
    args = arguments()
    # hvd_pipe.torch.init() switches Horovod's own fusion of messages off, as our buckets are
    # merged already; stock Horovod has to be measured with it.
    (stock if args.strategy == "horovod" else hvd).init()
    cuda = torch.cuda.is_available() and not args.no_cuda
    if cuda:
        torch.cuda.set_device(hvd.local_rank())  # Horovod: one GPU per process
        torch.backends.cudnn.benchmark = True
    else:  # ranks on one machine share its cores
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // hvd.local_size()))
    device = torch.device("cuda" if cuda else "cpu")

    def log(message: str) -> None:
        if hvd.rank() == 0:
            # In one write, which horovodrun's prefixes leave in one piece.
            sys.stdout.write(f"{message}\n")
            sys.stdout.flush()

    torch.manual_seed(1)
    model = build_model(args.model, args.num_classes, args.image_size).to(device)
    optimizer = build_optimizer(model, args)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)  # Horovod: start from equal weights
    x = torch.randn(args.batch_size, 3, args.image_size, args.image_size, device=device)
    y = torch.randint(args.num_classes, (args.batch_size,), device=device)

    sizes = [p.numel() for p in model.parameters()]
    strategy = args.strategy or os.environ.get("HVD_PIPE_STRATEGY") or "merged-gradient"
    log(f"Model: {args.model}, {sum(sizes) / 1e6:.1f} M parameters in {len(sizes)} tensors")
    log(f"Strategy: {strategy}, batch size {args.batch_size}")
    log(f"Workers: {hvd.size()}, each on {'a GPU' if cuda else 'the CPU'}")
    if not cuda:
        log("No GPU in use: this can take very long. For a quick run add --model resnet18")
        log("  --image-size 64 --batch-size 8 --num-warmup-batches 20 --num-iters 5")

    train(model, optimizer, x, y, args.num_warmup_batches)
    rates = []
    for i in range(args.num_iters):
        rates.append(train(model, optimizer, x, y, args.num_batches_per_iter))
        log(f"Iter #{i}: {rates[-1]:.1f} img/sec per worker")
    if args.strategy != "horovod":
        optimizer.synchronize()  # hvd_pipe: take in what is still in flight at the end

    # Every worker's own measurements, not the first one's times the number of workers.
    total = hvd.allreduce(torch.tensor(rates, dtype=torch.float64), op=hvd.Sum, name="rates")
    mean, spread = total.mean().item(), 1.96 * total.std(correction=0).item()
    n = hvd.size()
    log(f"Img/sec per worker: {mean / n:.1f} +-{spread / n:.1f}")
    log(f"Total img/sec on {n} worker(s): {mean:.1f} +-{spread:.1f}")
    hvd.shutdown()


if __name__ == "__main__":
    main()
