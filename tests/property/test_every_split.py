"""`auto` against all pipelines of small models: cuts, placements, meshes, layouts, schedules and
numbers of microbatches.
"""

from dataclasses import replace
from itertools import islice
from math import inf
from random import Random

import pytest

from parloom.comparators.baselines import METHODS
from parloom.cost.clusters import load_cluster
from parloom.cost.hardware import DataSheets
from parloom.errors import InputError, LayoutError
from parloom.ir.factors import factorize
from parloom.ir.graph import Graph
from parloom.ir.mesh import Cluster, part_of
from parloom.ir.plan import Decisions
from parloom.ir.stages import stage_items
from parloom.search.contexts import Contexts
from parloom.search.pipelines import every as every_split
from parloom.search.pipelines.auto import PipelineSearch
from parloom.search.pipelines.costs import ItemCosts, Pricer
from parloom.search.pipelines.cuts import all_placements, item_sets, stirling
from parloom.search.pipelines.every import EverySplit, Layouts
from parloom.search.request import Request, base_of
from tests.property.every_pipeline import least_of_all
from tests.property.searched import ADAM, random_graph

CLUSTER = load_cluster(
    "{name: slow, device: {name: core, memory: 2GiB, memory_bandwidth: 5GB/s,"
    " rates: {fp32: 12GFLOP/s}}, backend: gloo, levels: [{name: net, size: 2,"
    " bandwidth: 5Gbit/s, latency: 20us}, {name: wide, size: 2, bandwidth: 1Gbit/s,"
    " latency: 50us}]}"
)
PLENTY = 2**40


def layouts_of(request: Request, rng: Random, most: int, counts: tuple[int, ...]) -> Layouts:
    """At most so many layouts for each size of groups and number of microbatches."""
    graph, found = request.graph, dict[int, dict[int, list[ItemCosts]]]()
    pricer = Pricer(request, factorize(graph), stage_items(graph), request.machine)
    for count in counts:
        for size in (1, 2):
            part = part_of(request.cluster, size)
            drawn = ["data_parallel", *["random"] * (most - 1)] if size > 1 else ["data_parallel"]
            own: list[Decisions] = []
            for method in drawn:
                try:
                    own += list(METHODS[method](graph, part, count, rng.getrandbits(16)))[:1]
                except (LayoutError, InputError):
                    continue
            priced = [pricer.price(whole) for whole in dict.fromkeys(own)]
            if priced:
                found.setdefault(count, {})[size] = priced
    return found


def asked(graph: Graph, cluster: Cluster, limit: int = PLENTY) -> Request:
    return Request(graph, DataSheets(cluster), ADAM, limit, all_devices=False)


def searched(request: Request, layouts: Layouts) -> PipelineSearch:
    """The search with these layouts, all splits looked at."""
    search = PipelineSearch(Contexts(request, base_of(request)), inf, lambda text: None)
    every = every_of(search, layouts)
    search.judge_every(every, most=10_000)
    assert every.is_whole
    return search


def every_of(search: PipelineSearch, layouts: Layouts) -> EverySplit:
    """All splits of these layouts."""
    return EverySplit(search.tried.judge, layouts, search.tried.spend)


def drawn(seed: int, num_operators: int) -> tuple[Request, Layouts]:
    """A question about a random graph, and layouts: on two devices, or on four."""
    rng = Random(seed)
    graph = random_graph(rng, num_operators, (256, 512), (96, 192))
    cluster, counts = (part_of(CLUSTER, 2), (1, 2, 4)) if seed % 2 else (CLUSTER, (2,))
    request = asked(graph, cluster)
    return request, layouts_of(request, rng, 3 if seed % 2 else 2, counts)


def best_of(request: Request, search: PipelineSearch) -> float:
    """The step of the fastest plan that fits."""
    fitting = [one for one in search.tried.judged if one.timeline.peak_bytes <= request.limit_bytes]
    return min((one.timeline.step_ps for one in fitting), default=inf)


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", [1, 3, 4, 7])
def test_no_pipeline_is_faster(seed: int) -> None:
    request, layouts = drawn(seed, 4)
    search = searched(request, layouts)
    least = least_of_all(search.tried.judge, layouts, request.cluster.num_devices)
    assert least.number > len(search.tried.judged)
    assert best_of(request, search) == least.step_ps


@pytest.mark.parametrize("seed", [1, 3, 7])
def test_no_pipeline_is_faster_in_little_memory(seed: int) -> None:
    """Less than the fastest holds."""
    request, layouts = drawn(seed, 3)
    free = searched(request, layouts)
    fastest = min(free.tried.judged, key=lambda one: one.timeline.step_ps)
    tight = replace(request, limit_bytes=int(0.9 * fastest.timeline.peak_bytes))
    search = searched(tight, layouts)
    least = least_of_all(search.tried.judge, layouts, tight.cluster.num_devices)
    assert best_of(tight, search) == least.step_ps
    assert least.step_ps >= fastest.timeline.step_ps


@pytest.mark.sample(6)
@pytest.mark.parametrize("seed", [0, 1, 2, 3, 8, 15, 42, 48, 53, 117])
def test_bounds_of_splits_hold(seed: int) -> None:
    """None is simulated to be faster, and they come in ascending order: with operators that no
    stage owns (48), and weights of several stages (117).
    """
    request, layouts = drawn(seed, 4)
    search = PipelineSearch(Contexts(request, base_of(request)), inf, lambda text: None)
    every = every_of(search, layouts)
    cuts = every.promising(10_000)
    assert cuts
    before = 0.0
    for least_ps, split in islice(every.splits(cuts), 60):
        assert least_ps >= before
        before = least_ps
        found = search.tried.judge.judge(split)
        assert found is not None
        assert found.timeline.step_ps >= least_ps * (1 - 1e-9)


def test_a_search_that_ends_early_is_not_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it has simulated or priced as much as it may."""
    request, layouts = drawn(1, 3)
    for most, priced in ((1, every_split.MOST_PRICED), (10_000, 1)):
        monkeypatch.setattr(every_split, "MOST_PRICED", priced)
        search = PipelineSearch(Contexts(request, base_of(request)), inf, lambda text: None)
        every = every_of(search, layouts)
        search.judge_every(every, most)
        assert len(search.tried.judged) == 1
        assert not every.is_whole


def test_all_splits_of_some_cuts_are_not_whole() -> None:
    """Which are chosen by estimates, that prove nothing."""
    request, layouts = drawn(1, 3)
    search = PipelineSearch(Contexts(request, base_of(request)), inf, lambda text: None)
    every = every_of(search, layouts)
    assert list(every.splits(every.promising(5)))
    assert not every.is_whole
    assert list(every.splits(every.promising(1000)))
    assert every.is_whole


def test_all_cuts_of_a_graph_are_there() -> None:
    """Two branches of two items that meet: sets with what they read, and ways to cut them."""
    edges = [(0, 1), (2, 3), (1, 4), (3, 4)]
    sets = item_sets(5, edges)
    assert len(sets) == 3 * 3 + 1
    for some in sets:
        assert all(not some >> target & 1 or some >> source & 1 for source, target in edges)


@pytest.mark.parametrize(("stages", "groups"), [(4, 2), (5, 3), (6, 6), (7, 1)])
def test_placements_are_counted(stages: int, groups: int) -> None:
    every = list(all_placements(stages, groups))
    assert len(set(every)) == len(every) == stirling(stages, groups)


def test_a_search_that_leaves_splits_out_is_seen() -> None:
    """The oracle of the tests above can fail: without stages that share a group."""
    request, layouts = drawn(34, 3)
    search = searched(request, layouts)
    apart = [
        one for one in search.tried.judged if len(set(one.split.groups)) == len(one.split.groups)
    ]
    assert apart
    assert min(one.timeline.step_ps for one in apart) > best_of(request, search)
