"""Weights that lie one after the other in one memory, since operators read them as one.

Whole weights are views of a buffer of their own, those that are stored in chunks of what their unit
gathers. Each is a parameter by itself: optimizers update it in place.
"""

from collections.abc import Iterable, Mapping
from itertools import pairwise
from math import prod

import torch
from torch import Tensor

from parloom.errors import VerifyError
from parloom.runtime.program import ParameterSpec, Program
from parloom.runtime.sharding import local_shape
from parloom.runtime.units import Unit


def buffers(program: Program, device: torch.device) -> dict[str, Tensor]:
    """By name the memory of each whole weight that lies beside others.

    Raises `VerifyError` for a group whose weights differ in what they must have in common.
    """
    specs, found = {spec.name: spec for spec in program.parameters}, dict[str, Tensor]()
    for names in program.adjacent:
        group = [specs[name] for name in names]
        if len({_kind(spec) for spec in group}) > 1 or not found.keys().isdisjoint(names):
            raise VerifyError(f"{', '.join(names)} cannot lie in one memory")
        if program.mesh.size(group[0].storage.weight) > 1:
            continue
        shapes = [local_shape(spec.dims) for spec in group]
        sizes = [prod(shape) for shape in shapes]
        buffer = torch.empty(sum(sizes), dtype=getattr(torch, group[0].dtype), device=device)
        pieces = zip(names, torch.split(buffer, sizes), shapes, strict=True)
        found.update((name, piece.view(shape)) for name, piece, shape in pieces)
    return found


def check_gathered(program: Program, units: Iterable[Unit]) -> None:
    """Raise `VerifyError` where chunked weights of a group are not gathered beside each other."""
    after: Mapping[str, str] = {
        one.name: other.name
        for unit in units
        for flat in unit.flats
        for one, other in pairwise(flat.helds)
    }
    whole = {s.name for s in program.parameters if program.mesh.size(s.storage.weight) == 1}
    for names in program.adjacent:
        for one, other in pairwise(names):
            if one not in whole and after.get(one) != other:
                raise VerifyError(f"{other} is not gathered behind {one}, as it is read")


def check_same(program: Program, other: Program) -> None:
    """Raise `VerifyError` where `other`, which reads the weights of `program`, takes some for
    neighbors that are none.
    """
    for names in set(other.adjacent) - set(program.adjacent):
        raise VerifyError(f"{', '.join(names)} are read as one, and lie as another program says")


def _kind(spec: ParameterSpec) -> object:
    return spec.dtype, spec.trainable, spec.storage.weight
