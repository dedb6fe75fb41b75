"""The carrier torch: the updates of Horovod's carrier, and what its connections let through."""

from __future__ import annotations

import gc
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from horovod.common.exceptions import HorovodInternalError
from on_ranks import gather, on_ranks
from problem import OPTIMIZERS, Weights, loss_of, make_model, train, weights_of
from torch import nn

import hvd_pipe.torch as hvd
from hvd_pipe.errors import HvdPipeError, RanksDisagreeError
from hvd_pipe.torch.compression import Int8
from hvd_pipe.torch.messages import group as group_module
from hvd_pipe.torch.messages.connections import _listens
from hvd_pipe.torch.messages.group import Group, open_groups

STEPS = 12
TWO = on_ranks(2, launcher="gloo", init=hvd.init)
JOBS = pytest.mark.parametrize(
    "n",
    [
        pytest.param(2, marks=TWO, id="2"),
        pytest.param(3, marks=on_ranks(3, init=hvd.init), id="3"),
    ],
)
STRATEGIES = [
    "merged-gradient:bucket_bytes=64",
    "merged-gradient:bucket_bytes=64,overlap=forward",
    "pipe-sgd:bucket_bytes=64",
    "cocod:period=3,warmup_steps=2",
    "cocod:period=4,fragments=2",
]


def distributed(model: nn.Module, carrier: str, strategy: str = "", **arguments: Any) -> Any:
    return hvd.DistributedOptimizer(
        OPTIMIZERS["momentum"](model),
        model.named_parameters(),
        strategy=strategy or None,
        carrier=carrier,
        **arguments,
    )


def trained(carrier: str, strategy: str, compression: Any) -> Weights:
    model = make_model()
    optimizer = distributed(model, carrier, strategy, compression=compression)
    weights = train(model, optimizer, hvd.rank(), steps=STEPS)
    optimizer.synchronize()
    return np.vstack([weights, weights_of(model)])


