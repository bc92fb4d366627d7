"""What predictions make of a calibration: a device with measured rates, and a table of operators
and collectives that overrides the formulas where it has them.

A prediction has a source. `spec`: rates of data sheets. `calibrated`: rates, launches and
collectives that were measured. `measured`: nine tenths of the operators' time besides come from the
table, and of several ranks collectives were measured, too. Each has an error band, which is how far
predictions of that source were off where they were compared with real steps.
"""

import math
import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from types import MappingProxyType

from parloom.cost.bands import COMPARED, COMPARED_SOFTWARE, Unknown
from parloom.cost.calibration import Calibration, Fingerprint, Timed, key_of, links_of
from parloom.cost.collectives import Group
from parloom.cost.kernels import (
    JOINED,
    MEASURED,
    SPEC,
    Kernels,
    LocalOperator,
    Seconds,
    factors_of,
    product_sizes,
)
from parloom.cost.local_operators import local_operator
from parloom.cost.software import OWN, Software
from parloom.errors import InputError
from parloom.ir.graph import DTYPE_BYTES
from parloom.ir.mesh import Cluster, Device, Efficiency, Part
from parloom.ir.pcg import PCG, Compute
from parloom.ir.regular_parts import regular_parts

CALIBRATED = "calibrated"
# From this share of the operators' time on, a prediction is called measured.
MEASURED_SHARE = 0.9
# Kernels make some progress beside any collective, so that one takes at most 20 times its time.
MOST_LOST = 0.95
# 90th percentile of |log(predicted / measured)| of step times, by source. CPU: on the cluster in a
# box (benchmarks/reality.py), of whose links and quotas data sheets know nothing; those of three
# models that formulas were never looked at with (82 cases, all measured). Others have the band of
# published runs (`cost.bands`); predictions from a calibration of such a device were not compared
# with anything yet, so they count as sure as those.
CPU_ERRORS: Mapping[str, float] = MappingProxyType({SPEC: 2.2, CALIBRATED: 0.21, MEASURED: 0.21})
Point = tuple[float, float]
_Kind = tuple[str, str, int]
SPEC_TEXT = re.compile(rf"({'|'.join(sorted(DTYPE_BYTES))})\[([\d, ]*)\]")


@dataclass(frozen=True, slots=True)
class Source:
    """Where a prediction comes from; the step takes between 1/e^error and e^error times as long
    nine times in ten. `notes` say what does not fit.
    """

    name: str
    error: float
    notes: tuple[str, ...] = ()

    def band(self, step_s: float) -> tuple[float, float]:
        """The shortest and the longest time that are likely."""
        return step_s / math.exp(self.error), step_s * math.exp(self.error)


