"""Plant faults in hvd_pipe, one at a time, and see that a test notices each of them.

    .venv/bin/python tests/mutations.py                all: about 40 minutes on two cores
    .venv/bin/python tests/mutations.py --list         what is planted where
    .venv/bin/python tests/mutations.py --only cocod   names and files that match

`mutation_table.MUTATIONS` is the list. For each entry:

1. ``hvd_pipe`` and ``tests`` are copied into a temporary folder, so that the tree stays as it is;
2. one piece of text of one file is replaced there;
3. the entry's tests run in the copy, to the first failure or the time limit.

A fault is caught where a test fails ("caught") or stands still ("hung"). It is not where its tests
cannot run ("BROKEN": an import or a fixture raises), as no test has looked then. They run once
without a fault before all: a test that fails then catches nothing. This is no part of the suite:
``tests/single/test_mutations.py`` only sees to it that the table still fits the sources.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mutation_table import MUTATIONS, Mutation

ROOT = Path(__file__).resolve().parents[1]
COPIED = ("hvd_pipe", "tests", "pyproject.toml")
LIMIT_S = 150.0  # of a fault's tests; without a fault they take less than half of it
BASELINE_S = 1200.0  # of the tests without a fault
GRACE_S = 60.0  # a pytest that is told to end ends its ranks first

CAUGHT, HUNG, MISSED, BROKEN = "caught", "hung", "MISSED", "BROKEN"


@dataclass(frozen=True)
class Outcome:
    """What became of one fault."""

    mutation: Mutation
    verdict: str
    by: str
    seconds: float


def sources_of(mutation: Mutation, tree: Path = ROOT) -> str:
    """Return the text of the file that a mutation changes."""
    return (tree / "hvd_pipe" / mutation.file).read_text()


def applied(mutation: Mutation, text: str) -> str:
    """Return the file's text with the fault.

    Raises:
        ValueError: The text to replace is not there exactly once.
    """
    count = text.count(mutation.old)
    if count != 1:
        raise ValueError(
            f"{mutation.name!r}: hvd_pipe/{mutation.file} holds {mutation.old!r} {count} times, "
            "it must be once: give mutation_table.py the text of today."
        )
    return text.replace(mutation.old, mutation.new)


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


def run_tests(tree: Path, tests: Sequence[str], cases: str, limit_s: float) -> tuple[int, str]:
    """Run tests of a copied tree.

    Args:
        tree: The copy.
        tests: Words of a pytest command line.
        cases: See `cases.run_cases`.
        limit_s: Seconds until they are ended.

    Returns:
        Pytest's exit status, or -1 where the time was over, and its output.
    """
    command = [sys.executable, "-m", "pytest", "-q", "--tb=line", "-rfE", "-p", "no:cacheprovider"]
    environment = {**os.environ, "PYTHONPATH": str(tree), "ONLY_CASES": cases}
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
    """Plant one fault, and run its tests."""
    begun = time.monotonic()

    def outcome(verdict: str, by: str) -> Outcome:
        return Outcome(mutation, verdict, by, time.monotonic() - begun)

    with copied() as tree:
        try:
            text = applied(mutation, sources_of(mutation, tree))
        except ValueError as error:
            return outcome(BROKEN, str(error))
        (tree / "hvd_pipe" / mutation.file).write_text(text)
        words = ["-x", *shlex.split(mutation.tests)]
        status, output = run_tests(tree, words, mutation.cases, LIMIT_S)
    if status == -1:
        return outcome(HUNG, mutation.tests)
    if status == 0:
        return outcome(MISSED, mutation.tests)
    failed = failures(output)
    if status != 1 or not failed:  # nothing ran, or something failed that is no test
        return outcome(BROKEN, output[-1500:])
    return outcome(CAUGHT, failed[0])


def failures(output: str) -> list[str]:
    """Return the names of the tests that pytest says have failed.

    An error is none of them: a file was not collected or a fixture failed, and no test looked.
    """
    return re.findall(r"^FAILED (\S+::.+?)(?: - .*)?$", output, re.MULTILINE)


def baseline(mutations: Sequence[Mutation]) -> list[str]:
    """Run the tests of all mutations without a fault; return what fails."""
    failed = []
    whole = [m for m in mutations if not m.cases]
    narrowed = [m for m in mutations if m.cases]
    for some in filter(None, (whole, narrowed)):
        words = sorted({word for m in some for word in shlex.split(m.tests)})
        cases = "|".join(sorted({m.cases for m in some}))
        with copied() as tree:
            status, output = run_tests(tree, words, cases, BASELINE_S)
        if status:
            failed += failures(output) or [f"pytest ended with {status}:\n{output[-3000:]}"]
    return failed


def table(outcomes: Sequence[Outcome]) -> str:
    """Return the rows for tests/README.md."""
    rows = ["| fault | planted in | caught by |", "| --- | --- | --- |"]
    for each in outcomes:
        tests = [each.by] if each.verdict == CAUGHT else shlex.split(each.mutation.tests)
        names = (test.removeprefix("tests/").replace("|", r"\|") for test in tests)
        by = ", ".join(f"`{name}`" for name in names)
        if each.verdict != CAUGHT:
            by = f"{each.verdict}: {by}"
        rows.append(f"| {each.mutation.name} | `{each.mutation.file}` | {by} |")
    return "\n".join(rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0 where every fault is caught."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", metavar="PATTERN", help="names and files that match this")
    parser.add_argument("--list", action="store_true", help="show the table, and run nothing")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="faults at a time")
    parser.add_argument("--no-baseline", action="store_true", help="trust the tests as they are")
    parser.add_argument("--table", type=Path, metavar="FILE", help="write README's table here")
    given = parser.parse_args(arguments)
    pattern = re.compile(given.only or "")
    chosen = [m for m in MUTATIONS if pattern.search(m.name) or pattern.search(m.file)]
    if not chosen:
        parser.error(f"no fault has a name or a file that matches {given.only!r}: see --list")
    if given.list:
        for mutation in chosen:
            print(f"{mutation.name}\n    {mutation.file}\n    {mutation.tests}")
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
                f"{one.mutation.name}: {one.by}",
                flush=True,
            )
    counts = {v: sum(o.verdict == v for o in outcomes) for v in (CAUGHT, HUNG, MISSED, BROKEN)}
    print(", ".join(f"{count} {verdict}" for verdict, count in counts.items()))
    if given.table:
        given.table.write_text(table(outcomes) + "\n")
    return int(counts[MISSED] + counts[BROKEN] > 0)


if __name__ == "__main__":
    sys.exit(main())
