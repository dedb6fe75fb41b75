"""A commit is whole or not there, whatever fails while it is made."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from horovod.common.exceptions import HorovodInternalError

import hvd_pipe.torch as hvd


class Waiting(torch.optim.SGD):
    """Its state waits for a message, which fails where a worker is lost."""

    fails = False

    def state_dict(self) -> dict[str, Any]:
        if self.fails:
            raise HorovodInternalError("Connection reset by peer")
        return super().state_dict()


def test_a_commit_in_which_a_message_fails_leaves_the_last_one_whole() -> None:
    """The model of this commit came back with the step of the one before."""
    model = torch.nn.Linear(2, 1)
    optimizer = Waiting(model.parameters(), lr=0.1)
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, step=0)
    before = model.weight.detach().clone()
    with torch.no_grad():
        model.weight += 1
    state.step = 1
    optimizer.fails = True
    with pytest.raises(HorovodInternalError):
        state.save()
    optimizer.fails = False
    state.restore()
    assert state.step == 0
    assert torch.equal(model.weight, before)