class Table:
    """Operators and collectives that were measured, and curves for those that were not.

    `slowdown` as in `calibrated`; collectives were measured with all ranks.
    """

    def __init__(self, calibration: Calibration, slowdown: float = 1.0) -> None:
        self._operators = {timed.key: timed for timed in calibration.operators}
        self._kin: dict[_Kind, list[tuple[_Sizes, Timed]]] = {}
        for timed in calibration.operators:
            sizes = _sizes(timed.key)
            self._kin.setdefault(sizes.kind, []).append((sizes, timed))
        self._slowdown, self._launch_s = slowdown, calibration.launch_s * slowdown
        self._curves: dict[str, list[Point]] = {}
        for product in calibration.products:
            points = self._curves.setdefault(product.dtype, [])
            points.append((math.log(product.flops), product.flops / product.seconds))
        self._exchanges: dict[tuple[str, Group], list[Point]] = {}
        self._lost: dict[tuple[str, Group], list[Point]] = {}
        for found in sorted(calibration.collectives, key=lambda found: found.num_bytes):
            curve = self._exchanges.setdefault((found.kind, found.group), [])
            curve.append((found.num_bytes, found.seconds))
            curve = self._lost.setdefault((found.kind, found.group), [])
            curve.append((found.num_bytes, min(MOST_LOST, found.lost)))
        for curve in self._curves.values():
            curve.sort()
        self._exchanges = {key: _rising(curve) for key, curve in self._exchanges.items()}

    def seconds(self, operator: LocalOperator) -> Seconds | None:
        """As measured, or by its work as the same operator that was measured at the nearest shapes;
        products of which none was, at the rate of products of their size.
        """
        key = key_of(operator)
        timed = self._operators.get(key)
        if timed is not None:
            forward, backward = timed.forward_s * self._slowdown, timed.backward_s * self._slowdown
            return Seconds(forward, backward, _of_weights(operator, backward), MEASURED)
        if operator.op in JOINED:  # as the product that it is, and what is moved for it
            return None
        akin = self._as_its_kin(operator, _sizes(key))
        if akin is not None:
            return akin
        curve = self._curves.get(operator.dtype)
        factors = factors_of(operator.op, len(operator.operands))
        if factors is None or not operator.flops or curve is None:
            return None
        _, m, n, k = product_sizes(operator)
        each = 2.0 * m * n * k
        rate = max(1.0, _between(curve, math.log(max(each, 1.0)))) / self._slowdown
        work = operator.flops / rate
        gradients = sum(index in operator.wanted for index in factors)
        launch = self._launch_s
        weights = (work + launch) if factors[1] in operator.wanted else 0.0
        return Seconds(work + launch, gradients * (work + launch), weights, CALIBRATED)

    def _as_its_kin(self, operator: LocalOperator, sizes: "_Sizes") -> Seconds | None:
        """From the time beyond the launch of the same operator at the nearest shapes: between two
        that were measured linear in its work, otherwise in proportion to it. Of products with other
        gradients the forward pass says what each of these takes.
        """
        kin, factors = self._kin.get(sizes.kind), factors_of(operator.op, len(operator.operands))
        if kin:
            forward, backward = self._scaled(kin, sizes)
        elif factors is not None:
            kin = [one for kind, own in self._kin.items() if sizes.has_op_of(kind) for one in own]
            if not kin:
                return None
            forward, _ = self._scaled(kin, sizes)
            backward = forward * sum(index in operator.wanted for index in factors)
        else:
            return None
        return Seconds(forward, backward, _of_weights(operator, backward), CALIBRATED)

    def _scaled(
        self, kin: "Sequence[tuple[_Sizes, Timed]]", sizes: "_Sizes"
    ) -> tuple[float, float]:
        """Forward and backward pass at these sizes."""
        ordered = sorted(kin, key=lambda one: (one[0].distance(sizes), one[1].key))
        nearest, timed = ordered[0]
        launch, more = self._launch_s / self._slowdown, sizes.work / nearest.work
        other = next((o for o in ordered[1:] if sizes.is_between(nearest, o[0])), None)

        def seconds(near_s: float, far_s: float) -> float:
            if other is None:
                return self._slowdown * (min(near_s, launch) + max(0.0, near_s - launch) * more)
            share = (sizes.work - nearest.work) / (other[0].work - nearest.work)
            return self._slowdown * (near_s + share * (far_s - near_s))

        far = timed if other is None else other[1]
        return (
            seconds(timed.forward_s, far.forward_s),
            seconds(timed.backward_s, far.backward_s),
        )

    def exchange(
        self, kind: str, num_bytes: float, group: Group
    ) -> tuple[float, float, float] | None:
        """Of a collective its seconds, those in which next to nothing travels, and by how many
        times their time kernels beside it take longer; None where neither the kind nor the group
        was measured.
        """
        if kind == "send" and (kind, group) not in self._exchanges:
            kind = "all_reduce"  # of two ranks, each of which sends as much
        curve = self._exchanges.get((kind, group))
        if not curve:
            return None
        seconds = max(1e-9, _between(curve, num_bytes, extend=True))
        lost = _between(self._lost[kind, group], num_bytes)
        return seconds, min(t for _, t in curve), lost / (1 - lost)


@dataclass(frozen=True, slots=True)
class _Sizes:
    """What is alike in `kind` may be compared: bytes of operands and results, and the work that
    grows with them: for a product its multiplications, up to a factor that `kind` has in common.
    """

    kind: _Kind
    num_bytes: tuple[int, ...]
    work: float

    def has_op_of(self, kind: _Kind) -> bool:
        """Whether operators of this kind differ in the gradients that they make at most."""
        return (kind[0], kind[2]) == (self.kind[0], self.kind[2])

    def is_between(self, one: "_Sizes", other: "_Sizes") -> bool:
        """Whether no operand is larger, and none smaller, than in both, and the work neither."""
        ends = sorted((one.work, other.work))
        sizes = zip(self.num_bytes, one.num_bytes, other.num_bytes, strict=True)
        inside = all(min(a, b) <= own <= max(a, b) for own, a, b in sizes)
        return inside and ends[0] < ends[1] and ends[0] <= self.work <= ends[1]

    def distance(self, other: "_Sizes") -> float:
        """How far shapes are apart."""
        pairs = zip(self.num_bytes, other.num_bytes, strict=True)
        return sum(abs(math.log(max(1, a) / max(1, b))) for a, b in pairs)


def _sizes(key: str) -> _Sizes:
    """Read from `key_of`; operands and results come in its order."""
    op, wanted = key.partition("(")[0], key.rpartition(" d")[2]
    shapes = [
        (DTYPE_BYTES[dtype], [int(size) for size in shape.split(",") if size.strip()])
        for dtype, shape in SPEC_TEXT.findall(key)
    ]
    num_bytes = tuple(width * math.prod(shape) for width, shape in shapes)
    work = float(max(1, sum(num_bytes)))
    factors = factors_of(op, len(shapes) - 1)
    if factors is not None:
        first, second = factors
        result = shapes[-1][1]
        batch = math.prod(result[:-2]) if op in ("bmm", "matmul", "baddbmm") else 1
        # [m, k] [k, n] -> [m, n]: the sizes' product is (m n k)^2.
        sizes = (math.prod(shapes[index][1]) for index in (first, second, -1))
        work = max(1.0, batch * math.sqrt(math.prod(size / batch for size in sizes)))
    return _Sizes((op, wanted, len(shapes)), num_bytes, work)


def _of_weights(operator: LocalOperator, backward_s: float) -> float:
    """The part of a backward pass that is the gradient of a product's second factor."""
    factors = factors_of(operator.op, len(operator.operands))
    both = factors is not None and len(operator.wanted) > 1
    return backward_s / 2 if both else 0.0


def _rising(curve: Iterable[Point]) -> list[Point]:
    """Points in order, none below one before: what a larger message takes less is noise."""
    ordered = sorted(curve)
    highest = accumulate((value for _, value in ordered), max)
    return [(x, value) for (x, _), value in zip(ordered, highest, strict=True)]


def _between(curve: Sequence[Point], x: float, *, extend: bool = False) -> float:
    """Linear between points; beyond them as at the nearest one, or with `extend` as steeply as the
    last two, or as the whole curve where that is steeper.
    """
    if len(curve) == 1:
        only, value = curve[0]
        return value * max(1.0, x / only) if extend and only else value
    at = bisect_right([p for p, _ in curve], x)
    if not extend and at in (0, len(curve)):
        return curve[0][1] if at == 0 else curve[-1][1]
    if extend and at == 0:
        return curve[0][1]
    (x0, y0), (x1, y1) = curve[min(at, len(curve) - 1) - 1], curve[min(at, len(curve) - 1)]
    if at < len(curve):
        return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    slopes = [(y1 - y) / (x1 - before) for before, y in (curve[0], (x0, y0)) if before < x1]
    return y1 + max(slopes, default=0.0) * (x - x1)


ALONE = (
    "operators are measured, by one process; links, and what ranks take from each other, are"
    " assumed as in data sheets: calibrate with as many ranks as the plan has (torchrun ... -m"
    " parloom calibrate --plan PLAN)"
)


def calibrated(
    cluster: Cluster, calibration: Calibration, slowdown: float = 1.0
) -> tuple[Cluster, Kernels]:
    """`cluster` with the rates that were measured, and what its operators then cost.

    `slowdown`: how many processes share what one had to itself when it was measured.
    """
    if cluster.parts:
        return _calibrated_parts(cluster, calibration, slowdown)
    calibration = calibration.of(cluster.device.name)
    rates = dict(cluster.device.flops_per_s)
    for product in calibration.products:
        rates[product.dtype] = 0.0
    for product in calibration.products:
        rates[product.dtype] = max(rates[product.dtype], product.flops / product.seconds)
    largest = max(calibration.streams, key=lambda stream: stream.num_bytes)
    device = replace(
        cluster.device,
        flops_per_s=tuple((dtype, rate / slowdown) for dtype, rate in rates.items()),
        memory_bytes_per_s=largest.num_bytes / largest.seconds / slowdown,
        efficiency=Efficiency(1.0, 1.0, cluster.device.efficiency.attention, 1.0),
        cores=0,
    )
    table = Table(calibration, slowdown)
    kernels = Kernels(device, _software(calibration, slowdown), table, exchanges=table)
    return replace(cluster, device=device), kernels


