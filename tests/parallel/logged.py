"""What hvd_pipe logs, for tests that look at it."""

from __future__ import annotations

import logging


class Lines(logging.Handler):
    """Keeps what hvd_pipe logs, until `taken`."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        logger = logging.getLogger("hvd_pipe")
        logger.addHandler(self)
        logger.setLevel(logging.INFO)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def taken(self) -> list[str]:
        """Stop, and return the lines of ``auto``."""
        logging.getLogger("hvd_pipe").removeHandler(self)
        return [line for line in self.lines if line.startswith("auto")]
