"""How the examples report: lines of rank 0, and a bar."""

import argparse

from tqdm import tqdm

import hvd_pipe.torch as hvd


def say(text: str) -> None:
    """Print on rank 0; in one write, which horovodrun's prefixes leave in one piece."""
    if hvd.rank() == 0:
        tqdm.write(f"{text}\n", end="")


def require_positive(
    parser: argparse.ArgumentParser, args: argparse.Namespace, *names: str
) -> None:
    """End with the parser's error where one of these options is below 1."""
    for name in names:
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)}: 1 or more")


def progress(done: int, total: int, seconds: float) -> str:
    """A bar with elapsed and remaining time, for the end of a line."""
    parts = "{percentage:3.0f}% |{bar:16}| {elapsed}<{remaining}"
    return tqdm.format_meter(done, total, seconds, ascii=" #", bar_format=parts)
