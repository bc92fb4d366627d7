"""What this machine has, as a cluster: GPUs as NVIDIA's driver tells, else the cores of the CPU.

`pynvml` (nvidia-ml-py) is asked where it is installed, else torch; neither is needed for a CPU.
"""

import importlib
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from parloom.cost.cluster_file import one_line, read_cluster_text
from parloom.cost.clusters import LoadedCluster, resolve_cluster
from parloom.cost.devices import KnownDevice, find_interconnect, known_devices
from parloom.cost.units import format_bytes
from parloom.errors import InputError
from parloom.execute.doctor import num_cores

# Bytes per second and direction of one PCIe lane, by generation.
LANES = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
BUSY = 1 << 30  # a process with less on a GPU is a desktop's
SAME_MEMORY = 0.15  # drivers count binary what data sheets count decimal, and keep some back
MOST_LINKS = 18  # NVLinks of one GPU
TORCH = "torch"
# In a name they say that it is another device.
VARIANTS = frozenset({"d", "ti", "super", "laptop", "max", "mobile", "nvl"})


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU; `users` are processes by id with the bytes that they hold.

    Generation and lanes of PCIe are 0 where nobody could say; `links` are its NVLinks in use.
    """

    name: str
    memory_bytes: int
    free_bytes: int
    users: tuple[tuple[int, int], ...] = ()
    generation: int = 0
    lanes: int = 0
    links: int = 0


@dataclass(frozen=True, slots=True)
class Here:
    """This machine; `meshed` says whether NVLink joins all pairs of GPUs."""

    gpus: tuple[Gpu, ...]
    driver: str
    asked: str
    meshed: bool
    num_cores: int
    memory_bytes: int
    nics: tuple[str, ...]


def detect() -> Here:
    """Look at this machine."""
    gpus, driver, asked, meshed = _from_driver() or _from_torch() or ((), "", "nobody", False)
    memory = int(psutil.virtual_memory().total)
    return Here(gpus, driver, asked, meshed, num_cores(), memory, _nics())


def cluster_here(here: Here) -> LoadedCluster:
    """The cluster that plans for this machine are made for."""
    if not here.gpus:
        return resolve_cluster(f"{here.num_cores}xcpu")
    cluster, assumed = read_cluster_text(yaml_of(here), "this machine")
    return LoadedCluster(cluster, (found_words(here), *assumed), one_line(cluster))


def found_words(here: Here) -> str:
    """What is planned for where no cluster is named."""
    cores = f"{here.num_cores} core{'s' if here.num_cores > 1 else ''}"
    if not here.gpus:
        return f"No accelerator found here; planning for this CPU ({cores}): try --cluster 8xH100"
    return f"Planning for the GPUs of this machine: {len(here.gpus)} x {here.gpus[0].name}"


def warnings_of(here: Here) -> list[str]:
    """Memory that other processes hold."""
    return [
        f"GPU {index} has {held / 1e9:.0f} GB in use by pid {process}"
        for index, gpu in enumerate(here.gpus)
        for process, held in gpu.users
        if held >= BUSY
    ]


def here_lines(here: Here) -> list[str]:
    """GPUs, links, network, host, one line each."""
    lines = []
    for index, gpu in enumerate(here.gpus):
        memory = f"{format_bytes(gpu.free_bytes)} free of {format_bytes(gpu.memory_bytes)}"
        pcie = f", PCIe {gpu.generation} x{gpu.lanes}" if gpu.lanes else ""
        links = f", {gpu.links} NVLinks" if gpu.links else ""
        lines.append(f"GPU {index}: {gpu.name}, {memory}{pcie}{links}")
    if here.meshed:
        lines.append("NVLink joins all pairs of GPUs")
    elif any(gpu.links for gpu in here.gpus):
        lines.append("NVLink joins some pairs of GPUs only: planned as if joined by PCIe")
    lines.append(f"driver: {here.driver or 'none'} (asked: {here.asked})")
    lines += [f"network: {nic}" for nic in here.nics]
    lines.append(f"host: {here.num_cores} cores, {format_bytes(here.memory_bytes)}")
    return lines


def yaml_of(here: Here) -> str:
    """A cluster file, with a comment at each value: read here, or assumed.

    Raises `InputError` for GPUs of several kinds, or of a kind that the device table does not have.
    """
    head = "# This machine as it was found; nothing was measured: parloom calibrate does that.\n"
    nics = "".join(f"# network (read; other nodes are not known): {nic}\n" for nic in here.nics)
    if not here.gpus:
        return (
            f"{head}{nics}# no accelerator was found; memory {format_bytes(here.memory_bytes)}"
            " (read)\n"
            "name: this-machine\n"
            "device: cpu # assumed: rates and memory of one core (parloom cluster show --known)\n"
            "levels:\n"
            f"  - name: loopback\n    size: {here.num_cores} # read: usable cores\n"
            "    bandwidth: 0.9GB/s # assumed: gloo between two processes\n"
        )
    known = known_gpu(here)
    name, rate, why = _link(here, known)
    share = f"{len(here.gpus)} # read\n"
    return (
        f"{head}{nics}# driver {here.driver or 'unknown'} (read); rates of the device are assumed:"
        " those of its data sheet\n"
        "name: this-machine\n"
        f"device: {known.device.name} # read: {here.gpus[0].name}\n"
        "host:\n"
        f"  memory: {here.memory_bytes}B # read\n  devices: {share}"
        f"  bandwidth: {_pcie(here) / 1e9:g}GB/s # {_pcie_words(here)}\n"
        "levels:\n"
        f"  - name: {name}\n    size: {share}"
        f"    bandwidth: {rate / 1e9:g}GB/s per direction # {why}\n"
    )


def known_gpu(here: Here) -> KnownDevice:
    """The device of the table that the driver's name means; of several, the one with its memory."""
    if len(kinds := sorted({gpu.name for gpu in here.gpus})) > 1:
        raise InputError(
            f"GPUs of several kinds here ({', '.join(kinds)}); describe them as parts of a cluster"
            " file (docs/clusters.md)"
        )
    gpu = here.gpus[0]
    told = _words(gpu.name)
    names = {k: [_words(n) for n in (k.device.name, *k.short)] for k in known_devices()}
    fits = [
        (len(alias), known)
        for known, aliases in names.items()
        for alias in aliases
        if alias <= told
        and told & VARIANTS <= alias
        and abs(known.device.memory_bytes / gpu.memory_bytes - 1) < SAME_MEMORY
    ]
    if fits:
        return max(fits, key=lambda fit: fit[0])[1]
    raise InputError(
        f"no numbers are known for the GPU {gpu.name!r} with {format_bytes(gpu.memory_bytes)}:"
        " write a cluster file with those of its data sheet, as device: {name, memory,"
        " memory_bandwidth, rates} (docs/clusters.md), and give it as --cluster FILE.yaml, or name"
        " a device that is like it (parloom cluster show --known)"
    )


