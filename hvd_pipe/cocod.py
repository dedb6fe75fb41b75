"""CoCoD-SGD's options: local steps, with the average of the models behind them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from hvd_pipe.errors import is_number, require_int, require_one_of

__all__ = ["CoCoD", "assign_fragments"]

_MOMENTA = ("local", "average")
_OUTERS = ("none", "nesterov")
_WITHIN = ("none", "node")
_OUTER_LR, _OUTER_MOMENTUM = 0.7, 0.9


@dataclass(frozen=True)
class CoCoD:
    """Take ``period`` local steps while the models that they started from are averaged.

    With W the sum of the weights, and end_i for x_i after ``period`` local steps::

        mean[s]   = sum_j (w_j / W) x_j[s]
        x_i[s+1]  = mean[s] + (end_i - x_i[s])            CoCoD-SGD
        x_i[s+1]  = end_i - alpha (end_i - z[s])          with pull_back=alpha: Overlap-Local-SGD
        z[s]      = z[s-1] + v[s],  v[s] = beta v[s-1] + (mean[s] - z[s-1])

        x_i[s+1]  = g[s+1] + (end_i - x_i[s])             with outer="nesterov", as DiLoCo's
        g[s+1]    = g[s] - lr (d[s] + mu u[s]),  u[s] = mu u[s-1] + d[s],  d[s] = g[s] - mean[s]

    g, the outer model, is the same on all ranks and begins as the first mean. An outer learning
    rate of 1 without momentum is CoCoD's own rule.

    With ``fragments=P`` the model is cut into P parts. Each keeps the rules above for itself, but
    its average travels behind ``period / P`` steps only, one part after another: fragment p begins
    its round p * period / P steps after fragment 0 and has what the others learnt that much
    earlier. With ``within="node"`` the g_i of a local step are averaged over the ranks of a node,
    so that these stay equal, and the models over all ranks.

    Replicas differ in between and are equal after ``synchronize()``. With momentum they overshoot
    and leave each other where synchronous SGD is still stable: at an SGD momentum of 0.9 from
    ``lr * curvature`` 0.28 on with period 4, 0.08 with period 8. Pull-back prevents that, and
    keeps replicas together when each worker sees other data; where CoCoD is stable at the same
    learning rate it is slower, as a round moves the mean by (1 - alpha) / (1 - alpha beta) of
    CoCoD's progress.

    Args:
        period: Local steps a round, the paper's k; more than all-reduce time over step time buys
            nothing.
        warmup_steps: Synchronous steps before the first round.
        weights: One positive number a rank of the process set, for workers whose batches differ in
            size (`hvd.split_batch` makes such batches); None for equal ones. In a string,
            ``weights=3/1``.
        momentum: ``"local"`` leaves the optimizer's state alone; ``"average"`` lets its tensors
            of their parameter's shape (momentum, Adam's moments) follow the parameters' rule, for
            a message more a round. With unlike data and large steps it diverges earlier.
        pull_back: Overlap-Local-SGD's alpha, above 0 and below 1 (published: 0.6); None for
            CoCoD's own rule.
        anchor_momentum: Overlap-Local-SGD's beta, from 0 to below 1 (published: 0.7).
        outer: ``"nesterov"`` lets an outer optimizer, SGD with Nesterov's momentum, apply what the
            mean has moved; ``"none"`` takes the mean as it is. For long periods. It acts
            ``period / fragments`` steps late, so smaller outer learning rates are stable than in
            DiLoCo, above all with one fragment.
        outer_lr: The outer learning rate, above 0 (published: 0.7).
        outer_momentum: The outer momentum, from 0 to below 1 (published: 0.9).
        fragments: Parts of about the same size, each of whole tensors; divides ``period``. What
            travels at a time is smaller, and news are less late. At most one a tensor.
        within: ``"node"`` trains synchronously within each node, and as CoCoD across nodes;
            ``"none"``: each worker takes local steps by itself. Needs
            ``hvd.init(process_sets="dynamic")``.

    Raises:
        TypeError, ValueError: An argument of the wrong kind or range, or one whose other is
            missing: ``anchor_momentum`` needs ``pull_back``, ``outer_lr`` needs ``outer``.

    Example:
        >>> parse("cocod:period=8").period
        8
        >>> parse("cocod:period=32,fragments=4,outer=nesterov").turn
        8
        >>> parse("cocod:period=2,pull_back=0.6,anchor_momentum=0.7").pull_back
        0.6

    Source: Shen et al., "CoCoD-SGD" (IJCAI 2019); Wang, Liang, Joshi, "Overlap-Local-SGD"
    (ICASSP 2020, arXiv 2002.09539); Douillard et al., "DiLoCo" (arXiv 2311.08105), "Streaming
    DiLoCo" (arXiv 2501.18512).
    """

    name: ClassVar[str] = "cocod"
    period: int = 4
    warmup_steps: int = 0
    weights: tuple[float, ...] | None = None
    momentum: str = "local"
    pull_back: float | None = None
    anchor_momentum: float = 0.0
    outer: str = "none"
    outer_lr: float = _OUTER_LR
    outer_momentum: float = _OUTER_MOMENTUM
    fragments: int = 1
    within: str = "none"

    @property
    def turn(self) -> int:
        """Local steps behind which a fragment's average travels."""
        return self.period // self.fragments

    @property
    def kept(self) -> tuple[str, ...]:
        """What goes from round to round, as checkpoints name it: a model, and its momentum."""
        if self.outer != "none":
            return "outer", "outer_velocity"
        return ("anchor", "velocity") if self.anchor_momentum else ()

    def __post_init__(self) -> None:
        require_int(self, "period", 1)
        require_int(self, "warmup_steps", 0)
        if self.weights is not None:
            if not isinstance(self.weights, tuple) or not all(map(is_number, self.weights)):
                raise TypeError(
                    "CoCoD: weights must be a tuple of numbers, one a rank, such as (3, 1) or "
                    f"'3/1' in a string, got {self.weights!r}."
                )
            if not self.weights or not all(0 < weight < math.inf for weight in self.weights):
                raise ValueError(
                    f"CoCoD: weights must be positive numbers, one a rank, got {self.weights!r}: "
                    "leave out workers with a process set."
                )
        require_one_of(self, "momentum", _MOMENTA)
        require_one_of(self, "outer", _OUTERS)
        for field in ("pull_back", "anchor_momentum", "outer_lr", "outer_momentum"):
            value = getattr(self, field)
            if not is_number(value) and not (field == "pull_back" and value is None):
                raise TypeError(f"CoCoD: {field} must be a number, got {value!r}.")
        if self.pull_back is not None and not 0 < self.pull_back < 1:
            raise ValueError(
                f"CoCoD: pull_back must be above 0 and below 1, got {self.pull_back}: at 1 every "
                "round would end where it began; None is CoCoD without it."
            )
        if not 0 <= self.anchor_momentum < 1:
            raise ValueError(
                f"CoCoD: anchor_momentum must be from 0 to below 1, got {self.anchor_momentum}."
            )
        if self.anchor_momentum and self.pull_back is None:
            raise ValueError(
                f"CoCoD: anchor_momentum={self.anchor_momentum} needs pull_back, which pulls "
                "models towards the anchor: give pull_back=0.6, or leave both out."
            )
        self._check_outer()
        self._check_fragments()

    def _check_outer(self) -> None:
        if not 0 < self.outer_lr < math.inf:
            raise ValueError(f"CoCoD: outer_lr must be a positive number, got {self.outer_lr}.")
        if not 0 <= self.outer_momentum < 1:
            raise ValueError(
                f"CoCoD: outer_momentum must be from 0 to below 1, got {self.outer_momentum}."
            )
        if self.outer == "none" and (self.outer_lr, self.outer_momentum) != (
            _OUTER_LR,
            _OUTER_MOMENTUM,
        ):
            raise ValueError(
                f"CoCoD: outer_lr={self.outer_lr} and outer_momentum={self.outer_momentum} need "
                "an outer optimizer: give outer='nesterov', or leave them out."
            )
        if self.outer != "none" and self.pull_back is not None:
            raise ValueError(
                f"CoCoD: outer={self.outer!r} and pull_back={self.pull_back} are two rules for "
                "the end of a round: give one of them."
            )

    def _check_fragments(self) -> None:
        require_int(self, "fragments", 1)
        require_one_of(self, "within", _WITHIN)
        if self.period % self.fragments:
            raise ValueError(
                f"CoCoD: fragments={self.fragments} must divide period={self.period}, as each "
                "fragment travels behind as many steps: give another of the two."
            )
        if self.fragments > 1 and self.momentum == "average":
            raise ValueError(
                f"CoCoD: fragments={self.fragments} and momentum='average' do not go together: "
                "momenta are averaged with the whole model. Give momentum='local', or fragments=1."
            )


