"""A message that cannot be sent, as ranks have gone apart before: every rank says so."""

from __future__ import annotations

import pytest
from horovod.common.exceptions import HorovodInternalError

from hvd_pipe.errors import HvdPipeError
from hvd_pipe.torch.messages import pending

GONE = "Allreduce: Process set provided does not exist, or has not been registered."
OWN = "a tensor of the user's"
OTHER = "Horovod has been shut down"
APART = "Mismatched allreduce tensor shapes"


def send(error: Exception) -> None:
    with pending.explaining():
        raise error


@pytest.mark.parametrize("error", [ValueError(GONE), ValueError(OWN), HorovodInternalError(OTHER)])
@pytest.mark.parametrize(("arrived", "says"), [(True, APART), (True, OTHER), (False, APART)])
def test_what_an_earlier_message_has_heard_is_told(
    monkeypatch: pytest.MonkeyPatch, error: Exception, arrived: bool, says: str
) -> None:
    def heard(handle: int) -> None:
        raise HorovodInternalError(says)

    monkeypatch.setattr(pending, "_handles", {7})
    monkeypatch.setattr(pending, "poll", lambda handle: arrived)
    monkeypatch.setattr(pending, "_synchronize", heard)
    apart = arrived and says == APART
    gone = HorovodInternalError if GONE in str(error) else type(error)
    text = f"ranks have sent different things .*{APART}" if apart else str(error)
    with pytest.raises(HvdPipeError if apart else gone, match=text):
        send(error)
