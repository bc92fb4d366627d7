"""Waits before workers, and the simulation of plans."""

import json
from dataclasses import replace
from heapq import heappop, heappush
from pathlib import Path
from random import Random

import numpy as np
import pytest

from parloom import cli
from parloom.workflow.answer import plan_workflow
from parloom.workflow.exact import in_time, routed
from parloom.workflow.examples import names, path_of
from parloom.workflow.model import Edge, Link, Operator, Source, Variant, Worker, Workflow
from parloom.workflow.plan import Plan
from parloom.workflow.queueing import balanced, tangent, wait_s
from parloom.workflow.read import load
from parloom.workflow.simulate import _waits, expected, play
from tests.workflows import SMALL, refusal, small


def test_waits_are_those_of_an_m_d_1_queue() -> None:
    assert wait_s(0.01, 50, 50, 0) == pytest.approx(0.01 * 0.5 / (2 * 0.5))
    assert wait_s(0.01, 100, 100, 0) == float("inf")
    for u in (0.2, 0.6, 0.9):
        slope, at_zero = tangent(u, 0.3)
        for v in (0.0, 0.1, 0.5, 0.95):
            present = v + v * v * 1.3 / (2 * (1 - v))
            assert slope * v + at_zero <= present + 1e-12
        assert slope * u + at_zero == pytest.approx(u + u * u * 1.3 / (2 * (1 - u)))


def test_no_other_split_waits_less_than_a_balanced_one() -> None:
    workers = {"a": (2, 0.01), "b": (1, 0.03), "c": (3, 0.2)}
    rates = balanced(workers, 150.0, 150.0, 0.0)
    assert sum(rates.values()) == pytest.approx(150.0)

    def present(split: dict[str, float]) -> float:
        each = {name: split[name] / n for name, (n, _) in workers.items()}
        return sum(
            split[name] * (s + wait_s(s, each[name], 150, 0)) for name, (_, s) in workers.items()
        )

    for more, less in (("a", "b"), ("b", "a"), ("a", "c"), ("c", "a")):
        moved = {**rates, more: rates[more] + 0.2, less: rates[less] - 0.2}
        if moved[less] >= 0:
            assert present(rates) <= present(moved)


def test_the_simulation_is_that_of_an_event_list() -> None:
    rng = Random(0)
    arrivals = np.cumsum([rng.expovariate(80) for _ in range(500)])
    events: list[tuple[float, int, str]] = []
    for number, at in enumerate(arrivals):
        heappush(events, (float(at), number, "arrives"))
    queue: list[int] = []
    busy, ends = False, {}
    while events:
        now, number, what = heappop(events)
        if what == "arrives":
            queue.append(number)
        else:
            ends[number], busy = now, False
        if queue and not busy:
            busy = True
            heappush(events, (now + 0.01, queue.pop(0), "ends"))
    workflow = small()
    plan = plan_workflow(workflow)
    waits = _waits(arrivals, 0.01, plan.loads[0], np.random.default_rng(0))
    assert arrivals + waits + 0.01 == pytest.approx([ends[n] for n in range(500)])


def test_a_wrong_wait_is_seen_by_the_simulation() -> None:
    """Negative control: service alone, without waits, is not what is simulated."""
    plan = plan_workflow(replace(small(), latency_s=0.06))
    played = play(plan, 60_000)
    assert played.latency_s == pytest.approx(plan.latency_s, rel=0.05)
    service = sum(
        load.rate_per_s
        / 40
        * plan.workflow.operator(load.operator).variant(load.variant).latency_s[load.worker]
        for load in plan.loads
    )
    assert played.latency_s > 1.1 * service


def join(first: float, second: float) -> Workflow:
    """One worker of 20 ms, at which two sources of 10/s are joined."""
    operators = (Operator("a", (Variant("only", {"w": 0.02}),)),)
    edges = Edge("s", "a", {"": 0.0}, first), Edge("t", "a", {"": 0.0}, second)
    sources = Source("s", 10.0), Source("t", 10.0)
    workers = (Worker("w", 0, 1.0),)
    return Workflow("n", ("t",), sources, operators, edges, workers, {}, latency_s=1.0)


