"""Files through which a rank speaks to its test, or to Horovod, while both run."""

from __future__ import annotations

from pathlib import Path


def publish(path: Path, content: str | bytes) -> None:
    """Write a file that another process may read at any moment: what it was before, or whole.

    ``Path.write_text`` empties the file first, and who reads it then finds no step, or no host.
    """
    part = path.with_name(f"part.{path.name}")
    part.write_bytes(content.encode() if isinstance(content, str) else content)
    part.replace(path)
