"""Traces and the screen of `simulate`: valid, complete, and written whole or not at all."""

import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from parloom import cli
from parloom.cost.clusters import load_cluster
from parloom.cost.pipeline import Send, StageActions, chain, simulate_pipeline
from parloom.cost.simulate import simulate
from parloom.cost.tasks import ACTIVATIONS, COMPONENTS
from parloom.cost.timeline import Memory, Timeline, sampled
from parloom.ir.lower import lower
from parloom.ir.plan import ModelSource, Optimizer, Plan
from parloom.ir.plan_json import plan_to_json
from parloom.ir.schedules import schedule
from parloom.ir.text import print_graph
from parloom.report.trace import chrome_trace
from tests.unit.test_pipeline import profile
from tests.unit.test_simulate import chunked, model

CLUSTER = load_cluster("2x4xH100")


@pytest.fixture(scope="module")
def played() -> Timeline:
    decisions = chunked(CLUSTER, num_microbatches=2)
    return simulate(lower(model(), decisions), CLUSTER, decisions)


def pipeline() -> Timeline:
    taken, given_back = [0] * len(COMPONENTS), [0] * len(COMPONENTS)
    taken[ACTIVATIONS], given_back[ACTIVATIONS] = 5, -5
    actions = {
        "F": profile(10**6, Memory(tuple(taken), tuple(taken), 5)),
        "B": profile(2 * 10**6, Memory(tuple(given_back))),
        "STEP": profile(10**6),
    }
    stages = [StageActions(f"stage {i}", actions) for i in range(3)]
    sent = Send(10, 10**5)
    return simulate_pipeline(schedule("1f1b", 3, 4), stages, chain(3, sent, sent))


