"""Outputs of passes on their way from the stage that makes them to all ranks, beside later passes.

Each microbatch is a message of its own, so that a rank goes on as soon as it has what it reads, and
so do those that sent it.
"""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from parloom.action_text import passes_beside
from parloom.runtime.batches import Batches
from parloom.runtime.comm import Comm
from parloom.runtime.context import Context
from parloom.runtime.evaluation import forward_actions
from parloom.runtime.program import Pipeline, Program, TensorSpec
from parloom.runtime.sharding import local_shape, put, untake, without
from parloom.runtime.transfers import MICROBATCH_BITS
from parloom.runtime.work import Work

FIRST = 1 << 14  # of the numbers of channels in tags, above those of wires between stages
Make = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Told:
    """What every rank is told of an output `of`: what `make` makes of each microbatch is a part of
    a tensor `spec`.
    """

    of: str
    spec: TensorSpec
    make: Make = lambda whole: whole


class Channel:
    """The way of what is `told` of one program; every rank makes all channels in the same order."""

    def __init__(
        self, pipeline: Pipeline, told: Told, number: int, comm: Comm, device: torch.device
    ) -> None:
        self.told, self.comm, self.device = told, comm.weights, device
        self.stage, output = next(
            (stage, spec)
            for stage, program in enumerate(pipeline.programs)
            for spec in program.outputs
            if spec.name == told.of and not pipeline.replica(stage)
        )
        self._mesh = mesh = pipeline.programs[self.stage].mesh
        self._tag = FIRST + number << MICROBATCH_BITS
        # The digits of a microbatch in the whole, and those of this rank in a microbatch.
        self._parts = tuple(
            tuple(d if isinstance(d, int) or d == mesh.time else mesh[d].size for d in digits)
            for digits in told.spec.dims
        )
        self.shards = without(output.dims, (mesh.time,) if mesh.time else ())
        sources = pipeline.ranks[self.stage]
        self.order = tuple(
            action.microbatch
            for action in forward_actions(pipeline, sources[0])
            if action.stage == self.stage
        )
        others = [rank for rank in range(pipeline.num_ranks) if rank not in sources]
        senders = {rank: sources[index % len(sources)] for index, rank in enumerate(others)}
        self.sender = senders.get(comm.rank)
        self.receivers = tuple(rank for rank, sender in senders.items() if sender == comm.rank)
        # Apart from values between stages: back ends that take messages in the order of sending
        # would take one for another.
        self.comm.connect(((sender, rank) for rank, sender in senders.items()), device)

    def part(self) -> Tensor:
        """Memory for what a microbatch is."""
        dtype: torch.dtype = getattr(torch, self.told.spec.dtype)
        return torch.empty(local_shape(self._parts), dtype=dtype, device=self.device)

    def write(self, whole: Tensor, part: Tensor, microbatch: int) -> None:
        """Write what a microbatch is into the whole."""
        put(whole, part, self._parts, self._mesh, self._mesh.coordinates(0, microbatch))

    def tag(self, microbatch: int) -> int:
        """What names a message, for back ends that compare it."""
        return self._tag | microbatch


class Telling:
    """One pass over a channel; `memory` is the whole output, as far as it has come."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        spec, device = channel.told.spec, channel.device
        self.memory = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device=device)
        self._there = set[int]()
        self._sent: list[Work] = []
        self._coming: deque[tuple[int, Work, Tensor]] = deque()

    @property
    def count(self) -> int:
        """The microbatches of the stage that makes it."""
        return len(self._channel.order)

    @property
    def stage(self) -> int:
        """The stage that makes it."""
        return self._channel.stage

    @property
    def sender(self) -> int | None:
        """The rank that this one is told by; None where it makes the output."""
        return self._channel.sender

    def expect(self, microbatch: int) -> None:
        """Be ready for a microbatch."""
        assert self.sender is not None, "another rank makes it"
        part, tag = self._channel.part(), self._channel.tag(microbatch)
        work = self._channel.comm.receive(part, self.sender, tag)
        self._coming.append((microbatch, work, part))

    def tell(self, outputs: Mapping[str, Tensor], comm: Comm, microbatch: int) -> None:
        """Tell of a microbatch, of whose `outputs` this rank of the stage has shards."""
        channel = self._channel
        output = untake(outputs[channel.told.of], channel.shards, comm)
        part = channel.told.make(output).contiguous()
        self._write(part, microbatch)
        for receiver in channel.receivers:
            self._sent.append(channel.comm.send(part, receiver, channel.tag(microbatch)))

    def until(self, microbatch: int) -> None:
        """Wait for a microbatch, and for those that come before it."""
        while microbatch not in self._there:
            came, work, part = self._coming.popleft()
            work.wait()
            self._write(part, came)

    def whole(self) -> Tensor:
        """The whole output; waits for it, and until what was sent of it has left."""
        for microbatch in self._channel.order:
            self.until(microbatch)
        for work in self._sent:
            work.wait()
        self._sent.clear()
        return self.memory

    def _write(self, part: Tensor, microbatch: int) -> None:
        self._channel.write(self.memory, part, microbatch)
        self._there.add(microbatch)


def begin(channels: Mapping[str, Channel], pipeline: Pipeline) -> dict[str, Telling]:
    """Begin a pass over channels: this rank is ready for what others tell, in their order."""
    told = {name: Telling(channel) for name, channel in channels.items()}
    senders = {one.sender for one in told.values() if one.sender is not None}
    for sender in sorted(senders):
        for action in forward_actions(pipeline, sender):
            for one in told.values():
                if (one.sender, one.stage) == (sender, action.stage):
                    one.expect(action.microbatch)
    return told


class Awaiting(Batches):
    """Batches with an input `name` that another pass makes: a microbatch is awaited where it is
    read.
    """

    def __init__(
        self, program: Program, ctx: Context, batch: Mapping[str, Tensor], name: str, made: Telling
    ) -> None:
        super().__init__(program, ctx, {**batch, name: made.memory}, {})
        self._count = program.num_microbatches
        self._made = made if name in self.tensors else None

    def microbatch(self, index: int) -> dict[str, Tensor]:
        """This rank's part of microbatch `index`, when it has been made."""
        if self._made is not None:
            for needed in passes_beside(index, self._count, self._made.count):
                self._made.until(needed)
        return super().microbatch(index)
