"""What is put around Horovod's functions: they stay what they are to whoever else uses them."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

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


def test_a_horovod_without_mpi_is_observed() -> None:
    """Its library has no horovod_init_multi_comm, and hvd.init() ended with an AttributeError."""
    seen, running = [], []

    @contextmanager
    def around() -> Iterator[None]:
        seen.append(bool(running))
        yield

    library = SimpleNamespace(
        horovod_init=lambda *_: running.append(True), horovod_shutdown=running.clear
    )
    horovod = SimpleNamespace(
        _basics=SimpleNamespace(MPI_LIB_CTYPES=library), is_initialized=lambda: bool(running)
    )
    restarts.observe(horovod, around, around)
    library.horovod_init(None, 0)
    library.horovod_shutdown()
    assert seen == [False, True]
    assert not hasattr(library, "horovod_init_multi_comm")