def listed_mean_s(messages: float, requests: int = 40_000) -> float:
    """The mean time at that worker, by a list of events: so many messages a request."""
    rng, now = Random(1), 0.0
    events: list[tuple[float, int]] = []
    for _ in range(requests):
        now += rng.expovariate(10)
        count = int(messages) + (rng.random() < messages - int(messages))
        events += [(now, len(events) + k) for k in range(count)]
    came = {number: at for at, number in events}
    spent, free_at = 0.0, 0.0
    while events:
        at, number = heappop(events)
        if at < free_at:
            heappush(events, (free_at, number))
            continue
        free_at = at + 0.02
        spent += free_at - came[number]
    return spent / len(came)


@pytest.mark.parametrize(
    ("first", "second", "messages"),
    [(3.0, 1.0, 1.0), (1.0, 3.0, 1.0), (2.0, 3.0, 2.0), (0.5, 3.0, 0.5), (2.5, 2.5, 2.5)],
)
def test_a_join_has_as_many_messages_as_its_scarcest_input(
    first: float, second: float, messages: float
) -> None:
    workflow = join(first, second)
    plan = plan_workflow(workflow)
    planned = plan.operator_s("a")
    assert listed_mean_s(messages) == pytest.approx(planned, rel=0.03)
    assert play(plan, 100_000).operators_s["a"] == pytest.approx(planned, rel=0.03)
    assert in_time(plan_workflow(replace(workflow, latency_s=planned * 1.001)))
    refusal(replace(workflow, latency_s=planned * 0.999))


def test_a_join_counted_by_its_largest_ratio_is_seen_by_the_simulation() -> None:
    """Negative control: three messages a request, of which two are not sent."""
    played = play(plan_workflow(join(3.0, 1.0)), 60_000).operators_s["a"]
    assert 0.02 + wait_s(0.02, 10.0, 10.0, 2.0) > 1.5 * played


@pytest.mark.parametrize("ratio", [0.01, 0.001])
def test_a_simulation_is_long_enough_for_the_rarest_messages(ratio: float) -> None:
    workflow = small(("size: 1kB}", f"size: 1kB, ratio: {ratio}}}"))
    played = play(plan_workflow(replace(workflow, latency_s=0.5)), 1000)
    assert played.requests * ratio >= 500
    assert played.rate_per_s == pytest.approx(40 * ratio, rel=0.2)


