"""PyTorch's caching allocator, played on the memory events of a simulated step.

`torch.cuda` keeps memory that was freed in segments, and gives it out again in pieces; the most
that it has ever asked the driver for is `max_memory_reserved`. The rules are those that PyTorch
documents (notes on CUDA semantics, "Memory management"; `c10/cuda/CUDACachingAllocator`):

- sizes are rounded up to 512 bytes;
- requests of at most 1 MiB come from segments of 2 MiB, those below 10 MiB from segments of 20 MiB,
  larger ones from segments of their own, rounded up to 2 MiB;
- the smallest free piece that is large enough is taken, and what is left of it is split off where
  that is 512 bytes or more (small pool) or more than 1 MiB (large pool);
- neighbors that are free are joined;
- where the driver has no more, segments that are wholly free go back to it first;
- with `expandable_segments` all pieces of a pool lie in one range that grows by 2 MiB or 20 MiB.

Events are those of the timeline's segments, in the order of the program. They tell sizes, not
tensors: of live tensors of one size the youngest goes first. Approximations, which keep a step
below 0.1 s: memory that is held all along comes first and in one piece for each component; of a
segment that was played `FULL_PLAYS` times only what it leaves and frees is played; pairs of actions
that repeat the two before them are played `ROUNDS` times more; on one stream, so that no tensor of
another stream is kept from being used again. Where memory runs out although free segments went
back, more than there is counts as reserved.
"""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from parloom.cost.tasks import Segment
from parloom.cost.timeline import Process, Span

MIB = 1 << 20
ROUND_BYTES = 512
SMALL_BYTES, SMALL_SEGMENT_BYTES = MIB, 2 * MIB
LARGE_SEGMENT_BYTES, LARGE_BYTES, ROUND_LARGE_BYTES = 20 * MIB, 10 * MIB, 2 * MIB

FULL_PLAYS = 2
ROUNDS = 2
STEPS = 2  # the second one finds what the first one left


