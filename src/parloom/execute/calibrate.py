"""Measures this machine, or under torchrun the cluster: rates, operators of programs, collectives.

Every rank measures while the others do the same, so that what they share is shared; times are means
over ranks.
"""

import math
import os
import platform
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from parloom.cost.calibration import (
    Calibration,
    Fingerprint,
    Product,
    Stream,
    Timed,
    links_of,
)
from parloom.cost.calibration import calibration_from_json as from_json
from parloom.cost.devices import find_device
from parloom.errors import InputError, LaunchError
from parloom.execute import measure
from parloom.execute.clock import LEAST_S, Clock
from parloom.execute.doctor import num_cores
from parloom.execute.measure_collectives import collectives, sends_between
from parloom.input_files import MIB, read_input
from parloom.ir.mesh import Cluster
from parloom.ir.pcg import PCG
from parloom.ir.regular_parts import regular_parts

Say = Callable[[str], None]
M = TypeVar("M", Product, Stream, Timed)
T = TypeVar("T")
MOST_BYTES = 16 * MIB
EVERY_S = 5.0  # between lines of progress
DTYPES = {"cpu": ("float32", "bfloat16"), "cuda": ("float32", "bfloat16", "float16")}
# Ways in which drivers and kernels name a processor, in files of Linux.
PROCESSORS, NVIDIA = Path("/proc/cpuinfo"), Path("/proc/driver/nvidia/version")


def world_size() -> int:
    """Ranks that a launcher has started; 1 without one."""
    given = os.environ.get("WORLD_SIZE", "1")
    if not re.fullmatch("[0-9]{1,9}", given) or not int(given):
        raise LaunchError(f"WORLD_SIZE is {given!r}; start ranks with torchrun")
    return int(given)


@contextmanager
def ranks() -> Iterator[int]:
    """The process group of the ranks that were started; this rank."""
    size = world_size()
    if size == 1:
        yield 0
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    try:
        yield dist.get_rank()
        dist.barrier()
    finally:
        dist.destroy_process_group()


def fingerprint() -> Fingerprint:
    """This machine: its GPU where it has one, otherwise its processor."""
    driver, backend, cores = "", "gloo", num_cores()
    processor = device = "cpu"
    if torch.cuda.is_available():
        processor = torch.cuda.get_device_name()
        device, backend = _known(processor), "nccl"
        cores = torch.cuda.get_device_properties().multi_processor_count
        driver = f"cuda {torch.version.cuda}"
        if NVIDIA.exists():
            driver += f", {NVIDIA.read_text(encoding='utf-8').splitlines()[0].strip()}"
    elif PROCESSORS.exists():
        lines = PROCESSORS.read_text(encoding="utf-8").splitlines()
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        processor = names[0] if names else platform.processor()
    return Fingerprint(device, processor, cores, driver, torch.__version__, backend)


def _known(name: str) -> str:
    """What clusters call a GPU; its own name where they do not know it."""
    words = name.removeprefix("NVIDIA ").split()
    for end in range(len(words), 0, -1):
        try:
            return find_device("-".join(words[:end])).device.name
        except InputError:
            continue
    return name


def calibrate(
    pcgs: Sequence[PCG],
    cluster: Cluster | None,
    say: Say = lambda text: None,
    least_s: float = LEAST_S,
) -> Calibration:
    """Measure everything, each for `least_s` at least; `cluster` is what the ranks are.

    Raises `InputError` where that has another number of devices than there are ranks.
    """
    size = dist.get_world_size() if dist.is_initialized() else 1
    if cluster is not None and size > 1 and cluster.num_devices != size:
        raise InputError(
            f"{cluster.name} has {cluster.num_devices} devices, and {size} ranks were started:"
            " start as many, or describe another cluster"
        )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        torch.set_num_threads(1)  # as a rank of a plan computes
    every = _of_all_ranks(_measured(pcgs, Clock(device, least_s), say))
    whole = _mean_rates(every, every[0].machine, size)
    if cluster is None or size == 1:
        return whole
    say(f"measuring collectives between {size} ranks")
    parts = regular_parts(cluster)
    if not cluster.parts:
        timed = _told(collectives(parts[0], device, None, least_s), "collectives", say)
        return replace(whole, collectives=tuple(timed), links=links_of(cluster))
    joins = tuple(_told(sends_between(parts, device, least_s), "messages", say))
    types: dict[str, Calibration] = {}
    for part in parts:
        name = part.cluster.device.name
        own = tuple(_told(collectives(part, device, None, least_s), "collectives", say))
        if name in types:
            own += types[name].collectives  # where they differ, the slower counts
        alike = [r for p in parts if p.cluster.device.name == name for r in p.devices]
        machine = every[alike[0]].machine
        if machine.device == "cpu":  # cluster files call processors as they like
            machine = replace(machine, device=name)
        rates = _mean_rates([every[rank] for rank in alike], machine, size)
        types[name] = replace(rates, collectives=own, links=links_of(part.alone))
    return replace(whole, collectives=joins, links=links_of(cluster), types=tuple(types.items()))


