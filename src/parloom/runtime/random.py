"""Random numbers that do not depend on the layout.

A draw is keyed by (seed, operator, step). The exact mode draws the whole tensor on the CPU and
slices it, so every layout of the same program has the same numbers, and drops the same elements;
the fast mode draws each shard from its own stream. Either way ranks that hold the same shard agree,
and a recomputed forward pass draws the same numbers again.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from parloom.errors import VerifyError
from parloom.runtime.context import Context
from parloom.runtime.sharding import Dims, axes_of, global_shape, local_shape, take

PATH_BYTES = 256
RARE = 2.0**-10
CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Key:
    """An operator's key whose block path is data, for torch.compile.

    So a block is compiled once for all its calls. `code` is the path in UTF-8, padded with zeros;
    the generated code adds the operator.
    """

    code: Tensor
    tail: str = ""

    @classmethod
    def of(cls, prefix: str) -> "Key":
        """The key of a block call; raises `VerifyError` for a path of more than PATH_BYTES."""
        text = prefix.encode()
        if len(text) > PATH_BYTES:
            raise VerifyError(
                f"torch.compile needs module paths of at most {PATH_BYTES} bytes: {prefix}"
            )
        return cls(torch.tensor([*text, *[0] * (PATH_BYTES - len(text))], dtype=torch.uint8))

    def __add__(self, tail: str) -> "Key":
        return Key(self.code, self.tail + tail)


def global_draw(
    seed: int, step: int, key: str, shape: tuple[int, ...], kind: str, dtype: torch.dtype
) -> Tensor:
    """A whole tensor of draws: `rand` from [0, 1) or `randn` from the normal distribution.

    Those of half precision are float32 draws, rounded: never 1.
    """
    return _drawn((seed, key, step), shape, kind, dtype, CPU)


def global_mask(seed: int, step: int, key: str, shape: tuple[int, ...], p: float) -> Tensor:
    """Which elements of a whole tensor of `shape` survive dropout with probability `p`, as bool."""
    return global_draw(seed, step, key, shape, "rand", _mask_dtype(p)) >= p


def keep_mask(ctx: Context, key: str | Key, dims: Dims, p: float) -> Tensor:
    """This rank's shard of the mask of the operator `key`; `dims` are the digits of its dims."""
    return draw(ctx, key, dims, "rand", _mask_dtype(p)) >= p


def _mask_dtype(p: float) -> torch.dtype:
    """Where 24 random bits say the rarer outcome to 1e-4 of its probability, float32."""
    return torch.float32 if min(p, 1 - p) >= RARE else torch.float64


def draw(ctx: Context, key: str | Key, dims: Dims, kind: str, dtype: torch.dtype) -> Tensor:
    """This rank's shard of what the operator `key` draws (see `global_draw` for `kind`)."""
    coordinates = ctx.coordinates
    shape, dims = local_shape(dims), _in_time(ctx, dims)
    if isinstance(key, str) and torch.compiler.is_compiling():
        key = Key(torch.empty(0, dtype=torch.uint8), key)
    device = CPU if ctx.exact_random else ctx.device
    if isinstance(key, Key):
        digits = [digit for of_dim in dims for digit in of_dim]
        sizes = [d if isinstance(d, int) else ctx.mesh[d].size for d in digits]
        places = [-1 if isinstance(d, int) else coordinates[d] for d in digits]
        moment, exact = [ctx.seed, ctx.step], ctx.exact_random
        shard: Tensor = keyed_draw(
            key.code, key.tail, moment, sizes, places, list(shape), kind, dtype, device, exact,
        )  # fmt: skip
        return shard.to(ctx.device)
    if ctx.exact_random:
        whole = global_draw(ctx.seed, ctx.step, key, global_shape(dims, ctx.mesh), kind, dtype)
        return take(whole, dims, ctx.mesh, coordinates).reshape(shape).to(ctx.device)
    # A digit in time is among the owners: what all microbatches share is drawn alike in all.
    owners = tuple(coordinates[axis] for axis in axes_of(dims))
    return _drawn((ctx.seed, key, ctx.step, owners), shape, kind, dtype, device)


def _in_time(ctx: Context, dims: Dims) -> Dims:
    """The digits of a draw that each microbatch makes by itself: those of all of them together."""
    if not ctx.own_draws or ctx.mesh.time is None:
        return dims
    first, *rest = dims or ((),)
    return ((ctx.mesh.time, *first), *rest)


