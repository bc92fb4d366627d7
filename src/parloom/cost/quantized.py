"""What collectives cost that send int8 in blocks, as `runtime.quantized` does.

A reduce_scatter is an all_to_all of the blocks and sums on each device, an all_reduce that and an
all_gather of the sums, which are quantized once more.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from parloom.cost.kernels import Kernels
from parloom.cost.works import Exchange
from parloom.ir.mesh import Mesh
from parloom.quantization import payload_bytes

# Bytes of intermediate results for each element, in float32.
WIDE_BYTES = 4
# `encode`, by element: magnitudes (4 bytes read, 4 written), the largest of a block (4), quotients
# (8), rounding (8), and int8 in the payload (5). One kernel each, and five on scales: a quotient, a
# comparison with zero, a copy of which those are filled, and one to the payload.
ENCODED_BYTES, ENCODERS = 33, 10
# `decode`, by element: int8 times scale in one kernel (1 and 4).
DECODED_BYTES = 5
# What was decoded is added to a sum in one more kernel (8 and 4).
ADDED_BYTES = 12


Streamed = tuple[int, int]
"""Bytes that go through memory, and kernels."""


@dataclass(frozen=True, slots=True)
class Coding:
    """Seconds and temporary bytes of quantizing what sets out, and of reading what arrives."""

    encode_s: float
    decode_s: float
    encode_bytes: int
    decode_bytes: int


@dataclass(frozen=True, slots=True)
class Quantized:
    """Prices of quantized collectives on one mesh, of what `price` says of plain ones."""

    price: Callable[[str, tuple[str, ...], float], Exchange]
    kernels: Kernels
    mesh: Mesh

    def exchange(self, kind: str, axes: tuple[str, ...], elements: int, width: int) -> Exchange:
        """A collective on `elements` of so many bytes, counted as `algorithms` counts bytes."""
        ranks, size = self.mesh.size(axes), payload_bytes(elements)
        names = {
            "all_gather": ("all_gather",),
            "reduce_scatter": ("all_to_all",),
            "all_reduce": ("all_to_all", "all_gather"),
        }[kind]
        steps = [self.price(name, axes, size) for name in names]
        # What is sent and received; of an all_reduce, rows of equal length and their sums.
        buffers = size + (size // ranks if kind == "all_gather" else size)
        if kind == "all_reduce":
            buffers += elements * width * (ranks + 1) // ranks
        busy: dict[int, float] = {}
        for level, seconds in (pair for step in steps for pair in step.busy):
            busy[level] = busy.get(level, 0.0) + seconds
        return replace(
            steps[0],
            kind=kind,
            traffic=tuple(traffic for step in steps for traffic in step.traffic),
            seconds=sum(step.seconds for step in steps),
            latency_s=sum(step.latency_s for step in steps),
            scratch_bytes=buffers + max(step.scratch_bytes for step in steps),
            slows=max(step.slows for step in steps),
            busy=tuple(busy.items()),
        )

    def coding(self, kind: str, axes: tuple[str, ...], elements: int, width: int) -> Coding:
        """The work on both sides of such a collective."""
        ranks = self.mesh.size(axes)
        share = elements // ranks
        encoded = share if kind == "all_gather" else elements
        before, after = [_encoding(encoded, width)], []
        if kind != "all_gather":
            after.append(_adding(elements, share, ranks, width))
        if kind == "all_reduce":
            # Rows of zeros that what is sent is copied to, and what they become copied back.
            before.append((3 * width * elements, 2))
            after += [_encoding(share, width), (2 * width * elements, 1)]
        if kind != "reduce_scatter":
            after.append(_reading(elements, ranks, width))
        wider = 1 + (width < WIDE_BYTES)
        sums = 1 if kind == "all_gather" else 2
        return Coding(
            self._seconds(before),
            self._seconds(after),
            wider * WIDE_BYTES * encoded + payload_bytes(encoded),
            sums * WIDE_BYTES * share + payload_bytes(elements),
        )

    def _seconds(self, works: Sequence[Streamed]) -> float:
        return self.kernels.stream_s(sum(size for size, _ in works), sum(n for _, n in works))


def _encoding(elements: int, width: int) -> Streamed:
    """`encode` of elements that wide, which are cast where they are narrow."""
    casts = width < WIDE_BYTES
    return elements * (ENCODED_BYTES + casts * (width + WIDE_BYTES)), ENCODERS + casts


def _adding(elements: int, share: int, ranks: int, width: int) -> Streamed:
    """`_add_up`: each member's row is decoded and, but the first, added; the sum is copied."""
    added = ADDED_BYTES * (elements - share)
    return DECODED_BYTES * elements + added + (WIDE_BYTES + width) * share, 2 * ranks


def _reading(elements: int, ranks: int, width: int) -> Streamed:
    """`_read`: each member's row is decoded and copied to its place."""
    return (DECODED_BYTES + WIDE_BYTES + width) * elements, 2 * ranks
