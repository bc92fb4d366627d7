"""Where memory limits plans of a model without repeated blocks, its modules recompute."""

from dataclasses import replace
from functools import cache

import pytest

from parloom.choose import choose
from parloom.comparators.baselines import RULES
from parloom.comparators.grid import Grid
from parloom.cost.clusters import load_cluster
from parloom.cost.hardware import DataSheets
from parloom.ir.expected import Status
from parloom.ir.factors import factorize
from parloom.ir.graph import Graph
from parloom.ir.text import parse_graph
from parloom.search.blocks import Blocks, search_with_blocks, smallest_with_blocks
from parloom.search.conflicts import broken
from parloom.search.optimize import search
from parloom.search.pinned import resolve
from parloom.search.pins import parse_pin
from parloom.search.request import Request, Wanted, base_of
from parloom.search.searched import Searched
from parloom.search.smallest import smallest_plan
from tests.property.searched import ADAM

TWO = DataSheets(load_cluster("1x2xH100"))
WIDTHS = (512, 768, 1024, 512)
# Of what the fastest plan holds; without recomputation nothing fits in it.
SHARE = 0.8


@cache
def model() -> Graph:
    """Modules of two products, with activation functions between, and no two neighbors alike."""
    inputs, body, last = "", "", "x"
    outer = "float32[8192, 256]"
    for i, width in enumerate(WIDTHS):
        inner = f"float32[8192, {width}]"
        inputs += f'input u{i}: float32[{width}, 256] = parameter("m{i}.up", trainable=True)\n'
        inputs += f'input d{i}: float32[256, {width}] = parameter("m{i}.down", trainable=True)\n'
        body += f"    a{i}: {inner} = linear({last}, u{i})  # m{i}.up\n"
        body += f'    b{i}: {inner} = gelu(a{i}, "none")  # m{i}\n'
        body += f"    c{i}: {inner} = tanh(b{i})  # m{i}\n"
        body += f"    y{i}: {outer} = linear(c{i}, d{i})  # m{i}.down\n"
        last = f"y{i}"
    return parse_graph(
        f'graph "M" training=True\n\n{inputs}input x: {outer} = batch("x")\n\nmain main:\n{body}'
        f"    loss: float32[] = sum({last})\n    return loss\n\nloss loss\n"
    )


def asked(limit: float = 1.0, **other: object) -> Request:
    """With one microbatch; `limit` is a share of what the fastest plan holds."""
    request = Request(model(), TWO, ADAM, TWO.cluster.device.memory_bytes, 1)
    if limit < 1:
        request = replace(request, limit_bytes=int(limit * free().proposals[0].peak_bytes))
    return replace(request, **other)  # type: ignore[arg-type]


def quiet(text: str) -> None:
    pass


@cache
def free() -> Searched:
    request, said = asked(), list[str]()
    found = search_with_blocks(request, base_of(request), said.append)
    assert not any("as blocks" in line for line in said)
    return found


@cache
def tight() -> Searched:
    return search_with_blocks(asked(SHARE), base_of(asked()), quiet)


def test_where_memory_is_no_limit_nothing_else_is_searched() -> None:
    request, lines, other = asked(), list[str](), list[str]()
    base = base_of(request)
    assert search_with_blocks(request, base, lines.append).proposals
    search(request, base, other.append)
    assert lines == other
    assert not free().proposals[0].decisions.rewrites


def test_where_plans_without_do_not_fit_modules_recompute() -> None:
    request = asked(SHARE)
    plain = search(request, base_of(request), quiet)
    best = tight().proposals[0]
    assert not plain.proposals or best.step_ps < plain.proposals[0].step_ps
    assert best.decisions.rewrites == tuple(f"block m{i}" for i in range(len(WIDTHS) - 1))
    assert any(a.policy == "recompute" for a in best.decisions.activations)
    # The plan is one of the graph as it was asked about, and costs as much there.
    assert request.predict(best.decisions) == best.prediction
    assert best.peak_bytes <= request.limit_bytes


