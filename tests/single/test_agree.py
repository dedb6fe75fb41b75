"""What ranks that differ are told."""

import doctest

from hvd_pipe.runtime import argument_checks, bucket_planner, consensus


def test_doctests() -> None:
    for module, examples in ((consensus, 2), (argument_checks, 3), (bucket_planner, 7)):
        result = doctest.testmod(module)
        assert result.failed == 0
        assert result.attempted == examples
