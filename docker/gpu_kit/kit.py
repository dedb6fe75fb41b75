"""Build Horovod for the torch at hand, check hvd_pipe with it, and write one JSON and one page.

    docker/gpu_check.sh [--cpu] [--out DIR] [--minutes 15]

Nothing is fetched. Each section has a budget of its own, and none stops the ones after it. What is
installed goes into an environment in the output folder, over the Python that has torch.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))
# An archive has hvd_pipe as a wheel, from which Python imports as from a folder.
sys.path.insert(0, str(next(Path(sys.path[0]).glob("wheels/hvd_pipe-*.whl"), sys.path[0])))
sys.path.insert(0, str(Path(__file__).resolve().parent))
from hvd_pipe.build_horovod.recipe import VERSION
from hvd_pipe.build_horovod.steps import SetupError, say

import page
from job import ROOT, Kit, SectionError

SHARED = ("multi-rank", "host-id", "host")
"""How two ranks may share a GPU, best first; see `ways`."""


@dataclass(frozen=True)
class Section:
    """A part of the kit: it has ``budget_s`` seconds, and what the ones before it have left."""

    name: str
    title: str
    budget_s: int
    job: Callable[[Kit, float], list[dict[str, Any]]]
    needs: str | None = None
    """The section without which there is nothing to look at."""


# Each section returns rows of {"name", "good", "text"}; it raises SectionError where it must stop.


def environment(kit: Kit, limit_s: float) -> list[dict[str, Any]]:
    """A thin environment over this Python, with the wheels that are missing."""
    check_host_name()
    venv = kit.out / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    (packages,) = venv.glob("lib/python3*/site-packages")
    parents = [path for path in sys.path if path.endswith("-packages")]
    # Through `site`, as the parent's own .pth files count too (setuptools' distutils is in one).
    lines = [f"import site; site.addsitedir({path!r})" for path in parents]
    (packages / "parent.pth").write_text("\n".join(lines) + "\n")
    installed = []
    for wheel in missing_wheels(sorted((ROOT / "wheels").glob("*.whl"))):
        pip = [kit.python, "-m", "pip", "install", "--no-index", "--no-deps", "--quiet"]
        kit.run([*pip, "--ignore-installed", wheel], limit_s)
        installed.append(wheel.name.split("-")[0])
    if not (ROOT / "wheels").is_dir():
        (packages / "checkout.pth").write_text(f"{ROOT}\n")
        installed.append("hvd_pipe (this checkout)")
    return [{"name": "wheels", "good": True, "text": ", ".join(installed) or "none was missing"}]


def missing_wheels(wheels: Sequence[Path]) -> list[Path]:
    """Return the wheels whose project this Python lacks, or has older; hvd_pipe's always."""
    needed = []
    for wheel in wheels:
        project, version = wheel.name.split("-")[:2]
        try:
            there = _numbers(importlib.metadata.version(project.replace("_", "-")))
        except importlib.metadata.PackageNotFoundError:
            there = ()
        if project == "hvd_pipe" or there < _numbers(version):
            needed.append(wheel)
    return needed


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))


def check_host_name() -> None:
    """Refuse a machine whose own name has no address: no rank would start.

    Gloo asks for it, whatever ``HOROVOD_GLOO_IFACE`` says, and takes it from no variable.
    """
    name = socket.gethostname()
    try:
        socket.gethostbyname(name)
    except OSError:
        raise SectionError(
            f"this machine's name, {name}, has no address, which Gloo asks for: "
            f"`echo '127.0.0.1 {name}' >>/etc/hosts` as root, or `docker run --hostname {name} "
            f"--add-host {name}:127.0.0.1`, and start again."
        ) from None


def machine(kit: Kit, limit_s: float) -> list[dict[str, Any]]:
    """What is here."""
    asked = kit.run([kit.python, "-c", ASK_TORCH], limit_s)
    found = json.loads(asked.strip().splitlines()[-1])
    kit.state |= {name: str(value) for name, value in found.items()}
    found |= {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
    }
    found |= {"cpus": len(os.sched_getaffinity(0)), "load": round(os.getloadavg()[0], 1)}
    if not kit.cpu and not found["gpus"]:
        raise SectionError(
            "torch sees no GPU: `nvidia-smi` and a CUDA build of torch first, or --cpu."
        )
    return [{"name": name, "good": None, "text": str(value)} for name, value in found.items()]


ASK_TORCH = """
import json, torch
gpu = torch.cuda.is_available()
print(json.dumps({
    "torch": torch.__version__,
    "cuda": torch.version.cuda,
    "gpus": torch.cuda.device_count() if gpu else 0,
    "gpu": torch.cuda.get_device_name() if gpu else None,
    "capability": "".join(map(str, torch.cuda.get_device_capability())) if gpu else None,
    "nccl": ".".join(map(str, torch.cuda.nccl.version())) if gpu else None,
}))
"""


def build(kit: Kit, limit_s: float) -> list[dict[str, Any]]:
    """Horovod with Gloo, and with NCCL on a GPU, by hvd_pipe.build_horovod."""
    begun = time.monotonic()
    kind = [] if kit.cpu else ["--cuda"]
    said = kit.run(recipe_command(kit, *kind), limit_s, **cuda_variables(kit))
    taken = time.monotonic() - begun
    how = "installed from the cache" if "cached wheel" in said else "built and installed"
    text = f"{'Gloo' if kit.cpu else 'NCCL and Gloo'}, PyTorch only: {how} in {taken:.0f} s"
    return [{"name": "Horovod", "good": True, "text": text, "seconds": taken}]


def recipe_command(kit: Kit, *more: object) -> list[object]:
    """Return the recipe's command for PyTorch and Gloo, from the archive that lies here."""
    source = ROOT / f"horovod-{VERSION}.tar.gz"
    local = ["--source", source] if source.exists() else []
    return [
        *(kit.python, "-m", "hvd_pipe.build_horovod"),
        *("--only", "torch", "--without-mpi", *local, *more),
    ]


def cuda_variables(kit: Kit) -> dict[str, str]:
    """Return the variables that tell the build where CUDA is, and which GPU to compile for."""
    if kit.cpu:
        return {}
    found = {"HOROVOD_BUILD_CUDA_CC_LIST": kit.state["capability"]}
    nvcc = shutil.which("nvcc")
    if nvcc and not Path("/usr/local/cuda/bin/nvcc").exists():
        found["HOROVOD_CUDA_HOME"] = str(Path(nvcc).resolve().parent.parent)
    return {**found, **{name: os.environ[name] for name in found if name in os.environ}}


def doctor(kit: Kit, limit_s: float) -> list[dict[str, Any]]:
    """``hvd-pipe doctor``, as a user runs it; it must name nothing that stops training."""
    try:
        program = "from hvd_pipe.cli.main import main; main()"  # a checkout has no such command
        said = kit.run([kit.python, "-c", program, "doctor", "--json"], limit_s)
    except SectionError as error:
        said = kit.log.read_text()[kit.log.read_text().rindex("\n$ ") :]
        if '"rows"' not in said:
            raise error from None
    answer = json.loads(said[said.index("{") :])
    rows = [row for row in answer["rows"] if row["good"] is not None]
    found = [
        {
            "name": f"{row['section']}: {row['name']}",
            "good": row["good"] if row["required"] else (row["good"] or None),
            "text": _told(row, kit.out),
        }
        for row in rows
    ]
    return [*found, {"name": "doctor", "good": answer["good"], "text": "training can run here"}]


def _told(row: dict[str, Any], out: Path) -> str:
    todo = row["todo"] if row["good"] is False and row["required"] else ""
    return f"{row['found']} {todo or ''}".replace(f"{out}{os.sep}", "").strip()


def share(kit: Kit, limit_s: float) -> list[dict[str, Any]]:
    """Find how two ranks share what is here: an all-reduce decides."""
    rows: list[dict[str, Any]] = []
    end = time.monotonic() + limit_s
    for way in ways(kit):
        if way == "host":
            try:
                stage(kit, end - time.monotonic())
            except SectionError as error:
                rows.append({"name": "build without NCCL", "good": False, "text": str(error)})
                break
        kit.way = way
        found = kit.ranks("probe", 2, min(40.0 * kit.scale, end - time.monotonic()), f"{way}: ")
        good = bool(found) and all(row["good"] for row in found)
        text = "two ranks all-reduce" if good else found[-1]["text"] if found else "no answer"
        rows.append({"name": way, "good": good or None, "text": text})
        if good:
            return rows
    kit.way = "none"
    raise SectionError("; ".join(f"{row['name']}: {row['text']}" for row in rows))


def ways(kit: Kit) -> list[str]:
    """Return how two ranks may share the machine, best first."""
    if kit.cpu:
        return ["CPU"]
    if int(kit.state.get("gpus", "0")) > 1:
        return ["a GPU each"]
    nccl = tuple(int(part) for part in re.findall(r"\d+", kit.state.get("nccl", "")))
    return [way for way in SHARED if way != "multi-rank" or nccl >= (2, 30)]


def stage(kit: Kit, limit_s: float) -> None:
    """Build a second Horovod, which sends a GPU's tensors by way of the host, into a folder."""
    command = recipe_command(kit, "--cuda", "--staged", "--into", kit.out / "staged")
    kit.run(command, limit_s, **cuda_variables(kit))


def both(section: str) -> Callable[[Kit, float], list[dict[str, Any]]]:
    """Return a job that runs a section of rank.py on two ranks, and then on one alone."""

    def job(kit: Kit, limit_s: float) -> list[dict[str, Any]]:
        end = time.monotonic() + limit_s
        if kit.way == "none":
            rows = [{"name": "2 ranks", "good": False, "text": "they cannot share the GPU"}]
        else:
            rows = kit.ranks(section, 2, 0.6 * limit_s, "2 ranks: ")
        return [*rows, *kit.ranks(section, 1, end - time.monotonic(), "1 rank: ")]

    return job


def most(section: str) -> Callable[[Kit, float], list[dict[str, Any]]]:
    """Return a job that runs a section of rank.py once, on two ranks if they can share."""

    def job(kit: Kit, limit_s: float) -> list[dict[str, Any]]:
        return kit.ranks(section, 1 if kit.way == "none" else 2, limit_s)

    return job


def equations(kit: Kit, limit_s: float) -> list[dict[str, Any]]:
    """One and two ranks, Horovod's completion on the host and on the device."""
    end = time.monotonic() + limit_s
    cells = [(n, later) for later in "01" for n in (1, 2) if n == 1 or kit.way != "none"]
    rows = []
    for left, (n, later) in zip(range(len(cells), 0, -1), cells, strict=True):
        share_s = (end - time.monotonic()) / left
        label = f"{n} rank{'s' if n > 1 else ''}, completion {later}: "
        more = {"HOROVOD_ENABLE_ASYNC_COMPLETION": later}
        rows += kit.ranks("equations", n, share_s, label, **more)
    return rows


SECTIONS = (
    Section("environment", "Environment", 15, environment),
    Section("machine", "Machine", 15, machine, "environment"),
    Section("build", "Horovod's build", 190, build, "machine"),
    Section("doctor", "hvd-pipe doctor", 30, doctor, "build"),
    Section("share", "Two ranks on what is here", 40, share, "build"),
    Section("equations", "Equations, float64", 240, equations, "build"),
    Section("profile", "What runs beside what", 80, both("profile"), "build"),
    Section("speed", "Images a second", 120, both("speed"), "build"),
    Section("training", "GradScaler, bfloat16, torch.compile", 70, both("training"), "build"),
    Section("memory", "Memory over many steps", 100, most("memory"), "build"),
)


def carry_out(kit: Kit, minutes: float) -> list[dict[str, Any]]:
    """Run all sections within the time, and return what each found."""
    start, granted = time.monotonic(), 0.0
    done: list[dict[str, Any]] = []
    for section in SECTIONS:
        granted += section.budget_s * kit.scale
        budget = start + min(granted, 60 * minutes) - time.monotonic()
        entry = {"name": section.name, "title": section.title, "budget_s": section.budget_s}
        begun, rows, why = time.monotonic(), [], ""
        if section.needs and kit.state.get(f"section {section.needs}") != "done":
            state, why = "not run", f"{section.needs} did not work"
        elif budget < 5:
            state, why = "not run", "no time was left"
        else:
            say(f"[{section.name}] at most {budget:.0f} s")
            try:
                rows, state = section.job(kit, budget), "done"
            except Exception as error:
                state, why = "failed", str(error) or type(error).__name__
                if not isinstance(error, SectionError):
                    traceback.print_exc()
        if state == "done" and any(row["good"] is False for row in rows):
            state = "not all good"
        kit.state[f"section {section.name}"] = "done" if rows else state
        seconds = round(time.monotonic() - begun, 1)
        done.append({**entry, "state": state, "why": why, "seconds": seconds, "results": rows})
        say(f"[{section.name}] {state} in {seconds:.0f} s {why}")
        write(kit, done, minutes)
    return done


def write(kit: Kit, sections: list[dict[str, Any]], minutes: float) -> None:
    """Write the JSON and the page as they are so far."""
    found = {
        "kit": 1,
        "device": kit.device,
        "way": kit.way,
        "minutes": minutes,
        "seconds": round(sum(section["seconds"] for section in sections), 1),
        "sections": sections,
    }
    (kit.out / "gpu-check.json").write_text(json.dumps(found, indent=1) + "\n")
    (kit.out / "gpu-check.md").write_text(page.text(found))


def main() -> None:
    parser = argparse.ArgumentParser(prog="gpu_check.sh")
    parser.add_argument("--cpu", action="store_true", help="rehearse it over Gloo, without a GPU")
    parser.add_argument("--out", type=Path, default=Path("gpu-check"), help="a new folder")
    parser.add_argument("--minutes", type=float, default=15.0, help="for all of it (15)")
    arguments = parser.parse_args()
    out = arguments.out.absolute()
    if (out / "venv").exists():
        raise SetupError(f"{out} has an environment already: name another folder with --out.")
    out.mkdir(parents=True, exist_ok=True)
    kit = Kit(out, arguments.cpu, max(1.0, arguments.minutes / 15), out / "log.txt")
    kit.log.touch()
    sections = carry_out(kit, arguments.minutes)
    say(f"\n{out / 'gpu-check.md'} and gpu-check.json; the log is log.txt")
    sys.exit(0 if all(section["state"] == "done" for section in sections) else 1)


if __name__ == "__main__":
    try:
        main()
    except SetupError as error:
        sys.exit(f"gpu_check: {error}")
