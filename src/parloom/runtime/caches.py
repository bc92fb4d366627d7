"""One rank's part of the caches that passes write to and later ones read."""

import torch
from torch import Tensor

from parloom.runtime.comm import Comm
from parloom.runtime.program import Program, TensorSpec
from parloom.runtime.sharding import local_shape
from parloom.runtime.whole import collect


class Caches:
    """The caches of a stage, for each microbatch apart: passes write into their memory."""

    def __init__(self, program: Program, comm: Comm, device: torch.device) -> None:
        self._comm = comm
        self._parts = [
            {
                spec.name: torch.zeros(
                    local_shape(spec.dims),
                    dtype=getattr(torch, spec.dtype),
                    device=device,
                )
                for spec in program.caches
            }
            for _ in range(program.num_microbatches)
        ]

    def of(self, microbatch: int) -> dict[str, Tensor]:
        """The memory of one microbatch."""
        return self._parts[microbatch]

    def whole(self, spec: TensorSpec) -> Tensor:
        """A cache of all ranks and microbatches."""
        found = self._parts[0][spec.name].new_empty(spec.shape)
        for microbatch, part in enumerate(self._parts):
            collect(found, part[spec.name], spec.dims, self._comm, microbatch)
        return found
