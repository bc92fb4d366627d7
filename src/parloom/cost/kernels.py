"""What an operator costs on a device: `Kernels.seconds`, forward and backward apart.

    kernel = max(FLOPs / (peak rate x efficiency), bytes / (bandwidth x efficiency)) + launch

A matrix product is its kernels: one forward, one for each gradient. It runs in tiles, as many at a
time as the device has cores, and a tile has a beginning and an end in which it does not multiply:
so small products reach a smaller share of the peak (cuBLAS and CUTLASS documentation: tile and wave
quantization). Attention is one kernel, or products with scores that go through memory. All else
moves bytes: forward, operands and results; backward, what autograd kept, the gradients of results
and the gradients it makes.

A measured table overrides the formulas for the operators that it has.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from statistics import NormalDist
from typing import Protocol

from parloom.cost.attention import SCORES, attention_kernel
from parloom.cost.software import OWN, ROWS, Software
from parloom.ir.graph import DTYPE_BYTES, Arg, TensorSpec
from parloom.ir.mesh import Cluster, Device, Mesh
from parloom.ir.ops.joined import CONVS, LINEARS

SPEC, MEASURED = "spec", "measured"

# Products, and which two operands they multiply. Convolutions are products over patches.
PRODUCTS = {
    "linear": (0, 1), "mm": (0, 1), "bmm": (0, 1), "matmul": (0, 1), "einsum": (0, 1),
    "addmm": (1, 2), "baddbmm": (1, 2), "conv1d": (0, 1), "conv2d": (0, 1), "conv3d": (0, 1),
    "parloom.grouped_mm": (0, 1), LINEARS: (0, 1), CONVS: (0, 1),
}  # fmt: skip
# What runs in the place of products that are one.
JOINED = {LINEARS: "linear", CONVS: "conv2d"}
# Those of layers, whose operands may be cast.
LINEAR = frozenset({"linear", "addmm", "mm", "parloom.grouped_mm", LINEARS})
ATTENTION = "scaled_dot_product_attention"
# Those that read of their first operand the rows, or elements, that they return, and no more.
LOOKUPS = frozenset({"embedding", "gather", "index_select", "index", "take", "parloom.pick"})

# Tiles of a product, and the share of the best tile's rate that each reaches: what it reads from
# on-chip memory per multiplication grows as it shrinks (CUTLASS, efficient GEMM).
TILES = ((256, 128, 1.0), (128, 128, 0.94), (128, 64, 0.8), (64, 64, 0.6))
# Devices of one kind differ in clock rate, and the slowest sets the pace: 5 % among the 8 of a node
# (ml-engineering, compute/accelerator), 2.85 standard deviations of a normal distribution.
SPREAD = 0.05 / 2.85
# Multiplications along k, of 16 bits on matrix units, that take as long as the beginning and the
# end of a tile: operands and results are on their way, at whatever rate it multiplies.
TILE_ENDS = 128
# The share of a wave that is busy where fewer tiles than cores are cut along k (taken to be).
SPLIT_SHARE = 0.7
# The share of their peak that products reach on vector units, which memory feeds fast enough
# (recalled: cuBLAS sgemm on V100, 14 of 15.7 TFLOP/s).
VECTOR_SHARE, VECTOR_DTYPES = 0.9, ("float32", "float64")
# How 8-bit and 4-bit operands are scaled: one scale for a tensor, one for each row and column, or
# for each block of 32 or 128 elements.
TENSOR, ROW, BLOCK = "tensor", "row", "block"
# Casting operands, in passes over them at 16 bits: a scale of the last step or one reduction, read
# and written once; by rows or blocks, each operand twice, as it is read and as its transpose is.
CAST_PASSES = {TENSOR: 1.5, ROW: 3.0, BLOCK: 3.0}
# Where the kernels before them cast activations, and weights are cast once a step: a transpose of
# one byte each, and with blocks the scales and their order (TransformerEngine, cast_transpose).
FUSED_CAST_PASSES = {TENSOR: 0.5, ROW: 1.0, BLOCK: 1.0}
# The share of their peak that 8-bit products reach, against that of 16-bit ones: 0.71 and 0.8 of
# the peaks of an H100 (ml-engineering, compute/accelerator, best shapes).
NARROW, NARROW_SHARE = ("float8", "float4"), 0.88
# Products of operands scaled by row do without fast accumulation (taken to be this share).
ROW_SHARE = 0.6
# Bytes that the rows of 16-bit operands must be multiples of for the matrix units (cuBLAS).
ALIGNED_BYTES = 16
# Passes over scores in memory when attention is not one kernel. Merged: softmax with scale and mask
# reads and writes; backward it reads scores and gradients and writes. Otherwise scale, mask and
# softmax are kernels of their own.
MERGED_SCORE_PASSES, SCORE_PASSES = (2.0, 3.0), (7.0, 8.0)
# Passes over a float32 result where that of one more block of keys is merged: both are read and the
# sum is written.
MERGED_PASSES = 3.0
# Dropout of probabilities reads and writes them, and a mask of a byte each.
DROPOUT_PASSES = 2.5
# Passes over the classes that a cross-entropy makes beside reading them and writing their gradient:
# it writes their logarithms, and in the backward pass a gradient of zeros but one, and reads it.
# Fitted: with `fuses_loss` they count, too, since small models with many classes take that long
# (docs/decisions/0024). Metrics that frameworks take of the logits may be the reason.
CLASS_PASSES = {"cross_entropy_loss": (1.0, 2.0)}

# What an update of operations one by one moves more than a fused one, per state: torch's multi-
# tensor AdamW (decay, lerp, mul, addcmul, sqrt, div, add, addcdiv) moves 21 tensors against 7.
UPDATE_PASSES = 7.0
# Clipping reads gradients for their norm, and reads and writes them (torch.nn.utils, apex).
CLIP_PASSES = 3.0


@dataclass(frozen=True, slots=True)
class Blocks:
    """Blocks of keys that attention computes one after the other: so many as a `whole`, and so many
    under a causal diagonal (`halves`), of `count` that all keys are cut into. `around` ranks have a
    part of the keys each, which comes around.
    """

    whole: int = 1
    halves: int = 0
    count: int = 1
    around: int = 1

    @property
    def met(self) -> int:
        """Blocks that are computed at all."""
        return self.whole + self.halves


@dataclass(frozen=True, slots=True)
class LocalOperator:
    """An operator as one rank runs it: local specs, and its work.

    `attributes` are its other arguments; `blocks` what attention computes of its scores on the
    slowest rank, and with `dropout` it drops probabilities. `wanted` are the operands whose
    gradients are made; `kept_operands` and `kept_results` what autograd kept.
    Inside a merged kernel, operands and results that never reach memory are in `inner_operands`
    and `inner_results`, and only the first operator of a kernel `launches` it. Weights that are
    `in_place` lie as it reads them, which is otherwise as a copy (`JOINED`).
    """

    op: str
    operands: tuple[TensorSpec, ...]
    results: tuple[TensorSpec, ...]
    attributes: tuple[Arg, ...] = ()
    blocks: Blocks = Blocks()
    dropout: bool = False
    flops: float = 0.0
    backward_ratio: float = 1.0
    wanted: tuple[int, ...] = ()
    kept_operands: tuple[int, ...] = ()
    kept_results: tuple[int, ...] = ()
    inner_operands: frozenset[int] = frozenset()
    inner_results: frozenset[int] = frozenset()
    launches: bool = True
    in_place: bool = False

    @property
    def dtype(self) -> str:
        """The dtype it computes in."""
        return next((s.dtype for s in (*self.operands, *self.results) if s.is_float), "float32")


@dataclass(frozen=True, slots=True)
class Seconds:
    """Forward and backward pass of an operator; `weights_s` of the backward pass is the gradient of
    its second factor. `source` is SPEC or MEASURED.
    """

    forward_s: float
    backward_s: float = 0.0
    weights_s: float = 0.0
    source: str = SPEC


@dataclass(frozen=True, slots=True)
class Scores:
    """Bytes that attention's scores take: while it runs forward, from then on, and backward."""

    forward_bytes: int
    kept_bytes: int
    backward_bytes: int


