"""Dynamic loss scaling for programs that compute in float16.

Gradients below 6e-8 are zero in float16. So the backward pass starts from a large number, the
scale, instead of 1; gradients are divided by it in float32 before they are clipped and used. A
gradient that is infinite or NaN was too large: all ranks skip the update, and the scale falls. The
rules and constants are those of `torch.amp.GradScaler` (Micikevicius et al., ICLR 2018).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Defaults of torch.amp.GradScaler (torch 2.13).
INITIAL_SCALE = 2.0**16
GROWTH_FACTOR = 2.0
BACKOFF_FACTOR = 0.5
GROWTH_INTERVAL = 2000
# The smallest normal number of float16. Torch would go on; below it no gradient of 1 has all of
# its digits, so that no scale is left to try.
LEAST_SCALE = 2.0**-14


@dataclass(slots=True)
class LossScale:
    """The scale, and how many updates in a row it has had; every rank holds the same.

    After `growth_interval` updates without an overflow the scale grows. `num_skipped` counts the
    steps that were skipped since the last update.
    """

    scale: float = INITIAL_SCALE
    growth_interval: int = GROWTH_INTERVAL
    num_good: int = 0
    num_skipped: int = 0

    @property
    def exhausted(self) -> bool:
        """Whether no scale is left under which gradients might be finite."""
        return self.scale < LEAST_SCALE

    def scaled(self, loss: Tensor) -> Tensor:
        """`loss` times the scale, in float32 where it has fewer bits and no dims."""
        return loss * torch.tensor(self.scale, device=loss.device)

    def unscale(self, gradients: Iterable[Tensor], device: torch.device) -> Tensor:
        """Divide gradients by the scale in place; 1.0 if any element is not finite, or 0.0."""
        found = torch.zeros((), device=device)
        inverse = torch.tensor(1.0 / self.scale, device=device)
        alike: dict[torch.dtype, list[Tensor]] = {}
        for gradient in gradients:
            parts = torch.view_as_real(gradient) if gradient.is_complex() else gradient
            alike.setdefault(parts.dtype, []).append(parts)
        for tensors in alike.values():
            torch._amp_foreach_non_finite_check_and_unscale_(tensors, found, inverse)
        return found

    def update(self, overflowed: bool) -> None:
        """The scale of the next step."""
        if overflowed:
            self.scale *= BACKOFF_FACTOR
            self.num_good = 0
            self.num_skipped += 1
            return
        self.num_skipped = 0
        self.num_good += 1
        if self.num_good == self.growth_interval:
            # Torch's scale is a float32.
            if self.scale * GROWTH_FACTOR <= torch.finfo(torch.float32).max:
                self.scale *= GROWTH_FACTOR
            self.num_good = 0

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps, as JSON values."""
        return {"scale": self.scale, "num_good": self.num_good, "num_skipped": self.num_skipped}

    def load(self, state: Mapping[str, Any]) -> None:
        """Take over what `state` gave."""
        self.scale = float(state["scale"])
        self.num_good, self.num_skipped = int(state["num_good"]), int(state["num_skipped"])
