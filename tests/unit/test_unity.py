"""Unity's search: forms that are known, parts between post-dominators, plans that fit."""

from dataclasses import replace

import pytest

from parloom.candidates import COMPARATORS, candidates
from parloom.comparators.unity import LeastSteps, parts
from parloom.errors import InputError
from parloom.ir.factors import factorize
from parloom.ir.graph import Graph
from parloom.ir.plan import Decisions
from parloom.ir.text import parse_graph, print_graph
from parloom.rewrite.rewrites import derived, rewritten, takes_of
from parloom.search.pinned import Pinned, resolve
from parloom.search.pins import parse_pin
from parloom.search.request import Request
from tests.unit.graphs import graph, node, perceptron, stack
from tests.unit.test_fixed_form import WIDE, gated, request_of, summed

BASE = Decisions()


def plans(asked: Request) -> list[Decisions]:
    return list(COMPARATORS["unity"](asked, BASE, lambda text: None))


@pytest.mark.sample(1)
@pytest.mark.parametrize("spec", ["1xV100", "2xV100"])
def test_known_forms_are_found(spec: str) -> None:
    for made, op in ((gated(), "parloom.linears"), (summed(), "linear")):
        asked = request_of(made, spec)
        for plan in plans(asked):
            (take,) = takes_of(plan.rewrites)
            assert take.call.op == op
            again = parse_graph(print_graph(made))
            derived(again, plan.rewrites)
            assert replace(asked, graph=again).predict(plan).step_s > 0


def test_what_has_one_form_stays() -> None:
    assert all(plan.rewrites == () for plan in plans(request_of(perceptron(64))))


def test_the_plan_is_fast_for_its_form() -> None:
    """No slower than without the rewrite, on the same devices."""
    asked = request_of(gated(), method="unity")
    best = min(plan.prediction.step_s for plan in candidates(asked, lambda text: None).found)
    without = replace(asked, pinned=_pinned(asked.graph, "rewrite=*", forbidden=True))
    others = candidates(without, lambda text: None).found
    assert best < min(plan.prediction.step_s for plan in others)
    assert not any(takes_of(plan.decisions.rewrites) for plan in others)


def _pinned(made: Graph, text: str, *, forbidden: bool) -> Pinned:
    return resolve([parse_pin(text, forbidden=forbidden)], made, factorize(made))


def test_layouts_are_the_best_of_each_form() -> None:
    """A form that one device computes faster may still take longer in the best layouts: the queue
    has it by these.
    """
    asked = request_of(gated())
    (plan, *_) = plans(asked)
    steps = LeastSteps(asked, BASE)
    assert steps.cost_ps(rewritten(asked.graph, plan.rewrites)) < steps.cost_ps(asked.graph)


def long(count: int) -> Graph:
    """Products in a row, each the only way from what is before to what is behind."""
    shape = (64, WIDE)
    return graph(
        {f"w{i}": (WIDE, WIDE) for i in range(count)},
        {"v0": (shape, "float32")},
        *(
            node(op, f"v{2 * i + at}", *([f"w{i}"] if op == "linear" else []),
                 to=f"v{2 * i + at + 1}", shape=shape, path=f"l{i}")
            for i in range(count) for at, op in enumerate(("linear", "sigmoid"))
        ),
        node("sum", f"v{2 * count}", to="loss", shape=()),
    )  # fmt: skip


def test_long_functions_are_cut_at_post_dominators() -> None:
    made = long(12)
    found = list(parts(made, made.main))
    assert [len(own) for own in found] == [10, 10, 5]
    every = {v.name for item in made.main.body for v in item.results}
    assert set().union(*found) == every
    assert sum(map(len, found)) == len(every)


def test_nothing_is_cut_around_skips_or_through_a_substitution() -> None:
    block, main = stack(1).functions[0], summed().main
    assert len(list(parts(stack(1), block))) == 1
    (own,) = parts(summed(), main)
    assert own == {v.name for item in main.body for v in item.results}


def test_memory_is_traded_for_time() -> None:
    """With less than the fastest plan holds there is one that holds less, up to some limit."""
    asked = replace(request_of(long(3)), all_devices=True)
    (fastest, *_) = plans(asked)
    peak = asked.predict(fastest).peak_bytes
    (smaller, *_) = plans(replace(asked, limit_bytes=peak - 1))
    assert asked.predict(smaller).peak_bytes < peak
    assert asked.predict(smaller).step_s > asked.predict(fastest).step_s


def test_a_rewrite_that_is_wanted_is_there() -> None:
    asked = request_of(gated(64))
    pinned = _pinned(asked.graph, "rewrite=merge_linear", forbidden=False)
    for plan in plans(replace(asked, pinned=pinned)):
        assert "merge_linear" in takes_of(plan.rewrites)[0].rules
    pinned = _pinned(asked.graph, "rewrite=merge_conv2d", forbidden=False)
    with pytest.raises(InputError, match="applies nowhere"):
        plans(replace(asked, pinned=pinned))
