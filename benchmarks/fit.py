"""Fitting what is fitted of devices to published runs, with each source left out in turn.

Two constants are fitted, for all devices alike (`SHARED`): the share of products that long runs
keep, and the share of memory bandwidth. Predictions are taken to move with the logarithm of a
constant as they do near the committed values. The sum of absolute errors is minimized (by
reweighted least squares), so that single rows do not pull.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

SHARED = ("sustained", "memory")
ROUNDS = 40
FLOOR = 0.02  # errors below this weigh alike
HELD = 0.05  # how strongly constants are held, in rows


@dataclass(frozen=True, slots=True)
class Sample:
    """A prediction: log error, and d log(prediction) / d log(constant) for each of `SHARED`."""

    source: str
    error: float
    slopes: tuple[float, ...]


def fitted(samples: Sequence[Sample]) -> list[float]:
    """Log factors on the committed constants, in the order of `SHARED`."""
    rows = torch.tensor([sample.slopes for sample in samples], dtype=torch.float64)
    wanted = torch.tensor([-sample.error for sample in samples], dtype=torch.float64)
    found = torch.zeros(len(SHARED), dtype=torch.float64)
    for _ in range(ROUNDS):
        weights = 1 / (rows @ found - wanted).abs().clamp(min=FLOOR)
        weights = weights / weights.mean()
        left = rows.T @ (weights[:, None] * rows)
        left += HELD * torch.eye(len(SHARED), dtype=torch.float64)
        found = torch.linalg.solve(left, rows.T @ (weights * wanted))
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
    return sample.error + sum(f * s for f, s in zip(factors, sample.slopes, strict=True))
