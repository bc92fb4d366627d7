"""What one rank holds of one parameter."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from parloom.errors import InputError
from parloom.runtime.chunks import Section
from parloom.runtime.comm import Comm
from parloom.runtime.mesh import Mesh
from parloom.runtime.program import ParameterSpec
from parloom.runtime.sharding import Box, axes_of, boxes, local_shape, take, untake

Axes = tuple[str, ...]


@dataclass(slots=True, eq=False)
class ShardedParameter:
    """One rank's memory of a parameter.

    `owned` is what the optimizer updates, in the master dtype when there is one: of `parts` chunks
    of the home shard the one with this `index`. `stored` is the same chunk in the compute dtype:
    `owned` itself, or what it is copied to after each step. It lies in `kept`, the weight as it is
    stored: a larger chunk, or whole. `weight` is the whole home shard and an autograd leaf, unless
    the weight is stored in chunks. `collected` is where the chunk of a gradient adds up. `told` is
    given every home-shard gradient as it sets out to be reduced.
    """

    spec: ParameterSpec
    home: tuple[int, ...]
    index: int
    parts: int
    owned: nn.Parameter
    stored: Tensor
    kept: Tensor
    weight: Tensor | None
    has_master: bool
    collected: Tensor | None = None
    told: Callable[[Tensor], None] | None = None

    def tell(self, gradient: Tensor | None) -> None:
        """Give a gradient that sets out to whoever wants to see it."""
        if self.told is not None and gradient is not None:
            self.told(gradient)

    @property
    def name(self) -> str:
        return self.spec.name

    def section(self, comm: Comm, have: Axes, want: Axes) -> Section:
        """The chunks over `want` of this rank's chunk over `have`, with which `want` begins."""
        return section(self.spec, self.home, comm.mesh, comm.rank, have, want)

    @property
    def axes(self) -> tuple[str, ...]:
        """Axes over which `owned` is sharded."""
        return (*axes_of(self.spec.dims), *owner_axes(self.spec))

    def part(self, home: Tensor, comm: Comm) -> Tensor:
        """The rows of a home shard that `owned` covers."""
        return _rows(self.spec, home, comm, owner_axes(self.spec))

    def add_gradient(self, gradient: Tensor) -> None:
        """Accumulate the chunk of a gradient, in the finer of two dtypes.

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
        return boxes_of(self.spec, comm.mesh, comm.rank)

    def load(self, full: Tensor, comm: Comm) -> None:
        """Take this rank's part of the user's full tensor."""
        home = home_shard(self.spec, full, comm)
        with torch.no_grad():
            self.kept.copy_(_rows(self.spec, home, comm, self.spec.storage.weight))
            self.owned.copy_(self.part(home, comm))
            self.publish()

    def whole(self, comm: Comm) -> Tensor:
        """The full tensor, padding included, in the compute dtype; every rank must ask."""
        home = self.weight
        if home is None:
            group = comm.group(self.spec.storage.weight)
            section = self.section(comm, (), self.spec.storage.weight)
            mine = self.kept.new_zeros(section.numel)
            section.part(mine, group.index).copy_(self.kept)
            buffer = mine.new_empty(section.parts, section.numel)
            group.all_gather(buffer, mine).wait()
            home = mine.new_empty(self.home)
            section.unpack(buffer, home)
        return untake(home.detach(), self.spec.dims, comm)

    def publish(self) -> None:
        """Copy the master to the stored chunk."""
        if self.has_master:
            self.stored.detach().copy_(self.owned.detach())
        else:
            self.put_back()

    def put_back(self) -> None:
        """Bring back into its memory a chunk that was given another one (`p.data = ...`)."""
        if not self.has_master and self.owned.data_ptr() != self.stored.data_ptr():
            memory = self.stored.detach()
            memory.copy_(self.owned.detach())
            self.owned.data = memory


def owner_axes(spec: ParameterSpec) -> tuple[str, ...]:
    """Storage axes of what the optimizer owns; a frozen parameter is only ever a weight."""
    return spec.storage.optimizer if spec.trainable else spec.storage.weight


def boxes_of(spec: ParameterSpec, mesh: Mesh, rank: int) -> tuple[Box, ...]:
    """The contiguous boxes of the user's tensor that the optimizer owns on a rank."""
    axes, rows = owner_axes(spec), None
    if mesh.size(axes) > 1:
        chunks = section(spec, local_shape(spec.dims), mesh, rank, (), axes)
        rows = chunks.range(mesh.index(axes, rank))
    coordinates = mesh.coordinates(rank)
    return boxes(spec.dims, mesh, coordinates, spec.storage.dim, rows, spec.valid)


def section(
    spec: ParameterSpec, home: tuple[int, ...], mesh: Mesh, rank: int, have: Axes, want: Axes
) -> Section:
    """The chunks over `want` of a rank's chunk over `have` of a home shard.

    All larger chunks are made of those that the optimizer owns, which are ceil-chunks.
    """
    dim = spec.storage.dim
    parts = mesh.size(owner_axes(spec))
    finest = -(-home[dim] // parts)

    def rows(axes: Axes) -> int:
        return finest * (parts // mesh.size(axes))

    whole = Section(home, dim, mesh.size(have), rows(have))
    first, last = whole.range(mesh.index(have, rank))
    shape = (*home[:dim], last - first, *home[dim + 1 :])
    return Section(shape, dim, mesh.size(want) // mesh.size(have), rows(want))


def _rows(spec: ParameterSpec, home: Tensor, comm: Comm, axes: Axes) -> Tensor:
    """This rank's chunk over `axes` of a home shard."""
    if comm.mesh.size(axes) == 1:
        return home
    chunks = section(spec, tuple(home.shape), comm.mesh, comm.rank, (), axes)
    return chunks.rows(home, comm.mesh.index(axes, comm.rank))


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
    spec: ParameterSpec,
    full: Tensor,
    comm: Comm,
    device: torch.device,
    *,
    shard: Tensor | None = None,
    place: Tensor | None = None,
) -> ShardedParameter:
    """Take over a parameter; `shard` is the memory of the weight's chunk when it is stored so,
    `place` that of a whole weight that lies beside others.
    """
    home, axes = local_shape(spec.dims), owner_axes(spec)
    index, parts = comm.mesh.index(axes, comm.rank), comm.mesh.size(axes)
    dtype: torch.dtype = getattr(torch, spec.dtype)
    weight = None
    if shard is None:
        weight = torch.empty(home, dtype=dtype, device=device) if place is None else place
    kept = shard if weight is None else weight
    assert kept is not None
    stored, have = kept, spec.storage.weight
    if parts > comm.mesh.size(have):
        finer = section(spec, home, comm.mesh, comm.rank, have, axes)
        stored = finer.rows(kept, index % finer.parts)
    master = spec.master_dtype if spec.trainable else None
    memory, has_master = stored, master is not None and master != spec.dtype
    if master is not None and has_master:
        memory = torch.empty(stored.shape, dtype=getattr(torch, master), device=device)
    owned = nn.Parameter(memory, requires_grad=spec.trainable)
    if weight is stored and not has_master:
        weight = kept = owned
    elif weight is not None:
        weight.requires_grad_(spec.trainable)
    held = ShardedParameter(spec, home, index, parts, owned, stored, kept, weight, has_master)
    held.load(full, comm)
    return held
