"""Workflow files, their faults, the published figures, queues and the `workflow` command."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from parloom import cli
from parloom.errors import InfeasibleError, InputError
from parloom.execute import time_models
from parloom.workflow import beam, exact
from parloom.workflow.answer import Method, plan_workflow
from parloom.workflow.exact import cheapest
from parloom.workflow.examples import path_of
from parloom.workflow.fixing import solve_fixed
from parloom.workflow.model import Edge, Link, Operator, Source, Variant, Worker, Workflow
from parloom.workflow.plan import Plan
from parloom.workflow.profiles import Profile, profile_text, read_profile
from parloom.workflow.read import load, models, read_workflow
from parloom.workflow.solve import Found
from tests.workflows import SMALL, small

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
        (
            ", accuracy: 80%",
            "",
            "small.yaml:7:7: variant 'fast' of 'detect' needs an accuracy, as its others",
        ),
        ("rule: product, floor", "rule: sum, floor", "unknown rule 'sum'"),
        (
            "name: small",
            "traffic: oneway",
            "small.yaml:1:10: traffic: unknown traffic 'oneway'; did you mean 'one-way' or",
        ),
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


def test_python_files_of_models_are_beside_the_workflow(tmp_path: Path) -> None:
    file = tmp_path / "own.yaml"
    file.write_text(
        SMALL.replace("fast: {", "fast: {model: 'nets/net.py:make', "), encoding="utf-8"
    )
    assert models(file, "box") == {("detect", "fast"): f"{tmp_path / 'nets' / 'net.py'}:make"}


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
    for taken, said in ((file, "is the workflow itself"), (tmp_path, "it is a folder")):
        flags = ["--worker", "box", "--out", str(taken)]
        assert cli.main(["workflow", "profile", str(file), *flags]) == 2
        assert said in capsys.readouterr().err
    (tmp_path / "none.yaml").write_text(SMALL, encoding="utf-8")
    with pytest.raises(InputError, match="no variant has a `model`"):
        models(tmp_path / "none.yaml", "box")


def test_uneven_times_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    for seconds, warned in (([0.01] * 9 + [1.0], False), ([0.01, 0.02, 0.03, 0.04], True)):
        monkeypatch.setattr(time_models, "_seconds", lambda *_, own=seconds: own)
        time_models.timed({("detect", "fast"): "zoo:mlp"}, "box", 9, said.append)
        assert said[-1].endswith("; measure again while nothing else runs") == warned


def test_a_profile_that_is_missing_says_how_it_is_made(tmp_path: Path) -> None:
    where = str(tmp_path / "small.yaml")
    with pytest.raises(InputError, match=r"make it: parloom workflow profile .*--out .*box.yaml"):
        read_workflow(SMALL + "profiles: [box.yaml]\n", where)


def test_a_model_that_raises_is_no_bug_of_parloom(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "net.py").write_text(
        "from torch import nn\ndef make():\n    return nn.Linear(2, 2), {}\n", encoding="utf-8"
    )
    file = tmp_path / "raises.yaml"
    file.write_text(SMALL.replace("fast: {", "fast: {model: 'net.py:make', "), encoding="utf-8")
    flags = ["--worker", "box", "--out", str(tmp_path / "box.yaml")]
    assert cli.main(["workflow", "profile", str(file), *flags]) == 2
    assert "net.py:make raised" in capsys.readouterr().err


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


# --- the search ---------------------------------------------------------------------------------


def test_a_plan_that_is_there_is_kept_when_the_solver_says_there_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    workflow = replace(small(), latency_s=0.06)
    plan = cheapest(workflow)
    assert plan is not None
    nothing = Found(None, float("inf"), float("inf"), infeasible=True)
    with monkeypatch.context() as patch:
        patch.setattr(exact, "solve_fixed", lambda *args: nothing)
        assert cheapest(workflow) is None
        kept = cheapest(workflow, start=plan)
    assert kept is not None
    assert (kept.usd_per_h, kept.bound_usd_per_h) == (plan.usd_per_h, 0.0)
    answers = [solve_fixed, lambda *args: nothing]

    def next_answer(*args: Any) -> Found:
        return answers.pop(0)(*args)

    with monkeypatch.context() as patch:
        patch.setattr(exact, "solve_fixed", next_answer)
        patch.setattr(exact, "best_is_proved", lambda *args: False)
        patch.setattr(exact, "_add_lines", lambda program, found, *off: len(answers) == 1)
        kept = cheapest(workflow)
    assert not answers
    assert kept is not None
    assert kept.usd_per_h == pytest.approx(plan.usd_per_h)
    assert kept.bound_usd_per_h is not None
    assert 0 < kept.bound_usd_per_h <= kept.usd_per_h


@pytest.mark.parametrize("added", [False, True])
def test_solving_again_is_said_where_it_is_done(
    added: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    solved: list[bool] = []

    def counted(*args: Any) -> Found:
        solved.append(True)
        return solve_fixed(*args)

    monkeypatch.setattr(exact, "solve_fixed", counted)
    monkeypatch.setattr(exact, "best_is_proved", lambda *args: len(solved) == 2)
    monkeypatch.setattr(exact, "_add_lines", lambda *args: added)
    assert cheapest(small(), progress=said.append) is not None
    assert len(solved) == 1 + added
    assert sum("solving again" in line for line in said) == added


def narrow(most_per_s: float) -> Workflow:
    """15 requests per second of 1 MB, for two boxes of the edge or a cheap worker of the cloud."""
    operators = (Operator("look", (Variant("only", {"box": 0.1, "gpu": 0.05}),)),)
    workers = Worker("box", 0, 3.0, 2), Worker("gpu", 1, 1.0)
    links = {(0, 1): Link(bytes_per_s=1e6 * most_per_s)}
    edges = (Edge("s", "look", {"": 1e6}),)
    return Workflow("n", ("edge", "cloud"), (Source("s", 15.0),), operators, edges, workers, links)


@pytest.mark.parametrize(("most_per_s", "dollars"), [(15.0, 1.0), (5.0, 4.0), (4.0, 6.0)])
def test_jellybean_sends_no_more_than_links_carry(most_per_s: float, dollars: float) -> None:
    for method in (Method.JELLYBEAN, Method.EXACT):
        plan = plan_workflow(narrow(most_per_s), method)
        assert plan.usd_per_h == pytest.approx(dollars)


def test_jellybean_takes_the_next_assignment_where_messages_of_one_cannot_flow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried: list[float] = []

    def failing(*args: Any, **named: Any) -> Plan | None:
        plan = exact.routed(*args, **named)
        assert plan is not None
        tried.append(plan.usd_per_h)
        return plan if len(tried) == 3 else None

    monkeypatch.setattr(beam, "routed", failing)
    plan = beam.jellybean(load(path_of("example:vqa")))
    assert plan is not None
    assert tried == sorted(tried)
    assert plan.usd_per_h == tried[2] > tried[0]


BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "workflows.py"


@pytest.mark.parametrize(
    ("gap", "seconds", "code"), [(0.01, 59.0, 0), (0.0183, 59.0, 1), (0.01, 63.0, 1)]
)
def test_the_benchmark_fails_where_a_large_instance_misses_what_it_is_held_to(
    gap: float,
    seconds: float,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    spec = importlib.util.spec_from_file_location("benchmark_of_workflows", BENCHMARK)
    assert spec is not None
    assert spec.loader is not None
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    figures = {"gap": gap, "seconds": seconds, "cpu_s": seconds, "usd_per_h": 1.0}
    monkeypatch.setattr(benchmark, "instances", list)
    monkeypatch.setattr(benchmark, "unequal", lambda count: [])
    monkeypatch.setattr(
        benchmark, "scale", lambda kind, seed: {"kind": kind, "seed": seed, **figures}
    )
    monkeypatch.setattr(sys, "argv", ["workflows.py", "--seeds", "1"])
    assert benchmark.main() == code
    assert f"{0 if code else 3} of 3 within 1% in 60 s" in capsys.readouterr().out


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


def test_a_cycle_is_told_in_the_order_of_its_messages() -> None:
    """Of three operators, the other way around is none; nothing else has results here."""
    operators = "\n".join(f"  {n}: {{variants: {{v: {{latency: {{w: 10ms}}}}}}}}" for n in "abc")
    pairs = ("sa", "ab", "bc", "ca")
    messages = "\n".join(f"  - {{from: {p[0]}, to: {p[1]}, size: 1kB}}" for p in pairs)
    text = (
        f"tiers: [edge]\nsources:\n  s: {{rate: 1/s}}\noperators:\n{operators}\nmessages:\n"
        f"{messages}\nworkers:\n  w: {{tier: edge, price: 0.1USD/h, count: 5}}\n"
    )
    with pytest.raises(InputError, match=r"12:5: a cycle: (a -> b -> c|b -> c -> a|c -> a -> b)"):
        read_workflow(text, "ring.yaml")
