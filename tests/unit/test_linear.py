"""Integer programs that are cut short: the best so far, and a bound that holds."""

from random import Random

import pytest

from parloom.search.linear import LinearProgram


def knapsack(seed: int, size: int = 40, rows: int = 8) -> LinearProgram:
    """What to pack under several limits."""
    rng = Random(seed)
    program = LinearProgram()
    columns = [program.column(-float(rng.randint(10, 99)), 0, 1, integer=True) for _ in range(size)]
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
