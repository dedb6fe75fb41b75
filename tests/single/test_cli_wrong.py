"""Wrong input to the planning commands: one clear message, exit code 2, never a traceback."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from hvd_pipe.cli.main import main
from hvd_pipe.planning.profile import LayerProfile, ModelProfile

GOOD = "-n 16 --bandwidth 10gbit"


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory with one good profile and many bad files."""
    monkeypatch.chdir(tmp_path)
    layers = [LayerProfile(f"layer{n}", 4_000_000, 4e-3, 2e-3, 1_000_000) for n in range(4)]
    profile = ModelProfile(tuple(layers), name="tiny")
    profile.save("good.json")
    ModelProfile((LayerProfile("relu", 0, 1e-3),)).save("silent.json")
    Path("binary.json").write_bytes(b"\x89PNG\xff\xfe\x00\x01")
    Path("model.yaml").write_text("layers: []")
    Path("graph.txt").write_text("node1 -- what\n")
    Path("folder").mkdir()


def run(line: str) -> Result:
    return CliRunner().invoke(main, line.split(), env={"COLUMNS": "80"})


@pytest.mark.parametrize(
    ("line", "message"),
    [
        # the profile
        (f"plan binary.json {GOOD}", r"error: binary.json: .*binary data"),
        (f"plan model.yaml {GOOD}", r"error: model.yaml: .* ends in .json .*\.csv .*\.txt"),
        (f"partition graph.txt {GOOD}", r"error: graph.txt"),
        (f"plan silent.json {GOOD}", r"error: .*nothing to send"),
        # the cluster
        ("plan good.json", r"describe the network: --bandwidth 10gbit .*k80-10gbe"),
        ("plan good.json --bandwidth 10gbit", r"say how many workers: --workers 16"),
        ("plan good.json -n 4 --bandwidth 10GB", r"'--bandwidth': .*10GB/s"),
        (f"plan good.json {GOOD} --latency 30", r"'--latency': .*us"),
        ("plan good.json --cluster k80-10bge", r"did you mean k80-10gbe"),
        ("plan good.json --cluster absent.json", r"error: absent.json: No such file"),
        ("plan good.json --cluster good.json", r"error: good.json: .*hvd_pipe.cluster/1"),
        (
            "plan good.json --cluster k80-10gbe --bandwidth 10gbit --latency 1us",
            r"leave out --bandwidth, --latency, or --cluster",
        ),
        (f"plan good.json {GOOD} --inner-bandwidth 1GB/s", r"--workers-per-node 4"),
        (f"plan good.json {GOOD} --workers-per-node 4", r"--inner-bandwidth 100gbit"),
        (
            f"plan good.json {GOOD} --workers-per-node 5 --inner-bandwidth 1GB/s",
            r"take 15 or 20",
        ),
        (f"plan good.json {GOOD} --speeds 1,2", r"--speeds names 2 workers, but there are 16"),
        ("plan good.json --bandwidth 10gbit --speeds 1,0", r"speed"),
        # plan
        (
            f"plan good.json {GOOD} --method exact --bucket-bytes 8MB",
            r"--bucket-bytes belongs to --method bytes",
        ),
        (f"plan good.json {GOOD} -o plan.yaml", r"'plan.yaml' must end in .json"),
        ("plain good.json", r"no such command 'plain': did you mean 'plan'\?"),
        # advise
        (f"advise good.json {GOOD} --allow pipesgd", r"unknown .*did you mean 'pipe-sgd'"),
        # simulate
        (f"simulate good.json {GOOD} --sweep 4,8", r"leave out --workers, or --sweep"),
        ("simulate good.json --bandwidth 1GB/s --sweep 4..8", r"write 4,8,16"),
        (f"simulate good.json {GOOD} --timeline a.json", r"one --method and --workers"),
        # partition
        (f"partition good.json {GOOD} --machines 4x4", r"leave out --workers"),
        ("partition good.json --machines 4x4 --bandwidth 1GB/s", r"--inner-bandwidth"),
        (f"partition good.json {GOOD} --straight", r"stage|layer"),
        (f"partition good.json {GOOD} --plan 2-x", r"'--plan': '2-x' is no plan"),
        (f"partition good.json {GOOD} --plan straight --straight", r"leave it out, or --plan"),
        (f"partition good.json {GOOD} --memory 1kB", r"error: .*memory"),
        (
            "partition good.json --bandwidth 1GB/s --speeds 1,2",
            r"error: .*one speed.*leave out --speeds",
        ),
        (f"partition good.json {GOOD} --versions 2bw --timeline a.png", r"--versions stash"),
        # trace
        ("trace folder -o a.png", r"error: folder .*HVD_PIPE_TIMELINE=folder"),
        ("trace good.json -o a.png", r"error: good.json .*--strategy"),
        (f"trace good.json {GOOD} -o a.png", r"say of which --strategy"),
        ("trace good.json --strategy wfbp -o a.png", r"describe it, e.g. --workers 16"),
        (f"trace folder --strategy wfbp {GOOD} -o a.png", r"'folder' is a directory"),
    ],
)
def test_wrong_input(line: str, message: str) -> None:
    result = run(line)
    assert result.exit_code == 2, result.output
    assert isinstance(result.exception, SystemExit)
    assert result.stdout == ""
    assert re.search(message, " ".join(result.stderr.split())), result.stderr
    assert "Traceback" not in result.stderr
    if result.stderr.startswith("error: "):
        assert result.stderr.count("\n") == 1


def test_wrong_input_leaves_stdout_alone_with_json() -> None:
    result = run(f"plan binary.json {GOOD} --json")
    assert (result.exit_code, result.stdout) == (2, "")
