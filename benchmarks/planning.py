"""How long planning takes: every method on 2048 workers, plans of large models, advice.

    python benchmarks/planning.py

prints seconds; simulating all methods on 2048 workers should take less than five in all. Nothing
here needs a network, Horovod or a framework.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import numpy as np

from hvd_pipe.planning.advise import advise
from hvd_pipe.planning.cluster import Cluster, Link, Network
from hvd_pipe.planning.merge import plan_dtype_groups
from hvd_pipe.planning.methods import Method, label, parse
from hvd_pipe.planning.profile import LayerProfile, ModelProfile
from hvd_pipe.planning.simulate import simulate

WORKERS = 2048
Result = TypeVar("Result")

METHODS = (
    "conventional",
    "wfbp",
    "single",
    "greedy",
    "merged-gradient",
    "horovod",
    "pipe-sgd",
    "wide-pipe-sgd",
    "local-sgd",
    "cocod",
)


def resnet152() -> ModelProfile:
    """467 tensors of 60.1M parameters, as large as ResNet-152's: 150 of them of 1 KiB.

    Times are a V100's for a batch of 32, spread as the bytes of convolutions are.
    """
    small, tensors, parameters = 150, 467, 60_100_000
    rng = np.random.default_rng(152)
    parts = rng.lognormal(0.0, 1.2, tensors - small)
    large = np.maximum(1, parts / parts.sum() * (4 * parameters - 1024 * small) / 4).astype(int)
    sizes = [4 * int(count) for count in large]
    sizes[-1] += 4 * parameters - 1024 * small - sum(sizes)
    order: list[int] = []
    for at, size in enumerate(sizes):
        order.append(size)
        if at < small:
            order.append(1024)
    seconds = 0.25 * np.sqrt(order) / np.sqrt(order).sum()
    layers = tuple(
        LayerProfile(f"tensor{i}", size, 2 / 3 * float(s), 1 / 3 * float(s))
        for i, (size, s) in enumerate(zip(order, seconds, strict=True))
    )
    return ModelProfile(layers, batch=32, update_s=5e-3, name="resnet152")


def timed(call: Callable[[], Result]) -> tuple[float, Result]:
    """Seconds of one call, and its result."""
    start = time.perf_counter()
    result = call()
    return time.perf_counter() - start, result


def main() -> int:
    """Print the table; 1 if simulating all methods takes longer than promised."""
    model = resnet152()
    network = Network(Link.of(bandwidth=3.125e9, latency=2e-6), "halving-doubling")
    steady = Cluster(WORKERS, network)
    shaken = Cluster(WORKERS, network, jitter=0.05)
    methods: list[Method] = [parse(name) for name in METHODS]
    print(
        f"{model.name}: {len(model.gradient_bytes())} tensors, "
        f"{model.gradient_bytes().sum() / 1e6:.1f} MB; {WORKERS} workers, 100 steps"
    )
    print("method                 simulated  with stragglers   took")
    total = 0.0
    for method in methods:
        first, even = timed(partial(simulate, model, steady, method))
        second, uneven = timed(partial(simulate, model, shaken, method))
        total += second
        print(
            f"{label(method):<18} {even.step_s * 1e3:9.2f} ms"
            f"     {uneven.step_s * 1e3:9.2f} ms  {first:4.2f} s, {second:4.2f} s"
        )
    print(f"all methods with stragglers: {total:.2f} s (promised: 5 s)")
    names, ready, sizes = model.gradient_order(), model.ready_times(), model.gradient_bytes()
    groups = ["full" if size == 1024 else "half" for size in sizes]
    took, plan = timed(lambda: plan_dtype_groups(names, ready, sizes, groups, steady.comm()))
    print(f"plan of two dtype groups, {len(plan.buckets)} buckets: {took:.2f} s")
    took, advice = timed(lambda: advise(model, steady, codecs=("none", "bf16", "int8")))
    print(f"advice, {len(advice.rows)} rows: {took:.2f} s: {advice.reason}")
    return int(total > 5.0)


if __name__ == "__main__":
    sys.exit(main())
