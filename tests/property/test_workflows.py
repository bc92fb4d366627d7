"""The cheapest plan of a workflow is what enumeration finds, and its bound proves it."""

from dataclasses import replace
from itertools import pairwise, product

import numpy as np
import pytest

from parloom.errors import InfeasibleError
from parloom.workflow import fixing
from parloom.workflow.accuracy import best_accuracy
from parloom.workflow.answer import Method, plan_workflow
from parloom.workflow.exact import cheapest
from parloom.workflow.model import Edge, Link, Operator, Source, Variant, Worker, Workflow
from parloom.workflow.plan import Plan, flow_of, load_of
from parloom.workflow.program import Program
from parloom.workflow.simulate import play
from parloom.workflow.solve import solve
from parloom.workflow.tiers import Routed, routes
from tests.workflows import accurate, drawn, least_dollars, rate

# Workflows that are drawn, and of how many every one is enumerated here; the benchmark takes all.
DRAWN, EVERY, BLOCKS = 200, 3, 10
TIGHT = 1e-6


def planned(workflow: Workflow, method: Method = Method.EXACT) -> Plan | None:
    try:
        return plan_workflow(workflow, method)
    except InfeasibleError:
        return None


@pytest.mark.sample(1)
@pytest.mark.parametrize("block", range(BLOCKS))
def test_exact_plans_cost_what_enumeration_finds(block: int) -> None:
    for seed in range(block * EVERY, DRAWN, BLOCKS * EVERY):
        workflow = drawn(seed)
        plan, least = planned(workflow), least_dollars(workflow)
        assert (plan is None) == (least is None), seed
        if plan is not None and least is not None:
            assert plan.usd_per_h == pytest.approx(least, rel=TIGHT, abs=1e-9), seed
            assert plan.bound_usd_per_h == pytest.approx(least, rel=TIGHT, abs=1e-9), seed
            check(plan)


@pytest.mark.parametrize("times", [1e-9, 1e-4, 1e6])
def test_dollars_may_be_of_any_size(times: float) -> None:
    """The solver's tolerances are absolute: without units of their own, small ones are noise."""
    for seed in range(24):
        workflow = drawn(seed, 5)
        workers = (replace(own, usd_per_h=times * own.usd_per_h) for own in workflow.workers)
        links = {
            pair: replace(own, usd_per_byte=times * own.usd_per_byte)
            for pair, own in workflow.links.items()
        }
        scaled = planned(replace(workflow, workers=tuple(workers), links=links))
        plan = planned(workflow)
        assert (plan is None) == (scaled is None), seed
        if plan is not None and scaled is not None:
            assert scaled.usd_per_h == pytest.approx(times * plan.usd_per_h, TIGHT, 0), seed


@pytest.mark.parametrize("seed", [134, 362, 609, 845])
def test_what_other_tolerances_of_the_solver_miss(seed: int) -> None:
    """Plans that HiGHS misses with some pair of tolerance and presolve (`workflow/solve.py`)."""
    plan, least = planned(drawn(seed)), least_dollars(drawn(seed))
    assert plan is not None
    assert plan.usd_per_h == pytest.approx(least, rel=TIGHT)


