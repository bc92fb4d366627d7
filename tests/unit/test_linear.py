"""Integer programs that are cut short: the best so far, and a bound that holds."""

from random import Random

import pytest

from parloom.search.linear import LinearProgram


def knapsack(seed: int, size: int = 40, rows: int = 8, unit: float = 1.0) -> LinearProgram:
    """What to pack under several limits."""
    rng = Random(seed)
    program = LinearProgram()
    worths = [unit * rng.uniform(10, 99) for _ in range(size)]
    columns = [program.column(-worth, 0, 1, integer=True) for worth in worths]
    for _ in range(rows):
        program.row({c: float(rng.randint(5, 60)) for c in columns}, high=7.5 * size)
    return program


@pytest.mark.parametrize("seed", [0, 1])
def test_a_solver_that_is_cut_short_has_the_best_so_far_and_its_bound(seed: int) -> None:
    whole, cut = knapsack(seed).solve(), knapsack(seed).solve(max_nodes=1)
    assert whole is not None
    assert cut is not None
    assert whole.nodes > cut.nodes == 1
    assert cut.bound <= whole.bound <= whole.cost <= cut.cost
    assert cut.bound < cut.cost  # not proved
    assert whole.bound == pytest.approx(whole.cost)
    assert knapsack(seed).solve(max_nodes=1) == cut


def test_a_solver_that_may_do_nothing_finds_nothing() -> None:
    assert knapsack(0).solve(max_nodes=0) is None


def test_what_is_not_possible_has_no_answer() -> None:
    program = LinearProgram()
    column = program.column(1.0, 0, 1)
    program.row({column: 1.0}, low=2.0)
    assert program.solve() is None


@pytest.mark.parametrize("unit", [1e-3, 1e-6])
def test_the_gap_is_a_share_of_the_cost_however_small_that_is(unit: float) -> None:
    gap = 1e-6
    for seed in range(8):
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


def test_a_solver_that_has_enough_goes_on_where_it_has_nothing() -> None:
    whole, enough = knapsack(0).solve(), knapsack(0).solve(enough_nodes=1)
    assert whole is not None
    assert enough == knapsack(0).solve(max_nodes=1) != whole
    assert knapsack(0).solve(max_nodes=0) is None
    assert knapsack(0).solve(enough_nodes=0) == whole
