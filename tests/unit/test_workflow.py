"""Workflow files, their faults, the published figures, queues and the `workflow` command."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from heapq import heappop, heappush
from pathlib import Path
from random import Random

import numpy as np
import pytest

from parloom import cli
from parloom.errors import InfeasibleError, InputError
from parloom.workflow.answer import Method, plan_workflow
from parloom.workflow.exact import in_time
from parloom.workflow.examples import names, path_of
from parloom.workflow.model import Edge, Operator, Source, Variant, Worker, Workflow
from parloom.workflow.profiles import Profile, profile_text, read_profile
from parloom.workflow.queueing import balanced, tangent, wait_s
from parloom.workflow.read import load, models, read_workflow
from parloom.workflow.simulate import _waits, expected, play

SMALL = """\
name: small
sources:
  frames: {rate: 40/s}
operators:
  detect:
    variants:
      fast: {latency: {box: 20ms, gpu: 4ms}, accuracy: 80%}
      good: {latency: {box: 90ms, gpu: 9ms}, accuracy: 95%}
  report:
    variants:
      only: {latency: {box: 2ms, gpu: 1ms}}
messages:
  - {from: frames, to: detect, size: 100kB}
  - {from: detect, to: report, size: 1kB}
workers:
  box: {tier: edge, price: 0.02USD/h, count: 3}
  gpu: {tier: cloud, price: 0.5USD/h, count: 2}
links:
  - {from: edge, to: cloud, price: 0.1USD/GB}
accuracy: {rule: product, floor: 75%}
"""


def small(*changes: tuple[str, str]) -> Workflow:
    text = SMALL
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    return read_workflow(text, "small.yaml")


# --- published figures --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "two_way", "dollars"),
    [
        (Method.JELLYBEAN, False, 7.509),
        (Method.EXACT, False, 7.485),
        (Method.EXACT, True, 5.549),
    ],
)
def test_the_published_instance_costs_what_was_published(
    method: Method, two_way: bool, dollars: float
) -> None:
    plan = plan_workflow(replace(load(path_of("example:vqa")), two_way=two_way), method)
    assert round(plan.usd_per_h, 3) == dollars
    assert plan.accuracy == pytest.approx(0.5659)
    if method is Method.EXACT:
        assert plan.gap == pytest.approx(0.0, abs=1e-6)


PUBLISHED = """\
sources: {image: {rate: 10}}
edges:
  - {from: image, to: look, kb: 100}
  - {from: look, to: answer, kb: {small: 2, big-model: 8}}
workers: {cpu: {price: 0.1, tier: 1}, gpu: {price: 2.5, tier: 2}}
links: {up: 0.1, down: 1.0}
latency_ms:
  look/small: {cpu: 50, gpu: 5}
  look/big-model: {cpu: 400, gpu: 40}
  answer/only: {cpu: 9, gpu: 3}
accuracy:
  floor: 60
  small: {only: 55}
  big-model: {only: 65}