class Measured(Protocol):
    """A table of measured operators."""

    def seconds(self, operator: LocalOperator) -> Seconds | None:
        """What was measured for such an operator; None where nothing was."""


class MeasuredExchanges(Protocol):
    """A table of measured collectives."""

    def exchange(
        self, kind: str, num_bytes: float, group: tuple[tuple[int, int], ...]
    ) -> tuple[float, float, float] | None:
        """Of a collective its seconds, those in which no link is busy, and by how many times their
        time kernels beside it take longer; None where not measured.
        """


Places = Callable[[Mesh, Cluster, str, tuple[str, ...]], tuple[Mesh, ...]]
"""Ways that a mesh may lie in a cluster, among them the fastest one for a collective of a kind over
some axes.
"""


@dataclass(frozen=True, slots=True)
class Kernels:
    """Prices operators on a device under a generation of software.

    Tables override the formulas, also those of collectives (`exchanges`). Linear layers multiply in
    `product_dtype` where one is given (8-bit floats, TF32), to which their operands are cast, with
    `scaling` of TENSOR, ROW or BLOCK. With `autocast` of 16-bit
    operands and results other operators work in 32 bits. Operators take `pace` times as long as on
    a device of mean speed (`slowest`). `types` has the kernels of a
    mixed cluster's device types, by name. With `places` each collective is priced where it is
    fastest, as if a mesh could lie otherwise for each.
    """

    device: Device
    software: Software = OWN
    measured: Measured | None = None
    product_dtype: str | None = None
    scaling: str = TENSOR
    exchanges: MeasuredExchanges | None = None
    autocast: bool = False
    pace: float = 1.0
    types: tuple[tuple[str, "Kernels"], ...] = ()
    places: Places | None = None

    def on(self, device: Device) -> "Kernels":
        """Those of a device type, where it has its own."""
        return dict(self.types).get(device.name, self) if self.types else self

    def seconds(self, operator: LocalOperator) -> Seconds:
        """Forward and backward of an operator."""
        # Alone on a rank, blocks would be those of the first rank, which has the fewest.
        if self.measured is not None and operator.blocks.count == 1:
            found = self.measured.seconds(operator)
            if found is not None:
                return found
        if operator.op in JOINED:
            return self._joined(operator)
        found = self._seconds(operator)
        pace = self.pace
        return Seconds(found.forward_s * pace, found.backward_s * pace, found.weights_s * pace)

    def _seconds(self, operator: LocalOperator) -> Seconds:
        factors = factors_of(operator.op, len(operator.operands))
        if factors is not None and operator.flops:
            return self._product(operator, factors)
        if operator.op == ATTENTION:
            return self._attention(operator)
        return self._moves(operator)

    def _joined(self, operator: LocalOperator) -> Seconds:
        """One product, before which weights are put together unless they lie so, and behind which
        the gradients of its parts are.
        """
        found = self.seconds(replace(operator, op=JOINED[operator.op]))
        weights, made = operator.operands[1].num_bytes, operator.results[0].num_bytes
        copied = 0 if operator.in_place else weights
        backward_s = found.backward_s + self.stream_s(2 * made) if operator.wanted else 0.0
        forward_s = found.forward_s + self.stream_s(2 * copied)
        return replace(found, forward_s=forward_s, backward_s=backward_s)

    def score_bytes(self, operator: LocalOperator) -> Scores | None:
        """Memory of attention's scores; None where no operator of this software has any.

        Softmax keeps what it made, dropout what it left and a mask of bytes (Korthikanti et al.,
        2022, section 4.1). Going forward the products' result is beside it for a moment, going
        backward are its gradient and that of the result, and what was not kept.
        """
        if operator.op != ATTENTION or self.software.attention != SCORES:
            return None
        q, k = operator.operands[:2]
        scores = prod(q.shape[:-1]) * k.shape[-2]
        each = scores * DTYPE_BYTES[q.dtype]
        made = 2 * each + scores if operator.dropout else each
        kept = made if self.software.keeps_scores else 0
        return Scores(each + made - kept, kept, 2 * each + made - kept)

    def stream_s(self, num_bytes: float, launches: int = 1) -> float:
        """A kernel that does nothing but move bytes through memory."""
        return self.pace * self._streamed_s(num_bytes, launches)

    def _streamed_s(self, num_bytes: float, launches: int = 1) -> float:
        if not num_bytes:
            return 0.0
        rate = self.device.memory_bytes_per_s * self.device.efficiency.memory
        return num_bytes / rate + launches * self.software.launch_s

    def update_s(self, num_bytes: float, num_states: int) -> float:
        """The optimizer over `num_bytes` of (master) weights, with as much for each state.

        In one pass it reads gradient, weight and states, and writes weight and states; otherwise
        each of its operations reads and writes (`UPDATE_PASSES`). Gradients may be clipped before.
        """
        passes = 3.0 + 2 * num_states + (CLIP_PASSES if self.software.clips else 0.0)
        if not self.software.fused_optimizer:
            passes += UPDATE_PASSES * num_states
        return self.stream_s(num_bytes * passes)

    def product_s(
        self, m: float, n: float, k: float, dtype: str, batch: float = 1.0, num_bytes: float = 0.0
    ) -> float:
        """`batch` products of [m, k] and [k, n] that move `num_bytes`, without the launch."""
        device, efficiency = self.device, self.device.efficiency
        reached = efficiency.matmul * efficiency.sustained * efficiency.clock
        rate = device.rate(dtype) * reached
        if dtype in NARROW:
            rate *= ROW_SHARE if self.scaling == ROW else NARROW_SHARE
        ends = 0.0
        if device.cores:
            on_vectors = min(device.rate(dtype), device.rate("float32")) * VECTOR_SHARE
            rate = on_vectors if dtype in VECTOR_DTYPES else rate
            matrix_rate = max(device.rate(name) for name in ("float16", "bfloat16")) * reached
            ends = TILE_ENDS * rate / matrix_rate
            # These load one element at a time, also where a tile begins.
            rate = rate if _aligned(n, k, dtype) else on_vectors
        work = 2.0 * batch * m * n * (k + ends) / (rate * self._share(m, n, batch))
        return max(work, num_bytes / (device.memory_bytes_per_s * efficiency.memory))

    def _share(self, m: float, n: float, batch: float) -> float:
        """The share of a large product's rate that one of this size reaches between the ends of its
        tiles.
        """
        if not self.device.cores:
            return 1.0
        best = 0.0
        for rows, columns, share in TILES:
            for high, wide in ((rows, columns), (columns, rows)):
                tiles = batch * math.ceil(m / high) * math.ceil(n / wide)
                used = batch * m * n / (tiles * high * wide)
                waves = tiles / self.device.cores
                busy = waves / math.ceil(waves) if waves > 1 else max(waves, SPLIT_SHARE)
                best = max(best, share * used * busy)
        return best

    def _product(self, operator: LocalOperator, factors: tuple[int, int]) -> Seconds:
        """One product forward, and one for each gradient."""
        first, second = factors
        a, b, out = operator.operands[first], operator.operands[second], operator.results[0]
        batch, m, n, k = product_sizes(operator)
        sizes = a.num_bytes, b.num_bytes, out.num_bytes
        moved, dtype, launch = sum(sizes), operator.dtype, self.software.launch_s
        casts = self._autocast_s(a.num_bytes + b.num_bytes, dtype)
        if self.product_dtype and operator.op in LINEAR:
            dtype = self.product_dtype
            casts = self._casts_s(a.num_bytes, b.num_bytes) if dtype in NARROW else 0.0
        forward = casts + self.product_s(m, n, k, dtype, batch, moved) + launch
        inputs = weights = 0.0
        if first in operator.wanted:
            inputs = casts / 2 + self.product_s(m, k, n, dtype, batch, moved) + launch
        if second in operator.wanted:
            weights = self.product_s(k, n, m, dtype, batch, moved) + launch
        others = sum(
            operator.operands[i].num_bytes + out.num_bytes
            for i in operator.wanted
            if i not in (first, second)
        )
        return Seconds(forward, inputs + weights + self._streamed_s(others), weights)

    def _autocast_s(self, num_bytes: int, dtype: str) -> float:
        """Reading operands of 32 bits and writing those of 16, unless a merged kernel does."""
        if not self.autocast or DTYPE_BYTES.get(dtype) != 2 or self.software.merges:
            return 0.0
        return self._streamed_s(3 * num_bytes)

    def _widening(self, operator: LocalOperator) -> int:
        """How many times the bytes of its tensors an operator moves."""
        return 2 if self.autocast and DTYPE_BYTES.get(operator.dtype) == 2 else 1

    def _casts_s(self, activations: int, weights: int) -> float:
        """Casting the operands of a product."""
        if self.software.fuses_casts:
            return self._streamed_s(FUSED_CAST_PASSES[self.scaling] * activations, 0)
        return self._streamed_s(CAST_PASSES[self.scaling] * (activations + weights))

    def _attention(self, operator: LocalOperator) -> Seconds:
        """Blocks of keys one after the other, and the parts of the result that they give merged."""
        q, k, v = operator.operands[:3]
        out, blocks, launch = operator.results[0], operator.blocks, self.software.launch_s
        share = blocks.around / blocks.count
        rows, keys = q.shape[-2], k.shape[-2] * share
        read = (k.num_bytes + v.num_bytes) * share * blocks.met
        moved = q.num_bytes + out.num_bytes + read
        merges = self._streamed_s(MERGED_PASSES * 4 * out.num_elements, 1) * (blocks.met - 1)
        backward = 2.0 * moved if operator.wanted else 0.0
        if self.software.attention != SCORES:
            launch *= blocks.met
            kernel = attention_kernel(self.software.attention, self.device)
            rate = self.device.rate(operator.dtype) * self.device.efficiency.clock
            each = operator.flops / blocks.count / rate
            fore, aft = (
                sum(
                    each * part / kernel.share(keys, q.shape[-1], causal=causal, backward=way)
                    for part, causal in ((blocks.whole, False), (0.5 * blocks.halves, True))
                    if part
                )
                for way in (False, True)
            )
            back = aft * operator.backward_ratio
            return Seconds(
                max(fore, self._streamed_s(moved)) + launch + merges,
                (max(back, self._streamed_s(backward)) + launch) if backward else 0.0,
            )
        lead, width = prod(q.shape[:-2]), q.shape[-1]
        scores = float(lead * rows * keys * DTYPE_BYTES[q.dtype])
        both = self.product_s(rows, keys, width, operator.dtype, lead, moved / 2 + scores)
        both += self.product_s(rows, width, keys, operator.dtype, lead, moved / 2 + scores)
        fore, aft = MERGED_SCORE_PASSES if self.software.merges else SCORE_PASSES
        if operator.dropout:
            fore, aft = fore + DROPOUT_PASSES, aft + DROPOUT_PASSES
        scores *= self._widening(operator)
        forward = blocks.met * (both + 2 * launch + self._streamed_s(fore * scores))
        back = blocks.met * (2 * both + 4 * launch + self._streamed_s(aft * scores))
        back += 0.0 if self.software.keeps_scores else forward
        return Seconds(forward + merges, back if backward else 0.0)

    def _moves(self, operator: LocalOperator) -> Seconds:
        """An operator that does little with what it moves."""
        operands = [s.num_bytes for s in operator.operands]
        results = [s.num_bytes for s in operator.results]
        looked_up = operands[:1]
        if operator.op in LOOKUPS:
            looked_up = [min(operands[0], results[0])]
        outer = [i for i in range(len(operands)) if i not in operator.inner_operands]
        read = sum([*looked_up, *operands[1:]][i] for i in outer)
        written = [i for i in range(len(results)) if i not in operator.inner_results]
        launches = int(operator.launches)
        fore, aft = CLASS_PASSES.get(operator.op, (0.0, 0.0))
        if self.software.merges == ROWS:
            fore = aft = 0.0
        read += int(fore * operands[0]) if operands else 0
        forward = self._stream(operator, read + sum(results[i] for i in written), launches)
        if not operator.wanted:
            return Seconds(forward)
        back = sum(operands[i] for i in operator.kept_operands if i in outer)
        back += sum(results[i] for i in operator.kept_results if i in written)
        made = [i for i in operator.wanted if i in outer]
        if operator.op in ("add", "_to_copy") or not (made or written):
            # The gradient of a term is that of the sum, where their shapes are the same.
            shapes = {s.shape for s in operator.results}
            made = [i for i in made if operator.operands[i].shape not in shapes or
                    operator.operands[i].dtype != operator.results[0].dtype]  # fmt: skip
            if not made:
                return Seconds(forward)
        back += sum(operands[i] for i in made) + sum(results[i] for i in written)
        back += int(aft * operands[0])
        return Seconds(forward, self._stream(operator, back, launches))

    def _stream(self, operator: LocalOperator, num_bytes: float, launches: int) -> float:
        """Bytes, or where it computes more than that, its FLOPs."""
        rate = self.device.rate(operator.dtype) * self.device.efficiency.matmul
        work = operator.flops / rate
        if not num_bytes and not launches:
            return 0.0
        return max(self._streamed_s(num_bytes * self._widening(operator), launches), work)


