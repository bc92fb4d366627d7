"""Quantities with units: exact values, refusals, and round trips."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parloom.cost import units
from parloom.errors import InputError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("80GiB", 80 * 2**30),
        ("70GB", 70 * 10**9),
        ("8kbit", 1000),
        ("4096B", 4096),
        (" 1.5 KiB ", 1536),
    ],
)
def test_bytes(text: str, expected: int) -> None:
    assert units.parse_bytes(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [("25Gbit/s", 3.125e9), ("3.35TB/s", 3.35e12), ("100Mbit/s", 12.5e6), ("1e3B/s", 1e3)],
)
def test_bandwidth(text: str, expected: float) -> None:
    assert units.parse_bandwidth(text) == pytest.approx(expected, rel=1e-12)


def test_seconds_and_flops() -> None:
    assert units.parse_seconds("5us") == pytest.approx(5e-6)
    assert units.parse_seconds("0.3 ms") == pytest.approx(3e-4)
    assert units.parse_flops_per_s("989TFLOP/s") == pytest.approx(989e12)


@pytest.mark.parametrize("text", ["25Gb/s", "25 Gbps", "25GBps"])
def test_ambiguous_bandwidth_shows_two_readings(text: str) -> None:
    with pytest.raises(InputError, match=r"ambiguous.*write 25Gbit/s or 25GB/s"):
        units.parse_bandwidth(text)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("20KB", 20_000), ("20kb", 20_000), ("3MB", 3 * 10**6), ("70gb", 70 * 10**9),
        ("1.5 TB", 15 * 10**11), ("2tb", 2 * 10**12), ("8gib", 2**33), ("8GIB", 2**33),
        ("4096b", 4096), ("1.5B", 1),
    ],
)  # fmt: skip
def test_limits_are_read_in_either_case(text: str, size: int) -> None:
    assert units.parse_bytes(text, down=True) == size


def test_a_limit_that_may_be_bits_is_refused() -> None:
    with pytest.raises(InputError, match="ambiguous"):
        units.parse_bytes("80Gb", down=True)


def test_ambiguous_size_shows_two_readings() -> None:
    with pytest.raises(InputError, match=r"'80Gb' is ambiguous.*write 80Gbit or 80GB"):
        units.parse_bytes("80Gb")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no quantity"),
        ("GiB", "no quantity"),
        ("80", "has no unit"),
        ("-3GB", "it is negative"),
        ("80 gigabytes", "unknown unit 'gigabytes'; write a size such as"),
        ("1KB", r"unknown unit 'KB'; did you mean 1kB or 1KiB\?"),
        ("80gb", r"did you mean 80GB or 80GiB or 80Gbit or 80Gibit\?"),
        ("80gib", r"did you mean 80GiB or"),
        ("1.5B", "no whole number|not a whole number"),
        ("nanGB", "it is not a number"),
        ("infGB", "it is not a number"),
        ("0x1B", "no quantity|unknown unit"),
        ("1e400GB", "out of range"),
        ("9e9TiB", "more than 1 EiB; is the unit right"),
    ],
)
def test_bad_sizes(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        units.parse_bytes(text)


@pytest.mark.parametrize("text", ["900GB/s bidirectional", "900 GB/s both ways", "900GB/s total"])
def test_a_figure_for_both_directions_shows_two_readings(text: str) -> None:
    with pytest.raises(InputError, match=r"write 450GB/s if .* or 900GB/s per direction if"):
        units.parse_bandwidth(text)


def test_a_direction_may_be_said() -> None:
    assert units.parse_bandwidth("450GB/s per direction") == units.parse_bandwidth("450GB/s")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0GB/s", "greater than zero"),
        ("-1GB/s", "negative"),
        ("1e300GB/s", "out of range: more than 1 EB/s"),
        ("1e-9B/s", "out of range: less than 1 B/s"),
    ],
)
def test_bad_bandwidths(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        units.parse_bandwidth(text)


def test_plain_numbers() -> None:
    assert units.parse_factor("2") == 2
    assert units.parse_share("0.8") == 0.8
    assert units.parse_dollars("4.10USD") == 4.1
    for text in ("0.5", "-2", "nan", "2x", ""):
        with pytest.raises(InputError):
            units.parse_factor(text)
    for text in ("0", "1.1", "80%", "inf"):
        with pytest.raises(InputError):
            units.parse_share(text)
    with pytest.raises(InputError, match="unknown unit 'EUR'"):
        units.parse_dollars("3EUR")


@given(st.integers(0, 2**10), st.sampled_from(sorted(units.PREFIXES)))
def test_whole_sizes_are_exact(number: int, prefix: str) -> None:
    assert units.parse_bytes(f"{number}{prefix}B") == number * units.PREFIXES[prefix]


@given(st.floats(8, 800), st.sampled_from(sorted(units.PREFIXES)))
def test_bits_are_an_eighth_of_bytes(number: float, prefix: str) -> None:
    bits = units.parse_bandwidth(f"{number!r}{prefix}bit/s")
    assert bits * 8 == pytest.approx(units.parse_bandwidth(f"{number!r}{prefix}B/s"), rel=1e-12)


@given(st.text(max_size=12))
def test_any_text_parses_or_is_refused_politely(text: str) -> None:
    for parse in (
        units.parse_bytes,
        units.parse_bandwidth,
        units.parse_seconds,
        units.parse_flops_per_s,
        units.parse_dollars,
        units.parse_factor,
        units.parse_share,
    ):
        with contextlib.suppress(InputError):
            assert parse(text) >= 0


@given(st.floats(1.0, 2**50))
def test_printed_bytes_read_back(size: float) -> None:
    text = units.format_bytes(size).replace(" ", "")
    number = float(text.rstrip("BKMGTPi"))
    unit = text[len(text.rstrip("BKMGTPi")) : -1]
    assert number * units.PREFIXES[unit] == pytest.approx(size, rel=0.51 if size < 10 else 0.06)


def test_printing() -> None:
    assert units.format_bytes(1.2 * 2**30) == "1.2 GiB"
    assert units.format_seconds(0.412) == "412 ms"
    assert units.format_seconds(5e-6) == "5 us"
    assert units.format_rate(450e9, "B/s") == "450 GB/s"
    assert units.format_count(41234) == "41.2k"
