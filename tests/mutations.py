"""Plant faults in hvd_pipe, one at a time, and see that a test notices each of them.

    .venv/bin/python tests/mutations.py                all: about an hour on two cores
    .venv/bin/python tests/mutations.py --shard 1/4    every fourth, from the first on
    .venv/bin/python tests/mutations.py --changed REV  those that files changed since REV touch
    .venv/bin/python tests/mutations.py --list         what is planted where
    .venv/bin/python tests/mutations.py --only cocod   names and files that match

`mutations.toml` is the list. For each fault:

1. ``hvd_pipe`` and ``tests`` are copied into a temporary folder, so that the tree stays as it is;
2. one piece of text of one function is replaced there;
3. the fault's tests run in the copy, to the first failure or the time limit: first those that
   ``make test`` runs, and the others where these pass.

A fault is caught where a test fails ("caught") or stands still ("hung"). It is not where its tests
cannot run ("BROKEN": an import or a fixture raises), as no test has looked then. They run once
without a fault before all: a test that fails then catches nothing. This is no part of the suite:
``tests/single/test_mutations.py`` only sees to it that the list still fits the sources.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
LIST = Path(__file__).with_name("mutations.toml")
IN_MAKE_TEST = "not nightly and not cluster and not cuda"  # as the Makefile has it
COPIED = ("hvd_pipe", "tests", "pyproject.toml")
LIMIT_S = 300.0  # of a fault's tests; on_ranks makes a test that hangs fail after 150
BASELINE_S = 1200.0  # of the tests without a fault
GRACE_S = 60.0  # a pytest that is told to end ends its ranks first

CAUGHT, HUNG, MISSED, BROKEN = "caught", "hung", "MISSED", "BROKEN"


@dataclass(frozen=True)
class Mutation:
    """One fault; `mutations.toml` says what its fields are."""

    name: str
    file: str
    old: str
    new: str
    tests: list[str]
    function: str = ""


MUTATIONS = [Mutation(**fault) for fault in tomllib.loads(LIST.read_text())["fault"]]


@dataclass(frozen=True)
class Outcome:
    """What became of one fault.

    Args:
        mutation: The fault.
        verdict: One of `CAUGHT`, `HUNG`, `MISSED` and `BROKEN`.
        by: The test that failed, or why there is none.
        in_make_test: Whether ``make test`` runs that test.
        seconds: What this took.
    """

    mutation: Mutation
    verdict: str
    by: str
    in_make_test: bool
    seconds: float


def sources_of(mutation: Mutation, tree: Path = ROOT) -> str:
    """Return the text of the file that a mutation changes."""
    return (tree / "hvd_pipe" / mutation.file).read_text()


def applied(mutation: Mutation, text: str) -> str:
    """Return the file's text with the fault.

    Raises:
        ValueError: The function is not there, or has not the text to replace exactly once.
    """
    start, end = _span(mutation.function, text) if mutation.function else (0, len(text))
    count = text.count(mutation.old, start, end) if end else 0
    if count != 1:
        place = f"{mutation.function or 'the file'} of hvd_pipe/{mutation.file}"
        problem = f"has {mutation.old!r} {count} times, not once" if end else "is not there"
        raise ValueError(
            f"{mutation.name!r}: {place} {problem}: give mutations.toml the text of today."
        )
    at = text.index(mutation.old, start, end)
    return text[:at] + mutation.new + text[at + len(mutation.old) :]


def _span(name: str, text: str) -> tuple[int, int]:
    """Return where a function or class, by its qualified name, starts and ends; (0, 0) if none."""
    node: ast.AST = ast.parse(text)
    for part in name.split("."):
        within = (child for child in ast.walk(node) if getattr(child, "name", None) == part)
        node = next((child for child in within if isinstance(child, _DEFINITIONS)), ast.Pass())
    if not isinstance(node, _DEFINITIONS):
        return 0, 0
    lines = text.splitlines(keepends=True)
    first = min(each.lineno for each in (node, *node.decorator_list))
    return len("".join(lines[: first - 1])), len("".join(lines[: node.end_lineno]))


_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


@contextmanager
def copied() -> Iterator[Path]:
    """Make a copy of what tests need, and remove it in the end."""
    with tempfile.TemporaryDirectory(prefix="mutation-") as name:
        tree = Path(name)
        for each in COPIED:
            source = ROOT / each
            if source.is_dir():
                shutil.copytree(source, tree / each)
            else:
                shutil.copy(source, tree / each)
        yield tree


def run_tests(tree: Path, tests: Sequence[str], limit_s: float) -> tuple[int, str]:
    """Run tests of a copied tree.

    Args:
        tree: The copy.
        tests: Words of a pytest command line.
        limit_s: Seconds until they are ended.

    Returns:
        Pytest's exit status, or -1 where the time was over, and its output.
    """
    command = [sys.executable, "-m", "pytest", "-q", "--tb=line", "-rfE", "-p", "no:cacheprovider"]
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    log = tree / "log"
    with log.open("wb") as out:
        running = subprocess.Popen(
            [*command, *tests], cwd=tree, env=environment, stdout=out, stderr=subprocess.STDOUT
        )
        try:
            status = running.wait(limit_s)
        except subprocess.TimeoutExpired:
            status = -1
        finally:  # a KeyboardInterrupt comes this way, too
            if running.poll() is None:
                running.terminate()
                try:
                    running.wait(GRACE_S)
                except subprocess.TimeoutExpired:
                    running.kill()
                    running.wait()
    return status, log.read_text(errors="replace")


def plant(mutation: Mutation) -> Outcome:
    """Plant one fault, and run its tests: those of ``make test``, and the others if these pass."""
    begun = time.monotonic()

    def outcome(verdict: str, by: str, in_make_test: bool = False) -> Outcome:
        return Outcome(mutation, verdict, by, in_make_test, time.monotonic() - begun)

    with copied() as tree:
        try:
            text = applied(mutation, sources_of(mutation, tree))
        except ValueError as error:
            return outcome(BROKEN, str(error))
        (tree / "hvd_pipe" / mutation.file).write_text(text)
        for marks, in_make_test in ((IN_MAKE_TEST, True), (f"not ({IN_MAKE_TEST})", False)):
            words = ["-x", "-m", marks, *mutation.tests]
            status, output = run_tests(tree, words, LIMIT_S)
            if status == -1:
                return outcome(HUNG, " ".join(mutation.tests), in_make_test)
            if status in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
                continue
            failed = failures(output)
            if status != pytest.ExitCode.TESTS_FAILED or not failed:  # what failed is no test
                return outcome(BROKEN, output[-1500:])
            return outcome(CAUGHT, failed[0], in_make_test)
    return outcome(MISSED, " ".join(mutation.tests))


def failures(output: str) -> list[str]:
    """Return the names of the tests that pytest says have failed.

    An error is none of them: a file was not collected or a fixture failed, and no test looked.
    """
    return re.findall(r"^FAILED (\S+::.+?)(?: - .*)?$", output, re.MULTILINE)


def baseline(mutations: Sequence[Mutation]) -> list[str]:
    """Run the tests of all mutations without a fault; return what pytest says of failures."""
    words = sorted({test for mutation in mutations for test in mutation.tests})
    with copied() as tree:
        status, output = run_tests(tree, words, BASELINE_S)
    return [f"pytest ended with {status}:\n{output[-3000:]}"] if status else []


def changed_since(revision: str) -> list[Mutation]:
    """Return the faults whose file, or whose tests or what these depend on, have changed."""
    changed: set[str] = set()
    for listing in (("diff", "--name-only", revision), ("ls-files", "-o", "--exclude-standard")):
        command = ["git", *listing, "--", "hvd_pipe", "tests"]
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        changed.update(listed.stdout.splitlines())

    def touches(mutation: Mutation) -> bool:
        files = {test.partition("::")[0] for test in mutation.tests}
        needed = {f"hvd_pipe/{mutation.file}"}.union(*(modules_of(file) for file in files))
        return bool(needed & changed)

    return [mutation for mutation in MUTATIONS if touches(mutation)]


@cache
def modules_of(test: str) -> frozenset[str]:
    """Return the modules in ``tests`` that a test file depends on, itself among them.

    These are its conftest.py files, and what any of them imports or names as a script. By these,
    tests in ``tests/parallel`` depend on all that runs ranks.
    """
    known = {path.stem: path for path in TESTS.rglob("*.py")}
    found: set[Path] = set()
    new = {ROOT / test} | {
        path for path in TESTS.rglob("conftest.py") if path.parent in (ROOT / test).parents
    }
    while new:
        found |= new
        named = [pair for path in new for pair in _NAMED.findall(path.read_text())]
        names = {module or script for module, script in named}
        new = {known[name] for name in names & known.keys()} - found
    return frozenset(str(path.relative_to(ROOT)) for path in found)


_NAMED = re.compile(r'^\s*(?:from|import) (\w+)|"(\w+)\.py"', re.MULTILINE)


def write_table(path: Path, outcomes: Sequence[Outcome]) -> None:
    """Put rows into the table of all faults; those of other faults stay."""
    rows = {}
    if path.exists():
        lines = [line for line in path.read_text().splitlines() if line.startswith("| ")]
        rows = {line.split(" | ")[0].removeprefix("| "): line for line in lines[2:]}
    for each in outcomes:
        by = f"`{each.by.removeprefix('tests/')}`" if each.verdict == CAUGHT else each.verdict
        quick = by if each.in_make_test else "no"
        rows[each.mutation.name] = (
            f"| {each.mutation.name} | `{each.mutation.file}` | {quick} | {by} |"
        )
    known = [rows[each.name] for each in MUTATIONS if each.name in rows]
    quick_count = sum(" | no | " not in row for row in known)
    missed = sum(f" | {MISSED} |" in row or f" | {BROKEN} |" in row for row in known)
    path.write_text(
        "# Planted faults\n\n"
        "Written by `python tests/mutations.py --table tests/planted-faults.md`: the test that "
        f"caught each fault. Of {len(MUTATIONS)} faults {len(known) - missed} were caught by "
        f"`make test-all`, {quick_count} of them by `make test`.\n\n"
        "| fault | planted in | `make test` | `make test-all` |\n| --- | --- | --- | --- |\n"
        + "\n".join(known)
        + "\n"
    )


def _chosen(parser: argparse.ArgumentParser, given: argparse.Namespace) -> list[Mutation]:
    """Return the faults that the arguments name; exits where these cannot be."""
    try:
        pattern = re.compile(given.only or "")
        chosen = changed_since(given.changed) if given.changed else MUTATIONS
    except re.error as error:
        parser.error(f"--only is a regular expression, got {given.only!r}: {error}")
    except subprocess.CalledProcessError as error:
        parser.error(f"--changed: git says {error.stderr.strip()}")
    matching = [m for m in chosen if pattern.search(m.name) or pattern.search(m.file)]
    if given.only and chosen and not matching:
        parser.error(f"no fault has a name or a file that matches {given.only!r}: see --list")
    if not given.shard:
        return matching
    shard = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", given.shard)
    if not shard or int(shard[1]) > int(shard[2]):
        parser.error(f"--shard is K/N, such as 1/4, got {given.shard!r}")
    return matching[int(shard[1]) - 1 :: int(shard[2])]


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0 where every fault is caught."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", metavar="PATTERN", help="names and files that match this")
    parser.add_argument("--shard", metavar="K/N", help="every N-th fault, from the K-th on")
    parser.add_argument("--changed", metavar="REV", help="faults that changed files touch")
    parser.add_argument("--list", action="store_true", help="show the table, and run nothing")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="faults at a time")
    parser.add_argument("--no-baseline", action="store_true", help="trust the tests as they are")
    parser.add_argument("--table", type=Path, metavar="FILE", help="put the results into a table")
    given = parser.parse_args(arguments)
    if given.jobs < 1:
        parser.error(f"--jobs is 1 or more, got {given.jobs}")
    if given.table and not given.table.parent.is_dir():
        parser.error(f"--table: there is no folder {given.table.parent}")
    chosen = _chosen(parser, given)
    if not chosen:
        print("there is no such fault: nothing to do")
        return 0
    if given.list:
        for mutation in chosen:
            print(mutation.name, mutation.file, *mutation.tests, sep="\n    ")
        return 0
    if not given.no_baseline:
        begun = time.monotonic()
        failed = baseline(chosen)
        print(f"without a fault: {time.monotonic() - begun:.0f} s", flush=True)
        if failed:
            print("these fail without a fault:", *failed, sep="\n  ")
            return 1
    outcomes = []
    with ThreadPoolExecutor(given.jobs) as pool:
        for number, one in enumerate(pool.map(plant, chosen), 1):
            outcomes.append(one)
            print(
                f"{number:3}/{len(chosen)} {one.verdict:6} {one.seconds:4.0f} s  "
                f"{'make test    ' if one.in_make_test else 'make test-all'}  "
                f"{one.mutation.name}: {one.by}",
                flush=True,
            )
            if given.table:
                write_table(given.table, outcomes)
    counts = {v: sum(o.verdict == v for o in outcomes) for v in (CAUGHT, HUNG, MISSED, BROKEN)}
    print(", ".join(f"{count} {verdict}" for verdict, count in counts.items()))
    print(f"{sum(o.in_make_test for o in outcomes)} of {len(outcomes)} by make test")
    return int(counts[MISSED] + counts[BROKEN] > 0)


if __name__ == "__main__":
    sys.exit(main())
