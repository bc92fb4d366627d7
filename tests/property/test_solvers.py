"""Solvers against enumeration, on random declared models."""

from collections.abc import Iterator, Sequence
from itertools import product
from math import inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from parloom.search.model import Bools, Floats, Model, Row, Term, Variable, View
from parloom.search.solve import minimum
from parloom.search.solve.elimination import Elimination
from parloom.search.solve.minimum import Minimizer
from parloom.search.solve.pruning import Pruning, bounded
from tests.examples import examples

ROWS = (Row("time", "ps"), Row("memory", "bytes"))


@st.composite
def models(draw: st.DrawFn) -> tuple[Model, Floats]:
    """Terms with alternatives over views of a few variables, some combinations illegal, and prices
    of both rows.
    """
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    sizes = draw(st.lists(st.integers(1, 5), min_size=1, max_size=5))
    variables = tuple(Variable(f"v{i}", tuple(range(n))) for i, n in enumerate(sizes))
    terms = []
    for _ in range(draw(st.integers(1, 7))):
        scope = rng.permutation(len(sizes))[: rng.integers(1, min(3, len(sizes)) + 1)]
        views = []
        for variable in scope:
            index = rng.integers(0, 3, sizes[variable])
            views.append(View(int(variable), index, 3))
        terms.append(Term(tuple(views), tuple(_alternatives(rng, len(views))), slice(0, 2)))
    return Model(ROWS, variables, tuple(terms)), rng.integers(0, 4, 2).astype(float)


def _alternatives(
    rng: np.random.Generator, rank: int
) -> Iterator[tuple[Floats, NDArray[np.bool_] | None]]:
    """One or two groups of alternatives, the second the same for all values of the first view."""
    for group in range(rng.integers(1, 3)):
        shape = [int(rng.integers(1, 3)), *[1 if group and not i else 3 for i in range(rank)]]
        costs = rng.integers(0, 50, (*shape, 2)).astype(float)
        legal = rng.random(shape) > 0.15 if rng.random() > 0.5 else None
        yield costs, legal


def enumerated(model: Model, prices: Floats) -> tuple[float, dict[tuple[int, ...], float]]:
    """The least cost, and the cost of every solution, term by term and option by option."""
    found = {}
    for values in product(*(range(len(v)) for v in model.variables)):
        total = 0.0
        for term in model.terms:
            least = np.inf
            for costs, legal in term.alternatives:
                for alternative in range(len(costs)):
                    at = [int(view.index[values[view.variable]]) for view in term.views]
                    place = tuple(
                        i if n > 1 else 0 for i, n in zip(at, costs.shape[1:], strict=False)
                    )
                    if legal is None or legal[(alternative, *place)]:
                        least = min(least, float(costs[(alternative, *place)] @ prices))
            total += least
        found[values] = total
    return min(found.values()), found


@examples(80)
@given(models())
def test_elimination_finds_the_minimum(drawn: tuple[Model, Floats]) -> None:
    model, prices = drawn
    least, every = enumerated(model, prices)
    cost, values = Elimination(model).minimum(prices)
    assert cost == pytest.approx(least) or cost == least == np.inf
    if values:
        assert every[values] == pytest.approx(least)
        rows = sum((term.chosen(prices, values) for term in model.terms), np.zeros(2))
        assert rows @ prices == pytest.approx(least)


@examples(80)
@given(models(), st.integers(1, 6))
def test_pruning_bounds_and_keeps_the_best(drawn: tuple[Model, Floats], sweeps: int) -> None:
    model, prices = drawn
    least, every = enumerated(model, prices)
    pruning = Pruning(model)
    for scale in (1.0, 3.0, 0.1):  # messages of one price vector are the start of the next
        priced = bounded(model.priced(prices * scale))
        bound, cost, values, alive = pruning.run(priced, (), sweeps)
        if least == np.inf:
            assert not values
            continue
        assert bound <= scale * least * (1 + 1e-6) + 1e-6
        assert cost >= scale * least * (1 - 1e-6) - 1e-6
        if values:
            assert scale * every[values] == pytest.approx(cost)
        best = [v for v, c in every.items() if c < least * (1 - 1e-6) + 1e-9 or c == least]
        if cost > scale * least * (1 + 1e-6):  # what is better than the best seen is still there
            assert any(all(a[v] for a, v in zip(alive, some, strict=True)) for some in best)


