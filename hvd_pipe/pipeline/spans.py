"""A pipeline's part of a timeline: what a worker does for which minibatch, as it is carried out.

    compute   | forward 2 | wait | backward 0 | update 1 |     passes, waits, updates
    network               |s|                 |s|              sends; a replica's all-reduces

A send lasts until the message is handed over, not until it has arrived. A wait for a message that
is there already lasts as long as it takes to unpack. ``3.1`` is microbatch 1 of minibatch 3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hvd_pipe.runtime.timeline.recorder import COMPUTE, SENDS

if TYPE_CHECKING:
    from hvd_pipe.runtime.timeline.recorder import Recorder

__all__ = ["PipelineSpans"]


class PipelineSpans:
    """Notes a pipeline's runs in a recorder, which finds out nothing about passes meanwhile.

    A stage's replicas have a distributed optimizer, by whose hooks a recorder would find the same
    passes once more.

    Args:
        recorder: This process's.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def __enter__(self) -> PipelineSpans:
        self._recorder.told = True
        return self

    def __exit__(self, *_: object) -> None:
        self._recorder.told = False
        self._recorder.file.flush()

    def now(self) -> float:
        """Return this moment, in seconds."""
        return self._recorder.now()

    def span(self, category: str, name: str, start: float, end: float, /) -> None:
        """Note what lasted from ``start`` to ``end``; both are moments of `now`."""
        lane = SENDS if category == "send" else COMPUTE
        if category == "wait":
            lane = self._recorder.wait_lane
        self._recorder.span(category, name, start, end, lane)
        if category == "update":
            self._recorder.next_step()
