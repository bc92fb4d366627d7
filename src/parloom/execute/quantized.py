"""The reference of plans that quantize what they send: the captured program on one device, with the
same quantizer at the same places.

Weights that a plan gathers quantized are read so. A gradient that it reduces quantized is a sum of
addends, which ranks make: each tells its own, as they are before they are quantized. Their plain
sum has to be the gradient of one device; quantized here, by code of its own, they add up to the
gradient that the reference goes on with.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from parloom.quantization import BLOCK, LARGEST
from parloom.runtime import Mesh, ParameterSpec, Program, StepNode, Trainer
from parloom.runtime.chunks import Section
from parloom.runtime.sharded_parameter import owner_axes, section
from parloom.runtime.sharding import boxes, local_shape

Tensors = Mapping[str, Tensor]
Addends = list[dict[str, list[Tensor]]]
"""Of each step the gradients by name, in the order in which they set out."""


class Told:
    """The addends of the gradients `names` that a rank's trainer reduces; called before a step."""

    def __init__(self, names: frozenset[str]) -> None:
        self.names = names
        self.addends: Addends = []

    def __call__(self, trainer: Trainer) -> None:
        found: dict[str, list[Tensor]] = {}
        self.addends.append(found)
        for name, (held, _) in trainer.owned.items():
            if name in self.names:
                held.told = partial(_note, found.setdefault(name, []))


def _note(found: list[Tensor], gradient: Tensor) -> None:
    found.append(gradient.detach().clone())


def quantized_gradients(program: Program) -> frozenset[str]:
    """The gradients that a program reduces quantized."""
    return frozenset(_quantized(program, "REDUCE", ("microbatch", "step")))


def quantized_weights(program: Program) -> frozenset[str]:
    """The weights that a program gathers quantized."""
    return frozenset(_quantized(program, "GATHER", ("forward and backward",)))


def _quantized(program: Program, action: str, times: Sequence[str]) -> dict[str, StepNode]:
    nodes = (node for when in times for node in program.nodes(action, when))
    sent = (node for node in nodes if node.dtype and program.mesh.size(node.axes) > 1)
    return {name: node for node in sent for name in node.parameters}


def quantized(tensor: Tensor) -> Tensor:
    """The numbers as they arrive where they are sent in int8, in blocks of the flat tensor."""
    if not tensor.numel():
        return tensor
    blocks = []
    for block in torch.split(tensor.reshape(-1), BLOCK):
        scale = block.abs().max() / LARGEST
        blocks.append((block / scale).round() * scale if scale else torch.zeros_like(block))
    return torch.cat(blocks).view(tensor.shape)


class QuantizedReference:
    """The quantizer of a program in its reference; `addends` are those that each rank told.

    `exact` are gradients of one device, and `summed` the plain sums of addends, by the same names.
    """

    def __init__(self, program: Program, addends: Sequence[Addends]) -> None:
        self._mesh, self._addends = program.mesh, addends
        self._specs = {spec.name: spec for spec in program.parameters}
        self._nodes = _quantized(program, "REDUCE", ("microbatch", "step"))
        self._weights = quantized_weights(program)
        self.exact: dict[str, Tensor] = {}
        self.summed: dict[str, Tensor] = {}

    def read(self, state: Tensors) -> dict[str, Tensor]:
        """What the step reads of `state`."""
        read = {name: self._weight(self._specs[name], state[name]) for name in self._weights}
        return {**state, **read}

    def reduce(self, step: int, state: Tensors, read: Tensors) -> None:
        """Give `state` the gradients of what was read, reduced as the program does."""
        for name, tensor in read.items():
            gradient = tensor.grad
            if gradient is not None and name in self._nodes:
                what = f"sum of what ranks add up to the gradient of {name} in step {step + 1}"
                self.exact[what] = gradient.clone()
                self.summed[what] = self._sum(name, step, lambda addend: addend)
                gradient = self._sum(name, step, quantized)
            state[name].grad = gradient

    def _weight(self, spec: ParameterSpec, full: Tensor) -> Tensor:
        """A weight as its gathered chunks are."""
        result = full.detach().clone()
        for rank in range(self._mesh.num_ranks):
            part = _Part(spec, self._mesh, rank, spec.storage.weight)
            part.put(result, part.through(quantized, part.take(full.detach())))
        return result.requires_grad_(full.requires_grad)

    def _sum(self, name: str, step: int, through: Callable[[Tensor], Tensor]) -> Tensor:
        """A whole gradient of what all ranks told, each addend `through` what is done to it."""
        spec, node = self._specs[name], self._nodes[name]
        microbatch = node.when == "microbatch"
        axes = spec.storage.gradient if microbatch else owner_axes(spec)
        first = self._addends[0][step][name][0]
        full = first.new_full(spec.user_shape, float("nan"))  # elements that no rank has
        for rank in range(self._mesh.num_ranks):
            part = _Part(spec, self._mesh, rank, axes)
            members = [self._addends[r][step][name] for r in self._mesh.group(node.axes, rank)]
            if not microbatch:  # what is reduced once a step has been added up before
                members = [[torch.stack(of_rank).sum(0)] for of_rank in members]
            total = torch.zeros(())
            for of_launch in zip(*members, strict=True):
                sums = torch.zeros(())
                for addend in of_launch:
                    sums = sums + part.through(through, part.chunk(addend))
                if node.kind == "all_reduce":
                    sums = part.through(through, sums)
                total = total + sums
            part.put(full, total)
        return full


class _Part:
    """A rank's chunk over `axes` of its home shard of a parameter."""

    def __init__(self, spec: ParameterSpec, mesh: Mesh, rank: int, axes: tuple[str, ...]) -> None:
        home = local_shape(spec.dims)
        self.section: Section | None = None
        self.index, rows, self.shape = 0, None, home
        if mesh.size(axes) > 1:
            self.section = section(spec, home, mesh, rank, (), axes)
            self.index = mesh.index(axes, rank)
            rows = self.section.range(self.index)
            dim = self.section.dim
            self.shape = (*home[:dim], rows[1] - rows[0], *home[dim + 1 :])
        coordinates = mesh.coordinates(rank)
        self.boxes = boxes(spec.dims, mesh, coordinates, spec.storage.dim, rows, spec.valid)

    def chunk(self, home: Tensor) -> Tensor:
        """That of a home shard."""
        return home if self.section is None else self.section.rows(home, self.index)

    def through(self, function: Callable[[Tensor], Tensor], chunk: Tensor) -> Tensor:
        """What `function` makes of the chunk, filled up with zeros to the length of all chunks."""
        if self.section is None:
            return function(chunk)
        padded = chunk.new_zeros(self.section.chunk_shape)
        own = padded.narrow(self.section.dim, 0, chunk.shape[self.section.dim])
        own.copy_(chunk)
        made = function(padded)
        return made.narrow(self.section.dim, 0, chunk.shape[self.section.dim])

    def take(self, full: Tensor) -> Tensor:
        """The chunk of a whole tensor."""
        chunk = full.new_zeros(self.shape)
        for box in self.boxes:
            chunk[box.local] = full[box.whole]
        return chunk

    def put(self, full: Tensor, chunk: Tensor) -> None:
        """Write the chunk into a whole tensor."""
        for box in self.boxes:
            full[box.whole] = chunk[box.local]
