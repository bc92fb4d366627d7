"""A batch as the ranks take it: checked against the plan, and cut into this rank's microbatches."""

from collections.abc import Mapping, Set

import torch
from torch import Tensor

from parloom.errors import InputError
from parloom.runtime.comm import Comm
from parloom.runtime.context import Context
from parloom.runtime.part import Part
from parloom.runtime.program import Pipeline, Program, TensorSpec
from parloom.runtime.same import agreed, check_same_batch
from parloom.runtime.samples import SampleDims, local_dims, sample_axes
from parloom.runtime.sharding import take

Batch = Mapping[str, Tensor]


class Batches:
    """Cuts a batch into this rank's microbatches of a stage.

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
        self.tensors = {
            spec.name: batch[spec.name].to(ctx.device, non_blocking=True) for spec in program.inputs
        }
        self._dims = {spec.name: local_dims(spec, samples, own) for spec in program.inputs}

    def microbatch(self, index: int) -> dict[str, Tensor]:
        """This rank's part of microbatch `index`."""
        mesh = self._ctx.mesh
        coordinates = mesh.coordinates(self._ctx.comm.rank, index)
        return {
            name: take(tensor, self._dims[name], mesh, coordinates)
            for name, tensor in self.tensors.items()
        }


class BatchReader:
    """Reads a rank's batches: one after the other, as each of its stages takes it.

    A local batch has the samples of `position`, (number of places, place of this rank); `axes` are
    those along which ranks of a stage then have other samples.

    No rank begins a step that another one refuses. So each checks all that it was given of a global
    batch, also what only other stages read: where the first batch has everything on all ranks, they
    raise alike in all steps. Else, and where batches are local, all tell each other before each
    step.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        parts: tuple[Part, ...],
        samples: SampleDims,
        axes: tuple[tuple[str, ...], ...],
        position: tuple[int, int],
        comm: Comm,
        device: torch.device,
    ) -> None:
        self._pipeline, self._parts, self._samples, self._axes = pipeline, parts, samples, axes
        self._position, self._comm, self._device = position, comm, device
        self._inputs = {spec.name: spec for spec in pipeline.inputs}
        # Whether all ranks are given all inputs; None before the first batch.
        self._all_given: bool | None = True if len(pipeline.programs) == 1 else None

    def read(self, batch: Batch, local: bool) -> dict[int, Batches]:
        """The batch by stage. Raises `InputError` where it is not what the plan was made for."""
        alone = len(self._pipeline.programs) == 1
        if self._all_given and (alone or not local):
            return self._read(batch, local)
        with agreed(self._comm, self._device):
            found = self._read(batch, local)
        if self._all_given is None:
            given = torch.tensor([self._inputs.keys() <= batch.keys()], dtype=torch.int32)
            given = given.to(self._device)
            self._comm.group(self._comm.mesh.space).all_reduce(given, "min").wait()
            self._all_given = bool(given.item())
        return found

    def check_same(self, batches: Mapping[int, Batches], local: bool) -> None:
        """Raise `InputError`, on all ranks, unless those that work on the same samples were given
        the same.
        """
        tensors = {name: t for of_stage in batches.values() for name, t in of_stage.tensors.items()}
        replicas, place = self._position
        places = dict.fromkeys(self._samples, place) if local and replicas > 1 else {}
        check_same_batch(self._comm, tuple(self._inputs), tensors, places, self._device)

    def _read(self, batch: Batch, local: bool) -> dict[int, Batches]:
        if not isinstance(local, bool):
            raise InputError(
                f"the argument after the batch, local, is a {type(local).__name__}, not True or"
                " False; pass one batch: a dict of tensors by the names of the model's arguments"
            )
        programs = self._pipeline.programs
        own = {spec.name for part in self._parts for spec in programs[part.stage].inputs}
        every = self._all_given and not local
        self._check_names(self._inputs.keys() if every else own, batch)
        for name, spec in self._inputs.items():
            # Ranks whose stages read nothing have no samples of their own.
            if name in batch and (name in own or not local):
                self._check(spec, batch[name], self._position[0] if local else 1)
        axes = self._axes if local else ((),) * len(programs)
        for program, cut in zip(programs, axes, strict=True):
            if not set(cut) <= set(sample_axes(program, self._samples)):
                raise InputError(
                    f"the plan cuts samples over {', '.join(cut)} in training and not in"
                    " evaluation; pass the global batch"
                )
        return {
            part.stage: Batches(
                programs[part.stage], part.ctx, batch, self._samples, axes[part.stage]
            )
            for part in self._parts
        }

    def _check_names(self, names: Set[str], batch: Batch) -> None:
        """Raise `InputError` unless `batch` has `names`, and nothing that is unknown.

        Entries that no program reads may be given in any form, or left out.
        """
        if not isinstance(batch, Mapping):
            raise InputError(
                f"the batch is a {type(batch).__name__}; pass a dict of tensors by the names of the"
                f" model's arguments: {sorted(names)}"
            )
        unread = {name for program in self._pipeline.programs for name in program.unread}
        unknown = batch.keys() - self._inputs.keys() - unread
        if unknown or not names <= batch.keys():
            raise InputError(
                f"the batch has {sorted(batch)}, the program takes {sorted(names)}; they must agree"
                f"{_leave_out(sorted(unknown))}"
            )

    def _check(self, spec: TensorSpec, given: object, replicas: int) -> None:
        """Raise `InputError` unless an input is what the plan was made for, of which ranks in so
        many places have their own samples.
        """
        if not isinstance(given, Tensor):
            raise InputError(f"input {spec.name!r} is a {type(given).__name__}, not a tensor")
        dim = self._samples.get(spec.name)
        shape = tuple(size // replicas if at == dim else size for at, size in enumerate(spec.shape))
        if tuple(given.shape) != shape or given.dtype != getattr(torch, spec.dtype):
            raise InputError(
                f"input {spec.name!r} is {str(given.dtype).removeprefix('torch.')}"
                f"{list(given.shape)}; the plan was made for {spec.dtype}{list(shape)}"
                f"{'' if replicas == 1 else _on_each_rank(dim)}{_way_on(given, shape, spec.dtype)}"
            )


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


def _on_each_rank(dim: int | None) -> str:
    if dim is None:
        return " on each rank: all samples share it, so it is given whole"
    return f" on each rank, with its own samples in dim {dim} and all else whole"
