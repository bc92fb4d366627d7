"""Random operators in terms of dropout, `rand` and `randn`, as decompositions that torch traces.

These three are keyed by their place in the program, so that every layout draws the same. Where a
draw is transformed or compared it is float32 at least, and float64 where its smallest values
matter; the cast to the operator's dtype comes last. A draw in bfloat16 is zero in 0.2 % of all
cases: its logarithm is infinite, and it is below 0.001 twice as often as it should be.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
LEAST = 2.0**-54  # below the smallest draw that is not zero, 2**-53
ONE_DRAW = 2**32  # integers that 53 random bits choose among with equal odds, to 2**-21
TWO_DRAWS = 2**63


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype that a draw is scaled in."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def fine(shape: Sequence[int], device: object) -> Tensor:
    """Uniform draws of 53 bits."""
    return torch.rand(shape, dtype=torch.float64, device=device)  # type: ignore[call-overload,no-any-return]


def linked(drawn: Tensor, *operands: Tensor) -> Tensor:
    """`drawn` with a gradient of zero for each operand, as torch has it: zero, not None."""
    for x in operands:
        if x.is_floating_point():
            drawn = drawn + (x.sign() * 0).to(drawn.dtype)
    return drawn


def bernoulli(x: Tensor, p: float = 0.5, *, generator: object = None) -> Tensor:
    """Ones with probability p: where dropout of ones keeps them."""
    kept, _ = torch.native_dropout(torch.ones(x.shape, device=x.device), 1 - p, True)
    return (kept != 0).to(x.dtype)


def bernoulli_of(p: Tensor, *, generator: object = None) -> Tensor:
    """Ones with the probabilities in a tensor."""
    return bernoulli_like(p, p)


def bernoulli_like(x: Tensor, p: Tensor, *, generator: object = None) -> Tensor:
    """The same in the shape and dtype of another tensor."""
    return linked((fine(x.shape, x.device) < p.detach()).to(x.dtype), p)


def uniform(x: Tensor, low: float = 0.0, high: float = 1.0, *, generator: object = None) -> Tensor:
    """Uniform from `low` on and below `high`, also when rounded."""
    most = torch.finfo(x.dtype).max
    if not -most <= low <= high <= most:
        raise RuntimeError(
            f"uniform_ expects from <= to, finite in {x.dtype}, but found from={low}, to={high}"
        )
    drawn = torch.rand(x.shape, dtype=wide(x.dtype), device=x.device) * (high - low) + low
    return drawn.to(x.dtype).clamp(*bounds(low, high, x.dtype))


def bounds(low: float, high: float, dtype: torch.dtype) -> tuple[float, float]:
    """The least number of `dtype` from `low` on, and the largest one below `high`.

    Where there is none between the two, both are what `low` rounds to.
    """
    step = spacing(low, dtype)
    least = math.ceil(low / step) * step
    below = spacing(high, dtype) / (2 if high > 0 and math.frexp(high)[0] == 0.5 else 1)
    most = (math.ceil(high / below) - 1) * below
    return (least, most) if least <= most else (round(low / step) * step,) * 2


def spacing(value: float, dtype: torch.dtype) -> float:
    """From a number's place in `dtype` to the next one away from zero."""
    known = torch.finfo(dtype)
    binade = math.ldexp(0.5, math.frexp(value)[1]) if value else 0.0
    return max(binade, known.smallest_normal) * known.eps


def normal(x: Tensor, mean: float = 0.0, std: float = 1.0, *, generator: object = None) -> Tensor:
    """Normal of a mean and a deviation."""
    return scaled_normal(x, mean, std).to(x.dtype)


def scaled_normal(x: Tensor, mean: float, std: float) -> Tensor:
    """The same before it is rounded."""
    return torch.randn(x.shape, dtype=wide(x.dtype), device=x.device) * std + mean


def normal_of_tensors(
    mean: Tensor | float, std: Tensor | float = 1.0, *, generator: object = None
) -> Tensor:
    """Normal of a mean and a deviation for each element, which get no gradient."""
    given = [t for t in (mean, std) if isinstance(t, Tensor)]
    shape = torch.broadcast_shapes(*(t.shape for t in given))  # type: ignore[no-untyped-call]
    drawn = torch.randn(shape, dtype=wide(given[0].dtype), device=given[0].device)
    mean, std = (t.detach() if isinstance(t, Tensor) else t for t in (mean, std))
    return linked((drawn * std + mean).to(given[0].dtype), *given)


