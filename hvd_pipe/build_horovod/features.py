"""What a Horovod is built with, and what follows from that for its source."""

from __future__ import annotations

import importlib.metadata
import re
import sys
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from hvd_pipe.build_horovod.system import SetupError, installed


@dataclass(frozen=True)
class Features:
    """What a Horovod is built with, beside Gloo: versions of frameworks, or None for without."""

    torch: str | None
    tensorflow: str | None
    mpi: bool = True
    cuda: bool = False  # and NCCL

    @property
    def cxx_standard(self) -> int:
        """The C++ standard that the frameworks' headers need (17, 20, ...)."""
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
        version = "" if self.torch is None or self.cuda else _of_torch("version.py")
        return re.search(r"^cuda\b.*=\s*['\"]", version, re.MULTILINE) is not None

    @property
    def patches(self) -> dict[str, str]:
        """The patches of Horovod's source, without the reasons above their first line."""
        release = tuple(int(part) for part in (self.tensorflow or "0.0").split(".")[:2])
        needed = {
            "cxx-standard": True,
            "gcc-14": True,
            "tensorflow-without-xla": release >= (2, 16),
            "tensorflow-cuda-stream": release >= (2, 16) and self.cuda,
            "torch-without-cuda": self.hides_cuda,
            "all-to-all": True,
            "lost-rank": True,
        }
        folder = resources.files("hvd_pipe.build_horovod") / "patches"
        texts = {name: (folder / f"{name}.patch").read_text() for name in needed if needed[name]}
        return {
            name: text[text.index("--- a/") :].replace("@CXX_STANDARD@", str(self.cxx_standard))
            for name, text in texts.items()
        }


def _of_torch(file: str) -> str:
    """Read a source file of torch, which is not imported: that takes long, and may fail."""
    path = importlib.metadata.distribution("torch").locate_file(f"torch/{file}")
    return Path(str(path)).read_text()


def features_here(only: str | None = None, mpi: bool = True, cuda: bool = False) -> Features:
    """Return the features of a Horovod for the frameworks that are installed."""
    versions = {
        "torch": installed("torch"),
        "tensorflow": installed("tensorflow-cpu", "tensorflow"),
    }
    wanted = {name: version for name, version in versions.items() if only in {None, name}}
    if not any(wanted.values()):
        names = " nor ".join(wanted)
        raise SetupError(
            f"{'neither ' if only is None else 'no '}{names} is installed for {sys.executable}: "
            f"`pip install {only or 'torch'}` first, or run this with the Python that has it."
        )
    return Features(wanted.get("torch"), wanted.get("tensorflow"), mpi, cuda)
