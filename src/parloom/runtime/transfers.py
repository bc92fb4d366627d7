"""Values and their gradients on their way between pipeline stages.

What crosses is sharded over the ranks of both stages, each in its own way; a rank sends another one
the boxes that the other needs and it has. Where one stage has larger microbatches, a message has
what one of the other's is. Of ranks that hold the same box, receivers take turns.
Messages are received in the order in which their sender sends them, which its action list says,
those of some passes of each sender ahead of need: so they travel while the rank computes.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from parloom.action_text import AHEAD_BYTES, PASSES_AHEAD
from parloom.runtime.comm import Comm
from parloom.runtime.program import Action, Pipeline
from parloom.runtime.sharding import Box, boxes, local_shape
from parloom.runtime.spans import Spans, waiting_of
from parloom.runtime.work import Work

MICROBATCH_BITS = 16  # of a message's tag; plans have no more microbatches than that
Slices = tuple[slice, ...]
Held = tuple[int, tuple[Box, ...]]
"""A rank and the boxes that it has."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a value that goes from one rank to another, and where it lies on both."""

    sender: int
    receiver: int
    sent: Slices
    received: Slices
    shape: tuple[int, ...]


Pieces = tuple[tuple[Piece, ...], ...]
"""The pieces of each message."""


@dataclass(frozen=True, slots=True)
class Wire:
    """A value between two stages; `backward` is its gradient, which goes from `end` to `begin`."""

    value: str
    begin: int
    end: int
    backward: bool

    @property
    def source(self) -> int:
        """The stage that sends."""
        return self.end if self.backward else self.begin

    @property
    def target(self) -> int:
        """The stage that receives."""
        return self.begin if self.backward else self.end


@dataclass(frozen=True, slots=True)
class Letter:
    """A piece of a value in one of the messages of a wire; after which action it is sent, and which
    one reads it.
    """

    wire: Wire
    message: int
    piece: Piece
    sent: Action
    read: Action


