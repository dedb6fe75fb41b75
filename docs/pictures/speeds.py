#!/usr/bin/env python3
"""Draw the speed of each worker by how long communication takes, from benchmarks/results/.

    python docs/pictures/speeds.py

It writes docs/throughput-exact-1.png (steps of 120 ms) and docs/throughput-exact-2.png (1.2 s).
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tables import BACKWARD, DDP, DEFAULT, FORWARD, HOROVOD, MODELS, ROOT, best, measured

from hvd_pipe._pictures import figure_of, save

LINES = {
    "PyTorch DDP, its best buckets": (DDP, "#CC79A7", "v"),
    "stock Horovod, polling or asleep": (HOROVOD, "#000000", "s"),
    BACKWARD: ([BACKWARD], "#E69F00", "o"),
    FORWARD: ([FORWARD], "#D55E00", "*"),
    "merged-gradient (default)": ([DEFAULT], "#D55E00", "*"),
    "pipe-sgd": (["pipe-sgd"], "#56B4E9", "^"),
    "pipe-sgd, int8": (["pipe-sgd+int8"], "#0072B2", "D"),
    "cocod:period=8": (["cocod:period=8"], "#009E73", "P"),
}
PICTURES = {
    "throughput-exact-1": ("exact-120ms", "120 ms and 3 MiB", FORWARD),
    "throughput-exact-2": ("exact-1200ms", "1.2 s and 30 MiB", "merged-gradient (default)"),
}
"""The results that a picture shows, their steps, and the line that it leaves out."""


def draw(results: str, steps: str, left_out: str, path: Path) -> None:
    """Draw a panel for each model, and a line for each contestant that was raced in all cells."""
    cells = measured(results)
    models = [model for model in MODELS if any(model == name for _, name in cells)]
    figure, panels = figure_of(4.4, columns=len(models))
    for model, axes in zip(models, panels, strict=True):
        ratios = sorted(r for r, name in cells if name == model)
        times = [cells[r, model] for r in ratios]
        for label, (names, colour, marker) in LINES.items():
            if label != left_out and all(name in cell for name in names for cell in times):
                speeds = [cell["single"] / best(cell, names) for cell in times]
                axes.plot(ratios, speeds, color=colour, marker=marker, label=label)
        axes.set_xscale("log", base=2)
        axes.set_xticks(ratios, [f"{r:g}" for r in ratios])
        axes.minorticks_off()
        axes.set_ylim(0.0, 1.1)
        axes.grid(color="#E5E5E5", lw=0.8)
        axes.set_xlabel("communication / computation")
        axes.set_title(MODELS[model])
    panels[0].set_ylabel("speed of each worker / of one alone")
    title = f"4 workers over Gloo on one machine; emulated computation; steps of {steps}"
    figure.suptitle(title, fontsize="medium")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    save(figure, path)


for name, picture in PICTURES.items():
    draw(*picture, ROOT / "docs" / f"{name}.png")
