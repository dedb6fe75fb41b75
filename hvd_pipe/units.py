"""Sizes, bandwidths and times as people write them, read strictly: 10gbit is not 10GB."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from decimal import Decimal
from types import MappingProxyType

__all__ = [
    "format_bytes",
    "format_rate",
    "format_seconds",
    "parse_bandwidth",
    "parse_bytes",
    "parse_seconds",
]

_NUMBER = re.compile(r"(?P<number>[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?P<exponent>[eE][+-]?[0-9]+)?")

_BYTES: Mapping[str, Decimal] = MappingProxyType(
    {
        "B": Decimal(1),
        "kB": Decimal(10**3),
        "KB": Decimal(10**3),
        "MB": Decimal(10**6),
        "GB": Decimal(10**9),
        "TB": Decimal(10**12),
        "KiB": Decimal(2**10),
        "MiB": Decimal(2**20),
        "GiB": Decimal(2**30),
        "TiB": Decimal(2**40),
    }
)
_BITS: Mapping[str, Decimal] = MappingProxyType(
    {prefix: Decimal(10**power) for prefix, power in (("", 0), ("k", 3), ("m", 6), ("g", 9))}
)
_SECONDS: Mapping[str, Decimal] = MappingProxyType(
    {
        "s": Decimal(1),
        "ms": Decimal("1e-3"),
        "us": Decimal("1e-6"),
        "\u00b5s": Decimal("1e-6"),  # the micro sign
        "\u03bcs": Decimal("1e-6"),  # the Greek letter
        "ns": Decimal("1e-9"),
    }
)
# "bit" says bits in any case; of "bps" and "Bps" the case alone says which.
_BIT_RATE = re.compile(r"([kKmMgG]?)(?:(?i:bit(?:/s)?)|bps)")

# Beyond are typing errors, which would overflow or vanish once they are floats.
_LEAST, _MOST = Decimal("1e-30"), Decimal("1e30")
_MOST_BYTES = 2**63 - 1

_BYTES_ACCEPTED = "25MB, 64MiB, 1.5GB or a bare number of bytes"
_RATES_ACCEPTED = "10gbit, 10gbit/s, 10Gbps, 1.25GB/s or 800MB/s"
_TIMES_ACCEPTED = "30us, 1.5ms, 2s or 500ns"


def parse_bytes(text: str) -> int:
    """Bytes of a size; a bare number counts bytes.

    Args:
        text: a number and B, kB, MB, GB, TB (powers of 1000) or KiB, MiB, GiB, TiB (of 1024).

    Raises:
        ValueError: another unit (bits, for one), no whole number of bytes, or 8 EiB and more.

    Example:
        >>> parse_bytes("25MB"), parse_bytes("64MiB"), parse_bytes("1024")
        (25000000, 67108864, 1024)
    """
    number, unit = _split(text, "size", _BYTES_ACCEPTED)
    if unit and unit not in _BYTES:
        hint = _meant(number, unit, _BYTES)
        if "bit" in unit.lower() or unit.lower().endswith(("bps", "/s")):
            hint = "; that is a rate, or counts bits: a size counts bytes (B)"
        raise ValueError(f"{text!r} is no size{hint}. Accepted: {_BYTES_ACCEPTED}")
    size = number * _BYTES[unit or "B"]
    if size != int(size):
        raise ValueError(
            f"{text!r} is {size.normalize():f} bytes, but a size is a whole number of bytes. "
            f"Accepted: {_BYTES_ACCEPTED}"
        )
    if size > _MOST_BYTES:
        raise ValueError(f"{text!r} is too large: a size is at most {_MOST_BYTES} bytes")
    return int(size)


def parse_bandwidth(text: str) -> float:
    """Bytes per second of a bandwidth; its unit must say bits or bytes.

    Args:
        text: a number and bit, kbit, mbit, gbit (any case; /s may follow), bps, kbps, Mbps, Gbps
            (bits; with a small b), or B/s, kB/s, MB/s, GB/s, MiB/s, GiB/s ... (bytes).

    Raises:
        ValueError: no unit, a unit that may mean bits or bytes, a bandwidth of 0, or a number
            below 1e-30 or above 1e30.

    Example:
        >>> parse_bandwidth("10gbit"), parse_bandwidth("1.25GB/s"), parse_bandwidth("100Mbps")
        (1250000000.0, 1250000000.0, 12500000.0)
    """
    number, unit = _split(text, "bandwidth", _RATES_ACCEPTED)
    bits = _BIT_RATE.fullmatch(unit)
    if bits:
        rate = number * _BITS[bits.group(1).lower()] / 8
    elif unit.endswith("/s") and unit[:-2] in _BYTES:
        rate = number * _BYTES[unit[:-2]]
    elif not unit:
        raise ValueError(
            f"{text!r} has no unit: add one that says bits or bytes, such as {number}gbit or "
            f"{number}GB/s. Accepted: {_RATES_ACCEPTED}"
        )
    else:
        raise ValueError(f"{text!r} {_not_a_rate(number, unit)} Accepted: {_RATES_ACCEPTED}")
    if rate == 0:
        raise ValueError(f"a bandwidth must be positive, got {text!r}")
    return float(rate)


def parse_seconds(text: str) -> float:
    """Seconds of a time.

    Args:
        text: a number and s, ms, us (or µs) or ns.

    Raises:
        ValueError: no unit, another one, or a number below 1e-30 (0 is fine) or above 1e30.

    Example:
        >>> parse_seconds("30us"), parse_seconds("1.5ms"), parse_seconds("2s")
        (3e-05, 0.0015, 2.0)
    """
    number, unit = _split(text, "time", _TIMES_ACCEPTED)
    if not unit:
        raise ValueError(
            f"{text!r} has no unit: add one, such as {number}us or {number}ms. "
            f"Accepted: {_TIMES_ACCEPTED}"
        )
    if unit not in _SECONDS:
        hint = _meant(number, unit, _SECONDS)
        raise ValueError(f"{text!r} is no time{hint}. Accepted: {_TIMES_ACCEPTED}")
    return float(number * _SECONDS[unit])


def format_bytes(bytes: float) -> str:
    """A size to three digits, in powers of 1000.

    Example:
        >>> format_bytes(1_000_000), format_bytes(67_108_864), format_bytes(0)
        ('1 MB', '67.1 MB', '0 B')
    """
    return _formatted(bytes, ("B", "kB", "MB", "GB", "TB"))


def format_rate(bytes_per_second: float) -> str:
    """A bandwidth in bytes per second to three digits.

    Example:
        >>> format_rate(1.25e9)
        '1.25 GB/s'
    """
    return _formatted(bytes_per_second, ("B/s", "kB/s", "MB/s", "GB/s", "TB/s"))


def format_seconds(seconds: float) -> str:
    """A time to three digits, in s, ms, us or ns.

    Example:
        >>> format_seconds(0.25), format_seconds(3e-5), format_seconds(0), format_seconds(90)
        ('250 ms', '30 us', '0 s', '90 s')
    """
    if seconds == 0 or abs(seconds) >= 1.0 or not math.isfinite(seconds):
        return _formatted(seconds, ("s",))
    return _formatted(seconds * 1e9, ("ns", "us", "ms", "s"))


def _split(text: str, what: str, accepted: str) -> tuple[Decimal, str]:
    if not isinstance(text, str):
        raise TypeError(f"a {what} to parse is a text, got {text!r}")
    match = _NUMBER.match(text.strip())
    if match is None:
        raise ValueError(
            f"{text!r} is no {what}: it must begin with a number that is not negative. "
            f"Accepted: {accepted}"
        )
    try:
        number = Decimal(match.group())
    except ArithmeticError:  # an exponent of very many digits
        number = Decimal("inf")
    if number and not _LEAST <= number <= _MOST:
        raise ValueError(
            f"{text!r} is no {what}: its number must be from {_LEAST:e} to {_MOST:e}. "
            f"Accepted: {accepted}"
        )
    return number or Decimal(0), text.strip()[match.end() :].strip()


def _meant(number: Decimal, unit: str, known: Iterable[str]) -> str:
    """A question, where the unit differs from a known one in its case alone."""
    close = [name for name in known if name.lower() in {unit.lower(), f"{unit.lower()}b"}]
    return f": do you mean {number}{close[0]}?" if close else ""


def _not_a_rate(number: Decimal, unit: str) -> str:
    """What is wrong with the unit of a bandwidth, and what may have been meant."""
    prefix = unit[:1].lower() if unit[:1].lower() in {"k", "m", "g"} else ""
    size = "B" if not prefix else "kB" if prefix == "k" else f"{prefix.upper()}B"
    if unit in _BYTES:
        bits = f" or {number}{prefix}bit" if "i" not in unit and prefix else ""
        return f"is a size, not a bandwidth: do you mean {number}{unit}/s{bits}?"
    if unit.lower() in {prefix + end for end in ("", "b", "b/s", "bps")}:
        return f"may mean bits or bytes: do you mean {number}{size}/s or {number}{prefix}bit?"
    return "is no bandwidth."


def _formatted(value: float, names: tuple[str, ...]) -> str:
    if not math.isfinite(value):
        return f"{value} {names[0]}"
    power = 0
    while power < len(names) - 1 and abs(float(f"{value:.3g}")) >= 1000.0:
        value, power = value / 1000.0, power + 1
    rounded = value if abs(value) >= 1000.0 else float(f"{value:.3g}")
    return (
        f"{rounded:.0f} {names[power]}" if abs(rounded) >= 100.0 else f"{rounded:g} {names[power]}"
    )
