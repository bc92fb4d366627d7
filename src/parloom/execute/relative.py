"""How far tensors are apart, on their own scale, and the first that is too far."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import isnan

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Difference:
    """The relative difference of one tensor from its reference; `detail` says it in words."""

    tensor: str
    error: float
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.tensor} ({self.detail or f'relative difference {self.error:.1e}'})"


@dataclass(frozen=True, slots=True)
class Compared:
    """The largest difference of several tensors, and the first that is above the tolerance."""

    worst: float
    worst_tensor: str
    first: Difference | None
    num_tensors: int


def judged(differences: Iterable[Difference], tolerance: float) -> Compared:
    """The largest and the first of all; one that is no number is above every tolerance."""
    every = list(differences)
    worst = max(every, key=lambda d: (isnan(d.error), d.error))
    first = next((d for d in every if not d.error <= tolerance), None)
    return Compared(worst.error, worst.tensor, first, len(every))


def largest(errors: Iterable[float]) -> float:
    """The largest of these; one that is no number is above all others."""
    return max(errors, key=lambda error: (isnan(error), error))


def relative_difference(expected: Tensor | None, got: Tensor | None, floor: float) -> float:
    """Largest difference over the tensor's own scale or `floor`; infinite where one is missing."""
    if expected is None or got is None:
        present = expected if got is None else got
        return 0.0 if present is not None and not present.any() else float("inf")
    if expected.shape != got.shape:
        return float("inf")
    if not expected.numel():
        return 0.0
    if expected.is_complex() and got.is_complex():
        expected, got = torch.view_as_real(expected), torch.view_as_real(got)
    if not expected.is_floating_point():
        return 0.0 if torch.equal(expected, got) else float("inf")
    infinite = expected.isinf()
    if infinite.any():  # as in the buffer of an attention mask
        if not torch.equal(expected[infinite], got[infinite]):
            return float("inf")
        expected, got = expected.masked_fill(infinite, 0), got.masked_fill(infinite, 0)
    scale = max(float(expected.abs().max()), floor, 1e-30)
    return float((expected - got).abs().max()) / scale
