"""Quantities with units, read strictly and printed shortly.

Data sheets write `Gb/s` for both bits and bytes; parloom refuses what can be read in two ways and
says both readings. Decimal prefixes are powers of 1000, binary ones (`Ki`, `Mi`, ...) of 1024.
"""

import math
import re

from parloom.errors import InputError

DECIMAL = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50}
PREFIXES = DECIMAL | BINARY
PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "µs": 10**6, "ns": 10**9}

_NUMBER = re.compile(r"\s*(\d+(?:\.\d+)?(?:e[+-]?\d+)?)\s*([^\d\s.].*)?", re.IGNORECASE)
_SIGNED = re.compile(r"\s*(-\s*[\d.]|[+-]?(nan|inf))", re.IGNORECASE)
_AMBIGUOUS = re.compile(r"([kKMGTP]i?)b(/s|ps)?$|([kKMGTP])(Bps|bitps)$")
_DIRECTION = re.compile(r"(.*?\S)\s*(?:per direction|/direction)\s*")
_BOTH = re.compile(
    r"(.*?\S)\s*(?:bidirectional|bidir|both ways|both directions|total)\s*", re.IGNORECASE
)

# What no machine has or will have soon: most likely a slip of the unit.
MOST_BYTES, MOST_BYTES_PER_S, MOST_FLOPS_PER_S, MOST_SECONDS = 2**60, 1e18, 1e24, 3600.0
MOST_DOLLARS, MOST_COUNT, MOST_REQUESTS_PER_S = 1e6, 1e21, 1e9
LEAST_REQUESTS_PER_S, LEAST_SERVICE_S = 1e-6, 1e-9
PER_DEVICE_HOUR = ("/gpu-h", "/device-h")
# As tokens are counted: B is a billion.
COUNTS = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}


def parse_bytes(text: str, *, down: bool = False) -> int:
    """Bytes from `80GiB`, `70GB`, `640Gbit`, `4096B`; a fraction of a byte is refused.

    With `down`, for limits, a fraction is left out; `70gb` and `20KB` are read as 70GB and 20kB.
    """
    expected = "a size such as 80GiB, 70GB or 4096B"
    number, unit = _split(text, expected)
    if down and unit in (unit.lower(), unit.upper()):  # Gb may be bits
        unit = {f"{prefix}B".lower(): f"{prefix}B" for prefix in PREFIXES}.get(unit.lower(), unit)
    size = _bits_or_bytes(number, unit, "")
    if size is None:
        raise _unknown(text, unit, expected, "B", "bit")
    _plausible(size, text, MOST_BYTES, "1 EiB")
    if size != int(size) and not down:
        raise InputError(f"{text!r} is not a whole number of bytes")
    return int(size)


def parse_bandwidth(text: str) -> float:
    """Bytes per second in one direction from `25Gbit/s`, `3.35TB/s`, `450GB/s per direction`.

    A figure for both directions together is refused: some count what is sent, some what is sent
    and received.
    """
    expected = "a bandwidth such as 25Gbit/s or 3.35TB/s"
    both = _BOTH.fullmatch(text)
    if both is not None:
        number, unit = _split(both[1], expected)
        raise InputError(
            f"{text!r} counts both directions; bandwidths are per direction: write "
            f"{number / 2:g}{unit} if that is what a device sends plus what it receives, or "
            f"{number:g}{unit} per direction if it is what it sends"
        )
    one = _DIRECTION.fullmatch(text)
    number, unit = _split(one[1] if one else text, expected)
    rate = _bits_or_bytes(number, unit, "/s")
    if rate is None:
        raise _unknown(text, unit, expected, "B/s", "bit/s")
    return _plausible(_positive(rate, text), text, MOST_BYTES_PER_S, "1 EB/s", 1.0, "1 B/s")


def parse_seconds(text: str) -> float:
    """Seconds from `5us`, `0.3ms`, `2s`."""
    expected = "a time such as 5us or 0.3ms"
    number, unit = _split(text, expected)
    if unit not in PER_SECOND:
        raise _unknown(text, unit, expected)
    return _plausible(number / PER_SECOND[unit], text, MOST_SECONDS, "an hour")


def parse_service_s(text: str) -> float:
    """Seconds that something takes at least a little of: `5us`, `0.3ms`, never 0."""
    seconds = parse_seconds(text)
    if not seconds:
        raise InputError(f"{text!r} is no time at all; write more than 0")
    return _plausible(seconds, text, MOST_SECONDS, "an hour", LEAST_SERVICE_S, "1 ns")


