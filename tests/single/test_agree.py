"""What ranks that differ are told, and what a rank is told when others are gone."""

import doctest

import pytest
import tensorflow as tf
from horovod.common.exceptions import HorovodInternalError
from horovod.common.process_sets import ProcessSet

from hvd_pipe.runtime import arguments, consensus, gradient_index

GONE = "Process set provided does not exist, or has not been registered."


def test_doctests() -> None:
    for module, examples in ((consensus, 2), (arguments, 1), (gradient_index, 7)):
        result = doctest.testmod(module)
        assert result.failed == 0
        assert result.attempted == examples


@pytest.mark.parametrize(
    "error", [ValueError(GONE), tf.errors.InvalidArgumentError(None, None, GONE)]
)
def test_a_process_set_that_goes_between_the_calls_of_an_agreement(error: Exception) -> None:
    """Torch's Horovod raises a ValueError and TensorFlow's an OpError; both are a shutdown."""

    def gather_bytes(data: bytes, name: str, process_set: ProcessSet) -> list[bytes]:
        raise error

    agreement = consensus.Agreement(gather_bytes)
    with pytest.raises(HorovodInternalError, match=f"a process set was removed.*{GONE}"):
        agreement.check_alike([("op", "Sum")], "options", ProcessSet([0, 1]))
    other = RuntimeError("of the user's")
    with pytest.raises(RuntimeError, match="of the user's"), consensus.shutdown_is_told():
        raise other
