"""``hvd-pipe completion``: the script of each shell, and that it completes."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from hvd_pipe.cli.main import COMMANDS, main


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_has_a_script(shell: str) -> None:
    result = CliRunner().invoke(main, ["completion", shell])
    assert result.exit_code == 0, result.output
    assert f"_HVD_PIPE_COMPLETE={shell}_complete" in result.stdout
    assert "hvd-pipe" in result.stdout


@pytest.mark.parametrize("arguments", [[], ["csh"], ["bash", "zsh"]])
def test_wrong_input_is_refused(arguments: list[str]) -> None:
    result = CliRunner().invoke(main, ["completion", *arguments])
    assert result.exit_code == 2
    assert not result.stdout


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_bash_completes_commands(tmp_path: Path) -> None:
    command = tmp_path / "hvd-pipe"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m hvd_pipe "$@"\n')
    command.chmod(0o755)
    script = CliRunner().invoke(main, ["completion", "bash"]).stdout
    program = (
        script + '\nCOMP_WORDS=(hvd-pipe ""); COMP_CWORD=1; _hvd_pipe_completion hvd-pipe;'
        ' printf "%s\\n" "${COMPREPLY[@]}"'
    )
    run = subprocess.run(
        ["bash", "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
    )
    assert set(COMMANDS) <= set(run.stdout.split())
