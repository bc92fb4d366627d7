"""The parameter store: where a program's weights, gradients and buffers live.

A weight is an autograd leaf holding its whole home shard, or is stored in chunks and gathered for
the unit that uses it. A gradient leaves autograd partial and becomes whole in buckets. An optimizer
shard is the same memory as the weight where it can be; otherwise the step ends with copies and
gathers.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from parloom.errors import InputError
from parloom.runtime.chunked import Traffic
from parloom.runtime.chunks import Pool, layout
from parloom.runtime.comm import Comm, Work
from parloom.runtime.context import Context
from parloom.runtime.held import Held, hold
from parloom.runtime.leaves import BUCKET_BYTES, LeafGradients
from parloom.runtime.program import ParameterSpec, Program, TensorSpec
from parloom.runtime.sharding import take
from parloom.runtime.units import Flat, Unit, Units

Source = Callable[[str], Tensor]


def required_groups(program: Program) -> tuple[tuple[str, ...], ...]:
    """Every axis tuple that the program, its parameters or its step need a group for."""
    wanted = dict.fromkeys((program.mesh.space, *program.groups))
    for spec in program.parameters:
        storage = spec.storage
        rest = tuple(axis for axis in spec.reduce if axis not in storage.gradient)
        wanted |= dict.fromkeys((spec.reduce, storage.optimizer, rest))
    return tuple(axes for axes in wanted if program.mesh.size(axes) > 1)


class Store:
    """One rank's parameters and buffers; `source` gives full tensors by the user's names."""

    def __init__(self, program: Program, source: Source, comm: Comm, device: torch.device) -> None:
        for axes in required_groups(program):
            comm.group(axes)
        self._program = program
        self._comm = comm
        self._pool = Pool(device)
        self._traffic = Traffic()
        self.buffers = {spec.name: _buffer(spec, source, comm, device) for spec in program.buffers}
        found = partial(_find, source)
        specs = {spec.name: spec for spec in program.parameters}
        units = _units(program, specs, found, comm, self._pool)
        helds = {held.name: held for unit in units for held in unit.helds}
        for spec in program.parameters:
            if spec.name not in helds:
                helds[spec.name] = hold(spec, found(spec), comm, device, None)
        self.helds = {spec.name: helds[spec.name] for spec in program.parameters}
        dtype = program.reduce_dtype
        self._units = Units(units, comm, self._pool, self._traffic, dtype)
        ordered = list(self.helds.values())
        self._leaves = LeafGradients(ordered, comm, self._pool, self._traffic, dtype)
        self._gathers = _gathers([held for held in ordered if held.spec.trainable])
        self._outstanding = 0

    # What generated code asks for.

    def weight(self, name: str) -> Tensor:
        """The parameter `name` in its compute layout."""
        weight = self.helds[name].weight
        return self._units.weight(name) if weight is None else weight

    def buffer(self, name: str) -> Tensor:
        """The buffer `name` in its compute layout."""
        return self.buffers[name]

    def call(
        self,
        ctx: Context,
        function: Callable[..., Any],
        prefix: str,
        inputs: tuple[Tensor, ...],
        weights: tuple[str, ...],
        recompute: bool,
    ) -> Any:
        """See `Context.call`."""
        unit = self._units.of(prefix) if prefix else None

        def run(*inputs: Tensor) -> Any:
            mine = self._units.weights(unit) if unit is not None else {}
            tensors = [mine[name] if name in mine else self.weight(name) for name in weights]
            return function(ctx, prefix, *inputs, *tensors)

        if recompute and torch.is_grad_enabled():
            # Random masks are keyed, so there is no generator state to restore.
            result = checkpoint(run, *inputs, use_reentrant=False, preserve_rng_state=False)
        elif unit is None:
            return run(*inputs)
        else:
            with self._units.saving():
                result = run(*inputs)
        if unit is None:
            return result
        if isinstance(result, Tensor):
            result = self._units.owned_memory(result)
        else:
            result = tuple(self._units.owned_memory(value) for value in result)
        self._units.close(unit)
        return result

    # The passes of a step.

    def begin_step(self) -> None:
        """Forget all gradients."""
        self._units.drop_all()
        self._outstanding = 0
        self._leaves.begin_step()
        for held in self.helds.values():
            held.owned.grad = held.collected = None

    def begin_forward(self) -> None:
        self._units.turn(backward=False)
        self._outstanding += 1

    def end_evaluation(self) -> None:
        """After a forward pass without a backward pass."""
        self._outstanding -= 1
        self._units.drop_all()

    def begin_backward(self, last: bool) -> None:
        """`last`: no microbatch of this step comes after."""
        self._units.turn(backward=True)
        self._leaves.begin_backward(last)

    def end_backward(self) -> None:
        self._leaves.end_backward()
        self._outstanding -= 1
        if self._outstanding == 0:
            self._units.drop_all()

    def finish_gradients(self) -> None:
        """Wait until every owned parameter has its whole gradient (None where none arrives)."""
        self._leaves.finish()
        self._traffic.land()
        for held in self.helds.values():
            held.finish_gradient()

    def publish(self) -> None:
        """Copy masters to the stored chunks."""
        with torch.no_grad():
            for held in self.helds.values():
                held.publish()

    def gather_weights(self, frozen: bool = False) -> None:
        """Make whole the weights of which only the optimizer's chunk is up to date.

        `frozen`: also those that no step changes, but a loaded checkpoint does.
        """
        gathers = self._gathers
        if frozen:
            still = [held for held in self.helds.values() if not held.spec.trainable]
            gathers = [*gathers, *_gathers(still)]
        pending = [gather.launch(self._comm, self._pool) for gather in gathers]
        for gather, (work, staging) in zip(gathers, pending, strict=True):
            work.wait()
            gather.unpack(staging)
            self._pool.give(staging)

    def load(self, source: Source) -> None:
        """Overwrite all parameters and buffers from full tensors by the user's names."""
        for held in self.helds.values():
            held.load(_find(source, held.spec), self._comm)
        for spec in self._program.buffers:
            self.buffers[spec.name] = _buffer(spec, source, self._comm, self._pool.device)


