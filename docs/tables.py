#!/usr/bin/env python3
"""Write the tables of README and docs/ that come from measurements, and outputs of `hvd-pipe`.

    python docs/tables.py            # name the pages that are out of date
    python docs/tables.py --write    # and write them

Measurements are the files of `benchmarks/results/`. A table stands between two marks, which are
comments that no reader sees: ``<!-- NAME -->`` and ``<!-- end -->``. Where a page was out of date,
the exit status is 1, so that `make lint` fails. A second run then has nothing to write.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))
sys.path.append(str(Path(__file__).resolve().parents[1] / "docker" / "matrix"))
sys.path.append(str(Path(__file__).resolve().parents[1] / "torch_examples"))

import convergence
import convergence_report
import demo
import kill_loop_check
import matrix
import published
import scale
import soak
import watch_scale
from harness import markdown

from hvd_pipe.cli.main import main as hvd_pipe
from hvd_pipe.units import format_bytes, format_seconds
from tests import pages

ROOT = pages.ROOT
END = "<!-- end -->"
MODELS = {
    "resnet50": "ResNet-50",
    "vgg16": "VGG-16",
    "densenet121": "DenseNet-121",
    "transformer": "transformer",
}
HOROVOD = ("horovod", "horovod:asleep")
DDP = ("ddp", "ddp:buckets=8")
DEFAULT = "merged-gradient"
BACKWARD = "merged-gradient:overlap=backward"
FORWARD = "merged-gradient:overlap=forward"

CARRIED = ("4 KiB", "256 KiB", "1 MiB", "4 MiB", "16 MiB")
GROUPS = ("horovod", "torch:1/8")

Times = dict[str, float]  # ms a step, by contestant; also of one all-reduce
Cells = dict[tuple[float, str], Times]  # by r and model


def read(name: str) -> Any:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())


def measured(name: str, workers: int = 4, backend: str = "gloo", busy: float = 0.0) -> Cells:
    """The cells of a file that were measured in this way, by r and then in the order of models."""
    cells = {}
    for cell in read(name):
        if (cell["workers"], cell["backend"], cell["settings"]["busy"]) == (
            workers,
            backend,
            busy,
        ):
            times = {row["contestant"]: 1e3 * row["seconds"] for row in cell["rows"]}
            if BACKWARD not in times:  # the default, when this was measured
                times[BACKWARD] = times[DEFAULT]
            times["all-reduce"] = 1e3 * cell["all_reduce_s"][str(cell["gradient_bytes"])]
            cells[cell["ratio"], cell["model"]] = times
    return dict(sorted(cells.items(), key=lambda item: (item[0][0], [*MODELS].index(item[0][1]))))


def best(times: Times, names: Sequence[str]) -> float:
    return min(times[name] for name in names)


def what_to_expect() -> str:
    """The first page's table: speed beside stock Horovod, what changes, and what it costs."""
    images = [line.split("|") for line in of_convergence()["images 2"].splitlines()]
    accuracy = {cells[1].strip(): f"{cells[4].strip()}%" for cells in images if len(cells) > 4}
    cells = measured("exact-120ms")
    body = []
    for label, names, learns_as, updates, memory in (
        ("stock Horovod", ["horovod"], "stock Horovod", "exact", "1, and up to 128 MiB"),
        ("PyTorch DDP", DDP, None, "exact", "1 to 2"),
        ("`merged-gradient`, the default", [DEFAULT], "`merged-gradient`", "exact", "1"),
        (
            *("`pipe-sgd:warmup_steps=50`", ["pipe-sgd"], "`pipe-sgd:warmup_steps=50`"),
            *("gradients one step old", "2"),
        ),
        (
            *("`cocod:period=8`", ["cocod:period=8"], "`cocod:period=8`"),
            *("models averaged every 8 steps", "3"),
        ),
    ):
        speed = [
            _range([t["horovod"] / best(t, names) for (at, _), t in cells.items() if at == r])
            for r in (1, 4)
        ]
        reached = accuracy[learns_as] if learns_as else "not run"
        body.append([label, *speed, updates, reached, memory])
    return markdown(["", "speed at m = c", "m = 4 c", "updates", "accuracy", "memory"], body)


