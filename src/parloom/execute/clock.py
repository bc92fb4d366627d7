"""A clock for work on a device: on a GPU the device's own (events)."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

LEAST_S = 0.1
WINDOWS = 3  # of which the one in the middle counts

Run = Callable[[], object]
Stamp = Any
"""Seconds, or an event of a GPU."""


@dataclass(frozen=True, slots=True)
class Clock:
    """Seconds on a device."""

    device: torch.device
    least_s: float = LEAST_S

    def stamp(self) -> Stamp:
        """A point in time of the device, once it has done all before."""
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            return event
        return time.perf_counter()

    def between(self, begun: Stamp, ended: Stamp) -> float:
        """Seconds from one to the other."""
        if self.device.type == "cuda":
            ended.synchronize()
            return float(begun.elapsed_time(ended)) / 1e3
        return float(ended - begun)

    def elapsed(self, run: Run) -> float:
        """How long a run takes."""
        begun = self.stamp()
        run()
        return self.between(begun, self.stamp())

    def typical(self, run: Run, calls: int = 1) -> float:
        """Seconds of one of the `calls` that a run makes, after one to warm up."""
        run()
        return self.typical_of(lambda: (self.elapsed(run),))[0] / calls

    def typical_of(self, rounds: Callable[[], tuple[float, ...]]) -> tuple[float, ...]:
        """The median over windows of the mean times that rounds report; their first one is what
        has to take `least_s` in all.
        """
        windows = []
        for _ in range(WINDOWS):
            totals, count = rounds(), 1
            while totals[0] < self.least_s / WINDOWS:
                totals = tuple(a + b for a, b in zip(totals, rounds(), strict=True))
                count += 1
            windows.append([total / count for total in totals])
        return tuple(median(times) for times in zip(*windows, strict=True))
