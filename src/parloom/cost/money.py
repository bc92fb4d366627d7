"""What training costs: prices of devices as a user states them, and dollars of a step and of a run.

A plan is paid for the devices that it uses, as long as its step takes. Devices that it leaves idle
are not paid: they need not be rented.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from parloom.cost import units
from parloom.cost.devices import PRICE_KEYS, KnownDevice, find_device
from parloom.errors import InputError, nearest
from parloom.ir.factors import factorize
from parloom.ir.graph import Graph
from parloom.ir.mesh import Cluster, Device, HourlyPrice
from parloom.ir.plan import Decisions
from parloom.ir.regular_parts import regular_parts, used_devices
from parloom.ir.samples import num_samples, num_tokens

HOUR_S, DAY_S, BILLION = 3600.0, 86400.0, 1e9
GIVEN, AS_GIVEN = "--price", "as given"


@dataclass(frozen=True, slots=True)
class Prices:
    """Prices that replace those of clusters: (name of a device, price), without a name of all."""

    listed: tuple[tuple[str, HourlyPrice], ...] = ()

    def of(self, device: Device) -> HourlyPrice | None:
        """The price of a device: one for it by name, else the one for all, else its own."""
        return dict(self.listed).get(device.name, dict(self.listed).get("", device.price))

    def on(self, cluster: Cluster) -> Cluster:
        """A cluster with these prices."""
        parts = tuple(replace(part, cluster=self.on(part.cluster)) for part in cluster.parts)
        device = replace(cluster.device, price=self.of(cluster.device))
        return replace(cluster, device=device, parts=parts)

    def known(self, known: KnownDevice) -> KnownDevice:
        """A device of the table with the price that is given in place of its own."""
        device = replace(known.device, price=self.of(known.device))
        if device == known.device:
            return known
        sources = tuple(entry for entry in known.sources if entry[0] != PRICE_KEYS[0])
        return replace(known, device=device, sources=sources)

    def check(self, clusters: Iterable[Cluster]) -> None:
        """Raise `InputError` for a price of a device that none of the clusters has."""
        there = {p.cluster.device.name for cluster in clusters for p in regular_parts(cluster)}
        for name, _ in self.listed:
            if name and name not in there:
                raise InputError(f"{GIVEN}: no cluster has a device {name!r}{nearest(name, there)}")


AS_LISTED = Prices()


def parse_prices(text: str | None) -> Prices:
    """Prices from `2.10/gpu-h`, or `H100=2.10/gpu-h,A100=1.29/gpu-h`; none of None.

    Raises `InputError` for one without a unit.
    """
    found: dict[str, HourlyPrice] = {}
    for entry in text.split(",") if text is not None else ():
        name, _, price = entry.rpartition("=")
        try:
            usd = units.parse_hourly(price)
        except InputError as error:
            raise InputError(f"{GIVEN}: {error}") from None
        device = _device_name(name.strip())
        if device in found:
            raise InputError(f"{GIVEN}: {device or 'all devices'}: two prices")
        found[device] = HourlyPrice(usd, GIVEN, AS_GIVEN)
    return Prices(tuple(found.items()))


def _device_name(name: str) -> str:
    """The full name of a device of the table; a file may have others."""
    try:
        return find_device(name).device.name if name else ""
    except InputError:
        return name


def check_priced(clusters: Sequence[Cluster], why: str) -> None:
    """Raise `InputError` where there is a device whose price is not known."""
    devices = [part.cluster.device for each in clusters for part in regular_parts(each)]
    unknown = list(dict.fromkeys(device.name for device in devices if device.price is None))
    if unknown:
        example = ",".join(f"{name}=2.10/gpu-h" for name in unknown)
        raise InputError(
            f"{why}: no price is known for {', '.join(unknown)}; add {GIVEN} {example}"
            " (dollars for an hour of one device)"
        )


def usd_per_hour(cluster: Cluster, decisions: Decisions) -> float | None:
    """Dollars for an hour of the devices that a plan uses; None where a price is not known."""
    total = 0.0
    for device, count in used_devices(cluster, decisions):
        if device.price is None:
            return None
        total += device.price.usd * count
    return total


def usd_per_step(cluster: Cluster, decisions: Decisions, step_s: float) -> float | None:
    """Dollars for a step of a plan; None where a price is not known."""
    an_hour = usd_per_hour(cluster, decisions)
    return None if an_hour is None else an_hour * step_s / HOUR_S


@dataclass(frozen=True, slots=True)
class Work:
    """What a step trains on, and a whole run: `unit`s are tokens, or samples of a model that reads
    no sequence of tokens. `in_run` is None where nobody said how long the run is.
    """

    unit: str
    in_step: int
    in_run: float | None = None

    def days(self, step_s: float) -> float | None:
        """Days of the run, if its steps are all there is."""
        return None if self.in_run is None else self.in_run / self.in_step * step_s / DAY_S

    def usd_of_run(self, a_step: float | None) -> float | None:
        """Dollars of the run."""
        if a_step is None or self.in_run is None:
            return None
        return a_step * self.in_run / self.in_step

    def usd_per_billion(self, a_step: float | None) -> float | None:
        """Dollars for a billion units."""
        return None if a_step is None else a_step * BILLION / self.in_step


def work_of(graph: Graph, microbatches: int = 1, in_run: float | None = None) -> Work:
    """What a step of a model trains on, whose `graph` is that of one of so many microbatches that
    are computed by themselves.
    """
    factored = factorize(graph)
    tokens = num_tokens(factored)
    if tokens is not None:
        return Work("token", tokens * microbatches, in_run)
    return Work("sample", num_samples(factored) * microbatches, in_run)
