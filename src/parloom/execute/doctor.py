"""What this machine has, ready to paste into an issue."""

import importlib.metadata
import importlib.util
import os
import platform
import sys
from typing import Any

import psutil

from parloom.cost.units import format_bytes
from parloom.errors import LaunchError

PACKAGES = ("parloom", "torch", "transformers", "safetensors", "highspy", "numpy", "typer")
TORCH = "2.13"
VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
    "PYTORCH_ALLOC_CONF",
    "WORLD_SIZE",
    "HF_HUB_OFFLINE",
)


def num_cores() -> int:
    """Cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)  # Linux only
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def diagnose() -> dict[str, Any]:
    """Versions, backends, processors and memory of this machine."""
    return {
        "python": platform.python_version(),
        "executable": sys.executable,
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in PACKAGES},
        "cpus": os.cpu_count(),
        "usable_cpus": num_cores(),
        "memory_bytes": psutil.virtual_memory().total,
        "available_memory_bytes": psutil.virtual_memory().available,
        **_torch(),
        "environment": {name: os.environ[name] for name in VARIABLES if name in os.environ},
    }


def lines(found: dict[str, Any]) -> list[str]:
    """The diagnosis as `name: value` lines."""
    result = [f"{name}: {version}" for name, version in found["packages"].items()]
    result += [f"{key}: {found[key]}" for key in ("python", "executable", "platform")]
    result.append(f"cpus: {found['usable_cpus']} usable of {found['cpus']}")
    memory = (format_bytes(found[key]) for key in ("available_memory_bytes", "memory_bytes"))
    result.append("memory: {} free of {}".format(*memory))
    result.append(f"backends: {', '.join(found['backends']) or 'none'}")
    result.append(f"cuda: {found['cuda'] or 'none'}")
    result += [f"gpu {index}: {name}" for index, name in enumerate(found["gpus"])]
    result += [f"{name}={value}" for name, value in found["environment"].items()]
    return result


def check(found: dict[str, Any]) -> None:
    """Raise `LaunchError` where plans cannot run here."""
    version = found["packages"]["torch"]
    if version is None or not version.startswith(TORCH + "."):
        raise LaunchError(
            f"torch {version or 'is not installed'}; parloom {found['packages']['parloom']} needs "
            f"{TORCH}: pip install 'torch=={TORCH}.*'"
        )
    if not found["backends"]:
        raise LaunchError("this torch has neither gloo nor nccl, so no plan can run here")


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        # A source tree on the path has no metadata.
        module = sys.modules.get(name)
        return getattr(module, "__version__", None)


def _torch() -> dict[str, Any]:
    if importlib.util.find_spec("torch") is None:
        return {"backends": [], "cuda": None, "gpus": []}
    torch = importlib.import_module("torch")
    distributed = importlib.import_module("torch.distributed")
    backends = [
        name
        for name in ("gloo", "nccl")
        if distributed.is_available() and getattr(distributed, f"is_{name}_available")()
    ]
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpus = [
        f"{torch.cuda.get_device_name(i)}, "
        f"{format_bytes(torch.cuda.get_device_properties(i).total_memory)}"
        for i in range(count)
    ]
    return {"backends": backends, "cuda": torch.version.cuda, "gpus": gpus}
