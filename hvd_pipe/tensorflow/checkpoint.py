"""What ``tf.train.Checkpoint`` holds of a distributed optimizer: what is in flight.

It lies beside the optimizer's own variables, under ``hvd_pipe``: checkpoints load without
hvd_pipe, and plain ones load here, with nothing in flight. A checkpoint of each rank's own goes on
bit for bit. Where all ranks load the one of rank 0, its gradient or snapshot stands for theirs.
What ``strategy="auto"`` has chosen lies there, too, and holds for as many workers.
"""

from __future__ import annotations

import io
import json
import logging
from typing import Any

import numpy as np
import tensorflow as tf
from horovod.tensorflow.mpi_ops import rank, size

from hvd_pipe.planning.methods import spell
from hvd_pipe.strategy import Auto, parse
from hvd_pipe.tensorflow import pending
from hvd_pipe.tensorflow.graphs import Arrays
from hvd_pipe.tensorflow.messages.reduction import RESIDUAL

_log = logging.getLogger("hvd_pipe")

_VERSION = 1


class InFlight(tf.train.experimental.PythonState):  # type: ignore[misc]
    """The state of an optimizer's sessions, asked for when a checkpoint is written."""

    def __init__(self, sessions: Any) -> None:
        super().__init__()
        self._sessions = sessions

    def serialize(self) -> bytes:
        """Return all that is in flight; waits for what has been sent."""
        pending.settle()
        arrays: Arrays = {}
        for number, state in self._sessions.states().items():
            for name, array in state.items():
                # NumPy's files know no bfloat16; float32 has all of its values.
                odd = array.dtype == tf.bfloat16.as_numpy_dtype
                arrays[f"{number}/{name}"] = array.astype(np.float32) if odd else array
        head = {
            "version": _VERSION,
            "strategy": self._sessions.method.name,
            "rank": rank(),
            "size": size(),
        }
        if self._sessions.chosen is not None:
            head["chosen"] = spell(self._sessions.chosen)
        file = io.BytesIO()
        np.savez(file, allow_pickle=False, head=np.array(json.dumps(head)), **arrays)
        return file.getvalue()

    def deserialize(self, string_value: bytes) -> None:
        """Go on from a `serialize`; sessions that do not exist yet load their part when made."""
        with np.load(io.BytesIO(string_value), allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        head = json.loads(str(arrays.pop("head")))
        self._choose(head)
        strategy = self._sessions.method.name
        if head["version"] != _VERSION or head["strategy"] != strategy:
            _log.warning(
                "the checkpoint holds what %s had in flight: %s starts with nothing in flight",
                head["strategy"],
                strategy,
            )
            self._sessions.go_back(None)
            return
        is_others = (head["rank"], head["size"]) != (rank(), size())
        if is_others:
            arrays = {name: array for name, array in arrays.items() if f"/{RESIDUAL}" not in name}
        # A plan, and for how many workers it is, are the same on all ranks.
        names = [name for name in arrays if not name.endswith(("/plan", "/workers"))]
        if is_others and names:
            _log.warning(
                "rank %d of %d goes on with what rank %d of %d had in flight; for a run that goes "
                "on bit for bit, save and load on each rank, or call optimizer.synchronize() "
                "on all ranks before saving",
                *(rank(), size(), head["rank"], head["size"]),
            )
        states: dict[int, Arrays] = {}
        for name, array in arrays.items():
            number, _, label = name.partition("/")
            states.setdefault(int(number), {})[label] = array
        self._sessions.go_back(states)

    def _choose(self, head: dict[str, Any]) -> None:
        """Under ``auto``, go on with the choice that the checkpoint holds, if it still stands."""
        sessions, text = self._sessions, head.get("chosen")
        if not isinstance(sessions.strategy, Auto) or text is None or head["version"] != _VERSION:
            return
        if head["size"] != size():
            _log.info("auto: %s was chosen for %d workers: measures again", text, head["size"])
            return
        method = parse(text)
        assert not isinstance(method, Auto)
        candidates, _ = sessions.arguments.candidates(sessions.strategy)
        if method.name in [candidate.name for candidate in candidates]:
            _log.info("auto: goes on with %s, as chosen before", text)
            sessions.follow(method)
