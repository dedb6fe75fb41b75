"""What a message costs: the parts that `benchmarks/message_cost.py` reads from two clocks."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import message_cost

NAMES = ("4 KiB/1/spins", "4 KiB/2/sleeps")
SKEW = 100.0  # seconds by which the clocks differ


def timeline() -> tuple[dict[str, Any], str]:
    """Rounds of one message and of two: launched at 0, looked at 1, sent at 3, ended at 7 or 11.

    Whoever spins has noticed at once, whoever sleeps 0.5 s later.
    """
    events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "pid": 0, "args": {}}]
    clock: dict[str, Any] = {}
    start, numbers = 0.0, {}
    for name in NAMES:
        count, late = int(name.split("/")[1]), 0.5 * ("sleeps" in name)
        for i in range(count):
            numbers[name, i] = len(numbers) + 1
            label = {"name": f"allreduce.{name}.{i}"}
            meta = {"ph": "M", "name": "process_name", "pid": numbers[name, i], "args": label}
            events.append(meta)
        for _ in range(message_cost.WARM_UP + 2):
            end = start + 3 + 4 * count
            events.append({"ph": "i", "name": "CYCLE_START", "ts": 1e6 * (start + 1)})
            for i in range(count):
                pid, at = numbers[name, i], start + 3 + 4 * i
                events += [
                    {"ph": "B", "name": "ALLREDUCE", "pid": pid, "ts": 1e6 * at},
                    {"ph": "B", "name": "GLOO_ALLREDUCE", "pid": pid, "ts": 1e6 * (at + 0.1)},
                    {"ph": "E", "pid": pid, "ts": 1e6 * (at + 3.9)},
                    {"ph": "E", "pid": pid, "ts": 1e6 * (at + 4)},
                ]
            clock.setdefault(name, []).append([start + SKEW, end + late + SKEW])
            start = end + 5
    # Horovod's file begins a list and may lack its end.
    return clock, "[\n" + ",\n".join(map(json.dumps, events)) + ","


@pytest.mark.parametrize(("name", "wire", "wake"), [(NAMES[0], 4.0, 0.0), (NAMES[1], 8.0, 0.5)])
def test_the_parts_are_those_of_the_timeline(name: str, wire: float, wake: float) -> None:
    found = message_cost.taken_apart(*timeline())[name]
    wanted = {"queue": 1.0, "negotiate": 2.0, "wire": wire, "wake": wake}
    assert found == pytest.approx({**wanted, "whole": sum(wanted.values())})
