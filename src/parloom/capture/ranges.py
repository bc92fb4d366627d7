"""The range of the values of each input, which a plan records, and draws in that range.

Nothing that is traced depends on values; custom autograd functions are called on them.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from parloom.ir.graph import Graph

Ranges = tuple[tuple[str, float, float], ...]  # (input, least, largest)


def ranges_of(batch: Mapping[str, Tensor]) -> Ranges:
    """Least and largest value of each input whose values are finite, known and real."""
    found: list[tuple[str, float, float]] = []
    for name, tensor in sorted(batch.items()):
        if tensor.is_meta or tensor.is_complex() or not tensor.numel():
            continue
        whole = tensor.detach()
        if not tensor.is_floating_point():
            found.append((name, int(whole.min()), int(whole.max())))
        elif bool(whole.isfinite().all()):
            found.append((name, float(whole.min()), float(whole.max())))
    return tuple(found)


def drawn_batch(graph: Graph, ranges: Ranges, device: torch.device) -> dict[str, Tensor]:
    """Uniform draws in the shapes of the graph's inputs; zeros where no range is known."""
    known = {name: (low, high) for name, low, high in ranges}
    generator = torch.Generator().manual_seed(0)
    batch = {}
    for entry in graph.of_kind("batch"):
        spec = entry.value.spec
        dtype: torch.dtype = getattr(torch, spec.dtype)
        low, high = known.get(entry.target, (0, 0))
        if dtype.is_complex or not low <= high:
            made = torch.zeros(spec.shape, dtype=dtype)
        elif dtype.is_floating_point:
            draws = torch.rand(spec.shape, dtype=torch.float64, generator=generator)
            made = (low * (1 - draws) + high * draws).to(dtype)
        else:
            ends = (0, 1) if dtype == torch.bool else _ends(dtype)
            first, last = (min(max(int(n), ends[0]), ends[1]) for n in (low, high))
            made = torch.randint(first, last + 1, spec.shape, generator=generator).to(dtype)
        batch[entry.target] = made.to(device)
    return batch


def _ends(dtype: torch.dtype) -> tuple[int, int]:
    """What an integer dtype can hold, and `torch.randint` draw."""
    limits = torch.iinfo(dtype)
    return limits.min, min(limits.max, torch.iinfo(torch.int64).max - 1)