@JOBS
@pytest.mark.parametrize("codec", ["none", "fp16", "int8 with feedback"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_updates_are_those_of_horovods_carrier(n: int, strategy: str, codec: str) -> None:
    """To the last bit where two summands or encoded bytes leave no choice of an order."""
    feedback = codec == "int8 with feedback"
    compression = Int8(error_feedback=True) if feedback else getattr(hvd.Compression, codec)
    ours, theirs = (trained(carrier, strategy, compression) for carrier in ("torch", "horovod"))
    exact = n == 2 or (feedback and not strategy.startswith("cocod"))
    tolerance = 0.0 if exact else {"fp16": 1e-2}.get(codec, 1e-12)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=tolerance)
    assert len({row.tobytes() for row in gather(ours[-1])}) == 1


class Halved:
    """A compressor of the user's."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype]:
        return tensor.half(), tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return tensor.to(dtype)


@JOBS
@pytest.mark.parametrize(
    ("strategy", "compression"),
    [*((strategy, hvd.Compression.none) for strategy in STRATEGIES), (STRATEGIES[0], Halved)],
)
def test_ranks_that_have_joined_send_zeros(n: int, strategy: str, compression: Any) -> None:
    """Later steps of the others average over those that are left, as Horovod's carrier does."""
    # A mean of 16 bits is rounded, and a sum of three depends on its order.
    tolerance = 1e-2 if compression is Halved else 1e-12 * (n > 2)
    ends = []
    for carrier in ("torch", "horovod"):
        model = make_model()
        optimizer = distributed(model, carrier, strategy, compression=compression)
        train(model, optimizer, hvd.rank(), steps=4 + 3 * hvd.rank())
        hvd.join()
        train(model, optimizer, hvd.rank(), steps=3, first=20)
        optimizer.synchronize()
        ends.append(weights_of(model))
    np.testing.assert_allclose(ends[0], ends[1], rtol=0, atol=tolerance)


@TWO
def test_the_others_meet_after_a_rank_has_joined() -> None:
    """The last synchronize() of rank 1 is no round, and takes no rank for one that has left."""
    ends = []
    for carrier in ("torch", "horovod"):
        model = make_model()
        optimizer = distributed(model, carrier, "pipe-sgd:bucket_bytes=64")
        train(model, optimizer, hvd.rank(), steps=3)
        if hvd.rank() == 1:
            optimizer.synchronize()
            train(model, optimizer, 1, steps=2, first=3)
        hvd.join()
        optimizer.synchronize()
        ends.append(weights_of(model))
    np.testing.assert_array_equal(ends[0], ends[1])


# Arguments.


@TWO
def test_ranks_with_other_carriers_are_refused() -> None:
    with pytest.raises(RanksDisagreeError, match="carrier"):
        distributed(make_model(), ("horovod", "torch")[hvd.rank()])


@on_ranks(2, init=partial(hvd.init, process_sets="dynamic"))
@pytest.mark.parametrize(
    ("carrier", "arguments", "words"),
    [
        ("toch", {}, "carrier must be 'horovod' or 'torch', got 'toch'.*did you mean 'torch'"),
        ("torch", {"op": hvd.Adasum}, "carrier='torch' does not go with op=hvd.Adasum"),
        ("torch", {"strategy": "cocod:within=node"}, "does not go with within='node'"),
    ],
)
def test_what_cannot_be(carrier: str, arguments: dict[str, Any], words: str) -> None:
    with pytest.raises((ValueError, RanksDisagreeError), match=words):
        distributed(make_model(), carrier, **arguments)


@on_ranks(2, init=partial(hvd.init, process_sets="dynamic"))
def test_horovod_carries_what_the_variable_cannot_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HVD_PIPE_CARRIER", "torch")
    model, carried = make_model(), []
    for op in (hvd.Average, hvd.Adasum):
        optimizer: Any = hvd.DistributedOptimizer(
            OPTIMIZERS["momentum"](model),
            model.named_parameters(),
            op=op,
            strategy="merged-gradient:overlap=backward",
        )
        carried.append(optimizer._hvd_pipe.reduction.group is not None)
        train(model, optimizer, hvd.rank(), steps=2)
    assert carried == [True, False]
    monkeypatch.setenv("HVD_PIPE_CARRIER", "glue")
    with pytest.raises((ValueError, RanksDisagreeError), match="HVD_PIPE_CARRIER must be"):
        distributed(model, "")


def carried_by_default(model: nn.Module | None = None) -> str:
    optimizer: Any = hvd.DistributedOptimizer(OPTIMIZERS["momentum"](model or make_model()))
    return "horovod" if optimizer._hvd_pipe.reduction.group is None else "torch"


@TWO
def test_a_group_carries_where_horovod_runs_over_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HVD_PIPE_CARRIER", raising=False)
    assert carried_by_default() == "torch"
    assert carried_by_default(nn.Linear(3, 1, bias=False)) == "horovod"


@TWO
@pytest.mark.parametrize("who", ["one", "all"])
def test_horovod_takes_over_where_ranks_cannot_connect(
    who: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless somebody has asked for the group."""
    monkeypatch.delenv("HVD_PIPE_CARRIER", raising=False)
    if hvd.rank() or who == "all":
        monkeypatch.setattr(group_module, "_device", mock.Mock(side_effect=OSError("no network")))
    assert carried_by_default() == "horovod"
    monkeypatch.setenv("HVD_PIPE_CARRIER", "torch")
    with pytest.raises(HvdPipeError, match="no network"):
        carried_by_default()


@TWO
def test_ranks_of_which_one_alone_asks_for_the_group_are_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where it cannot connect, the others would go on without it."""
    monkeypatch.delenv("HVD_PIPE_CARRIER", raising=False)
    if hvd.rank():
        monkeypatch.setenv("HVD_PIPE_CARRIER", "torch")
    with pytest.raises(RanksDisagreeError, match="torch, by default"):
        carried_by_default()


@on_ranks(2, init=hvd.init)
def test_horovod_carries_where_it_runs_over_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HVD_PIPE_CARRIER", raising=False)
    assert carried_by_default() == "horovod"


# Connections.


@TWO
def test_groups_of_optimizers_that_are_gone_are_closed() -> None:
    groups = []
    for _ in range(4):
        model = make_model()
        optimizer = distributed(model, "torch")
        groups.append(optimizer._hvd_pipe.reduction.group)
        train(model, optimizer, hvd.rank(), steps=2)
        del optimizer
        gc.collect()
    assert open_groups.isdisjoint(groups[:-1])
    assert not [one for group in groups[:-1] for one in group._connections._sockets()]


@TWO
def test_parameters_that_join_with_encoded_gradients() -> None:
    """They need connections that are made with the optimizer, also for frozen parameters."""
    for frozen in (True, False):
        model = make_model(torch.float32)
        late = nn.Parameter(torch.ones(3, dtype=torch.bfloat16), requires_grad=False)
        named = [*model.named_parameters(), ("late", late)]
        plain = torch.optim.SGD([p for _, p in named if frozen or p is not late], lr=0.1)
        optimizer = hvd.DistributedOptimizer(plain, named, carrier="torch")
        late.requires_grad_(True)
        if frozen:
            late.sum().backward()
            optimizer.step()
            assert float(late.detach()[0]) == pytest.approx(0.9, abs=0.01)
            continue
        optimizer.add_param_group({"params": [late]})
        with pytest.raises((ValueError, RanksDisagreeError), match="joins with encoded gradients"):
            (loss_of(model, hvd.rank(), 0) + late.sum()).backward()


@TWO
def test_ranks_with_unlike_frozen_parameters_make_the_same_connections() -> None:
    model, dtype = make_model(), (torch.float32, torch.bfloat16)[hvd.rank()]
    frozen = nn.Parameter(torch.ones(3, dtype=dtype), requires_grad=False)
    named = [*model.named_parameters(), ("frozen", frozen)]
    plain = torch.optim.SGD([p for _, p in named], lr=0.1)
    optimizer = hvd.DistributedOptimizer(plain, named, carrier="torch")
    assert optimizer._hvd_pipe.reduction.group.encodes
    assert len(set(gather(train(model, optimizer, hvd.rank(), steps=2).tobytes()))) == 1


@TWO
def test_a_round_that_has_begun_when_a_state_is_loaded() -> None:
    """The rest of its messages is sent: rank 1 has sent more of them than rank 0."""
    model = make_model()
    optimizer = distributed(model, "torch", "merged-gradient:bucket_bytes=64")
    state = optimizer.state_dict()
    if hvd.rank() == 0:
        model[-1](torch.ones(1, 4, dtype=torch.float64)).sum().backward()  # the last layer alone
    else:
        loss_of(model, hvd.rank(), 0).backward()
    optimizer.load_state_dict(state)
    assert len(set(gather(train(model, optimizer, hvd.rank(), steps=3).tobytes()))) == 1


@TWO
def test_ranks_whose_gradients_come_in_another_order_send_in_the_same_one() -> None:
    torch.manual_seed(0)
    heads = nn.ModuleList(nn.Linear(3, size) for size in (2, 40)).double()
    plain = torch.optim.SGD(heads.parameters(), lr=0.1)
    strategy = "merged-gradient:bucket_bytes=32"
    optimizer = hvd.DistributedOptimizer(
        plain, heads.named_parameters(), strategy=strategy, carrier="torch"
    )
    for _ in range(4):
        optimizer.zero_grad()
        order = heads if hvd.rank() else reversed(list(heads))
        losses = [head(torch.ones(1, 3, dtype=torch.float64)).square().sum() for head in order]
        sum(losses, torch.zeros(())).backward()
        optimizer.step()
    assert len(set(gather(weights_of(heads).tobytes()))) == 1


@TWO
def test_a_state_that_one_rank_alone_loads_while_it_sends() -> None:
    model = make_model()
    optimizer = distributed(model, "torch", "merged-gradient:bucket_bytes=64")
    train(model, optimizer, hvd.rank(), steps=1)
    state = optimizer.state_dict()
    optimizer.zero_grad()
    loss_of(model, hvd.rank(), 1).backward()
    go_on = optimizer.step if hvd.rank() else partial(optimizer.load_state_dict, state)
    with pytest.raises(HvdPipeError, match="ranks have sent different things"):
        go_on()


@TWO
def test_a_rank_that_gives_up_ends_the_waits_of_others() -> None:
    group = Group(hvd.global_process_set, "gives up")
    if hvd.rank() == 1:
        group.fail(RuntimeError("tried"))
        with pytest.raises(HorovodInternalError, match="tried"):
            group.launch(torch.ones(1), "later")
    else:
        with pytest.raises(HorovodInternalError, match="messages are lost"):
            group.launch(torch.ones(1), "lost").wait()
    gather(None)
    group.close()


@TWO
def test_a_signal_is_handled_while_a_message_is_waited_for() -> None:
    group = Group(hvd.global_process_set, "signals")

    def interrupt(*_: object) -> None:
        raise InterruptedError

    if hvd.rank() == 0:
        posted = group.launch(torch.ones(1), "late")
        before = signal.signal(signal.SIGALRM, interrupt)
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            with pytest.raises(InterruptedError):
                posted.wait()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            signal.signal(signal.SIGALRM, before)
    gather(None)
    if hvd.rank() == 1:
        posted = group.launch(torch.ones(1), "late")
    assert float(posted.wait()) == 2.0
    gather(None)
    group.close()


@TWO
def test_what_strangers_send_does_not_arrive() -> None:
    group = Group(hvd.global_process_set, "strangers")
    files = _open_files()
    with _attacked(group) as attempts:
        values = torch.empty(1 << 16)
        deadline = time.monotonic() + 20.0
        while True:
            values.fill_(hvd.rank() + 1.0)
            assert (group.launch(values, "under attack").wait() == 3.0).all()
            enough = torch.tensor(float(attempts[0] >= 50 or time.monotonic() > deadline))
            if group.launch(enough, "enough").wait() > 0:
                break
    assert _open_files() < files + 20  # of 50 that a listener would have taken
    gather(None)
    group.close()


def _open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@contextmanager
def _attacked(group: Group) -> Iterator[list[int]]:
    """Have a thread connect to this rank's listener, and send garbage; yields the attempts."""
    addresses = [s.getsockname() for s in group._connections._sockets() if _listens(s)]
    assert addresses
    attempts, ends = [0], threading.Event()

    def attack() -> None:
        while not ends.is_set():
            for garbage in (os.urandom(1000), struct.pack("<Q", attempts[0]), b""):
                with socket.socket() as one:
                    one.settimeout(0.05)
                    if one.connect_ex(addresses[0]) == 0:
                        one.sendall(garbage)
                attempts[0] += 1

    thread = threading.Thread(target=attack)
    thread.start()
    try:
        yield attempts
    finally:
        ends.set()
        thread.join()
