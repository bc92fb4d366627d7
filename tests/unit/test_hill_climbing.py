"""Mutations of plans stay in the space that is searched, and rows say what was found."""

import sys
from importlib import import_module
from math import inf
from pathlib import Path
from random import Random
from types import ModuleType

import pytest

from parloom.capture import capture
from parloom.cost.clusters import load_cluster
from parloom.cost.hardware import DataSheets
from parloom.errors import LayoutError
from parloom.ir.plan import Decisions, Optimizer, one_stage
from parloom.ir.verify import verify_decisions, verify_pcg
from parloom.search.meshes import logical_meshes
from parloom.search.request import Request
from parloom.zoo.gpt import build

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def climbing(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return import_module("hill_climbing")


@pytest.fixture(scope="module")
def asked() -> Request:
    graph = capture(*build(batch=64, seq=32, width=64, heads=4, depth=3))
    return Request(graph, DataSheets(load_cluster("2x2xcpu")), Optimizer(), 1 << 34)


def test_random_plans_that_are_lowered_are_plans_of_the_space(
    climbing: ModuleType, asked: Request
) -> None:
    graph, rng = asked.graph, Random(0)
    plans = sys.modules["random_plans"].RandomPlans(graph, asked.cluster, Decisions(), rng)
    kinds, meshes, legal = set[str](), set[int](), 0
    for _ in range(60):
        try:
            decisions, pcg = plans.drawn()
        except LayoutError:
            continue
        verify_pcg(pcg)
        verify_decisions(graph, decisions)
        legal += 1
        meshes.add(len(decisions.mesh.axes))
        kinds |= {"stored"} if decisions.parameters else set()
        kinds |= {"whole" if not a.lists else "values" for a in decisions.activations}
        kinds |= {"cut"} if decisions.num_microbatches > 1 else set()
        for node in decisions.nodes:
            for _, axes in node.factors:
                assert axes == tuple(a for a in decisions.mesh.names if a in axes), (
                    "outermost first"
                )
    assert legal > 20
    assert meshes == {1, 2}
    assert kinds == {"stored", "whole", "values", "cut"}


@pytest.mark.slow
def test_a_bad_plan_is_made_faster_and_a_wrong_bound_is_undercut(
    climbing: ModuleType, asked: Request
) -> None:
    mesh = next(logical_meshes(asked.cluster))
    whole = Decisions(one_stage(mesh))  # every rank does all the work
    step_s = asked.predict(whole).step_s
    options = climbing.argparse.Namespace(seed=0, mutations=60, random_plans=5)
    start = climbing.Answer(whole, step_s, 0, step_s, step_s, None, 0.0)
    row = climbing.row_of(asked, start, options)
    assert row["gain"] > climbing.ALLOWED
    assert row["steps"]
    assert row["below_bound"]
    assert climbing.failed(row)
    assert row == climbing.row_of(asked, start, options) | {"climb_s": row["climb_s"]}


def test_nothing_to_start_from_is_beaten_by_anything_that_fits(
    climbing: ModuleType, asked: Request
) -> None:
    options = climbing.argparse.Namespace(seed=0, mutations=5, random_plans=5)
    start = climbing.Answer(None, inf, 0, 0.0, inf, None, 0.0)
    assert climbing.row_of(asked, start, options)["gain"] == 1.0


def test_shards_are_all_questions_once(climbing: ModuleType) -> None:
    items = [(str(i), "") for i in range(7)]
    parts = [climbing.sharded(items, f"{i}/3") for i in (1, 2, 3)]
    assert sorted(item for part in parts for item in part) == items