def log_normal(
    x: Tensor, mean: float = 1.0, std: float = 2.0, *, generator: object = None
) -> Tensor:
    """What has a normal logarithm."""
    return scaled_normal(x, mean, std).exp().to(x.dtype)


def standard_exponential(x: Tensor) -> Tensor:
    """Exponential of rate 1 in float64, by the inverse of its distribution; never zero."""
    return -torch.log1p(-fine(x.shape, x.device).clamp(min=LEAST))


def geometric(x: Tensor, p: float, *, generator: object = None) -> Tensor:
    """Trials up to the first success, by the inverse of their distribution."""
    return ((standard_exponential(x) / -math.log1p(-p)).floor() + 1).to(x.dtype)


def exponential(x: Tensor, rate: float = 1.0, *, generator: object = None) -> Tensor:
    """Exponential; never zero, also when rounded."""
    drawn = (standard_exponential(x) / rate).to(x.dtype)
    least = spacing(0.0, x.dtype)
    return drawn.clamp(min=least) if LEAST / rate < least else drawn


def normal_of_shape(
    mean: float, std: float, shape: Sequence[int], *, generator: object = None, **options: Any
) -> Tensor:
    """Normal of a mean and a deviation, of a shape that is given."""
    dtype = options.get("dtype") or torch.get_default_dtype()
    return normal(torch.empty(shape, dtype=dtype, device=options.get("device")), mean, std)


def randint(low: int, high: int, shape: Sequence[int], **options: Any) -> Tensor:
    """Uniform integers: of 53 random bits, or of 63 where the range has more than 2**32."""
    dtype = options.get("dtype") or torch.int64
    count, device = high - low, options.get("device")
    if not 0 < count < TWO_DRAWS:
        raise RuntimeError(
            f"randint draws from 1 to 2**63 - 1 integers, not from {low} below {high}: {count}"
        )
    if not dtype.is_floating_point and dtype != torch.bool:
        held = torch.iinfo(dtype)
        if low < held.min or high - 1 > held.max:
            raise RuntimeError(f"randint: {low} to {high - 1} is out of bounds for {dtype}")
    if count <= ONE_DRAW:
        drawn = (fine(shape, device) * count).floor().to(torch.int64)
    else:
        upper, lower = (
            (fine(shape, device) * 2**bits).floor().to(torch.int64) for bits in (31, 32)
        )
        drawn = (upper * 2**32 + lower) % count
    return (drawn + low).to(dtype)


def randint_like(x: Tensor, high: int, **options: Any) -> Tensor:
    """Uniform integers of the shape and dtype of a tensor."""
    return randint_between(x, 0, high, **options)


def randint_between(x: Tensor, low: int, high: int, **options: Any) -> Tensor:
    """The same from `low` on."""
    dtype = options.get("dtype") or x.dtype
    return randint(low, high, x.shape, dtype=dtype, device=x.device)


def randint_below(high: int, shape: Sequence[int], **options: Any) -> Tensor:
    """Uniform integers from zero on."""
    return randint(0, high, shape, **options)


def randperm(size: int, **options: Any) -> Tensor:
    """The order of uniform draws."""
    drawn = fine([size], options.get("device"))
    return torch.sort(drawn)[1].to(options.get("dtype") or torch.int64)


def multinomial(
    weights: Tensor, samples: int, replacement: bool = False, *, generator: object = None
) -> Tensor:
    """Largest of weights over exponential draws, which is how torch draws without replacement."""
    if samples != 1 and replacement:
        return NotImplemented  # type: ignore[no-any-return]
    ratios = weights.detach().to(torch.float64) / standard_exponential(weights)
    return torch.topk(ratios, samples, -1)[1]


DRAWS: Mapping[Any, Callable[..., Any]] = MappingProxyType(
    {
        aten.bernoulli.p: bernoulli,
        aten.bernoulli.default: bernoulli_of,
        aten.bernoulli.Tensor: bernoulli_like,
        aten.uniform.default: uniform,
        aten.normal_functional.default: normal,
        aten.normal.float_float: normal_of_shape,
        aten.normal.Tensor_Tensor: normal_of_tensors,
        aten.normal.Tensor_float: normal_of_tensors,
        aten.normal.float_Tensor: normal_of_tensors,
        aten.log_normal.default: log_normal,
        aten.geometric.default: geometric,
        aten.exponential.default: exponential,
        aten.randint.low: randint,
        aten.randint.default: randint_below,
        aten.randint_like.default: randint_like,
        aten.randint_like.low_dtype: randint_between,
        aten.randperm.default: randperm,
        aten.multinomial.default: multinomial,
    }
)