def demo_table() -> str:
    return f"```text\n{demo.aligned(demo.table(read('demo')))}\n```"


STEP: dict[str, Callable[[Times], str]] = {
    "stock Horovod": lambda t: f"{best(t, HOROVOD):.0f}",
    "PyTorch DDP": lambda t: f"{best(t, DDP):.0f}",
    "`overlap=backward`": lambda t: f"{t[BACKWARD]:.0f}",
    "`overlap=forward`": lambda t: f"{t[FORWARD]:.0f}",
    "one worker alone": lambda t: f"{t['single']:.0f}",
}
PLAIN: dict[str, Callable[[Times], str]] = {
    "the default": lambda t: f"{t[DEFAULT]:.0f}",
    "the best peer / the default": lambda t: f"{best(t, HOROVOD + DDP) / t[DEFAULT]:.2f}",
}
PEER = {
    "the best peer / `overlap=forward`": lambda t: f"{best(t, HOROVOD + DDP) / t[FORWARD]:.2f}",
}
LIMIT = {
    "max(c, m) / `overlap=forward`": (
        lambda t: f"{max(t['single'], t['all-reduce']) / t[FORWARD]:.2f}"
    ),
}


def steps(name: str, r: str, columns: Mapping[str, Callable[[Times], str]]) -> str:
    """Milliseconds of a step: a line for each r and model."""
    body = [
        [MODELS[model], f"{ratio:g}", *(of(times) for of in columns.values())]
        for (ratio, model), times in measured(name).items()
    ]
    return markdown(["ms a step", r, *columns], body)


def by_model() -> str:
    """How many times as fast as stock Horovod's default each strategy is."""
    columns = {
        "one worker by itself": ["single"],
        "Horovod, polling or asleep": HOROVOD,
        "DDP's best": DDP,
        "`merged-gradient`": [DEFAULT],
        "`overlap=backward`": [BACKWARD],
        "`overlap=forward`": [FORWARD],
        "`pipe-sgd`": ["pipe-sgd"],
        "`pipe-sgd`, int8": ["pipe-sgd+int8"],
        "`cocod:period=8`": ["cocod:period=8"],
    }
    body = [
        [MODELS[model], f"{r:g}"]
        + [f"{times['horovod'] / best(times, names):.2f}" for names in columns.values()]
        for (r, model), times in measured("exact-120ms").items()
    ]
    return markdown(["model", "r", *columns], body)


def limits() -> str:
    """The shortest step that a method allows, divided by the measured one."""
    columns: dict[str, Callable[[Times], float]] = {
        "`overlap=forward`": lambda t: max(t["single"], t["all-reduce"]) / t[FORWARD],
        "`pipe-sgd`": lambda t: max(t["single"], t["all-reduce"]) / t["pipe-sgd"],
        "`cocod:period=8`": lambda t: t["single"] / t["cocod:period=8"],
    }
    cells = measured("exact-120ms")
    body = [
        [f"{r:g}"]
        + [_range([of(t) for (at, _), t in cells.items() if at == r]) for of in columns.values()]
        for r in sorted({r for r, _ in cells})
    ]
    return markdown(["r", *columns], body)


def _range(values: Sequence[float]) -> str:
    least, most = f"{min(values):.2f}", f"{max(values):.2f}"
    return least if least == most else f"{least} to {most}"


WIDE: dict[str, Sequence[str]] = {
    "one worker by itself": ["single"],
    "no overlap": ["conventional"],
    "Horovod, best of its settings": ["horovod"],
    "DDP": ["ddp"],
    "DDP, fp16": ["ddp+fp16"],
    "DDP, PostLocalSGD": ["ddp:post-local"],
    "`merged-gradient`": ["merged-gradient"],
    "bf16": ["merged-gradient+bf16"],
    "int8": ["merged-gradient+int8"],
    "`pipe-sgd`": ["pipe-sgd"],
    "`pipe-sgd`, bf16": ["pipe-sgd+bf16"],
    "`pipe-sgd`, int8": ["pipe-sgd+int8"],
    "`cocod:period=8`": ["cocod:period=8"],
    "`cocod:period=8`, int8": ["cocod:period=8+int8"],
}


