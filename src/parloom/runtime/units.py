"""Weights stored in chunks: gathered for the unit that uses them, and dropped again (ZeRO-3).

A unit's chunks lie in flat memory and travel in one all-gather. What autograd saves of a gathered
weight is packed as (unit, offset, size, stride), so dropping the weight frees it; unpacking gathers
the unit again. The weights enter the graph through one function per unit and pass, whose backward
receives all their gradients at once: the moment to reduce them and to drop the unit.
"""

from collections.abc import Callable, Mapping
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from parloom.runtime.chunked import ChunkedReduction, Path, Traffic
from parloom.runtime.chunks import Pool, layout
from parloom.runtime.comm import Comm
from parloom.runtime.program import ParameterSpec, StepNode
from parloom.runtime.quantized import over
from parloom.runtime.saved import Saved
from parloom.runtime.sharded_parameter import ShardedParameter, hold, section
from parloom.runtime.sharding import local_shape
from parloom.runtime.work import Work


class Flat:
    """Chunked parameters of one unit with equal storage axes and dtype, which `node` gathers."""

    def __init__(
        self,
        node: StepNode,
        specs: list[ParameterSpec],
        source: Callable[[ParameterSpec], Tensor],
        comm: Comm,
        pool: Pool,
    ) -> None:
        self.group = over(comm.weights.group(specs[0].storage.weight), node.dtype)
        self.dtype: torch.dtype = getattr(torch, specs[0].dtype)
        chunks = (
            section(spec, local_shape(spec.dims), comm.mesh, comm.rank, (), spec.storage.weight)
            for spec in specs
        )
        self.sections, self.total = layout(chunks, node.align)
        self.shard = torch.zeros(self.total, dtype=self.dtype, device=pool.device)
        self.helds = [
            hold(
                spec, source(spec), comm, pool.device, shard=own.part(self.shard, self.group.index)
            )
            for spec, own in zip(specs, self.sections, strict=True)
        ]
        self.pool = pool
        self._staging: Tensor | None = None
        self._work: Work | None = None
        self.memory: Tensor | None = None

    def launch(self) -> None:
        """Start to gather."""
        self._staging = self.pool.take(self.group.size * self.total, self.dtype)
        buffer = self._staging.view(self.group.size, self.total)
        self._work = self.group.all_gather(buffer, self.shard)

    def arrive(self) -> None:
        """Wait for what was launched and unpack it."""
        assert self._staging is not None
        assert self._work is not None
        self._work.wait()
        self.memory = self.pool.take(sum(prod(s.shape) for s in self.sections), self.dtype)
        buffer = self._staging.view(self.group.size, self.total)
        for own, home in zip(self.sections, self.homes(), strict=True):
            own.unpack(buffer, home)
        self.pool.give(self._staging)
        self._staging = self._work = None

    def homes(self) -> list[Tensor]:
        """Views of the gathered home shards."""
        assert self.memory is not None
        pieces = torch.split(self.memory, [prod(section.shape) for section in self.sections])
        return [p.view(s.shape) for p, s in zip(pieces, self.sections, strict=True)]


class Unit:
    """Parameters that are gathered together; the root unit has the prefix ""."""

    def __init__(self, prefix: str, index: int, flats: list[Flat]) -> None:
        self.prefix = prefix
        self.index = index
        self.flats = flats
        self.helds = [held for flat in flats for held in flat.helds]
        self.launched = False
        self.gathered = False
        # What is used outside a call of the unit is saved by autograd as it is, so it must stay.
        self.open: dict[str, Tensor] = {}

    @property
    def trainable(self) -> bool:
        return any(held.spec.trainable for held in self.helds)

    @property
    def reusable(self) -> bool:
        """Whether nothing can read the memory after the unit's gradients have left."""
        return all(held.spec.trainable for held in self.helds)

    def launch(self) -> None:
        """Start to gather, unless that has been done."""
        if not self.launched:
            for flat in self.flats:
                flat.launch()
            self.launched = True


class _Handle(NamedTuple):
    """A view of a gathered weight, without its memory."""

    unit: Unit
    flat: Flat
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


