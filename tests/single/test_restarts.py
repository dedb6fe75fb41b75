"""What is put around Horovod's functions: they stay what they are to whoever else uses them."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

from hvd_pipe.runtime import restarts


def test_a_surrounded_function_keeps_its_attributes() -> None:
    """Only argtypes went through: a restype that was set later had no effect on the call."""
    entered = []

    @contextmanager
    def around() -> Iterator[None]:
        entered.append("in")
        yield
        entered.append("out")

    library = ctypes.CDLL(None)
    function = library.strtod
    restarts.surround(library, "strtod", around, lambda: True)
    library.strtod.restype = ctypes.c_double
    library.strtod.argtypes = [ctypes.c_char_p, ctypes.c_void_p]
    assert library.strtod(b"2.5", None) == 2.5
    assert function.restype is library.strtod.restype is ctypes.c_double
    assert library.strtod.__name__ == "strtod"
    assert entered == ["in", "out"]
