"""Workflows without a plan: the reason, how far it is, and what would do."""

from dataclasses import replace
from pathlib import Path

import pytest

from parloom import cli
from parloom.errors import InfeasibleError
from parloom.workflow.answer import Method, plan_workflow
from parloom.workflow.exact import in_time
from parloom.workflow.model import Edge, Operator, Source, Variant, Worker, Workflow
from parloom.workflow.simulate import play
from tests.workflows import SMALL, refusal, small


def test_an_accuracy_that_no_variant_reaches_says_the_best() -> None:
    with pytest.raises(InfeasibleError, match=r"small.yaml:20:34: floor: .*best reachable is 95%"):
        plan_workflow(small(("floor: 75%", "floor: 96%")))
    plan_workflow(small(("floor: 75%", "floor: 95%")))


def test_a_rate_that_no_workers_carry_says_how_far_it_is_and_what_would() -> None:
    workflow = small(("rate: 40/s", "rate: 500/s"))
    with pytest.raises(InfeasibleError) as caught:
        plan_workflow(workflow)
    said = str(caught.value)
    assert said.startswith("small.yaml:3:3: no set of workers carries the rate: ")
    more = caught.value.document["more_workers"]
    assert isinstance(more, dict)
    workers = tuple(replace(w, count=w.count + more.get(w.name, 0)) for w in workflow.workers)
    plan_workflow(replace(workflow, workers=workers))  # what would, does
    share = caught.value.document["share"]
    assert isinstance(share, float)
    for part, fits in ((share * 0.999, True), (share * 1.001, False)):
        slower = replace(workflow, sources=(Source("frames", 500 * part),))
        try:
            plan_workflow(slower)
            assert fits
        except InfeasibleError:
            assert not fits


def test_a_latency_that_no_plan_has_says_the_least() -> None:
    with pytest.raises(InfeasibleError) as caught:
        plan_workflow(replace(small(), latency_s=1e-3))
    least = caught.value.document["least_latency_s"]
    assert isinstance(least, float)
    plan = plan_workflow(replace(small(), latency_s=least * 1.01))
    assert in_time(plan)
    with pytest.raises(InfeasibleError, match=r"none is below .* with the waits of M/D/1 queues"):
        plan_workflow(replace(small(), latency_s=least * 0.99))


def with_more(workflow: Workflow, error: InfeasibleError) -> Workflow:
    more = error.document["more_workers"]
    assert isinstance(more, dict)
    assert more
    workers = tuple(replace(w, count=w.count + more.get(w.name, 0)) for w in workflow.workers)
    return replace(workflow, workers=workers)


BUSY = (
    ("{box: 20ms, gpu: 4ms}", "{box: 25ms}"),
    ("good: {latency: {box: 90ms, gpu: 9ms}", "good: {latency: {box: 190ms}"),
    ("count: 3", "count: 1"),
    ("{box: 2ms, gpu: 1ms}", "{gpu: 1ms}"),
)


def test_a_worker_that_would_be_busy_all_the_time_is_no_infinite_latency() -> None:
    """40/s at 25 ms: one worker carries them, but has no mean wait."""
    workflow = replace(small(*BUSY), latency_s=1.0)
    error = refusal(workflow)
    assert "39.96 of 40/s at most (with a latency bound, no worker is busier than" in str(error)
    assert in_time(plan_workflow(with_more(workflow, error)))
    plan_workflow(replace(workflow, latency_s=None))  # without a bound there is a plan


def test_more_workers_are_told_that_keep_the_latency_bound() -> None:
    busy = small(*BUSY)
    for rate, bound in ((120.0, 0.05), (30.0, 0.04)):
        workflow = replace(busy, sources=(Source("frames", rate),), latency_s=bound)
        assert in_time(plan_workflow(with_more(workflow, refusal(workflow))))
    error = refusal(replace(busy, sources=(Source("frames", 120.0),), latency_s=0.01))
    assert "would carry it, but not within the latency bound, and no more workers" in str(error)


