"""What is drawn, per operator and dtype: support, odds of rare values, mean, spread, distribution.

Draws are made by the decompositions that capture traces and the runtime's `global_draw`. A sample
is compared with its distribution on bins whose edges lie between two numbers of its dtype.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from parloom import runtime as rt
from parloom.capture import capture
from parloom.capture.draws import bounds, uniform
from parloom.capture.spelling import decompositions
from parloom.execute.reference import evaluate
from parloom.execute.verify import Masks
from tests.capture.traps.random_draws import net

aten = torch.ops.aten
DECOMPOSED = decompositions()
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
CHUNK = 2_500_000
NUM_BINS = 64
# Per check the odds of a false alarm are below 1e-6; seeds are fixed.
SIGMAS = 5.0


class Keyed(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Random base operators as the runtime draws them; all others as torch runs them."""

    def __init__(self, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seed, self.count = seed, 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        self.count += 1
        key = str(self.count)
        if function in (aten.rand.default, aten.randn.default):
            kind = function.__name__.partition(".")[0]
            dtype = kwargs.get("dtype") or torch.get_default_dtype()
            return rt.global_draw(self.seed, 0, key, tuple(args[0]), kind, dtype)
        if function is aten.native_dropout.default:
            x, p = args[:2]
            kept = rt.global_mask(self.seed, 0, key, tuple(x.shape), p)
            return x * kept / (1 - p), kept
        return function(*args, **kwargs)


def normal_cdf(x: Tensor) -> Tensor:
    area: Tensor = torch.special.ndtr(x)
    return area


def bernoulli_cdf(p: float, x: Tensor) -> Tensor:
    return (1 - p) * (x >= 0) + p * (x >= 1)


def integer_cdf(n: int, x: Tensor) -> Tensor:
    return ((x.floor() + n + 1) / (2 * n)).clamp(0, 1)


@dataclass(frozen=True)
class Draw:
    """An operator called with `args` over a tensor, and the distribution that it draws from."""

    name: str
    op: Any
    args: tuple[Any, ...]
    mean: float
    deviation: float
    cdf: Callable[[Tensor], Tensor]
    least: float = -math.inf
    most: float = math.inf  # a value that is never reached

    def __str__(self) -> str:
        return self.name

    def chunk(self, dtype: torch.dtype, seed: int, size: int) -> Tensor:
        with Keyed(seed):
            drawn: Tensor = DECOMPOSED[self.op](torch.zeros(size, dtype=dtype), *self.args)
        assert drawn.dtype == dtype
        return drawn

    def chunks(self, dtype: torch.dtype, total: int) -> Iterator[Tensor]:
        for seed in range(total // CHUNK):
            yield self.chunk(dtype, seed, CHUNK)


CONTINUOUS = (
    Draw("rand", aten.rand_like.default, (), 0.5, 12**-0.5, lambda x: x, 0, 1),
    Draw("randn", aten.randn_like.default, (), 0, 1, normal_cdf),
    Draw("uniform", aten.uniform.default, (0.3003, 0.7), 0.50015, 0.3997 * 12**-0.5,
         lambda x: (x - 0.3003) / 0.3997, 0.3003, 0.7),
    Draw("normal", aten.normal_functional.default, (1.0, 0.1), 1, 0.1,
         lambda x: normal_cdf((x - 1) / 0.1)),
    Draw("log_normal", aten.log_normal.default, (0.1, 0.2), math.exp(0.12),
         math.exp(0.12) * math.expm1(0.04) ** 0.5,
         lambda x: normal_cdf((x.clamp(min=0).log() - 0.1) / 0.2), 0),
    Draw("exponential", aten.exponential.default, (2.0,), 0.5, 0.5,
         lambda x: -torch.expm1(-2 * x.clamp(min=0)), 0),
)  # fmt: skip
DISCRETE = (
    Draw("geometric", aten.geometric.default, (0.3,), 1 / 0.3, 0.7**0.5 / 0.3,
         lambda x: 1 - 0.7 ** x.floor().clamp(min=0), 1),
    *(Draw(f"bernoulli {p}", aten.bernoulli.p, (p,), p, (p * (1 - p)) ** 0.5,
           partial(bernoulli_cdf, p), 0, 1.5)
      for p in (0.001, 0.3, 0.9999)),
    *(Draw(f"randint {n}", aten.randint_like.low_dtype, (-n, n), -0.5,
           ((4 * n * n - 1) / 12) ** 0.5,
           partial(integer_cdf, n), -n, n)
      for n in (3, 100)),
)  # fmt: skip


def edges(draw: Draw, dtype: torch.dtype, sample: Tensor) -> Tensor:
    """Some sixty numbers between neighbors in `dtype`, at quantiles of a sample."""
    at = sample.double().quantile(torch.linspace(0, 1, NUM_BINS, dtype=torch.float64)[1:-1])
    low = at.to(dtype).unique()  # type: ignore[no-untyped-call]
    high = torch.nextafter(low, torch.full_like(low, math.inf))
    between: Tensor = (low.double() + high.double()) / 2
    return between


def outcome(draw: Draw, dtype: torch.dtype, chunks: Iterator[Tensor]) -> list[str]:
    """What is wrong with a sample."""
    wrong, count, total, squares = [], 0, 0.0, 0.0
    counted = bins = torch.empty(0)
    zeros = 0
    for chunk in chunks:
        if not count:
            bins = edges(draw, dtype, chunk[:10_000])
            counted = torch.zeros(len(bins) + 1, dtype=torch.float64)
        if not bool(chunk.isfinite().all()):
            wrong.append("not finite")
        wide = chunk.double()
        if float(wide.min()) < draw.least or float(wide.max()) >= draw.most:
            wrong.append(f"support: {float(wide.min())} to {float(wide.max())}")
        counted += torch.bincount(torch.bucketize(wide, bins), minlength=len(counted))
        zeros += int((chunk == 0).sum())
        total += float(wide.sum())
        squares += float((wide - draw.mean).square().sum())
        count += len(chunk)
    mean, deviation = total / count, (squares / count) ** 0.5
    # Rounding to nearest errs to both sides; what is left of it is far below an eps.
    grain = torch.finfo(dtype).eps / 16 * (abs(draw.mean) + draw.deviation)
    if abs(mean - draw.mean) > SIGMAS * draw.deviation / count**0.5 + grain:
        wrong.append(f"mean {mean}, not {draw.mean}")
    if abs(deviation / draw.deviation - 1) > 0.01 + (draw.deviation < 0.05) * 0.1:
        wrong.append(f"deviation {deviation}, not {draw.deviation}")
    reached = torch.cat([torch.zeros(1), draw.cdf(bins).clamp(0, 1), torch.ones(1)])
    expected = count * reached.double().diff()
    if bool((counted[expected == 0] > 0).any()):
        wrong.append("values without any odds")
    counted, expected = counted[expected > 0], expected[expected > 0]
    freedom = len(expected) - 1
    chi = float(((counted - expected).square() / expected).sum())
    if freedom and chi > freedom + SIGMAS * (2 * freedom) ** 0.5 + SIGMAS**2:
        wrong.append(f"chi square {chi:.0f} at {freedom} degrees of freedom")
    if draw in CONTINUOUS and zeros > 20:  # of millions; float32 has one in 2**24
        wrong.append(f"{zeros} zeros")
    return wrong


@pytest.mark.sample(12)
@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("draw", CONTINUOUS, ids=str)
def test_continuous_draws(draw: Draw, dtype: torch.dtype) -> None:
    assert not outcome(draw, dtype, draw.chunks(dtype, 2 * CHUNK))
    if draw.name == "exponential":
        assert all(bool((c > 0).all()) for c in draw.chunks(dtype, CHUNK))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("draw", DISCRETE, ids=str)
def test_discrete_draws(draw: Draw, dtype: torch.dtype) -> None:
    assert not outcome(draw, dtype, draw.chunks(dtype, CHUNK))


# The same check against formulas that draw in the operator's own dtype.


def raw(dtype: torch.dtype) -> Tensor:
    return torch.rand(CHUNK, dtype=dtype, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("name", "formula"),
    [
        ("rand", lambda u: u),
        ("uniform", lambda u: u * 0.3997 + 0.3003),
        ("exponential", lambda u: torch.log1p(-u) / -2),
        ("geometric", lambda u: (torch.log1p(-u) / math.log1p(-0.3)).floor() + 1),
        ("bernoulli 0.001", lambda u: (u < 0.001).to(u.dtype)),
        ("randint 100", lambda u: (u * 200 - 100).floor()),
    ],
)
def test_draws_in_half_precision_are_found(
    name: str, formula: Callable[[Tensor], Tensor], dtype: torch.dtype
) -> None:
    draw = next(d for d in (*CONTINUOUS, *DISCRETE) if d.name == name)
    assert outcome(draw, dtype, iter([formula(raw(dtype))]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bernoulli_of_small_probabilities(dtype: torch.dtype) -> None:
    for p in (1e-4, 1e-3, 1 - 2**-8):
        given = torch.full((CHUNK,), p, dtype=dtype)
        with Keyed(1):
            ones = DECOMPOSED[aten.bernoulli.default](given).double()
        odds = float(given[0])
        assert set(ones.unique().tolist()) <= {0.0, 1.0}
        assert abs(float(ones.mean()) - odds) < SIGMAS * (odds * (1 - odds) / CHUNK) ** 0.5


@pytest.mark.parametrize("p", [1e-6, 2e-4, 1 - 2e-4, 1 - 1e-6])
def test_dropout_near_zero_and_one(p: float) -> None:
    kept = sum(int(rt.global_mask(0, i, "k", (CHUNK,), p).sum()) for i in range(4))
    expected = 4 * CHUNK * (1 - p)
    assert abs(kept - expected) < SIGMAS * (4 * CHUNK * p * (1 - p)) ** 0.5


def test_dropout_of_odds_that_float32_cannot_say() -> None:
    """Float32 draws are zero once in 2**24: they drop 30 of 5 * 10**8 elements where p is 1e-12."""
    assert not any(int((~rt.global_mask(0, i, "k", (CHUNK,), 1e-12)).sum()) for i in range(8))


def category_odds(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    weights = torch.tensor([0.5, 0, 0.001, 0.3, 0, 0.199], dtype=dtype)
    with Keyed(5):
        rows = weights.expand(500_000, 6)
        drawn = DECOMPOSED[aten.multinomial.default](rows, 1)
    counted = torch.bincount(drawn.flatten(), minlength=6).double() / len(rows)
    return counted, weights.double() / weights.double().sum()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_categories(dtype: torch.dtype) -> None:
    counted, odds = category_odds(dtype)
    assert not counted[odds == 0].any()
    assert bool(((counted - odds).abs() <= SIGMAS * (odds / 500_000).sqrt()).all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_categories_without_replacement(dtype: torch.dtype) -> None:
    weights = torch.tensor([0.0, 1e-5, 1, 0, 2, 0.5], dtype=dtype).expand(20_000, 6)
    with Keyed(6):
        drawn = DECOMPOSED[aten.multinomial.default](weights, 4)
    assert bool((drawn.sort(-1)[0] == torch.tensor([1, 2, 4, 5])).all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gumbel_softmax_is_finite(dtype: torch.dtype) -> None:
    """As torch has it: minus the logarithm of exponential draws, added to the logits."""
    logits = torch.tensor([2.0, 0, -2], dtype=dtype).expand(700_000, 3)

    def softmax(exponential: Tensor) -> Tensor:
        return ((logits - exponential.log()) / 0.5).softmax(-1)

    with Keyed(7):
        found = softmax(DECOMPOSED[aten.exponential.default](logits))
    assert bool(found.isfinite().all())
    shares = torch.bincount(found.argmax(-1), minlength=3).double() / len(found)
    odds = logits[0].double().softmax(-1)
    # Two rounded numbers may be equal, and the first is taken.
    ties = torch.finfo(dtype).eps
    assert bool(((shares - odds).abs() < SIGMAS * (odds / len(found)).sqrt() + ties).all())
    if dtype == torch.bfloat16:
        assert not bool(softmax(torch.log1p(-torch.rand_like(logits)) / -1).isfinite().all())


@pytest.mark.parametrize(
    ("low", "high"),
    [(0, 10), (2**60, 2**60 + 10), (0, 2**31), (-(2**40), 2**40), (0, 2**60), (0, 2**63 - 1),
     (-(2**63), -1), (2**53, 2**53 + 3)],
)  # fmt: skip
def test_integers_of_any_range(low: int, high: int) -> None:
    """Their last digits in base 7, and which sixteenth of the range they are in."""
    size, count = 200_000, high - low
    with Keyed(8):
        drawn = DECOMPOSED[aten.randint.low](low, high, [size])
    assert low <= int(drawn.min()) <= int(drawn.max()) < high
    base, part = min(7, count), -(-count // 16)
    digits = [-(-(count - i) // base) / count for i in range(base)]
    parts = [min(part, count - i) / count for i in range(0, count, part)]
    for found, odds in (((drawn - low) % base, digits), ((drawn - low) // part, parts)):
        expected = torch.tensor(odds, dtype=torch.float64)
        shares = torch.bincount(found, minlength=len(odds)).double() / size
        assert bool(((shares - expected).abs() < SIGMAS * (expected / size).sqrt()).all())


@pytest.mark.parametrize("size", [1, 2, 7, 5000])
def test_permutations(size: int) -> None:
    with Keyed(9):
        order = DECOMPOSED[aten.randperm.default](size)
    assert order.sort()[0].tolist() == list(range(size))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("low", "high"),
    [(0.0, 1.0), (0.1, 0.3), (-1.0, 1.0), (1.0, 1.001), (1.0001, 1.0002), (-0.3, -0.1), (5.0, 5.0),
     (0.9, 1.0), (-1e-3, 0.0), (100.0, 1000.0)],
)  # fmt: skip
def test_uniform_stays_in_its_interval(low: float, high: float, dtype: torch.dtype) -> None:
    with Keyed(10):
        drawn = uniform(torch.empty(100_000, dtype=dtype), low, high).double()
    least, most = bounds(low, high, dtype)
    assert least <= float(drawn.min()) <= float(drawn.max()) <= most
    below = torch.nextafter(torch.tensor(most, dtype=dtype), torch.tensor(math.inf, dtype=dtype))
    if least < most:
        assert low <= least < most < high <= float(below)


def test_draws_of_operators_steps_and_seeds_are_independent() -> None:
    size = 1_000_000
    draws = [
        rt.global_draw(seed, step, key, (size,), "randn", torch.float64)
        for seed, step, key in [(0, 0, "a"), (1, 0, "a"), (0, 1, "a"), (0, 0, "b"), (0, 10, "a")]
    ]
    products = torch.stack(draws) @ torch.stack(draws).T / size
    assert float((products - products.diag().diag()).abs().max()) < SIGMAS * size**-0.5


# What a draw is drawn from gets a gradient of zero, as torch has it.


@pytest.mark.parametrize(
    "function",
    [
        lambda h: torch.bernoulli(h.sigmoid()),
        lambda h: torch.empty(6, 4).bernoulli_(h.sigmoid()),
        lambda h: torch.normal(h, h.exp()),
        lambda h: torch.normal(h, 1.0),
        lambda h: torch.normal(1.0, h.exp()),
    ],
)
def test_gradients_are_zero_not_none(function: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    model, batch = net(function)
    graph = capture(model, batch)
    state = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    values = {
        i.value.name: batch[i.target] if i.kind == "batch" else state[i.target]
        for i in graph.inputs
        if i.kind != "constant"
    }
    loss = evaluate(graph, values, dropout=Masks())["loss"]
    assert loss is not None
    loss.backward()  # type: ignore[no-untyped-call]
    model(**batch).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        found = state[name].grad
        assert found is not None, name
        assert bool((found == 0).all()) == bool((parameter.grad == 0).all()) == (name[0] == "a")
