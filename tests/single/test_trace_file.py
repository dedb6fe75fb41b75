"""The file of a running job: it can be read at any time, and keeps within its limit."""

from __future__ import annotations

import errno
import json
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from unittest.mock import Mock

import pytest

from hvd_pipe.runtime.timeline import TraceFile
from hvd_pipe.timeline import _read as events

LIMIT = 10**6

WRITER = """
import sys
from pathlib import Path
from hvd_pipe.runtime.timeline import TraceFile
file = TraceFile(Path(sys.argv[1]), 10**8, str)
print("ready", flush=True)
i = 0
while True:
    file.add('{"i":%d,"pad":"%s"}' % (i, "x" * (i % 97)))
    i += 1
"""


def number(i: int) -> str:
    return json.dumps({"i": i})


def test_all_events_can_be_read_at_any_time(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    file = TraceFile(path, LIMIT, str)
    assert events(path) == []
    for i in range(20):
        file.add(number(i))
        assert events(path) == [{"i": k} for k in range(i + 1)]
    file.close()
    file.close()
    file.add(number(99))
    assert json.loads(path.read_text()) == [{"i": k} for k in range(20)]


@pytest.mark.parametrize("limit", [4096, 20_000])
def test_the_limit_holds(tmp_path: Path, limit: int, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "trace.json"
    marker = json.dumps({"marker": "x" * 400})
    file = TraceFile(path, limit, lambda: marker)
    with caplog.at_level(logging.WARNING, "hvd_pipe"):
        for i in range(2000):
            file.add(number(i))
        file.close()
    assert path.stat().st_size <= limit
    found = events(path)
    assert found[-1] == json.loads(marker)
    assert found[:-1] == [{"i": i} for i in range(len(found) - 1)]
    assert path.stat().st_size > limit - 600
    assert [record.message for record in caplog.records] == [
        f"{path} is full ({limit} bytes): raise HVD_PIPE_TIMELINE_MB"
    ]


def test_a_full_disk_ends_the_file_and_not_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = TraceFile(tmp_path / "trace.json", LIMIT, str)
    file.add(number(0))
    real, calls = file._file, []
    assert real is not None

    def part_then_full(data: bytes) -> int:
        calls.append(len(data))
        if len(calls) == 1:
            return real.write(data[:5])
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real.write(data)

    monkeypatch.setattr(file, "_file", Mock(write=part_then_full))
    file.add(number(1))
    assert events(file.path) == [{"i": 0}]
    file.add(number(2))
    file.close()
    assert events(file.path) == [{"i": 0}]
    assert "No space left on device" in caplog.text


def test_threads_may_add(tmp_path: Path) -> None:
    file = TraceFile(tmp_path / "trace.json", LIMIT, str)

    def work(start: int) -> None:
        for i in range(start, start + 1000):
            file.add(number(i))

    threads = [threading.Thread(target=work, args=(1000 * k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    file.close()
    assert sorted(event["i"] for event in events(file.path)) == list(range(4000))


def test_a_forked_child_leaves_the_file_alone(tmp_path: Path) -> None:
    file = TraceFile(tmp_path / "trace.json", LIMIT, str)
    file.add(number(0))
    child = os.fork()
    if child == 0:
        file.add(json.dumps("longer than what the parent writes there"))
        file.close()
        os._exit(0)
    os.waitpid(child, 0)
    file.add(number(2))
    file.close()
    assert events(file.path) == [{"i": 0}, {"i": 2}]


def test_the_file_of_a_killed_process_can_be_read(tmp_path: Path) -> None:
    rng = random.Random(1)
    for attempt in range(4):
        path = tmp_path / f"trace{attempt}.json"
        writer = subprocess.Popen([sys.executable, "-c", WRITER, path], stdout=subprocess.PIPE)
        assert writer.stdout is not None
        with writer, writer.stdout:
            writer.stdout.readline()
            while path.stat().st_size < 4000:  # more than ten events, however busy the machine
                time.sleep(0.001)
            time.sleep(rng.uniform(0.0, 0.05))
            writer.send_signal(signal.SIGKILL)
        found = events(path)
        assert [event["i"] for event in found] == list(range(len(found)))
        assert len(found) > 10
