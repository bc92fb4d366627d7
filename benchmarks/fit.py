"""Fitting what is fitted of devices to published runs, with each source left out in turn.

Two constants are shared by all devices (`SHARED`): the share of products that long runs keep, and
the share of memory bandwidth. A device of `FITTED` has a factor of its own on its products; where
no other source has that device, it is what it would be without any run. Predictions are taken to
move with the logarithm of a constant as they do near the committed values. The sum of absolute
errors is minimized (by reweighted least squares), so that single rows do not pull.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch

SHARED = ("sustained", "memory")
# Products of a device that were fitted: the committed share, and what it would be without runs.
# 500 of 700 W: the clock goes with the cube root of the power, and an H100 reaches 0.72.
FITTED: Mapping[str, tuple[float, float]] = MappingProxyType(
    {"H100-96GB-HBM2e": (0.57, 0.72 * (500 / 700) ** (1 / 3))}
)
ROUNDS = 40
FLOOR = 0.02  # errors below this weigh alike
HELD = 0.05  # how strongly constants are held, in rows


@dataclass(frozen=True, slots=True)
class Sample:
    """A prediction: log error, and d log(prediction) / d log(constant) for each of `SHARED`."""

    source: str
    device: str
    error: float
    slopes: tuple[float, ...]


def fitted(samples: Sequence[Sample]) -> list[float]:
    """Log factors on the committed constants: of `SHARED`, then of the devices of `FITTED`."""
    devices = list(FITTED)
    width = len(SHARED) + len(devices)
    rows = torch.zeros(len(samples), width, dtype=torch.float64)
    wanted = torch.zeros(len(samples), dtype=torch.float64)
    for index, sample in enumerate(samples):
        rows[index, : len(SHARED)] = torch.tensor(sample.slopes, dtype=torch.float64)
        if sample.device in FITTED:
            rows[index, len(SHARED) + devices.index(sample.device)] = sample.slopes[0]
        wanted[index] = -sample.error
    found = torch.zeros(width, dtype=torch.float64)
    for _ in range(ROUNDS):
        weights = 1 / (rows @ found - wanted).abs().clamp(min=FLOOR)
        weights = weights / weights.mean()
        left = rows.T @ (weights[:, None] * rows) + HELD * torch.eye(width, dtype=torch.float64)
        found = torch.linalg.solve(left, rows.T @ (weights * wanted))
    own = found[len(SHARED) :]
    for index, device in enumerate(devices):
        if all(sample.device != device for sample in samples):
            share, without = FITTED[device]
            own[index] = math.log(without / share)
    return [float(value) for value in found]


def held_out(samples: Sequence[Sample]) -> list[float]:
    """The error of every sample with constants fitted without its source."""
    errors = [0.0] * len(samples)
    for source in dict.fromkeys(s.source for s in samples):
        others = [s for s in samples if s.source != source]
        if not others:
            return [s.error for s in samples]
        found = fitted(others)
        for index, sample in enumerate(samples):
            if sample.source == source:
                errors[index] = corrected(sample, found)
    return errors


def corrected(sample: Sample, factors: Sequence[float]) -> float:
    """The error with other constants."""
    moves = sum(f * slope for f, slope in zip(factors, sample.slopes, strict=False))
    if sample.device in FITTED:
        moves += factors[len(SHARED) + list(FITTED).index(sample.device)] * sample.slopes[0]
    return sample.error + moves
