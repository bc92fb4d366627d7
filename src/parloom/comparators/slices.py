"""Alpa's dynamic program over layers, devices and stages (Zheng et al., OSDI 2022, section 5.2)."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

# Latencies that differ by less are tried together: the answer is at most this for each microbatch
# above the best one (the paper's epsilon, a microsecond).
EPSILON_PS = 10**6


@dataclass(frozen=True, slots=True)
class Option:
    """A way to run the layers from `first` to before `last` as one stage on `size` devices.

    `latency_ps`: both passes of a microbatch; `most`: the microbatches in flight that fit into the
    memory of a device; `way` tells options apart that are alike in this.
    """

    first: int
    last: int
    size: int
    latency_ps: int
    most: int
    way: int = -1


def total_ps(stages: Sequence[Option], num_microbatches: int) -> int:
    """What a step of these stages takes: all of them, and the slowest once for each further
    microbatch.
    """
    latencies = [stage.latency_ps for stage in stages]
    return sum(latencies) + (num_microbatches - 1) * max(latencies)


def fits(stages: Sequence[Option], num_microbatches: int) -> bool:
    """Whether every stage holds as many microbatches as one forward and one backward pass in turns
    leaves in flight: one for each stage from it to the end.
    """
    count = len(stages)
    return all(
        min(count - index, num_microbatches) <= stage.most for index, stage in enumerate(stages)
    )


def sliced(
    options: Sequence[Option],
    num_layers: int,
    num_devices: int,
    num_microbatches: int,
    epsilon_ps: int = EPSILON_PS,
) -> tuple[Option, ...] | None:
    """The stages that take the least by `total_ps`, on all devices; None where none fit.

        F(s, k, d; t) = min over options of layers k to i on m devices with latency at most t of
                        latency + F(s - 1, i + 1, d - m; t)

    For every latency t of an option, in ascending order, until B t alone is no less than the best;
    of those that differ by less than `epsilon_ps` the last one, which allows what the others do.
    """
    program = _Program(options, num_layers, num_devices, num_microbatches)
    best: tuple[Option, ...] | None = None
    best_ps: float = inf
    latencies = sorted({option.latency_ps for option in options})
    begun: float = latencies[0] if latencies else 0
    for slowest_ps, after_ps in zip(latencies, (*latencies[1:], inf), strict=True):
        if num_microbatches * begun >= best_ps:
            break
        if after_ps - begun < epsilon_ps:
            continue
        begun = after_ps
        found = program.least(slowest_ps)
        if found is not None and total_ps(found, num_microbatches) < best_ps:
            best, best_ps = found, total_ps(found, num_microbatches)
    return best


class _Program:
    """F for one slowest stage after another."""

    def __init__(
        self, options: Sequence[Option], num_layers: int, num_devices: int, num_microbatches: int
    ) -> None:
        self.num_layers, self.num_devices = num_layers, num_devices
        self.num_microbatches = num_microbatches
        self.num_stages = min(num_layers, num_devices)
        self.starting: list[list[Option]] = [[] for _ in range(num_layers)]
        for option in _undominated(options):
            if option.size <= num_devices:
                self.starting[option.first].append(option)

    def rows(self, option: Option) -> int:
        """With how many stages from this one to the end its microbatches in flight fit."""
        unlimited = option.most >= self.num_microbatches
        return self.num_stages if unlimited else min(option.most, self.num_stages)

    def least(self, slowest_ps: int) -> tuple[Option, ...] | None:
        """The stages of the least sum of latencies, none of which is above `slowest_ps`."""
        shape = self.num_stages + 1, self.num_devices + 1
        found = [np.full(shape, inf) for _ in range(self.num_layers + 1)]
        chosen = [np.full(shape, -1, dtype=np.intp) for _ in range(self.num_layers)]
        found[-1][0, 0] = 0.0
        for first in reversed(range(self.num_layers)):
            for index, option in enumerate(self.starting[first]):
                rows = self.rows(option)
                if option.latency_ps > slowest_ps or rows < 1:
                    continue
                left = self.num_devices + 1 - option.size
                after = found[option.last][:rows, :left] + option.latency_ps
                own = found[first][1 : rows + 1, option.size :]
                better = after < own
                own[better] = after[better]
                chosen[first][1 : rows + 1, option.size :][better] = index
        ends = found[0][:, self.num_devices]
        stages = int(ends.argmin())
        if ends[stages] == inf:
            return None
        path: list[Option] = []
        first, devices = 0, self.num_devices
        while first < self.num_layers:
            option = self.starting[first][chosen[first][stages, devices]]
            path.append(option)
            first, devices, stages = option.last, devices - option.size, stages - 1
        return tuple(path)


def _undominated(options: Sequence[Option]) -> list[Option]:
    """Of options of the same layers and devices, those that are faster than all that hold as many
    microbatches.
    """
    found: dict[tuple[int, int, int], list[Option]] = {}
    for option in sorted(options, key=lambda o: (o.latency_ps, -o.most, o.way)):
        kept = found.setdefault((option.first, option.last, option.size), [])
        if all(option.most > other.most for other in kept):
            kept.append(option)
    return [option for kept in found.values() for option in kept]