def test_bounds_are_of_plans_with_and_without() -> None:
    best, found = tight().proposals[0], tight()
    assert found.bound_ps <= min(best.step_ps, free().bound_ps * (1 + 1e-9))
    assert found.estimate_bound_ps <= best.estimate_ps * (1 + 1e-9)
    assert found.solver_gap is not None
    choice = choose(asked(SHARE), quiet)
    assert choice.bound_s is not None  # of pipelines, too
    assert 0 < choice.bound_s <= found.bound_ps / 1e12 * (1 + 1e-9)
    assert choice.best.decisions.rewrites


def test_the_smallest_plan_recomputes() -> None:
    request = asked()
    base = base_of(request)
    plain, found = smallest_plan(request, base), smallest_with_blocks(request, base)
    assert plain is not None
    assert found is not None
    assert found.bound_bytes <= found.plan.peak_bytes < plain.plan.peak_bytes
    assert request.predict(found.plan.decisions) == found.plan.prediction
    assert found.plan.peak_bytes <= tight().proposals[0].peak_bytes


@pytest.mark.sample(1)
@pytest.mark.parametrize(("count", "wanted"), [(1, Wanted.PRICE), (None, Wanted.PLAN)])
def test_a_price_is_of_plans_with_blocks_only_where_others_do_not_fit(
    count: int | None, wanted: Wanted
) -> None:
    """With any number of microbatches there are others that fit, slower ones."""
    lines, request = list[str](), asked(SHARE, num_microbatches=count, wanted=wanted)
    assert search_with_blocks(request, base_of(request), lines.append).proposals
    assert any("as blocks" in line for line in lines)
    lines, request = list[str](), asked(SHARE, num_microbatches=None, wanted=Wanted.PRICE)
    assert search_with_blocks(request, base_of(request), lines.append).proposals
    assert not any("as blocks" in line for line in lines)


@pytest.mark.slow
def test_a_budget_is_of_both_searches() -> None:
    much = 10**6
    whole = search_with_blocks(asked(SHARE, budget=much), base_of(asked()), quiet)
    assert whole.work_left is not None
    used = much - whole.work_left
    steps = [plan.step_ps for plan in whole.proposals]
    for budget, status in ((used, Status.COMPLETE), (used - 1, Status.OUT_OF_BUDGET)):
        found = search_with_blocks(asked(SHARE, budget=budget), base_of(asked()), quiet)
        assert found.status is status
        assert [plan.step_ps for plan in found.proposals][:1] == steps[:1]
    early = search_with_blocks(asked(SHARE, budget=used // 2), base_of(asked()), quiet)
    assert (early.status, early.work_left) == (Status.OUT_OF_BUDGET, 0)


@pytest.mark.slow
def test_pins_hold_in_blocks() -> None:
    """Negative control: the plan without the pin breaks it, whatever functions operators are in."""
    graph = model()
    pin = parse_pin("m1.down=replicated")
    pinned = resolve([pin], graph, factorize(graph))
    assert broken(pinned, graph, tight().proposals[0].decisions) is not None
    request = asked(SHARE, pinned=pinned, limit_bytes=int(asked(SHARE).limit_bytes * 1.2))
    best = search_with_blocks(request, base_of(request), quiet).proposals[0]
    assert best.decisions.rewrites
    assert broken(pinned, graph, best.decisions) is None


@pytest.mark.parametrize("rule", ["data_parallel", "fsdp"])
def test_rules_of_thumb_recompute_modules(rule: str) -> None:
    *_, plain = Grid(asked(), RULES[rule], base_of(asked()), 20).run()
    assert not plain.decisions.rewrites
    limit = plain.prediction.peak_bytes * 4 // 5
    request = asked(limit_bytes=limit)
    *_, found = Grid(request, RULES[rule], base_of(request), 20).run()
    assert found.prediction.peak_bytes <= limit
    assert found.chosen.recompute != "none"
    assert found.decisions.rewrites
    assert request.predict(found.decisions) == found.prediction


def test_no_module_becomes_a_block_where_a_rewrite_is_pinned() -> None:
    """Rewrites that are pinned are of main as it is."""
    assert Blocks(asked()).rewrites
    for text, forbidden in (("rewrite=merge_linear", False), ("rewrite=*", True)):
        pins = resolve([parse_pin(text, forbidden=forbidden)], model(), factorize(model()))
        assert bool(Blocks(asked(pinned=pins)).rewrites) == forbidden