class _Gather:
    """Weights whose chunks are updated apart (ZeRO-1 and 2), gathered in one collective."""

    def __init__(self, helds: list[Held]) -> None:
        self._helds = helds
        self._axes = helds[0].spec.storage.optimizer
        self._parts = helds[0].parts
        self._dtype = helds[0].stored.dtype
        shapes = [(held.home, held.spec.storage.dim) for held in helds]
        self._sections, self._total = layout(shapes, self._parts)

    def launch(self, comm: Comm, pool: Pool) -> tuple[Work, Tensor]:
        mine = torch.empty(self._total, dtype=self._dtype, device=pool.device)
        for section, held in zip(self._sections, self._helds, strict=True):
            section.part(mine, held.index).copy_(held.stored.detach())
        staging = pool.take(self._parts * self._total, self._dtype)
        group = comm.group(self._axes)
        return group.all_gather(staging.view(self._parts, self._total), mine), staging

    def unpack(self, staging: Tensor) -> None:
        buffer = staging.view(self._parts, self._total)
        for section, held in zip(self._sections, self._helds, strict=True):
            assert held.weight is not None
            section.unpack(buffer, held.weight.detach())


def _gathers(helds: list[Held]) -> list[_Gather]:
    """Buckets of weights with equal optimizer axes and dtype."""
    full: list[_Gather] = []
    filling: dict[object, list[Held]] = {}
    for held in helds:
        if held.weight is None or held.parts == 1:
            continue
        key = (held.spec.storage.optimizer, held.stored.dtype)
        bucket = filling.setdefault(key, [])
        bucket.append(held)
        if sum(member.weight.nbytes for member in bucket if member.weight is not None) >= (
            BUCKET_BYTES
        ):
            full.append(_Gather(filling.pop(key)))
    return [*full, *(_Gather(bucket) for bucket in filling.values())]


def _units(
    program: Program,
    specs: dict[str, ParameterSpec],
    found: Callable[[ParameterSpec], Tensor],
    comm: Comm,
    pool: Pool,
) -> list[Unit]:
    """The units that have chunked weights; a parameter in no unit belongs to the root."""
    placed = {name for _, names in program.units for name in names}
    loose = tuple(name for name in specs if name not in placed)
    listed = dict(program.units)
    listed = {"": (), **listed} if "" not in listed else listed
    listed[""] = (*listed[""], *loose)
    units: list[Unit] = []
    for prefix, names in listed.items():
        groups: dict[object, list[ParameterSpec]] = {}
        for name in names:
            spec = specs[name]
            if program.mesh.size(spec.storage.weight) > 1:
                groups.setdefault((spec.storage.weight, spec.dtype), []).append(spec)
        flats = [Flat(members, found, comm, pool) for members in groups.values()]
        if flats:
            units.append(Unit(prefix, len(units), flats))
    return units


def _find(source: Source, spec: ParameterSpec) -> Tensor:
    """The user's full tensor of a parameter, under its name or an alias."""
    for name in (spec.name, *spec.aliases):
        try:
            return source(name)
        except KeyError:
            continue
    raise InputError(f"no tensor named {spec.name} was given, nor any alias of it {spec.aliases}")


def _buffer(spec: TensorSpec, source: Source, comm: Comm, device: torch.device) -> Tensor:
    try:
        full = source(spec.name)
    except KeyError:
        raise InputError(f"no tensor named {spec.name} was given") from None
    if tuple(full.shape) != spec.shape:
        raise InputError(f"{spec.name} has shape {tuple(full.shape)}, the plan: {spec.shape}")
    local = take(full.detach(), spec.dims, comm.mesh, comm.mesh.coordinates(comm.rank))
    return local.to(device, getattr(torch, spec.dtype), copy=True).contiguous()
