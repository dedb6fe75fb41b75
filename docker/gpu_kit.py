"""Build Horovod for the torch of a machine, run the GPU tests there, and write what they find.

    docker/gpu_check.sh [--cpu] [--out DIR] [--minutes 15]
    docker/gpu_check.sh --bundle FILE [--python 3.12] [--with numpy]

Nothing is fetched without --bundle, which makes the archive for a machine without a network. What
is installed goes into an environment in the output folder, over the Python that has torch.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# An archive has hvd_pipe as a wheel, from which Python imports as from a folder.
sys.path.insert(0, str(ROOT / "docker"))
sys.path.insert(0, str(next(ROOT.glob("wheels/hvd_pipe-*.whl"), ROOT)))
from hvd_pipe.build_horovod.recipe import VERSION, SetupError, fetch_source, run, say  # noqa: E402

# The archive
TOP = "hvd_pipe_gpu_kit"
MOST_BYTES = 60 * 2**20
# Beside torch and NumPy, which brings most of it; what a machine has already is not installed.
WHEELS = (
    *("cffi", "cloudpickle", "packaging", "psutil", "pycparser", "PyYAML", "setuptools", "wheel"),
    *("click", "markdown-it-py", "mdurl", "Pygments", "rich", "iniconfig", "pluggy", "pytest"),
    "tqdm",
)
FILES = (
    *("docker/gpu_check.sh", "docker/gpu_kit.py", "tests/gpu/*.py", "torch_examples/models.py"),
    *("tests/parallel/cells.py", "tests/parallel/codec_reference.py"),
    *("tests/parallel/problem.py", "tests/parallel/equation.py", "tests/parallel/serial.py"),
    *("pyproject.toml", "LICENSE"),
)
PLATFORMS = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_17", "manylinux2014", "manylinux1")

Row = dict[str, Any]  # {"name", "good", "text"}; good is None where nothing is judged


class SectionError(Exception):
    """A section cannot be carried out; the message says why."""


@dataclass
class Kit:
    """What the sections share."""

    out: Path
    cpu: bool
    scale: float = 1.0
    way: str = "none"  # how two ranks share the GPU, once a probe has shown that they do
    state: dict[str, str] = field(default_factory=dict)

    @property
    def python(self) -> Path:
        return self.out / "venv" / "bin" / "python"

    def run(self, command: Sequence[object], limit_s: float, **more: str) -> str:
        """Run a command to its end, with all that it starts, and return what it printed."""
        words = [str(word) for word in command]
        folders = [str(self.python.parent), str(Path(sys.executable).parent)]
        environment = {
            **os.environ,
            "PATH": os.pathsep.join([*folders, os.environ.get("PATH", os.defpath)]),
            "HVD_PIPE_CACHE": os.environ.get("HVD_PIPE_CACHE", str(self.out / "cache")),
            "PYTHONUNBUFFERED": "1",
            "NCCL_SOCKET_IFNAME": os.environ.get("NCCL_SOCKET_IFNAME", "lo"),
            # A pool of compilers takes longer to start than these small models to compile.
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "4"),
            **more,
        }
        with (self.out / "log.txt").open("a") as log:
            log.write(f"\n$ {' '.join(words)}\n")
            log.flush()
            begin = log.tell()
            process = subprocess.Popen(
                words,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=environment,
                cwd=ROOT,
                start_new_session=True,
            )
            try:
                code: int | None = process.wait(max(1.0, limit_s))
            except subprocess.TimeoutExpired:
                code = None
            finally:
                _end(process)
        output = (self.out / "log.txt").read_bytes()[begin:].decode(errors="replace")
        if code is None:
            raise SectionError(f"stopped after {limit_s:.0f} s, when its time was over")
        if code != 0:
            lines = [line.strip() for line in output.splitlines() if line.strip()]
            errors = [line for line in lines if re.search(r"\b\w*(Error|error)\b", line)]
            why = (errors or lines or ["nothing was printed"])[-1][:300]
            raise SectionError(f"ended with {code}: {why}")
        return output

    def tests(self, tests: str, ranks: int, limit_s: float, **more: str) -> list[Row]:
        """Run some of tests/gpu on each of some ranks; return what each test found on all."""
        results = Path(tempfile.mkdtemp(dir=self.out)) / "results"
        more |= {"GPU_CHECK_RESULTS": str(results)}
        if self.cpu:
            more["GPU_CHECK_DEVICE"] = "cpu"
        if ranks > 1:
            more["GPU_CHECK_SHARING"] = self.way
        if self.way == "multi-rank":
            more["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
        launch = [self.python, "-m", "horovod.runner.launch", "-np", ranks, "--gloo"]
        pytest = [self.python, "-m", "pytest", "-m", "cuda", "-p", "no:cacheprovider", "tests/gpu"]
        trouble = None
        try:
            self.run([*launch, *pytest, "-k", tests], limit_s, **more)
        except SectionError as error:
            trouble = str(error)
        files = [Path(f"{results}.{rank}") for rank in range(ranks)]
        lines = [path.read_text().splitlines() if path.exists() else [] for path in files]
        rows = joined([[json.loads(line) for line in rank] for rank in lines])
        shutil.rmtree(results.parent)
        if trouble and not any(row["good"] is False for row in rows):
            rows.append({"name": tests, "good": False, "text": trouble})
        return rows


def _end(process: subprocess.Popen[bytes]) -> None:
    """End what a command has left behind: it has a process group of its own."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(8)  # horovodrun ends its ranks, which have groups of their own
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def joined(ranks: Sequence[list[Row]]) -> list[Row]:
    """Return each test once, as a rank found it where it is not good, if there is one."""
    by_name: dict[str, list[Row]] = {}
    for row in (row for rows in ranks for row in rows):
        by_name.setdefault(row["name"], []).append(row)
    found = []
    for rows in by_name.values():
        bad = [row for row in rows if row["good"] is False]
        row = dict((bad or rows)[0])
        if len(rows) < len(ranks) and not bad:
            row |= {"good": False, "text": f"only {len(rows)} of {len(ranks)} ranks finished it"}
        found.append(row)
    return found


