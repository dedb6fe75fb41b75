"""The GPU kit's pieces: what its archive holds, its sections, what it counts, its page.

Nothing is built here and no rank is started: `docker/gpu_check.sh --cpu` runs all of it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import time
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent.parent
KIT = ROOT / "docker" / "gpu_kit"

sys.path[:0] = [str(KIT), str(ROOT / "docker")]
try:
    import bundle
    import job
    import kit
    import page
    import profile_events
finally:
    for folder in (str(KIT), str(ROOT / "docker")):
        while folder in sys.path:
            sys.path.remove(folder)


def row(name: str, good: bool | None, **numbers: float) -> dict[str, Any]:
    return {"name": name, "good": good, "text": f"about {name}", "numbers": numbers}


# The archive


@pytest.mark.nightly  # a rank that imports all again, for a kit that is made for a release
def test_the_archive_holds_the_kit_and_what_its_checks_import(tmp_path: Path) -> None:
    (tmp_path / "more" / "wheels").mkdir(parents=True)
    (tmp_path / "more" / "wheels" / "x-1-py3-none-any.whl").write_bytes(b"x" * 1000)
    size = bundle.write(tmp_path / "b.tar.gz", tmp_path / "more")
    assert size == (tmp_path / "b.tar.gz").stat().st_size < bundle.MOST_BYTES
    with tarfile.open(tmp_path / "b.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    top = tmp_path / bundle.TOP
    assert (top / "wheels" / "x-1-py3-none-any.whl").exists()
    assert os.access(top / "docker" / "gpu_check.sh", os.X_OK)
    # A rank loads its sections and the reference from there, without the rest of the checkout.
    (tmp_path / "hvd_pipe").symlink_to(ROOT / "hvd_pipe")  # as its wheel would be installed
    rank = [top / "docker" / "gpu_kit" / "rank.py", "probe", "--device=cpu", "--small"]
    subprocess.run(
        [sys.executable, *rank, f"--out={tmp_path / 'found.json'}"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.fspath(tmp_path)},
        check=True,
        timeout=200,
    )
    (found,) = json.loads((tmp_path / "found.0.json").read_text())
    assert (found["name"], found["good"], found["text"]) == (
        "all-reduce",
        True,
        "the sum of 1 ranks",
    )


def test_the_kit_runs_from_an_archive_where_hvd_pipe_is_a_wheel(tmp_path: Path) -> None:
    """The recipe is a part of hvd_pipe, which is not installed yet when the kit starts."""
    bundle.write(tmp_path / "b.tar.gz", tmp_path / "none")
    with tarfile.open(tmp_path / "b.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    top = tmp_path / bundle.TOP
    (top / "wheels").mkdir()
    with zipfile.ZipFile(top / "wheels" / "hvd_pipe-0-py3-none-any.whl", "w") as wheel:
        for path in (ROOT / "hvd_pipe").rglob("*.py"):
            wheel.write(path, path.relative_to(ROOT))
    for python in ([sys.executable], [sys.executable, "-S"]):
        answer = subprocess.run(
            [*python, top / "docker" / "gpu_kit" / "kit.py", "--help"],
            cwd=tmp_path,
            env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
            capture_output=True,
            text=True,
            check=True,
        )
        assert "rehearse it over Gloo" in answer.stdout


def test_an_archive_that_is_too_large_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundle, "MOST_BYTES", 1000)
    with pytest.raises(bundle.SetupError, match="MiB is more than"):
        bundle.write(tmp_path / "b.tar.gz", tmp_path)
    assert not (tmp_path / "b.tar.gz").exists()


def test_wheels_are_for_the_other_machine_and_pinned(tmp_path: Path) -> None:
    command = bundle.wheel_command(list(bundle.WHEELS), "3.12", "x86_64", tmp_path)
    assert "--python-version=3.12" in command
    assert "--platform=manylinux_2_28_x86_64" in command
    assert "--only-binary=:all:" in command
    assert all("==" in word for word in command[-len(bundle.WHEELS) :])
    assert not any(word.startswith("torch") for word in command)


def test_a_machine_whose_name_has_no_address_is_left_as_it_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The kit wrote a line into /etc/hosts for good, and failed where it was not root."""

    def unknown(_: str) -> str:
        raise OSError("Name or service not known")

    hosts = Path("/etc/hosts").read_bytes()
    monkeypatch.setattr(kit.socket, "gethostname", lambda: "nowhere-1")
    monkeypatch.setattr(kit.socket, "gethostbyname", unknown)
    monkeypatch.setattr(kit.Path, "open", lambda path, *_, **__: pytest.fail(f"opened {path}"))
    with pytest.raises(kit.SectionError, match=r"echo '127\.0\.0\.1 nowhere-1' >>/etc/hosts"):
        kit.environment(kit.Kit(tmp_path, True, 1.0, tmp_path / "log.txt"), 10.0)
    assert not (tmp_path / "venv").exists()  # so that the same folder can be named again
    monkeypatch.undo()
    assert Path("/etc/hosts").read_bytes() == hosts


