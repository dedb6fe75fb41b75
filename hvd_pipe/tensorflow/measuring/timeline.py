"""What a running job does and when: ``HVD_PIPE_TIMELINE=dir`` writes ``dir/rank{N}.json``.

    allreduce   a message, from its launch to its arrival; codecs' work included
    wait        an eager step is blocked until a message has arrived
    backward    of an eager step, under a tape
    update      of an eager step: the user's optimizer
    ready       the weights that a round of CoCoD averages are complete

These are the host's moments. TensorFlow tells nobody when it runs the operations of a compiled
step, so of that only what runs beside it is shown: CoCoD's rounds. A pipeline records its passes,
waits and updates itself: see `hvd_pipe.pipeline.executor`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import tensorflow as tf
from horovod.tensorflow.mpi_ops import ProcessSet, rank, size

from hvd_pipe.runtime.consensus import Description
from hvd_pipe.runtime.timeline import OFF, Recorder, open_recorder
from hvd_pipe.tensorflow.agree import gather

_log = logging.getLogger("hvd_pipe")

active: Recorder = OFF
"""The process's recorder; `OFF` where ``HVD_PIPE_TIMELINE`` is not set."""

_has_warned = False


def describe() -> Description:
    """Open this rank's file if that is asked for, and return what all ranks must have alike."""
    global active
    active, alike = open_recorder(active, Recorder, rank(), size())
    return alike


def start(process_set: ProcessSet) -> None:
    """Take an optimizer or tape in, where a timeline is asked for; all its ranks do this."""
    if active.is_on:
        active.set_clock(gather, f"hvd_pipe.tf.{process_set.process_set_id}.clock", process_set)


@contextmanager
def sending(name: str, nbytes: int) -> Iterator[None]:
    """Show what is done within this as a message that an eager step waits for."""
    begun, is_shown = active.now(), tf.executing_eagerly()
    if is_shown:
        operation = active.launched(name, nbytes)
    yield
    if is_shown:
        operation.complete()
        active.waited(begun, name)


@contextmanager
def updating(when: tf.Tensor | None) -> Iterator[None]:
    """Show what is done within this as the update of an eager step, ``when`` there is one."""
    begun = active.now()
    yield
    if active.is_on and tf.executing_eagerly() and (when is None or bool(when)):
        active.span("update", "update", begun, active.now())
    end_step()


def end_step() -> None:
    """Note that an eager step has ended; say once that compiled ones are not shown."""
    global _has_warned  # noqa: PLW0603 - one a process
    if active.is_on and tf.executing_eagerly():
        active.end_step()
    elif active.is_on and not _has_warned and rank() == 0:
        _has_warned = True
        _log.warning(
            "HVD_PIPE_TIMELINE does not show the operations of a compiled step: HOROVOD_TIMELINE "
            "shows its messages, and tf.profiler the rest."
        )
