"""What the commands print: a table or one JSON document, and errors in one line."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, TypeVar

import click
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table
from rich.text import Text

from hvd_pipe import units

T = TypeVar("T")
Row = Mapping[str, Any]
Column = str | Callable[[Row], object]


class Failure(click.ClickException):
    """The command failed; one line on stderr, exit code 1."""

    def show(self, file: IO[Any] | None = None) -> None:
        """Print ``error: ...`` on stderr."""
        click.echo(f"error: {self.format_message()}", file=file, err=file is None)


class InputError(Failure):
    """Wrong input; one line on stderr, exit code 2."""

    exit_code = 2


def one_line(error: BaseException) -> str:
    """Return an error's message on one line; a file's name and reason for an OSError."""
    if isinstance(error, OSError) and error.strerror:
        name = f"{error.filename}: " if error.filename else ""
        return f"{name}{error.strerror}"
    return " ".join(str(error).split()) or type(error).__name__


def emit(
    document: Mapping[str, Any],
    rows: Sequence[Row],
    columns: Mapping[str, Column],
    *,
    as_json: bool,
    above: Iterable[str] = (),
    title: str = "",
    below: Iterable[str] = (),
) -> None:
    """Print a command's result: one JSON document, or a table and lines of text around it.

    ``columns`` has, for each heading, the key of a row or a function of a row. Numbers are written
    in the unit that the key ends in: ``_s`` for seconds, ``bytes``. A heading that ends in ``~``
    is that of text, which may wrap; other columns are flush right.
    """
    if as_json:
        click.echo(json.dumps(_finite(document), indent=2))
        return
    for line in above:
        note(line)
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for heading in columns:
        text = heading.endswith("~")
        table.add_column(
            heading.removesuffix("~"),
            justify="left" if text else "right",
            no_wrap=not text,
            overflow="fold",
        )
    for row in rows:
        table.add_row(*(Text(cell(row, column)) for column in columns.values()))
    console = _console()
    if title:
        console.print(Text(title, style="bold"), soft_wrap=True)
    console.print(table)
    for line in below:
        note(line)


def cell(row: Row, column: Column) -> str:
    """Return one cell of a table as text.

    >>> [cell({"step_s": 0.25, "bytes": 4e6, "best": True}, key) for key in ("step_s", "bytes")]
    ['250 ms', '4 MB']
    """
    if callable(column):
        return str(column(row))
    value = row[column]
    if isinstance(value, bool):
        return "yes" if value else "no"
    if column.endswith("_s"):
        return units.format_seconds(value)
    if column.endswith("bytes"):
        return units.format_bytes(value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def from_to(names: Sequence[str]) -> str:
    """Return the first and the last of some names."""
    return " .. ".join(dict.fromkeys((names[0], names[-1])))


def note(text: str) -> None:
    """Print a line of the human output on stdout, wrapped at words."""
    _console().print(Text(text))


def wrote(*paths: Path | None) -> Iterator[str]:
    """Say which files were written."""
    return (f"Wrote {path}." for path in paths if path is not None)


def warning(text: str) -> None:
    """Print ``warning: ...`` on stderr."""
    click.echo(f"warning: {text}", err=True)


def progress(items: Sequence[T], what: str) -> Iterable[T]:
    """Iterate over items, with a bar on stderr where that is a terminal."""
    console = Console(stderr=True)
    disable = not sys.stderr.isatty()
    return track(items, what, console=console, transient=True, disable=disable)


def exposed(exposed_s: float, step_s: float) -> str:
    """Return the time of a step that is exposed, without the rounding errors of a long sum.

    >>> exposed(3e-17, 0.3), exposed(0.01, 0.3)
    ('0 s', '10 ms')
    """
    return units.format_seconds(exposed_s if exposed_s > 1e-9 * step_s else 0.0)


def _console() -> Console:
    return Console(file=sys.stdout, highlight=False, markup=False, emoji=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
