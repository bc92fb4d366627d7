"""A batch as the ranks take it: checked against the plan, and cut into this rank's microbatches."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from parloom.errors import InputError
from parloom.runtime.context import Context
from parloom.runtime.program import Program
from parloom.runtime.same import check_same_batch
from parloom.runtime.samples import SampleDims, local_dims
from parloom.runtime.sharding import global_shape, take

Batch = Mapping[str, Tensor]


class Batches:
    """Cuts a batch into this rank's microbatches.

    `own` are the axes along which ranks are given other samples: none for a global batch.
    """

    def __init__(
        self,
        program: Program,
        ctx: Context,
        batch: Batch,
        samples: SampleDims,
        own: tuple[str, ...] = (),
    ) -> None:
        self._ctx = ctx
        self._tensors = {
            spec.name: batch[spec.name].to(ctx.device, non_blocking=True) for spec in program.inputs
        }
        self._dims = {spec.name: local_dims(spec, samples, own) for spec in program.inputs}
        self._own = {spec.name: own if spec.name in samples else () for spec in program.inputs}
        for spec in program.inputs:
            given, dims = self._tensors[spec.name], self._dims[spec.name]
            shape = global_shape(dims, ctx.mesh)
            if tuple(given.shape) != shape or given.dtype != getattr(torch, spec.dtype):
                raise InputError(
                    f"input {spec.name!r} is {str(given.dtype).removeprefix('torch.')}"
                    f"{list(given.shape)}; the plan was made for {spec.dtype}{list(shape)}"
                    f"{_for(spec.name, own, samples)}{_way_on(given, shape, spec.dtype)}"
                )

    @property
    def whole(self) -> Mapping[str, Tensor]:
        """The entries of which this rank was given all samples."""
        return {name: self._tensors[name] for name, own in self._own.items() if not own}

    def check_same(self) -> None:
        """Raise `InputError` unless ranks that work on the same samples were given the same."""
        check_same_batch(self._ctx.comm, self._tensors, self._own, self._ctx.device)

    def microbatch(self, index: int) -> dict[str, Tensor]:
        """This rank's part of microbatch `index`."""
        mesh = self._ctx.mesh
        coordinates = mesh.coordinates(self._ctx.comm.rank, index)
        return {
            name: take(tensor, self._dims[name], mesh, coordinates)
            for name, tensor in self._tensors.items()
        }


def check_names(programs: Sequence[Program], own: Sequence[Program], batch: Batch) -> None:
    """Raise `InputError` unless `batch` has a tensor for each input of this rank's `own` programs.

    Entries that no program reads may be given in any form, or left out, and so may those that other
    ranks' `programs` read.
    """
    names = {spec.name for program in own for spec in program.inputs}
    known = {spec.name for program in programs for spec in program.inputs}
    unread = {name for program in programs for name in (*program.unread, *known)} - names
    if not isinstance(batch, Mapping):
        raise InputError(
            f"the batch is a {type(batch).__name__}; pass a dict of tensors by the names of the"
            f" model's arguments: {sorted(names)}"
        )
    if names != set(batch) - unread:
        raise InputError(
            f"the batch has {sorted(batch)}, the program takes {sorted(names)}; they must agree"
            f"{_leave_out(sorted(set(batch) - names - unread))}"
        )
    for name in sorted(names):
        if not isinstance(batch[name], Tensor):
            raise InputError(f"input {name!r} is a {type(batch[name]).__name__}, not a tensor")


def _leave_out(names: list[str]) -> str:
    if not names:
        return ""
    return (
        f": leave out what changes nothing (batch.pop({names[0]!r}), as of a mask without padding),"
        " or plan from a factory that returns a batch with it (file.py:factory)"
    )


def _way_on(given: Tensor, shape: tuple[int, ...], dtype: str) -> str:
    if tuple(given.shape) == shape:
        return f"; cast it: .to(torch.{dtype})"
    drop = "drop the last, smaller batch of an epoch (DataLoader(..., drop_last=True)), or "
    smaller = given.dim() == len(shape) and given.shape[0] < shape[0]
    return f"; {drop if smaller else ''}plan again (parloom plan --batch N, or the factory's batch)"


def _for(name: str, own: tuple[str, ...], samples: SampleDims) -> str:
    if not own:
        return ""
    if name in samples:
        return f" on each rank, with its own samples in dim {samples[name]} and all else whole"
    return " on each rank: all samples share it, so it is given whole"
