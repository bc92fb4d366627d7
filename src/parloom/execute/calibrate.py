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
from dataclasses import replace
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
    TimedCollective,
    links_of,
)
from parloom.cost.calibration import calibration_from_json as from_json
from parloom.cost.devices import find_device
from parloom.errors import InputError, LaunchError
from parloom.execute import measure
from parloom.execute.doctor import num_cores
from parloom.execute.measure_collectives import collectives
from parloom.input_files import MIB, read_input
from parloom.ir.mesh import Cluster
from parloom.ir.pcg import PCG

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
    least_s: float = measure.LEAST_S,
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
    clock = measure.Clock(device, least_s)
    say("measuring operators that do next to nothing, products, memory")
    launches = _agreed([measure.launch_s(clock) for _ in range(3)])
    dtypes = DTYPES[device.type]
    products = _mean_of(list(_told(measure.products(clock, dtypes), "products", say)))
    streams, again = (_mean_of(list(measure.streams(clock))) for _ in range(2))
    if pcgs:
        say(f"measuring the operators of {len(pcgs)} programs")
    timed = measure.operators(pcgs, clock, say)
    operators = _mean_of(list(_told(timed, "operators", say)))
    found: tuple[TimedCollective, ...] = ()
    if cluster is not None and size > 1:
        say(f"measuring collectives between {size} ranks")
        found = tuple(_told(collectives(cluster, device, least_s=least_s), "collectives", say))
    pairs = [(a.seconds, b.seconds) for a, b in zip(streams, again, strict=True)]
    pairs += [(a, sorted(launches)[1]) for a in launches]
    apart = sorted(abs(math.log(a / b)) for a, b in pairs)
    return Calibration(
        fingerprint(),
        size,
        sorted(launches)[1],
        products,
        streams,
        operators,
        found,
        apart[min(len(apart) - 1, math.ceil(0.9 * len(apart)) - 1)],
        links_of(cluster) if cluster is not None and found else (),
    )


def _told(measured: Iterable[T], what: str, say: Say) -> Iterator[T]:
    """What is measured, with a line of progress now and then."""
    last = time.monotonic()
    for count, one in enumerate(measured, 1):
        if time.monotonic() - last >= EVERY_S:
            last = time.monotonic()
            say(f"{count} {what} so far")
        yield one


def _mean_of(measured: list[M]) -> tuple[M, ...]:
    """The measurements that all ranks made, each with the mean of their times.

    Ranks stop at different sizes: those that are slower measure fewer.
    """
    if not measured or not dist.is_initialized():
        return tuple(measured)
    fields = [n for n in ("seconds", "forward_s", "backward_s") if hasattr(measured[0], n)]
    timeless: dict[str, Any] = dict.fromkeys(fields, 0.0)
    of_ranks: list[dict[M, tuple[float, ...]]] = [{} for _ in range(dist.get_world_size())]
    own = {replace(m, **timeless): tuple(getattr(m, n) for n in fields) for m in measured}
    dist.all_gather_object(of_ranks, own)
    found = []
    for one in of_ranks[0]:
        if all(one in times for times in of_ranks):
            means = map(fmean, zip(*(times[one] for times in of_ranks), strict=True))
            timed: dict[str, Any] = dict(zip(fields, means, strict=True))
            found.append(replace(one, **timed))
    return tuple(found)


def _agreed(times: list[float]) -> list[float]:
    """The mean over ranks, each of which has as many times."""
    if not dist.is_initialized():
        return times
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    found = torch.tensor(times, dtype=torch.float64, device=device)
    dist.all_reduce(found)
    mean: list[float] = (found / dist.get_world_size()).tolist()
    return mean


def read_calibration(path: Path) -> Calibration:
    """The calibration in a file; raises `InputError`."""
    advice = "make one with `parloom calibrate --out FILE`"
    return from_json(read_input(path, "the calibration", MOST_BYTES, advice), str(path))