class Units:
    """All units with chunked weights, in order of first use."""

    def __init__(
        self,
        units: list[Unit],
        paths: Mapping[str, Path],
        comm: Comm,
        pool: Pool,
        traffic: Traffic,
        dtype: str | None,
    ) -> None:
        self._units = units
        self._pool = pool
        self._traffic = traffic
        self._by_name = {held.name: unit for unit in units for held in unit.helds}
        self._by_prefix = {unit.prefix: unit for unit in units}
        self._reductions = {
            unit.prefix: _reductions(unit, paths, comm, pool, dtype)
            for unit in units
            if unit.trainable
        }
        self._memories: dict[int, tuple[Unit, Flat]] = {}
        self._anchor = torch.empty(0, device=pool.device, requires_grad=True)
        self._current: Unit | None = None
        self._backward = self._drops = False
        # Whether gradients of weights are made apart from those of activations.
        self.splits = False

    def of(self, prefix: str) -> Unit | None:
        """The unit of a block call, when it has chunked weights."""
        return self._by_prefix.get(prefix)

    def weight(self, name: str) -> Tensor:
        """A weight for use outside a call of its unit, which stays gathered for the pass."""
        unit = self._by_name[name]
        if name not in unit.open:
            unit.open = self.weights(unit)
        return unit.open[name]

    def weights(self, unit: Unit) -> dict[str, Tensor]:
        """The unit's weights as new tensors of the autograd graph."""
        if unit.trainable and torch.is_grad_enabled():
            tensors = _Weights.apply(self._anchor, self, unit)  # type: ignore[no-untyped-call]
            if self.splits:
                # Each by a node of its own, so that its gradient can be asked for alone.
                tensors = tuple(t.view_as(t) if t.requires_grad else t for t in tensors)
        else:
            tensors = self.homes(unit)
        return dict(zip((held.name for held in unit.helds), tensors, strict=True))

    def homes(self, unit: Unit) -> tuple[Tensor, ...]:
        """The unit's gathered home shards."""
        self._gather(unit)
        return tuple(home for flat in unit.flats for home in flat.homes())

    def saving(self) -> "torch.autograd.graph.saved_tensors_hooks":
        """Within this context autograd saves gathered weights as handles."""
        return torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: Saved(self.pack(tensor)), self._restore
        )

    def _restore(self, saved: Saved) -> Tensor:
        saved.check()
        return self.unpack(saved.packed)

    def pack(self, tensor: Tensor) -> Tensor | _Handle:
        """What autograd saves of a tensor: a handle where it lies in gathered memory."""
        where = self._memories.get(tensor.untyped_storage().data_ptr())
        if where is None:
            return tensor
        size, stride = tuple(tensor.shape), tuple(tensor.stride())
        return _Handle(*where, int(tensor.storage_offset()), size, stride)

    def unpack(self, packed: Tensor | _Handle) -> Tensor:
        """The tensor, gathered again where it has to be."""
        if isinstance(packed, Tensor):
            return packed
        self._gather(packed.unit)
        assert packed.flat.memory is not None
        return packed.flat.memory.as_strided(packed.size, packed.stride, packed.offset)

    def leaves(self, unit: Unit) -> dict[str, Tensor]:
        """The unit's gathered weights for what is made again: their gradients go nowhere."""
        return {
            held.name: home.detach().requires_grad_(held.spec.trainable)
            for held, home in zip(unit.helds, self.homes(unit), strict=True)
        }

    def close(self, unit: Unit) -> None:
        """Drop the unit after a call of it; the last one is where the backward pass begins."""
        begins = torch.is_grad_enabled() and unit is self._units[-1]
        if not (unit.open or begins or self._backward):
            self._drop(unit)

    def owned_memory(self, value: Tensor) -> Tensor:
        """`value`, copied if it lies in gathered memory."""
        inside = value.untyped_storage().data_ptr() in self._memories
        return value.clone() if inside else value

    def turn(self, backward: bool, drops: bool = False) -> None:
        """Begin a forward or a backward pass; with `drops`, one that reduces no gradients, after
        which a unit that was passed is gathered again.
        """
        self._backward, self._drops = backward, drops
        self._current = None
        for unit in self._units:
            if not backward:
                unit.open = {}

    def end_inputs(self) -> None:
        """After a backward pass that reduces no gradients."""
        for unit in self._units:
            if not unit.open:
                self._drop(unit)
        self._current = None

    def drop_all(self) -> None:
        """Drop every unit: nothing that was saved is needed any more."""
        for unit in self._units:
            unit.open = {}
            self._drop(unit)

    def reduce(self, unit: Unit, gradients: tuple[Tensor | None, ...]) -> None:
        """The backward pass is through with a unit."""
        of_name = dict(zip((held.name for held in unit.helds), gradients, strict=True))
        for reduction in self._reductions[unit.prefix]:
            mine = [of_name[held.name] for held in reduction.helds]
            if any(gradient is not None for gradient in mine):
                self._traffic.launch(reduction, mine)
        if not unit.open:
            self._drop(unit)

    def _gather(self, unit: Unit) -> None:
        if unit is not self._current:
            # In this order: the unit at hand is ahead of the next one on the wire.
            passed, self._current = self._current, unit
            if self._drops and passed is not None and not passed.open:
                self._drop(passed)
            unit.launch()
            neighbor = unit.index + (-1 if self._backward else 1)
            if 0 <= neighbor < len(self._units):
                self._units[neighbor].launch()
        unit.launch()
        if not unit.gathered:
            for flat in unit.flats:
                flat.arrive()
                assert flat.memory is not None
                self._memories[flat.memory.data_ptr()] = (unit, flat)
            unit.gathered = True

    def _drop(self, unit: Unit) -> None:
        if not unit.launched:
            return
        for flat in unit.flats:
            if not unit.gathered:
                flat.arrive()
            assert flat.memory is not None
            self._memories.pop(flat.memory.data_ptr(), None)
            if unit.reusable:
                self._pool.give(flat.memory)
            flat.memory = None
        unit.launched = unit.gathered = False


class _Weights(torch.autograd.Function):
    """A unit's gathered weights; the backward takes all their gradients out of the graph."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, units: Units, unit: Unit) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.owner = (units, unit)
        homes = units.homes(unit)
        frozen = [
            home for home, held in zip(homes, unit.helds, strict=True) if not held.spec.trainable
        ]
        ctx.mark_non_differentiable(*frozen)
        return homes

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, None, None]:
        units, unit = ctx.owner
        units.reduce(unit, gradients)
        return None, None, None


def _reductions(
    unit: Unit, paths: Mapping[str, Path], comm: Comm, pool: Pool, dtype: str | None
) -> list[ChunkedReduction]:
    """One reduction per flat, storage and path through the step program."""
    groups: dict[object, list[ShardedParameter]] = {}
    for index, flat in enumerate(unit.flats):
        for held in flat.helds:
            if held.spec.trainable:
                storage = held.spec.storage
                key = index, paths[held.name], storage.gradient, storage.optimizer
                groups.setdefault(key, []).append(held)
    return [
        ChunkedReduction(
            helds, paths[helds[0].name], comm, pool, getattr(torch, dtype or helds[0].spec.dtype)
        )
        for helds in groups.values()
    ]
