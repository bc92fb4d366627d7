"""Parameters that several pipeline stages have: one stage owns them, the others hold copies.

Before the update the owner adds up the gradients of all stages; after it the copies take over the
weights. Each rank of the owner sends and receives the boxes of what it owns.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from parloom.runtime.comm import Comm
from parloom.runtime.part import Part
from parloom.runtime.program import ParameterSpec, Pipeline, Program
from parloom.runtime.sharded_parameter import ShardedParameter, boxes_of
from parloom.runtime.sharding import Box
from parloom.runtime.spans import Spans, waiting_of
from parloom.runtime.transfers import Piece, split

SHARED = 1 << 30  # the tag of their messages, which no value of a microbatch has
Way = tuple[int, torch.dtype]
"""Another rank, and what is sent to it or comes from it."""


class SharedParameters:
    """This rank's part in all parameters that several stages have."""

    def __init__(
        self, pipeline: Pipeline, parts: Sequence[Part], comm: Comm, device: torch.device
    ) -> None:
        self._comm = comm
        self._parts = {part.stage: part for part in parts}
        self._copies = [
            _Copy(name, stages[0], stage, pipeline)
            for name, stages in sorted(pipeline.shared.items())
            for stage in stages[1:]
        ]
        ways = [p for copy in self._copies for p in (*copy.weights, *copy.gradients)]
        comm.connect(((p.sender, p.receiver) for p in ways), device)

    def reduce(self, spans: Spans | None = None) -> None:
        """Add up the gradients of all stages where a parameter is owned; `spans` note waits."""
        moves = []
        for copy in (copy for copy in self._copies if copy.trained):
            held = self._held(copy.name, copy.stage)
            sent = None if held is None else _gradient(held.owned)
            owner = self._held(copy.name, copy.owner)
            if owner is not None:
                owner.owned.grad = _gradient(owner.owned)
            received = None if owner is None else owner.owned.grad
            moves.append(_Move(copy.gradients, copy.gradient_dtype, sent, received, adds=True))
        self._exchange(moves, spans)

    def publish(self, spans: Spans | None = None, *, frozen: bool = False) -> None:
        """Bring the copies up to date, after a load those that no step changes, too."""
        moves, copies = [], []
        for copy in (copy for copy in self._copies if copy.trained or frozen):
            owner, held = self._held(copy.name, copy.owner), self._held(copy.name, copy.stage)
            sent = None if owner is None else owner.stored.detach()
            received = None if held is None else held.owned.detach()
            moves.append(_Move(copy.weights, copy.dtype, sent, received))
            copies.append(held)
        self._exchange(moves, spans)
        for held in copies:
            if held is not None:
                held.publish()

    def _held(self, name: str, stage: int) -> ShardedParameter | None:
        part = self._parts.get(stage)
        return None if part is None else part.store.helds[name]

    def _exchange(self, moves: Sequence["_Move"], spans: Spans | None) -> None:
        """Send the pieces of this rank, and receive those for it: one message to and from each
        other rank and for each dtype, with all pieces in the order of `moves`, which is everywhere
        the same.
        """
        rank = self._comm.rank
        leaving: dict[Way, list[Tensor]] = defaultdict(list)
        coming: dict[Way, list[tuple[_Move, Piece]]] = defaultdict(list)
        for move in moves:
            for piece in move.pieces:
                if piece.sender == rank:
                    assert move.sent is not None
                    part = move.sent[piece.sent]
                    if piece.receiver == rank:
                        move.take(piece, part)
                    else:
                        leaving[piece.receiver, move.dtype].append(part)
                elif piece.receiver == rank:
                    assert move.received is not None
                    coming[piece.sender, move.dtype].append((move, piece))
        works = []
        for (sender, dtype), parts in coming.items():
            size, received = sum(prod(piece.shape) for _, piece in parts), parts[0][0].received
            assert received is not None
            flat = torch.empty(size, dtype=dtype, device=received.device)
            works.append((self._comm.receive(flat, sender, SHARED), flat, parts))
        for (receiver, dtype), pieces in leaving.items():
            flat = torch.cat([piece.to(dtype).reshape(-1) for piece in pieces])
            works.append((self._comm.send(flat, receiver, SHARED), flat, []))
        for work, flat, parts in works:
            with waiting_of(spans):
                work.wait()
            at = 0
            for move, piece in parts:
                part = flat[at : at + prod(piece.shape)].view(piece.shape)
                move.take(piece, part)
                at += part.numel()


@dataclass(frozen=True, slots=True)
class _Move:
    """The pieces of one tensor that travel in `dtype`: what this rank has of them, and what they
    are written to, or with `adds` added to.
    """

    pieces: tuple[Piece, ...]
    dtype: torch.dtype
    sent: Tensor | None
    received: Tensor | None
    adds: bool = False

    def take(self, piece: Piece, part: Tensor) -> None:
        """Write or add a piece that is there."""
        assert self.received is not None
        place = self.received[piece.received]
        place.add_(part) if self.adds else place.copy_(part)


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
