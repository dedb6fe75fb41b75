"""Two workers that wait for their network, and what hvd_pipe does about it.

    python torch_examples/demo.py          # in PyTorch: what `make demo` runs
    python torch_examples/demo.py --keras  # in Keras: what `make demo-keras` runs

Two workers train a convolutional net on handwritten digits, in a network namespace of their own
(made by root or in a user namespace), where `tc` limits the link between them: the machine's own
network stays as it is. The limit is such that one all-reduce of all gradients takes as long as
one step computes, which is measured at the start. Plans are made before the clock starts.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray
from tqdm import tqdm

HERE = Path(__file__).resolve().parent
LIMIT = "ip link set lo up && tc qdisc add dev lo root tbf rate 1gbit burst 256k latency 50ms"
BAR = "{desc:<22} {percentage:3.0f}% |{bar:30}| {elapsed}<{remaining}"
COLOURS = {
    "stock Horovod": "#8c564b",
    "PyTorch DDP": "#7f7f7f",
    "merged-gradient": "#1f77b4",
    "overlap=forward": "#2ca02c",
    "pipe-sgd": "#ff7f0e",
    "cocod": "#9467bd",
}


def own_network() -> tuple[list[str], str]:
    """Return how a command begins that gets a network of its own; or nothing, and why not."""
    for tool, package in (("unshare", "util-linux"), ("ip", "iproute2"), ("tc", "iproute2")):
        if shutil.which(tool) is None:
            return [], f"{tool} is missing: apt-get install {package}"
    for words in (["unshare", "--net"], ["unshare", "--net", "--map-root-user"]):
        command = [*words, "sh", "-c", LIMIT]
        probe = subprocess.run(command, capture_output=True, text=True, check=False)
        if probe.returncode == 0:
            return words, ""
    said = probe.stderr.strip() or f"unshare ended with {probe.returncode}"
    return [], (
        f"{said}; run it as root, or where the kernel allows user namespaces, and in a container "
        "with --cap-add SYS_ADMIN,NET_ADMIN"
    )


def run(words: Sequence[str], folder: Path, script: Path) -> dict[str, Any]:
    """Run the workers, show how far they are, and return rank 0's result."""
    horovodrun = Path(sys.executable).with_name("horovodrun")
    if not horovodrun.exists():
        raise SystemExit(f"There is no {horovodrun}: `hvd-pipe build-horovod` installs Horovod.")
    command = [str(horovodrun), "--gloo", "-np", "2", sys.executable, str(script), str(folder)]
    if words:
        command = [*words, "sh", "-c", 'ip link set lo up && exec "$@"', "sh", *command, "limited"]
    path = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
    progress, log = folder / "progress", folder / "log"
    progress.touch()
    with log.open("w") as out, progress.open() as lines:
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, env=os.environ | {"PYTHONPATH": path}
        )
        try:
            show_progress(process, lines)
        finally:
            process.terminate()
            process.wait()
    if process.returncode or not (folder / "result.json").exists():
        said = log.read_text()
        of_workers = re.findall(r"^\[\d+\]<std(?:out|err)>:(.*)", said, re.MULTILINE)
        print(*(of_workers or said.splitlines())[-40:], sep="\n", file=sys.stderr)
        raise SystemExit(f"The workers ended with {process.returncode}; their output is above.")
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return result


def show_progress(process: subprocess.Popen[bytes], lines: Any) -> None:
    """Show what rank 0 says until the job ends."""
    with tqdm(total=1, bar_format=BAR, disable=None) as bar:
        bar.set_description_str("start two workers")
        while process.poll() is None:
            for line in map(json.loads, lines):
                bar.n = line["done"]
                if line["say"] == "link":
                    bar.total = line["total"]
                    tqdm.write(about_link(line))
                    bar.set_description_str("make plans of messages")
                elif line["say"] == "train":
                    bar.set_description_str("train")
            bar.refresh()
            time.sleep(0.1)


def about_link(result: dict[str, Any]) -> str:
    """Return a sentence about the link and how its rate was chosen."""
    compute, taken = 1e3 * result["compute_s"], 1e3 * result["all_reduce_s"]
    text = f"A step computes for {compute:.0f} ms. One all-reduce of all gradients "
    text += f"({result['nbytes'] / 2**20:.1f} MiB) takes {taken:.0f} ms"
    if "bits" in result:
        text += f",\nat {result['bits'] / 1e6:,.0f} Mbit/s: the link is limited to make both equal"
    return f"{text}.\nPlans of messages are made first, before the clock starts."


def table(result: dict[str, Any]) -> list[list[str]]:
    """Return the head and a row for each strategy."""
    rows = result["rows"]
    seconds = {name: sum(e["seconds"] for e in epochs) for name, epochs in rows.items()}
    stock = next(iter(seconds.values()))
    cells = [["", "accuracy", "images/s", "times stock", "sending costs"]]
    for name, epochs in rows.items():
        computing = result["compute_s"] * result["steps"] * len(epochs)
        speed = result["images"] * len(epochs) / seconds[name]
        cells.append([name, f"{epochs[-1]['accuracy']:.1%}", f"{speed:,.0f}"])
        cells[-1] += [f"{stock / seconds[name]:.2f}"]
        cells[-1] += [f"{max(0.0, 1 - computing / seconds[name]):.0%}"]
    return cells