def test_columns_that_are_left_out_change_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reduced-cost fixing finds the same cost; its bounds hold, whatever is left out.

    Negative control: of the columns without reduced costs alone, some plans cost more.
    """
    dearer = 0
    for seed in range(DRAWN):
        program = Program(drawn(seed))
        whole = solve(program.lp)
        with monkeypatch.context() as patch:
            patch.setattr(fixing, "FEW", 0)
            found = fixing.solve_fixed(program.lp, program.counts.values(), 1e-7, None, None)
        assert found.infeasible == whole.infeasible, seed
        if whole.infeasible:
            continue
        assert found.cost == pytest.approx(whole.cost, rel=TIGHT, abs=1e-9), seed
        assert found.bound == pytest.approx(whole.cost, rel=TIGHT, abs=1e-9), seed
        relaxed = solve(replace(program.lp, integers=[False] * len(program.lp.integers)))
        few = fixing._solved(program.lp, relaxed, program.counts.values(), 0.0, 1e-7, None, None)
        assert few.bound <= whole.cost * (1 + TIGHT), seed
        dearer += few.values is None or few.cost > whole.cost * (1 + TIGHT)
    assert dearer >= 5


def test_drawn_workflows_have_plans_of_every_kind() -> None:
    """Large ones that are feasible, operators on several workers of a type and of several types,
    and joins whose inputs have unequal ratios.
    """
    feasible = large = plural = split = unequal = 0
    for seed in range(DRAWN):
        workflow = drawn(seed)
        unequal += any(
            len({edge.ratio for edge in workflow.inputs(o.name)}) > 1 for o in workflow.operators
        )
        plan = cheapest(workflow)
        if plan is not None:
            feasible += 1
            large += len(workflow.operators) == 8
            plural += any(load.count > 1 for load in plan.loads)
            split += any(len(plan.loads_of(o.name)) > 1 for o in workflow.operators)
    assert feasible >= 120
    assert large >= 8
    assert min(plural, split) >= 15
    assert unequal >= 40


@pytest.mark.sample(1)
@pytest.mark.parametrize("block", range(8))
def test_plans_in_time_cost_what_enumeration_finds(block: int) -> None:
    for seed in range(block * 5, (block + 1) * 5):
        workflow = drawn(seed, 2, latency=True)
        plan, least = planned(workflow), least_dollars(workflow)
        assert (plan is None) == (least is None), seed
        if plan is not None and least is not None:
            # The oracle's waits are lines between 150 utilizations.
            assert plan.usd_per_h == pytest.approx(least, rel=1e-4, abs=1e-9), seed
            check(plan)


@pytest.mark.slow
def test_an_oracle_of_other_rules_finds_other_costs() -> None:
    """Negative control: workers that serve several operators, messages that go down."""
    shared = one_way = 0
    for seed in range(40):
        workflow = drawn(seed, 4)
        plan = planned(workflow)
        if plan is not None:
            several = least_dollars(workflow, exclusive=False)
            shared += several is not None and several < plan.usd_per_h - TIGHT
            both = least_dollars(replace(workflow, two_way=not workflow.two_way))
            one_way += both is None or abs(both - plan.usd_per_h) > TIGHT
    assert shared > 3
    assert one_way > 3


@pytest.mark.slow
@pytest.mark.parametrize("method", [Method.JELLYBEAN, Method.GREEDY, Method.ALL_EDGE])
def test_other_methods_make_plans_that_hold_and_are_no_cheaper(method: Method) -> None:
    found = 0
    for seed in range(60):
        workflow = drawn(seed)
        plan, best = planned(workflow, method), planned(workflow)
        if plan is not None:
            found += 1
            assert best is not None
            assert plan.usd_per_h >= best.usd_per_h - TIGHT
            check(plan)
    assert found > 10


def check(plan: Plan) -> None:
    """All that a plan has to hold, by formulas of its own."""
    workflow = plan.workflow
    variants = {o.name: o.variant(plan.variants[o.name]) for o in workflow.operators}
    assert accurate(workflow, variants)
    used: dict[str, int] = {}
    tiers: dict[tuple[str, int], float] = {}
    for load in plan.loads:
        latency = variants[load.operator].latency_s[load.worker]
        assert load.rate_per_s * latency <= load.count * (1 + TIGHT)
        used[load.worker] = used.get(load.worker, 0) + load.count
        key = load.operator, workflow.worker(load.worker).tier
        tiers[key] = tiers.get(key, 0.0) + load.rate_per_s
    for worker, count in used.items():
        assert count <= workflow.worker(worker).count
    for source in workflow.sources:
        tiers[source.name, source.tier] = source.rate_per_s
    for name in variants:
        carried = sum(r for (operator, _), r in tiers.items() if operator == name)
        assert carried == pytest.approx(rate(workflow, name))
    traffic = 0.0
    moved: dict[tuple[int, int], float] = {}
    for edge in workflow.edges:
        flows = plan.flows_of(edge.producer, edge.consumer)
        for tier in range(len(workflow.tiers)):
            out = sum(f.rate_per_s for f in flows if f.sender == tier)
            into = sum(f.rate_per_s for f in flows if f.receiver == tier)
            share = rate(workflow, edge.consumer) / rate(workflow, edge.producer)
            assert out == pytest.approx(tiers.get((edge.producer, tier), 0.0) * share, abs=TIGHT)
            assert into == pytest.approx(tiers.get((edge.consumer, tier), 0.0), abs=TIGHT)
        for flow in flows:
            pair = flow.sender, flow.receiver
            assert workflow.two_way or pair[0] <= pair[1]
            size = edge.num_bytes.get(plan.variants.get(edge.producer, ""), edge.num_bytes.get(""))
            assert size is not None
            moved[pair] = moved.get(pair, 0.0) + flow.rate_per_s * size
    for pair, num_bytes in moved.items():
        if pair[0] != pair[1] or pair in workflow.links:
            link = workflow.links[pair]
            assert num_bytes <= link.bytes_per_s * (1 + TIGHT)
            traffic += num_bytes * link.usd_per_byte * 3600
    paid = sum(workflow.worker(w).usd_per_h * n for w, n in used.items())
    assert plan.usd_per_h == pytest.approx(paid + traffic, abs=1e-9)


def test_the_best_reachable_accuracy_is_that_of_enumeration() -> None:
    compared = 0
    for seed in range(60):
        workflow = drawn(seed, 4)
        best = best_accuracy(workflow, {})
        if best is None:
            continue
        if best < 0:  # no variants are in any row of the table
            assert not any(accurate(workflow, own) for own in choices(workflow))
            continue
        compared += 1
        reached = []
        for floor in (best - 1e-6, best + 1e-6):
            asked = replace(workflow, accuracy=replace(workflow.accuracy, floor=max(0.0, floor)))
            reached.append(any(accurate(asked, own) for own in choices(asked)))
        assert reached == [True, False], seed
    assert compared > 30


def choices(workflow: Workflow) -> list[dict[str, Variant]]:
    found: list[dict[str, Variant]] = [{}]
    for operator in workflow.operators:
        found = [{**one, operator.name: v} for one in found for v in operator.variants]
    return found


@pytest.mark.slow
def test_simulated_rates_and_times_are_the_planned_ones() -> None:
    played_some = compared = unequal = 0
    for seed in range(40):
        workflow = drawn(seed, 2, latency=True)
        plan = planned(workflow)
        if plan is None or max(load.utilization for load in plan.loads) > 0.85:
            continue
        played_some += 1
        played = play(plan, 60_000)
        wanted = min(workflow.rates[sink] for sink in workflow.sinks)
        assert played.rate_per_s == pytest.approx(wanted, rel=0.02)
        for load in plan.loads:
            seen = played.utilizations[load.operator, load.worker]
            assert seen == pytest.approx(load.utilization, rel=0.05, abs=0.01)
        sources = {source.name for source in workflow.sources}
        for operator in workflow.order:
            inputs = workflow.inputs(operator.name)
            if {edge.producer for edge in inputs} <= sources:  # requests arrive at random
                planned_s = plan.operator_s(operator.name)
                assert played.operators_s[operator.name] == pytest.approx(planned_s, rel=0.05), seed
                compared += 1
                unequal += len({edge.ratio for edge in inputs}) > 1
    assert played_some > 10
    assert compared > 12
    assert unequal > 1


EVEN = (np.arange(20_000) + 0.5) / 20_000
"""Places of requests, evenly over [0, 1)."""


def pair_shares(before: Routed, after: Routed, num_tiers: int) -> dict[tuple[int, int], float]:
    """Of all requests, by the tiers they come from and go to."""
    return {
        (a, b): float(((before.tier == a) & (after.tier == b)).mean())
        for a, b in product(range(num_tiers), repeat=2)
    }


def test_requests_go_from_tier_to_tier_as_the_flows_say() -> None:
    """Of operators with one input, all pairs of tiers; where branches meet, the shares of tiers."""
    spread = 0
    for seed in range(60):
        plan = planned(drawn(seed, 4))
        if plan is None:
            continue
        workflow, routed = plan.workflow, routes(plan, EVEN)
        for operator in workflow.order:
            name, inputs = operator.name, workflow.inputs(operator.name)
            shares = dict.fromkeys(range(len(workflow.tiers)), 0.0)
            for load in plan.loads_of(name):
                tier = workflow.worker(load.worker).tier
                shares[tier] += load.rate_per_s / workflow.rates[name]
            seen = {tier: float((routed[name].tier == tier).mean()) for tier in shares}
            assert seen == pytest.approx(shares, abs=1e-3), (seed, name)
            if len(inputs) == 1:
                producer = inputs[0].producer
                wanted = dict.fromkeys(product(shares, repeat=2), 0.0)
                for flow in plan.flows_of(producer, name):
                    wanted[flow.sender, flow.receiver] += flow.rate_per_s / workflow.rates[name]
                pairs = pair_shares(routed[producer], routed[name], len(shares))
                assert pairs == pytest.approx(wanted, abs=1e-3), (seed, name)
                spread += sum(share > 0 for share in wanted.values()) > 1
    assert spread >= 5


def test_any_flows_of_a_chain_are_followed() -> None:
    """Flows that are drawn. Negative control: one place for all operators is seen to differ."""
    other = 0
    for seed in range(30):
        rng = np.random.default_rng(seed)
        pairs = rng.dirichlet(np.full(9, 0.5), 3).reshape(3, 3, 3)
        for step in (1, 2):  # what comes into a tier goes out of it
            pairs[step] *= (pairs[step - 1].sum(0) / pairs[step].sum(1))[:, None]
        shares = [pairs[0].sum(1), *(own.sum(0) for own in pairs)]
        names = [f"o{step}" for step in range(4)]
        workers = tuple(Worker(f"{n}{t}", t, 1.0) for n in names for t in range(3))
        latencies = {n: {f"{n}{t}": 0.01 for t in range(3)} for n in names}
        workflow = Workflow(
            "n",
            ("a", "b", "c"),
            (Source("s", 1.0),),
            tuple(Operator(n, (Variant("v", latencies[n]),)) for n in names),
            tuple(Edge(a, b, {"": 0.0}) for a, b in pairwise(["s", *names])),
            workers,
            {pair: Link() for pair in product(range(3), range(3))},
            two_way=True,
        )
        loads = tuple(
            load_of(workflow, (n, "v", f"{n}{t}"), 1, float(own[t]))
            for n, own in zip(names, shares, strict=True)
            for t in range(3)
        )
        flows = [flow_of(workflow, "s", "o0", 0, (0, t), float(shares[0][t])) for t in range(3)]
        for (a, b), own in zip(pairwise(names), pairs, strict=True):
            flows += [
                flow_of(workflow, a, b, 0, pair, float(own[pair]))
                for pair in product(range(3), range(3))
            ]
        routed = routes(Plan(workflow, "", dict.fromkeys(names, "v"), loads, tuple(flows)), EVEN)
        for (a, b), own in zip(pairwise(names), pairs, strict=True):
            seen = pair_shares(routed[a], routed[b], 3)
            assert seen == pytest.approx({p: own[p] for p in seen}, abs=2e-3), (seed, a, b)
            ends = np.cumsum(shares[names.index(b)])
            same = np.minimum(np.searchsorted(ends, routed[a].place), 2)
            other += bool((same != routed[b].tier).mean() > 0.01)
    assert other > 60
