"""Cuts and splits that are known, and what comparators call themselves."""

import inspect
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from parloom import candidates as search_candidates
from parloom.arguments import COUNTED, METHODS
from parloom.candidates import COMPARATORS, Comparator, candidates
from parloom.comparators.alpa import deciding, heavy
from parloom.comparators.flexflow import data_parallel, output_factors
from parloom.comparators.plans import joined
from parloom.comparators.tofu import bytes_as_seconds, cut
from parloom.cost.clusters import load_cluster
from parloom.cost.hardware import DataSheets
from parloom.cost.walk import Walker
from parloom.ir.expected import Status
from parloom.ir.factors import factorize
from parloom.ir.graph import Graph
from parloom.ir.lower import lower
from parloom.ir.mesh import Mesh, MeshAxis
from parloom.ir.plan import (
    Decisions,
    NodeDecision,
    Optimizer,
    ParameterDecision,
    Storage,
    one_stage,
)
from parloom.ir.regular_parts import used_cluster
from parloom.search.folding import program_of
from parloom.search.request import Request, Say
from tests.unit.graphs import Shape, graph, node, stack

SGD = Optimizer("sgd", 0)
BASE = Decisions()
FLOAT = 4


def chain(batch: int, *widths: int) -> Graph:
    """x [batch, widths[0]] through products to [batch, widths[-1]], and its sum."""
    weights: dict[str, Shape] = {f"w{i}": (n, k) for i, (k, n) in enumerate(pairwise(widths))}
    products = [
        node("linear", "x" if i == 0 else f"h{i - 1}", name, to=f"h{i}",
             shape=(batch, widths[i + 1]), path=f"l{i}")
        for i, name in enumerate(weights)
    ]  # fmt: skip
    last = f"h{len(weights) - 1}"
    return graph(
        weights,
        {"x": ((batch, widths[0]), "float32")},
        *products,
        node("sum", last, to="loss", shape=()),
    )


def request_of(made: Graph, spec: str = "2xH100", **other: int) -> Request:
    cluster = load_cluster(spec)
    return replace(Request(made, DataSheets(cluster), SGD, cluster.device.memory_bytes), **other)  # type: ignore[arg-type]


def cuts(plan: Decisions) -> dict[str, dict[str, tuple[str, ...]]]:
    return {n.key: dict(n.factors) for n in plan.nodes if "linear" in n.key}


def tofu(made: Graph, spec: str = "2xH100") -> Decisions:
    (plan,) = COMPARATORS["tofu"](request_of(made, spec), BASE, lambda text: None)
    return plan


def test_tofu_cuts_a_chain_of_small_products_by_samples() -> None:
    """Weights are fetched, which is less than what flows."""
    plan = tofu(chain(4096, 16, 16, 16))
    assert cuts(plan) == {"l0:linear#0": {"d0": ("x",)}, "l1:linear#0": {"d0": ("x",)}}
    assert [p.weight.axes for p in plan.parameters] == [("x",), ("x",)]


def test_tofu_cuts_a_chain_of_large_products_by_columns_then_rows() -> None:
    """Only the sum at the end is exchanged: no weight and nothing between the products."""
    plan = tofu(chain(4, 1024, 1024, 1024))
    assert cuts(plan) == {"l0:linear#0": {"n": ("x",)}, "l1:linear#0": {"k": ("x",)}}
    assert plan.parameters == ()


