"""What entries compute, against torch itself, and in normal form against numbers."""

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from parloom.ir.ops import OPS
from parloom.ir.ops.exact import Given
from parloom.rewrite.modular import PRIME, Numbers
from parloom.rewrite.rules import prove, rule
from parloom.rewrite.symbolic import NotExpressed

MATRIX, SQUARE, VECTOR = (3, 4), (4, 4), (4,)
T = "tensor"
# Arguments; shapes stand for tensors of small integers.
CALLS: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    ("linear", ([2, 3, 4], [5, 4]), {}),
    ("linear", ([3, 4], [5, 4], [5]), {}),
    ("mm", ([3, 4], [4, 5]), {}),
    ("bmm", ([2, 3, 4], [2, 4, 5]), {}),
    ("matmul", ([2, 3, 4], [4, 5]), {}),
    ("matmul", ([2, 1, 3, 4], [5, 4, 2]), {}),
    ("matmul", ([4], [4, 5]), {}),
    ("matmul", ([3, 4], [4]), {}),
    ("mv", ([3, 4], [4]), {}),
    ("dot", ([4], [4]), {}),
    ("addmm", ([5], [3, 4], [4, 5]), {}),
    ("addmm", ([3, 5], [3, 4], [4, 5]), {"beta": 2, "alpha": 3}),
    ("addmv", ([3], [3, 4], [4]), {"alpha": 2}),
    ("addr", ([3, 4], [3], [4]), {}),
    ("baddbmm", ([2, 3, 5], [2, 3, 4], [2, 4, 5]), {"beta": 0.5}),
    ("addbmm", ([3, 5], [2, 3, 4], [2, 4, 5]), {}),
    ("einsum", ("bik,kj->jb", ([2, 3, 4], [4, 5])), {}),
    ("conv1d", ([2, 3, 7], [4, 3, 3]), {}),
    ("conv1d", ([2, 3, 7], [4, 3, 3], [4], (2,), (1,)), {}),
    ("conv2d", ([2, 3, 5, 6], [4, 3, 3, 2], [4], (1, 2), (1, 0)), {}),
    ("conv1d", ([2, 6, 7], [4, 3, 3], [4], (1,), (1,), (1,), 2), {}),
    ("avg_pool1d", ([2, 3, 8], (2,)), {}),
    ("avg_pool2d", ([2, 3, 6, 8], (2, 4), (2, 2), (1, 2)), {}),
    ("pad", ([2, 3, 7], (2, 1), "reflect"), {}),
    ("pad", ([2, 3, 7], (1, 3), "replicate"), {}),
    ("pad", ([2, 3, 7], (0, 2), "circular"), {}),
    ("pad", ([2, 3, 4, 5], (1, 1, 0, 2)), {}),
    ("pad", ([3, 5], (1, 2), "constant", 3.0), {}),
    ("square", ([3, 4],), {}),
    ("squeeze", ([3, 1, 4], 1), {}),
    ("squeeze", ([1, 3, 1],), {}),
    ("expand", ([3, 1], (2, -1, 4)), {}),
    ("stack", (([2, 3], [2, 3], [2, 3]), -1), {}),
    ("chunk", ([2, 6], 3, 1), {}),
    ("add", ([3, 4], [4]), {}),
    ("add", ([3, 1], [1, 4]), {"alpha": 3}),
    ("add", ([3, 4], 2.5), {}),
    ("sub", ([3, 4], [3, 4]), {"alpha": 2}),
    ("mul", ([2, 3, 1], [3, 4]), {}),
    ("mul", ([3, 4], 0.5), {}),
    ("div", ([3, 4], 4), {}),
    ("neg", ([3, 4],), {}),
    ("clone", ([3, 4],), {}),
    ("sum", ([2, 3, 4],), {}),
    ("sum", ([2, 3, 4], (-1, 0)), {}),
    ("sum", ([2, 3, 4], (1,), True), {}),
    ("mean", ([2, 4, 8], (1, 2)), {}),
    ("mean", ([2, 4, 8], (-1,), True), {}),
    ("cat", (([2, 3], [2, 4]), 1), {}),
    ("cat", (([2, 3], [1, 3], [4, 3]), -2), {}),
    ("split_with_sizes", ([2, 7], (3, 4), 1), {}),
    ("transpose", ([2, 3, 4], 0, -1), {}),
    ("permute", ([2, 3, 4], (2, 0, -2)), {}),
    ("t", ([3, 4],), {}),
    ("view", ([2, 6], (3, 4)), {}),
    ("unsqueeze", ([2, 3], -1), {}),
    ("unsqueeze", ([2, 3], 0), {}),
]

