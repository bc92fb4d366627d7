"""What more devices buy: the fastest plan on ever larger clusters."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from parloom.cost.cluster_file import MAX_DEVICES
from parloom.cost.clusters import resolve_cluster, short_name
from parloom.cost.money import Work, parse_prices, work_of
from parloom.errors import InfeasibleError, InputError, LayoutError, StoppedError, one_line
from parloom.fronts import of_cluster, priced, prices_of
from parloom.ir.expected import Status
from parloom.ir.mesh import part_sizes
from parloom.report.scaling import Point, Scaling
from parloom.searching import Captured, Found, find

Say = Callable[[str], None]
Asked = dict[str, Any]
SPEC = re.compile(r"(?:([0-9]{1,7})x)?([0-9]{1,7})x([^0-9].*)")


@dataclass(frozen=True, slots=True)
class Size:
    """A cluster, or its first devices."""

    spec: str
    num_devices: int
    part: int | None = None


def sizes_of(spec: str, up_to: int | None) -> list[Size]:
    """The parts of a cluster; or it with twice as many nodes again and again, `up_to` so many
    devices.
    """
    cluster = resolve_cluster(spec).cluster
    if up_to is None:
        if cluster.parts:
            raise InputError(f"{cluster.name} has several types of devices: none is twice another")
        sizes = sorted((*part_sizes(cluster), cluster.num_devices))
        return [Size(spec, size, size) for size in sizes]
    given, count = SPEC.fullmatch(spec), cluster.num_devices
    if given is None:
        raise InputError(
            f"--up-to {up_to}: only nodes x devices x device can grow, not {cluster.name}; give the"
            " largest cluster, and leave --up-to out for its parts"
        )
    if up_to > MAX_DEVICES:
        raise InputError(f"--up-to {up_to}: at most {MAX_DEVICES} devices can be planned for")
    if up_to < 2 * count:
        raise InputError(f"--up-to {up_to}: {spec} has {count} devices; give {2 * count} or more")
    found, nodes = [], int(given[1] or 1)
    while count <= up_to:
        found.append(Size(f"{nodes}x{given[2]}x{given[3]}", count))
        nodes, count = 2 * nodes, 2 * count
    return found


def scaling(
    sizes: list[Size],
    captured: Captured,
    again: Callable[[int], Captured] | None,
    progress: Say,
    asked: Asked,
) -> Scaling:
    """The fastest plan on each size, which may leave devices idle; Ctrl-C keeps what is done.

    `again` captures the model with another batch, so that each device has as many samples in all
    sizes (weak scaling); None keeps the batch. Raises `InfeasibleError` where no size has a plan.
    """
    whole = work_of(captured.graph, captured.microbatches)
    samples = captured.samples
    points: list[Point] = []
    found: list[Found] = []
    interrupted = False
    for size in sizes:
        times = size.num_devices // sizes[0].num_devices
        work = Work(whole.unit, whole.in_step * (times if again else 1))
        say = partial(of_cluster, progress, f"{size.num_devices} devices")
        try:
            own = again(samples * times) if again and times > 1 else captured
            there = find(own, cluster=size.spec, part=size.part, alone=False, progress=say, **asked)
        except (KeyboardInterrupt, StoppedError):
            interrupted = True
            break
        except (InfeasibleError, InputError, LayoutError) as error:
            points.append(Point(size.spec, size.num_devices, work, reason=one_line(error)))
            say(points[-1].reason)
            continue
        best = there.choice.best
        used, name = best.decisions.num_ranks, short_name(size.spec)
        points.append(Point(name, size.num_devices, work, used, priced(there, best)))
        found.append(there)
        if there.choice.status is Status.INTERRUPTED:
            interrupted = True
            break
    if not found and interrupted:
        raise StoppedError
    if not found:
        reasons = "\n".join(f"{point.num_devices} devices: {point.reason}" for point in points)
        raise InfeasibleError(f"no size has a plan:\n{reasons}")
    prices = prices_of(found)
    return Scaling(captured.source.spec, again is not None, tuple(points), prices, interrupted)


def check_weak(captured: Captured, weak: bool) -> None:
    """Raise `InputError` where batches should grow that only the user's own code can make."""
    source = captured.source
    if weak and source.is_live:
        raise InputError("--weak: the model lives in the process that planned it")
    if weak and source.is_factory:
        raise InputError("--weak: a factory makes its own batch, which cannot grow with devices")


def check_scaling(sizes: list[Size], price: str | None) -> None:
    """Raise `InputError` for prices of devices that are not there."""
    prices = parse_prices(price)
    prices.check([resolve_cluster(sizes[0].spec, prices).cluster])