"""


def test_the_format_of_published_numbers_has_fixed_units() -> None:
    workflow = read_workflow(PUBLISHED, "published.yaml")
    assert workflow.edges[0].num_bytes == {"": 102400.0}
    assert workflow.operator("look").variants[0].latency_s == {"cpu": 0.05, "gpu": 0.005}
    assert workflow.links[0, 1].usd_per_byte == pytest.approx(0.1 / 2**30)
    assert workflow.accuracy.floor == 0.6
    assert "$/h" in workflow.assumed[0]
    with pytest.raises(InfeasibleError, match=r"published.yaml:12:10: floor: .* reachable is 65%"):
        plan_workflow(read_workflow(PUBLISHED.replace("floor: 60", "floor: 70"), "published.yaml"))


# --- faults -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "size: 1kB}",
            "size: 1kB}\n  - {from: report, to: detect, size: 1kB}",
            "small.yaml:15:5: a cycle: ",
        ),
        ("price: 0.02USD/h", "price: 0.02", "small.yaml:16:28: price: '0.02' has no unit"),
        ("price: 0.1USD/GB", "price: 0.1", "small.yaml:19:36: price: '0.1' has no unit"),
        ("size: 100kB", "size: 100", "small.yaml:13:38: size: '100' has no unit"),
        ("rate: 40/s", "rate: 40", "small.yaml:3:18: rate: '40' has no unit"),
        ("latency: {box: 2ms", "latency: {box: 2", "box: '2' has no unit"),
        ("floor: 75%", "floor: 75", "floor: '75' has no unit"),
        ("tier: cloud", "tier: edge", "small.yaml:16:3: tier 'cloud' has no worker"),
        ("tier: cloud", "tier: clod", "unknown tier 'clod'; did you mean 'cloud'?"),
        ("messages:", "mesages:", "unknown key 'mesages'; did you mean 'messages'?"),
        ("good: {lat", "fast: {lat", "small.yaml:8:7: the name 'fast' is given twice"),
        ("  report:\n", "  detect:\n", "small.yaml:9:3: the name 'detect' is given twice"),
        ("frames: {rate", "detect: {rate", "'detect' is an operator, too"),
        ("from: detect", "from: detec", "unknown source or operator 'detec'"),
        ("{box: 2ms, gpu: 1ms}", "{bix: 2ms}", "small.yaml:11:24: unknown worker 'bix'"),
        ("  - {from: detect, to: report, size: 1kB}\n", "", "'report' gets no messages"),
        ("to: report, size: 1kB", "to: report, size: {fast: 1kB}", "missing key 'good'"),
        ("rule: product", "rule: profiles", "needs an accuracy"),
        ("rule: product, floor", "rule: sum, floor", "unknown rule 'sum'"),
        ("count: 3", "count: 0", "expected a whole number >= 1"),
        ("floor: 75%", "floor: 175%", "more than 100%"),
        ("box: 20ms", "box: 0ms", "is no time at all"),
        ("box: 20ms", "box: 1e-300ms", "less than 1 ns"),
        ("rate: 40/s", "rate: 1e-300/s", "less than 1e-6/s"),
        ("size: 1kB}", "size: 1kB, ratio: 1e-300}", "from 1e-6 to 1e6"),
    ],
)
def test_a_fault_has_one_message_with_its_place(old: str, new: str, message: str) -> None:
    assert old in SMALL
    with pytest.raises(InputError) as caught:
        read_workflow(SMALL.replace(old, new, 1), "small.yaml")
    assert message in str(caught.value)
    assert str(caught.value).startswith("small.yaml:")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("rate: 10", "rate: 1e-30", "published.yaml:1:25: rate: '1e-30/s' is out of range: less"),
        ("cpu: 50", "cpu: 9e11", "published.yaml:8:21: cpu: '9e11ms' is out of range: more"),
        ("cpu: 50", "cpu: 1e-300", "less than 1 ns"),
        ("cpu: 50", "cpu: 0", "is no time at all"),
        ("cpu: 50", "cpu: 50ms", "expected a number (of ms), got '50ms'"),
        ("cpu: 50", "cpi: 50", "unknown worker 'cpi'"),
        ("price: 0.1", "price: 1e300", "more than a million dollars"),
        ("kb: 100", "kb: -100", "it is negative"),
        ("floor: 60", "floor: 101", "more than 100%"),
        ("{image:", "{look:", "published.yaml:1:11: 'look' is an operator, too"),
        ("tier: 1", "tier: 0", "expected a whole number >= 1"),
    ],
)
def test_published_numbers_have_the_ranges_and_names_of_the_other_format(
    old: str, new: str, message: str
) -> None:
    assert old in PUBLISHED
    with pytest.raises(InputError) as caught:
        read_workflow(PUBLISHED.replace(old, new, 1), "published.yaml")
    assert message in str(caught.value)


def test_what_is_in_no_row_of_a_table_is_not_allowed_whatever_the_floor() -> None:
    plain = ((", accuracy: 80%", ""), (", accuracy: 95%", ""))
    rows = "[{detect: good, accuracy: 90%}]"
    costs = []
    for floor in ("0%", "1%"):
        table = f"accuracy: {{rule: table, floor: {floor}, table: {rows}}}"
        workflow = small(*plain, ("accuracy: {rule: product, floor: 75%}", table))
        for method in (Method.EXACT, Method.JELLYBEAN):
            plan = plan_workflow(workflow, method)
            assert plan.variants["detect"] == "good"
            costs.append(plan.usd_per_h)
    assert costs == pytest.approx([costs[0]] * 4)
    edge = (("good: {latency: {box: 90ms, gpu: 9ms}", "good: {latency: {gpu: 9ms}"), *plain)
    none = small(*edge, ("accuracy: {rule: product, floor: 75%}", table))
    with pytest.raises(InfeasibleError, match="no row of the table is of variants that are"):
        plan_workflow(none, Method.ALL_EDGE)


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


def refusal(workflow: Workflow, method: Method = Method.EXACT) -> InfeasibleError:
    with pytest.raises(InfeasibleError) as caught:
        plan_workflow(workflow, method)
    assert "inf" not in str(caught.value)
    return caught.value


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
    assert "would carry it, but not within the latency bound" in str(error)


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


# --- queues -------------------------------------------------------------------------------------


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
    rng, events, now = Random(1), [], 0.0
    for _ in range(requests):
        now += rng.expovariate(10)
        count = int(messages) + (rng.random() < messages - int(messages))
        events += [(now, len(events) + k) for k in range(count)]
    came = dict((number, at) for at, number in events)
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


# --- profiles -----------------------------------------------------------------------------------


def test_a_profile_is_a_file_that_a_workflow_reads(tmp_path: Path) -> None:
    profile = Profile("box", {("detect", "fast"): 0.0125, ("report", "only"): 0.002}, "a machine")
    (tmp_path / "box.yaml").write_text(profile_text(profile), encoding="utf-8")
    assert read_profile(tmp_path / "box.yaml").latency_s == profile.latency_s
    text = SMALL.replace("fast: {latency: {box: 20ms, gpu: 4ms}", "fast: {latency: {gpu: 4ms}")
    where = str(tmp_path / "small.yaml")
    workflow = read_workflow(text + "profiles: [box.yaml]\n", where)
    assert workflow.operator("detect").variant("fast").latency_s == {"box": 0.0125, "gpu": 0.004}
    for old, new, message in (
        ("box", "bax", "is of the worker 'bax'"),
        ("fast", "fest", "names 'detect/fest', which is none; did you mean 'detect/fast'"),
        ("12.5ms", "12.5", "has no unit"),
        ("12.5ms", "0ms", "is no time at all"),
    ):
        changed = profile_text(profile).replace(old, new)
        (tmp_path / "box.yaml").write_text(changed, encoding="utf-8")
        with pytest.raises(InputError, match=message):
            read_workflow(text + "profiles: [box.yaml]\n", where)


def test_models_are_timed_on_this_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "timed.yaml"
    file.write_text(SMALL.replace("fast: {", "fast: {model: 'zoo:mlp', "), encoding="utf-8")
    assert models(file, "box") == {("detect", "fast"): "zoo:mlp"}
    out = tmp_path / "box.yaml"
    flags = ["--worker", "box", "--out", str(out), "--repetitions", "3", "--json"]
    assert cli.main(["workflow", "profile", str(file), *flags]) == 0
    (entry,) = json.loads(capsys.readouterr().out)["latencies"]
    found = read_profile(out).latency_s["detect", "fast"]
    assert found == pytest.approx(entry["latency_s"], rel=1e-4)
    assert 0 < found < 10
    (tmp_path / "none.yaml").write_text(SMALL, encoding="utf-8")
    with pytest.raises(InputError, match="no variant has a `model`"):
        models(tmp_path / "none.yaml", "box")


@pytest.mark.parametrize(
    ("old", "new", "worker", "message"),
    [
        ("40/s", "40/s", "nosuch", "--worker: unknown worker 'nosuch'"),
        ("40/s", "40", "box", "has no unit"),
        ("to: report", "to: reprot", "box", "unknown operator 'reprot'"),
    ],
)
def test_faults_of_a_file_are_told_before_models_are_timed(
    old: str, new: str, worker: str, message: str, tmp_path: Path
) -> None:
    file = tmp_path / "timed.yaml"
    text = SMALL.replace("fast: {latency: {box: 20ms, gpu: 4ms}", "fast: {model: 'zoo:mlp'")
    file.write_text(text + "profiles: [to-come.yaml]\n", encoding="utf-8")
    assert models(file, "box") == {("detect", "fast"): "zoo:mlp"}
    file.write_text(text.replace(old, new), encoding="utf-8")
    with pytest.raises(InputError, match=message):
        models(file, worker)


# --- the command --------------------------------------------------------------------------------


def test_exit_codes_are_those_of_the_contract(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "small.yaml"
    file.write_text(SMALL, encoding="utf-8")
    assert cli.main(["workflow", "plan", str(file), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["bound_usd_per_h"] == pytest.approx(document["usd_per_h"])
    assert document["gap"] == pytest.approx(0.0, abs=1e-6)
    file.write_text(SMALL.replace("floor: 75%", "floor: 99%"), encoding="utf-8")
    assert cli.main(["workflow", "plan", str(file), "--json"]) == 3
    said = capsys.readouterr()
    assert json.loads(said.out)["infeasible"]["best_accuracy"] == 0.95
    assert f"{file}:20:34: " in said.err
    assert cli.main(["workflow", "plan", str(file), "--latency", "5"]) == 2
    assert cli.main(["workflow", "plan", str(file), "--latency", "0s"]) == 2
    assert "'0s' is no time at all" in capsys.readouterr().err
    assert cli.main(["workflow", "plan", "example:cams"]) == 2
    assert cli.main(["workflow", "simulate", str(tmp_path / "none.yaml")]) == 2


@pytest.mark.parametrize(
    ("method", "code", "words"),
    [
        (Method.EXACT, 0, "traffic cameras: exact, one-way traffic"),
        (Method.JELLYBEAN, 0, "misses the latency bound, which jellybean does not look at"),
        (Method.GREEDY, 0, "misses the latency bound, which greedy does not look at"),
        (Method.ALL_CLOUD, 0, "traffic cameras: all-cloud, one-way traffic"),
        (Method.ALL_EDGE, 3, "would (all-edge: in 'roadside' alone)"),
    ],
)
def test_each_method_says_what_it_did(
    method: Method, code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["workflow", "plan", "example:cameras", "--method", method.value]) == code
    said = capsys.readouterr()
    assert words in (said.err if code else said.out)
    assert ("misses the latency bound" in said.out) == ("misses" in words)


HARD = """
import sys
from tests.workflows import large
from parloom.workflow import answer, exact
from parloom.workflow.solve import solve
import parloom.cli_workflow as command
from parloom import cli
command.load = lambda path: large(2)
sys.exit(cli.main(["workflow", "plan", "x.yaml", "--json"]))
"""


def test_ctrl_c_keeps_the_best_plan() -> None:
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": f"{root / 'src'}:{root}"}
    child = subprocess.Popen(
        [sys.executable, "-c", HARD],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stderr is not None
    line = child.stderr.readline()
    assert "by jellybean, to begin with" in line
    time.sleep(0.5)
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=120)
    assert child.returncode == 130, err
    document = json.loads(out)
    assert document["interrupted"]
    assert document["usd_per_h"] > document["bound_usd_per_h"] >= 0