# What torch raises for, or computes otherwise than an entry that would not read an argument.
REFUSED: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    ("einsum", ("...i,ij->...j", ([2, 2, 2, 4], [4, 5])), {}),
    ("einsum", ("ii->i", ([4, 4],)), {}),
    ("einsum", ("ij,jk", ([3, 4], [4, 5])), {}),
    ("einsum", ("ij->ii", ([3, 4],)), {}),
    ("einsum", ("ij->ik", ([3, 4],)), {}),
    ("einsum", ("ij,jk->ik", ([3, 4],)), {}),
    ("einsum", ("ijk->i", ([3, 4],)), {}),
    ("softmax", ([3, 4], 5), {}),
    ("softmax", ([3, 4], -1, 3), {}),
    ("softmax", ([3, 4], -1, torch.float32), {}),
    ("softmax", ([3, 4],), {}),
    ("sum", ([3, 4], (2,)), {}),
    ("sum", ([3, 4], (0, -2)), {}),
    ("sum", ([3, 4], (0,)), {"dtype": torch.float32}),
    ("mean", ([3, 4], (-3,)), {}),
    ("add", ([3, 4], [3, 4], 2), {}),
    ("add", ([3, 4], [3, 4]), {"beta": 2}),
    ("sub", ([3, 4], [3, 4], 2), {}),
    ("mul", ([3, 4], "2"), {}),
    ("mul", ([3, 4], [3, 4], 2), {}),
    ("div", ([3, 4], 2.0, "floor"), {}),
    ("div", ([3, 4], 0), {}),
    ("neg", ([3, 4], 1), {}),
    ("clone", ([3, 4], 1), {}),
    ("linear", ([3, 1], [5, 4]), {}),
    ("linear", ([3, 4], [5, 4], [3, 5]), {}),
    ("linear", ([3, 4], [5, 4], [5], 1), {}),
    ("mm", ([2, 3, 4], [4, 5]), {}),
    ("mm", ([3, 1], [4, 5]), {}),
    ("bmm", ([1, 3, 4], [2, 4, 5]), {}),
    ("matmul", ([3, 4], [1, 5]), {}),
    ("mv", ([3, 4], [4, 5]), {}),
    ("dot", ([4], [1]), {}),
    ("addmm", ([2, 3, 5], [3, 4], [4, 5]), {}),
    ("addmm", ([5], [3, 4], [4, 5]), {"gamma": 2}),
    ("t", ([2, 3, 4],), {}),
    ("transpose", ([3, 4], 0, 2), {}),
    ("permute", ([3, 4], (0, 0)), {}),
    ("permute", ([3, 4], (1,)), {}),
    ("unsqueeze", ([3, 4], 3), {}),
    ("squeeze", ([3, 1], 2), {}),
    ("expand", ([3], (1,)), {}),
    ("expand", ([3, 4], (4,)), {}),
    ("expand", ([4], (-1, 4)), {}),
    ("view", ([3, 4], (-1,)), {}),
    ("cat", (([3, 4], [3, 4]), 2), {}),
    ("cat", ([2, 3, 4], 0), {}),
    ("stack", (([3, 4], [3, 4]), 3), {}),
    ("chunk", ([4, 4], 2, 2), {}),
    ("split_with_sizes", ([7, 2], (3, 3), 0), {}),
    ("split_with_sizes", ([7, 2], (3, 4), 2), {}),
    ("conv1d", ([2, 3, 7], [4, 1, 3]), {}),
    ("conv1d", ([2, 2, 3, 7], [4, 3, 3]), {}),
    ("conv1d", ([2, 3, 7], [4, 3, 3], [1]), {}),
    ("conv1d", ([2, 3, 7], [4, 3, 3], None, (0,)), {}),
    ("conv1d", ([2, 3, 7], [4, 3, 3], None, (1,), (-1,)), {}),
    ("conv3d", ([2, 3, 7, 7, 7], [4, 3, 3, 3, 3], None, (1, 2)), {}),
    ("conv1d", ([2, 3, 7], [4, 3, 3], None, (1,), (0,), (1,), 1, 1), {}),
    ("avg_pool1d", ([2, 3, 7], (2,), (2,), (2,)), {}),
    ("max_pool1d", ([2, 3, 7], (2,), (2,), (0,), (1,), False, 3), {}),
    ("layer_norm", ([3, 4], (3,)), {}),
    ("layer_norm", ([3, 4], (4,), [1]), {}),
    ("batch_norm", ([3, 4], None, None, [1], [1], False, 0.1, 1e-5), {}),
    ("embedding", ([3, 4, 2], [2, 3]), {}),
    ("pad", ([4], (1, 1, 1, 1)), {}),
    ("pad", ([3, 4, 5], (1, 1), "mirror"), {}),
    ("pad", ([3, 4, 5], (1, 1), "reflect", 2.0), {}),
]