def _words(name: str) -> frozenset[str]:
    return frozenset(re.findall(r"[a-z0-9]+", name.lower().replace("rtx", "rtx "))) - {"rtx"}


def _link(here: Here, known: KnownDevice) -> tuple[str, float, str]:
    """What joins the GPUs: its name, bytes per second and direction, and where that is from."""
    usual = known.scale_up.level
    if here.meshed and usual.name.startswith("NVLink"):
        why = "read: NVLink joins all pairs; assumed: its rate by the data sheet"
        return usual.name, usual.link.bandwidth_bytes_per_s, why
    if here.asked == TORCH:
        why = "assumed: as usual for the device; install nvidia-ml-py to have it read"
        return usual.name, usual.link.bandwidth_bytes_per_s, why
    name = f"PCIe{here.gpus[0].generation}"
    return (name if find_interconnect(name) else "PCIe"), _pcie(here), _pcie_words(here)


def _pcie(here: Here) -> float:
    gpu = here.gpus[0]
    return LANES.get(gpu.generation, LANES[4]) * (gpu.lanes or 16)


def _pcie_words(here: Here) -> str:
    gpu = here.gpus[0]
    if gpu.lanes and gpu.generation in LANES:
        return f"read: PCIe {gpu.generation} x{gpu.lanes}; its rate is that of the standard"
    return "assumed: PCIe 4 x16"


Found = tuple[tuple[Gpu, ...], str, str, bool]


def _from_driver() -> Found | None:
    """What NVIDIA's driver says; None where it cannot be asked or has no GPU."""
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
    except Exception:  # not installed, no driver, or one of another version
        return None
    try:
        handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        gpus = tuple(_gpu(nvml, handle) for handle in handles)
        pairs = [(a, b) for i, a in enumerate(handles) for b in handles[i + 1 :]]
        meshed = bool(pairs) and all(_joined(nvml, *pair) for pair in pairs)
        driver = _text(_said(nvml.nvmlSystemGetDriverVersion) or "")
        return (gpus, driver, "pynvml", meshed) if gpus else None
    finally:
        nvml.nvmlShutdown()


def _gpu(nvml: Any, handle: Any) -> Gpu:
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    users = _said(nvml.nvmlDeviceGetComputeRunningProcesses, handle) or ()
    links = (_said(nvml.nvmlDeviceGetNvLinkState, handle, link) for link in range(MOST_LINKS))
    return Gpu(
        _text(nvml.nvmlDeviceGetName(handle)),
        int(memory.total),
        int(memory.free),
        tuple((int(user.pid), int(user.usedGpuMemory or 0)) for user in users),
        int(_said(nvml.nvmlDeviceGetMaxPcieLinkGeneration, handle) or 0),
        int(_said(nvml.nvmlDeviceGetMaxPcieLinkWidth, handle) or 0),
        sum(bool(link) for link in links),
    )


def _joined(nvml: Any, one: Any, other: Any) -> bool:
    index = nvml.NVML_P2P_CAPS_INDEX_NVLINK
    return bool(_said(nvml.nvmlDeviceGetP2PStatus, one, other, index) == nvml.NVML_P2P_STATUS_OK)


def _said(ask: Callable[..., Any], *of: Any) -> Any:
    """An answer of the driver; None where this GPU has no such thing."""
    with suppress(Exception):
        return ask(*of)
    return None


def _text(name: str | bytes) -> str:
    return name.decode() if isinstance(name, bytes) else name


def _from_torch() -> Found | None:
    """What torch says, of GPUs that it can use; None where there is none."""
    torch = importlib.import_module("torch")
    if not torch.cuda.is_available():
        return None
    gpus = []
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        gpus.append(Gpu(torch.cuda.get_device_name(index), total, free))
    return tuple(gpus), "", TORCH, False


def _nics() -> tuple[str, ...]:
    """Ports of InfiniBand, else network interfaces that are up, with their rates."""
    ports = sorted(Path("/sys/class/infiniband").glob("*/ports/*/rate"))
    found = [(p.parts[4], _said(p.read_text)) for p in ports]
    if found:
        return tuple(f"{name}, {rate.strip()}" for name, rate in found if rate)
    stats = psutil.net_if_stats().items()
    return tuple(
        f"{name}, {nic.speed / 1000:g} Gbit/s" for name, nic in stats if nic.isup and nic.speed > 0
    )
