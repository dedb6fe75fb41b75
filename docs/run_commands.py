#!/usr/bin/env python3
"""Run every command of every page: ``make docs-check``.

    python docs/run_commands.py                     # all pages
    python docs/run_commands.py docs/elastic.md     # this one

The commands of a page run one after another in a new folder, a copy of the checkout with a
`train.py` in it: the tutorial's script with its line changed, or, for the page of elastic jobs,
with that page's loop. What a command writes is there for those after it. `sudo` is left out; who
is not root skips such commands. `docs/commands.toml` has the commands that do not run as they
stand. The first entry that fits a command counts. An entry names pages, a command in which ``*``
stands for anything, and one of

- ``as``: what runs in its place, in which ``{command}`` is the command;
- ``test``: the test of the suite that does what it does;
- ``why_not``: why it is not run.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests import pages

ROOT = pages.ROOT
WAYS = ("as", "test", "why_not")
LIMIT_S = 420.0
TAIL = 25  # lines of a command that fails
# What may run as it stands; anything else needs an entry.
PROGRAMS = {"source", "export", "mkdir", "cp", "chmod", "printf", "tar", ".venv/bin/pre-commit"}
PROGRAMS |= {"hvd-pipe", "horovodrun", "torchrun", "python", ".venv/bin/python"}
PROGRAMS |= {".venv/bin/horovodrun"}
LASTING = ("source ", "export ")  # they hold for the rest of the page


@dataclass(frozen=True)
class Entry:
    """A command, or several alike, that do not run as they stand."""

    on: tuple[str, ...]
    command: str
    way: str
    text: str

    def has(self, page: str, command: str) -> bool:
        pattern = ".*".join(map(re.escape, self.command.split("*")))
        return page in self.on and re.fullmatch(pattern, command) is not None


@cache
def entries() -> tuple[Entry, ...]:
    text = (ROOT / "docs" / "commands.toml").read_text()
    read = []
    for entry in tomllib.loads(text)["command"]:
        ((way, words),) = ((key, entry[key]) for key in entry if key in WAYS)
        read.append(Entry(tuple(entry["on"]), entry["command"], way, words))
    return tuple(read)


def entry_of(page: str, command: str) -> Entry | None:
    return next((entry for entry in entries() if entry.has(page, command)), None)


def every_command() -> list[tuple[str, str]]:
    """All commands, in the order of the pages, with their page."""
    return [(pages.name_of(p), command) for p in pages.pages() for command in pages.commands(p)]


def wrong_entries() -> Iterator[str]:
    """What commands.toml has too much, or lacks; `docs/check.py` calls this."""
    every = every_command()
    for page, command in every:
        words = [word for word in command.split() if not re.match(r"[A-Z_]+=|sudo$", word)]
        if entry_of(page, command) is None and words[0] not in PROGRAMS:
            yield f"{page}: {command}: {words[0]} needs an entry in docs/commands.toml"
    for entry in entries():
        for page in entry.on:
            if not any(one == page and entry_of(one, command) is entry for one, command in every):
                yield f"docs/commands.toml: {page} has no command for {entry.command!r}"
        file, _, name = entry.text.partition("::")
        path = ROOT / file
        if entry.way == "test" and not (path.is_file() and f"def {name}(" in path.read_text()):
            yield f"docs/commands.toml: there is no test {entry.text}"


def train_script(page: str) -> str:
    """The `train.py` that pages speak of."""
    script = _python(ROOT / "docs" / "tutorial.md")
    script = script.replace("import horovod.torch as hvd", "import hvd_pipe.torch as hvd")
    if page == "docs/elastic.md":
        script, _, _ = script.partition("for epoch in range")
        step = "x, y = next(iter(loader)); optimizer.zero_grad()\n        "
        step += "nn.functional.cross_entropy(model(x), y).backward(); optimizer.step()"
        return f"{script}steps = 30\n{_python(ROOT / page).replace('...', step)}"
    done = "    optimizer.synchronize()\n    accuracy ="
    return script.replace("    accuracy =", done)


def _python(page: Path) -> str:
    return next(block.text for block in pages.blocks(page) if block.language == "python")


def make_folder(folder: Path, page: str) -> None:
    """Copy the checkout: what git knows, and the environment as a link."""
    words = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    subprocess.run(["git", "init", "-q", str(folder)], check=True)
    (folder / ".venv").symlink_to(sys.prefix)
    (folder / "train.py").write_text(train_script(page))


def environment(folder: Path) -> dict[str, str]:
    variables = {
        "PATH": f"{Path(sys.prefix) / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(folder),
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "TF_ENABLE_ONEDNN_OPTS": "0",
    }
    if os.geteuid() == 0:
        variables |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return {**os.environ, **variables}


def run(line: str, folder: Path) -> tuple[int | None, str]:
    """Run a line of the shell; return its exit status, None if it took too long, and its words."""
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(
            ["bash", "-c", line],
            cwd=folder,
            env=environment(folder),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        status: int | None = None
        try:
            with suppress(subprocess.TimeoutExpired):
                status = process.wait(LIMIT_S)
        finally:
            for number in (signal.SIGTERM, signal.SIGKILL):
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
                    with suppress(subprocess.TimeoutExpired):
                        process.wait(10.0)
        output.seek(0)
        return status, output.read()


def carry_out(page: str, commands: list[str], ran: set[str], bar: tqdm[None]) -> Iterator[str]:
    """Run the commands of a page, print a line for each one, and yield how each one ended."""
    with tempfile.TemporaryDirectory(prefix="hvd-pipe-page-") as name:
        folder, lasting = Path(name), ""
        make_folder(folder, page)
        for command in commands:
            entry, begun, tail = entry_of(page, command), time.monotonic(), ""
            bar.set_description(page)
            line = entry.text.replace("{command}", command) if entry else command
            if entry and entry.way != "as":
                outcome = f"not run: {line}" if entry.way == "why_not" else f"by {line}"
            elif entry and line in ran:
                outcome = f"ran before, as: {line}"
            elif re.search(r"\bsudo ", line) and os.geteuid() != 0:
                outcome = "needs root"
            else:
                status, output = run(lasting + re.sub(r"\bsudo ", "", line), folder)
                ended = "was ended" if status is None else f"status {status}"
                outcome = "ok" if status == 0 else f"failed: {ended}"
                tail = "" if status == 0 else "\n".join(output.splitlines()[-TAIL:])
                ran |= {line} if entry and status == 0 else set()
                outcome += f", as: {entry.text}" if entry else ""
                if command.startswith(LASTING):
                    lasting += f"{command}\n"
            seconds = time.monotonic() - begun
            bar.write(f"{page}  {command}\n    {seconds:.1f} s  {outcome}", file=sys.stdout)
            if tail:
                bar.write(f"    | {tail}".replace("\n", "\n    | "), file=sys.stdout)
            sys.stdout.flush()
            bar.update()
            yield re.split(r":| tests/", outcome)[0]


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that what was started ends
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    names = list(dict.fromkeys(page for page, _ in every_command()))
    parser.add_argument("pages", nargs="*", help="default: all pages that have commands")
    chosen = parser.parse_args().pages or names
    if unknown := [page for page in chosen if page not in names]:
        parser.error(f"pages without commands: {', '.join(unknown)}")
    wrong = list(wrong_entries())
    print("\n".join(wrong) or "docs/commands.toml: every entry has a command")
    every = {page: [c for one, c in every_command() if one == page] for page in chosen}
    counts: Counter[str] = Counter()
    ran: set[str] = set()
    with tqdm(total=sum(map(len, every.values())), unit="command") as bar:
        for page, commands in every.items():
            counts.update(carry_out(page, commands, ran, bar))
        took = bar.format_dict["elapsed"]
    parts = ", ".join(f"{count} {how}" for how, count in counts.most_common())
    print(f"{counts.total()} commands in {took / 60:.1f} min: {parts}")
    return 1 if wrong or counts["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