@pytest.mark.parametrize(("latency_s", "more"), [(0.103, 15), (0.1003, 150), (0.10003, None)])
def test_many_times_the_workers_are_told_where_they_would_be_in_time(
    latency_s: float, more: int | None
) -> None:
    """One worker, 9 requests per second of 100 ms."""
    operators = (Operator("a", (Variant("only", {"w": 0.1}),)),)
    edges, sources = (Edge("s", "a", {"": 0.0}),), (Source("s", 9.0),)
    workers = (Worker("w", 0, 1.0),)
    workflow = Workflow("n", ("t",), sources, operators, edges, workers, {}, latency_s=latency_s)
    error = refusal(workflow)
    if more is None:
        assert "no more workers would be in time, up to 1000 times those that" in str(error)
        return
    assert error.document["more_workers"] == {"w": more}
    assert in_time(plan_workflow(with_more(workflow, error)))
    fewer = replace(workflow, workers=(Worker("w", 0, 1.0, more),))
    refusal(fewer)


def test_what_is_expected_is_told_where_it_is_below_the_bound_of_waits() -> None:
    """Behind a worker that is as slow, nothing waits: 26.7 ms by M/D/1, 20 in truth."""
    operators = tuple(Operator(n, (Variant("only", {"w": 0.02}),)) for n in "ab")
    edges = Edge("s", "a", {"": 0.0}, 2.0), Edge("a", "b", {"": 0.0})
    workers = (Worker("w", 0, 1.0, 2),)
    workflow = Workflow("n", ("t",), (Source("s", 10.0),), operators, edges, workers, {})
    error = refusal(replace(workflow, latency_s=0.066))
    assert "70 ms with the waits of M/D/1 queues (expected are 63.3 ms" in str(error)
    plan = plan_workflow(replace(workflow, latency_s=0.0701))
    assert play(plan, 60_000).latency_s == pytest.approx(0.0633, rel=0.03)


@pytest.mark.parametrize(
    ("change", "latency_s", "message"),
    [
        (("40/s", "40/s"), 0.01, "latency_bound: no plan is in time: 10 ms"),
        (("40/s", "200/s"), None, "frames 100 of 200/s at most; 2 more box"),
        (("{box: 90ms, gpu: 9ms}, accuracy", "{gpu: 9ms}, accuracy"), None, "reachable is 80%"),
        (("{box: 2ms, gpu: 1ms}", "{gpu: 1ms}"), None, "no worker of 'edge' runs 'report'"),
    ],
)
def test_plans_of_one_tier_are_refused_for_their_own_reason(
    change: tuple[str, str], latency_s: float | None, message: str
) -> None:
    floor = ("floor: 75%", "floor: 90%") if "80%" in message else ("floor: 75%", "floor: 75%")
    workflow = replace(small(change, floor), latency_s=latency_s)
    error = refusal(workflow, Method.ALL_EDGE)
    assert message in str(error)
    assert "'edge'" in str(error)


CLOUD_ONLY = (("{box: 2ms, gpu: 1ms}", "{gpu: 1ms}"),)
LINK = "links:\n  - {from: edge, to: cloud, price: 0.1USD/GB}\n"


@pytest.mark.parametrize(
    ("links", "words"),
    [
        ("", "a link from 'edge' to 'cloud' would"),
        (LINK.replace("edge, to: cloud", "cloud, to: edge"), "a link from 'edge' to 'cloud' would"),
        (
            LINK.replace("GB}", "GB, bandwidth: 1kbit/s}"),
            "a wider link from 'edge' to 'cloud' (now 1 kbit/s) would",
        ),
    ],
)
def test_the_link_that_is_missing_or_full_is_named(links: str, words: str) -> None:
    assert words in str(refusal(small(*CLOUD_ONLY, (LINK, links))))
    plan_workflow(small(*CLOUD_ONLY))


def test_a_link_that_one_way_traffic_does_not_use_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    down = "  - {from: cloud, to: edge}\n"
    file = tmp_path / "small.yaml"
    file.write_text(SMALL.replace(LINK, LINK + down), encoding="utf-8")
    for flags, unused in (([], True), (["--tiers", "two-way"], False)):
        assert cli.main(["workflow", "plan", str(file), *flags]) == 0
        said = "the link from 'cloud' to 'edge' is not used" in capsys.readouterr().out
        assert said == unused
