"""What ranks that differ are told."""

import doctest

from hvd_pipe.runtime import agreement


def test_doctests() -> None:
    result = doctest.testmod(agreement)
    assert result.failed == 0
    assert result.attempted == 2
