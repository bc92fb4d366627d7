"""Latencies of PyTorch models on this machine: one request at a time, as a worker serves them."""

import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping

import torch

from parloom.capture.load import UserCode, load_model
from parloom.workflow.profiles import Profile

WARM_UP = 3
LONG_S = 2.0
"""Of a model whose request takes so long, just a few are timed."""
UNEVEN = 0.2
"""A spread above which a median is not to be relied on."""


def timed(
    models: Mapping[tuple[str, str], str],
    worker: str,
    repetitions: int,
    progress: Callable[[str], None],
) -> Profile:
    """Medians of `repetitions` forward passes of each model, and how far the middle half spreads.

    Weights are new, and the batch is one request where the model's form lets its size be chosen; a
    factory's batch is what it says. A GPU is used where there is one.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    latencies: dict[tuple[str, str], float] = {}
    spreads: dict[tuple[str, str], float] = {}
    for key, spec in models.items():
        seconds = _seconds(spec, device, repetitions)
        middle = statistics.median(seconds)
        low, _, high = statistics.quantiles(seconds, n=4)
        latencies[key], spreads[key] = middle, (high - low) / middle
        uneven = "; measure again while nothing else runs" if spreads[key] > UNEVEN else ""
        took = f"{1e3 * middle:.3g} ms, spread {spreads[key]:.1%}{uneven}"
        progress(f"{'/'.join(key)}: {spec}: {took}")
    return Profile(worker, latencies, _machine(device), spreads)


def _seconds(spec: str, device: torch.device, repetitions: int) -> list[float]:
    own = ":" in spec and not spec.startswith("zoo:")
    loaded = load_model(spec, batch=None if own else 1)
    model = loaded.model.to(device).eval()
    batch = {name: value.to(device) for name, value in loaded.batch.items()}
    found: list[float] = []
    with torch.inference_mode():
        for trial in range(WARM_UP + repetitions):
            _wait(device)
            began = time.perf_counter()
            with UserCode(f"the forward pass of {spec}"):
                model(**batch)
            _wait(device)
            took = time.perf_counter() - began
            if trial >= WARM_UP:
                found.append(took)
            if took > LONG_S and len(found) >= 3:
                break
    return found


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _machine(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads"
