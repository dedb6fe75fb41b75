"""What all pictures share: size, colours, units."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["COLOURS", "DPI", "GREY", "WIDTH_IN", "figure_of", "save", "unit_of_time"]

COLOURS: Mapping[str, str] = {
    "forward": "#56B4E9",
    "backward": "#0072B2",
    "ready": "#000000",
    "allreduce": "#D55E00",
    "wait": "#BDBDBD",
    "update": "#009E73",
    "send": "#E69F00",
    "recv": "#CC79A7",
    "codec": "#F0E442",
}
"""The colour of each category of events."""

GREY = "#555555"
WIDTH_IN, DPI = 12.0, 100


def figure_of(height_in: float, columns: int = 1, widths: Sequence[float] | None = None) -> Any:
    """Return a figure 1200 pixels wide and its axes."""
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415
    except ImportError as error:
        raise ImportError("pictures need matplotlib: pip install 'hvd_pipe[plot]'") from error
    figure = Figure(figsize=(WIDTH_IN, height_in), dpi=DPI, layout="constrained")
    axes = figure.subplots(1, columns, width_ratios=widths)
    for one in axes if columns > 1 else (axes,):
        one.set_axisbelow(True)
        for side in ("top", "right"):
            one.spines[side].set_visible(False)
    return figure, axes


def save(figure: Figure, path: str | Path) -> None:
    # Without the date, equal pictures are equal files.
    date: dict[str, Any] = {"Date": None} if Path(path).suffix.lower() == ".svg" else {}
    figure.savefig(path, dpi=DPI, facecolor="white", metadata=date)


def unit_of_time(seconds: float, below_ms: bool = True) -> tuple[float, str]:
    """Return what to multiply seconds by, and the unit: ms unless that reads badly.

    Example:
        >>> unit_of_time(0.3), unit_of_time(2e-5), unit_of_time(60.0)
        ((1000.0, 'ms'), (1000000.0, 'µs'), (1.0, 's'))
    """
    if seconds > 30.0:
        return 1.0, "s"
    if below_ms and seconds < 5e-4:
        return 1e6, "µs"
    return 1e3, "ms"