def _over_stock(cell: Mapping[str, Any], names: Sequence[str]) -> float:
    """How many times as fast as stock Horovod's default the best setting of a contestant was."""
    stock = next(
        row["seconds"]
        for row in cell["rows"]
        if row["team"] == "stock" and row["contestant"] == "horovod"
    )
    return float(stock) / min(row["seconds"] for row in cell["rows"] if row["contestant"] in names)


def wide(workers: int) -> str:
    """The older run: a line for each contestant, a column for each r, ranges over models."""
    cells = [
        cell
        for cell in read("throughput")
        if (cell["workers"], cell["compute"], cell["settings"]["compute_ms"])
        == (workers, "emulated", 120)
    ]
    ratios = sorted({cell["ratio"] for cell in cells})
    body = [
        [label]
        + [_range([_over_stock(c, names) for c in cells if c["ratio"] == r]) for r in ratios]
        for label, names in WIDE.items()
    ]
    return markdown(["", *(f"r = {r:g}" for r in ratios)], body)


def more_cells() -> str:
    cells = [
        cell
        for cell in read("throughput")
        if (cell["compute"], cell["settings"]["compute_ms"]) != ("emulated", 120)
    ]
    heads = [f"{MODELS[cell['model']]}, {cell['workers']} workers" for cell in cells]
    body = [
        [label, *(f"{_over_stock(cell, names):.2f}" for cell in cells)]
        for label, names in WIDE.items()
    ]
    return markdown(["", *heads], body)


def other_ways() -> str:
    ways = {
        "another process takes half of one core": measured("exact-120ms", busy=0.5),
        "Horovod over MPI": measured("exact-120ms", backend="mpi"),
        "two workers that really compute on one core each, 90 MiB, r = 1.11": measured(
            "exact-cpu", workers=2
        ),
    }
    body = [
        [MODELS[model], way, *(of(times) for of in {**STEP, **PLAIN}.values())]
        for way, cells in ways.items()
        for (_, model), times in cells.items()
    ]
    return markdown(["ms a step", "", *STEP, *PLAIN], body)


def slow_links() -> str:
    """A column for each cell; a contestant that was not raced in it has no number."""
    cells = read("cocod")
    times = [{row["contestant"]: 1e3 * row["seconds"] for row in c["rows"]} for c in cells]
    names = dict.fromkeys(name for cell in times for name in cell)
    strategies = sorted(
        (n for n in names if n.startswith("cocod")),
        key=lambda n: ("within" in n, int(n.partition("period=")[2].partition(",")[0]), len(n)),
    )
    shown = {"horovod": "stock Horovod", **{n: f"`{n}`" for n in strategies}}
    shown["single"] = "one worker by itself"
    assert set(shown) == set(names)
    heads = [
        f"r = {c['ratio']:g}"
        + (", two workers on each of two hosts" * ("per_host" in c["settings"]))
        for c in cells
    ]
    body = [
        [label, *(f"{cell[name]:.0f}" if name in cell else "" for cell in times)]
        for name, label in shown.items()
    ]
    return markdown(["ms a step", *heads], body)


def best_settings() -> str:
    body = []
    for cell in read("exact-sweep"):
        times = [(row["contestant"], 1e3 * row["seconds"]) for row in cell["rows"]]
        stock = min(ms for name, ms in times if name in HOROVOD)
        body.append(
            [MODELS[cell["model"]], f"{stock:.0f}", f"{dict(times)['merged-gradient']:.0f}"]
        )
    return markdown(["ms a step", "the best of five settings", "`merged-gradient`"], body)


def overhead() -> str:
    found = read("overhead")
    parts, body = ("hook", "copy", "launch", "step"), []
    for name, line in found["lines"].items():
        more = line["step_s"] / line["plain_s"] - 1
        figures = [f"{1e3 * line[part]:.1f}" for part in ("plain_s", "step_s")]
        figures += [f"{more:.1%}", f"{line['own']:.1%}"]
        body.append([f"`{name}`", *figures, *(f"{1e3 * line[part]:.2f}" for part in parts)])
    heads = ["", "plain SGD, ms", "ms a step", "more", "own code", *(f"{p}, ms" for p in parts)]
    return markdown(heads, body)


