"""FlexFlow's placements: items on groups of devices, and the stages that they make."""

from dataclasses import replace
from itertools import product
from random import Random

import pytest

from parloom.comparators import chains
from parloom.comparators.chains import chain
from parloom.comparators.flexflow import PENALTY_PS
from parloom.comparators.pipelines import costs_by_size
from parloom.comparators.placements import Placement, Placements, placed, stages_of
from parloom.cost.clusters import load_cluster
from parloom.cost.hardware import DataSheets
from parloom.cost.stages import simulate_stages
from parloom.ir.factors import factorize
from parloom.ir.lower_stages import lower_stages
from parloom.ir.plan import Decisions
from parloom.ir.stages import cut, item_edges, stage_items
from parloom.ir.verify import verify_decisions
from parloom.search.pipelines.costs import ItemCosts, Pricer
from parloom.search.request import Request
from tests.property.searched import ADAM, random_graph

CLUSTER = load_cluster("2x2xV100-16GB")
PLENTY = 2**40


def asked(seed: int, num_operators: int = 6) -> Request:
    graph = random_graph(Random(seed), num_operators)
    return Request(graph, DataSheets(CLUSTER), ADAM, PLENTY, all_devices=False)


def costs_of(request: Request, size: int = 1) -> ItemCosts:
    factored = factorize(request.graph)
    pricer = Pricer(request, factored, stage_items(request.graph), request.machine)
    return costs_by_size(request, Decisions(), pricer, 1)[size]


def walk_of(costs: ItemCosts, placement: Placement, limit_bytes: int = PLENTY) -> Placements:
    walk = Placements(costs, CLUSTER, limit_bytes, PENALTY_PS, Random(0))
    walk.go_back(placement)
    return walk


def played(placement: Placement, costs: ItemCosts) -> float:
    """When the last item is over: in turns each device that can takes its next one; two of them are
    a node. Then gradients of weights that are on several are summed.
    """
    free, done = [0.0] * 4, dict[int, float]()
    queues = [[i for i, own in enumerate(placement) if own == device] for device in range(4)]
    while any(queues):
        for device, queue in enumerate(queues):
            reads = [value for value in costs.sent if queue and queue[0] in value.targets]
            if queue and all(value.source in done for value in reads):
                arrived = [free[device]]
                for value in reads:
                    other = placement[value.source]
                    sent_ps = value.ps[0 if other // 2 == device // 2 else 1]
                    arrived.append(done[value.source] + sent_ps * (other != device))
                item = queue.pop(0)
                free[device] = done[item] = max(arrived) + float(costs.loads_ps[item])
    sums = [ps for one, other, ps in costs.shared_ps if placement[one] != placement[other]]
    return max(free) + sum(sums)


@pytest.mark.parametrize("seed", range(4))
def test_the_cost_is_when_the_last_item_is_over(seed: int) -> None:
    shared = ((0, 3, 10**9), (1, 2, 10**8))
    costs, rng = replace(costs_of(asked(seed)), shared_ps=shared), Random(seed)
    for _ in range(20):
        placement = tuple(rng.randrange(4) for _ in costs.items)
        assert walk_of(costs, placement).cost() == played(placement, costs)


def test_memory_above_the_limit_is_penalized() -> None:
    costs = costs_of(asked(0))
    placement = (0,) * len(costs.items)
    held = int((costs.stored_bytes + costs.kept_bytes).sum())
    fits, more = (walk_of(costs, placement, held - less).cost() for less in (0, 7))
    assert fits == walk_of(costs, placement).cost()
    assert more == fits + 7 * PENALTY_PS


@pytest.mark.parametrize("seed", range(20))
def test_stages_are_convex_in_order_and_not_cut_for_nothing(seed: int) -> None:
    request, rng = asked(seed, 8), Random(seed)
    keys, edges = stage_items(request.graph), item_edges(request.graph)
    placement = tuple(rng.randrange(3) for _ in keys)
    stages = stages_of(placement, edges)
    assert sorted(i for stage in stages for i in stage) == list(range(len(keys)))
    assert all(len({placement[i] for i in stage}) == 1 for stage in stages)
    place = {item: index for index, stage in enumerate(stages) for item in stage}
    assert all(place[source] <= place[target] for source, target in edges)
    cut(request.graph, [[keys[i] for i in stage] for stage in stages])  # raises where it is none
    assert len(stages_of((1,) * len(keys), edges)) == 1


def test_a_stage_is_cut_where_another_one_lies_between() -> None:
    diamond = [(0, 1), (0, 2), (1, 3), (2, 3)]
    assert stages_of((0, 0, 1, 0), diamond) == [[0, 1], [2], [3]]
    assert stages_of((0, 1, 0, 0), diamond) == [[0, 2], [1], [3]]
    assert stages_of((0, 1, 1, 0), diamond) == [[0], [1, 2], [3]]
    assert stages_of((0, 1, 2, 1), diamond) == [[0], [2], [1, 3]]
    apart = [(0, 2), (1, 3)]  # 2 would wait for 1 if it were with 3, and 3 for 0
    assert stages_of((0, 1, 1, 0), apart) == [[0], [1, 2], [3]]


@pytest.mark.parametrize("seed", range(3))
def test_a_chain_reaches_the_best_placement(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it accepts enough that is worse."""
    monkeypatch.setattr(chains, "BETA", 10.0)
    costs = costs_of(asked(seed, 3), size=2)
    every = product(range(2), repeat=len(costs.items))
    best = min(walk_of(costs, placement).cost() for placement in every)
    walk = walk_of(costs, (0,) * len(costs.items))
    cost, placement = chain(walk, 2000, Random(seed))
    assert cost == best
    assert walk_of(costs, placement).cost() == best


def test_placements_are_plans_of_stages() -> None:
    request, said = asked(3, 8), list[str]()
    plans = list(placed(request, Decisions(), PENALTY_PS, 200, said.append))
    assert len(said) == 4  # groups of one and of two devices, from two starts
    assert plans
    for plan in plans:
        verify_decisions(request.graph, plan)
        lowered = lower_stages(request.graph, plan)
        assert simulate_stages(lowered, CLUSTER, plan, ADAM).step_ps > 0
