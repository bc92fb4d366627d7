"""Reports to drive: those that the tests make, or files that are given by `--report`."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from parloom import api, zoo
from parloom.comparators.baselines import data_parallel, fsdp, megatron
from parloom.report.page.html import page
from parloom.report.page.sides import Side
from parloom.reporting import report
from tests.dist.test_explain_pipelines import case_of as pipeline_of
from tests.unit.explained import case_of
from tests.unit.graphs import stack
from tests.unit.pages import CLUSTER, document_of, side_of
from tests.unit.rewritten_stages import (
    PLANS,
    WHOLE,
    alone,
    fused,
    low_rank,
    pipeline_case,
    planned,
    towers,
)

if TYPE_CHECKING:
    from playwright.sync_api import Browser

GRAPH = stack(3)
ROW = {"cluster": "C", "name": "p", "peak_bytes": 2**30, "mfu": 0.4, "reason": None}
FRONT = {
    "work": {"unit": "token"},
    "prices": [
        {"device": "d", "price_per_hour": 2.1, "price_source": "given", "price_date": "today"}
    ],
    "rows": [
        ROW
        | {"devices": f"{n} of C", "num_devices": n, "step_s": 1 / n, "pareto": n != 2}
        | {"cost": {"usd": 9.0 + n, "days": 8 / n, "usd_per_step": 1e-6 * n}}
        for n in (1, 2, 4)
    ],
}
MADE = ("one", "pipeline", "branches", "two")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Tests of any report run on those that are given, or on all that are made here."""
    if "any_report" in metafunc.fixturenames:
        given = metafunc.config.getoption("--report")
        metafunc.parametrize("any_report", given or MADE, indirect=True)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """Reports of a plan of one stage, of a pipeline, of one whose stages branch, of two plans."""
    if request.config.getoption("--report"):
        pytest.skip("--report names the reports that are driven")
    found = tmp_path_factory.mktemp("reports")
    (data,), (zero,) = data_parallel(GRAPH, CLUSTER), fsdp(GRAPH, CLUSTER)
    tensor = next(p for p in megatron(GRAPH, CLUSTER) if p.mesh["tensor"].size == 4)
    others = {"fsdp": case_of(GRAPH, CLUSTER, zero, "fsdp")}
    pipeline = pipeline_of("dlrm", seed=3)
    sides = {
        "one": [replace(side_of(GRAPH, tensor, others), front=FRONT)],
        "pipeline": [Side("pipeline.json", pipeline, lambda *_: pipeline.timeline, {})],
        "two": [side_of(GRAPH, tensor), side_of(GRAPH, data, path="other.json")],
    }
    documents = {name: document_of(*own) for name, own in sides.items()}
    documents["branches"] = branching()
    documents["rewrites"] = undoing()
    for name, document in documents.items():
        (found / f"{name}.html").write_text(page(document), encoding="utf-8")
    return found


def branching() -> dict[str, object]:
    """A small Transformer of four modalities, whose branches are stages beside each other."""
    model, batch = zoo.build("mmt", depth=1, width=64, heads=2, inner=128, batch=8, seq=8)
    plan = api.plan(model, batch, "adamw", "1x4xV100", method="graphpipe", microbatches=2)
    document = report([plan])
    stages = document["plans"][0]["stages"]
    assert [stage["reads"] for stage in stages] == [[], [], [], [0, 1, 2]]
    return document


def undoing() -> dict[str, object]:
    """A pipeline with a rewrite, beside one that cannot be undone alone."""
    made = towers()
    cases = (
        pipeline_case(made, planned(made, PLANS["two_each"], *fused(made))),
        pipeline_case(low_rank(), planned(low_rank(), alone, WHOLE)),
    )
    document, other = (
        document_of(Side("pipeline.json", case, lambda *_: cases[0].timeline, {})) for case in cases
    )
    document["plans"][0]["rewrites"] += other["plans"][0]["rewrites"]
    return document


@pytest.fixture
def any_report(request: pytest.FixtureRequest) -> Path:
    """One that is made here, by its name, or a file that is given."""
    if request.param in MADE and not request.config.getoption("--report"):
        made: Path = request.getfixturevalue("folder")
        return made / f"{request.param}.html"
    return Path(request.param).resolve()


@pytest.fixture(scope="session")
def browser(request: pytest.FixtureRequest) -> Iterator["Browser"]:
    """A browser that starts when the reports are written: what plans them may fork."""
    if not request.config.getoption("--report"):
        request.getfixturevalue("folder")
    from tests.web.driven import chromium

    with chromium() as found:
        yield found