def _calibrated_parts(
    cluster: Cluster, calibration: Calibration, slowdown: float
) -> tuple[Cluster, Kernels]:
    """The same of a mixed cluster: each part by what was measured of its device type."""
    parts: list[Part] = []
    types: dict[str, Kernels] = {}
    for part in cluster.parts:
        own, kernels = calibrated(part.cluster, calibration, slowdown)
        types |= dict(kernels.types) or {kernels.device.name: kernels}
        parts.append(replace(part, cluster=own))
    table = Table(calibration, slowdown)
    software = _software(calibration, slowdown)
    device = parts[0].cluster.device
    every = Kernels(device, software, table, exchanges=table, types=tuple(types.items()))
    return replace(cluster, device=device, parts=tuple(parts)), every


def _software(calibration: Calibration, slowdown: float) -> Software:
    launch_s, split_s = calibration.launch_s * slowdown, calibration.split_s * slowdown
    return replace(OWN, launch_s=launch_s, split_s=split_s)


def mismatches(
    calibration: Calibration, cluster: Cluster, here: Fingerprint | None
) -> tuple[str, ...]:
    """Why a calibration may say little of `cluster`: made on another device, over other links, by
    one process, which measures no collectives, or, where the cluster is this machine's processes,
    on another machine than `here`.

    Raises `InputError` where one is of GPUs and the other of processors.
    """
    found = calibration.fingerprint
    if found.backend != cluster.backend:
        raise InputError(
            f"the calibration is of {found.device} ({found.backend}), and {cluster.name} has"
            f" {cluster.device.name} ({cluster.backend}): rates of one say nothing of the other;"
            " leave --calibration out, or run parloom calibrate on such a machine"
        )
    lines: list[str] = []
    if cluster.device.name == "cpu" and here is not None:
        lines += found.differences(here)
    else:
        for name in dict.fromkeys(p.cluster.device.name for p in regular_parts(cluster)):
            device = calibration.of(name).fingerprint.device
            lines += [f"device: {device}, not {name}"] if device != name else []
    links = calibration.links if cluster.parts else calibration.of(cluster.device.name).links
    for measured, described in zip(links, links_of(cluster), strict=False):
        if measured != described:
            lines.append(f"links: {measured}, not {described}")
    return tuple(lines)


def error_of(source: str, device: Device, peak_bytes: int = 0) -> float:
    """How far predictions of a source were off, nine times in ten, for plans with such a peak."""
    if device.name == "cpu":
        return CPU_ERRORS[source]
    unknown = Unknown(
        device=device.name not in COMPARED,
        software=source == SPEC and OWN.name not in COMPARED_SOFTWARE,
        memory_share=peak_bytes / device.memory_bytes,
    )
    return unknown.error


def source_of(
    pcgs: Sequence[PCG], kernels: Kernels, calibration: Calibration, different: Iterable[str] = ()
) -> Source:
    """The source of a prediction for the programs of all stages, with its band, which repetitions,
    a `different` machine and ranks that were not measured together widen.
    """
    times = {MEASURED: 0.0, CALIBRATED: 0.0, SPEC: 0.0}
    for pcg in pcgs:
        for item in (item for f in (pcg.main, *pcg.functions) for item in f.body):
            if isinstance(item, Compute):
                found = kernels.seconds(local_operator(item, pcg.mesh))
                times[found.source] += found.forward_s + found.backward_s
    whole = sum(times.values())
    several = sum(pcg.decisions.num_ranks for pcg in pcgs) > 1
    # Where no collective was measured, what is sent between ranks is of data sheets.
    has_links = not several or bool(calibration.collectives or calibration.types)
    is_measured = bool(whole) and times[MEASURED] >= MEASURED_SHARE * whole and has_links
    name = MEASURED if is_measured else CALIBRATED
    error = math.hypot(error_of(name, kernels.device), calibration.error)
    notes = [f"calibrated on another machine ({line})" for line in different]
    unknown = [bool(notes)]
    if calibration.num_ranks == 1 and several:
        notes.append(ALONE)
        unknown.append(True)
    error = math.hypot(error, *(error_of(SPEC, kernels.device) * more for more in unknown))
    return Source(name, error, tuple(notes))
