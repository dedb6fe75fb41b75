"""Write what ``make test-all`` came to into tests/summary.md, or say how old that is.

python tests/summary.py build/test-all.xml   pytest's --junitxml
python tests/summary.py --age
"""

from __future__ import annotations

import datetime
import os
import re
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
SUMMARY = Path(__file__).with_name("summary.md")
HEAVIEST = 20


def write(report: Path) -> None:
    """Write the summary of a run."""
    suite = ElementTree.parse(report).getroot().find("testsuite")
    assert suite is not None, f"{report} is no report of pytest"
    counts = {key: int(suite.get(key, 0)) for key in ("tests", "failures", "errors", "skipped")}
    seconds: defaultdict[str, float] = defaultdict(float)
    tests: Counter[str] = Counter()
    for case in suite.iter("testcase"):
        file = re.sub(r"\.Test\w+$", "", case.get("classname") or "").replace(".", "/")
        seconds[file] += float(case.get("time", 0.0))
        tests[file] += 1
    began = datetime.datetime.fromisoformat(suite.get("timestamp", ""))
    folders: defaultdict[str, float] = defaultdict(float)
    for file, taken in seconds.items():
        folders["/".join(file.split("/")[:2])] += taken
    revision = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    passed = counts["tests"] - counts["failures"] - counts["errors"] - counts["skipped"]
    heaviest = sorted(seconds.items(), key=lambda item: -item[1])[:HEAVIEST]
    lines = [
        "# The last run of `make test-all`",
        "",
        f"{began:%Y-%m-%d}, commit {revision}, "
        f"{os.cpu_count()} cores: {passed} passed, {counts['failures']} failed, "
        f"{counts['errors']} errors, {counts['skipped']} skipped in "
        f"{float(suite.get('time', 0)) / 60:.0f} min, {sum(seconds.values()):.0f} worker-seconds.",
        "",
        *_failed(suite),
        "| folder | worker-seconds |",
        "| --- | --: |",
        *(f"| {name} | {taken:.0f} |" for name, taken in sorted(folders.items())),
        "",
        f"The {HEAVIEST} heaviest files:",
        "",
        "| file | tests | worker-seconds |",
        "| --- | --: | --: |",
    ]
    for file, taken in heaviest:
        lines.append(f"| {file}.py | {tests[file]} | {taken:.0f} |")
    SUMMARY.write_text("\n".join(lines) + "\n")


def _failed(suite: ElementTree.Element) -> list[str]:
    """Return lines that name the tests that have failed."""
    names = [
        f"- `{case.get('classname')}::{case.get('name')}`"
        for case in suite.iter("testcase")
        if case.find("failure") is not None or case.find("error") is not None
    ]
    return ["Failed:", "", *names, ""] if names else []


def age() -> str:
    """Return in a line how old the summary is."""
    dated = re.search(r"^(\d{4}-\d\d-\d\d), .*$", SUMMARY.read_text(), re.MULTILINE)
    assert dated is not None, "tests/summary.md has no date: run make test-all"
    days = (
        datetime.datetime.now(datetime.UTC).date() - datetime.date.fromisoformat(dated[1])
    ).days
    return f"make test-all ran {days} days ago: {dated[0]}"


if __name__ == "__main__":
    if sys.argv[1:] == ["--age"]:
        print(age() if SUMMARY.exists() else "make test-all has not run: no tests/summary.md")
    else:
        write(Path(sys.argv[1]))