def events(text: str, kind: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [e for e in json.loads(text)["traceEvents"] if e["ph"] == kind]
    return found


def names(text: str, what: str) -> dict[tuple[int, int], str]:
    return {
        (e["pid"], e.get("tid", -1)): e["args"]["name"]
        for e in events(text, "M")
        if e["name"] == what
    }


@pytest.mark.parametrize("kind", ["step", "pipeline"])
def test_slices_of_a_track_do_not_overlap(played: Timeline, kind: str) -> None:
    timeline = played if kind == "step" else pipeline()
    text = chrome_trace(timeline, [p.name for p in timeline.processes])
    tracks = names(text, "thread_name")
    by_track = defaultdict(list)
    for event in events(text, "X"):
        by_track[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    assert by_track.keys() <= tracks.keys()
    for spans in by_track.values():
        assert all(a[1] <= b[0] + 1e-6 for a, b in pairwise(spans))
    assert max(end for spans in by_track.values() for _, end in spans) == pytest.approx(
        timeline.step_ps / 1e6
    )


def test_a_step_shows_actions_operators_transfers_and_memory(played: Timeline) -> None:
    text = chrome_trace(played, ["each of 8 devices"])
    assert names(text, "process_name") == {(0, -1): "each of 8 devices"}
    assert list(names(text, "thread_name").values()) == ["actions", "compute", "data (weights)"]
    shown = {(e["tid"], e["name"], e["cat"]) for e in events(text, "X")}
    assert (0, "B last", "action") in shown
    assert (1, "5.down:linear#0", "linear") in shown
    assert (2, "gather 3 3", "weights all_gather") in shown
    assert (2, "reduce 0 0", "gradients reduce_scatter") in shown
    busy = sum(e["dur"] for e in events(text, "X") if e["tid"] == 2)
    assert busy == pytest.approx(played.busy()["data (weights)"] / 1e6)
    counters = events(text, "C")
    assert set(counters[0]["args"]) == set(COMPONENTS)
    most = max(sum(event["args"].values()) for event in counters)
    assert most == played.peak_bytes
    ends = [e["args"] for e in (counters[0], counters[-1])]
    assert ends[0] == ends[1] == dict(zip(COMPONENTS, played.processes[0].base, strict=True))


def test_messages_are_arrows_to_the_action_that_waits() -> None:
    timeline = pipeline()
    text = chrome_trace(timeline, ["a", "b", "c"])
    starts = {e["id"]: e for e in events(text, "s")}
    ends = {e["id"]: e for e in events(text, "f")}
    assert starts.keys() == ends.keys()
    assert len(starts) == 2 * 2 * 4  # two borders, both directions, four microbatches
    actions = {(e["pid"], e["ts"]) for e in events(text, "X") if e["tid"] == 0}
    for number, start in starts.items():
        end = ends[number]
        assert abs(start["pid"] - end["pid"]) == 1
        assert start["ts"] < end["ts"]
        assert (end["pid"], end["ts"]) in actions


def test_only_so_many_operators_are_shown(played: Timeline) -> None:
    text = chrome_trace(played, ["all"], max_events=0)
    assert {e["tid"] for e in events(text, "X")} == {0}
    most = max(sum(event["args"].values()) for event in events(text, "C"))
    assert most >= played.peak_bytes


def test_sampled_memory_reaches_every_peak(played: Timeline) -> None:
    for timeline in (played, pipeline()):
        for index, process in enumerate(timeline.processes):
            lines = sampled(timeline, index, 20)
            assert [len(line) for line in lines] == [20] * len(COMPONENTS)
            assert max(map(sum, zip(*lines, strict=True))) == process.memory.peak
            assert all(
                max(line) <= most for line, most in zip(lines, process.memory.peaks, strict=True)
            )
            assert [line[-1] >= base for line, base in zip(lines, process.base, strict=True)]


@pytest.fixture
def plan_path(tmp_path: Path) -> str:
    graph = model()
    plan = Plan(
        ModelSource("zoo:blocks"),
        CLUSTER.name,
        "fingerprint",
        Optimizer("adamw", 2),
        "fsdp",
        chunked(CLUSTER),
        print_graph(graph),
    )
    path = tmp_path / "plan.json"
    path.write_text(plan_to_json(plan), encoding="utf-8")
    return str(path)


def test_simulate_prints_and_writes(
    plan_path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "new" / "trace.json"
    assert cli.main(["simulate", plan_path, "--trace", str(trace)]) == 0
    result = capsys.readouterr()
    assert f"making the folder {trace.parent}" in result.err
    shown = result.out
    for text in (
        "zoo:blocks on 2x4xH100",
        "step time",
        "each of 8 devices",
        "compute",
        "weights all_gather",
        "memory over the step",
        "activations",
        f"trace {trace}",
    ):
        assert text in shown, text
    assert events(trace.read_text(), "X")
    assert cli.main(["simulate", plan_path, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert set(document) == {
        "step_s", "period_s", "lower_bound_s", "source", "band_s", "notes", "peak_bytes", "devices",
        "trace",
    }  # fmt: skip
    assert document["period_s"] == document["step_s"]  # of training, which synchronizes
    assert document["source"] == "spec"
    assert document["band_s"][0] < document["step_s"] < document["band_s"][1]
    (device,) = document["devices"]
    assert set(device["memory"]) == set(COMPONENTS)
    assert sum(device["memory_at_peak"].values()) == document["peak_bytes"]
    assert sum(device["memory"].values()) >= document["peak_bytes"]
    assert document["lower_bound_s"] <= document["step_s"]
    waited = sum(device["exposed_s"].values())
    assert device["busy_s"]["compute"] + waited == pytest.approx(document["step_s"])


def test_a_trace_that_cannot_be_written_is_told_and_nothing_is_left(
    plan_path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    occupied = tmp_path / "folder"
    occupied.mkdir()
    before = sorted(tmp_path.rglob("*"))
    for path in (occupied, tmp_path / "plan.json" / "trace.json"):
        assert cli.main(["simulate", plan_path, "--trace", str(path)]) == 2
        result = capsys.readouterr()
        assert f"cannot write {path}" in result.err
        assert "choose another file with --trace" in result.err
        assert result.out == ""
    assert sorted(tmp_path.rglob("*")) == before