def parse_flops_per_s(text: str) -> float:
    """FLOP/s from `989TFLOP/s`, `160GFLOP/s`."""
    expected = "a compute rate such as 989TFLOP/s"
    number, unit = _split(text, expected)
    prefix = unit.removesuffix("FLOP/s")
    if prefix == unit or prefix not in DECIMAL:
        raise _unknown(text, unit, expected, "FLOP/s")
    rate = _positive(number * DECIMAL[prefix], text)
    return _plausible(rate, text, MOST_FLOPS_PER_S, "1e24 FLOP/s", 1.0, "1 FLOP/s")


def parse_dollars(text: str) -> float:
    """Dollars from `4.10USD`."""
    expected = "a price such as 4.10USD"
    number, unit = _split(text, expected)
    if unit != "USD":
        raise _unknown(text, unit, expected)
    return _plausible(number, text, MOST_DOLLARS, "a million dollars")


def parse_hourly(text: str) -> float:
    """Dollars for an hour of one device from `2.10/gpu-h`, `2.10USD/gpu-h`, `$2.10/device-h`."""
    expected = "2.10/gpu-h: dollars for an hour of one device"
    number, unit = _split(text.strip().removeprefix("$"), expected)
    if unit.removeprefix("USD").strip().lower() not in PER_DEVICE_HOUR:
        raise InputError(f"{text!r} has the unit {unit!r}; write {expected}")
    return _plausible(number, text, MOST_DOLLARS, "a million dollars")


def parse_usd_per_h(text: str) -> float:
    """Dollars for an hour from `2.497USD/h`, `$2.497/h`."""
    expected = "a price such as 2.50USD/h"
    number, unit = _split(text.strip().removeprefix("$"), expected)
    if unit.removeprefix("USD") != "/h":
        raise InputError(f"{text!r} has the unit {unit!r}; write {expected}")
    return _plausible(number, text, MOST_DOLLARS, "a million dollars")


def parse_usd_per_byte(text: str) -> float:
    """Dollars for a byte from `0.09USD/GB`, `$0.09/GiB`."""
    expected = "a price such as 0.09USD/GB or 0.09USD/GiB"
    number, unit = _split(text.strip().removeprefix("$"), expected)
    prefix = unit.removeprefix("USD").removeprefix("/").removesuffix("B")
    if unit.removeprefix("USD") != f"/{prefix}B" or prefix not in PREFIXES:
        raise InputError(f"{text!r} has the unit {unit!r}; write {expected}")
    return _plausible(number, text, MOST_DOLLARS, "a million dollars") / PREFIXES[prefix]


def parse_requests(text: str) -> float:
    """Requests per second from `40/s`, `90/min`, `40 requests/s`."""
    expected = "a rate such as 40/s or 90/min"
    number, unit = _split(text, expected)
    per = {"/s": 1.0, "/min": 60.0, "/h": 3600.0}.get(unit.removeprefix("requests").strip())
    if per is None:
        raise InputError(f"{text!r} has the unit {unit!r}; write {expected}")
    rate = _positive(number / per, text)
    return _plausible(rate, text, MOST_REQUESTS_PER_S, "1e9/s", LEAST_REQUESTS_PER_S, "1e-6/s")


def parse_mean_bytes(text: str) -> float:
    """The mean size of many messages from `794.03KiB`, `2kB`: it may have a fraction of a byte."""
    expected = "a size such as 794.03KiB or 2kB"
    number, unit = _split(text, expected)
    size = _bits_or_bytes(number, unit, "")
    if size is None:
        raise _unknown(text, unit, expected, "B", "bit")
    return _plausible(size, text, MOST_BYTES, "1 EiB")


def parse_percent(text: str) -> float:
    """A share from `56%`."""
    expected = "a share such as 56% or 99.5%"
    number, unit = _split(text, expected)
    if unit != "%":
        raise InputError(f"{text!r} has the unit {unit!r}; write {expected}")
    return _plausible(number / 100, text, 1.0, "100%")


