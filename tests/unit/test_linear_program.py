"""The solver of linear and integer programs is right where columns of both kinds are in one row."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parloom.search.linear import LinearProgram


def test_a_continuous_column_may_do_what_an_integer_one_would() -> None:
    """HiGHS 1.14 says 15 (its issue 3043)."""
    program = LinearProgram()
    x = program.column(2.0, 0, 10)
    z = program.column(3.0, 0, 10, integer=True)
    program.row({x: 1.0, z: 1.0}, low=4.5)
    found = program.solve()
    assert found is not None
    assert found.cost == found.bound == pytest.approx(9.0)
    assert found.values == pytest.approx((4.5, 0.0))


@given(
    st.lists(
        st.tuples(st.integers(1, 9), st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=4
    ),
    st.integers(0, 30),
    st.integers(1, 9),
)
def test_compositions_are_those_of_enumeration(
    options: list[tuple[int, int, int]], least: int, price: int
) -> None:
    """Integer columns of some cost and weight, and a continuous one for what they leave out, with
    another that is at least what they hold: the shape of compositions.
    """
    program = LinearProgram()
    rest, most = program.column(float(price)), program.column(1.0)
    columns = [program.column(float(cost), 0, 2, integer=True) for cost, _, _ in options]
    weights = {c: float(weight) for c, (_, weight, _) in zip(columns, options, strict=True)}
    held = {c: -float(size) for c, (_, _, size) in zip(columns, options, strict=True)}
    program.row({rest: 1.0, **weights}, low=float(least))
    program.row({most: 1.0, **held}, low=0.0)
    found = program.solve()
    assert found is not None
    wanted = min(
        sum(n * cost for n, (cost, _, _) in zip(many, options, strict=True))
        + price * max(0, least - sum(n * w for n, (_, w, _) in zip(many, options, strict=True)))
        + sum(n * size for n, (_, _, size) in zip(many, options, strict=True))
        for many in product(range(3), repeat=len(options))
    )
    assert found.cost == pytest.approx(wanted)
    assert found.bound <= wanted * (1 + 1e-6) + 1e-9
