"""Control flags: what every rank reports to all others in each round, without another message.

The bucket that is sent last ends in one element a flag. A rank sends zeros and ones, and reads
their means over the ranks.

`drains` and `stepped` tell ranks that have gone apart from ranks that only have unlike data. Where
one rank alone drains, it makes no step after that round, and the others do: the next round's
`stepped` says so to all ranks.

`changed` reports that a rank has changed gradients between ``backward()`` and ``step()`` in a way
that makes replicas differ where one rank alone does it. All ranks compare their `Changes` after
that round, before any weight moves::

    the backward pass raised               its gradients are not whole
    code that Python does not see wrote    so are these
    a gradient was cleared                 zero_grad(), p.grad = None: it is not to be applied
    another tensor was put in its place    p.grad = g, without reading what was there
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from horovod.torch.mpi_ops import ProcessSet, rank

from hvd_pipe.errors import HvdPipeError, RanksDisagreeError
from hvd_pipe.runtime.consensus import members
from hvd_pipe.torch.agree import gather

RAISED = "backward() raised"

_log = logging.getLogger("hvd_pipe")


@dataclass(frozen=True)
class ControlFlags:
    """The flags of one rank (zeros and ones), or their means over all ranks."""

    reordered: float = 0.0
    """Its gradients keep coming in another order than planned."""
    present: float = 1.0
    """It takes part. A rank that has left by ``hvd.join()`` sends zeros, here too."""
    sparse: float = 0.0
    """It has a sparse gradient that was not known to be sparse."""
    frozen: float = 0.0
    """Other parameters are frozen on it than in the round before."""
    drains: float = 0.0
    """It synchronizes without a gradient: it drains, or has no data in this step."""
    changed: float = 0.0
    """Gradients were cleared or replaced on it after they were complete, or are not whole."""
    early: float = 0.0
    """It has sent gradients before their last backward pass, as they were read."""
    whole: float = 0.0
    """It has sent gradients after their last backward pass."""
    stepped: float = 0.0
    """It has made a step since the round before."""
    meets: float = 0.0
    """It sends no gradients, and waits to do something else with all ranks; the last flag."""

    def to_list(self) -> list[float]:
        """Return the numbers in the order in which they travel."""
        return [float(flag) for flag in vars(self).values()]

    def all_present(self, workers: int) -> bool:
        """Whether no rank has left; else only all-reduces are possible."""
        return self.present > 1 - 0.5 / workers

    def all_drained(self, workers: int) -> bool:
        """Whether no rank that took part had a gradient."""
        return self.present - self.drains < 0.5 / workers

    def some_drained(self, workers: int) -> bool:
        """Whether some ranks, and not all, had no gradient."""
        return self._divided(self.drains, workers)

    def some_stepped(self, workers: int) -> bool:
        """Whether some ranks, and not all, had made a step between the last two rounds."""
        return self._divided(self.stepped, workers)

    def check_changed(self, workers: int) -> None:
        """Raise on every rank where ranks cannot compare their `Changes`, as one has left."""
        if not self.all_present(workers) and self.present - self.changed > 0.5 / workers:
            raise RanksDisagreeError(
                "gradients were cleared or replaced after backward() and before step(), or "
                "backward() has raised, on some ranks and not on others, while a rank has left by "
                "hvd.join(): no rank has applied this step's gradients. Do the same on every rank."
            )

    @property
    def unlike_passes(self) -> bool:
        """Whether gradients were read before their last pass on some ranks, not on others."""
        return self.early != 0.0 and self.whole != 0.0

    def are_unlike(self, workers: int) -> bool:
        """Whether ranks have to compare something, or to raise, before any weight moves."""
        compares = self.changed != 0.0 or self.frozen != 0.0 or self.unlike_passes
        raises = self.meets != 0.0 or self.some_stepped(workers)
        return compares or raises or self.sparse != 0.0

    def _divided(self, mean: float, workers: int) -> bool:
        half = 0.5 / workers
        return self.all_present(workers) and half < mean < 1 - half


COUNT = len(fields(ControlFlags))


@dataclass(frozen=True)
class Changes:
    """What changed a round's gradients: ``left`` is in ``p.grad`` in place of those sent."""

    failure: str = ""
    left: dict[int, torch.Tensor | None] = field(default_factory=dict)
    refused: bool = False

    def are_all(self, indices: Sequence[int]) -> bool:
        """Return whether nothing is left to apply of the gradients that were sent."""
        cleared = all(index in self.left and self.left[index] is None for index in indices)
        return bool(self.failure or (indices and cleared))

    def compare(
        self,
        names: Sequence[str],
        sent: Sequence[int],
        tag: str,
        process_set: ProcessSet | None,
    ) -> bool:
        """Return whether all is to be dropped, or raise on every rank; all ranks call this."""
        cleared = [names[i] for i, gradient in sorted(self.left.items()) if gradient is None]
        replaced = [names[i] for i, gradient in sorted(self.left.items()) if gradient is not None]
        local_report: list[Any] = [self.failure, cleared, replaced, self.are_all(sent)]
        if process_set is None:
            everyone: dict[int, Any] = {rank(): local_report}
        else:
            local_report = local_report if sent or self.failure else []
            gathered = gather(local_report, f"{tag}.changes", process_set)
            everyone = dict(zip(members(process_set), gathered, strict=False))
        reports = {worker: report for worker, report in everyone.items() if report}
        failures = {worker: report[0] for worker, report in reports.items() if report[0]}
        if failures and (len(failures) < len(everyone) or set(failures.values()) != {RAISED}):
            failure = next(iter(failures.values()))
            ranks = [worker for worker in failures if failures[worker] == failure]
            raise RanksDisagreeError(
                f"{failure} on {_ranks(ranks)}: no "
                "rank has applied this step's gradients, as they are not whole. Go on with the "
                "next step on every rank: zero_grad(), then the next batch."
            )
        if failures:
            _log.warning("backward() raised on every rank: step() has applied no gradient")
        if all(report[-1] for report in reports.values()):
            return True
        first = next(iter(reports.values()))
        if all(report == first for report in reports.values()):
            if replaced and self.refused:
                raise HvdPipeError(
                    f"the gradient of {replaced[0]!r} was replaced by another tensor after "
                    "backward() and before step(), which applies the average of the step before: "
                    "read that first (optimizer.synchronize(), or any use of p.grad)."
                )
            return False
        for place, did in ((1, "cleared"), (2, "replaced by another tensor")):
            listed = {name for report in reports.values() for name in report[place]}
            for name in sorted(listed, key=list(names).index):
                ranks = [worker for worker, report in reports.items() if name in report[place]]
                if len(ranks) < len(reports):
                    raise RanksDisagreeError(
                        f"the gradient of {name!r} was {did} after backward() and before step() "
                        f"on {_ranks(ranks)}, and not on all ranks: no rank has applied this "
                        "step's gradients. Do the same on every rank."
                    )
        raise RanksDisagreeError(
            "gradients were cleared after backward() and before step() on some ranks, and other "
            "ranks computed other ones. Do the same on every rank."
        )


def _ranks(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