def aligned(cells: Sequence[Sequence[str]]) -> str:
    """Return a table in columns, with a rule below its head."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for row in cells:
        first, *rest = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        lines.append("  ".join([first.lstrip().ljust(widths[0]), *rest]))
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw timelines, and accuracy over time, a dot for each epoch."""
    shown = result.get("shown", {})
    figure = Figure(figsize=(9, 3.8 + 1.7 * len(shown)), layout="constrained")
    *above, below = figure.subplots(
        len(shown) + 1, squeeze=False, height_ratios=[1] * len(shown) + [2.4]
    )[:, 0]
    for axes, name in zip(above, shown, strict=True):
        draw_timeline(axes, name, result)
        axes.set_xlim(0, 1e3 * max(other["ends"][-1] - other["begun"] for other in shown.values()))
    for name, epochs in result["rows"].items():
        times = [*accumulate(e["seconds"] for e in epochs)]
        below.plot(
            times, [100 * e["accuracy"] for e in epochs], "o-", label=name, color=COLOURS[name]
        )
    lowest = min(100 * e["accuracy"] for epochs in result["rows"].values() for e in epochs)
    below.set(xlabel="training time (s), without evaluation", ylabel="test accuracy (%)")
    below.set(xlim=(0, None), ylim=(lowest - 1, 100.5))
    below.grid(alpha=0.3)
    below.legend(loc="lower right")
    figure.savefig(path, dpi=120)


def draw_timeline(axes: Axes, name: str, result: dict[str, Any]) -> None:
    """Draw when a worker computes, and how much of its rate the link carries."""
    one, epochs = result["shown"][name], result["rows"][name]
    step_ms = 1e3 * sum(e["seconds"] for e in epochs) / len(epochs) / result["steps"]
    rows = [line.split() for line in one["samples"]]
    times, sent = (np.array([float(row[column]) for row in rows]) for column in (0, 1))
    running = np.array([row[2] == "R" for row in rows]) & (times <= one["ends"][-1])
    computes = running & ~within(times, one["waits"])
    begins = [one["begun"], *one["ends"]]
    forward = computes & within(times, zip(begins, one["forward_ends"], strict=False))
    moments, ends = (1e3 * (np.array(seconds) - one["begun"]) for seconds in (times, one["ends"]))
    width, full = 5, result.get("bits", 8e9) / 8e3  # in samples, and in bytes a millisecond
    rates = (sent[width:] - sent[:-width]) / (moments[width:] - moments[:-width]) / full
    centres = moments[width // 2 : width // 2 + len(rates)]
    for when, colour in ((computes, "#8fc4e8"), (forward, "#1f77b4")):
        axes.fill_between(moments, 1.1, 1.9, where=when, color=colour, linewidth=0, step="post")
    heights = 0.1 + 0.8 * np.minimum(rates, 1.0) * (centres <= ends[-1])
    axes.fill_between(centres, 0.1, heights, color="#f2a53c", linewidth=0)
    axes.vlines(ends, 1, 2, color="black", linewidth=1)
    axes.set(title=f"{name}: {step_ms:.0f} ms a step on average", ylim=(0, 2), yticks=[0.5, 1.5])
    axes.set_xlabel("time (ms); dark: forward pass, light: backward pass, line: end of a step")
    axes.set_yticklabels(["the link sends", "worker 0 computes"])


def within(times: NDArray[np.float64], spans: Iterable[tuple[float, float]]) -> NDArray[np.bool_]:
    """Return which times are in one of these spans."""
    return np.any([np.zeros(len(times)), *((a <= times) & (times < b) for a, b in spans)], axis=0)


def in_a_folder(path: str) -> Path:
    """Return a path, or raise argparse's error where its folder is not there."""
    if not Path(path).absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"no folder {Path(path).parent}: make it first")
    return Path(path)


def picture(path: str) -> Path:
    """Return a path whose picture can be written, or raise argparse's error."""
    if Path(path).suffix not in {".png", ".svg", ".pdf"}:
        raise argparse.ArgumentTypeError(f"{path!r} must end in .png, .svg or .pdf")
    return in_a_folder(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--keras", action="store_true", help="Keras in place of PyTorch")
    parser.add_argument("--plot", type=picture, default="demo.png", help="the picture's file")
    parser.add_argument("--json", type=in_a_folder, help="a file for all measurements")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # and so end the workers
    # Debian keeps `ip` and `tc` where only root's PATH leads.
    os.environ["PATH"] += f"{os.pathsep}/usr/sbin{os.pathsep}/sbin"
    words, why = own_network()
    if why:
        print(f"The link cannot be limited here ({why}), so there is little to wait for.")
    examples = HERE.parent / "tf_examples" if options.keras else HERE
    with tempfile.TemporaryDirectory() as folder:
        result = run(words, Path(folder), examples / "demo_ranks.py")
    print(f"\n{aligned(table(result))}\n")
    draw(result, options.plot)
    print(f"The picture: {options.plot.resolve()}")
    if options.json:
        options.json.write_text(json.dumps(result) + "\n")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
