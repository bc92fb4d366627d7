"""Operators as terms, whose dims are counted from the last."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from parloom.errors import InputError
from parloom.ir.graph import Node, Ref, TensorSpec
from parloom.rewrite.bodies import DIMS, FIRST_DIM, term_of_node
from parloom.rewrite.take import parse_take
from parloom.rewrite.terms import parse_call

RANK = 3
PAIR = (Ref("x"), Ref("y"))
ARGS: dict[str, tuple[Any, ...]] = {
    "cat": (PAIR,),
    "stack": (PAIR,),
    "split_with_sizes": (Ref("x"), (1, 2)),
    "softmax": (Ref("x"),),
    "sum": (Ref("x"),),
    "mean": (Ref("x"),),
}
CALLS: dict[str, Callable[..., Any]] = {
    "cat": torch.cat,
    "stack": torch.stack,
    "split_with_sizes": torch.split_with_sizes,
    "softmax": torch.softmax,
    "sum": torch.sum,
    "mean": torch.mean,
}
SPEC = TensorSpec((RANK,) * RANK, "float32")


def called(op: str, args: tuple[Any, ...]) -> list[Tensor]:
    torch.manual_seed(0)
    known = {name: torch.randn(SPEC.shape) for name in "xy"}

    def given(arg: Any) -> Any:
        if isinstance(arg, tuple):
            return tuple(map(given, arg))
        return known[arg.name] if hasattr(arg, "name") else arg

    made = CALLS[op](*map(given, args))
    return [made] if isinstance(made, Tensor) else list(made)


@pytest.mark.parametrize("op", DIMS)
def test_dims_from_the_last_are_the_same_dims(op: str) -> None:
    """All dims are equal, so that no shape tells a wrong one."""
    specs, dims = {name: SPEC for name in "xy"}, RANK + (op == "stack")
    told: list[tuple[Any, ...]] = [(dim,) for dim in range(-dims, dims)]
    told += [((0, -1),)] if op in ("sum", "mean") else []
    told += [()] if op in FIRST_DIM else []
    for dim in told:
        args = (*ARGS[op], *dim)
        term = term_of_node(Node(op, args, (), ()), specs)
        last = term.args[DIMS[op]]
        assert all(own < 0 for own in (last if isinstance(last, tuple) else (last,)))  # type: ignore[operator]
        for one, other in zip(called(op, args), called(op, term.args), strict=True):
            assert torch.equal(one, other), (op, dim, term)


def test_a_take_of_nothing_is_none() -> None:
    with pytest.raises(InputError, match="takes the place of no value"):
        parse_take("take _, _ in main by add_304601: add(x, y)")


@pytest.mark.parametrize(
    "text", ["a." * 5_000 + "a", "-" * 3_000 + "1", "f(" * 3_000 + "x" + ")" * 3_000, "f(\0)", "("]
)
def test_what_cannot_be_read_is_told_in_one_line(text: str) -> None:
    with pytest.raises(InputError) as error:
        parse_call(text)
    assert len(str(error.value)) < 500