def slowest(cluster: Cluster) -> float:
    """How much longer than a mean one the slowest device of a cluster of GPUs takes.

    The expected largest of n draws (Blom, Statistical Estimates, 1958).
    """
    if cluster.backend != "nccl":
        return 1.0
    n = cluster.num_devices
    return 1.0 + SPREAD * NormalDist().inv_cdf((n - 0.375) / (n + 0.25))


def factors_of(op: str, num_operands: int) -> tuple[int, int] | None:
    """Which two operands an operator multiplies; None where it multiplies none.

    An einsum of a single operand adds up or permutes, and one of three is priced by the first two.
    """
    factors = PRODUCTS.get(op)
    return factors if factors is not None and max(factors) < num_operands else None


def batch_of(op: str, operands: Sequence[Sequence[int]], result: Sequence[int]) -> int:
    """How many products an operator is, by its shapes: all that a first operand has in front of a
    matrix are rows of one product (`torch.matmul` folds them).
    """
    factors = factors_of(op, len(operands))
    if op not in ("bmm", "matmul", "baddbmm") or factors is None:
        return 1
    return prod(result[:-2]) if len(operands[factors[1]]) > 2 else 1


def product_sizes(operator: LocalOperator) -> tuple[float, float, float, float]:
    """(batch, m, n, k) of a product."""
    out = operator.results[0].shape
    op = operator.op
    batch = batch_of(op, [spec.shape for spec in operator.operands], out)
    if op == "parloom.grouped_mm":
        batch = operator.operands[1].shape[0]  # each expert has equally many rows
    n = out[1] if op.startswith("conv") and len(out) > 1 else (out[-1] if out else 1)
    m = prod(out) / (batch * n)
    return batch, m, n, operator.flops / (2.0 * batch * m * n)


def _aligned(n: float, k: float, dtype: str) -> bool:
    width = DTYPE_BYTES.get(dtype, 1 if dtype == "float8" else 4)
    return width > 2 or not (n * width % ALIGNED_BYTES or k * width % ALIGNED_BYTES)