def test_a_cut_costs_the_bytes_that_cross_it() -> None:
    """By samples: half of every weight comes, and half of its gradient goes. Columns, then rows:
    half of the partial result goes, to be added up there, and half of its gradient comes.
    """
    for made, expected in (
        (chain(4096, 16, 16, 16), 2 * 2 * (16 * 16 * FLOAT) // 2),
        (chain(4, 1024, 1024, 1024), 2 * (4 * 1024 * FLOAT) // 2),
    ):
        cluster = bytes_as_seconds(load_cluster("2xH100"))
        program = program_of(made, factorize(made))
        mesh = Mesh((MeshAxis("cut0", cluster.prime_axes()),))
        walker = Walker({}, mesh, cluster)
        found = cut(program, walker, BASE, SGD, [{} for _ in program.operators])
        assert found.sent_bytes == pytest.approx(expected, rel=1e-3)


def test_tofu_splits_every_product_and_weight_by_every_cut() -> None:
    made = chain(64, 128, 256, 128, 64)
    plan = tofu(made, "2x4xH100")
    for factors in cuts(plan).values():
        assert plan.mesh.size(tuple(a for axes in factors.values() for a in axes)) == 8
    stored = {p.name: p for p in plan.parameters}
    for parameter in lower(made, plan).parameters:
        axes = set(parameter.layout.axes)
        axes |= set(
            stored[parameter.input.target].weight.axes if parameter.input.target in stored else ()
        )
        assert axes == set(plan.mesh.names)


def test_tofu_cuts_the_slowest_links_first() -> None:
    """The first axis of the mesh is between nodes."""
    plan = tofu(chain(64, 128, 256, 128), "2x4xH100")
    assert plan.mesh.axes[0].level == 1


@pytest.mark.parametrize(
    ("kind", "sent"), [("all_reduce", 1.0), ("all_gather", 0.5), ("reduce_scatter", 0.5)]
)
def test_links_that_count_bytes(kind: str, sent: float) -> None:
    """Of a kilobyte, what each of two devices sends, in picoseconds; latency does not count."""
    cluster = bytes_as_seconds(load_cluster("2x2xA100"))
    for prime in cluster.prime_axes():
        walker = Walker({}, Mesh((MeshAxis("x", (prime,)),)), cluster)
        assert walker.exchange(kind, ("x",), 1024).seconds * 1e12 == pytest.approx(sent * 1024)


def test_axes_that_go_together_are_one() -> None:
    primes = tuple(reversed(load_cluster("2x4xH100").prime_axes()))
    mesh = Mesh(tuple(MeshAxis(name, (prime,)) for name, prime in zip("abc", primes, strict=True)))
    whole = NodeDecision("l0:linear#0", (("n", ("a", "b")), ("k", ("c",))))
    plan = Decisions(one_stage(mesh), (whole,), (ParameterDecision("w0", Storage(("a", "b"))),))
    found = joined(plan)
    assert [axis.size for axis in found.mesh.axes] == [4, 2]
    assert found.mesh.axes[0].primes == primes[:2]
    assert dict(found.nodes[0].factors) == {"n": ("x",), "k": ("y",)}
    assert found.parameters[0].weight.axes == ("x",)
    apart = replace(plan, parameters=(ParameterDecision("w0", Storage(("b",))),))
    assert [axis.size for axis in joined(apart).mesh.axes] == [2, 2, 2]


def test_flexflow_begins_with_data_parallelism() -> None:
    made = chain(64, 32, 32, 32)
    found = list(COMPARATORS["flexflow"](request_of(made, budget=30), BASE, lambda text: None))
    first, *rest = found
    assert cuts(first) == {"l0:linear#0": {"d0": ("x",)}, "l1:linear#0": {"d0": ("x",)}}
    assert all(found.count(plan) == 1 for plan in found)
    placed = [plan for plan in rest if len(plan.stages) > 1]
    assert 1 <= len(rest) - len(placed) <= 3
    assert 1 <= len(placed) <= 2  # on groups of one device, from two starts
    assert found[-len(placed) :] == placed


def test_flexflow_leaves_no_device_out_of_the_middle() -> None:
    """A chain of two products and a sum on eight devices has items on up to three of them."""
    said: list[str] = []
    request = request_of(chain(64, 32, 32, 32), "1x8xH100", budget=300)
    for plan in COMPARATORS["flexflow"](request, BASE, said.append):
        used_cluster(request.cluster, plan)
    assert any("devices are no part of 8xH100" in line for line in said)


def test_an_operator_is_split_along_its_output() -> None:
    """Not along what it contracts, nor along what no axis divides."""
    made = chain(6, 8, 5)
    program = program_of(made, factorize(made))
    primes = tuple(reversed(load_cluster("2x3xH100").prime_axes()))
    mesh = Mesh(tuple(MeshAxis(n, (p,)) for n, p in zip("ab", primes, strict=True)))
    assert output_factors(program.operators[0], mesh) == ("d0",)


def test_samples_that_do_not_divide_are_over_as_many_devices_as_they_can() -> None:
    primes = tuple(reversed(load_cluster("2x4xH100").prime_axes()))
    mesh = Mesh(tuple(MeshAxis(n, (p,)) for n, p in zip("abc", primes, strict=True)))
    for batch, axes in ((8, ("a", "b", "c")), (12, ("a", "b")), (7, ())):
        made = chain(batch, 8, 8)
        first = data_parallel(program_of(made, factorize(made)), mesh)[0]
        assert first == ((("d0", axes),) if axes else ())


def test_what_alpa_takes_for_heavy() -> None:
    """Products, not lookups in tables of weights, which choose for themselves all the same."""
    made = stack(1)
    program = program_of(made, factorize(made))
    names = {i: o.node.op for i, o in enumerate(program.operators)}
    assert {names[i] for i in heavy(program)} == {"linear"}
    assert {names[i] for i in deciding(program)} == {"linear", "embedding"}


def test_comparators_are_methods_and_named_in_their_plans() -> None:
    assert set(COMPARATORS) < set(METHODS)
    for method in COMPARATORS:
        asked = replace(request_of(chain(64, 32, 32), budget=30), method=method)
        found = candidates(asked, lambda text: None).found
        assert found
        title = {
            "alpa_inter": "alpa, inter-operator part",
            "alpa_intra": "alpa, intra-operator part",
        }.get(method, method)
        staged = method in ("alpa", "alpa_inter", "gpipe", "graphpipe", "pipedream", "whale")
        where = "2 stages on 2 x 1 devices" if staged else "x=2"
        assert found[0].name.startswith(f"{title} ({where}")


@pytest.mark.parametrize("method", METHODS)
def test_every_method_has_a_plan_for_one_device(method: str) -> None:
    asked = replace(request_of(chain(64, 32, 32), "1xcpu"), method=method)
    found = candidates(asked, lambda text: None).found
    assert found
    assert {c.decisions.mesh.num_ranks for c in found} == {1}


def test_an_interrupted_comparator_keeps_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    made = chain(64, 32, 32)

    def stopped_after(count: int) -> Comparator:
        def method(asked: Request, base: Decisions, say: Say) -> Iterator[Decisions]:
            yield from [tofu(made)] * count
            raise KeyboardInterrupt

        return method

    monkeypatch.setattr(search_candidates, "COMPARATORS", {"tofu": stopped_after(1)})
    found = candidates(replace(request_of(made), method="tofu"), lambda text: None)
    assert found.status is Status.INTERRUPTED
    assert len(found.found) == 1
    monkeypatch.setattr(search_candidates, "COMPARATORS", {"tofu": stopped_after(0)})
    with pytest.raises(KeyboardInterrupt):
        candidates(replace(request_of(made), method="tofu"), lambda text: None)


def test_the_methods_that_count_work_are_those_that_a_budget_is_taken_from() -> None:
    assert set(COUNTED) <= set(METHODS)
    for method in COMPARATORS:
        module = Path(inspect.getfile(COMPARATORS[method]))
        assert ("request.budget" in module.read_text(encoding="utf-8")) == (method in COUNTED)
