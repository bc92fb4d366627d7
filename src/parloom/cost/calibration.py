"""A calibration: what was measured of a machine, as a value and as a JSON file.

Nothing here says what predictions make of it (`cost.measured`). Seconds are those of one rank while
all ranks do the same.
"""

import json
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from parloom.cost.collectives import Group
from parloom.cost.kernels import LocalOperator
from parloom.cost.units import format_rate
from parloom.errors import InputError, nearest
from parloom.ir.graph import Arg, Dtype
from parloom.ir.json_text import with_controls
from parloom.ir.mesh import Cluster

VERSION = 2
# What is told of a machine lies between these, or was not measured: clocks tick in nanoseconds, no
# device of the tables does more than 1e16 FLOP/s or 1e13 B/s, and none that runs torch less than
# 1e8 of either.
SHORTEST_S, LONGEST_S, LONGEST_LAUNCH_S = 1e-9, 1e4, 10.0
LEAST_PER_S, MOST_FLOPS_PER_S, MOST_BYTES_PER_S = 1e6, 1e18, 1e15
LARGEST_ERROR, LARGEST_LOSS = 10.0, 100.0


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """The machine and software that were measured; `device` is what clusters call it."""

    device: str
    processor: str
    cores: int
    driver: str
    torch: str
    backend: str

    def differences(self, other: "Fingerprint") -> tuple[str, ...]:
        """What differs, as `name: this, not other`."""
        own, others = asdict(self), asdict(other)
        return tuple(f"{n}: {own[n]}, not {others[n]}" for n in own if own[n] != others[n])


@dataclass(frozen=True, slots=True)
class Product:
    """A product of [m, k] and [k, n]."""

    dtype: str
    m: int
    n: int
    k: int
    seconds: float

    @property
    def flops(self) -> float:
        return 2.0 * self.m * self.n * self.k


@dataclass(frozen=True, slots=True)
class Stream:
    """An operator that reads and writes `num_bytes` together."""

    num_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Timed:
    """An operator with its local shapes (`key_of`)."""

    key: str
    forward_s: float
    backward_s: float


@dataclass(frozen=True, slots=True)
class TimedCollective:
    """A collective over `group` while all groups like it do the same.

    `num_bytes` as in `cost.algorithms`. `lost` is the part of their time that kernels lose beside
    it: 0 where they are as fast as alone, 1 where both only take turns, more where they also keep
    each other waiting.
    """

    kind: str
    group: Group
    num_bytes: int
    seconds: float
    lost: float


@dataclass(frozen=True, slots=True)
class Calibration:
    """All that was measured.

    `launch_s` is what an operator takes that does next to nothing, `split_s` as in
    `cost.software`. `error` is how far repetitions
    of the same measurement were apart (90th percentile of |log|). `links` are those that
    collectives went over, from the devices outwards. `types` are the calibrations of a mixed
    cluster's device types, by name; its own rates are then means over all ranks, and its
    collectives messages between parts.
    """

    fingerprint: Fingerprint
    num_ranks: int
    launch_s: float
    products: tuple[Product, ...]
    streams: tuple[Stream, ...]
    operators: tuple[Timed, ...] = ()
    collectives: tuple[TimedCollective, ...] = ()
    error: float = 0.0
    links: tuple[str, ...] = ()
    types: tuple[tuple[str, "Calibration"], ...] = ()
    split_s: float = 0.0

    def of(self, device: str) -> "Calibration":
        """That of a device type, where there is one of its own."""
        return dict(self.types).get(device, self)


def links_of(cluster: Cluster) -> tuple[str, ...]:
    """The rate of a device's link at each level, when all send."""
    levels = (level for level in cluster.levels if level.size > 1)
    rates = (v.link.bandwidth_bytes_per_s / v.oversubscription for v in levels)
    return tuple(format_rate(rate, "B/s") for rate in rates)


def key_of(operator: LocalOperator) -> str:
    """Text that says which operator, with local shapes, arguments and the gradients it makes."""
    operands = " ".join(f"{s.dtype}{list(s.shape)}" for s in operator.operands)
    results = " ".join(f"{s.dtype}{list(s.shape)}" for s in operator.results)
    arguments = ", ".join(map(_argument, operator.attributes))
    arguments += "in place" * operator.in_place
    wanted = ",".join(map(str, operator.wanted))
    return f"{operator.op}({arguments}) {operands} -> {results} d{wanted}"


def _argument(value: Arg) -> str:
    if isinstance(value, tuple):
        return f"({' '.join(_argument(v) for v in value)})"
    return value.name if isinstance(value, Dtype) else repr(value)


def calibration_to_json(calibration: Calibration) -> str:
    """The file's content."""
    return json.dumps({"parloom_calibration": VERSION, **asdict(calibration)}, indent=1) + "\n"


