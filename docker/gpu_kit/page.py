"""The page that the kit writes, from its JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MANY = 12
"""Longer lists of good results are counted, and only what is not good is listed."""

MARKS = {True: "good", False: "**not good**", None: ""}


def text(found: Mapping[str, Any]) -> str:
    """Return the page as Markdown."""
    cpu = found["device"] == "cpu"
    lines = ["# hvd_pipe on a " + ("CPU: the GPU kit's rehearsal" if cpu else "GPU"), ""]
    if cpu:
        lines += [
            "This is no page of a GPU. It is what `docker/gpu_check.sh --cpu` wrote: the same "
            "sections with small sizes over Gloo. What only CUDA runs has not run here: NCCL, "
            "streams, the device's kernels and copies in the profile, the allocator's counts. "
            "Its times are those of a machine that was busy with other things (see the load), "
            "and say nothing about speed.",
            "",
        ]
    lines += [
        f"{found['seconds']:.0f} s in all, of {60 * found['minutes']:.0f}. "
        f"Two ranks share what is here by: {found['way']}.",
        "",
        "| section | state | seconds | good | not good |",
        "| --- | --- | ---: | ---: | ---: |",
    ]
    for section in found["sections"]:
        good, bad = (sum(r["good"] is each for r in section["results"]) for each in (True, False))
        lines.append(
            f"| {section['title']} | {section['state']} | {section['seconds']:.0f} "
            f"| {good} | {bad} |"
        )
    for section in found["sections"]:
        lines += ["", f"## {section['title']}", ""]
        lines += _section(section)
    return "\n".join(lines) + "\n"


def _section(section: Mapping[str, Any]) -> list[str]:
    results = section["results"]
    lines = (
        [f"{section['state'].capitalize()}: {_plain(section['why'])}"] if section["why"] else []
    )
    if not results:
        return lines or ["Nothing was found."]
    judged = [row for row in results if row["good"] is not None]
    if len(judged) > max(MANY, 0.9 * len(results)):
        good = [row for row in judged if row["good"]]
        away = [row["numbers"]["away"] for row in good if "away" in row.get("numbers", {})]
        lines.append(f"{len(good)} of {len(judged)} are good.")
        if away:
            lines.append(f"The farthest of these is {max(away):.1e} away.")
        results = [row for row in results if not row["good"]]
        if not results:
            return lines
    if lines:
        lines.append("")
    lines += ["| what | found | |", "| --- | --- | --- |"]
    for row in results:
        lines.append(f"| {_plain(row['name'])} | {_plain(row['text'])} | {MARKS[row['good']]} |")
    return lines


def _plain(value: str) -> str:
    """Return text that no table is broken by."""
    return " ".join(str(value).replace("|", "\\|").split())
