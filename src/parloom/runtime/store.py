"""The parameter store: where a program's weights, gradients and buffers live.

A weight is an autograd leaf holding its whole home shard, or is stored in chunks and gathered for
the unit that uses it. A gradient leaves autograd partial and is reduced in buckets, to its whole or
to the chunk that the optimizer owns. That chunk lies in the memory of the weight where it can;
otherwise the step ends with copies, and with gathers where the weight is stored in larger chunks.
Weights that operators read as one lie one after the other (`runtime.adjacent`).
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from parloom.errors import InputError, VerifyError
from parloom.runtime import adjacent
from parloom.runtime.chunked import Traffic
from parloom.runtime.chunks import Pool, layout
from parloom.runtime.comm import Comm
from parloom.runtime.compiled import CompiledBlocks
from parloom.runtime.context import Context
from parloom.runtime.leaves import LeafGradients
from parloom.runtime.program import ParameterSpec, Program, TensorSpec
from parloom.runtime.remake import Again, Made, Parts, Remaking
from parloom.runtime.replay import Replay
from parloom.runtime.sharded_parameter import ShardedParameter, hold
from parloom.runtime.sharding import axes_of, take
from parloom.runtime.spans import named
from parloom.runtime.units import Flat, Unit, Units
from parloom.runtime.work import Work

Source = Callable[[str], Tensor]


def required_groups(program: Program) -> tuple[tuple[str, ...], ...]:
    """Every axis tuple that the passes or a parameter's storage need a group for."""
    stored = (spec.storage.optimizer for spec in program.parameters)
    wanted = dict.fromkeys((program.mesh.space, *program.groups, *stored))
    return tuple(axes for axes in wanted if program.mesh.size(axes) > 1)


def stage_groups(program: Program) -> tuple[tuple[str, ...], ...]:
    """`required_groups`, and those that whole tensors and outputs are gathered over."""
    dims = [spec.dims for spec in program.parameters]
    dims += [spec.dims for spec in (*program.buffers, *program.caches, *program.outputs)]
    spread = (tuple(a for a in axes_of(own) if a in program.mesh.space) for own in dims)
    stored = (spec.storage.weight for spec in program.parameters)
    wanted = dict.fromkeys((*required_groups(program), *spread, *stored))
    return tuple(axes for axes in wanted if program.mesh.size(axes) > 1)


def weight_groups(program: Program) -> tuple[tuple[str, ...], ...]:
    """Every axis tuple over which the step sends weights or gradients."""
    wanted = dict.fromkeys(node.axes for node in program.step if node.parameters)
    return tuple(axes for axes in wanted if program.mesh.size(axes) > 1)


