"""A Horovod script as many people have it. Lines marked "hvd_pipe:" are all that it asks for.

horovodrun -np 2 python torch_examples/digits.py
horovodrun -np 2 python torch_examples/digits.py --strategy pipe-sgd:warmup_steps=50
"""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import hvd_pipe.torch as hvd  # hvd_pipe: was "import horovod.torch as hvd"
from data import load
from models import DigitsNet


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--strategy", help="default: HVD_PIPE_STRATEGY, else merged-gradient")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=0.005, help="multiplied by the workers")
    parser.add_argument("--momentum", type=float, default=0.8)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--fp16-allreduce", action="store_true", help="gradients travel as fp16")
    parser.add_argument("--no-cuda", action="store_true", help="stay on the CPU")
    return parser.parse_args()


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: DataLoader,
    sampler: DistributedSampler,
    device: torch.device,
    epoch: int,
) -> None:
    model.train()
    sampler.set_epoch(epoch)  # Horovod: another shuffle each epoch, the same on all ranks
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x.to(device)), y.to(device)).backward()
        optimizer.step()


@torch.no_grad()
def accuracy(model: nn.Module, loader: DataLoader, device: torch.device) -> float:
    model.eval()
    counts = [((model(x.to(device)).argmax(1).cpu() == y).sum(), len(y)) for x, y in loader]
    correct, images = (float(sum(column)) for column in zip(*counts, strict=True))
    # Horovod: each rank tested its share (DistributedSampler makes them equal); average them.
    return float(hvd.allreduce(torch.tensor(correct / images), name="accuracy"))


def main() -> None:
    args = arguments()
    hvd.init()  # Horovod: finds the other ranks
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)  # ranks share the machine's cores
    cuda = torch.cuda.is_available() and not args.no_cuda
    if cuda:
        torch.cuda.set_device(hvd.local_rank())  # Horovod: one GPU per process
    device = torch.device("cuda" if cuda else "cpu")

    data = load()
    train_set = TensorDataset(data.train_x, data.train_y)
    test_set = TensorDataset(data.test_x, data.test_y)
    # Horovod: each rank reads its own share.
    train_sampler = DistributedSampler(train_set, num_replicas=hvd.size(), rank=hvd.rank())
    test_sampler = DistributedSampler(test_set, num_replicas=hvd.size(), rank=hvd.rank())
    train_loader = DataLoader(train_set, args.batch_size, sampler=train_sampler)
    test_loader = DataLoader(test_set, args.batch_size, sampler=test_sampler)

    model = DigitsNet(data.num_classes, data.image[0]).to(device)
    # Horovod: the batch of all ranks together grows with their number, and the lr with it.
    optimizer = torch.optim.SGD(
        model.parameters(), lr=args.lr * hvd.size(), momentum=args.momentum
    )

    # Horovod: everyone starts from rank 0's state.
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    # Horovod: gradients are averaged over the ranks inside optimizer.step().
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
        strategy=args.strategy,  # hvd_pipe: the only new argument
    )

    for epoch in range(1, args.epochs + 1):
        train(model, optimizer, train_loader, train_sampler, device, epoch)
        optimizer.synchronize()  # hvd_pipe: what is in flight under pipe-sgd and cocod
        reached = accuracy(model, test_loader, device)
        if hvd.rank() == 0:
            print(f"epoch {epoch}/{args.epochs}: test accuracy {reached:.2%}")


if __name__ == "__main__":
    main()