def drawn(given: Any, rng: np.random.Generator) -> Any:
    """Arguments with a tensor for each shape."""
    if isinstance(given, list):
        return torch.from_numpy(rng.integers(-4, 5, given).astype(np.float64))
    return tuple(drawn(own, rng) for own in given) if isinstance(given, tuple) else given


def modular(given: Any) -> Any:
    """The same with arrays modulo the prime."""
    if isinstance(given, torch.Tensor):
        exact = [Fraction(float(value)) for value in given.reshape(-1)]
        found = [value.numerator * pow(value.denominator, -1, PRIME) % PRIME for value in exact]
        return np.array(found, dtype=np.int64).reshape(given.shape)
    return tuple(map(modular, given)) if isinstance(given, tuple) else given


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call[0])
def test_entries_compute_what_torch_does(call: tuple[str, tuple[Any, ...], dict[str, Any]]) -> None:
    name, args, kwargs = call
    given = drawn(args, np.random.default_rng(0))
    function = torch.einsum if name == "einsum" else getattr(torch.ops.aten, name)
    expected = function(*given, **kwargs)
    computes = OPS[name].computes
    assert computes is not None
    found = computes(Numbers(), Given(modular(given), tuple(kwargs.items())))
    results = expected if isinstance(expected, (tuple, list)) else (expected,)
    for one, other in zip(found, results, strict=True):
        assert one.shape == tuple(other.shape)
        assert (one == modular(other)).all()


@pytest.mark.parametrize("call", REFUSED, ids=lambda call: f"{call[0]} {call[1:]}")
def test_entries_refuse_what_they_do_not_read(
    call: tuple[str, tuple[Any, ...], dict[str, Any]],
) -> None:
    name, args, kwargs = call
    computes = OPS[name].computes
    assert computes is not None
    given = modular(drawn(args, np.random.default_rng(0)))
    with pytest.raises((NotImplementedError, NotExpressed)):
        computes(Numbers(), Given(given, tuple(kwargs.items())))


def test_a_sum_over_no_dims_is_one_over_all() -> None:
    x = drawn([2, 4], np.random.default_rng(0))  # as many as have an inverse in binary
    for name, expected in (("sum", torch.sum(x, ())), ("mean", torch.mean(x, ()))):
        computes = OPS[name].computes
        assert computes is not None
        assert computes(Numbers(), Given((modular(x), ()))) == (modular(expected),)