def parse_count(text: str) -> float:
    """How many of something, from `2T`, `300B` (1e9), `1.5e12`, `64M`."""
    expected = "a number such as 2T, 300B, 64M or 1.5e12"
    _refuse_sign(text, expected)
    match = _NUMBER.fullmatch(text)
    unit = (match[2] or "").strip() if match else ""
    if match is None or unit not in COUNTS:
        raise InputError(f"{text!r} is no such number; write {expected}")
    return _plausible(_positive(float(match[1]) * COUNTS[unit], text), text, MOST_COUNT, "1e21")


def parse_factor(text: str) -> float:
    """A number >= 1 without a unit, such as the 2 of 2:1 oversubscription."""
    number = _plain(text, "a number such as 2 or 1.5")
    if not 1 <= number <= 1e6:
        raise InputError(f"{text!r} is out of range; a number from 1 on is expected")
    return number


def parse_share(text: str) -> float:
    """A number above 0 and at most 1 without a unit, such as 0.8."""
    number = _plain(text, "a share such as 0.8")
    if not 0 < number <= 1:
        raise InputError(f"{text!r} is out of range; a share above 0 and at most 1 is expected")
    return number


def format_bytes(num_bytes: float) -> str:
    """`1.2 GiB`: binary prefixes, three significant digits."""
    for prefix, factor in reversed(BINARY.items()):
        if abs(num_bytes) >= factor:
            return f"{_digits(num_bytes / factor)} {prefix}B"
    return f"{num_bytes:.0f} B"


def bytes_up(num_bytes: int) -> str:
    """As `format_bytes`, rounded up: a limit of what is printed is not below `num_bytes`."""
    text, step = format_bytes(num_bytes), 1
    while parse_bytes(text, down=True) < num_bytes:
        text, step = format_bytes(num_bytes * (1 + step * 5e-4)), step + 1
    return text


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


def format_dollars(usd: float) -> str:
    """`$1,234,567`, `$12.30`, `$0.00123`: to the cent, or three significant digits of less."""
    if usd >= 1000:
        return f"${usd:,.0f}"
    if usd >= 1 or not usd:
        return f"${usd:.2f}"
    return f"${usd:.{2 - math.floor(math.log10(usd))}f}"


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
    _refuse_sign(text, expected)
    match = _NUMBER.fullmatch(text)
    if match is None:
        raise InputError(f"{text!r} is no quantity; write {expected}")
    unit = (match[2] or "").strip()
    if not unit:
        raise InputError(f"{text!r} has no unit; write {expected}")
    return float(match[1]), unit


def _plain(text: str, expected: str) -> float:
    _refuse_sign(text, expected)
    match = _NUMBER.fullmatch(text)
    if match is None or match[2]:
        raise InputError(f"{text!r} is no plain number; write {expected}")
    return float(match[1])


def _refuse_sign(text: str, expected: str) -> None:
    match = _SIGNED.match(text)
    if match is not None:
        what = "not a number" if match[2] else "negative"
        raise InputError(f"{text!r} is no quantity: it is {what}; write {expected}")


def _unknown(text: str, unit: str, expected: str, *bases: str) -> InputError:
    """The error for a unit that is none of `bases` with a prefix; names those that are near."""
    match = _AMBIGUOUS.fullmatch(unit)
    number = text.strip()[: -len(unit)].strip()
    if match is None:
        near = [
            f"{number}{prefix}{base}"
            for base in bases
            for prefix in PREFIXES
            for spelled in (base, base.replace("bit", "b") if "b" in unit else base)
            if unit.lower() in (f"{prefix}{spelled}".lower(), f"{prefix[:1]}{spelled}".lower())
        ]
        near = list(dict.fromkeys(near))
        way = f"did you mean {' or '.join(near)}?" if near else f"write {expected}"
        return InputError(f"{text!r} has the unknown unit {unit!r}; {way}")
    prefix = match[1] or match[3]
    per = "/s" if (match[2] or match[4]) else ""
    return InputError(
        f"{text!r} is ambiguous: {unit!r} may mean bits or bytes; "
        f"write {number}{prefix}bit{per} or {number}{prefix}B{per}"
    )


def _positive(value: float, text: str) -> float:
    if not value > 0:
        raise InputError(f"{text!r} must be greater than zero")
    return value


def _plausible(
    value: float, text: str, most: float, said: str, least: float = 0.0, said_least: str = ""
) -> float:
    if value > most:
        raise InputError(f"{text!r} is out of range: more than {said}; is the unit right?")
    if value < least:
        raise InputError(f"{text!r} is out of range: less than {said_least}; is the unit right?")
    return value
