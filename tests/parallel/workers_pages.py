"""The PyTorch blocks of README and docs/ on a rank, each with the names that its page presumes.

Each function runs one block, checks what the page says of it, and returns what all ranks must
agree on.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from cases import Raised, run_cases
from page_blocks import Names, execute
from torch import nn

import hvd_pipe.torch as hvd
from hvd_pipe.strategy import parse
from hvd_pipe.torch import pipedream

Arrays = list[npt.NDArray[Any]]

LR = 0.1
STEPS = 3
TARGETS = torch.tensor([0, 1, 1, 0, 1, 0])


def _start(strategy: str | None = None) -> Names:
    """A script's usual names; with a strategy, the optimizer is a distributed one."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=LR)
    if strategy is not None:
        named = model.named_parameters()
        optimizer = hvd.DistributedOptimizer(optimizer, named, strategy=strategy)
    return {"torch": torch, "hvd": hvd, "model": model, "optimizer": optimizer}


def _loss(names: Names) -> torch.Tensor:
    """Of data that differ from rank to rank."""
    output = names["model"](torch.ones(6, 4) * (1 + hvd.rank()))
    return nn.functional.cross_entropy(output, TARGETS)


def _step(names: Names) -> None:
    names["optimizer"].zero_grad()
    _loss(names).backward()
    names["optimizer"].step()


def _train(names: Names) -> None:
    for _ in range(STEPS):
        _step(names)


def _weights(names: Names) -> Arrays:
    return [p.detach().numpy().copy() for p in names["model"].parameters()]


def _pipeline(text: str) -> Arrays:
    batch = torch.ones(6, 4), TARGETS
    data = {"loader": [batch] * 4, "test_loader": [batch], "epochs": 1}
    names = execute(text, {**_start(), **data, "loss_fn": nn.functional.cross_entropy})
    weights = [value.numpy() for value in names["engine"].state_dict().values()]
    names["engine"].close()
    return weights


def _import(text: str) -> Arrays:
    """The changed line alone."""
    assert execute(text, {})["hvd"] is hvd
    return []


def _changed_line(text: str) -> Arrays:
    """Training in the place of ``...``, and replicas that are equal at the end."""
    names = execute(text, _start(), _train)
    assert isinstance(names["optimizer"], torch.optim.SGD | torch.optim.AdamW)
    return _weights(names)


def _optimizer(text: str) -> Arrays:
    names = execute(text, _start())
    assert isinstance(names["optimizer"], torch.optim.SGD | torch.optim.AdamW)
    _train(names)
    names["optimizer"].synchronize()
    return _weights(names)


def _class_alone(text: str) -> Arrays:
    import horovod.torch as stock  # noqa: PLC0415 - the block imports it, too

    names = execute(text, _start())
    assert names["hvd"] is stock
    optimizer = names["optimizer"]
    named = names["model"].named_parameters()
    names["optimizer"] = names["DistributedOptimizer"](optimizer, named, strategy="pipe-sgd")
    _train(names)
    names["optimizer"].synchronize()
    return _weights(names)


def _saved_plan(text: str) -> Arrays:
    names = _start("merged-gradient:plan=single")
    _train(names)
    with_plan = f"{text}\nloaded = parse(strategy).load_plan()\n"
    names = execute(with_plan, {**names, "parse": parse})
    assert names["loaded"] == names["optimizer"].plan
    return _weights(names)


def _automatic(text: str) -> Arrays:
    allowed = parse(execute(text, {})["strategy"]).allow
    assert allowed[0] == "merged-gradient"
    assert len(allowed) > 1
    return []


def _unequal_speed(text: str) -> Arrays:
    names = _start()
    names = execute(text, {**names, "one_step": lambda: _loss(names).backward()})
    assert sum(names["batches"]) == 256
    assert names["strategy"].weights == tuple(names["batches"])
    return [np.array(names["batches"])]


def _clipping(text: str) -> Arrays:
    """A step that is written out: gradients end at the norm that is asked for."""
    names = _start("pipe-sgd")
    names["optimizer"].param_groups[0]["lr"] = 0.0  # the gradient is looked at after the step
    for parameter in names["model"].parameters():
        parameter.data *= 20.0
    names["scaler"] = torch.amp.GradScaler("cpu", init_scale=8.0)
    for _ in range(STEPS):
        names["optimizer"].zero_grad()
        names = execute(text, {**names, "loss": _loss(names)})
    gradients = [p.grad for p in names["model"].parameters()]
    norm = torch.linalg.vector_norm(torch.cat([g.flatten() for g in gradients]))
    torch.testing.assert_close(norm, torch.tensor(1.0), rtol=1e-4, atol=0.0)
    return [g.numpy() for g in gradients]


def _two_halves(text: str) -> Arrays:
    """Two halves of a loss are one loss."""
    weights = []
    for code in (text, "loss_of(1.0).backward()\noptimizer.step()"):
        names = _start("merged-gradient")
        half = {"first_half": 0.5, "second_half": 0.5}
        for _ in range(STEPS):
            names["optimizer"].zero_grad()
            names = execute(
                code, {**names, **half, "loss_of": lambda part, names=names: _loss(names) * part}
            )
        weights.append(_weights(names))
    for one, other in zip(*weights, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)
    return weights[0]