@pytest.mark.parametrize(
    ("inputs", "left", "right"),
    [
        ("x[a, b]", "softmax(x, 5)", "softmax(x, 1)"),
        ("x[a, b]", "softmax(x, -1, 3)", "softmax(x, -1)"),
        ("x[a, b], y[a, b]", "add(x, y, 2)", "add(x, y)"),
        ("x[a, b]", "div(x, 2.0, 'floor')", "mul(x, 0.5)"),
        ("x[a, b]", "sum(x, ())", "x"),
        ("x[a, b]", "squeeze(x, 0)", "x"),
        ("x[m, 1], y[k, n]", "mm(x, y)", "mul(x, sum(y, (0,)))"),
        ("x[a, a, a, b]", "einsum('...i->...', x)", "einsum('abcd->abc', x)"),
    ],
)
def test_no_rule_is_proved_of_arguments_that_are_not_read(
    inputs: str, left: str, right: str
) -> None:
    assert prove(rule("wrong", inputs, [left], [right]))


def test_embedding_looks_up_rows() -> None:
    rng = np.random.default_rng(0)
    table, at = drawn([5, 3], rng), torch.from_numpy(rng.integers(0, 5, [2, 4]))
    computes = OPS["embedding"].computes
    assert computes is not None
    (found,) = computes(Numbers(), Given((modular(table), at.numpy())))
    assert (found == modular(torch.embedding(table, at))).all()


def test_what_is_elementwise_knows_its_other_arguments() -> None:
    x, y = (modular(drawn(shape, np.random.default_rng(0))) for shape in ([3, 4], [4]))
    given = ((x, 1.0), (x, 2.0), (x, y))
    clamp, pow_ = OPS["clamp"].computes, OPS["pow"].computes
    assert clamp is not None
    assert pow_ is not None
    results = [pow_(Numbers(), Given(own))[0] for own in given]
    results.append(clamp(Numbers(), Given((x, 1.0)))[0])
    assert all(found.shape == (3, 4) for found in results)
    assert len({found.tobytes() for found in results}) == len(results)


def test_windows_of_which_the_most_counts_are_told_apart() -> None:
    """By size and stride; moved along samples and channels as any other function."""
    x = modular(drawn([4, 3, 8], np.random.default_rng(0)))
    computes = OPS["max_pool1d"].computes
    assert computes is not None
    found = {
        args: computes(Numbers(), Given((x, *args)))[0]
        for args in (((2,),), ((2,), (1,)), ((4,), (2,)))
    }
    assert [value.shape for value in found.values()] == [(4, 3, 4), (4, 3, 7), (4, 3, 3)]
    halves = [computes(Numbers(), Given((part, (2,))))[0] for part in np.split(x, 2)]
    assert (np.concatenate(halves) == found[(2,),]).all()
    with pytest.raises(NotImplementedError, match="windows that are cut off"):
        computes(Numbers(), Given((x, (3,), (1,), (1,), 1, True)))


def test_batch_norm_is_of_statistics_that_are_given() -> None:
    x, *rows = (modular(drawn(s, np.random.default_rng(0))) for s in ([3, 4, 5], *[[4]] * 4))
    computes = OPS["batch_norm"].computes
    assert computes is not None
    assert computes(Numbers(), Given((x, *rows, False, 0.1, 1e-5)))[0].shape == (3, 4, 5)
    for given in ((x, *rows, True, 0.1, 1e-5), (x, *rows[:2], None, None, False, 0.1, 1e-5)):
        with pytest.raises(NotImplementedError, match="statistics of the batch"):
            computes(Numbers(), Given(given))


@pytest.mark.parametrize("name", ["dropout", "rand", "sort"])
def test_what_is_not_known_has_no_reading(name: str) -> None:
    assert OPS[name].computes is None
