"""Fitting the constants of devices to published runs, with each source left out in turn.

Predictions are taken to move with the logarithm of a constant as they do near the committed values.
A constant of a device is one shared by all devices plus a part of its own, which is held small: a
device that only the left-out source has gets what the others have in common. The sum of absolute
errors is minimised (by reweighted least squares), so that single rows do not pull.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

ROUNDS = 40
FLOOR = 0.02  # errors below this weigh alike
OWN = 4.0  # how strongly a device's own part is held, in rows
SHARED = 0.05


@dataclass(frozen=True, slots=True)
class Sample:
    """A prediction: log error, and how it moves with each constant of its device."""

    source: str
    device: str
    error: float
    slopes: tuple[float, ...]
    constants: tuple[float, ...]


def fitted(samples: Sequence[Sample], devices: Sequence[str]) -> dict[str, list[float]]:
    """The constants of every device of `devices`."""
    count = len(samples[0].slopes)
    width = count * (1 + len(devices))
    rows = torch.zeros(len(samples), width, dtype=torch.float64)
    wanted = torch.zeros(len(samples), dtype=torch.float64)
    centre = torch.tensor([s.constants for s in samples], dtype=torch.float64).log().mean(0)
    for index, sample in enumerate(samples):
        slopes = torch.tensor(sample.slopes, dtype=torch.float64)
        place = count * (1 + devices.index(sample.device))
        rows[index, :count] = slopes
        rows[index, place : place + count] = slopes
        here = torch.tensor(sample.constants, dtype=torch.float64).log() - centre
        wanted[index] = -sample.error + (slopes * here).sum()
    held = torch.full((width,), OWN, dtype=torch.float64)
    held[:count] = SHARED
    found = torch.zeros(width, dtype=torch.float64)
    for _ in range(ROUNDS):
        weights = 1 / (rows @ found - wanted).abs().clamp(min=FLOOR)
        weights = weights / weights.mean()
        left = rows.T @ (weights[:, None] * rows) + torch.diag(held)
        found = torch.linalg.solve(left, rows.T @ (weights * wanted))
    shared = found[:count]
    return {
        device: (centre + shared + found[count * (1 + i) : count * (2 + i)]).exp().tolist()
        for i, device in enumerate(devices)
    }


def held_out(samples: Sequence[Sample]) -> list[float]:
    """The error of every sample with constants fitted without its source."""
    devices = sorted({s.device for s in samples})
    errors = [0.0] * len(samples)
    for source in dict.fromkeys(s.source for s in samples):
        others = [s for s in samples if s.source != source]
        if not others:
            return [s.error for s in samples]
        found = fitted(others, devices)
        for index, sample in enumerate(samples):
            if sample.source == source:
                errors[index] = corrected(sample, found[sample.device])
    return errors


def corrected(sample: Sample, constants: Sequence[float]) -> float:
    """The error with other constants of its device."""
    moves = torch.tensor(constants).log() - torch.tensor(sample.constants).log()
    return sample.error + float((moves * torch.tensor(sample.slopes)).sum())
