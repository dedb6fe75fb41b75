"""``hvd-pipe profile``: models by their factories, scripts by their names, and wrong input."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import frozen
import psutil  # type: ignore[import-untyped]
import pytest
from click.testing import CliRunner, Result

from hvd_pipe.cli.main import main
from hvd_pipe.cli.profile import Target
from hvd_pipe.cli.script import _warn_of
from hvd_pipe.measuring.facts import Facts
from hvd_pipe.planning.profile import LayerProfile, ModelProfile

pytestmark = pytest.mark.slow

NETS = """
import torch
from torch import nn

def mlp():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))

def fails():
    raise ValueError("no weights here")

def frozen():
    return mlp().requires_grad_(False)

class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.out = nn.Embedding(50, 8), nn.Linear(8, 2)

    def forward(self, words, mask):
        h = self.words(words) * mask[..., None]
        return {"logits": [self.out(h)], "name": "words"}

class Nothing(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return None

def cross_entropy(output):
    return nn.functional.cross_entropy(output, torch.zeros(len(output), dtype=torch.long))

def same(output):
    return output
"""

Invoke = Callable[..., Result]


@pytest.fixture
def invoke(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Invoke:
    """Invoke ``hvd-pipe profile`` in a directory with models and scripts."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    # A module's name stays known to Python, so each test has its own.
    (tmp_path / f"nets_{tmp_path.name}.py").write_text(NETS)
    (tmp_path / "nets.py").write_text(NETS)
    (tmp_path / "hello.py").write_text("print('hello')\n")
    (tmp_path / "syntax.py").write_text("def f(:\n")
    return lambda *arguments: CliRunner().invoke(
        main, ["profile", *arguments], prog_name="hvd-pipe"
    )


def test_a_model_of_a_file_or_a_module(invoke: Invoke, tmp_path: Path) -> None:
    result = invoke("nets.py:mlp", "--input", "5,8")
    assert result.exit_code == 0, result.output
    profile = ModelProfile.load(tmp_path / "mlp.profile.json")
    assert (profile.name, profile.batch) == ("mlp", 5)
    assert int(profile.gradient_bytes().sum()) == 4 * (8 * 16 + 16 + 16 * 4 + 4)
    assert min(profile.forward_s, profile.backward_s) > 0
    assert "slowest layers" in result.stdout
    assert "for 5 samples" in result.stdout
    assert "hvd-pipe advise mlp.profile.json" in result.stdout
    module = f"nets_{tmp_path.name}"
    loss = ("--loss", f"{module}:cross_entropy")
    result = invoke(f"{module}:mlp", "--input", "5,8", *loss, "-o", "p.json")
    assert result.exit_code == 0, result.output
    assert ModelProfile.load(tmp_path / "p.json").batch == 5


def test_several_inputs_integers_and_nested_outputs(invoke: Invoke) -> None:
    result = invoke("nets.py:Words", "--input", "3,7:int64", "--input", "3,7:bool", "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    frozen.compare_types("cli/profile", document)
    assert document["path"] == "Words.profile.json"
    assert document["batch"] == 3
    assert document["profile"]["gradient_bytes"] == 4 * (50 * 8 + 8 * 2 + 2)
    assert {"words", "out"} <= {layer["name"] for layer in document["layers"]}


WRONG = [
    ("mlp", "neither a script (train.py) nor a model"),
    ("nets.py:mlp", "say what the model is fed: --input"),
    ("nets.py:mlp --input 5;8", "--input takes sizes and perhaps a dtype"),
    ("nets.py:mlp --input 5,9", "RuntimeError: mat1 and mat2 shapes cannot be multiplied (5x9"),
    ("nets.py:fails --input 5,8", "ValueError: no weights here"),
    ("nets.py:frozen --input 5,8", "has no parameter to train"),
    ("nets.py:Nothing --input 5,8", "has no tensor with a gradient: say with --loss"),
    ("nets.py:mlp --input 5,8 --loss nets.py:same", "one number with a gradient, got a [5, 4]"),
    ("nets.py:mlp --input 5,8 --device gpu", "--device gpu: "),
    ("absent.py:mlp --input 5,8", "absent.py: No such file"),
    ("syntax.py:mlp --input 5,8", "importing syntax.py failed: SyntaxError"),
    ("--input 5,8 hello.py", "--input: for models only"),
]


@pytest.mark.parametrize(("arguments", "said"), WRONG)
def test_wrong_input_is_one_line(
    invoke: Invoke, tmp_path: Path, arguments: str, said: str
) -> None:
    result = invoke(*arguments.split())
    assert result.exit_code == 2
    assert said in " ".join(result.stderr.split())
    assert not result.stdout
    assert "Traceback" not in result.output
    assert not [*tmp_path.glob("*.profile.json")]


def script(
    directory: Path, *arguments: str, command: str = "profile"
) -> subprocess.CompletedProcess[str]:
    """Run the command as a process: a script prints to a real stderr."""
    return subprocess.run(
        [sys.executable, "-m", "hvd_pipe", command, *arguments],
        cwd=directory,
        capture_output=True,
        text=True,
        check=False,
        timeout=400,
        env={k: v for k, v in os.environ.items() if not k.startswith("HVD_PIPE_")},
    )


@pytest.mark.nightly
@pytest.mark.parametrize("prepare", ["ADAM", "BY_OURS"])
def test_profile_of_a_script(tmp_path: Path, prepare: str) -> None:
    (tmp_path / "train.py").write_text(PLAIN.replace("PREPARE", globals()[prepare]))
    run = script(tmp_path, "--json", "train.py", "100", "1000")
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout)["profile"]["name"] == "train"
    profile = ModelProfile.load(tmp_path / "train.profile.json")
    assert profile.gradient_order()[0].startswith("1.")
    assert not [*tmp_path.glob(".*")]


PLAIN = """
import sys, time
import torch
from torch.utils.data import DataLoader, TensorDataset
model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
PREPARE
steps = int(sys.argv[1])
print("options", sys.argv[1:])
data = DataLoader(TensorDataset(torch.ones(8 * steps, 4)), batch_size=8, num_workers=1)
for (x,) in data:
    optimizer.zero_grad()
    model(x).sum().backward()
    optimizer.step()
time.sleep(float(sys.argv[2]))
"""
ADAM = "optimizer = torch.optim.Adam(model.parameters())"
BY_DDP = """
import torch.distributed as dist
dist.init_process_group("gloo")
assert dist.get_world_size() == 1
model = torch.nn.parallel.DistributedDataParallel(model)
"""
BY_HOROVOD = """
import horovod.torch as hvd
hvd.init()
optimizer = torch.optim.Adam(model.parameters())
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
"""
BY_OURS = BY_HOROVOD.replace("horovod.", "hvd_pipe.")
LBFGS = (
    "optimizer = torch.optim.LBFGS(model.parameters())\n"
    "step = optimizer.step\n"
    "optimizer.step = lambda: step(lambda: model(torch.ones(1, 4)).sum())"
)
INVALID = "invalid literal for int()"
SPAWNS = 'torch.multiprocessing.start_processes(print, start_method="fork"); sys.exit(0)'
RAISES = f"{ADAM}\nleft = [1, 1]\noptimizer.register_step_post_hook(lambda *_: left.pop())"
REFUSES = """
import os
if "RANK" in os.environ:
    raise RuntimeError("no GPU for a worker of torchrun")
"""
NETWORK = ("--workers", "16", "--bandwidth", "1gbit")
SMALL = 4 * (4 * 3 + 3 + 3 * 2 + 2)


def check(directory: Path, prepare: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run ``hvd-pipe check`` on a script of its own."""
    (directory / "train.py").write_text(PLAIN.replace("PREPARE", prepare))
    return script(directory, *arguments, command="check")


@pytest.mark.parametrize(
    "prepare",
    [
        pytest.param(ADAM, id="alone", marks=pytest.mark.nightly),
        pytest.param(BY_DDP + ADAM, id="DDP"),
        pytest.param(BY_HOROVOD, id="Horovod", marks=pytest.mark.nightly),
        pytest.param(BY_OURS, id="hvd_pipe"),
        pytest.param(REFUSES + ADAM, id="not under torchrun"),
    ],
)
def test_check_measures_a_script_without_changing_it(tmp_path: Path, prepare: str) -> None:
    arguments = ("--json", *NETWORK, "-o", "kept.json", "train.py", "100", "1000")
    run = check(tmp_path, prepare, *arguments)
    assert run.returncode == 0, run.stderr
    assert "options ['100', '1000']" in run.stderr
    document = json.loads(run.stdout)
    frozen.compare_types("cli/check", document)
    assert document["profile"]["gradient_bytes"] == SMALL
    assert 0.0 < document["compute_s"] < 10.0
    assert 1 < document["facts"]["steps"] < 20  # stock Horovod's step() is two, one in another
    assert document["ratio"] == document["all_reduce_s"] / document["compute_s"]
    memory = {row["strategy"]: row["memory_bytes"] for row in document["rows"]}
    # Weights, gradients, and Adam's state, two numbers a weight and a few a tensor.
    assert 4 * SMALL <= memory["merged-gradient"] <= 6 * SMALL
    assert list(memory)[:2] == ["horovod", "merged-gradient"]
    # As DDP's own names have module. in front, and a job's plans have not.
    names = {layer.name for layer in ModelProfile.load(tmp_path / "kept.json").layers}
    assert names >= {"0.weight", "0.bias", "1.weight", "1.bias"}


SHARDED = """
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
dist.init_process_group("gloo")
"""
CPU = 'torch.distributed.init_device_mesh("cpu", (1,))'
FSDP1 = f'model = FullyShardedDataParallel(model, device_id=torch.device("cpu"))\n{ADAM}'
FSDP2 = f"fully_shard(model, mesh={CPU})\n{ADAM}"
ZERO = (
    "from torch.distributed.optim import ZeroRedundancyOptimizer\n"
    "optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam)"
)


@pytest.mark.parametrize(
    "prepare",
    [
        pytest.param(FSDP1, id="FSDP1", marks=pytest.mark.nightly),
        pytest.param(FSDP2, id="FSDP2"),
        pytest.param(ZERO, id="ZeRO"),
    ],
)
def test_check_refuses_what_is_sharded(tmp_path: Path, prepare: str) -> None:
    run = check(tmp_path, SHARDED + prepare, *NETWORK, "train.py", "30", "1000")
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("Do not bother: train.py divides its parameters or the")


TWO = (
    "optimizer = torch.optim.Adam(model[0].parameters())\n"
    "other = torch.optim.SGD(model[1].parameters(), lr=0.1)\n"
    "step = optimizer.step\n"
    "optimizer.step = lambda: (step(), other.step())"
)


def test_check_measures_optimizers_that_take_turns(tmp_path: Path) -> None:
    run = check(tmp_path, TWO, *NETWORK, "train.py", "30", "1000")
    assert run.returncode == 0, run.stderr
    assert f"train: {SMALL} B of gradients, Adam and SGD on cpu" in run.stdout


LATE = (
    f"{ADAM}\n"
    "late = torch.optim.SGD(model.parameters(), lr=0.1)\n"
    "step, count = optimizer.step, iter(range(99))\n"
    "optimizer.step = lambda: (step(), late.step() if next(count) == 9 else None)"
)


def test_check_names_what_it_did_not_measure(tmp_path: Path) -> None:
    run = check(tmp_path, LATE, *NETWORK, "train.py", "30", "1000")
    assert run.returncode == 0, run.stderr
    assert "SGD is not measured, as its first step came later" in " ".join(run.stdout.split())


@pytest.mark.parametrize(
    ("prepare", "arguments", "said"),
    [
        (ADAM, ["train.py", "5", "0"], "ended after 5 steps of PyTorch's optimizers"),
        (SPAWNS, ["train.py", "5", "0"], "ended after 0 steps of PyTorch's optimizers"),
        (ADAM, ["train.py", "many", "0"], INVALID),
        (f"{REFUSES}os.environ['RANK']", ["train.py", "30", "0"], "alone, KeyError: 'RANK'"),
        (ADAM, ["torchrun", "--nproc-per-node", "2", "train.py", "30"], "torchrun: name the file"),
        (REFUSES + SPAWNS, ["train.py", "5", "0"], "torchrun; alone, see above. A script"),
        pytest.param(
            *("import os; os.abort()", ["train.py", "0", "0"], "train.py failed (SIGABRT)"),
            marks=pytest.mark.nightly,
        ),
        (ADAM, ["--steps", "5", "train.py", "30", "0"], "--steps: for models only"),
        pytest.param(
            *(LBFGS, ["train.py", "30", "0"], "LBFGS computes gradients within its steps"),
            marks=pytest.mark.nightly,
        ),
        (ADAM, ["absent.py"], "absent.py: No such file"),
        (RAISES, ["train.py", "30", "0"], "train.py failed (exit status 1) after 2 steps"),
    ],
)
def test_check_says_why_it_has_not_measured(
    tmp_path: Path, prepare: str, arguments: list[str], said: str
) -> None:
    run = check(tmp_path, prepare, *NETWORK, *arguments)
    assert run.returncode in {1, 2}
    assert said in run.stderr
    assert not run.stdout
    assert ("Once more, alone" in run.stderr) == (prepare.startswith(REFUSES) or said == INVALID)
    assert ("A script that needs a GPU" in run.stderr) == (SPAWNS in prepare)
    assert "runpy" not in run.stderr


def test_a_measurement_beside_other_work_is_told_of(capsys: pytest.CaptureFixture[str]) -> None:
    for longest_s, said in ((0.15, []), (0.25, ["warning: steps took 100 ms to 250 ms"])):
        _warn_of(0.0, Facts("SGD", 1.0, "cpu", 15, (0.1, longest_s)))
        assert [line[:36] for line in capsys.readouterr().err.splitlines()] == said


STUBBORN = """
import os, pathlib, signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.fork()
pathlib.Path(f"{os.getpid()}.pid").touch()
time.sleep(1000)
"""


@pytest.mark.parametrize("times", [1, 2])
def test_a_check_that_is_ended_leaves_nothing(tmp_path: Path, times: int) -> None:
    (tmp_path / "train.py").write_text(PLAIN.replace("PREPARE", STUBBORN))
    command = [sys.executable, "-m", "hvd_pipe", "check", *NETWORK, "train.py"]
    environment = {**os.environ, "TMPDIR": os.fspath(tmp_path)}
    process = subprocess.Popen(
        command, cwd=tmp_path, stderr=subprocess.DEVNULL, env=environment, process_group=0
    )
    try:
        while len(pids := [int(path.stem) for path in tmp_path.glob("*.pid")]) < 2:
            assert process.poll() is None
            time.sleep(0.1)
        for _ in range(times):
            process.terminate()
            time.sleep(0.5)
        assert process.wait(100) == 128 + signal.SIGTERM
    finally:
        process.kill()
    ended = time.monotonic() + 60
    while any(map(_runs, pids)) and time.monotonic() < ended:
        time.sleep(0.1)
    assert not any(map(_runs, pids))
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]


def _runs(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@pytest.mark.usefixtures("invoke")
def test_check_asks_for_a_network_before_it_runs_anything() -> None:
    result = CliRunner().invoke(main, ["check", "hello.py"], prog_name="hvd-pipe")
    assert result.exit_code == 2
    assert "describe the network: --bandwidth 10gbit" in result.stderr


def profile_of(before_s: float, *layers: tuple[int, float]) -> ModelProfile:
    """A model of layers with so many bytes of gradients and seconds of backward."""
    made = [LayerProfile(f"layer{i}", size, seconds) for i, (size, seconds) in enumerate(layers)]
    return ModelProfile((LayerProfile("(forward)", 0, 0.0, before_s), *made), name="net")


EVEN = profile_of(0.1, *[(10**7, 0.02)] * 10)
LATE_GRADIENTS = profile_of(0.05, (10**8, 0.3))
EARLY = profile_of(0.01, (1000, 0.3), (10**8, 0.0))


@pytest.mark.parametrize(
    ("profile", "network", "said"),
    [
        (
            EVEN,
            "-n 16 --bandwidth 100gbit",
            "Do not bother: an all-reduce takes 0.053 times as long",
        ),
        (
            EVEN,
            "--machines 1x8 --inner-bandwidth 300GB/s",
            "Do not bother: all workers are in one machine",
        ),
        (EARLY, "-n 16 --bandwidth 8gbit", "Do not bother: no strategy gains more than 5%"),
        (
            EVEN,
            "-n 16 --bandwidth 5gbit",
            "It is worth a try. Expected speed, as a multiple of stock Horovod's: "
            "merged-gradient:overlap=forward, which is exact, 1.",
        ),
        (EVEN, "-n 16 --bandwidth 5gbit --memory 1MB", "Do not bother: no strategy fits"),
        (LATE_GRADIENTS, "-n 16 --bandwidth 10gbit", "Only strategies that change the updates"),
        (
            EVEN,
            "-n 16 --bandwidth 500mbit",
            "Only strategies that change the updates help. Expected speed, as a multiple of stock "
            "Horovod's: merged-gradient:overlap=forward, which is exact, 1.03 times, and cocod",
        ),
        (EVEN, "-n 1 --bandwidth 1gbit", "Do not bother: one worker sends nothing."),
    ],
)
def test_what_check_concludes(
    monkeypatch: pytest.MonkeyPatch, profile: ModelProfile, network: str, said: str
) -> None:
    monkeypatch.setattr(Target, "measure", lambda _: (profile, None))
    words = [*network.split(), "train.py"]
    result = CliRunner().invoke(main, ["check", *words], prog_name="hvd-pipe")
    assert result.exit_code == 0, result.output
    assert said in " ".join(result.stdout.split())
    document = json.loads(CliRunner().invoke(main, ["check", "--json", *words]).stdout)
    assert document["worth_it"] is not said.startswith("Do not bother")
    assert said in document["verdict"]


@pytest.mark.usefixtures("invoke")
def test_check_of_a_model() -> None:
    words = ["check", *NETWORK, "nets.py:mlp", "--input", "5,8"]
    result = CliRunner().invoke(main, words, prog_name="hvd-pipe")
    assert result.exit_code == 0, result.output
    assert "mlp: 848 B of gradients" in result.stdout