class Store:
    """One rank's parameters and buffers; `source` gives full tensors by the user's names.

    `blocks` compiles block functions, where that is asked for.
    """

    def __init__(
        self,
        program: Program,
        source: Source,
        comm: Comm,
        device: torch.device,
        blocks: CompiledBlocks | None = None,
    ) -> None:
        self._blocks = blocks
        for axes in required_groups(program):
            comm.group(axes)
        for axes in weight_groups(program):
            comm.weights.group(axes)
        self._program = program
        self._comm = comm
        self._pool = Pool(device)
        self._traffic = Traffic()
        self.buffers = {spec.name: _buffer(spec, source, comm, device) for spec in program.buffers}
        found = partial(_find, source)
        units = _units(program, found, comm, self._pool)
        adjacent.check_gathered(program, units)
        helds = {held.name: held for unit in units for held in unit.helds}
        places = adjacent.buffers(program, device)
        for spec in program.parameters:
            if spec.name not in helds:
                place = places.get(spec.name)
                helds[spec.name] = hold(spec, found(spec), comm, device, place=place)
        self.helds = {spec.name: helds[spec.name] for spec in program.parameters}
        dtype = program.reduce_dtype
        paths = program.reductions()
        self._units = Units(units, paths, comm, self._pool, self._traffic, dtype)
        ordered = list(self.helds.values())
        self._leaves = LeafGradients(ordered, paths, comm, self._pool, self._traffic, dtype)
        self._gathers = _gathers(program, self.helds, comm)
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
        again: Again | None,
    ) -> Any:
        """See `Context.call`."""
        unit = self._units.of(prefix) if prefix else None
        # A compiled function has memory of its own making; values are dropped as they are written.
        blocks = self._blocks if again is None else None
        body, path = blocks.of(function, prefix) if blocks else (function, prefix)

        def run(ctx: Context, *inputs: Tensor) -> Any:
            mine = self._units.weights(unit) if unit is not None else {}
            tensors = [mine[name] if name in mine else self.weight(name) for name in weights]
            with named(prefix or function.__name__):
                return body(ctx, path, *inputs, *tensors)

        if again is not None:
            result = self._dropping(ctx, run, inputs, again, prefix, weights)
        elif recompute and torch.is_grad_enabled():
            # Random masks are keyed, so there is no generator state to restore.
            pack, unpack = self._hooks(unit)
            result = Replay(pack, unpack, partial(run, ctx)).run(*inputs)
        elif unit is None:
            return run(ctx, *inputs)
        else:
            with self._units.saving():
                result = run(ctx, *inputs)
        if unit is None:
            return result
        if isinstance(result, Tensor):
            result = self._units.owned_memory(result)
        else:
            result = tuple(self._units.owned_memory(value) for value in result)
        self._units.close(unit)
        return result

    def _dropping(
        self,
        ctx: Context,
        run: Callable[..., Made],
        inputs: tuple[Tensor, ...],
        again: Again,
        prefix: str,
        weights: tuple[str, ...],
    ) -> Any:
        """The results of a call that drops values, which `again` makes at the same moment."""
        if not torch.is_grad_enabled():
            return run(ctx, *inputs).results
        units, parts = self._units, Parts()
        unit = units.of(prefix) if prefix else None
        moment = replace(ctx, parts=parts)

        def remake(*kept: Tensor) -> tuple[Tensor, ...]:
            mine = units.leaves(unit) if unit is not None else {}
            tensors = [mine[name] if name in mine else self.weight(name) for name in weights]
            return again(moment, prefix, *kept, *tensors)

        remaking = Remaking(*self._hooks(unit), parts)
        with remaking.saving():
            made = run(moment, *inputs)
        remaking.drop(made, remake)
        return made.results

    def _hooks(self, unit: Unit | None) -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]:
        """What autograd does with what it saves in a call with the weights of `unit`."""
        if unit is None:
            return _as_it_is, _as_it_is
        return self._units.pack, self._units.unpack

    # The passes of a step.

    def begin_step(self, *, splits: bool = False) -> None:
        """Forget all gradients; `splits` where those of weights will be made apart."""
        self._units.drop_all()
        self._units.splits = splits
        self._outstanding = 0
        self._leaves.begin_step()
        for held in self.helds.values():
            held.put_back()
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
        self._traffic.last = last
        self._units.turn(backward=True)
        self._leaves.begin_backward(last)

    def begin_inputs(self) -> None:
        """Begin a backward pass that makes no gradients of weights."""
        self._units.turn(backward=True, drops=True)

    def end_inputs(self) -> None:
        """After such a pass."""
        self._units.end_inputs()

    def owned_memory(self, value: Tensor) -> Tensor:
        """`value`, copied if it lies in gathered memory."""
        return self._units.owned_memory(value)

    def load_buffer(self, name: str, full: Tensor) -> None:
        """Take this rank's part of a whole buffer."""
        (spec,) = (spec for spec in self._program.buffers if spec.name == name)
        device = self._pool.device
        self.buffers[name] = _buffer(spec, lambda _: full, self._comm, device)

    def write_buffers(self, updates: Mapping[str, Tensor]) -> None:
        """Take over new buffers."""
        for name, value in updates.items():
            # Memory of its own: the value may be a weight, a batch or another buffer.
            self.buffers[name] = value.detach().clone()

    def end_backward(self) -> None:
        self._leaves.end_backward()
        self._outstanding -= 1
        if self._outstanding == 0:
            self._units.drop_all()

    def collected_gradients(self) -> list[Tensor]:
        """The memories in which gradients of leaves collect."""
        return list(self._leaves.collected)

    def finish_gradients(self) -> None:
        """Wait until every owned parameter has its whole gradient (None where none arrives)."""
        self._leaves.finish()
        self._traffic.land()
        for held in self.helds.values():
            held.finish_gradient()
        for name in self._program.zero_gradients:
            held = self.helds[name]
            held.owned.grad = torch.zeros_like(held.owned)

    def publish(self) -> None:
        """Copy masters to the stored chunks."""
        for held in self.helds.values():
            held.publish()

    def gather_weights(self) -> None:
        """Make whole the weights of which only the optimizer's chunk is up to date."""
        pending = [gather.launch(self._pool) for gather in self._gathers]
        for gather, (work, staging) in zip(self._gathers, pending, strict=True):
            work.wait()
            gather.unpack(staging)
            self._pool.give(staging)

    def load(self, source: Source) -> None:
        """Overwrite all parameters and buffers from full tensors by the user's names, which all
        ranks were given alike.
        """
        for held in self.helds.values():
            held.load(_find(source, held.spec), self._comm)
        for spec in self._program.buffers:
            self.buffers[spec.name] = _buffer(spec, source, self._comm, self._pool.device)


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