# Sections: each returns rows, and raises SectionError where it must stop.


def environment(kit: Kit, limit_s: float) -> list[Row]:
    """A thin environment over this Python, with the wheels that are missing."""
    name = socket.gethostname()
    try:
        socket.gethostbyname(name)  # Gloo asks for it, whatever HOROVOD_GLOO_IFACE says
    except OSError:
        raise SectionError(
            f"this machine's name, {name}, has no address, which Gloo asks for: "
            f"`echo '127.0.0.1 {name}' >>/etc/hosts` as root, or `docker run --hostname {name} "
            f"--add-host {name}:127.0.0.1`, and start again."
        ) from None
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

    def numbers(version: str) -> tuple[int, ...]:
        return tuple(int(part) for part in re.findall(r"\d+", version))

    needed = []
    for wheel in wheels:
        project, version = wheel.name.split("-")[:2]
        try:
            there = numbers(importlib.metadata.version(project.replace("_", "-")))
        except importlib.metadata.PackageNotFoundError:
            there = ()
        if project == "hvd_pipe" or there < numbers(version):
            needed.append(wheel)
    return needed


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


def machine(kit: Kit, limit_s: float) -> list[Row]:
    """What is here."""
    found = json.loads(kit.run([kit.python, "-c", ASK_TORCH], limit_s).strip().splitlines()[-1])
    kit.state |= {name: str(value) for name, value in found.items()}
    found |= {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpus": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 1),
    }
    if not kit.cpu and not found["gpus"]:
        raise SectionError(
            "torch sees no GPU: `nvidia-smi` and a CUDA build of torch first, or --cpu."
        )
    return [{"name": name, "good": None, "text": str(value)} for name, value in found.items()]


