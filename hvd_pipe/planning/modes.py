"""The modes of a pipeline: when weights are updated, and which version a minibatch sees.

=============  ======================  =============================  ==========================
mode           update                  gradient of minibatch b at     versions in memory
=============  ======================  =============================  ==========================
stash          after each minibatch    ``w_s[b - (n - 1 - s)]``       minibatches in flight
vertical-sync  after each minibatch    ``w[b - (n - 1)]``, any stage  those of the first stage
2bw            after m microbatches    ``w[b - 1]``                   two
flush          after m microbatches    ``w[b]``: equal to one worker  one
gpipe          after m microbatches    ``w[b]``: equal to one worker  one, m microbatches kept
=============  ======================  =============================  ==========================
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["MODES", "Mode", "mode_named"]


@dataclass(frozen=True)
class Mode:
    """One way to run a pipeline.

    Args:
        name: The user's word for it.
        method: Its schedule, one of :data:`hvd_pipe.planning.schedule.METHODS`.
        versions: What the planner counts, one of :data:`hvd_pipe.planning.partition.VERSIONS`.
        coalesces: Whether an update takes a minibatch of several microbatches.
        synchronous: Whether all stages end a minibatch before the next begins.
    """

    name: str
    method: str
    versions: str
    coalesces: bool
    synchronous: bool = False


MODES = {
    mode.name: mode
    for mode in (
        Mode("stash", "1f1b", "stash", coalesces=False),
        Mode("vertical-sync", "1f1b-vertical-sync", "stash", coalesces=False),
        Mode("2bw", "2bw", "2bw", coalesces=True),
        Mode("flush", "1f1b-flush", "flush", coalesces=True, synchronous=True),
        Mode("gpipe", "gpipe", "flush", coalesces=True, synchronous=True),
    )
}


def mode_named(name: str) -> Mode:
    """Return a mode by its name.

    Raises:
        ValueError: There is none of that name.

    Example:
        >>> mode_named("2bw").versions
        '2bw'
    """
    if name not in MODES:
        raise ValueError(f"mode must be one of {', '.join(MODES)}, got {name!r}")
    return MODES[name]