def message_costs() -> str:
    parts = ("queue", "negotiate", "wire", "wake", "whole")
    body = []
    for ranks, ways in read("message-cost")["seconds"].items():
        for way, seconds in ways.items():
            size, count, waiting = way.split("/")
            if waiting == "sleeps":
                figures = [f"{1e3 * seconds[part]:.1f}" for part in parts]
                body.append([ranks, f"{count} of {size}", *figures])
    heads = ["until Horovod looks", "negotiation", "wire", "until the thread has noticed", "whole"]
    return markdown(["", "messages", *heads], body)


def carriers() -> str:
    """Milliseconds, and those of the processor of one rank."""
    found = read("carriers")
    sizes = [f"{size}, {way}" for way in ("one by one", "burst") for size in CARRIED]
    body = [
        [where, what, *("{:.1f} ({:.1f})".format(*rows[what][name]) for name in GROUPS)]
        for where, rows in found["rows"].items()
        for what in sizes
    ]
    return markdown(["", f"{found['count']} messages of", "`horovod`", "`torch`"], body)


def spinning() -> str:
    """What one message takes where the main thread asks without a pause."""
    seconds = read("message-cost")["seconds"]["gloo, 4 ranks"]["4 KiB/1/spins"]["whole"]
    return f"{1e3 * seconds:.0f} ms"


def first_steps() -> str:
    body = []
    for rate, runs in read("first-steps")["seconds"].items():
        stock, ours = runs["horovod"], runs["merged-gradient"]
        ratio = median(one / other for one, other in zip(ours, stock, strict=True))
        link = rate.replace("mbit", " Mbit/s")
        body.append([link, f"{median(stock):.2f}", f"{median(ours):.2f}", f"{ratio:.2f}"])
    return markdown(["link", "stock Horovod, s", "`merged-gradient`, s", "times as long"], body)


def pipeline() -> str:
    (cell,) = read("pipedream-gnmt")
    rows = {row["contestant"]: row for row in cell["rows"]}
    pipe, stock = rows["pipedream straight stash"], rows["horovod"]["seconds"]
    promised, took = pipe["predicted"]["seconds"], pipe["seconds"]
    heads = ["ms a batch", "as planned", "stock Horovod", "stock Horovod / PipeDream"]
    figures = [f"{1e3 * took:.0f}", f"{1e3 * promised:.0f}", f"{1e3 * stock:.0f}"]
    return markdown(heads, [[*figures, f"{stock / took:.2f}"]])


def long_runs() -> str:
    runs = [soak.Run.read(run) for run in read("soak")]
    faults = [fault for run in runs for fault in run.faults()]
    if faults:
        sys.exit(f"soak.json: {'; '.join(faults)}")
    return f"```text\n{soak.table(runs)}\n```"


def kill_loop() -> str:
    runs = [kill_loop_check.Run.read(run) for run in read("kill-loop")["runs"].values()]
    for outcome in (outcome for run in runs for outcome in run.outcomes):
        if outcome.kind != "cut" and not set(outcome.by_ranks) <= set(outcome.victims):
            sys.exit(f"kill-loop.json: a rank was named that was no victim: {outcome}")
    return kill_loop_check.table(runs)


def of_convergence() -> dict[str, str]:
    results = json.loads(convergence.RESULTS.read_text())
    convergence.check_data(results)
    keys = [(each["task"], each["contestant"], each["workers"], each["seed"]) for each in results]
    if len(keys) != len(set(keys)) or results != sorted(results, key=convergence.place):
        sys.exit(f"{convergence.RESULTS.name}: runs are there twice, or not in their order")
    tables = convergence_report.tables(results)
    quoted = [f"> {line}".rstrip() for line in convergence.PREDICTED.splitlines()]
    return {
        **{f"{task} {workers}": table for (task, workers), table in tables.items()},
        "sharpness": convergence_report.sharpness(results),
        "links": convergence_report.links(json.loads(convergence.LINKS.read_text())),
        "predicted": "\n".join(quoted),
    }


def of_scale() -> dict[str, str]:
    errors, choices, slopes, *_ = published.tables(published.studies())
    facts = [
        f"- **{study['title']}.** {study['cluster']}. Measured: {study['source']}. "
        f"The network: {study['constants']}. The model: {study['profile']}."
        for study in read("published")
    ]
    return {
        "errors": errors,
        "choices": choices,
        "slopes": slopes,
        "sources": "\n".join(facts),
        "one job": scale.table(read("scale")),
        "watch": watch_scale.table(read("watch-scale")),
    }


