"""Explained plans: sums that add up, words and tables, and what differs between two plans."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import RenderableType

from parloom.choose import Choice
from parloom.comparators.baselines import data_parallel, fsdp, megatron, random_plans
from parloom.cost.cluster_file import one_line
from parloom.cost.clusters import load_cluster
from parloom.cost.holdings import holdings
from parloom.cost.ledger import MAIN
from parloom.cost.tasks import COMPONENTS
from parloom.cost.units import format_bytes
from parloom.explain import explain
from parloom.ir.expected import Constraint, Prediction, Status
from parloom.ir.plan import ActivationDecision, Decisions
from parloom.report.bars import bars
from parloom.report.case import Case
from parloom.report.explain import plan_explained
from parloom.report.explain_screen import plan_explained_screen, remade_words
from parloom.report.grid import mesh_grid
from parloom.report.memory import recomputed
from parloom.report.output import rendered
from parloom.report.versus import versus, versus_screen
from parloom.report.words import INTERRUPTED
from parloom.search.request import ScoredPlan
from tests.examples import examples
from tests.unit.explained import case_of
from tests.unit.graphs import stack

CLUSTER = load_cluster("2x4xcpu")
GRAPH = stack(3)


def screen(found: RenderableType, width: int = 200) -> str:
    return rendered(found, width)


def tensor_parallel(count: int = 1) -> Decisions:
    plans = megatron(GRAPH, CLUSTER, count)
    return next(plan for plan in plans if plan.mesh["tensor"].size == 4)


def check(case: Case) -> None:
    """All shares of a document are parts of one step, and it is JSON."""
    document = plan_explained(case)
    assert json.loads(json.dumps(document)) == document
    step = case.ledger.step_ps
    assert sum(cause["ps"] for cause in document["time"]) == step
    assert sum(row["share"] for row in document["time"]) == pytest.approx(1.0)
    # All that is in no block and not in main is the step program.
    apart = sum(place["s"] for place in document["places"])
    assert apart <= document["step_s"] * (1 + 1e-9)
    assert sum(document["peak"]["memory"].values()) == case.timeline.peak_bytes
    for place in document["places"]:
        rows = sum(row["own_s"] + row["moving_s"] for row in place["operators"])
        assert rows + place["others_s"] == pytest.approx(place["s"])
    stored = {k: sum(row[f"{k}_bytes"] for row in document["parameters"])
              for k in ("weight", "gradient", "optimizer")}  # fmt: skip
    held = case.priced.parameters.stored_bytes()
    assert [stored["weight"], stored["gradient"], stored["optimizer"]] == list(held.values())
    text = screen(plan_explained_screen(document, mesh_grid(case.mesh), (), "plan.json"))
    assert "where the step goes" in text
    assert document["bound_by"] in text


@pytest.mark.parametrize("count", [1, 2])
def test_rules_of_thumb(count: int) -> None:
    for plan in (
        *data_parallel(GRAPH, CLUSTER, count),
        *fsdp(GRAPH, CLUSTER, count),
        tensor_parallel(count),
    ):
        check(case_of(GRAPH, CLUSTER, plan))


@examples(12)
@given(st.integers(0, 1000))
def test_any_plan(seed: int) -> None:
    check(case_of(GRAPH, CLUSTER, next(random_plans(GRAPH, CLUSTER, seed=seed))))


def test_padded_vocabularies() -> None:
    graph = stack(2, vocab=63)
    plan = next(p for p in megatron(graph, CLUSTER) if p.mesh["tensor"].size == 2)
    assert plan.rewrites
    check(case_of(graph, CLUSTER, plan))


def test_one_device() -> None:
    cluster = load_cluster("1xH100")
    (plan,) = data_parallel(GRAPH, cluster)
    case = case_of(GRAPH, cluster, plan)
    check(case)
    assert plan_explained(case)["bound_by"].endswith("nothing is waited for")


def test_what_is_said_of_a_plan() -> None:
    plan = replace(tensor_parallel(), activations=(ActivationDecision("blocks.1", "recompute"),))
    case = case_of(GRAPH, CLUSTER, plan)
    document = plan_explained(case)
    main, block = document["places"]
    assert (main["place"], block["place"]) == (MAIN, "block")
    assert (block["calls"], block["recomputed"]) == (3, 1)
    by_key = {operator["key"]: operator for operator in block["operators"]}
    assert by_key["up:linear#0"]["axes"] == {"data": ["samples"], "tensor": ["output features"]}
    assert by_key["down:linear#0"]["axes"] == {"data": ["samples"], "tensor": ["input features"]}
    assert by_key[":add#0"]["moving_s"] > 0
    kinds = {(row["transfer"], tuple(row["axes"])) for row in document["collectives"]}
    assert ("activations all_reduce", ("tensor",)) in kinds
    text = screen(plan_explained_screen(document, mesh_grid(case.mesh), (), "plan.json"))
    assert "block, 3 calls, 1 of them recompute:" in text
    assert "recomputation" in text
    assert "blocks.1: all " in text
    assert "blocks.0,2: nothing" in text
    assert f"next: parloom explain plan.json {document['next']}" in text
    assert document["next"] in {flat.key for flat in case.pcg.graph.flat()}


def test_what_calls_make_again_and_what_they_keep() -> None:
    """Calls that make the same again stand together, all calls of the kind once; what is made again
    is not among what is kept.
    """
    values = (":relu#0", "up:linear#0")
    apart = ActivationDecision("blocks.2", "recompute", values)
    plan = replace(tensor_parallel(), activations=(apart,))
    keeps, case = (case_of(GRAPH, CLUSTER, own) for own in (tensor_parallel(), plan))
    first, second = recomputed(case)
    assert (first["calls"], first["values"], first["count"]) == ("blocks.0-1", [], 2)
    assert (second["calls"], second["values"], second["all"]) == ("blocks.2", list(values), False)
    assert sum(row["count"] for row in (first, second)) == len(case.calls)
    assert remade_words(second) == f"2 of {second['of']} operators: {', '.join(values)}"
    assert list(recomputed(keeps)) == []
    before, after = (_kept(own, "block: :relu#0") for own in (keeps, case))
    assert (before[0], after[0]) == (3, 2)
    assert before[1] // 3 == after[1] // 2
    names = {h.name for h in holdings(case.pcg, case.priced)}
    assert {"blocks.2", "block: hidden (redistributed)", ":exp#5"} <= names


def _kept(case: Case, key: str) -> tuple[int, int]:
    (found,) = (h for h in holdings(case.pcg, case.priced) if h.name == key)
    return found.count, found.num_bytes


def test_only_what_is_no_operators_is_left_over() -> None:
    """Movements of activations that nothing overlaps are all in the rows of operators."""
    for plan in megatron(GRAPH, CLUSTER):
        document = plan_explained(case_of(GRAPH, CLUSTER, plan))
        assert [place["others_s"] for place in document["places"]] == [0, 0]
    (plan,) = fsdp(GRAPH, CLUSTER)
    case = case_of(GRAPH, CLUSTER, plan)
    document = plan_explained(case)
    kinds = ("weights all_gather", "gradients reduce_scatter")
    for place in document["places"]:
        waited = sum(t["s"] for t in place["time"] if t["transfer"] in kinds)
        assert place["others_s"] == pytest.approx(waited) != 0
    text = screen(plan_explained_screen(document, mesh_grid(case.mesh), (), "plan.json"))
    assert text.count("weights, gradients, waiting in line") == 2


def test_what_was_asked_for_is_said_with_its_price() -> None:
    (plan,) = data_parallel(GRAPH, CLUSTER)
    case = case_of(GRAPH, CLUSTER, plan)
    asked = (Constraint("--pin head=n:data", 1.0, 2**20),)
    found = Prediction(2.0, 2**20, (), "spec", 0.2)
    pinned = replace(case, plan=replace(case.plan, constraints=asked, prediction=found))
    document = plan_explained(pinned)
    (line,) = document["constraints"]
    assert line.startswith("--pin head=n:data costs 1 s (+100.0%)")
    text = screen(plan_explained_screen(document, mesh_grid(case.mesh), (), "plan.json"))
    assert f"asked for: {line}" in text


@pytest.mark.parametrize("width", [48, 60, 120])
def test_bars_leave_room_for_their_numbers(width: int) -> None:
    rows = [("communication", 0.5, "12.5 MiB  50.1%"), ("weights", 1.0, "222 MiB  100.0%"),
            ("nothing", 0.0, "0 B  0.0%")]  # fmt: skip
    lines = rendered(bars(rows, 32), width).splitlines()
    assert all(line.endswith(said) for line, (_, _, said) in zip(lines, rows, strict=True))
    half, full, none = (line.count("█") for line in lines)
    assert abs(2 * half - full) <= 1
    assert none == 0
    assert max(map(len, lines)) <= width


def test_a_cluster_that_is_a_document_is_named() -> None:
    (plan,) = data_parallel(GRAPH, CLUSTER)
    case = case_of(GRAPH, CLUSTER, plan)
    lab = replace(CLUSTER, name="lab")
    written = replace(case, plan=replace(case.plan, cluster=one_line(lab)))
    document = plan_explained(written)
    text = screen(plan_explained_screen(document, mesh_grid(case.mesh), (), "plan.json"))
    assert text.splitlines()[0] == "model.py:build on 2x4xcpu (8 x cpu): method"
    assert (document["cluster"], document["num_devices"]) == ("2x4xcpu", 8)
    assert versus(written, case, "other")["plan"]["cluster"] == "2x4xcpu"


def test_memory_and_what_fits_are_beside_the_limit() -> None:
    (plan,) = data_parallel(GRAPH, CLUSTER)
    case = case_of(GRAPH, CLUSTER, plan)
    there, peak = CLUSTER.device.memory_bytes, case.ledger.peak.num_bytes
    text = screen(
        plan_explained_screen(plan_explained(case), mesh_grid(case.mesh), (), "plan.json")
    )
    assert f"of {format_bytes(there)} per device (" in text
    asked = (Constraint(f"--memory {peak - 1}", 1.0, 2**20),)
    found = Prediction(2.0, peak)
    limited = replace(case, plan=replace(case.plan, constraints=asked, prediction=found))
    document = plan_explained(limited)
    assert (document["peak"]["limit_bytes"], document["peak"]["device_bytes"]) == (peak - 1, there)
    sides = versus(case, limited, "other")
    assert (sides["plan"]["fits"], sides["versus"]["fits"]) == (True, False)


def adds_up(case: Case, other: Case) -> dict[str, Any]:
    document = versus(case, other, "other")
    whole = other.timeline.step_ps - case.timeline.step_ps
    assert document["difference_ps"] == whole
    assert sum(row["difference_ps"] for row in document["causes"]) == whole
    assert sum(row["difference_ps"] for row in document["places"]) == whole
    for place in document["places"]:
        for side in ("plan_ps", "versus_ps", "difference_ps"):
            assert sum(row[side] for row in place["causes"]) == place[side]
    peaks = other.timeline.peak_bytes - case.timeline.peak_bytes
    assert sum(row["difference_bytes"] for row in document["memory"]) == peaks
    sizes = [abs(row["difference_ps"]) for row in document["causes"]]
    assert sizes == sorted(sizes, reverse=True)
    assert {row["component"] for row in document["memory"]} <= set(COMPONENTS)
    return document


@examples(12)
@given(st.integers(0, 1000), st.integers(0, 1000))
def test_differences_add_up_exactly(one: int, other: int) -> None:
    plans = (next(random_plans(GRAPH, CLUSTER, seed=seed)) for seed in (one, other))
    document = adds_up(*(case_of(GRAPH, CLUSTER, plan) for plan in plans))
    assert document["difference_ps"] == sum(row["difference_ps"] for row in document["causes"])


def test_the_cause_of_a_difference() -> None:
    (plan,) = data_parallel(GRAPH, CLUSTER)
    case = case_of(GRAPH, CLUSTER, plan)
    again = tuple(ActivationDecision(f"blocks.{i}", "recompute") for i in range(3))
    other = case_of(GRAPH, CLUSTER, replace(plan, activations=again))
    adds_up(case, other)
    document = versus(case, other, "recomputing")
    assert document["causes"][0]["what"] == "recomputation"
    assert next(p["difference_ps"] for p in document["places"] if p["place"] == "block") > 0
    text = screen(versus_screen(document))
    assert text.startswith("recomputing is ")
    assert "slower than the plan, most of all for recomputation" in text
    same = versus(case, case, "itself")
    assert screen(versus_screen(same)).startswith("itself takes exactly as long as the plan")


@pytest.mark.parametrize("stopped", [True, False])
def test_that_the_other_search_was_stopped_is_said(
    stopped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = case_of(GRAPH, CLUSTER, next(data_parallel(GRAPH, CLUSTER))).plan
    best = ScoredPlan(plan.decisions, Prediction(1.0, 1))
    status = Status.INTERRUPTED if stopped else Status.COMPLETE
    other = Choice(best, (best,), lambda _: True, status=status)
    monkeypatch.setattr("parloom.explain.choose", lambda request, say: other)
    said: list[str] = []
    explain(plan, path="plan.json", versus="auto", progress=said.append)
    assert any(INTERRUPTED in line for line in said) == stopped
