#!/usr/bin/env python3
"""Draw the timelines of the strategies' pages, from simulations of hvd_pipe.planning.

    python docs/pictures/timelines.py

It writes one SVG file for each page beside itself. A picture has a panel for each strategy, and a
panel has two rows: one worker, and the link. The model and the networks are made up. The unit of
time is one step's computation. Pictures bring their own background, which is dark where the
reader's system is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from xml.sax.saxutils import escape

from hvd_pipe.planning.cluster import Cluster, Link, Network
from hvd_pipe.planning.profile import LayerProfile, ModelProfile
from hvd_pipe.planning.simulate import simulate
from hvd_pipe.timeline import Event

FOLDER = Path(__file__).resolve().parent

FORWARD_S, BACKWARD_S = 1 / 3, 2 / 3  # of a step's computation, which takes 1
LAYERS, GRADIENT_BYTES = 8, 1000
LAYER = LayerProfile("layer", GRADIENT_BYTES, BACKWARD_S / LAYERS, FORWARD_S / LAYERS)
MODEL = ModelProfile(tuple(replace(LAYER, name=f"layer {i}") for i in range(LAYERS)))

WIDTH, LEFT, RIGHT = 560, 66, 12
BAR, ROW, PANEL, TITLE = 26, 30, 100, 24  # heights
CHARACTER = 8.5  # width of one

STYLE = """
  text { font: 15px system-ui, sans-serif; fill: #222; }
  .bar { fill: #111; text-anchor: middle; }
  .axis { font-size: 13px; text-anchor: middle; }
  .title { font-weight: 600; }
  .page { fill: #fff; }
  .lane { fill: #eff0f2; }
  line { stroke: #c5c9ce; }
  rect { stroke: none; }
  .forward { fill: #a5d4ee; }
  .backward { fill: #5aa9d6; }
  .wait { fill: #f3aba4; }
  .even { fill: #f2c14e; }
  .odd { fill: #a8d08d; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e4e4e4; }
    .page { fill: #17191c; }
    .lane { fill: #282b30; }
    line { stroke: #4a4f57; }
  }
"""


@dataclass(frozen=True)
class Panel:
    """One strategy on one network, from the first step on.

    Args:
        title: What stands above it.
        method: The strategy, as `hvd_pipe.planning.methods.parse` reads it.
        allreduce_s: Time of one all-reduce of all gradients, without latency.
        latency_s: Of each message.
    """

    title: str
    method: str
    allreduce_s: float
    latency_s: float = 0.0

    def events(self, steps: int) -> tuple[Event, ...]:
        """What worker 0 and the link do in the first steps."""
        # An all-reduce in a ring of two workers is two messages, each of half of the bytes.
        beta = self.allreduce_s / (LAYERS * GRADIENT_BYTES)
        network = Network(Link(alpha=self.latency_s / 2, beta=beta))
        run = simulate(MODEL, Cluster(2, network), self.method, iterations=steps)
        return run.timeline.events


PICTURES = {
    "merged-gradient": (
        Panel("one message for each tensor (plan=wfbp)", "wfbp", 0.6, 0.08),
        Panel("one message (plan=single)", "single", 0.6, 0.08),
        Panel("merged-gradient", "merged-gradient", 0.6, 0.08),
    ),
    "pipe-sgd": (
        Panel("merged-gradient", "merged-gradient", 0.9, 0.01),
        Panel("pipe-sgd", "pipe-sgd", 0.9, 0.01),
    ),
    "cocod": (
        Panel("pipe-sgd", "pipe-sgd", 3.0),
        Panel("cocod:period=4", "cocod:period=4", 3.0),
        Panel("cocod:period=4,fragments=4", "cocod:period=4,fragments=4", 3.0),
    ),
    "auto": (
        Panel("m = 0.2 c: merged-gradient", "merged-gradient", 0.2),
        Panel("m = 0.9 c: pipe-sgd", "pipe-sgd", 0.9),
        Panel("m = 3 c: cocod:period=4", "cocod:period=4", 3.0),
    ),
}
SPANS = {"merged-gradient": 4, "pipe-sgd": 4, "cocod": 9, "auto": 9}
"""How many steps' computation a picture is wide."""


def draw(panels: Sequence[Panel], span: int) -> str:
    """Return a picture as SVG.

    Args:
        panels: From the top down.
        span: Where time ends, in steps' computation.
    """
    scale = (WIDTH - LEFT - RIGHT) / span
    bottom = len(panels) * PANEL
    height = bottom + 2 * ROW
    parts = [f'<rect class="page" width="{WIDTH}" height="{height}" rx="6"/>']
    for index, panel in enumerate(panels):
        top = index * PANEL + TITLE
        parts.append(_text(LEFT, top - 7, panel.title, "title"))
        for lane, name in enumerate(("worker", "link")):
            y = top + lane * ROW
            parts.append(_text(10, y + BAR - 8, name))
            parts.append(_rect("lane", LEFT, y, span * scale, BAR))
        for event in panel.events(steps=span + 3):
            if event.category != "ready" and event.start_s < span:
                y = top + ROW * (event.category == "allreduce")
                width = (min(event.end_s, span) - event.start_s) * scale
                parts += _bar(event, LEFT + event.start_s * scale, y, width)
    for tick in range(span + 1):
        x = LEFT + tick * scale
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{bottom - 10}" y2="{bottom - 4}"/>')
        parts.append(_text(x, bottom + 10, str(tick), "axis"))
    parts += _legend(bottom + ROW + 8)
    size = f'width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size}>'
    return "\n".join([head, f"<style>{STYLE}</style>", *parts, "</svg>\n"])


def _bar(event: Event, x: float, y: float, width: float) -> Iterator[str]:
    """An event, with the number of its step where there is room."""
    step = int(str(event.args["step"]))
    sent = event.category == "allreduce"
    yield _rect(("even", "odd")[step % 2] if sent else event.category, x, y, width, BAR)
    letter = {"forward": "F", "backward": "B"}.get(event.category, "")
    text = "waits" if event.category == "wait" else f"{letter}{step}"
    if len(text) * CHARACTER + 4 <= width:
        yield _text(x + width / 2, y + BAR - 8, text, "bar")


def _legend(y: float) -> Iterator[str]:
    x = float(LEFT)
    for name, text in (
        ("forward", "forward"),
        ("backward", "backward"),
        ("wait", "waits"),
        ("even", ""),
        ("odd", "messages of a step"),
    ):
        yield _rect(name, x, y, 16, 14)
        x += 20
        if text:
            yield _text(x, y + 12, text)
            x += len(text) * CHARACTER + 12


def _rect(name: str, x: float, y: float, width: float, height: float) -> str:
    gap = 1.0 if name != "lane" and width > 4 else 0.0  # parts it from the next
    size = f'width="{width - gap:.1f}" height="{height}"'
    return f'<rect class="{name}" x="{x:.1f}" y="{y:.1f}" {size}/>'


def _text(x: float, y: float, text: str, name: str = "") -> str:
    kind = f' class="{name}"' if name else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{kind}>{escape(text)}</text>'


def main() -> None:
    for name, panels in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(draw(panels, SPANS[name]))


if __name__ == "__main__":
    main()