@pytest.mark.sample(2)
@pytest.mark.parametrize(("cells", "largest"), [(10**6, 10**6), (10**6, 12), (10**6, 0), (0, 0)])
def test_minima_are_those_of_enumeration(
    monkeypatch: pytest.MonkeyPatch, cells: int, largest: int
) -> None:
    """With all variables eliminated at once, some of them, or none but by messages; all of them
    free, or one with an option that it must have.
    """
    monkeypatch.setattr(minimum, "CELLS", cells)
    monkeypatch.setattr(minimum, "LARGEST", largest)
    left = []

    @examples(60)
    @given(models(), st.data())
    def check(drawn: tuple[Model, Floats], data: st.DataObject) -> None:
        model, prices = drawn
        least, every = enumerated(model, prices)
        minimizer = Minimizer(model)
        left.append(len(minimizer.elimination.left))
        for _ in range(2):  # the second time begins where the first one ended
            bound, values = minimizer.minimum(prices, 0.0)
            assert bound <= least * (1 + 1e-6) + 1e-6
            assert (every[values] if values else np.inf) >= least
            if not left[-1] and values:
                assert bound == pytest.approx(least) == every[values]
        variable = data.draw(st.integers(0, len(model.variables) - 1))
        option = data.draw(st.integers(0, len(model.variables[variable]) - 1))
        some = {v: c for v, c in every.items() if v[variable] == option}
        found = minimizer.minimum_with({variable: option}, prices)
        assert not found or some[found] < np.inf
        if not left[-1]:
            assert bool(found) == (min(some.values()) < np.inf)
            assert not found or some[found] == pytest.approx(min(some.values()))
        if least < np.inf:
            costs = minimizer.least(prices, 0.0)[variable][option]
            assert costs <= min(some.values()) * (1 + 1e-6) + 1e-6

    check()
    assert any(left) == (largest < 100)  # the case is what it says


class _Free:
    """Parts in which variables have their first option, but for those of the part, which are
    free.
    """

    def __init__(self, model: Model) -> None:
        self.model, self.number = model, len(model.variables)

    def allowed(self, part: frozenset[int]) -> Sequence[Bools]:
        return [
            np.ones(len(own), dtype=bool) if v in part else np.arange(len(own)) == 0
            for v, own in enumerate(self.model.variables)
        ]


def test_solutions_begin_at_the_parts_that_make_them_better(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By one sweep of messages alone: parts raise no bound, and are looked for where that is asked
    and none is given; without them some solutions are worse (the control).
    """
    for name, value in (("CELLS", 0), ("LARGEST", 0), ("SWEEPS", 1), ("STALLED", inf)):
        monkeypatch.setattr(minimum, name, value)
    better, found = [], []

    @examples(60)
    @given(models())
    def check(drawn: tuple[Model, Floats]) -> None:
        model, prices = drawn
        least, every = enumerated(model, prices)
        parts, costs = _Free(model), []
        for climbs in (False, True):
            minimizer = Minimizer(model, parts)
            bound, values = minimizer.minimum(prices, 0.0, climbs)
            assert bound <= least * (1 + 1e-6) + 1e-6
            costs.append(every[values] if values else inf)
            assert climbs or minimizer.part is None
        without, cost = costs
        assert least <= cost <= without * (1 + 1e-9)
        better.append(cost < without)
        if minimizer.part:
            found.append(minimizer.part)
            small, kept = model.restricted(parts.allowed(minimizer.part))
            _, own = Minimizer(small).minimum(prices, 0.0)
            begun = tuple(int(k[v]) for k, v in zip(kept, own, strict=True))
            again = Minimizer(model, parts, minimizer.part)
            _, values = again.minimum(prices, 0.0)
            assert again.part == minimizer.part
            assert every[values] <= every[begun] * (1 + 1e-9)

    check()
    assert any(better)
    assert found


@examples(40)
@given(models(), st.data())
def test_a_restricted_model_has_the_costs_of_the_whole(
    drawn: tuple[Model, Floats], data: st.DataObject
) -> None:
    model, prices = drawn
    allowed = []
    for variable in model.variables:
        kept = data.draw(st.sets(st.integers(0, len(variable) - 1), min_size=1))
        allowed.append(np.isin(np.arange(len(variable)), list(kept)))
    small, kept_of = model.restricted(allowed)
    _, every = enumerated(model, prices)
    _, some = enumerated(small, prices)
    for values, cost in some.items():
        whole = tuple(int(k[v]) for k, v in zip(kept_of, values, strict=True))
        assert every[whole] == cost


def test_a_term_that_is_left_out_is_seen() -> None:
    """The negative control: without one of its terms a model has another minimum."""
    both = Variable("a", (0, 1))
    view = View(0, np.arange(2), 2)
    dear = Term((view,), ((np.array([[[5.0, 0.0], [0.0, 0.0]]]), None),), slice(0, 2))
    cheap = Term((view,), ((np.array([[[0.0, 0.0], [9.0, 0.0]]]), None),), slice(0, 2))
    prices = np.ones(2)
    assert Elimination(Model(ROWS, (both,), (dear, cheap))).minimum(prices) == (5.0, (0,))
    assert Elimination(Model(ROWS, (both,), (dear,))).minimum(prices) == (0.0, (1,))
