"""The caching allocator: PyTorch's rules on traces by hand, and what holds of every trace."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parloom.cost.allocator import (
    MIB,
    Block,
    CachingAllocator,
    Live,
    changes,
    max_reserved_bytes,
)
from parloom.cost.engine import Outcome, Run
from parloom.cost.tasks import ACTIVATIONS, RECOMPUTATION, Listing, Placed, segment
from parloom.cost.timeline import Memory, Piece, Played, Process, Span

SIZES = st.one_of(st.integers(1, 4096), st.integers(1, 3 * MIB), st.integers(MIB, 64 * MIB))


@pytest.mark.parametrize(
    ("num_bytes", "reserved"),
    [
        (1, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 1, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (11 * MIB, 12 * MIB),
    ],
)
def test_segments_are_as_large_as_pytorch_makes_them(num_bytes: int, reserved: int) -> None:
    allocator = CachingAllocator()
    allocator.allocate(num_bytes)
    assert allocator.max_reserved_bytes == reserved
    assert allocator.max_allocated_bytes >= num_bytes


def test_a_trace_by_hand() -> None:
    """64 MiB go; 40 MiB and 20 MiB are cut from it; 32 MiB then fit nowhere."""
    allocator = CachingAllocator()
    allocator.release(allocator.allocate(64 * MIB))
    first, second = allocator.allocate(40 * MIB), allocator.allocate(20 * MIB)
    assert (first.start, second.start) == (0, 40 * MIB)
    assert allocator.max_reserved_bytes == 64 * MIB
    allocator.allocate(32 * MIB)
    assert allocator.max_reserved_bytes == 96 * MIB
    allocator.release(first)
    allocator.release(second)  # joined: 64 MiB again
    allocator.allocate(63 * MIB + MIB // 2)
    assert allocator.max_reserved_bytes == 96 * MIB


def test_the_smallest_block_that_fits_is_taken_and_little_is_not_split_off() -> None:
    allocator = CachingAllocator()
    blocks = [allocator.allocate(size * MIB) for size in (64, 32, 48)]
    for block in blocks:
        allocator.release(block)
    found = allocator.allocate(31 * MIB + MIB // 2)
    assert found is blocks[1]
    assert found.num_bytes == 32 * MIB  # half a MiB stays with it


def test_two_halves_of_a_segment_do_not_make_room_beside_it() -> None:
    """Segments are never joined: 2 x 30 MiB that are free have no 60 MiB, unless they expand."""
    for expandable, reserved in ((False, 120 * MIB), (True, 60 * MIB)):
        allocator = CachingAllocator(expandable=expandable)
        for block in [allocator.allocate(30 * MIB) for _ in range(2)]:
            allocator.release(block)
        allocator.allocate(60 * MIB)
        assert allocator.max_reserved_bytes == pytest.approx(reserved, abs=20 * MIB)
        assert (allocator.max_reserved_bytes >= 120 * MIB) is not expandable


def test_where_the_driver_has_no_more_free_segments_go_back() -> None:
    def most(capacity: int | None) -> int:
        allocator = CachingAllocator(capacity)
        for block in [allocator.allocate(30 * MIB) for _ in range(2)]:
            allocator.release(block)
        allocator.allocate(60 * MIB)
        return allocator.max_reserved_bytes

    assert most(100 * MIB) == 60 * MIB
    assert most(None) == 120 * MIB


def overlap(blocks: list[Block]) -> bool:
    ordered = sorted((b.start, b.start + b.num_bytes) for b in blocks)
    return any(end > start for (_, end), (start, _) in pairwise(ordered))


@given(st.lists(st.tuples(SIZES, st.integers(0, 6)), max_size=60), st.booleans(), st.booleans())
def test_blocks_are_apart_and_no_more_is_allocated_than_reserved(
    trace: list[tuple[int, int]], expandable: bool, limited: bool
) -> None:
    allocator = CachingAllocator(100 * MIB if limited else None, expandable)
    live: list[Block] = []
    asked = 0
    for size, goes in trace:
        block = allocator.allocate(size)
        assert size <= block.num_bytes < size + 20 * MIB
        live.append(block)
        if goes < len(live):
            allocator.release(live.pop(goes))
        asked = max(asked, sum(b.num_bytes for b in live))
        assert not overlap(live)
        assert allocator.allocated_bytes == sum(b.num_bytes for b in live)
        assert allocator.allocated_bytes <= allocator.reserved_bytes
    assert asked <= allocator.max_allocated_bytes <= allocator.max_reserved_bytes
    for block in live:
        allocator.release(block)
    assert allocator.allocated_bytes == 0


def test_blocks_that_share_memory_would_be_seen() -> None:
    assert overlap([Block(0, 10, True), Block(5, 10, True)])
    assert not overlap([Block(0, 10, True), Block(10, 10, True)])


def test_what_goes_at_once_is_made_of_what_came_one_by_one() -> None:
    allocator = CachingAllocator()
    live = Live(allocator)
    for size in (3 * MIB, 5 * MIB, 7 * MIB):
        live.change(size)
    live.change(-8 * MIB)
    assert allocator.allocated_bytes == 8 * MIB  # 7 went, and nothing of 1
    live.change(-8 * MIB)
    assert allocator.allocated_bytes == 0


def _process(*sizes: tuple[int, ...]) -> Process:
    spans = []
    for listed in sizes:
        out = Listing()
        for size in listed:
            out.run("work", "memory", before=((ACTIVATIONS, size),))
        placed = Placed(segment(out.entries))
        outcome = Outcome([0], [[0] * len(listed)], [], [[]], [[]])
        net = replace(Memory(), net=(0, 0, 0, sum(listed), 0, 0, 0))
        played = Played(0, (), (), (), net, (Piece(0, placed, outcome, {}),))
        spans.append(Span(0, "F", played))
    return Process("", tuple(spans), (0, 0, 0, 0, 0, 0, 8 * MIB))


def test_a_step_is_played_in_the_order_of_its_segments() -> None:
    """40 MiB cannot lie in two times 32 MiB that are free: segments are reserved for all three."""
    apart = _process((32 * MIB, 32 * MIB, -32 * MIB, -32 * MIB), (40 * MIB, -40 * MIB))
    assert max_reserved_bytes(apart) == (20 + 64 + 40) * MIB
    before = _process((80 * MIB, -80 * MIB), (32 * MIB, 40 * MIB, -40 * MIB, -32 * MIB))
    assert max_reserved_bytes(before) == (20 + 80) * MIB


def test_pairs_that_allocate_alike_are_left_out_whatever_else_differs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    forward, backward = (32 * MIB, 8 * MIB), (-8 * MIB, -32 * MIB)
    played: list[int] = []
    change = Live.change

    def counted(self: Live, num_bytes: int) -> None:
        played.append(num_bytes)
        change(self, num_bytes)

    monkeypatch.setattr(Live, "change", counted)
    few = max_reserved_bytes(_process(*(forward, backward) * 8))
    once = len(played)
    assert max_reserved_bytes(_process(*(forward, backward) * 80)) == few
    assert len(played) == 2 * once  # no more of them for ten times the pairs
    other = (32 * MIB, 16 * MIB), (-16 * MIB, -32 * MIB)
    max_reserved_bytes(_process(*(forward, backward, *other) * 40))
    assert len(played) > 4 * once  # pairs that differ are all played


def test_a_device_with_less_reserves_less() -> None:
    apart = _process((32 * MIB, 32 * MIB, -32 * MIB, -32 * MIB), (40 * MIB, -40 * MIB))
    # First 20 + 64, then 20 + 40, and in the next step 32 more, as the first 32 lie in the 40.
    assert max_reserved_bytes(apart, 100 * MIB) == 92 * MIB


def test_memory_that_changes_its_component_stays() -> None:
    out = Listing()
    out.run("recomputed", "memory", after=((RECOMPUTATION, -MIB), (ACTIVATIONS, MIB)))
    out.run("work", "memory", 0, (), ((ACTIVATIONS, MIB), (ACTIVATIONS, 2 * MIB)))
    assert list(changes(segment(out.entries))) == [MIB, 2 * MIB]
    assert isinstance(out.entries[0][0], Run)
