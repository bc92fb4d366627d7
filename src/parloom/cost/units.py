"""Quantities with units, read strictly and printed shortly.

Data sheets write `Gb/s` for both bits and bytes; parloom refuses what can be read in two ways and
says both readings. Decimal prefixes are powers of 1000, binary ones (`Ki`, `Mi`, ...) of 1024.
"""

import re

from parloom.errors import InputError

DECIMAL = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50}
PREFIXES = DECIMAL | BINARY
SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}

_NUMBER = re.compile(r"\s*(\d+(?:\.\d+)?(?:e[+-]?\d+)?)\s*([^\d\s.].*)?", re.IGNORECASE)
_AMBIGUOUS = re.compile(r"([kKMGTP]i?)b(/s|ps)?$|([kKMGTP])(Bps|bitps)$")


def parse_bytes(text: str) -> int:
    """Bytes from `80GiB`, `70GB`, `640Gbit`, `4096B`; a fraction of a byte is refused."""
    expected = "a size such as 80GiB, 70GB or 4096B"
    number, unit = _split(text, expected)
    size = _bits_or_bytes(number, unit, "")
    if size is None:
        raise _unknown(text, unit, expected)
    if size != int(size):
        raise InputError(f"{text!r} is not a whole number of bytes")
    return int(size)


def parse_bandwidth(text: str) -> float:
    """Bytes per second from `25Gbit/s`, `3.35TB/s`, `50GB/s`."""
    expected = "a bandwidth such as 25Gbit/s or 3.35TB/s"
    number, unit = _split(text, expected)
    rate = _bits_or_bytes(number, unit, "/s")
    if rate is None:
        raise _unknown(text, unit, expected)
    return _positive(rate, text)


def parse_seconds(text: str) -> float:
    """Seconds from `5us`, `0.3ms`, `2s`."""
    expected = "a time such as 5us or 0.3ms"
    number, unit = _split(text, expected)
    if unit not in SECONDS:
        raise _unknown(text, unit, expected)
    return number * SECONDS[unit]


def parse_flops_per_s(text: str) -> float:
    """FLOP/s from `989TFLOP/s`, `160GFLOP/s`."""
    expected = "a compute rate such as 989TFLOP/s"
    number, unit = _split(text, expected)
    prefix = unit.removesuffix("FLOP/s")
    if prefix == unit or prefix not in DECIMAL:
        raise _unknown(text, unit, expected)
    return _positive(number * DECIMAL[prefix], text)


def format_bytes(num_bytes: float) -> str:
    """`1.2 GiB`: binary prefixes, three significant digits."""
    for prefix, factor in reversed(BINARY.items()):
        if abs(num_bytes) >= factor:
            return f"{_digits(num_bytes / factor)} {prefix}B"
    return f"{num_bytes:.0f} B"


def format_seconds(seconds: float) -> str:
    """`412 ms`, `2.1 s`, `35 us`: three significant digits."""
    for unit, factor in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if abs(seconds) >= factor:
            return f"{_digits(seconds / factor)} {unit}"
    return f"{_digits(seconds / 1e-9)} ns"


def format_rate(per_s: float, unit: str) -> str:
    """`450 GB/s`, `989 TFLOP/s`: a decimal prefix before `unit`."""
    for prefix, factor in reversed(DECIMAL.items()):
        if abs(per_s) >= factor:
            return f"{_digits(per_s / factor)} {prefix}{unit}"
    return f"{_digits(per_s)} {unit}"


def format_count(number: float) -> str:
    """`41.2k`, `3.1M`: a decimal prefix without a unit."""
    return format_rate(number, "").replace(" ", "")


def _digits(value: float) -> str:
    if abs(value) >= 100:
        return f"{value:.0f}"
    text = f"{value:.3g}"
    return text if "e" not in text else f"{value:.3f}"


def _bits_or_bytes(number: float, unit: str, per: str) -> float | None:
    for suffix, factor in (("bit" + per, 1 / 8), ("B" + per, 1.0)):
        prefix = unit.removesuffix(suffix)
        if prefix != unit and prefix in PREFIXES:
            return number * PREFIXES[prefix] * factor
    return None


def _split(text: str, expected: str) -> tuple[float, str]:
    match = _NUMBER.fullmatch(text)
    if match is None:
        raise InputError(f"{text!r} is no quantity; write {expected}")
    unit = (match[2] or "").strip()
    if not unit:
        raise InputError(f"{text!r} has no unit; write {expected}")
    return float(match[1]), unit


def _unknown(text: str, unit: str, expected: str) -> InputError:
    match = _AMBIGUOUS.fullmatch(unit)
    if match is None:
        return InputError(f"{text!r} has the unknown unit {unit!r}; write {expected}")
    prefix, number = match[1] or match[3], text.strip()[: -len(unit)].strip()
    per = "/s" if (match[2] or match[4]) else ""
    return InputError(
        f"{text!r} is ambiguous: {unit!r} may mean bits or bytes; "
        f"write {number}{prefix}bit{per} or {number}{prefix}B{per}"
    )


def _positive(value: float, text: str) -> float:
    if not value > 0:
        raise InputError(f"{text!r} must be greater than zero")
    return value