def build(kit: Kit, limit_s: float) -> list[Row]:
    """Horovod with Gloo, and with NCCL on a GPU, by hvd_pipe.build_horovod."""
    begun = time.monotonic()
    command = [kit.python, "-m", "hvd_pipe.build_horovod", "--only", "torch", "--without-mpi"]
    source = ROOT / f"horovod-{VERSION}.tar.gz"
    if source.exists():
        command += ["--source", source]
    variables = {}
    if not kit.cpu:
        command.append("--cuda")
        variables["HOROVOD_BUILD_CUDA_CC_LIST"] = kit.state["capability"]
        nvcc = shutil.which("nvcc")
        if nvcc and not Path("/usr/local/cuda/bin/nvcc").exists():
            variables["HOROVOD_CUDA_HOME"] = str(Path(nvcc).resolve().parent.parent)
        variables |= {name: os.environ[name] for name in variables if name in os.environ}
    output = kit.run(command, limit_s, **variables)
    how = "installed from the cache" if "cached wheel" in output else "built and installed"
    text = f"PyTorch only: {how} in {time.monotonic() - begun:.0f} s"
    return [{"name": "Horovod", "good": True, "text": text}]


def doctor(kit: Kit, limit_s: float) -> list[Row]:
    """``hvd-pipe doctor``, as a user runs it: it fails where something stops training."""
    program = "from hvd_pipe.cli.main import main; main()"  # a checkout has no such command
    kit.run([kit.python, "-c", program, "doctor"], limit_s)
    return [{"name": "doctor", "good": True, "text": "training can run here"}]


def ways(kit: Kit) -> list[str]:
    """Return how two ranks may share the machine, best first."""
    if kit.cpu:
        return ["CPU"]
    if int(kit.state.get("gpus", "0")) > 1:
        return ["a GPU each"]
    nccl = tuple(int(part) for part in re.findall(r"\d+", kit.state.get("nccl", "")))
    return ["multi-rank", "host-id"] if nccl >= (2, 30) else ["host-id"]


def share(kit: Kit, limit_s: float) -> list[Row]:
    """Find how two ranks share what is here: an all-reduce decides."""
    end = time.monotonic() + limit_s
    rows: list[Row] = []
    for way in ways(kit):
        kit.way = way
        found = kit.tests("test_probe", 2, min(40.0 * kit.scale, end - time.monotonic()))
        good = bool(found) and all(row["good"] for row in found)
        text = "two ranks all-reduce" if good else found[-1]["text"] if found else "no answer"
        rows.append({"name": way, "good": good or None, "text": text})
        if good:
            return rows
    kit.way = "none"
    raise SectionError("; ".join(f"{row['name']}: {row['text']}" for row in rows))


def run_tests(
    tests: str, kit: Kit, limit_s: float, numbers: Sequence[int] = (2, 1), completion: str = ""
) -> list[Row]:
    """Some of tests/gpu on two ranks and on one, with each of Horovod's ways to complete."""
    end = time.monotonic() + limit_s
    cells = [(later, n) for later in completion or " " for n in numbers]
    rows: list[Row] = []
    for number, (later, n) in enumerate(cells):
        label = f"{n} rank{'s' if n > 1 else ''}{f', completion {later}' if completion else ''}"
        if n > 1 and kit.way == "none":
            rows.append({"name": label, "good": False, "text": "they cannot share the GPU"})
            continue
        more = {"HOROVOD_ENABLE_ASYNC_COMPLETION": later} if completion else {}
        found = kit.tests(tests, n, (end - time.monotonic()) / (len(cells) - number), **more)
        rows += [{**row, "name": f"{label}: {row['name']}"} for row in found]
    return rows


@dataclass(frozen=True)
class Section:
    """A part of the check: it has ``budget_s`` seconds, and what the ones before it have left."""

    title: str
    budget_s: int
    job: Callable[[Kit, float], list[Row]]
    needs: str | None = "Horovod's build"


