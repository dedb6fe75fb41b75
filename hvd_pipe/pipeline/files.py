"""Files that belong together, as those of a checkpoint do."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path

__all__ = ["NEW", "digest", "write_together"]

NEW = "new."
"""Begins the names of files until all of them are written."""


def digest(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_together(directory: Path, writers: Mapping[str, Callable[[Path], object]]) -> None:
    """Write files so that the last one is there only beside all others of its own time.

    All are written before any old one is touched, so what ends a write that takes long, or a full
    disk, leaves the old ones. Other files of the directory stay.

    Args:
        directory: Is made if need be.
        writers: What writes each file to a path, by its name, in order.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     for text in "ab":
        ...         write = lambda path: path.write_text(text)
        ...         write_together(Path(folder), {"weights": write, "about.json": write})
        ...     sorted((path.name, path.read_text()) for path in Path(folder).iterdir())
        [('about.json', 'b'), ('weights', 'b')]
    """
    directory.mkdir(parents=True, exist_ok=True)
    for name, write in writers.items():
        write(directory / f"{NEW}{name}")
    *_, last = writers
    (directory / last).unlink(missing_ok=True)
    for name in writers:
        (directory / f"{NEW}{name}").replace(directory / name)
