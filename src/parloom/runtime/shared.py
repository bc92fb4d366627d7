"""Parameters that several pipeline stages have: one stage owns them, the others hold copies.

Before the update the owner adds up the gradients of all stages; after it the copies take over the
weights. Each rank of the owner sends and receives the boxes of what it owns.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from parloom.runtime.comm import Comm
from parloom.runtime.part import Part
from parloom.runtime.program import ParameterSpec, Pipeline, Program
from parloom.runtime.sharded_parameter import ShardedParameter, boxes_of
from parloom.runtime.sharding import Box
from parloom.runtime.transfers import Piece, split
from parloom.runtime.work import Work

SHARED = 1 << 30  # the tag of their messages, which no value of a microbatch has


class SharedParameters:
    """This rank's part in all parameters that several stages have."""

    def __init__(self, pipeline: Pipeline, parts: Sequence[Part], comm: Comm) -> None:
        self._comm = comm
        self._parts = {part.stage: part for part in parts}
        self._copies = [
            _Copy(name, stages[0], stage, pipeline)
            for name, stages in sorted(pipeline.shared.items())
            for stage in stages[1:]
        ]
        ways = [p for copy in self._copies for p in (*copy.weights, *copy.gradients)]
        comm.connect((p.sender, p.receiver) for p in ways)

    def reduce(self) -> None:
        """Add the gradients of all stages up where a parameter is owned."""
        for copy in (copy for copy in self._copies if copy.trained):
            held = self._held(copy.name, copy.stage)
            sent = None if held is None else _gradient(held.owned)
            owner = self._held(copy.name, copy.owner)
            received = None if owner is None else torch.zeros_like(owner.owned)
            self._exchange(copy.gradients, sent, received, copy.gradient_dtype)
            if owner is not None and received is not None:
                gradient = owner.owned.grad
                owner.owned.grad = received if gradient is None else gradient + received

    def publish(self, *, frozen: bool = False) -> None:
        """Bring the copies up to date, after a load those that no step changes, too."""
        for copy in (copy for copy in self._copies if copy.trained or frozen):
            owner, held = self._held(copy.name, copy.owner), self._held(copy.name, copy.stage)
            sent = None if owner is None else owner.stored.detach()
            received = None if held is None else held.owned.detach()
            self._exchange(copy.weights, sent, received, copy.dtype)
            if held is not None:
                held.publish()

    def _held(self, name: str, stage: int) -> ShardedParameter | None:
        part = self._parts.get(stage)
        return None if part is None else part.store.helds[name]

    def _exchange(
        self,
        pieces: Sequence[Piece],
        sent: Tensor | None,
        received: Tensor | None,
        dtype: torch.dtype,
    ) -> None:
        """Send the pieces of this rank in `dtype`, and receive those for it."""
        rank = self._comm.rank
        under_way: list[tuple[Work, Tensor, Piece | None]] = []
        for piece in pieces:
            if piece.sender == piece.receiver == rank:
                assert sent is not None
                assert received is not None
                received[piece.received] = sent[piece.sent].to(received.dtype)
            elif piece.sender == rank:
                assert sent is not None
                part = sent[piece.sent].to(dtype).contiguous()
                under_way.append((self._comm.send(part, piece.receiver, SHARED), part, None))
            elif piece.receiver == rank:
                assert received is not None
                part = torch.empty(piece.shape, dtype=dtype, device=received.device)
                work = self._comm.receive(part, piece.sender, SHARED)
                under_way.append((work, part, piece))
        for work, part, arrived in under_way:
            work.wait()
            if arrived is not None and received is not None:
                received[arrived.received] = part.to(received.dtype)


class _Copy:
    """The copy of a parameter in a stage that does not own it, and the pieces that travel."""

    def __init__(self, name: str, owner: int, stage: int, pipeline: Pipeline) -> None:
        self.name, self.owner, self.stage = name, owner, stage
        owned, copied = (list(_boxes(pipeline, s, name)) for s in (owner, stage))
        spec = _spec(pipeline.programs[owner], name)
        self.trained = spec.trainable
        self.dtype: torch.dtype = getattr(torch, spec.dtype)
        self.gradient_dtype: torch.dtype = getattr(torch, spec.master_dtype or spec.dtype)
        self.weights = tuple(split(owned, copied))
        self.gradients = tuple(split(copied, owned))


def _boxes(pipeline: Pipeline, stage: int, name: str) -> Iterator[tuple[int, tuple[Box, ...]]]:
    """The boxes that the optimizer would own on each rank of a stage."""
    program = pipeline.programs[stage]
    spec = _spec(program, name)
    for index, rank in enumerate(pipeline.ranks[stage]):
        yield rank, boxes_of(spec, program.mesh, index)


def _spec(program: Program, name: str) -> ParameterSpec:
    return next(spec for spec in program.parameters if spec.name == name)


def _gradient(owned: Tensor) -> Tensor:
    return torch.zeros_like(owned) if owned.grad is None else owned.grad