SECTIONS = (
    Section("Environment", 15, environment, None),
    Section("Machine", 15, machine, "Environment"),
    Section("Horovod's build", 190, build, "Machine"),
    Section("hvd-pipe doctor", 30, doctor),
    Section("Two ranks on what is here", 40, share),
    Section("Equations, float64", 240, partial(run_tests, "test_equation", completion="01")),
    Section("What runs beside what", 80, partial(run_tests, "test_profile")),
    Section("Images a second", 120, partial(run_tests, "test_speed")),
    Section("GradScaler, bfloat16, torch.compile", 70, partial(run_tests, "test_training")),
    Section("Memory over many steps", 100, partial(run_tests, "test_memory", numbers=(2,))),
)


def carry_out(kit: Kit, minutes: float) -> list[dict[str, Any]]:
    """Run all sections within the time, and return what each found."""
    start, granted = time.monotonic(), 0.0
    done: list[dict[str, Any]] = []
    worked = {None}
    for section in SECTIONS:
        granted += section.budget_s * kit.scale
        budget = start + min(granted, 60 * minutes) - time.monotonic()
        begun, rows, why = time.monotonic(), [], ""
        if section.needs not in worked:
            state, why = "not run", f"{section.needs} did not work"
        elif budget < 5:
            state, why = "not run", "no time was left"
        else:
            say(f"[{section.title}] at most {budget:.0f} s")
            try:
                rows, state = section.job(kit, budget), "done"
                worked.add(section.title)
            except Exception as error:
                state, why = "failed", str(error) or type(error).__name__
        if any(row["good"] is False for row in rows):
            state = "not all good"
        seconds = round(time.monotonic() - begun, 1)
        found = {"title": section.title, "state": state, "why": why, "seconds": seconds}
        done.append({**found, "results": rows})
        say(f"[{section.title}] {state} in {seconds:.0f} s {why}")
        summary = {"cpu": kit.cpu, "way": kit.way, "minutes": minutes, "sections": done}
        (kit.out / "gpu-check.json").write_text(json.dumps(summary, indent=1) + "\n")
        (kit.out / "gpu-check.md").write_text(page(summary))
    return done


# The page


def page(found: Mapping[str, Any]) -> str:
    """Return the page as Markdown."""
    sections = found["sections"]
    seconds = sum(section["seconds"] for section in sections)
    lines = [
        "# hvd_pipe on a "
        + (
            "CPU, as a rehearsal: NCCL, streams and kernels have not run"
            if found["cpu"]
            else "GPU"
        ),
        "",
        f"{seconds:.0f} s in all, of {60 * found['minutes']:.0f}. "
        f"Two ranks share what is here by: {found['way']}.",
        "",
        "| section | state | seconds | good | not good |",
        "| --- | --- | ---: | ---: | ---: |",
    ]
    for section in sections:
        goods = [row["good"] for row in section["results"]]
        cells = (section["title"], section["state"], f"{section['seconds']:.0f}")
        lines.append(f"| {' | '.join(cells)} | {goods.count(True)} | {goods.count(False)} |")
    for section in sections:
        lines += ["", f"## {section['title']}", "", *_section(section)]
    return "\n".join(lines) + "\n"


def _section(section: Mapping[str, Any]) -> list[str]:
    results = section["results"]
    lines = [f"{section['state'].capitalize()}: {_cell(section['why'])}", ""] * bool(
        section["why"]
    )
    judged = [row for row in results if row["good"] is not None]
    good = [row for row in judged if row["good"]]
    if len(judged) > max(12, 0.9 * len(results)):  # only what is not good is listed
        away = [row["away"] for row in good if "away" in row]
        farthest = f" The farthest of these is {max(away):.1e} away." if away else ""
        lines += [f"{len(good)} of {len(judged)} are good.{farthest}", ""]
        results = [row for row in results if not row["good"]]
    if results:
        lines += ["| what | found | |", "| --- | --- | --- |"]
    for row in results:
        mark = {True: "good", False: "**not good**", None: ""}[row["good"]]
        lines.append(f"| {_cell(row['name'])} | {_cell(row['text'])} | {mark} |")
    return lines