class _Gather:
    """Weights that are updated in smaller chunks, gathered over `axes` in one collective."""

    def __init__(self, helds: list[ShardedParameter], axes: tuple[str, ...], comm: Comm) -> None:
        self._helds, self._group = helds, comm.weights.group(axes)
        self._dtype = helds[0].stored.dtype
        self._sections, self._total = layout(
            held.section(comm, held.spec.storage.weight, held.spec.storage.optimizer)
            for held in helds
        )

    def launch(self, pool: Pool) -> tuple[Work, Tensor]:
        mine = torch.empty(self._total, dtype=self._dtype, device=pool.device)
        for section, held in zip(self._sections, self._helds, strict=True):
            section.part(mine, self._group.index).copy_(held.stored.detach())
        staging = pool.take(self._group.size * self._total, self._dtype)
        return self._group.all_gather(staging.view(self._group.size, self._total), mine), staging

    def unpack(self, staging: Tensor) -> None:
        buffer = staging.view(self._group.size, self._total)
        for section, held in zip(self._sections, self._helds, strict=True):
            section.unpack(buffer, held.kept.detach())


def _gathers(program: Program, helds: Mapping[str, ShardedParameter], comm: Comm) -> list[_Gather]:
    """The buckets of the GATHER nodes at the end of a step."""
    buckets: list[_Gather] = []
    for node in program.nodes("GATHER"):
        filling: list[ShardedParameter] = []
        if program.mesh.size(node.axes) == 1:
            continue
        for name in node.parameters:
            filling.append(helds[name])
            if sum(prod(h.home) * h.stored.itemsize for h in filling) >= node.bucket_bytes > 0:
                buckets.append(_Gather(filling, node.axes, comm))
                filling = []
        if filling:
            buckets.append(_Gather(filling, node.axes, comm))
    return buckets


def _units(
    program: Program,
    found: Callable[[ParameterSpec], Tensor],
    comm: Comm,
    pool: Pool,
) -> list[Unit]:
    """The units that have chunked weights.

    Raises `VerifyError` where the step program never gathers a weight that is stored in chunks.
    """
    size = program.mesh.size
    chunked = {s.name: s for s in program.parameters if size(s.storage.weight) > 1}
    flats: dict[str, list[Flat]] = {}
    for node in program.nodes("GATHER", "forward and backward"):
        if size(node.axes) > 1:
            members = [chunked.pop(name) for name in node.parameters]
            flats.setdefault(node.unit or "", []).append(Flat(node, members, found, comm, pool))
    if chunked:
        raise VerifyError(f"no GATHER node makes {next(iter(chunked))} whole, stored in chunks")
    return [Unit(unit, index, members) for index, (unit, members) in enumerate(flats.items())]


def given(program: Program, source: Source) -> Iterator[tuple[str, Tensor]]:
    """The full tensors of a program's parameters and buffers, by name."""
    yield from ((spec.name, _find(source, spec)) for spec in program.parameters)
    yield from ((spec.name, _find_buffer(source, spec)) for spec in program.buffers)


def _find(source: Source, spec: ParameterSpec) -> Tensor:
    """The user's full tensor of a parameter, under its name or an alias."""
    for name in (spec.name, *spec.aliases):
        try:
            return source(name)
        except KeyError:
            continue
    raise InputError(f"no tensor named {spec.name} was given, nor any alias of it {spec.aliases}")


def _find_buffer(source: Source, spec: TensorSpec) -> Tensor:
    try:
        return source(spec.name)
    except KeyError:
        raise InputError(f"no tensor named {spec.name} was given") from None


def _buffer(spec: TensorSpec, source: Source, comm: Comm, device: torch.device) -> Tensor:
    full = _find_buffer(source, spec)
    if tuple(full.shape) != spec.shape:
        raise InputError(f"{spec.name} has shape {tuple(full.shape)}, the plan: {spec.shape}")
    local = take(full.detach(), spec.dims, comm.mesh, comm.mesh.coordinates(comm.rank))
    return local.to(device, getattr(torch, spec.dtype), copy=True).contiguous()
