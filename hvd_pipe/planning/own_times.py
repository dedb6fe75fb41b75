"""What a worker's own part of a step takes, as seen from its optimizer, which knows no layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hvd_pipe.planning.profile import LayerProfile, ModelProfile

__all__ = ["OwnTimes", "profile_of"]

FORWARD = "(forward)"


@dataclass(frozen=True)
class OwnTimes:
    """Medians over steps, in seconds.

    Args:
        before_s: From the end of a step to the first gradient of the next one.
        ready_s: From the first gradient to each one, by place; one that was not computed is
            ready with the last.
        update_s: The user's optimizer.
    """

    before_s: float
    ready_s: Sequence[float]
    update_s: float


def profile_of(own: OwnTimes, names: Sequence[str], sizes: Sequence[int]) -> ModelProfile:
    """Return a profile with a layer a parameter, in the reverse of the order of readiness.

    Its first layer, ``(forward)``, has all that comes before the first gradient. The first
    gradient is thus ready as backward starts.

    Args:
        own: Measured times.
        names: The parameters' names, by place.
        sizes: Bytes of each gradient, by place.

    Example:
        >>> profile = profile_of(OwnTimes(0.5, [0.25, 0.0], 0.125), ["a", "b"], [8, 4])
        >>> profile.gradient_order(), profile.ready_times().tolist(), profile.compute_s
        (('b', 'a'), [0.0, 0.25], 0.875)
    """
    order = sorted(range(len(names)), key=lambda place: (own.ready_s[place], -place))
    layers, last = [], 0.0
    for place in order:
        seconds = max(0.0, own.ready_s[place] - last)
        layers.append(LayerProfile(names[place], sizes[place], seconds))
        last += seconds
    forward = LayerProfile(FORWARD, 0, 0.0, own.before_s, 0, "all before the first gradient")
    return ModelProfile((forward, *reversed(layers)), update_s=own.update_s)
