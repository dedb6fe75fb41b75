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
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

SUMMARY = Path(__file__).with_name("summary.md")
HEAVIEST = 20


def write(report: Path) -> None:
    """Write the summary of a run."""
    suite = ElementTree.parse(report).getroot().find("testsuite")
    assert suite is not None, f"{report} is no report of pytest"
    counts = {key: int(suite.get(key, 0)) for key in ("tests", "failures", "errors", "skipped")}
    seconds: Counter[str] = Counter()
    tests: Counter[str] = Counter()
    failed: list[str] = []
    for case in suite.iter("testcase"):
        file = re.sub(r"\.Test\w+$", "", case.get("classname") or "").replace(".", "/")
        seconds[file] += float(case.get("time", 0.0))
        tests[file] += 1
        if case.find("failure") is not None or case.find("error") is not None:
            failed.append(f"- `{case.get('classname')}::{case.get('name')}`")
    describe = ["git", "describe", "--always", "--dirty"]
    done = subprocess.run(describe, cwd=SUMMARY.parent, capture_output=True, text=True, check=True)
    passed = counts["tests"] - counts["failures"] - counts["errors"] - counts["skipped"]
    lines = [
        "# The last run of `make test-all`",
        "",
        f"{suite.get('timestamp', '')[:10]}, commit {done.stdout.strip()}, "
        f"{os.cpu_count()} cores: {passed} passed, {counts['failures']} failed, "
        f"{counts['errors']} errors, {counts['skipped']} skipped in "
        f"{float(suite.get('time', 0)) / 60:.0f} min, {sum(seconds.values()):.0f} worker-seconds.",
        "",
        *(["Failed:", "", *failed, ""] if failed else []),
        f"The {HEAVIEST} heaviest files:",
        "",
        "| file | tests | worker-seconds |",
        "| --- | --: | --: |",
    ]
    for file, taken in seconds.most_common(HEAVIEST):
        lines.append(f"| {file}.py | {tests[file]} | {taken:.0f} |")
    SUMMARY.write_text("\n".join(lines) + "\n")


def age() -> str:
    """Return in a line how old the summary is."""
    dated = re.search(r"^(\d{4}-\d\d-\d\d), .*$", SUMMARY.read_text(), re.MULTILINE)
    assert dated is not None, "tests/summary.md has no date: run make test-all"
    today = datetime.datetime.now(datetime.UTC).date()
    days = (today - datetime.date.fromisoformat(dated[1])).days
    return f"make test-all ran {days} days ago: {dated[0]}"


if __name__ == "__main__":
    if sys.argv[1:] == ["--age"]:
        print(age() if SUMMARY.exists() else "make test-all has not run: no tests/summary.md")
    else:
        write(Path(sys.argv[1]))
