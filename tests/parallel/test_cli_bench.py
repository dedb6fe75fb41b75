"""``hvd-pipe bench`` under the launchers: rank 0 reports, and every mistake ends every rank."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import frozen
import pytest
import workers_cli
from click.testing import CliRunner
from ranks import once, run_ranks, run_script

from hvd_pipe.cli.bench import message_sizes as sizes
from hvd_pipe.cli.main import main
from hvd_pipe.planning.cluster import Cluster

SHORT = ("--budget", "3", "--max-bytes", "4MiB")
CONSOLE_SCRIPT = str(Path(sys.executable).with_name("hvd-pipe"))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bench")


@pytest.fixture(scope="module")
def outcomes(directory: Path) -> Any:
    """What each of two ranks printed, asked for a document, a cluster and a picture."""
    written = [x for n in ("cluster.json", "again.json") for x in ("-o", str(directory / n))]
    return once(lambda: run_ranks(2, workers_cli.bench, *SHORT, *written, "--json"))


def test_rank_0_alone_reports(outcomes: Any, directory: Path) -> None:
    (code, output, said), other = outcomes()
    assert code == 0, said
    assert other == (0, "", "")
    document = json.loads(output)
    frozen.compare_types("cli/bench", document)
    assert document["workers"] == 2
    assert document["controller"] == "MPI"
    assert document["delay_s"] >= 0
    # Over MPI, one thread negotiates and carries.
    assert document["cluster"]["network"]["measured"]["blocking"] is True
    assert document["written"] == [str(directory / "cluster.json"), str(directory / "again.json")]
    assert {row["bytes"] for row in document["rows"]} <= set(sizes(4 * 2**20))
    for row in document["rows"]:
        # Of two workers, each sends half of a message twice.
        assert row["busbw_bytes_per_s"] == pytest.approx(row["bytes"] / row["seconds"])


def test_the_cluster_and_the_picture_are_written(outcomes: Any, directory: Path) -> None:
    document = json.loads(outcomes()[0][1])
    cluster = Cluster.load(directory / "cluster.json")
    assert json.loads(cluster.to_json()) == document["cluster"]
    assert cluster.workers == cluster.network.measured_workers == 2
    assert cluster.network.measured_per_node == 2
    model = cluster.comm()
    for row in document["rows"]:
        assert model(row["bytes"]) == pytest.approx(row["model_s"])
    assert cluster.with_workers(16).comm()(2**20) > 0
    assert (directory / "again.json").read_bytes() == (directory / "cluster.json").read_bytes()


# nightly: each of these starts new interpreters, which import both frameworks.
@pytest.mark.nightly
def test_the_console_script_under_horovodrun() -> None:
    output = run_script(2, CONSOLE_SCRIPT, "bench", "--budget", "1", "--max-bytes", "1MiB")
    lines = [
        line.removeprefix("[1,0]<stdout>:")
        for line in output.splitlines()
        if line.startswith("[1,0]<stdout>:")
    ]
    assert lines[0] == "all-reduce on 2 ranks (MPI, cpu)"
    assert lines[1].split()[:2] == ["message", "time"]
    assert any(line.startswith("Delay") and "model: " in line for line in lines)
    assert "[1,1]<stdout>" not in output
    assert "\x1b" not in output  # no colours into a pipe


def test_a_mistake_is_told_once_and_ends_all_ranks() -> None:
    with pytest.raises(AssertionError) as caught:
        run_script(2, CONSOLE_SCRIPT, "bench", "--budget", "0")
    message = str(caught.value)
    assert "exit status 2" in message
    assert message.count("0.0 is not in the range") == 1
    assert "Traceback" not in message


def test_ranks_with_other_options_are_told() -> None:
    for code, output, said in run_ranks(
        2, workers_cli.bench_by_rank, SHORT, ("--budget", "2.5", "--max-bytes", "4MiB")
    ):
        assert (code, output) == (1, "")
        assert "--budget 3" in said
        assert "--budget 2.5" in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--max-bytes", "1KB"), "at least 2048 bytes"),
        (("-o", "model.txt"), "must end in .json"),
    ],
)
def test_wrong_input_is_refused_before_anything_is_sent(
    arguments: tuple[str, ...], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    monkeypatch.setenv("TTY_COMPATIBLE", "0")
    result = CliRunner().invoke(main, ["bench", *arguments], prog_name="hvd-pipe")
    assert result.exit_code == 2
    assert said in result.stderr
    assert not result.stdout