def checked() -> dict[str, str]:
    """What `hvd-pipe check` says of scripts of other projects: one whole, all in a table."""
    results = read("check")
    first = results[0]
    body = [
        [
            f"{one['project']}: {one['script']}",
            format_bytes(one["answer"]["profile"]["gradient_bytes"]),
            format_seconds(one["answer"]["compute_s"]),
            f"{one['answer']['ratio']:.2f}",
            *(f"{row['speedup']:.2f}" for row in one["answer"]["rows"][1:4]),
            re.split("[.:]", one["answer"]["verdict"])[0],
        ]
        for one in results
    ]
    columns = ["script", "gradients", "c", "m / c"]
    strategies = ["`merged-gradient`", "`overlap=forward`", "`pipe-sgd`"]
    return {
        "check": f"```console\n$ {first['command']}\n{first['printed']}```",
        "checked": markdown([*columns, *strategies, "answer"], body),
    }


def tables() -> dict[str, dict[str, str]]:
    """The text between each pair of marks, by page."""
    performance = {
        "short steps": steps("exact-120ms", "r", STEP | PLAIN),
        "overhead": overhead(),
        "settings": best_settings(),
        "other ways": other_ways(),
        "slow links": slow_links(),
        "message cost": message_costs(),
        "without a pause": spinning(),
        "first steps": first_steps(),
        "soak": long_runs(),
    }
    return {
        "README.md": {"what to expect": what_to_expect(), "demo": demo_table()},
        "docs/performance.md": performance,
        "docs/overlap-forward.md": {
            "long steps": steps("exact-1200ms", "m / c", {**STEP, **PEER, **LIMIT})
        },
        "docs/throughput.md": {
            "by model": by_model(),
            "limits": limits(),
            "wide 4": wide(4),
            "wide 2": wide(2),
            "more cells": more_cells(),
        },
        "docs/pipedream.md": {"gnmt": pipeline()},
        "docs/faults.md": {"faults": kill_loop()},
        "docs/convergence.md": of_convergence(),
        "docs/scale.md": of_scale(),
        "docs/carriers.md": {"carriers": carriers()},
        "docs/planning.md": checked(),
        "docs/install.md": {"make matrix": matrix.table(json.loads(matrix.RESULTS.read_text()))},
    }


def put(text: str, page: str, name: str, table: str) -> str:
    """Put a table between its marks in a page. What has one line may stand within a line."""
    begin = f"<!-- {name} -->"
    head, found, rest = text.partition(begin)
    _, end, tail = rest.partition(END)
    if not found or not end or begin in tail:
        sys.exit(f"{page} must have once: {begin} ... {END}")
    space = "\n\n" if rest.startswith("\n") else ""
    return f"{head}{begin}{space}{table.strip()}{space}{END}{tail}"


def with_outputs(page: str) -> str:
    """A page with what its commands print: a block of text behind a command is its output."""
    text = (ROOT / page).read_text()
    for command, output in pairwise(pages.blocks(ROOT / page)):
        if output.language == "text":
            with redirect_stdout(io.StringIO()) as said:
                hvd_pipe(shlex.split(command.text)[1:], "hvd-pipe", standalone_mode=False)
            lines = [line.rstrip() for line in said.getvalue().splitlines()]
            old, new = (f"```text\n{each}```" for each in (output.text, "\n".join([*lines, ""])))
            text = text.replace(old, new, 1)
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write the pages")
    write = parser.parse_args().write
    os.chdir(ROOT)
    os.environ["COLUMNS"] = "80"
    written = {"docs/planning.md": with_outputs("docs/planning.md")}
    for page, parts in tables().items():
        text = written.get(page) or (ROOT / page).read_text()
        for name, table in parts.items():
            text = put(text, page, name, table)
        written[page] = text
    old = [page for page, text in written.items() if (ROOT / page).read_text() != text]
    for page in old:
        print(f"{page} was out of date" if write else f"{page} is out of date: --write")
        if write:
            (ROOT / page).write_text(written[page])
    return 1 if old else 0


if __name__ == "__main__":
    sys.exit(main())