def test_messages_too_rare_to_simulate_are_said_to_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "small.yaml"
    file.write_text(SMALL.replace("size: 1kB}", "size: 1kB, ratio: 0.00001}"), encoding="utf-8")
    assert cli.main(["workflow", "simulate", str(file)]) == 2
    assert "'report' is reached by one of 1e+05 requests" in capsys.readouterr().err
    assert cli.main(["workflow", "plan", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["end_to_end_s"] is None


def test_messages_that_come_together_wait_for_each_other() -> None:
    worker = Worker("w", 0, 1.0, 4)
    operators = tuple(Operator(n, (Variant("only", {"w": 0.01}),)) for n in "ab")
    edges = Edge("s", "a", {"": 0.0}), Edge("a", "b", {"": 0.0}, 3.0)
    workflow = Workflow(
        "n", ("t",), (Source("s", 10.0),), operators, edges, (worker,), {}, latency_s=0.06
    )
    plan = plan_workflow(workflow)
    played = play(plan, 60_000)
    assert played.operators_s["b"] == pytest.approx(plan.operator_s("b"), rel=0.03)


def chain() -> Plan:
    """Two operators, in tiers a and b and in tiers b and c; no link leads from b to c."""
    operators = (
        Operator("first", (Variant("only", {"in a": 0.01, "in b": 0.02}),)),
        Operator("second", (Variant("only", {"also b": 0.01, "in c": 0.02}),)),
    )
    edges = Edge("s", "first", {"": 0.0}), Edge("first", "second", {"": 0.0})
    workers = tuple(
        Worker(name, tier, 1.0)
        for name, tier in (("in a", 0), ("in b", 1), ("also b", 1), ("in c", 2))
    )
    links = {(0, 1): Link(latency_s=1.0), (0, 2): Link(latency_s=2.0)}
    workflow = Workflow(
        "n", ("a", "b", "c"), (Source("s", 10.0),), operators, edges, workers, links
    )
    variants = {"first": "only", "second": "only"}
    rates = {
        ("first", "only", "in a"): 6.0,
        ("first", "only", "in b"): 4.0,
        ("second", "only", "also b"): 6.0,
        ("second", "only", "in c"): 4.0,
    }
    plan = routed(workflow, variants, dict.fromkeys(rates, 1), rates)
    assert plan is not None
    return plan


def test_messages_of_a_chain_go_where_the_flows_say() -> None:
    plan = chain()
    assert {(f.sender, f.receiver) for f in plan.flows_of("first", "second")} == {
        (0, 1),
        (0, 2),
        (1, 1),
    }
    played = play(plan, 100_000)
    assert played.latency_s == pytest.approx(expected(plan).latency_s, rel=0.01)
    assert played.end_to_end_s == pytest.approx(expected(plan).end_to_end_s, rel=0.01)
    for own in plan.loads:
        seen = played.utilizations[own.operator, own.worker]
        assert seen == pytest.approx(own.utilization, rel=0.02)


def test_a_message_without_a_link_is_a_fault_of_the_simulation() -> None:
    plan = chain()
    unlinked = replace(plan, workflow=replace(plan.workflow, links={(0, 1): Link()}))
    with pytest.raises(RuntimeError, match="goes from 'a' to 'c', between which there is no link"):
        play(unlinked, 1000)
    kept = tuple(flow for flow in plan.flows if (flow.sender, flow.receiver) != (1, 1))
    with pytest.raises(RuntimeError, match="no flow for requests that are in tier 1"):
        play(replace(plan, flows=kept), 1000)


def test_the_first_tenth_of_a_run_is_in_no_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests of the first tenth come a tenth as fast as they should."""
    plan = plan_workflow(replace(small(), latency_s=0.06))

    class Slow:
        def __init__(self, rng: np.random.Generator) -> None:
            self.rng = rng

        def exponential(self, mean: float, size: int) -> np.ndarray:
            drawn = self.rng.exponential(mean, size)
            drawn[: size // 10] *= 10
            return drawn

        def random(self, size: int) -> np.ndarray:
            return self.rng.random(size)

    drawn_from = np.random.default_rng
    with monkeypatch.context() as patch:
        patch.setattr(np.random, "default_rng", lambda seed: Slow(drawn_from(seed)))
        slow = play(plan, 60_000)
    usual = play(plan, 60_000)
    assert slow.rate_per_s == pytest.approx(40, rel=0.02)
    assert slow.rate_per_s == pytest.approx(usual.rate_per_s, rel=1e-3)
    for key, share in usual.utilizations.items():
        assert slow.utilizations[key] == pytest.approx(share, rel=1e-3)


def test_a_worker_that_is_nearly_always_busy_is_forecast() -> None:
    """Its waits are a hundred thousand times its service; drawn one by one they fill memory."""
    workflow = small(("floor: 75%", "floor: 90%"))
    detect, report = workflow.operators
    slow = replace(detect, variants=(replace(detect.variant("good"), latency_s={"gpu": 0.02}),))
    rate = 50 * (1 - 1e-5)
    workflow = replace(workflow, operators=(slow, report), sources=(Source("frames", rate),))
    plan = plan_workflow(workflow)
    wait_s = plan.loads_of("detect")[0].time_s - 0.02
    assert wait_s == pytest.approx(0.02 / 2 * 1e5, rel=1e-3)
    found = expected(plan)
    assert found.end_to_end_s == pytest.approx(found.latency_s, rel=0.03)


@pytest.mark.parametrize("name", names())
def test_examples_are_served_as_planned(name: str) -> None:
    workflow = load(path_of(f"example:{name}"))
    plan = plan_workflow(replace(workflow, latency_s=workflow.latency_s or 0.2))
    assert in_time(plan)
    played = play(plan, 150_000)
    wanted = min(workflow.rates[sink] for sink in workflow.sinks)
    assert played.rate_per_s == pytest.approx(wanted, rel=0.05)
    whole = expected(plan)
    assert played.latency_s == pytest.approx(whole.latency_s, rel=0.05)
    assert played.end_to_end_s == pytest.approx(whole.end_to_end_s, rel=0.05)