class Transfers:
    """One rank's messages of a step; `actions` are the lists of all ranks."""

    def __init__(
        self,
        pipeline: Pipeline,
        actions: tuple[tuple[Action, ...], ...],
        comm: Comm,
        device: torch.device,
    ) -> None:
        self._pipeline, self._comm, self._device = pipeline, comm, device
        self._crossings = {
            (stage, crossing.value): crossing
            for stage, program in enumerate(pipeline.programs)
            for crossing in (*program.arriving, *program.leaving)
        }
        # What this rank sends and receives, of messages of a wire as many as the larger microbatch
        # has; all others are like these. These are few of all pieces, and no others are looked at
        # again.
        self._leaving: dict[Wire, Pieces] = {}
        self._arriving: dict[Wire, Pieces] = {}
        self._numbers: dict[Wire, int] = {}
        ways: set[tuple[int, int]] = set()
        # By sending stage and direction in the order of sending; by receiving stage and value.
        self._out: dict[tuple[int, bool], list[Wire]] = defaultdict(list)
        self._into: dict[tuple[int, bool, str], list[Wire]] = defaultdict(list)
        for number, wire in enumerate(wires(pipeline)):
            pieces = tuple(
                tuple(self._split(wire, message)) for message in range(max(self._each(wire)))
            )
            ways.update((piece.sender, piece.receiver) for of in pieces for piece in of)
            self._numbers[wire] = number
            self._leaving[wire] = _where(pieces, lambda piece: piece.sender == comm.rank)
            self._arriving[wire] = _where(pieces, lambda piece: piece.receiver == comm.rank)
            self._out[wire.source, wire.backward].append(wire)
            self._into[wire.target, wire.backward, wire.value].append(wire)
        senders = sorted({sender for sender, to in ways if to == comm.rank} - {comm.rank})
        self._order = {sender: list(self._sent_by(sender, actions[sender])) for sender in senders}
        # What a rank has done when its message arrives says which of those to it have arrived.
        others = {rank for way in ways if comm.rank in way for rank in way}
        self._places = {r: {action: i for i, action in enumerate(actions[r])} for r in others}
        comm.connect(ways, device)
        self._spans: Spans | None = None
        self._expected: dict[int, deque[Letter]] = {}
        self._unposted: Counter[tuple[int, Wire, int]] = Counter()
        self._posted: dict[tuple[Wire, int], list[tuple[Work, Tensor, Piece]]] = {}
        self._under_way: dict[int, deque[tuple[int, Work, Tensor]]] = defaultdict(deque)
        self._stays: dict[tuple[Wire, int], list[tuple[Tensor, Piece]]] = {}

    def begin_step(self, spans: Spans | None = None) -> None:
        """Expect all messages of a step; `spans` are told of waits."""
        self._spans = spans
        self._expected = {s: deque(messages) for s, messages in self._order.items() if messages}
        self._unposted = Counter(
            (sender, m.wire, m.message) for sender, of in self._order.items() for m in of
        )

    def end_step(self) -> None:
        """Wait until everything that was sent has left."""
        for work in self.sent():
            work.wait()

    def sent(self) -> list[Work]:
        """Hand over what was sent and may be under way: whoever has it waits for it."""
        found = [work for sent in self._under_way.values() for _, work, _ in sent]
        self._under_way.clear()
        return found

    def receive_ahead(self) -> None:
        """Be ready for all messages of the next passes of every sender, of large ones for fewer."""
        ahead: dict[int, set[Action]] = defaultdict(set)
        held = Counter[int]()
        for (wire, message), posted in self._posted.items():
            sent = _action(wire, wire.source, message // self._each(wire)[0])
            for _, part, piece in posted:
                ahead[piece.sender].add(sent)
                held[piece.sender] += part.nbytes
        for sender, queue in self._expected.items():
            passes = ahead[sender]
            while queue:
                more = len(passes) < PASSES_AHEAD and held[sender] < AHEAD_BYTES
                if queue[0].sent not in passes and not more:
                    break
                passes.add(queue[0].sent)
                held[sender] += self._post(sender)

    def send(self, action: Action, tensors: Mapping[str, Tensor]) -> None:
        """All values that leave a stage with a forward pass, or gradients with a backward pass, by
        the names of the values.
        """
        for wire in self._out[action.stage, action.kind == "B"]:
            self._send(wire, action.microbatch, tensors[wire.value])

    def receive(self, stage: int, value: str, microbatch: int) -> Tensor:
        """A value from the stage that makes it."""
        (wire,) = self._into[stage, False, value]
        return self._receive(wire, microbatch)

    def receive_gradient(self, stage: int, value: str, microbatch: int) -> Tensor:
        """The gradient of a value, summed over the stages that read it."""
        first, *others = self._into[stage, True, value]
        total = self._receive(first, microbatch)
        for wire in others:
            total += self._receive(wire, microbatch)
        return total

    def _each(self, wire: Wire) -> tuple[int, int]:
        """The messages of a wire that a microbatch of its source is, and one of its target."""
        programs = self._pipeline.programs
        counts = [programs[stage].num_microbatches for stage in (wire.source, wire.target)]
        return max(counts) // counts[0], max(counts) // counts[1]

    def _split(self, wire: Wire, message: int) -> Iterator[Piece]:
        """The pieces in which a value, or its gradient, goes over."""
        sent, read = self._each(wire)
        have = self._held(wire.source, wire.value, message // sent)
        return split(have, self._held(wire.target, wire.value, message // read))

    def _held(self, stage: int, value: str, microbatch: int) -> Iterator[Held]:
        """The boxes of a microbatch that each rank of a stage has."""
        mesh = self._pipeline.programs[stage].mesh
        dims = self._crossings[stage, value].spec.dims
        for index, rank in enumerate(self._pipeline.ranks[stage]):
            yield rank, boxes(dims, mesh, mesh.coordinates(index, microbatch))

    def _letters(
        self, wire: Wire, microbatch: int, pieces: Pieces, *, read: bool = False
    ) -> Iterator[Letter]:
        """Some pieces of a microbatch of the stage that sends, or of the one that reads."""
        sent_each, read_each = self._each(wire)
        each = read_each if read else sent_each
        for message in range(microbatch * each, (microbatch + 1) * each):
            sent = _action(wire, wire.source, message // sent_each)
            reads = _action(wire, wire.target, message // read_each)
            for piece in pieces[message % len(pieces)]:
                yield Letter(wire, message, piece, sent, reads)

    def _sent_by(self, sender: int, actions: tuple[Action, ...]) -> Iterator[Letter]:
        """All messages of a rank to this one, in the order in which it sends them."""
        own = {
            wire: _where(pieces, lambda piece: piece.sender == sender)
            for wire, pieces in self._arriving.items()
        }
        for action in (a for a in actions if a.kind in ("F", "B")):
            for wire in self._out[action.stage, action.kind == "B"]:
                yield from self._letters(wire, action.microbatch, own[wire])

    def _tag(self, letter: Letter) -> int:
        """What names a message, for back ends that compare it."""
        return self._numbers[letter.wire] << MICROBATCH_BITS | letter.message

    def _send(self, wire: Wire, microbatch: int, tensor: Tensor) -> None:
        tensor = tensor.detach()
        for letter in self._letters(wire, microbatch, self._leaving[wire]):
            piece = letter.piece
            part = tensor[piece.sent]
            if piece.receiver == self._comm.rank:
                self._stays.setdefault((wire, letter.message), []).append((part, piece))
                continue
            part = _plain(part.contiguous())
            work = self._comm.send(part, piece.receiver, self._tag(letter))
            read = self._places[piece.receiver][letter.read]
            self._under_way[piece.receiver].append((read, work, part))

    def _receive(self, wire: Wire, microbatch: int) -> Tensor:
        spec = self._crossings[wire.target, wire.value].spec
        dtype: torch.dtype = getattr(torch, spec.dtype)
        whole = torch.empty(local_shape(spec.dims), dtype=dtype, device=self._device)
        mine = list(self._letters(wire, microbatch, self._arriving[wire], read=True))
        for letter in mine:
            while self._unposted[letter.piece.sender, wire, letter.message]:
                self._post(letter.piece.sender)
        for message, sent in {letter.message: letter.sent for letter in mine}.items():
            for part, piece in self._stays.pop((wire, message), []):
                whole[piece.received] = part
            for work, part, piece in self._posted.pop((wire, message), []):
                with waiting_of(self._spans):
                    work.wait()
                whole[piece.received] = part
                self._let_go(piece.sender, sent)
        return whole

    def _let_go(self, receiver: int, done: Action) -> None:
        """Free what a rank has read, which has done this: back ends keep it until it is waited for.

        Messages to a rank are read in about the order of sending; those behind one that was not
        read yet stay.
        """
        at, sent = self._places[receiver][done], self._under_way[receiver]
        while sent and sent[0][0] <= at:
            sent.popleft()[1].wait()

    def _post(self, sender: int) -> int:
        """Be ready for the next message of a sender; its bytes."""
        letter = self._expected[sender].popleft()
        wire, piece = letter.wire, letter.piece
        self._unposted[sender, wire, letter.message] -= 1
        spec = self._crossings[wire.target, wire.value].spec
        dtype: torch.dtype = getattr(torch, spec.dtype)
        part = torch.empty(piece.shape, dtype=dtype, device=self._device)
        work = self._comm.receive(_plain(part), sender, self._tag(letter))
        self._posted.setdefault((wire, letter.message), []).append((work, part, piece))
        return part.nbytes


def _where(pieces: Pieces, chosen: Callable[[Piece], bool]) -> Pieces:
    """Those that are chosen, of each message."""
    return tuple(tuple(filter(chosen, of_message)) for of_message in pieces)


def _action(wire: Wire, stage: int, microbatch: int) -> Action:
    """The pass in which a stage sends or reads a value."""
    return Action("B" if wire.backward else "F", stage, microbatch)


def split(have: Iterable[Held], want: Iterable[Held]) -> Iterator[Piece]:
    """The pieces in which the boxes that ranks have go to the ranks that want some of them."""
    holders: dict[tuple[Box, ...], list[int]] = defaultdict(list)
    for rank, held in have:
        holders[held].append(rank)
    for turn, (receiver, wanted) in enumerate(want):
        for held, ranks in holders.items():
            # Of ranks that have the same, one that need not send, or the next in turn.
            sender = receiver if receiver in ranks else ranks[turn % len(ranks)]
            for box in held:
                for other in wanted:
                    piece = _piece(sender, receiver, box, other)
                    if piece is not None:
                        yield piece


def wires(pipeline: Pipeline) -> Iterator[Wire]:
    """All ways of values between stages, there and back."""
    made = {
        (crossing.value, pipeline.replica(stage)): stage
        for stage, program in enumerate(pipeline.programs)
        for crossing in program.leaving
    }
    for stage, program in enumerate(pipeline.programs):
        for crossing in program.arriving:
            for backward in (False, True) if crossing.flows else (False,):
                source = made[crossing.value, pipeline.replica(stage)]
                yield Wire(crossing.value, source, stage, backward)


def _piece(sender: int, receiver: int, have: Box, want: Box) -> Piece | None:
    """What of a box is wanted."""
    starts = tuple(map(max, have.offsets, want.offsets))
    have_ends = (o + n for o, n in zip(have.offsets, have.sizes, strict=True))
    want_ends = (o + n for o, n in zip(want.offsets, want.sizes, strict=True))
    ends = tuple(map(min, have_ends, want_ends))
    if any(start >= end for start, end in zip(starts, ends, strict=True)):
        return None

    def local(box: Box) -> Slices:
        shifts = (here - there for here, there in zip(box.local_offsets, box.offsets, strict=True))
        return tuple(
            slice(start + shift, end + shift)
            for start, end, shift in zip(starts, ends, shifts, strict=True)
        )

    shape = tuple(end - start for start, end in zip(starts, ends, strict=True))
    return Piece(sender, receiver, local(have), local(want), shape)


def _plain(tensor: Tensor) -> Tensor:
    """A view in a dtype that every backend sends."""
    if tensor.is_complex():
        return torch.view_as_real(tensor)
    return tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor
