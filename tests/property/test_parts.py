"""Plans on a part of a cluster: found where they are as fast, and bounds hold for them."""

from dataclasses import replace
from random import Random

import pytest

from parloom.candidates import candidates
from parloom.cost.clusters import load_cluster
from parloom.cost.hardware import DataSheets
from parloom.errors import InputError
from parloom.ir.factors import factorize
from parloom.ir.graph import Graph
from parloom.ir.mesh import Cluster, HourlyPrice, check_part, part_of, part_sizes
from parloom.ir.plan import Decisions
from parloom.report.words import part_words
from parloom.search.contexts import Contexts
from parloom.search.least_compute import least_compute_ps, least_work_ps
from parloom.search.meshes import logical_meshes, on_all
from parloom.search.optimize import Driver, search
from parloom.search.pinned import resolve
from parloom.search.pins import parse_pin
from parloom.search.request import Request
from parloom.search.searched import Searched
from tests.property.searched import ADAM, random_graph
from tests.unit.graphs import perceptron
from tests.unit.test_simulate import model

PLENTY = 2**50
NODES = load_cluster("2x4xH100")


def slow(cluster: Cluster, factor: float) -> Cluster:
    """With outermost links that are slower by `factor`."""
    *inner, last = cluster.levels
    link = replace(last.link, bandwidth_bytes_per_s=last.link.bandwidth_bytes_per_s / factor)
    return replace(cluster, levels=(*inner, replace(last, link=link)))


def request_of(graph: Graph, cluster: Cluster, limit: int = PLENTY) -> Request:
    """About a cluster and its parts."""
    return Request(graph, DataSheets(cluster), ADAM, limit, all_devices=False)


def searched(asked: Request) -> Searched:
    return search(asked, Decisions(), lambda text: None)


@pytest.mark.parametrize(
    ("spec", "sizes"),
    [
        ("1xH100", ()),
        ("6xcpu", (3, 2, 1)),
        ("2x8xH100", (8, 4, 2, 1)),
        ("3x4xH100", (4, 2, 1)),
        ("4x6xH100", (12, 6, 3, 2, 1)),
    ],
)
def test_parts_are_the_first_devices(spec: str, sizes: tuple[int, ...]) -> None:
    cluster = load_cluster(spec)
    assert part_sizes(cluster) == sizes
    primes = cluster.prime_axes()
    for size in sizes:
        part = part_of(cluster, size)
        assert part.num_devices == size
        assert [p.level for p in part.prime_axes()] == [p.level for p in primes][
            : len(part.prime_axes())
        ]
        check_part(cluster, size)
    check_part(cluster, cluster.num_devices)
    with pytest.raises(InputError, match=f"7 devices are no part of .* uses {cluster.num_devices}"):
        check_part(cluster, 7)


@pytest.mark.parametrize("factor", [1.0, 100.0])
@pytest.mark.parametrize("seed", range(2))
def test_no_plan_of_a_part_is_below_the_bound(seed: int, factor: float) -> None:
    asked = request_of(random_graph(Random(seed), num_operators=4), slow(NODES, factor))
    found = searched(asked)
    assert found.solver_gap is not None
    assert found.bound_ps > 0
    for part in asked.parts():
        there = searched(part)
        assert found.bound_ps <= there.proposals[0].step_ps
        assert found.bound_ps <= there.bound_ps * (1 + 1e-9)


@pytest.mark.sample(1)
@pytest.mark.parametrize("factor", [1.0, 100.0])
def test_no_part_alone_has_a_faster_plan(factor: float) -> None:
    asked = request_of(model(), slow(NODES, factor))
    best = searched(asked).proposals[0].step_ps
    alone = [
        searched(one).proposals[0].step_ps
        for one in (replace(asked, all_devices=True), *asked.parts())
    ]
    assert best <= min(alone) * (1 + 5e-3)
    assert best < max(alone)


def test_a_part_is_found_where_links_between_nodes_are_slow() -> None:
    asked = request_of(model(), slow(NODES, 1e4))
    found = searched(asked).proposals[0]
    whole = searched(replace(asked, all_devices=True)).proposals[0]
    assert found.decisions.mesh.num_ranks < 8 == whole.decisions.mesh.num_ranks
    assert found.step_ps <= whole.step_ps


@pytest.mark.parametrize("seed", range(3))
def test_all_devices_may_repeat_what_a_part_does(seed: int) -> None:
    graph = model() if seed == 0 else random_graph(Random(seed), num_operators=4)
    asked = request_of(graph, slow(NODES, 1e4))
    alone = min(searched(part).proposals[0].step_ps for part in asked.parts())
    whole = searched(replace(asked, all_devices=True))
    assert {plan.decisions.num_ranks for plan in whole.proposals} == {8}
    assert whole.proposals[0].step_ps <= alone * (1 + 5e-3)


def test_a_part_is_not_repeated_where_meshes_are_pinned_or_have_no_name_left() -> None:
    asked = replace(request_of(model(), NODES), all_devices=True)
    assert [part.cluster.num_devices for part in asked.repeated()] == [4, 2, 1]
    assert not list(request_of(model(), NODES).repeated())
    pinned = resolve([parse_pin("mesh=2x4", forbidden=True)], model(), factorize(model()))
    assert not list(replace(asked, pinned=pinned).repeated())
    part = part_of(load_cluster("8x8xH100"), 16)
    four = next(mesh for mesh in logical_meshes(part, 4) if len(mesh.axes) == 4)
    assert on_all(four, load_cluster("8x8xH100")) is None
    (one,) = logical_meshes(part, 1)
    whole = on_all(one, load_cluster("8x8xH100"))
    assert whole is not None
    assert (whole.names, whole.num_ranks, whole.axes[1]) == (("y", "x"), 64, one.axes[0])
    assert whole.is_nested


@pytest.mark.parametrize("graph", [model(), perceptron(), random_graph(Random(1), num_operators=6)])
@pytest.mark.parametrize("cluster", [NODES, load_cluster("2x4xcpu")])
def test_no_part_computes_in_less_than_its_share(graph: Graph, cluster: Cluster) -> None:
    """What leaves out parts: the work of one device, divided by theirs, bounds computing there."""
    asked = request_of(graph, cluster)
    contexts = Contexts(asked, Decisions())
    work = least_work_ps(contexts)
    least = []
    for part in asked.parts():
        driver = Driver(part, Decisions(), lambda text: None)
        least.append((least_compute_ps(driver.contexts), part.cluster.num_devices))
        assert least_work_ps(contexts.on_part(part)) == work
    assert all(ps >= work / devices * (1 - 1e-9) for ps, devices in least)
    assert any(ps < work for ps, _ in least)  # less would not bound them


def test_parts_that_compute_too_long_are_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = model()
    said: list[str] = []
    monkeypatch.setattr("parloom.search.optimize.least_work_ps", lambda contexts: 1e18)
    search(request_of(graph, NODES), Decisions(), said.append)
    assert {line.split(":")[0] for line in said} == {
        line.split(":")[0]
        for line in searched_lines(replace(request_of(graph, NODES), all_devices=True))
    }


def searched_lines(asked: Request) -> list[str]:
    said: list[str] = []
    search(asked, Decisions(), said.append)
    return said


@pytest.mark.parametrize("method", ["data_parallel", "fsdp", "megatron", "tofu"])
def test_methods_are_tried_on_parts(method: str) -> None:
    graph = model()
    cluster = slow(NODES, 1e4)
    asked = replace(request_of(graph, cluster), method=method)
    found = candidates(asked, lambda text: None).found
    whole = candidates(replace(asked, all_devices=True), lambda text: None).found
    ranks = {candidate.decisions.num_ranks for candidate in found}
    assert ranks == {8, 4, 2, 1}
    assert {candidate.decisions.num_ranks for candidate in whole} == {8}
    for candidate in found:
        assert candidate.prediction is not None
        devices = candidate.decisions.num_ranks
        assert candidate.name.endswith(f", {devices} devices") == (1 < devices < 8)
    steps = {
        n: min(c.prediction.step_s for c in found if c.prediction and c.decisions.num_ranks == n)
        for n in ranks
    }
    assert min(steps[4], steps[2], steps[1]) < steps[8]


def test_what_does_not_fit_on_more_devices_is_not_tried_on_fewer() -> None:
    asked = request_of(model(), NODES, limit=1000)
    found = candidates(replace(asked, method="fsdp"), lambda text: None).found
    assert {candidate.decisions.mesh.num_ranks for candidate in found} == {8}


def test_every_rank_doing_all_the_work_is_a_choice() -> None:
    """Where nothing may travel, all that computes whole: one device is as fast as all."""
    graph = model()
    asked = request_of(graph, slow(NODES, 1e6))
    inner = replace(asked.cluster.levels[0], link=asked.cluster.levels[1].link)
    cluster = replace(asked.cluster, levels=(inner, asked.cluster.levels[1]))
    found = searched(request_of(graph, cluster))
    assert found.proposals[0].decisions.mesh.num_ranks == 1
    whole = searched(Request(graph, DataSheets(cluster), ADAM, PLENTY)).proposals[0]
    assert whole.step_ps == found.proposals[0].step_ps
    assert not any(axes for node in whole.decisions.nodes for _, axes in node.factors)


def test_words_of_parts() -> None:
    four, eight = (
        searched(Request(perceptron(), DataSheets(there), ADAM, PLENTY))
        for there in (part_of(NODES, 4), NODES)
    )
    on_four, on_eight = four.proposals[0].decisions, eight.proposals[0].decisions
    cluster = replace(NODES, device=replace(NODES.device, price=HourlyPrice(2.0)))
    half = "half the price ($8.00 an hour, not $16.00)"
    assert part_words(cluster, on_eight, 1.0, 8, 1.0) == ()
    assert part_words(cluster, on_eight, 1.0, 4, 1.004) == (
        f"the same step on one node (+0.4%), {half}: --devices 4",
    )
    assert part_words(cluster, on_four, 1.0, 1, 1.0) == (
        f"one node will do, {half}: 4 of 8 devices stay idle,"
        " and no plan that was found on more is faster",
        "the same step on one device (+0.0%), 0.25 of the price ($2.00 an hour, not $8.00):"
        " --devices 1",
    )
    (line,) = part_words(load_cluster("8xcpu"), on_four, 1.0, 4, 1.0)
    assert line.startswith("4 devices will do: 4 of 8 devices stay idle")
