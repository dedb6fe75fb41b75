"""What a Horovod is built with, and what follows from that for its source."""

from __future__ import annotations

import importlib.metadata
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from hvd_pipe.build_horovod.edits import Edit, edits
from hvd_pipe.build_horovod.steps import SetupError
from hvd_pipe.build_horovod.system import installed

__all__ = ["Features", "features_here"]


@dataclass(frozen=True)
class Features:
    """What a Horovod is built with, beside Gloo.

    Args:
        torch: The version of PyTorch; None builds without it.
        tensorflow: The version of TensorFlow; None builds without it.
        mpi: Whether it has MPI.
        cuda: Whether it has CUDA.
        nccl: With CUDA: whether a GPU's tensors travel by NCCL, or by way of the host.
    """

    torch: str | None
    tensorflow: str | None
    mpi: bool = True
    cuda: bool = False
    nccl: bool = True

    @property
    def release(self) -> tuple[int, int]:
        """TensorFlow's, as the source edits ask for it."""
        if self.tensorflow is None:
            return 0, 0
        major, minor = self.tensorflow.split(".")[:2]
        return int(major), int(minor)

    @property
    def cxx_standard(self) -> int:
        """The C++ standard that the frameworks' headers need (17, 20, ...).

        Raises:
            SetupError: torch does not say with which it compiles extensions.
        """
        if self.torch is None:
            return 17  # TensorFlow's, 2.16 to 2.21
        standards = re.findall(r"std[=:]c\+\+(\d\d)", _of_torch("utils/cpp_extension.py"))
        if not standards:
            raise SetupError(
                f"torch {self.torch} does not say which C++ standard it needs: adapt cxx_standard "
                "in hvd_pipe/build_horovod/features.py."
            )
        return max(int(standard) for standard in standards)

    @property
    def hides_cuda(self) -> bool:
        """Whether torch is a CUDA build, which this Horovod will not be."""
        told = "" if self.torch is None or self.cuda else _of_torch("version.py")
        return re.search(r"^cuda\b.*=\s*['\"]", told, re.MULTILINE) is not None

    @property
    def edits(self) -> list[Edit]:
        """The edits of Horovod's source."""
        return edits(self.cxx_standard, self.release, self.cuda, self.hides_cuda)


def _of_torch(file: str) -> str:
    """Return a source file of torch, which is not imported: that takes long, and may fail."""
    path = importlib.metadata.distribution("torch").locate_file(f"torch/{file}")
    return Path(str(path)).read_text()


def features_here(
    only: str | None = None, mpi: bool = True, cuda: bool = False, nccl: bool = True
) -> Features:
    """Return the features of a Horovod for the frameworks that are installed.

    Args:
        only: ``"torch"`` or ``"tensorflow"``: build for this one alone.
        mpi: As in `Features`; so are cuda and nccl.
        cuda: See there.
        nccl: See there.

    Raises:
        SetupError: No framework, or not the one that is asked for, is installed.
    """
    found = {
        "torch": installed("torch"),
        "tensorflow": installed("tensorflow-cpu", "tensorflow"),
    }
    wanted = {name: version for name, version in found.items() if only in {None, name}}
    if not any(wanted.values()):
        names = " nor ".join(wanted)
        raise SetupError(
            f"{'neither ' if only is None else 'no '}{names} is installed for {sys.executable}: "
            f"`pip install {only or 'torch'}` first, or run this with the Python that has it."
        )
    return Features(wanted.get("torch"), wanted.get("tensorflow"), mpi, cuda, nccl)
