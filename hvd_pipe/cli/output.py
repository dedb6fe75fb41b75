"""What the commands print: tables for people, one JSON document for programs, one-line errors."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import IO, Any

import click
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

__all__ = [
    "Failure",
    "InputError",
    "exposed",
    "note",
    "one_line",
    "progress",
    "table",
    "warning",
    "width",
    "wrapped",
    "write_json",
]


class Failure(click.ClickException):
    """What was asked for could not be done; one line on stderr, exit code 1."""

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


def write_json(document: Mapping[str, Any]) -> None:
    """Print one JSON document on stdout; numbers that JSON lacks (nan, inf) become null."""
    click.echo(json.dumps(_finite(document), indent=2))


def table(
    columns: Sequence[str], rows: Iterable[Sequence[object]], title: str | None = None
) -> None:
    """Print a table on stdout, as wide as the terminal allows and no wider.

    Args:
        columns: The headings; a leading ``">"`` sets a column flush right, as numbers want it. A
            trailing ``"~"`` lets a column wrap between words; the others stay on one line.
        rows: One sequence of cells a row; a cell is text (no markup) or a `rich.text.Text`.
        title: A line above.
    """
    console = _console()
    made = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for column in columns:
        wraps = column.endswith("~")
        made.add_column(
            column.removeprefix(">").removesuffix("~"),
            justify="right" if column.startswith(">") else "left",
            no_wrap=not wraps,
            overflow="fold",
        )
    for row in rows:
        made.add_row(*(cell if isinstance(cell, Text) else Text(str(cell)) for cell in row))
    if title:
        console.print(Text(title, style="bold"), soft_wrap=True)
    console.print(made)


def note(text: str = "") -> None:
    """Print a line of the human output on stdout, wrapped at words."""
    _console().print(Text(text))


def exposed(exposed_s: float, step_s: float) -> float:
    """Return the time of a step that is exposed, without the rounding errors of a long sum.

    >>> exposed(3e-17, 0.3), exposed(0.01, 0.3)
    (0.0, 0.01)
    """
    return exposed_s if exposed_s > 1e-9 * step_s else 0.0


def width() -> int:
    """Columns that the human output may take: the terminal's, or COLUMNS, or 80."""
    return _console().width


def wrapped(strategy: str) -> str:
    """Return a strategy's name for a narrow column: long options on lines of their own."""
    return strategy.replace(",", ",\n").replace(":overlap", ":\noverlap")


def warning(text: str) -> None:
    """Print ``warning: ...`` on stderr."""
    click.echo(f"warning: {text}", err=True)


@contextmanager
def progress(what: str, total: int | None) -> Iterator[Callable[[], None]]:
    """Show a bar on stderr while work goes on, on a terminal alone; yields what counts a step.

    Args:
        what: The work.
        total: Its steps; None where they are not known before.

    Example:
        with progress("simulating", total=10) as step:
            for number in range(10):
                step()
    """
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    shown = Progress(*columns, console=console, transient=True, disable=not sys.stderr.isatty())
    with shown:
        task = shown.add_task(what, total=total)
        yield partial(shown.advance, task)


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