def _scaled(text: str) -> Arrays:
    names = _start("pipe-sgd")
    names["scaler"] = torch.amp.GradScaler("cpu", init_scale=8.0)
    before = _weights(names)
    for _ in range(STEPS):
        names["optimizer"].zero_grad()
        names = execute(text, {**names, "loss": _loss(names)})
    names["optimizer"].synchronize()
    assert not all(map(np.array_equal, before, _weights(names)))
    return _weights(names)


def _elastic(text: str) -> Arrays:
    names = execute(text, {**_start("merged-gradient"), "steps": 12}, _step)
    assert names["state"].step == 12
    return _weights(names)


def _uneven(text: str) -> Arrays:
    """The last rank makes one step more than the others."""
    names = _start("merged-gradient")
    _train(names)
    if hvd.rank() == hvd.size() - 1:
        _step(names)
    names = execute(text, names)
    assert names["last"] == hvd.size() - 1
    return _weights(names)


def _loop(text: str) -> Arrays:
    """A loop over the reader's own data, that ends with `synchronize()`."""
    names = _start("pipe-sgd")
    data = {"loader": [(torch.ones(6, 4) * (1 + hvd.rank()), TARGETS)] * STEPS}
    execute(text, {**names, **data, "loss_fn": nn.functional.cross_entropy})
    return _weights(names)


_tutorial: Names = {}
"""What the blocks of the tutorial leave for those that follow."""


def _script(text: str) -> Arrays:
    """The tutorial's first script, which stock Horovod runs."""
    import horovod.torch as stock  # noqa: PLC0415 - the block imports it, too

    _tutorial.update(execute(text, {}))
    assert _tutorial["hvd"] is stock
    assert _tutorial["accuracy"] > 0.8
    return _weights(_tutorial)


def _renewed(text: str) -> Arrays:
    """A block that makes another optimizer, for a model that no other optimizer knows."""
    model = _tutorial["model"]
    fresh = nn.Sequential(*(type(layer)(*_sizes(layer)) for layer in model))
    hvd.broadcast_parameters(fresh.state_dict(), root_rank=0)
    _tutorial.update(execute(text, {**_tutorial, "model": fresh}))
    assert _tutorial["hvd"] is hvd
    return _weights(_tutorial)


def _sizes(layer: nn.Module) -> tuple[int, ...]:
    return (layer.in_features, layer.out_features) if isinstance(layer, nn.Linear) else ()


def _checkpoint(text: str) -> Arrays:
    """What `save` has written, `resume` gives to all ranks."""
    restored = "save(model, optimizer, 3)\nassert resume(model, optimizer) == 3\n"
    _tutorial.update(execute(f"{text}\n{restored}", _tutorial))
    return _weights(_tutorial)


def _epochs(text: str) -> Arrays:
    _tutorial.update(execute(text, _tutorial))
    assert _tutorial["accuracy"] > 0.8
    return _weights(_tutorial)


BLOCKS: dict[str, Callable[[str], Arrays]] = {
    "docs/pipedream.md python 0": _pipeline,  # first: its `init` allows process sets later
    "README.md python 0": _changed_line,
    "docs/getting-started.md python 0": _import,
    "docs/migration.md python 0": _class_alone,
    "docs/carriers.md python 0": _optimizer,
    "docs/elastic.md python 0": _elastic,
    "docs/overlap-forward.md python 0": _optimizer,
    "docs/overlap-forward.md python 1": _automatic,
    "docs/pytorch.md python 0": _clipping,
    "docs/pytorch.md python 1": _clipping,
    "docs/pytorch.md python 2": _two_halves,
    "docs/pytorch.md python 3": _scaled,
    "docs/pytorch.md python 4": _clipping,
    "docs/strategies.md python 0": _optimizer,
    "docs/merged-gradient.md python 0": _saved_plan,
    "docs/pipe-sgd.md python 0": _loop,
    "docs/cocod.md python 0": _unequal_speed,
    "docs/strategies.md python 1": _automatic,
    "docs/migration.md python 2": _optimizer,
    "docs/migration.md python 3": _changed_line,
    "docs/tutorial.md python 0": _script,
    "docs/tutorial.md python 1": _renewed,
    "docs/tutorial.md python 2": _renewed,
    "docs/tutorial.md python 3": _checkpoint,
    "docs/tutorial.md python 4": _epochs,
    "docs/pytorch.md python 5": _uneven,
}


def run(texts: dict[str, str]) -> dict[str, Arrays | Raised]:
    """Run all blocks, whose texts are given by their names."""
    torch.set_num_threads(1)
    pipedream.init()
    cases = {name: partial(BLOCKS[name], text) for name, text in texts.items()}
    return run_cases({name: cases[name] for name in BLOCKS if name in cases})
