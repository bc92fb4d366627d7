"""Keyed dropout: exact masks do not depend on the layout, fast ones are fair, replicas agree."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from parloom import runtime as rt
from parloom.capture import capture
from parloom.execute.train import say_of_draws
from parloom.runtime.random import Key
from parloom.runtime.sharding import Dims, global_shape, local_shape, without

MESH = rt.Mesh((rt.Axis("micro", 2), *rt.grid({"x": 2, "y": 2}).axes))
LAYOUTS: list[Dims] = [
    ((8,), (6,)),
    (("x", 4), (3, "y")),
    (("micro", 4), (6,)),
    ((2, "micro", "x"), ("y", 3)),
]


def contexts(exact: bool) -> list[rt.Context]:
    return [
        rt.Context(rt.SingleComm(MESH, rank), seed=3, microbatch=micro, exact_random=exact)
        for rank in range(4)
        for micro in range(2)
    ]


@pytest.mark.parametrize("dims", LAYOUTS)
def test_exact_dropout_is_a_slice_of_the_global_one(dims: Dims) -> None:
    full = torch.randn(8, 6, dtype=torch.float64)
    mask = rt.global_mask(3, 5, "block:dropout#0", (8, 6), 0.3)
    expected = full * mask / 0.7
    for ctx in contexts(exact=True):
        ctx.step = 5
        local = rt.take(full, dims, MESH, ctx.coordinates)
        dropped = rt.dropout(local, ctx, 0.3, "block:dropout#0", dims)
        assert torch.allclose(dropped, rt.take(expected, dims, MESH, ctx.coordinates))


def test_masks_are_keyed_by_seed_step_and_operator() -> None:
    masks = [
        rt.global_mask(seed, step, key, (64,), 0.5)
        for seed, step, key in [(0, 0, "a"), (1, 0, "a"), (0, 1, "a"), (0, 0, "b")]
    ]
    assert torch.equal(masks[0], rt.global_mask(0, 0, "a", (64,), 0.5))
    assert not any(torch.equal(masks[0], other) for other in masks[1:])


def test_fast_masks_are_fair_and_differ_between_shards_only() -> None:
    dims: Dims = (("micro", "x", 100), (200,))
    masks: dict[tuple[int, int], list[Tensor]] = {}
    for ctx in contexts(exact=False):
        mask = rt.keep_mask(ctx, "key", dims, 0.25)
        assert mask.shape == (100, 200)
        # 20,000 draws: five standard deviations.
        assert abs(mask.double().mean().item() - 0.75) < 5 * (0.25 * 0.75 / 20_000) ** 0.5
        masks.setdefault((ctx.coordinates["x"], ctx.microbatch), []).append(mask)
    assert all(torch.equal(*replicas) for replicas in masks.values())
    firsts = [replicas[0] for replicas in masks.values()]
    assert all(
        not torch.equal(left, right) for i, left in enumerate(firsts) for right in firsts[:i]
    )


def test_what_all_microbatches_share_is_drawn_alike_in_all() -> None:
    """As one pass over the global batch would: dropout on a weight, say."""
    masks: dict[int, list[Tensor]] = {}
    for ctx in contexts(exact=False):
        mask = rt.keep_mask(ctx, "key", (("x", 100), (200,)), 0.25)
        masks.setdefault(ctx.coordinates["x"], []).append(mask)
    assert all(torch.equal(m, alike[0]) for alike in masks.values() for m in alike)
    assert not torch.equal(masks[0][0], masks[1][0])


def test_dropout_scales_and_has_a_gradient() -> None:
    ctx = rt.Context(rt.SingleComm(rt.grid({"x": 1})), exact_random=True)
    x = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    assert rt.dropout(x, ctx, 0.0, "k", ((5,), (4,))) is x
    assert torch.equal(rt.dropout(x, ctx, 1.0, "k", ((5,), (4,))), torch.zeros_like(x))
    assert torch.autograd.gradcheck(lambda t: rt.dropout(t, ctx, 0.5, "k", ((5,), (4,))), (x,))


@pytest.mark.parametrize("masked", ["none", "causal", "bool", "float"])
@pytest.mark.parametrize("heads", [4, 2])
def test_attention_written_out_is_the_kernel(heads: int, masked: str) -> None:
    """With a dropout so rare that it drops nothing, both paths must agree."""
    ctx = rt.Context(rt.SingleComm(rt.grid({"x": 1})), exact_random=True)
    q = torch.randn(2, 4, 5, 8, dtype=torch.float64)
    k, v = torch.randn(2, 2, heads, 5, 8, dtype=torch.float64)
    keep = torch.ones(5, 5, dtype=torch.bool).tril()
    mask = {"bool": keep, "float": torch.randn(5, 5, dtype=torch.float64)}.get(masked)
    dims: Dims = ((2,), (4,), (5,), (5,))
    results = [
        rt.attention(q, k, v, ctx, mask, p, 0.3, "k", dims, causal=masked == "causal")
        for p in (0.0, 1e-12)
    ]
    expected = F.scaled_dot_product_attention(
        q, k, v, mask, 0.0, masked == "causal", scale=0.3, enable_gqa=heads != 4
    )
    assert all(torch.allclose(result, expected) for result in results)


def test_attention_dropout_is_a_slice_of_the_global_one() -> None:
    q, k, v = torch.randn(3, 2, 4, 5, 8, dtype=torch.float64)
    mesh = rt.grid({"x": 2})

    def attend(ctx: rt.Context, parts: list[Tensor], heads: tuple[int | str, ...]) -> Tensor:
        a, b, c = parts
        return rt.attention(a, b, c, ctx, None, 0.4, None, "k", ((2,), heads, (5,), (5,)))

    whole = attend(rt.Context(rt.SingleComm(rt.grid({"x": 1})), exact_random=True), [q, k, v], (4,))
    for rank in range(2):
        ctx = rt.Context(rt.SingleComm(mesh, rank), exact_random=True)
        parts = [t.narrow(1, 2 * rank, 2) for t in (q, k, v)]
        assert torch.allclose(attend(ctx, parts, ("x", 2)), whole.narrow(1, 2 * rank, 2))


@pytest.mark.parametrize("exact", [True, False])
def test_a_recomputed_block_draws_the_same_mask(exact: bool) -> None:
    """Gradients with recomputation equal those without, dropout included."""

    def block(ctx: rt.Context, prefix: str, x: Tensor, weight: Tensor) -> Tensor:
        return rt.dropout(x * weight, ctx, 0.5, prefix, ((4,), (3,)))

    def gradient(recompute: bool) -> Tensor:
        def forward(
            ctx: rt.Context, batch: dict[str, Tensor], hoisted: tuple[Tensor, ...]
        ) -> rt.Result:
            return rt.Result(ctx.call(block, "block", (batch["x"],), ("w",), recompute).sum())

        mesh = rt.grid({"x": 1})
        made = rt.Program(
            "drop",
            mesh,
            (rt.TensorSpec("x", (4, 3), "float64", ((4,), (3,))),),
            (rt.ParameterSpec("w", (3,), "float64", ((3,),)),),
            forward,
            step=(rt.StepNode("STEP", "update", ()),),
        )
        one = rt.Trainer(
            made,
            {"w": torch.ones(3, dtype=torch.float64)},
            optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1),
            comm=rt.SingleComm(mesh),
            exact_random=exact,
        )
        one.step({"x": torch.arange(12.0, dtype=torch.float64).view(4, 3)})
        return one.state_dict()["w"]

    assert torch.equal(gradient(True), gradient(False))
    assert not torch.equal(gradient(True), torch.ones(3, dtype=torch.float64))


class Attending(nn.Module):
    """Attention within a block that stands twice, with or without dropout."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(4, 2, 8, p) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = (self.a(x) + torch.randn_like(x)).square().mean()
        return loss