@dataclass(frozen=True, slots=True)
class _Rates:
    """What one rank measured of its device; memory twice."""

    machine: Fingerprint
    launches_s: tuple[float, ...]
    split_s: float
    products: tuple[Product, ...]
    streams: tuple[Stream, ...]
    again: tuple[Stream, ...]
    operators: tuple[Timed, ...]


def _measured(pcgs: Sequence[PCG], clock: Clock, say: Say) -> _Rates:
    say("measuring operators that do next to nothing, products, memory")
    launches, split_s = tuple(measure.launch_s(clock) for _ in range(3)), measure.split_s(clock)
    _together()
    dtypes = DTYPES[clock.device.type]
    products = tuple(_told(measure.products(clock, dtypes), "products", say))
    _together()
    streams, again = (tuple(measure.streams(clock)) for _ in range(2))
    _together()
    if pcgs:
        say(f"measuring the operators of {len(pcgs)} programs")
    operators = tuple(_told(measure.operators(pcgs, clock, say), "operators", say))
    return _Rates(fingerprint(), launches, split_s, products, streams, again, operators)


def _together() -> None:
    """Ranks begin what comes next together, so that what they share is shared."""
    if dist.is_initialized():
        dist.barrier()


def _of_all_ranks(own: _Rates) -> list[_Rates]:
    if not dist.is_initialized():
        return [own]
    every: list[_Rates] = [own] * dist.get_world_size()
    dist.all_gather_object(every, own)
    return every


def _mean_rates(ranks: Sequence[_Rates], machine: Fingerprint, num_ranks: int) -> Calibration:
    """The mean over some of the ranks that measured together."""
    launches = [fmean(times) for times in zip(*(own.launches_s for own in ranks), strict=True)]
    launch_s = sorted(launches)[1]
    streams, again = (mean_of([getattr(r, name) for r in ranks]) for name in ("streams", "again"))
    pairs = [(a.seconds, b.seconds) for a, b in zip(streams, again, strict=True)]
    pairs += [(a, launch_s) for a in launches]
    apart = sorted(abs(math.log(a / b)) for a, b in pairs)
    return Calibration(
        machine,
        num_ranks,
        launch_s,
        mean_of([own.products for own in ranks]),
        streams,
        mean_of([own.operators for own in ranks]),
        split_s=fmean(own.split_s for own in ranks),
        error=apart[min(len(apart) - 1, math.ceil(0.9 * len(apart)) - 1)],
    )


def _told(measured: Iterable[T], what: str, say: Say) -> Iterator[T]:
    """What is measured, with a line of progress now and then."""
    last = time.monotonic()
    for count, one in enumerate(measured, 1):
        if time.monotonic() - last >= EVERY_S:
            last = time.monotonic()
            say(f"{count} {what} so far")
        yield one


def mean_of(of_ranks: Sequence[Sequence[M]]) -> tuple[M, ...]:
    """The measurements that all ranks made, each with the mean of their times.

    Ranks stop at different sizes: those that are slower measure fewer.
    """
    if not of_ranks[0]:
        return ()
    fields = [n for n in ("seconds", "forward_s", "backward_s") if hasattr(of_ranks[0][0], n)]
    timeless: dict[str, Any] = dict.fromkeys(fields, 0.0)
    known: list[dict[M, tuple[float, ...]]] = [
        {replace(m, **timeless): tuple(getattr(m, n) for n in fields) for m in own}
        for own in of_ranks
    ]
    found = []
    for one in known[0]:
        if all(one in times for times in known):
            means = map(fmean, zip(*(times[one] for times in known), strict=True))
            timed: dict[str, Any] = dict(zip(fields, means, strict=True))
            found.append(replace(one, **timed))
    return tuple(found)


def read_calibration(path: Path) -> Calibration:
    """The calibration in a file; raises `InputError`."""
    advice = "make one with `parloom calibrate --out FILE`"
    return from_json(read_input(path, "the calibration", MOST_BYTES, advice), str(path))