def assign_fragments(
    nbytes: Sequence[int], count: int, taken: Sequence[int | None] = ()
) -> list[int]:
    """Return the fragment of each tensor: the largest first, each into the smallest fragment.

    Args:
        nbytes: Sizes of the tensors, in bytes.
        count: How many fragments there are.
        taken: The fragments of the first tensors; None for one that has none yet.

    Raises:
        ValueError: More fragments than tensors: some would be empty.

    Example:
        >>> assign_fragments([4, 1, 2, 3], 2)
        [0, 0, 1, 1]
        >>> assign_fragments([4, 1, 2, 3, 9], 2, taken=[0, 0, 1, 1])
        [0, 0, 1, 1, 0]

    Source: Graham, "Bounds on multiprocessing timing anomalies" (1969).
    """
    if count > len(nbytes):
        raise ValueError(
            f"fragments={count}, and the model has {len(nbytes)} tensors that train: a fragment "
            f"has whole tensors, so give at most {len(nbytes)} fragments."
        )
    known = {i: fragment for i, fragment in enumerate(taken) if fragment is not None}
    found, loads = [0] * len(nbytes), [(0, 0)] * count  # bytes, then tensors, as some are empty
    for i in sorted(range(len(nbytes)), key=lambda i: (i not in known, -nbytes[i], i)):
        found[i] = known[i] if i in known else min(range(count), key=loads.__getitem__)
        size, tensors = loads[found[i]]
        loads[found[i]] = size + nbytes[i], tensors + 1
    return found


