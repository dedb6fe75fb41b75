"""Units are read strictly, and what is written can be read."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_pipe.units import (
    format_bytes,
    format_rate,
    format_seconds,
    parse_bandwidth,
    parse_bytes,
    parse_seconds,
)

READ = {
    parse_bytes: [
        ("25MB", 25_000_000),
        ("64MiB", 64 * 2**20),
        ("0", 0),
        (" 16 GB ", 16 * 10**9),
        ("1.5kB", 1500),
        ("0.5KiB", 512),
        ("1e6", 10**6),
        ("0.1GB", 10**8),
    ],
    parse_bandwidth: [
        ("10gbit", 1.25e9),
        ("10gbit/s", 1.25e9),
        ("10Gbps", 1.25e9),
        ("10 Gbit/s", 1.25e9),
        ("1.25GB/s", 1.25e9),
        ("1GiB/s", 2**30),
        ("8000bit/s", 1e3),
        ("1000 B/s", 1e3),
        ("10kBit/s", 1250.0),
    ],
    parse_seconds: [
        ("30us", 30e-6),
        ("30\u00b5s", 30e-6),
        ("30\u03bcs", 30e-6),
        ("1ms", 1e-3),
        ("1.5 ms", 1.5e-3),
        ("0s", 0.0),
        ("0e-999999999s", 0.0),
    ],
}
REFUSED = {
    parse_bandwidth: [
        ("10GB", r"'10GB' is a size, not a bandwidth: do you mean 10GB/s or 10gbit\?"),
        ("10MiB", r"'10MiB' is a size, not a bandwidth: do you mean 10MiB/s\?"),
        ("10Gb/s", r"may mean bits or bytes: do you mean 10GB/s or 10gbit\?"),
        ("10gb", r"may mean bits or bytes: do you mean 10GB/s or 10gbit\?"),
        ("1e400gbit", r"'1e400gbit' is no bandwidth: its number must be from 1e-30 to 1e\+30\. A"),
        ("10g", r"may mean bits or bytes: do you mean 10GB/s or 10gbit\?"),
        ("10", r"'10' has no unit: add one that says bits or bytes, such as 10gbit or 10GB/s"),
        ("0gbit", r"a bandwidth must be positive, got '0gbit'"),
        ("fast", r"'fast' is no bandwidth: it must begin with a number that is not negative"),
        ("10parsec", r"'10parsec' is no bandwidth\. Accepted: 10gbit, 10gbit/s, 10Gbps, 1.25GB/s"),
    ],
    parse_bytes: [
        ("25mb", r"'25mb' is no size: do you mean 25MB\?"),
        ("10gbit", r"'10gbit' is no size; that is a rate, or counts bits: a size counts bytes"),
        ("1GB/s", r"'1GB/s' is no size; that is a rate"),
        ("1.5", r"'1.5' is 1.5 bytes, but a size is a whole number of bytes"),
        ("3 apples", r"'3 apples' is no size\. Accepted: 25MB, 64MiB"),
        ("", r"'' is no size: it must begin with a number"),
        ("-5MB", r"not negative\. Accepted: 25MB"),
        ("1e999999999", r"'1e999999999' is no size: its number must be from 1e-30 to 1e\+30"),
        ("1e-999999999MB", r"is no size: its number must be"),
        ("1e19", r"'1e19' is too large: a size is at most 9223372036854775807 bytes"),
    ],
    parse_seconds: [
        ("30", r"'30' has no unit: add one, such as 30us or 30ms\. Accepted: 30us, 1.5ms, 2s"),
        ("1e400s", r"'1e400s' is no time: its number must be from 1e-30 to 1e\+30"),
        ("30uS", r"'30uS' is no time: do you mean 30us\?"),
        ("5min", r"'5min' is no time\. Accepted"),
    ],
}


def rows_of(table: dict[Any, list[tuple[str, Any]]]) -> list[tuple[Any, str, Any]]:
    return [(parse, *row) for parse, rows in table.items() for row in rows]


@pytest.mark.parametrize(("parse", "text", "value"), rows_of(READ))
def test_what_is_read(parse: Any, text: str, value: float) -> None:
    assert parse(text) == value
    assert isinstance(parse(text), int if parse is parse_bytes else float)


@pytest.mark.parametrize(("parse", "text", "message"), rows_of(REFUSED))
def test_what_is_refused(parse: Any, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(text)


@pytest.mark.parametrize("parse", [parse_bytes, parse_bandwidth, parse_seconds])
def test_only_texts_are_parsed(parse: object) -> None:
    with pytest.raises(TypeError, match=r"is a text, got 10"):
        parse(10)  # type: ignore[operator]


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (format_bytes(999_999), "1 MB"),
        (format_bytes(1_234_567), "1.23 MB"),
        (format_bytes(25_557_032 * 4), "102 MB"),
        (format_rate(7e9), "7 GB/s"),
        (format_seconds(0.9999), "1 s"),
        (format_seconds(-0.0123), "-12.3 ms"),
        (format_seconds(float("inf")), "inf s"),
    ],
)
def test_formats(found: str, text: str) -> None:
    assert found == text


@given(st.integers(0, 10**15), st.floats(1.0, 1e14), st.floats(1e-9, 1e5))
def test_what_is_written_comes_back_to_three_digits(
    size: int, rate: float, seconds: float
) -> None:
    assert parse_bytes(format_bytes(size)) == pytest.approx(size, rel=5.1e-3)
    assert parse_bandwidth(format_rate(rate)) == pytest.approx(rate, rel=5.1e-3)
    assert parse_seconds(format_seconds(seconds)) == pytest.approx(seconds, rel=5.1e-3)
