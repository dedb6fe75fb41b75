"""``hvd-pipe``: commands, options and JSON, as people's scripts have them, and what they compute.

``tests/data/frozen/cli`` holds what each command takes, and one JSON document of each. Where a
change is meant, this rewrites the files::

    REWRITE_FROZEN=1 python -m pytest tests/single/test_public_cli.py

The documents of commands that measure are compared by their keys and types, where those commands
run anyway: test_cli_doctor.py, test_cli_profile.py, tests/parallel/test_cli_bench.py.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import click
import frozen
import pytest
from click.testing import CliRunner

from hvd_pipe.cli.main import main

ROOT = Path(__file__).parents[2]
PROFILE = "tests/data/alexnet.graph.txt"
NETWORK = "--bandwidth 10gbit --latency 30us"
CLUSTER = f"-n 16 {NETWORK}"

# Commands that only compute: a name and its arguments.
COMPUTED = {
    "plan": f"{PROFILE} {CLUSTER}",
    "plan-bytes": f"{PROFILE} {CLUSTER} --bucket-bytes 8MB --compression int8",
    "advise": f"{PROFILE} {CLUSTER} --compression none --compression fp16 --momentum 0.9 "
    "--learning-rate 0.1 --curvature 1 --memory 16GB",
    "simulate": f"{PROFILE} {NETWORK} --sweep 4,16 --steps 8",
    "simulate-unlike": f"{PROFILE} {NETWORK} --speeds 1,1,2 --steps 8 --method cocod "
    "--method horovod --method local-sgd --method pipe-sgd",
    "partition": f"{PROFILE} --machines 2x2 {NETWORK} --inner-bandwidth 80gbit --memory 16GB",
    "partition-2bw": f"{PROFILE} -n 4 {NETWORK} --straight --versions 2bw",
    "trace": f"{PROFILE} --strategy cocod:period=2 -n 2 {NETWORK} --steps 2",
}

# Every variable that hvd_pipe reads itself.
VARIABLES = {
    "HVD_PIPE_CACHE",
    "HVD_PIPE_CARRIER",
    "HVD_PIPE_CHECK",
    "HVD_PIPE_CHECK_SEED",
    "HVD_PIPE_PROFILE",
    "HVD_PIPE_STRATEGY",
    "HVD_PIPE_TIMELINE",
    "HVD_PIPE_TIMELINE_MB",
    "HVD_PIPE_TIMEOUT",
}


def test_commands_and_options() -> None:
    context = click.Context(main)
    found = {f"hvd-pipe {_names(each)}": _parameter(each) for each in main.params}
    for name in main.list_commands(context):
        command = main.get_command(context, name)
        assert command is not None
        for each in command.params:
            found[f"hvd-pipe {name} {_names(each)}"] = _parameter(each)
    frozen.compare("cli/options", found)


@pytest.mark.parametrize("name", COMPUTED)
def test_json_of_what_is_computed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    command = name.partition("-")[0]
    arguments = [command, *COMPUTED[name].split(), "--json"]
    if command == "trace":
        arguments += ["-o", str(tmp_path / "trace.json")]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    if command == "trace":
        document["output"] = Path(document["output"]).name
    frozen.compare_numbers(f"cli/{name}", document)


def test_environment_variables() -> None:
    """The list, the source and the docs name the same variables."""
    source = "".join(path.read_text() for path in (ROOT / "hvd_pipe").rglob("*.py"))
    docs = "".join(path.read_text() for path in [ROOT / "README.md", *ROOT.glob("docs/**/*.md")])
    names = set(re.findall(r"(?<![A-Z_])HVD_PIPE_[A-Z][A-Z_]*[A-Z]", source))
    assert names == VARIABLES
    assert set(re.findall(r"(?<![A-Z_])HVD_PIPE_[A-Z][A-Z_]*[A-Z]", docs)) >= VARIABLES


def _names(each: click.Parameter) -> str:
    return "/".join([*each.opts, *each.secondary_opts])


def _parameter(each: click.Parameter) -> str:
    """What a script can rely on: type and default; none of the help's words."""
    if isinstance(each, click.Option):
        kind = "flag" if each.is_flag else "repeatable option" if each.multiple else "option"
    else:
        kind = "argument"
    words = [kind, *([] if kind == "flag" else [_type(each.type)])]
    words += ["required"] if each.required else []
    if type(each.default) in (str, int, float, bool, tuple, list):
        words.append(f"default {each.default!r}")
    if each.nargs != 1:
        words.append(f"nargs {each.nargs}")
    return ", ".join(words)


def _type(kind: click.ParamType) -> str:
    if isinstance(kind, click.Choice):
        return "|".join(map(str, kind.choices))
    if isinstance(kind, click.IntRange | click.FloatRange):
        low, high = "(" if kind.min_open else "[", ")" if kind.max_open else "]"
        return f"{kind.name} {low}{kind.min}, {kind.max}{high}"
    return kind.name
