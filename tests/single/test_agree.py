"""What ranks that differ are told."""

import doctest

from hvd_pipe.runtime import agreement, argument_checks, bucket_planner


def test_doctests() -> None:
    for module, examples in ((agreement, 2), (argument_checks, 3), (bucket_planner, 4)):
        result = doctest.testmod(module)
        assert result.failed == 0
        assert result.attempted == examples
