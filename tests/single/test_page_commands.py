"""The commands of README, docs/ and CONTRIBUTING: they run, or what they name exists.

Every command of README is run here or by the test that `ELSEWHERE` names; so are the commands
``hvd-pipe`` of the pages about planning and timelines. All other commands need a cluster,
containers or minutes: here only their scripts, options and make targets are looked up.
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import click
import pytest

from hvd_pipe.cli.main import main
from hvd_pipe.planning.cluster import Cluster, Network
from hvd_pipe.planning.comm import CommModel
from hvd_pipe.timeline import Event, Timeline
from tests import pages

EXAMPLES = "tests/parallel/test_example_runs.py"

# Commands of README that this file does not run: the test that runs the same, or why none does.
ELSEWHERE = {
    "make demo": f"{EXAMPLES}::test_digits_compares_all_strategies",
    "make test": "this is part of it, and it would start itself again",
    "horovodrun -np 2 python torch_examples/digits.py --compare": (
        f"{EXAMPLES}::test_digits_compares_all_strategies"
    ),
    "HVD_PIPE_STRATEGY=cocod:period=8 horovodrun -np 4 python train.py": (
        f"{EXAMPLES}::test_mnist_takes_its_strategy_from_the_environment"
    ),
}
RUN = ("README.md", "docs/planning.md", "docs/timelines.md", "docs/tutorial.md")
FOLDERS = r"\.ci|benchmarks|docker|docs/launching|docs/kubernetes|tests|t[fo]\w+_examples"
SHOWN = "docs/worth-it.md"  # the block behind a command is what the command prints

TRAIN = """
import torch
import hvd_pipe.torch as hvd

hvd.init()
model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
for step in range(1000):
    optimizer.zero_grad()
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
"""


def _in_order(page: str) -> Iterator[str]:
    """The commands of a page, without comments and continuations."""
    for block in pages.blocks(pages.ROOT / page):
        if block.language == "":
            for line in block.text.replace("\\\n", " ").splitlines():
                command = re.sub(r"(^|\s+)#\s.*", "", line).strip()
                if command:
                    yield command


COMMANDS = sorted(
    {(page, each) for page in map(pages.name_of, pages.pages()) for each in _in_order(page)}
)


def _names(commands: list[tuple[str, str]]) -> list[str]:
    return [f"{page}: {command}" for page, command in commands]


@pytest.mark.parametrize(("page", "command"), COMMANDS, ids=_names(COMMANDS))
def test_what_a_command_names_exists(page: str, command: str) -> None:
    words = [word for word in shlex.split(command) if not re.match(r"[A-Z_]+=", word)]
    phony = re.search(r"^\.PHONY:(.*)$", (pages.ROOT / "Makefile").read_text(), re.MULTILINE)
    for one, following in zip(words, [*words[1:], ""], strict=True):
        if one == "make" and words[0] == "make":
            assert following in phony[1].split(), f"the Makefile has no target {following!r}"
        if re.match(rf"({FOLDERS})/", one):
            assert (pages.ROOT / one.split("::")[0]).exists(), f"there is no {one}"
        if one == "hvd-pipe":
            name, *options = _of_program(words, "hvd-pipe")
            group = click.Context(main, info_name="hvd-pipe")
            subcommand = main.get_command(group, name)
            assert subcommand is not None, f"hvd-pipe has no command {name!r}"
            context = click.Context(subcommand, info_name=name, parent=group)
            subcommand.make_parser(context).parse_args(options)  # raises for an unknown option


def _of_program(words: list[str], program: str) -> list[str]:
    """The words after a program, up to what ends its command in a shell."""
    after = words[words.index(program) + 1 :]
    ends = [i for i, word in enumerate(after) if word in {"&&", "|", ";"}]
    return after[: ends[0]] if ends else after


def test_every_command_of_readme_is_run() -> None:
    mine = {command for page, command in COMMANDS if page == "README.md"}
    here = {command for command in mine if command.startswith("hvd-pipe ")}
    assert mine - here == set(ELSEWHERE)
    assert here


@pytest.mark.parametrize("test", sorted({value for value in ELSEWHERE.values() if "::" in value}))
def test_the_test_that_runs_it_exists(test: str) -> None:
    file, _, name = test.partition("::")
    tree = ast.parse((pages.ROOT / file).read_text())
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the pages' commands read: a script, a cluster that was measured, a job's timeline."""
    folder = tmp_path_factory.mktemp("pages")
    (folder / "train.py").write_text(TRAIN)
    (folder / "tests").symlink_to(pages.ROOT / "tests")
    ring = CommModel.linear(1e-4, 1e-9)
    measured = Network(None, measured=ring, measured_workers=2)
    Cluster(2, measured).save(folder / "cluster.json")
    (folder / "run").mkdir()
    for rank in range(2):
        passes = (
            Event("0", "forward", rank, "compute", start_s=0.0, duration_s=1.2),
            Event("0", "backward", rank, "compute", start_s=1.2, duration_s=2.0),
        )
        Timeline(passes).save(folder / "run" / f"rank{rank}.json")
    return folder


@pytest.fixture(scope="module")
def ran() -> set[str]:
    """Commands that stand on more than one page run once."""
    return set()


@pytest.mark.slow
@pytest.mark.parametrize("page", RUN)
def test_commands_run(
    page: str, folder: Path, ran: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    mine = [command for command in _in_order(page) if command.startswith("hvd-pipe ")]
    assert mine
    for command in mine:
        if command not in ran:
            words = shlex.split(command)[1:]
            status = main.main(words, prog_name="hvd-pipe", standalone_mode=False)
            assert status in {None, 0}, f"{command} ended with status {status}"
            if "-o" in words:
                assert Path(words[words.index("-o") + 1]).stat().st_size > 0
            ran.add(command)


OUTPUTS = [
    (command.text.strip(), output.text)
    for command, output in pairwise(pages.blocks(pages.ROOT / SHOWN))
    if output.language == "text"
]


@pytest.mark.slow
@pytest.mark.parametrize(("command", "output"), OUTPUTS, ids=[command for command, _ in OUTPUTS])
def test_a_page_shows_what_a_command_prints(
    command: str,
    output: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "80")
    main.main(shlex.split(command)[1:], prog_name="hvd-pipe", standalone_mode=False)
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert printed == output.splitlines()
