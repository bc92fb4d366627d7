"""The operator that writes new keys and values into a cache, as torch traces it."""

from typing import Any

import torch
from torch import Tensor

_LIBRARY: Any = torch.library.Library("parloom", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("write_cache(Tensor cache, int dim, Tensor? position, Tensor new) -> Tensor")


def _written(cache: Tensor, dim: int, position: Tensor | None, new: Tensor) -> Tensor:
    places = torch.arange(new.shape[dim], device=cache.device)
    return cache.index_copy(dim, places if position is None else places + position, new)


def _like(cache: Tensor, dim: int, position: Tensor | None, new: Tensor) -> Tensor:
    return torch.empty_like(cache)


_LIBRARY.impl("write_cache", _written, "CompositeExplicitAutograd")
_LIBRARY._register_fake("write_cache", _like)


def write_cache(cache: Tensor, dim: int, position: Tensor | None, new: Tensor) -> Tensor:
    """A cache with `new` from `position` on along `dim`, from its beginning without one."""
    made: Tensor = torch.ops.parloom.write_cache(cache, dim, position, new)
    return made
