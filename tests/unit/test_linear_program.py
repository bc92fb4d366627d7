"""Linear and integer programs: columns of both kinds in a row, and programs that are cut short."""

from itertools import product
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parloom.linear_program import LinearProgram


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


def knapsack(seed: int, size: int = 40, rows: int = 8, unit: float = 1.0) -> LinearProgram:
    """What to pack under several limits."""
    rng = Random(seed)
    program = LinearProgram()
    worths = [unit * rng.uniform(10, 99) for _ in range(size)]
    columns = [program.column(-worth, 0, 1, integer=True) for worth in worths]
    for _ in range(rows):
        program.row({c: float(rng.randint(5, 60)) for c in columns}, high=7.5 * size)
    return program


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", [0, 1])
def test_a_solver_that_is_cut_short_has_the_best_so_far_and_its_bound(seed: int) -> None:
    whole, cut = knapsack(seed, 24).solve(), knapsack(seed, 24).solve(max_nodes=1)
    assert whole is not None
    assert cut is not None
    assert whole.nodes > cut.nodes == 1
    assert cut.bound <= whole.bound <= whole.cost <= cut.cost
    assert cut.bound < cut.cost  # not proved
    assert whole.bound == pytest.approx(whole.cost)
    assert knapsack(seed, 24).solve(max_nodes=1) == cut


def test_a_solver_that_may_do_nothing_finds_nothing() -> None:
    assert knapsack(0).solve(max_nodes=0) is None


def test_what_is_not_possible_has_no_answer() -> None:
    program = LinearProgram()
    column = program.column(1.0, 0, 1)
    program.row({column: 1.0}, low=2.0)
    assert program.solve() is None


@pytest.mark.sample(1)
@pytest.mark.parametrize("unit", [1e-3, 1e-6])
def test_the_gap_is_a_share_of_the_cost_however_small_that_is(unit: float) -> None:
    gap = 1e-6
    for seed in range(3):
        whole = knapsack(seed, rows=3).solve(gap)
        small = knapsack(seed, rows=3, unit=unit).solve(gap)
        assert whole is not None
        assert small is not None
        assert small.cost == pytest.approx(unit * whole.cost, rel=2 * gap)
        assert small.bound == pytest.approx(small.cost, rel=2 * gap)


def test_what_the_solver_cannot_answer_is_no_answer() -> None:
    program = LinearProgram()
    column = program.column(-1.0)
    program.row({column: 1.0}, low=2.0)
    with pytest.raises(RuntimeError, match="HiGHS: Unbounded on a program of 1 columns and 1 rows"):
        program.solve()


@pytest.mark.slow
def test_a_solver_that_has_enough_goes_on_where_it_has_nothing() -> None:
    whole, enough = knapsack(0).solve(), knapsack(0).solve(enough_nodes=1)
    assert whole is not None
    assert enough == knapsack(0).solve(max_nodes=1) != whole
    assert knapsack(0).solve(max_nodes=0) is None
    assert knapsack(0).solve(enough_nodes=0) == whole