def calibration_from_json(text: str | bytes, where: str) -> Calibration:
    """Read a file's content strictly.

    Raises `InputError` for anything that no calibration has: NaN, times and rates that no machine
    has, an unknown key, another version.
    """
    try:
        document = _Document.model_validate_json(text)
    except ValidationError as error:
        raise InputError(_said(error, where)) from None
    place = with_controls(document.model_dump(mode="json"))
    if place is not None:
        where_in = ".".join(map(str, place))
        raise InputError(f"{where}: {where_in}: control characters in a name or text")
    return _calibration(document)


def _calibration(document: "_Calibration") -> Calibration:
    return Calibration(
        Fingerprint(**document.fingerprint.model_dump()),
        document.num_ranks,
        document.launch_s,
        tuple(Product(**p.model_dump()) for p in document.products),
        tuple(sorted((Stream(**s.model_dump()) for s in document.streams), key=_size)),
        tuple(Timed(**o.model_dump()) for o in document.operators),
        tuple(_collective(c) for c in document.collectives),
        document.error,
        tuple(document.links),
        tuple((name, _calibration(own)) for name, own in document.types),
        document.split_s,
    )


def _size(stream: Stream) -> int:
    return stream.num_bytes


def _said(error: ValidationError, where: str) -> str:
    first = error.errors(include_url=False)[0]
    path = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in first["loc"]).lstrip(".")
    advice = "measure again: parloom calibrate --out FILE"
    if first["type"] == "extra_forbidden":
        known = dict.fromkeys(n for part in _PARTS for n in part.model_fields)
        return f"{where}: {path}: unknown key{nearest(str(first['loc'][-1]), known)}; {advice}"
    said = first["msg"].removeprefix("Value error, ") or "not a calibration"
    said = said[0].lower() + said[1:]
    unsaid = first["type"] in ("missing", "json_invalid") or isinstance(first["input"], dict)
    got = "" if unsaid else f", got {first['input']!r:.60}"
    return f"{where}: {path or 'the file'}: {said}{got}; {advice}"


def _between(least: float, most: float, unit: str = "") -> AfterValidator:
    def check(value: float) -> float:
        if not least <= value <= most:
            raise ValueError(f"should be from {least:g} to {most:g}{unit}")
        return value

    return AfterValidator(check)


def _possible(amount: float, seconds: float, most: float, unit: str) -> None:
    rate = amount / seconds
    if not LEAST_PER_S <= rate <= most:
        said = f"{amount:.3g} {unit} in {seconds:g} s are {rate:.2g} {unit}/s"
        raise ValueError(f"{said}, and devices do {LEAST_PER_S:g} to {most:g}")


Number = Annotated[float, Field(allow_inf_nan=False)]
Time = Annotated[Number, _between(SHORTEST_S, LONGEST_S, " s")]
Some = Annotated[Number, _between(0, LONGEST_S, " s")]
Count = Annotated[int, Field(ge=1, le=2**62)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class _FingerprintPart(_Part):
    device: str
    processor: str
    cores: Count
    driver: str
    torch: str
    backend: str


class _ProductPart(_Part):
    dtype: str
    m: Count
    n: Count
    k: Count
    seconds: Time

    @model_validator(mode="after")
    def _rate(self) -> Self:
        _possible(2.0 * self.m * self.n * self.k, self.seconds, MOST_FLOPS_PER_S, "FLOP")
        return self


class _StreamPart(_Part):
    num_bytes: Count
    seconds: Time

    @model_validator(mode="after")
    def _rate(self) -> Self:
        _possible(self.num_bytes, self.seconds, MOST_BYTES_PER_S, "B")
        return self


class _TimedPart(_Part):
    key: str
    forward_s: Time
    backward_s: Some


class _CollectivePart(_Part):
    kind: str
    group: list[tuple[Annotated[int, Field(ge=0)], Annotated[int, Field(ge=2)]]]
    num_bytes: Count
    seconds: Time
    lost: Annotated[Number, _between(0, LARGEST_LOSS)]


class _Calibration(_Part):
    fingerprint: _FingerprintPart
    num_ranks: Count
    launch_s: Annotated[Number, _between(SHORTEST_S, LONGEST_LAUNCH_S, " s")]
    products: Annotated[list[_ProductPart], Field(min_length=1)]
    streams: Annotated[list[_StreamPart], Field(min_length=1)]
    operators: list[_TimedPart]
    collectives: list[_CollectivePart]
    error: Annotated[Number, _between(0, LARGEST_ERROR)]
    links: list[str] = []
    split_s: Annotated[Number, _between(0, LONGEST_LAUNCH_S, " s")] = 0.0
    types: list[tuple[str, "_Calibration"]] = []


class _Document(_Calibration):
    parloom_calibration: Literal[2]


_PARTS = (_Document, _FingerprintPart, _ProductPart, _StreamPart, _TimedPart, _CollectivePart)


def _collective(part: _CollectivePart) -> TimedCollective:
    fields: dict[str, Any] = part.model_dump()
    return TimedCollective(**fields | {"group": tuple(tuple(pair) for pair in fields["group"])})