@torch.library.custom_op("parloom::keyed_draw", mutates_args=())
def keyed_draw(  # noqa: PLR0917 - an operator's schema has no structures
    code: Tensor,
    tail: str,
    moment: list[int],
    sizes: list[int],
    places: list[int],
    shape: list[int],
    kind: str,
    dtype: torch.dtype,
    device: torch.device,
    exact: bool,
) -> Tensor:
    """The draw of a `Key` for torch.compile.

    `moment` is seed and step, `sizes` are those of all digits, `places` this rank's coordinates
    (-1 for local digits); all may be numbers that change, so that nothing is compiled again.
    """
    key = bytes(code.tolist()).rstrip(b"\0").decode() + tail
    seed, step = moment
    if exact:
        whole = _drawn((seed, key, step), tuple(sizes), kind, dtype, device)
        index = tuple(slice(None) if place < 0 else place for place in places)
        return whole[index].reshape(shape).clone()
    owners = tuple(place for place in places if place >= 0)
    return _drawn((seed, key, step, owners), tuple(shape), kind, dtype, device)


@keyed_draw.register_fake
def _(  # noqa: PLR0917
    code: Tensor,
    tail: str,
    moment: list[int],
    sizes: list[int],
    places: list[int],
    shape: list[int],
    kind: str,
    dtype: torch.dtype,
    device: torch.device,
    exact: bool,
) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


def _drawn(
    stream: tuple[object, ...],
    shape: tuple[int, ...],
    kind: str,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    generator = torch.Generator(device)
    generator.manual_seed(_stream(*stream))
    function = torch.randn if kind == "randn" else torch.rand
    half = dtype in (torch.bfloat16, torch.float16)
    wide = torch.float32 if half else dtype
    drawn = function(shape, generator=generator, device=device, dtype=wide).to(dtype)
    return drawn.clamp_(max=1 - torch.finfo(dtype).eps / 2) if half and kind == "rand" else drawn


def apply_mask(x: Tensor, mask: Tensor, p: float) -> Tensor:
    """`x` where `mask`, scaled to keep its mean; zero elsewhere."""
    dropped: Tensor = _Masked.apply(x, mask, 0.0 if p >= 1 else 1 / (1 - p))  # type: ignore[no-untyped-call]
    return dropped


class _Masked(torch.autograd.Function):
    """x * mask * scale in one pass; only the one-byte mask is kept for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(mask)
        ctx.scale = scale
        result: Tensor = torch.ops.aten.native_dropout_backward(x, mask, scale)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (mask,) = ctx.saved_tensors
        return torch.ops.aten.native_dropout_backward(gradient, mask, ctx.scale), None, None


def dropout(x: Tensor, ctx: Context, p: float, key: str | Key, dims: Dims) -> Tensor:
    """Dropout of a shard whose whole tensor has the digits `dims`."""
    if p == 0:
        return x
    return apply_mask(x, keep_mask(ctx, key, dims, p), p)


def attention(  # noqa: PLR0917 - torch's own arguments, and where the shard lies
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ctx: Context,
    mask: Tensor | None,
    dropout_p: float,
    scale: float | None,
    key: str | Key,
    dims: Dims,
    causal: bool = False,
) -> Tensor:
    """Scaled dot-product attention; `dims` are the digits of its probabilities [.., q, k].

    Keys with fewer heads than queries are shared by groups of queries. Without dropout this is
    torch's own kernel. With dropout the probabilities are written out, so that their mask is keyed;
    on a GPU in fast mode the fused kernel draws it from a keyed stream, unless it is compiled.
    """
    grouped = min(q.dim(), k.dim()) > 2 and q.shape[-3] > k.shape[-3]
    fused = q.is_cuda and not ctx.exact_random and isinstance(key, str)
    if dropout_p == 0 or fused:
        owners = tuple(ctx.coordinates[axis] for axis in axes_of(_in_time(ctx, dims)))
        with _keyed(q.device, dropout_p, (ctx.seed, key, ctx.step, owners)):
            return F.scaled_dot_product_attention(
                q, k, v, mask, dropout_p, causal, scale=scale, enable_gqa=grouped
            )
    if grouped:
        k = k.repeat_interleave(q.shape[-3] // k.shape[-3], -3)
        v = v.repeat_interleave(q.shape[-3] // v.shape[-3], -3)
    scores = q @ k.transpose(-2, -1) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, float("-inf"))
    elif mask is not None:
        scores = scores + mask
    # a query that may see nothing gets nothing, as torch's kernels have it
    softmax = torch.softmax if mask is None else torch.ops.aten._safe_softmax
    return dropout(softmax(scores, -1), ctx, dropout_p, key, dims) @ v


@contextmanager
def _keyed(device: torch.device, p: float, key: tuple[object, ...]) -> Iterator[None]:
    """Seed the default generator of a GPU for kernels that take no other; a no-op for p = 0."""
    if p == 0:
        yield
        return
    with torch.random.fork_rng(devices=[device]):
        torch.cuda.manual_seed(_stream(*key))
        yield


def _stream(*key: object) -> int:
    """A stable 63-bit hash: Python's own differs between processes."""
    return int.from_bytes(blake2b(repr(key).encode(), digest_size=8).digest()) >> 1