# The sections


def test_the_sections_fit_into_fifteen_minutes() -> None:
    assert sum(section.budget_s for section in kit.SECTIONS) <= 900
    names = [section.name for section in kit.SECTIONS]
    assert len(set(names)) == len(names)
    for number, section in enumerate(kit.SECTIONS):
        assert section.needs is None or section.needs in names[:number]


def made(tmp_path: Path, cpu: bool = True) -> kit.Kit:
    return kit.Kit(tmp_path, cpu, 1.0, tmp_path / "log.txt")


def test_a_section_that_fails_stops_only_what_needs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: kit.Kit, __: float) -> list[dict[str, Any]]:
        raise kit.SectionError("nvcc is away")

    def breaks(_: kit.Kit, __: float) -> list[dict[str, Any]]:
        raise KeyError("gone")

    sections = (
        kit.Section("build", "Build", 10, fails),
        kit.Section("speed", "Speed", 10, lambda *_: [row("a", True)], "build"),
        kit.Section("odd", "Odd", 10, breaks),
        kit.Section("last", "Last", 10, lambda *_: [row("b", True), row("c", False)]),
    )
    monkeypatch.setattr(kit, "SECTIONS", sections)
    done = kit.carry_out(made(tmp_path), 10)
    assert [each["state"] for each in done] == ["failed", "not run", "failed", "not all good"]
    assert [each["why"] for each in done] == ["nvcc is away", "build did not work", "'gone'", ""]
    written = json.loads((tmp_path / "gpu-check.json").read_text())
    assert written["sections"] == done
    assert "nvcc is away" in (tmp_path / "gpu-check.md").read_text()


def test_no_section_begins_when_the_time_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kit, "SECTIONS", (kit.Section("a", "A", 10, lambda *_: []),))
    (done,) = kit.carry_out(made(tmp_path), 0.01)
    assert (done["state"], done["why"]) == ("not run", "no time was left")


def test_a_section_may_use_what_others_have_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[float] = []

    def records(_: kit.Kit, limit_s: float) -> list[dict[str, Any]]:
        limits.append(limit_s)
        return []

    sections = [kit.Section(name, name, 200, records) for name in "abcd"]
    monkeypatch.setattr(kit, "SECTIONS", sections)
    kit.carry_out(made(tmp_path), 10)
    assert [round(limit, -2) for limit in limits] == [200, 400, 600, 600]


@pytest.mark.nightly  # five seconds of waiting
def test_a_command_that_takes_too_long_is_ended_with_what_it_started(tmp_path: Path) -> None:
    kept = tmp_path / "pid"
    with pytest.raises(kit.SectionError, match="stopped after 5 s, when its time was over"):
        made(tmp_path).run(["sh", "-c", f"sleep 600 & echo $! >{kept}; wait"], 5)
    status = Path("/proc", kept.read_text().strip(), "status")
    with suppress(OSError):  # it is gone
        while "State:\tZ" not in status.read_text():  # or for ever: pytest's limit
            time.sleep(0.05)


def test_a_command_that_fails_says_why(tmp_path: Path) -> None:
    program = "print('building'); raise ValueError('no nvcc')"
    with pytest.raises(kit.SectionError, match="ended with 1: ValueError: no nvcc"):
        made(tmp_path).run([sys.executable, "-c", program], 60)


@pytest.mark.parametrize(
    ("gpus", "nccl", "ways"),
    [
        ("2", "2.27.7", ["a GPU each"]),
        ("1", "2.27.7", ["host-id", "host"]),
        ("1", "2.30.3", ["multi-rank", "host-id", "host"]),
        ("1", "None", ["host-id", "host"]),
    ],
)
def test_how_two_ranks_may_share_a_gpu(
    gpus: str, nccl: str, ways: list[str], tmp_path: Path
) -> None:
    found = made(tmp_path, cpu=False)
    found.state |= {"gpus": gpus, "nccl": nccl}
    assert kit.ways(found) == ways
    assert kit.ways(made(tmp_path)) == ["CPU"]
    assert found.sharing("multi-rank")["NCCL_MULTI_RANK_GPU_ENABLE"] == "1"
    assert "PYTHONPATH" in found.sharing("host")