@pytest.mark.parametrize(
    ("model", "draws"), [(Attending(0.0), False), (Attending(0.1), True), (Noisy(), True)]
)
def test_users_are_told_that_draws_depend_on_the_plan(
    model: nn.Module, draws: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    graph = capture(model, {"x": torch.randn(3, 4, 4)})
    four, one = (rt.grid({"x": size}) for size in (4, 1))
    for mesh, rank, exact in ((four, 1, False), (four, 0, True), (one, 0, False)):
        say_of_draws(graph, rt.SingleComm(mesh, rank), exact)
        assert not capsys.readouterr().err
    say_of_draws(graph, rt.SingleComm(four, 0), False)
    assert ("depend on the plan" in capsys.readouterr().err) == draws


def test_dropout_keeps_only_its_mask() -> None:
    """One byte an element is kept for the backward pass, and the gradient is the mask's."""
    x = torch.randn(8, 8, dtype=torch.float64, requires_grad=True)
    mask = torch.rand(8, 8) >= 0.5
    kept: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        dropped = rt.apply_mask(x, mask, 0.5)
    assert [t.dtype for t in kept] == [torch.bool]
    dropped.sum().backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None
    assert torch.equal(x.grad, mask.double() * 2)


AXES = {"micro": 2, "x": 2, "y": 2}


@st.composite
def layouts(draw: st.DrawFn) -> Dims:
    """Digits of up to three dims, with the axes anywhere among them, or not at all."""
    dims = [
        [draw(st.integers(1, 3)), draw(st.integers(1, 3))] for _ in range(draw(st.integers(1, 3)))
    ]
    made: list[list[int | str]] = [list(digits) for digits in dims]
    for axis in draw(st.permutations(sorted(AXES))):
        if draw(st.booleans()):
            digits = draw(st.sampled_from(made))
            digits.insert(draw(st.integers(0, len(digits))), axis)
    return tuple(map(tuple, made))


@given(layouts(), st.sampled_from(["rand", "randn"]), st.booleans(), st.booleans())
def test_exact_draws_are_those_of_the_whole_batch_at_the_same_samples(
    dims: Dims, kind: str, as_data: bool, own: bool
) -> None:
    """Whichever rank and microbatch draws, in whichever order, and again for recomputation; where
    microbatches are computed by themselves, of what all of them draw together.
    """
    dims = without(dims, ("micro",)) if own else dims
    shape = global_shape(dims, MESH)
    drawn = (2 * shape[0], *shape[1:]) if own else shape
    whole = rt.global_draw(3, 5, "block:rand#0", drawn, kind, torch.float64)
    key = Key.of("block") + ":rand#0" if as_data else "block:rand#0"
    for ctx in (*contexts(exact=True), *reversed(contexts(exact=True))):
        ctx.step, ctx.own_draws = 5, own
        of_step = whole.chunk(2)[ctx.microbatch] if own else whole
        expected = rt.take(of_step, dims, MESH, ctx.coordinates)
        assert torch.equal(rt.draw(ctx, key, dims, kind, torch.float64), expected)


@pytest.mark.parametrize("dims", [(), ((4,), (3,)), (("x", 2), (3,))])
@pytest.mark.parametrize("exact", [True, False])
def test_microbatches_that_are_computed_by_themselves_draw_by_themselves(
    dims: Dims, exact: bool
) -> None:
    found: dict[int, list[Tensor]] = {}
    for ctx in contexts(exact):
        ctx.own_draws = True
        made = rt.draw(ctx, "key", dims, "rand", torch.float64)
        assert made.shape == local_shape(dims)
        if not ctx.coordinates["x"]:
            found.setdefault(ctx.microbatch, []).append(made)
    assert all(torch.equal(*replicas) for replicas in found.values())
    assert not torch.equal(found[0][0], found[1][0])
