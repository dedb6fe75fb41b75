"""What ranks that differ are told."""

import doctest

from hvd_pipe.torch import agree


def test_doctests() -> None:
    result = doctest.testmod(agree)
    assert result.failed == 0
    assert result.attempted == 2