def test_a_result_is_good_only_if_it_is_on_every_rank() -> None:
    first = [row("a", True), row("b", True), row("c", None), row("d", True)]
    second = [row("a", True), row("b", False), row("c", None)]
    rows = {each["name"]: each for each in job.joined([first, second])}
    assert {name: each["good"] for name, each in rows.items()} == {
        "a": True,
        "b": False,
        "c": None,
        "d": False,
    }
    assert rows["d"]["text"] == "only 1 of 2 ranks finished it"


def test_wheels_that_are_there_or_newer_are_left_out(tmp_path: Path) -> None:
    names = ("pytest-0.1-py3-none-any", "pytest-99-py3-none-any", "no_such-1-py3-none-any")
    wheels = [tmp_path / f"{name}.whl" for name in (*names, "hvd_pipe-0-py3-none-any")]
    assert kit.missing_wheels(wheels) == wheels[1:]


# What the profile says


def event(
    cat: str, name: str, ts: float, dur: float, tid: int = 1, **args: float
) -> dict[str, Any]:
    return {"cat": cat, "name": name, "ts": ts, "dur": dur, "tid": tid, "args": args}


EVENTS = [
    event("kernel", "gemm", 0, 10),
    event("kernel", "gemm", 8, 4),  # in another stream
    event("kernel", "ncclDevKernel_AllReduce", 6, 12),  # 6 of 12 beside a gemm
    event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 20, 4, bytes=400),
    event("kernel", "relu", 22, 10),  # 2 of these 4
    event("gpu_memcpy", "Memcpy DtoD", 50, 5, bytes=1000),  # moves nothing between ranks
    event("cpu_op", "aten::mm", 0, 1, tid=1),
    event("cpu_op", "aten::mm_backward", 0, 1, tid=2),
    event("cuda_runtime", "cudaStreamSynchronize", 5, 3, tid=1),
    event("cuda_runtime", "cudaStreamSynchronize", 15, 2, tid=2),
    event("cuda_runtime", "cudaEventSynchronize", 5, 50, tid=9),  # Horovod's own thread
    event("cuda_runtime", "cudaLaunchKernel", 5, 1, tid=1),
]


def test_bytes_that_move_beside_kernels_are_counted() -> None:
    found = profile_events.overlap(EVENTS)
    assert found["communication_us"] == 16
    assert found["hidden_us"] == 8
    assert found["hidden"] == 0.5
    assert (found["copied_bytes"], found["copied_beside_kernels_bytes"]) == (400, 200)
    assert found["kernels"] == 4
    assert profile_events.overlap([])["hidden"] == 0


def test_only_waits_of_threads_that_compute_are_counted() -> None:
    assert profile_events.waits(EVENTS) == {"cudaStreamSynchronize": {"calls": 2, "us": 5}}


# The page


def found(device: str = "cuda", **sections: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "device": device,
        "way": "host-id",
        "minutes": 10,
        "seconds": 321.0,
        "sections": [
            {"title": title, "state": "done", "why": "", "seconds": 3.0, "results": rows}
            for title, rows in sections.items()
        ],
    }


def test_the_page_counts_what_is_good_and_lists_what_is_not() -> None:
    rows = [row(f"cell {number}", True, away=number * 1e-15) for number in range(20)]
    rows += [row("cell | 20", False), row("cell 21", None)]
    text = page.text(found(Equations=rows))
    assert "| Equations | done | 3 | 20 | 1 |" in text
    assert "20 of 21 are good." in text
    assert "The farthest of these is 1.9e-14 away." in text
    assert "| cell \\| 20 | about cell \\| 20 | **not good** |" in text
    assert "| cell 21 | about cell 21 |  |" in text
    assert "cell 7" not in text
    assert text.startswith("# hvd_pipe on a GPU\n")


def test_the_page_of_a_rehearsal_says_that_it_is_one() -> None:
    text = page.text(found("cpu", Speed=[row("ResNet-50, DDP", None)]))
    assert "This is no page of a GPU." in text
    assert "| ResNet-50, DDP | about ResNet-50, DDP |  |" in text
