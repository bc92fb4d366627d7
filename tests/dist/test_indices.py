"""Lookups and writes in sharded dims refuse what torch refuses in whole ones."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from parloom import runtime as rt

MESH = rt.grid({"x": 2})
ROWS = ("x", 3)  # the digits of a dim of six elements
Call = Callable[[Tensor, rt.Context], Tensor]

CALLS: dict[str, Call] = {
    "embedding": lambda at, ctx: rt.embedding(torch.ones(3, 2), at, ctx, ROWS),
    "gather": lambda at, ctx: rt.gather(torch.ones(3), 0, at, ctx, ROWS),
    "pick": lambda at, ctx: rt.pick(torch.ones(1, 3), at, ctx, ROWS),
    "index": lambda at, ctx: rt.index(torch.ones(3), (at,), ctx, (ROWS,)),
    "index_put": lambda at, ctx: rt.index_put(
        torch.ones(3), (at,), torch.tensor(2.0), ctx, (ROWS,)
    ),
    "scatter": lambda at, ctx: rt.write("scatter", torch.ones(3), 0, at, ctx, ROWS, 2.0),
    "index_add": lambda at, ctx: rt.write(
        "index_add", torch.ones(3), 0, at, ctx, ROWS, torch.ones(1)
    ),
}


def on_each(call: Call, at: int) -> list[Tensor]:
    return rt.run_threads(MESH, lambda comm: call(torch.tensor([at]), rt.Context(comm)))


@pytest.mark.parametrize("name", CALLS)
def test_an_index_that_the_dim_does_not_have_is_an_error(name: str) -> None:
    for there in (0, 5):
        on_each(CALLS[name], there)
    for missing in (6, -7):
        with pytest.raises(Exception, match=r"out of (range|bounds)"):
            on_each(CALLS[name], missing)


def test_a_label_that_is_ignored_need_not_be_a_class() -> None:
    assert [t.tolist() for t in on_each(CALLS["pick"], 1)] == [[1.0], [0.0]]
    assert [t.tolist() for t in on_each(CALLS["pick"], -100)] == [[0.0], [0.0]]

    def other(at: Tensor, ctx: rt.Context) -> Tensor:
        return rt.pick(torch.full((1, 3), -torch.inf), at, ctx, ROWS, ignored=-1)

    assert [t.tolist() for t in on_each(other, -1)] == [[0.0], [0.0]]
    with pytest.raises(Exception, match="out of bounds"):
        on_each(other, -100)
