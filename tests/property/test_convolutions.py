"""Convolutions and pooling over random geometries: what entries compute, against torch, and along
which factors their calls are one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from parloom.ir.graph import Arg, Node, Ref, TensorSpec, Value
from parloom.ir.ops import OPS
from parloom.ir.ops.exact import Given
from parloom.rewrite.horizontal import Along, Kind, joinable, refusal
from parloom.rewrite.merge import refusal as merge_refusal
from parloom.rewrite.merge import rule_of
from parloom.rewrite.modular import Ints, Numbers
from parloom.rewrite.rules import difference
from parloom.rewrite.terms import Arg as TermArg
from tests.property.test_exact import drawn, modular
from tests.property.test_horizontal import others

DTYPE = "float64"
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same'")


@dataclass(frozen=True)
class Windows:
    """How the windows of a call move over an image."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...] | str
    dilation: tuple[int, ...]
    image: tuple[int, ...]


def windows(rng: Random, largest: int = 4, pools: bool = False) -> Windows:
    """Over one to three dims; as torch has them, zeros of a pool are at most half of its window."""
    count = rng.randint(1, 3)

    def each(low: int, high: int) -> tuple[int, ...]:
        return tuple(rng.randint(low, high) for _ in range(count))

    kernel, stride, dilation = each(1, 3 if count == 3 else largest), each(1, 3), each(1, 3)
    padding: tuple[int, ...] | str = tuple(
        rng.randint(0, k // 2 if pools else k * d) for k, d in zip(kernel, dilation, strict=True)
    )
    if not pools and rng.random() < 0.5:
        padding = rng.choice(("same", "valid"))
        stride = (1,) * count if padding == "same" else stride
    image = tuple((k - 1) * d + rng.randint(1, 5) for k, d in zip(kernel, dilation, strict=True))
    return Windows(kernel, stride, padding, dilation, image)


def convolution(rng: Random) -> tuple[str, list[list[int]], tuple[Any, ...]]:
    """An operator, the shapes of its operands, a bias in every other, and its other arguments."""
    own = windows(rng)
    groups, width, out = rng.choice((1, 1, 2, 3)), rng.randint(1, 3), rng.randint(1, 3)
    lead = [rng.randint(2, 3)] if rng.random() < 0.8 else []
    shapes = [[*lead, groups * width, *own.image], [groups * out, width, *own.kernel]]
    if rng.random() < 0.5:
        shapes.append([groups * out])
    rest = (own.stride, own.padding, own.dilation, groups)
    return f"conv{len(own.kernel)}d", shapes, rest


def pool(rng: Random, mean: bool) -> tuple[str, list[list[int]], tuple[Any, ...]]:
    own = windows(rng, 3, pools=True)
    assert isinstance(own.padding, tuple)
    rest = (own.kernel, own.stride, own.padding, *(() if mean else (own.dilation,)))
    name = f"{'avg' if mean else 'max'}_pool{len(own.kernel)}d"
    return name, [[2, 3, *own.image]], rest


def call(name: str, shapes: Sequence[Sequence[int]], rest: tuple[Arg, ...]) -> tuple[Node, Any]:
    """A call as a node, and the specs of its operands."""
    specs = {f"t{i}": TensorSpec(tuple(shape), DTYPE) for i, shape in enumerate(shapes)}
    args: list[Arg] = [Ref(own) for own in specs]
    if name.startswith("conv") and len(args) < 3:
        args.append(None)
    given = [torch.empty(spec.shape, device="meta") for spec in specs.values()]
    made = applied(name, given, rest).shape
    result = Value("y", TensorSpec(tuple(made), DTYPE))
    return Node(name, (*args, *rest), (), (result,), "m"), specs


def applied(name: str, given: Sequence[torch.Tensor], rest: tuple[Any, ...]) -> torch.Tensor:
    """What torch makes of it."""
    function = getattr(torch.nn.functional, name)
    if name.startswith("max"):
        kernel, stride, padding, *dilation = rest
        return function(*given, kernel, stride, padding, *dilation)  # type: ignore[no-any-return]
    bias = [None] * (name.startswith("conv") and len(given) < 3)
    return function(*given, *bias, *rest)  # type: ignore[no-any-return]


@pytest.mark.parametrize("seed", range(40))
def test_convolutions_compute_what_torch_does(seed: int) -> None:
    name, shapes, rest = convolution(Random(seed))
    given = [drawn(shape, np.random.default_rng(seed)) for shape in shapes]
    computes = OPS[name].computes
    assert computes is not None
    bias = (None,) * (3 - len(given))
    (found,) = computes(Numbers(), Given((*map(modular, given), *bias, *rest)))
    assert (found == modular(applied(name, given, rest))).all()


class Largest(Numbers):
    """Numbers, of which the largest is known."""

    def opaque(self, name: str, *parts: Ints) -> Ints:
        if name == "max":
            return np.max(parts, axis=0)  # type: ignore[no-any-return]
        half = len(parts) // 2
        counted = zip(parts[:half], parts[half:], strict=True)
        return np.max([np.where(inside == 1, own, -1) for own, inside in counted], axis=0)  # type: ignore[no-any-return]


@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_pools_compute_what_torch_does(seed: int, mean: bool) -> None:
    name, shapes, rest = pool(Random(seed), mean)
    x = drawn(shapes[0], np.random.default_rng(seed)).abs()
    computes = OPS[name].computes
    assert computes is not None
    (found,) = computes(Largest(), Given((modular(x), *rest)))
    expected = applied(name, [x], rest)
    if mean:  # a mean of so many is a fraction
        count = int(np.prod(rest[0]))
        found, expected = found * count % Numbers().prime, (expected * count).round()
    assert (found == modular(expected)).all()


def extents(kind: Kind, along: Along, image: int) -> dict[str, int]:
    """Different extents for the sizes of a rule, of images so large that windows fit."""
    found = {}
    for at, name in enumerate(kind.rule(along).extents):
        moves = name[0] in "su" and name[1:2].isdigit()
        found[name] = image + at if moves else 2 + at
    return found


@pytest.mark.sample(31)
@pytest.mark.parametrize("seed", range(60))
def test_calls_are_one_along_their_factors_and_no_other_dims(seed: int) -> None:
    """By proof and in numbers; where numbers say that it is false, the proof must not hold."""
    rng = Random(seed)
    made = convolution(rng) if seed % 3 else pool(rng, mean=seed % 2 == 0)
    found = list(joinable(*call(*made)))
    count = int(made[0][-2])
    image = max(made[1][0][-count:])
    refused = 0
    for kind, along in found:
        assert not refusal(kind, along)
        sizes = extents(kind, along, image)
        assert not difference(kind.rule(along), sizes, 1, seed)
        for wrong in others(kind, along):
            if refusal(kind, wrong):
                refused += 1
            else:
                assert not difference(kind.rule(wrong), extents(kind, wrong, image), 1, seed)
    has_samples = len(made[1][0]) > count + 1
    assert ("n" in {along.factor for _, along in found}) == has_samples
    assert refused >= len(found)


@pytest.mark.parametrize("seed", range(30))
def test_convolutions_of_one_operand_are_one(seed: int) -> None:
    name, shapes, rest = convolution(Random(seed))
    kernel, settings = tuple(shapes[1][2:]), tuple(rest[:3])
    count = int(name[-2])
    how = (name, kernel, settings, len(shapes) > 2, len(shapes[0]) > count + 1)
    assert not merge_refusal(*how)
    found = rule_of(*how)
    sizes = {own: 2 + at for at, own in enumerate(found.extents)}
    sizes |= {f"p{at}": shapes[0][at - count] for at in range(count)}
    assert not difference(found, sizes, 1, seed)


REFUSED: dict[str, tuple[str, tuple[TermArg, ...]]] = {
    "zeros by an unknown name": ("padding reflect", ((1, 1), "reflect", (1, 1))),
    "as many places by strides": ("strides", ((2, 2), "same", (1, 1))),
}


@pytest.mark.parametrize("name", REFUSED)
def test_windows_that_are_not_expressed_are_refused(name: str) -> None:
    said, rest = REFUSED[name]
    assert said in merge_refusal("conv2d", (3, 3), rest, False)
    computes = OPS["conv2d"].computes
    assert computes is not None
    x = np.zeros((1, 1, 5, 5), dtype=np.int64)
    with pytest.raises(NotImplementedError, match=said):
        computes(Numbers(), Given((x, x[..., :3, :3], None, *rest)))


@pytest.mark.parametrize(
    ("op", "shapes", "rest"),
    [
        ("conv_transpose2d", ([4, 2, 5, 5], [2, 3, 3, 3]), (None,)),
        ("max_pool2d", ([4, 2, 6, 6],), ((3, 3), (2, 2), (0, 0), (1, 1), True)),
        ("avg_pool2d", ([4, 2, 6, 6],), ((3, 3), (1, 1), (1, 1), False, False)),
        ("adaptive_avg_pool2d", ([4, 2, 6, 6],), ((2, 2),)),
    ],
)
def test_calls_of_which_it_is_not_known_what_they_compute_stay_apart(
    op: str, shapes: tuple[list[int], ...], rest: tuple[Arg, ...]
) -> None:
    node, specs = call(op, shapes, rest[1:] if op.startswith("conv_t") else rest)
    assert all(refusal(*own) for own in joinable(node, specs))
