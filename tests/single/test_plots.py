"""Pictures: their size, what is in their legends and titles, and what they refuse."""

from __future__ import annotations

import doctest
import math
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hvd_pipe import _pictures
from hvd_pipe.cli import plots
from hvd_pipe.timeline import CATEGORIES, Event, Timeline


def steps(workers: int, count: int, scale: float = 1.0) -> Timeline:
    """Synchronous steps with two overlapping messages each."""
    events = []
    for worker in range(workers):
        for step in range(count):
            at = step * 0.04 * scale
            for category, start, length in (
                ("forward", 0.0, 0.010),
                ("backward", 0.010, 0.020),
                ("wait", 0.030, 0.008),
                ("update", 0.038, 0.002),
            ):
                name = f"step {step}"
                begin = at + start * scale
                events.append(Event(name, category, worker, "compute", begin, length * scale))
            for bucket, start in enumerate((0.020, 0.028)):
                name, begin = f"bucket {bucket}", at + start * scale
                events.append(Event(name, "ready", worker, "compute", begin, 0.0))
                events.append(Event(name, "allreduce", worker, "network", begin, 0.010 * scale))
    return Timeline(tuple(events), "steps")


def width(path: Path) -> int:
    """The width in a PNG's header, in pixels."""
    return int.from_bytes(path.read_bytes()[16:20], "big")


def text_of(path: Path, draw: Any, *args: object) -> str:
    """The picture as SVG with its words as text."""
    import matplotlib as mpl  # noqa: PLC0415

    with mpl.rc_context({"svg.fonttype": "none"}):
        draw(*args, path)
    return path.read_text()


def rows(methods: int, counts: tuple[int, ...]) -> list[dict[str, object]]:
    return [
        {
            "workers": n,
            "method": f"method {m}",
            "speedup": n * 0.1 / (0.1 + 0.01 * m * math.log2(n)),
            "exposed_s": 0.01 * m * math.log2(n),
        }
        for m in range(methods)
        for n in counts
    ]


def test_doctests() -> None:
    for module in (plots, _pictures):
        assert doctest.testmod(module).failed == 0


def test_every_category_has_a_colour_of_its_own() -> None:
    assert tuple(_pictures.COLOURS) == CATEGORIES
    assert len(set(_pictures.COLOURS.values())) == len(CATEGORIES)


@pytest.mark.parametrize(
    "timeline",
    [
        steps(1, 1),
        steps(2, 3),
        steps(32, 4),
        steps(2, 400),
        steps(2, 3, scale=1e-6),
        steps(2, 3, scale=1e5),
        Timeline((Event("a", "ready", 5, "compute", 3.0, 0.0),)),
        Timeline((Event("a$b_{", "send", 0, "stage 2", 1e6, 1e-9),)),
    ],
    ids=["1", "2", "32", "long", "short", "huge", "instant", "speck"],
)
def test_timelines_of_all_sizes_are_1200_pixels_wide(tmp_path: Path, timeline: Timeline) -> None:
    _pictures.draw_timeline(timeline, tmp_path / "a.png")
    assert width(tmp_path / "a.png") == 1200


def test_a_legend_has_the_categories_that_are_used(tmp_path: Path) -> None:
    text = text_of(tmp_path / "a.svg", _pictures.draw_timeline, steps(2, 2))
    for category in ("forward", "backward", "ready", "allreduce", "wait", "update"):
        assert f">{category}<" in text
    for category in ("send", "recv", "codec"):
        assert f">{category}<" not in text
    assert ">time, ms<" in text
    assert ">worker 1<" in text


def test_a_picture_says_what_it_leaves_out(tmp_path: Path) -> None:
    text = text_of(tmp_path / "a.svg", _pictures.draw_timeline, steps(32, 2))
    assert "(8 of 32 workers; 24 left out)" in text
    assert ">worker 7<" in text
    assert ">worker 8<" not in text
    text = text_of(tmp_path / "b.svg", _pictures.draw_timeline, steps(1, 400))
    assert " of 16 s)" in text


def test_a_whole_picture_leaves_no_steps_out(tmp_path: Path) -> None:
    draw = partial(_pictures.draw_timeline, whole=True)
    text = text_of(tmp_path / "a.svg", draw, steps(1, 400))
    assert ">steps<" in text  # the title, with no "16 of ..."


def test_a_pipeline_s_boxes_have_numbers(tmp_path: Path) -> None:
    names = ("forward 12.3", "backward 7", "activation 8")
    kinds = ("forward", "backward", "wait")
    events = [
        Event(name, kind, worker, "compute", float(at), 1.0)
        for worker in range(2)
        for at, (name, kind) in enumerate(zip(names * 8, kinds * 8, strict=True))
    ]
    text = text_of(tmp_path / "a.svg", _pictures.draw_timeline, Timeline(tuple(events)))
    assert ">12.3<" in text
    assert ">7<" in text
    assert ">8<" not in text  # a wait's box has its whole name, or none
    assert ">compute<" not in text  # each worker has one lane only


def test_a_sweep_has_every_method_and_the_ideal(tmp_path: Path) -> None:
    counts = (4, 16, 64, 2048)
    text = text_of(tmp_path / "a.svg", plots.draw_sweep, rows(9, counts))
    for label in ("ideal", "method 0", "method 8", "speedup over one worker", "2048"):
        assert f">{label}<" in text
    assert "exposed communication, ms a step" in text
    plots.draw_sweep(rows(1, (3,)), tmp_path / "a.png")  # one point; nothing exposed
    assert width(tmp_path / "a.png") == 1200
    with pytest.raises(ValueError, match="without rows"):
        plots.draw_sweep([], tmp_path / "b.png")


def test_equal_pictures_are_equal_files(tmp_path: Path) -> None:
    for name in ("a", "b"):
        _pictures.draw_timeline(steps(2, 2), tmp_path / f"{name}.png")
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


def test_an_empty_timeline_and_an_unknown_suffix_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="without events"):
        _pictures.draw_timeline(Timeline(()), tmp_path / "a.png")
    with pytest.raises(ValueError, match="xyz"):
        _pictures.draw_timeline(steps(1, 1), tmp_path / "a.xyz")


def test_pyplot_is_not_needed_and_matplotlib_only_to_draw(tmp_path: Path) -> None:
    script = f"""
import sys
from hvd_pipe import _pictures
from hvd_pipe.timeline import Event, Timeline
assert "matplotlib" not in sys.modules
event = Event("a", "wait", 0, "compute", 0.0, 1.0)
_pictures.draw_timeline(Timeline((event,)), {str(tmp_path)!r} + "/a.png")
assert "matplotlib.pyplot" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_without_matplotlib_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r"pip install 'hvd_pipe\[plot\]'"):
        steps(1, 1).save(tmp_path / "a.png")