def split_batch(batch: int, speeds: Sequence[float]) -> list[int]:
    """Split a batch over workers in proportion to their speeds, by the largest remainder.

    With M the sum of the speeds, worker i gets ``batch * speeds[i] / M``, rounded down; what is
    left goes, one each, to those who lost most by rounding. Every worker gets at least one.

    Args:
        batch: Samples per step, all workers together.
        speeds: Positive, one a worker, in any unit: samples/s, or 1 / seconds per step.

    Raises:
        TypeError, ValueError: Too small a batch, no workers, or a speed that is not positive.

    Example:
        >>> split_batch(10, [1.0, 1.0, 1.0]), split_batch(4, [1.0, 100.0])
        ([4, 3, 3], [1, 3])

    Source: Shen et al., "CoCoD-SGD" (IJCAI 2019), proportional sampling.
    """
    if isinstance(batch, bool) or not isinstance(batch, int):
        raise TypeError(f"batch must be an int, got {batch!r}: int(batch) makes it one.")
    if not speeds:
        raise ValueError("speeds is empty: give one positive speed a worker.")
    for worker, speed in enumerate(speeds):
        if not 0 < speed < math.inf:
            raise ValueError(
                f"speeds[{worker}] is {speed!r}: speeds must be positive and finite; leave a "
                "worker that does nothing out of the process set."
            )
    if batch < len(speeds):
        raise ValueError(
            f"batch={batch} is less than one sample for each of {len(speeds)} workers: raise it "
            f"to {len(speeds)} or more, or use fewer workers."
        )
    exact = _shares(batch, speeds)
    result = [math.floor(share) for share in exact]
    # Rounding errors of the shares may lie on either side, by less than one sample a worker.
    by_loss = sorted(range(len(exact)), key=lambda i: (result[i] - exact[i], i))
    for i in by_loss[: batch - sum(result)]:
        result[i] += 1
    return result


def _shares(batch: int, speeds: Sequence[float]) -> list[float]:
    """Return what each worker gets before rounding: its part, or one where that would be less."""
    largest = max(speeds)
    parts = [speed / largest for speed in speeds]  # so that no sum of them overflows
    ones: set[int] = set()
    while True:
        others = [i for i in range(len(parts)) if i not in ones]
        whole = math.fsum(parts[i] for i in others)
        rest = batch - len(ones)
        shares = {i: rest * (parts[i] / whole) for i in others}
        few = {i for i, share in shares.items() if share < 1}
        if not few or len(few) == len(others):
            return [max(1.0, shares.get(i, 1.0)) for i in range(len(parts))]
        ones |= few