def rounded(num_bytes: int, unit: int) -> int:
    """The next multiple of `unit`."""
    return -(-num_bytes // unit) * unit


@dataclass(slots=True, eq=False)
class Block:
    """A piece of a segment, with its neighbors there."""

    start: int
    num_bytes: int
    small: bool
    free: bool = False
    before: "Block | None" = None
    after: "Block | None" = None


Free = tuple[int, int]
"""(bytes, start) of a free block."""


@dataclass(slots=True)
class CachingAllocator:
    """Segments and their blocks; `capacity_bytes` is what the driver has, None for no limit.

    `reserved_bytes` and `allocated_bytes` are of now, the `max_` ones the most there ever was.
    """

    capacity_bytes: int | None = None
    expandable: bool = False
    reserved_bytes: int = 0
    allocated_bytes: int = 0
    max_reserved_bytes: int = 0
    max_allocated_bytes: int = 0
    _free: tuple[list[Free], list[Free]] = field(default_factory=lambda: ([], []))
    _blocks: dict[int, Block] = field(default_factory=dict)  # free ones, by start
    _last: list[Block | None] = field(default_factory=lambda: [None, None])
    _end: int = 0

    def allocate(self, num_bytes: int) -> Block:
        """A block for a tensor of so many bytes."""
        size = rounded(max(1, num_bytes), ROUND_BYTES)
        small = size <= SMALL_BYTES
        free = self._free[small]
        at = bisect_left(free, (size, 0))
        block = self._taken(*free[at]) if at < len(free) else self._segment(size, small)
        left = block.num_bytes - size
        if left >= ROUND_BYTES if small or self.expandable else left > SMALL_BYTES:
            self._split(block, size)
        block.free = False
        self.allocated_bytes += block.num_bytes
        self.max_allocated_bytes = max(self.max_allocated_bytes, self.allocated_bytes)
        return block

    def release(self, block: Block) -> None:
        """The tensor of a block is gone."""
        self.allocated_bytes -= block.num_bytes
        before, after = block.before, block.after
        if before is not None and before.free:
            self._taken(before.num_bytes, before.start)
            block.start, block.num_bytes = before.start, before.num_bytes + block.num_bytes
            block.before = before.before
            if block.before is not None:
                block.before.after = block
        if after is not None and after.free:
            self._taken(after.num_bytes, after.start)
            block.num_bytes += after.num_bytes
            block.after = after.after
            if block.after is not None:
                block.after.before = block
            if self._last[block.small] is after:
                self._last[block.small] = block
        self._give(block)

    def _taken(self, num_bytes: int, start: int) -> Block:
        """A free block that is not free any more."""
        block = self._blocks.pop(start)
        free = self._free[block.small]
        del free[bisect_left(free, (num_bytes, start))]
        return block

    def _give(self, block: Block) -> None:
        block.free = True
        self._blocks[block.start] = block
        insort(self._free[block.small], (block.num_bytes, block.start))

    def _split(self, block: Block, size: int) -> None:
        rest = Block(block.start + size, block.num_bytes - size, block.small, before=block)
        rest.after, block.after, block.num_bytes = block.after, rest, size
        if rest.after is not None:
            rest.after.before = rest
        if self._last[block.small] is block:
            self._last[block.small] = rest
        self._give(rest)

    def _segment(self, size: int, small: bool) -> Block:
        """A new segment, or with expandable ones more of the range."""
        if self.expandable:
            return self._grown(size, small)
        if small:
            length = SMALL_SEGMENT_BYTES
        else:
            length = LARGE_SEGMENT_BYTES if size < LARGE_BYTES else rounded(size, ROUND_LARGE_BYTES)
        self._reserve(length)
        block = Block(self._end, length, small)
        self._end += length + 1  # neighbors of other segments are none
        return block

    def _grown(self, size: int, small: bool) -> Block:
        last = self._last[small]
        page = SMALL_SEGMENT_BYTES if small else LARGE_SEGMENT_BYTES
        if last is not None and last.free:
            length = rounded(size - last.num_bytes, page)
            self._reserve(length)
            self._taken(last.num_bytes, last.start)
            last.num_bytes += length
            return last
        length = rounded(size, page)
        self._reserve(length)
        # Ranges of the two pools are far from each other.
        start = (1 << 60 if small else 0) if last is None else last.start + last.num_bytes
        block = Block(start, length, small, before=last)
        if last is not None:
            last.after = block
        self._last[small] = block
        return block

    def _reserve(self, length: int) -> None:
        limit = self.capacity_bytes
        if limit is not None and self.reserved_bytes + length > limit and not self.expandable:
            self._empty()
        self.reserved_bytes += length
        self.max_reserved_bytes = max(self.max_reserved_bytes, self.reserved_bytes)

    def _empty(self) -> None:
        """Segments that are wholly free go back to the driver."""
        for block in [b for b in self._blocks.values() if b.before is None and b.after is None]:
            self._taken(block.num_bytes, block.start)
            self.reserved_bytes -= block.num_bytes


@dataclass(slots=True)
class Live:
    """Tensors that live, told apart by size alone: of equal ones the youngest goes first."""

    allocator: CachingAllocator
    _by_size: dict[int, list[Block]] = field(default_factory=dict)

    def change(self, num_bytes: int) -> None:
        """A tensor of so many bytes comes, or of minus so many goes."""
        if num_bytes > 0:
            block = self.allocator.allocate(num_bytes)
            self._by_size.setdefault(num_bytes, []).append(block)
        elif num_bytes < 0:
            self._go(-num_bytes)

    def _go(self, num_bytes: int) -> None:
        """One of that size, or several that add up to no more than it, the largest ones first."""
        if self._by_size.get(num_bytes):
            self.allocator.release(self._by_size[num_bytes].pop())
            return
        left = num_bytes
        for size in sorted((s for s, blocks in self._by_size.items() if blocks), reverse=True):
            blocks = self._by_size[size]
            while blocks and size <= left:
                self.allocator.release(blocks.pop())
                left -= size


def max_reserved_bytes(
    process: Process, capacity_bytes: int | None = None, *, expandable: bool = False
) -> int:
    """The most that the allocator reserves for a device's steps; no less than its peak."""
    allocator = CachingAllocator(capacity_bytes, expandable)
    live = Live(allocator)
    for size in process.base:
        live.change(size)
    spans = list(_without_repeats(process.spans))
    traces: dict[Segment, tuple[int, ...]] = {}
    nets: dict[Segment, tuple[int, ...]] = {}
    for _ in range(STEPS):
        plays: Counter[Segment] = Counter()
        for span in spans:
            for piece in span.played.pieces:
                segment = piece.placed.segment
                if segment not in traces:
                    traces[segment] = tuple(changes(segment))
                    nets[segment] = tuple(_net(traces[segment]))
                plays[segment] += 1
                known = traces if plays[segment] <= FULL_PLAYS else nets
                for size in known[segment]:
                    live.change(size)
    return max(allocator.max_reserved_bytes, process.memory.peak)


def changes(segment: Segment) -> Iterator[int]:
    """Sizes of tensors that come (above 0) and go, in the order of the program.

    What only moves from one component to another stays where it is.
    """
    for note in segment.notes:
        for listed in (note.before, note.after):
            if len(listed) == 2 and not sum(size for _, size in listed):
                continue
            yield from (size for _, size in listed if size)


def _net(trace: Sequence[int]) -> Iterator[int]:
    """What a trace frees of what was there, and what it leaves, in this order."""
    left: Counter[int] = Counter()
    freed: list[int] = []
    for size in trace:
        if size > 0:
            left[size] += 1
        elif left[-size]:
            left[-size] -= 1
        else:
            freed.append(size)
    yield from freed
    yield from left.elements()


def _without_repeats(spans: Iterable[Span]) -> Iterator[Span]:
    """Spans, of which pairs that repeat the pair before them come `ROUNDS` times more.

    Two plays are the same here where they allocate and free the same, however long each took.
    """
    listed = tuple(spans)
    traces: dict[int, tuple[int, ...]] = {}
    plays: dict[int, tuple[tuple[int, ...], ...]] = {}
    for span in listed:
        if id(span.played) not in plays:
            segments = [piece.placed.segment for piece in span.played.pieces]
            for segment in segments:
                if id(segment) not in traces:
                    traces[id(segment)] = tuple(changes(segment))
            plays[id(span.played)] = tuple(traces[id(segment)] for segment in segments)
    made = [plays[id(span.played)] for span in listed]
    index = repeats = 0
    while index < len(listed):
        played = [span.played for span in listed[index - 2 : index + 2]] if index >= 2 else []
        same = len(played) == 4 and made[index - 2 : index] == made[index : index + 2]
        if same and not sum(sum(p.memory.net) for p in played[2:]):
            repeats += 1
            if repeats > ROUNDS:
                index += 2
                continue
        elif not same:
            repeats = 0
        yield listed[index]
        index += 1