def _cell(value: str) -> str:
    return " ".join(str(value).replace("|", "\\|").split())


# The archive


def write_archive(archive: Path, folder: Path) -> int:
    """Write the archive of the checkout's files and those in ``folder``; return its size."""
    with tarfile.open(archive, "w:gz") as out:
        for pattern in FILES:
            paths = sorted(ROOT.glob(pattern))
            if not paths:
                raise SetupError(f"{pattern} is gone: adapt FILES in docker/gpu_kit.py.")
            for path in paths:
                out.add(path, f"{TOP}/{path.relative_to(ROOT)}")
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            out.add(path, f"{TOP}/{path.relative_to(folder)}")
    size = archive.stat().st_size
    if size > MOST_BYTES:
        archive.unlink()
        raise SetupError(f"{size / 2**20:.1f} MiB is more than {MOST_BYTES >> 20}: fewer --with.")
    return size


def bundle(archive: Path, python: str, machine: str, more: Sequence[str]) -> None:
    """Make the archive: Horovod's sdist, wheels, the tests and their reference. No torch."""
    from setup_env import pin  # noqa: PLC0415 - an archive has no pins

    again = "Check the network, then run the same command again."
    with tempfile.TemporaryDirectory(prefix="bundle-") as name:
        work = Path(name)
        wheels = work / "bundle" / "wheels"
        wheels.mkdir(parents=True)
        fetch_source(work)
        (work / f"horovod-{VERSION}.tar.gz").rename(wheels.parent / f"horovod-{VERSION}.tar.gz")
        log = work / "bundle.log"
        command = [
            *(sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"),
            *("--implementation=cp", f"--python-version={python}"),
            *(f"--platform={name}_{machine}" for name in PLATFORMS),
            *("-d", str(wheels), *map(pin, [*WHEELS, *more])),
        ]
        run(f"download wheels for Python {python}", command, log, again)
        copy = work / "source"  # a folder build/ in the checkout may hold what is gone by now
        shutil.copytree(ROOT / "hvd_pipe", copy / "hvd_pipe")
        for file in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
            shutil.copy(ROOT / file, copy)
        pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
        run("build hvd_pipe's wheel", [*pip, "-w", str(wheels), str(copy)], log, again)
        size = write_archive(archive, wheels.parent)
    say(f"{archive}: {size / 2**20:.1f} MiB; docs/gpu-check.md says what to do with it")


def main() -> None:
    parser = argparse.ArgumentParser(prog="gpu_check.sh")
    parser.add_argument("--cpu", action="store_true", help="rehearse it over Gloo, without a GPU")
    parser.add_argument("--out", type=Path, default=Path("gpu-check"), help="a new folder")
    parser.add_argument("--minutes", type=float, default=15.0, help="for all of it (15)")
    parser.add_argument("--bundle", type=Path, metavar="FILE", help="make the archive, a .tar.gz")
    parser.add_argument("--python", default="3.12", help="the GPU machine's Python")
    parser.add_argument("--machine", default="x86_64", help="the GPU machine's processor")
    parser.add_argument("--with", dest="more", action="append", default=[], metavar="NAME")
    given = parser.parse_args()
    if given.bundle:
        bundle(given.bundle, given.python, given.machine, given.more)
        return
    out = given.out.absolute()
    if (out / "venv").exists():
        raise SetupError(f"{out} has an environment already: name another folder with --out.")
    out.mkdir(parents=True, exist_ok=True)
    sections = carry_out(Kit(out, given.cpu, max(1.0, given.minutes / 15)), given.minutes)
    say(f"\n{out / 'gpu-check.md'} and gpu-check.json; the log is log.txt")
    sys.exit(0 if all(section["state"] == "done" for section in sections) else 1)


if __name__ == "__main__":
    try:
        main()
    except (SetupError, subprocess.SubprocessError) as error:
        sys.exit(f"gpu_check: {error}")
