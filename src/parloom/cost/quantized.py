"""What collectives cost that send int8 in blocks, as `runtime.quantized` does.

A reduce_scatter is an all_to_all of the blocks and sums on each device, an all_reduce that and an
all_gather of the sums, which are quantized once more.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from parloom.cost.kernels import Kernels
from parloom.cost.works import Exchange
from parloom.ir.mesh import Mesh
from parloom.quantization import payload_bytes

# Bytes that go through memory for each element: quantizing reads magnitudes, divides, rounds and
# packs; what arrives is multiplied by scales and added, or copied to its place.
ENCODED_BYTES, DECODED_BYTES = 33, 17
ENCODERS, DECODERS = 6, 2
# Bytes of intermediate results for each, in float32.
WIDE_BYTES = 4


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
        share = elements // self.mesh.size(axes)
        encoded = share if kind == "all_gather" else elements
        again = share if kind == "all_reduce" else 0
        received = elements * (2 if kind == "all_reduce" else 1)
        wider = 1 + (width < WIDE_BYTES)
        sums = 1 if kind == "all_gather" else 2
        return Coding(
            self.kernels.stream_s(ENCODED_BYTES * encoded, ENCODERS),
            self.kernels.stream_s(DECODED_BYTES * received + ENCODED_BYTES * again, DECODERS),
            wider * WIDE_BYTES * encoded + payload_bytes(encoded),
            sums * WIDE_BYTES * share + payload_bytes(elements),
        )
