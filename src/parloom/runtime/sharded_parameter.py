"""What one rank holds of one parameter."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from parloom.errors import InputError
from parloom.runtime.chunks import Section
from parloom.runtime.comm import Comm
from parloom.runtime.program import ParameterSpec
from parloom.runtime.sharding import Box, axes_of, boxes, chunk, local_shape, take, untake


@dataclass(slots=True, eq=False)
class ShardedParameter:
    """One rank's memory of a parameter.

    `owned` is what the optimizer updates, in the master dtype when there is one. `stored` is the
    same chunk in the compute dtype: `owned` itself, or what it is copied to after each step.
    `weight` is the whole home shard and an autograd leaf, unless the weight is stored in chunks.
    `collected` is where the gradient of an owned chunk adds up during a step.
    """

    spec: ParameterSpec
    home: tuple[int, ...]
    index: int
    parts: int
    owned: nn.Parameter
    stored: Tensor
    weight: Tensor | None
    has_master: bool
    collected: Tensor | None = None

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def section(self) -> Section:
        """The home shard's chunks over its storage axes."""
        return Section(self.home, self.spec.storage.dim, self.parts)

    @property
    def axes(self) -> tuple[str, ...]:
        """Axes over which `owned` is sharded."""
        return (*axes_of(self.spec.dims), *owner_axes(self.spec))

    @property
    def chunks_gradient(self) -> bool:
        """Whether only the owned chunk of the gradient outlives a microbatch."""
        return self.parts > 1 and bool(self.spec.storage.gradient)

    def part(self, home: Tensor) -> Tensor:
        """The rows of a home shard that `owned` covers."""
        return self.section.rows(home, self.index) if self.parts > 1 else home

    def add_gradient(self, gradient: Tensor) -> None:
        """Accumulate the whole (reduced) gradient of the owned chunk, in the finer of two dtypes.

        One is the dtype in which it was reduced, the other that of `owned`.
        """
        if self.collected is None:
            dtype = torch.promote_types(gradient.dtype, self.owned.dtype)
            self.collected = gradient.to(dtype)
        else:
            self.collected.add_(gradient)

    def finish_gradient(self) -> None:
        """Give the optimizer what was accumulated."""
        if self.collected is not None:
            self.owned.grad = self.collected.to(self.owned.dtype)
            self.collected = None

    def boxes(self, comm: Comm) -> tuple[Box, ...]:
        """The contiguous boxes of the user's tensor that `owned` holds."""
        spec, rows = self.spec, None
        if self.parts > 1:
            rows = chunk(self.home[spec.storage.dim], self.parts, self.index)
        coordinates = comm.mesh.coordinates(comm.rank)
        return boxes(spec.dims, comm.mesh, coordinates, spec.storage.dim, rows, spec.valid)

    def load(self, full: Tensor, comm: Comm) -> None:
        """Take this rank's part of the user's full tensor."""
        home = home_shard(self.spec, full, comm)
        with torch.no_grad():
            if self.weight is not None and self.weight is not self.owned:
                self.weight.copy_(home)
            self.owned.copy_(self.part(home))
            self.publish()

    def whole(self, comm: Comm) -> Tensor:
        """The full tensor, padding included, in the compute dtype; every rank must ask."""
        home = self.weight
        if home is None:
            group, section = comm.group(self.spec.storage.weight), self.section
            mine = self.stored.new_zeros(section.numel)
            section.part(mine, self.index).copy_(self.stored)
            buffer = mine.new_empty(self.parts, section.numel)
            group.all_gather(buffer, mine).wait()
            home = mine.new_empty(self.home)
            section.unpack(buffer, home)
        return untake(home.detach(), self.spec.dims, comm)

    def publish(self) -> None:
        """Copy the master to the stored chunk."""
        if self.has_master:
            self.stored.copy_(self.owned)


def owner_axes(spec: ParameterSpec) -> tuple[str, ...]:
    """Storage axes of what the optimizer owns; a frozen parameter is only ever a weight."""
    return spec.storage.optimizer if spec.trainable else spec.storage.weight


def home_shard(spec: ParameterSpec, full: Tensor, comm: Comm) -> Tensor:
    """The home shard of the user's full tensor, padded with zeros where the program pads.

    Raises `InputError` when the tensor has another shape than the parameter.
    """
    if tuple(full.shape) != spec.user_shape:
        raise InputError(
            f"{spec.name} has shape {tuple(full.shape)}, the plan was made for {spec.user_shape}"
        )
    full = full.detach()
    if spec.shape != spec.user_shape:
        padded = full.new_zeros(spec.shape)
        padded[tuple(slice(size) for size in spec.user_shape)] = full
        full = padded
    return take(full, spec.dims, comm.mesh, comm.mesh.coordinates(comm.rank))


def hold(
    spec: ParameterSpec, full: Tensor, comm: Comm, device: torch.device, shard: Tensor | None
) -> ShardedParameter:
    """Take over a parameter; `shard` is the memory of its chunk when the weight is stored so."""
    home = local_shape(spec.dims)
    group = comm.group(owner_axes(spec))
    dtype: torch.dtype = getattr(torch, spec.dtype)
    weight = None
    if shard is None:
        weight = torch.empty(home, dtype=dtype, device=device)
    section = Section(home, spec.storage.dim, group.size)
    stored = shard
    if stored is None:
        assert weight is not None
        stored = section.rows(weight, group.index) if group.size > 1 else weight
    master = spec.master_dtype if spec.trainable else None
    memory, has_master = stored, master is not None and master != spec.dtype
    if master is not None and has_master:
        memory = torch.empty(stored.shape, dtype=getattr(torch, master), device=device)
    owned = nn.Parameter(memory, requires_grad=spec.trainable)
    if weight is stored and not has_master:
        weight = owned
    elif weight is not None:
        weight.requires_grad_(spec.trainable)
    held = ShardedParameter(spec, home, group.index, group.size, owned, stored, weight, has_master)
    held.load(full, comm)
    return held
