"""Questions asked again: what pins and limits cost, why nothing fits, and what would."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from parloom import answer, api, changes, complete
from parloom.arguments import METHODS
from parloom.choose import Choice
from parloom.errors import GapError, InfeasibleError, InputError
from parloom.execute.machine import machine_for
from parloom.ir.expected import Constraint, Prediction, Status
from parloom.ir.factors import factorize
from parloom.ir.plan import Decisions, Plan
from parloom.ir.plan_json import plan_to_json
from parloom.ir.samples import num_samples, num_tokens
from parloom.report.shortage import Change
from parloom.report.words import unasked_words
from parloom.search import optimize
from parloom.search.request import Request, ScoredPlan

CLUSTER = "2xcpu"  # a question is asked again as it is on more devices, which take longer
MIB = 2**20
TIGHT = 16 * MIB

PADDED = """
import torch
from torch import Tensor, nn

class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(10007, 256)
        self.head = nn.Linear(256, 10007, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.head(self.words(ids)), labels)

def make():
    draw = lambda: torch.randint(0, 10007, (4099,))
    return Words(), {"ids": draw(), "labels": draw()}
"""


@pytest.fixture(scope="module")
def captured() -> api.Captured:
    return api.capture("zoo:mlp", batch=256)


@pytest.fixture(scope="module")
def free(captured: api.Captured) -> Plan:
    return api.search(captured, cluster=CLUSTER)


def step_s(plan: Plan) -> float:
    assert plan.prediction is not None
    return plan.prediction.step_s


@pytest.mark.slow
def test_every_pin_is_priced_against_the_plan_without_it(
    captured: api.Captured, free: Plan
) -> None:
    said: list[str] = []
    pins = ["layers.0=replicated", "layers.2=n:x"]
    found = api.search(captured, cluster=CLUSTER, pin=pins, progress=said.append)
    texts = [constraint.text for constraint in found.constraints]
    assert texts == ["--pin layers.0=replicated", "--pin layers.2=n:x", "all of these"]
    assert found.constraints[-1].step_s == step_s(free)
    assert step_s(found) > step_s(free)
    (alone,) = api.search(captured, cluster=CLUSTER, pin=pins[1:]).constraints
    assert alone.step_s == step_s(free)
    for constraint in found.constraints:
        assert constraint.step_s is not None
        assert step_s(free) <= constraint.step_s <= step_s(found)
    assert any(line.startswith("--pin layers.0=replicated costs ") for line in said)
    nodes = {node.key: node.factors for node in found.decisions.nodes}
    assert not nodes.get("layers.0:linear#0")
    assert "x" in dict(nodes["layers.2:linear#0"])["n"]
    assert "--pin layers.0=replicated --pin layers.2=n:x" in found.command()


def test_a_limit_is_priced_against_all_the_memory_there_is(
    captured: api.Captured, free: Plan
) -> None:
    assert free.prediction is not None
    peak = free.prediction.peak_bytes
    (cost,) = api.search(captured, cluster=CLUSTER, memory=f"{2 * peak // MIB}MiB").constraints
    assert cost.text == f"--memory {2 * peak // MIB}MiB"
    assert cost.step_s == step_s(free)
    tight = api.search(captured, cluster=CLUSTER, memory=peak - 1)
    assert tight.prediction is not None
    assert tight.prediction.peak_bytes < peak
    assert tight.constraints[0].step_s == step_s(free) <= step_s(tight)


@pytest.fixture(scope="module")
def told() -> list[str]:
    """The progress of the search for `shortage`."""
    return []


@pytest.fixture(scope="module")
def shortage(captured: api.Captured, told: list[str]) -> InfeasibleError:
    with pytest.raises(InfeasibleError) as caught:
        api.search(captured, cluster=CLUSTER, memory=TIGHT, progress=told.append)
    return caught.value


def test_what_does_not_fit_is_explained_and_what_fits_is_priced(shortage: InfeasibleError) -> None:
    found: dict[str, Any] = dict(shortage.document)
    smallest = found["smallest"]
    assert smallest["peak_bytes"] > TIGHT
    assert 0 < found["least_bytes"] <= smallest["peak_bytes"]
    assert sum(smallest["memory"].values()) == smallest["peak_bytes"]
    assert smallest["tensors"]
    for tensor in smallest["tensors"]:
        assert tensor["bytes"] <= smallest["memory"][tensor["component"]]
    changes = {change["flags"].partition(" ")[0]: change for change in found["changes"]}
    assert {"--optimizer", "--memory"} <= changes.keys()
    costs = [change["device_s_per_sample"] for change in found["changes"]]
    assert costs == sorted(costs)
    for flag, change in changes.items():
        if flag != "--memory":
            assert change["peak_bytes"] <= TIGHT
    assert found["assumed"] == ["parameters in float32 (--dtype)"]
    for line in (
        "no plan fits in 16 MiB per device; each one that is searched holds",
        "assumed: parameters in float32 (--dtype)",
        "at its peak",
    ):
        assert line in str(shortage)


@pytest.mark.slow
def test_a_change_that_is_priced_is_what_asking_for_it_gives(
    captured: api.Captured, shortage: InfeasibleError
) -> None:
    changes: Any = shortage.document["changes"]
    sgd = next(change for change in changes if change["flags"] == "--optimizer sgd")
    other = api.capture("zoo:mlp", batch=256, optimizer="sgd")
    found = api.search(other, cluster=CLUSTER, memory=TIGHT)
    assert step_s(found) <= sgd["step_s"] <= 1.1 * step_s(found)  # a price is not refined
    memory = next(change for change in changes if change["flags"].startswith("--memory"))
    roomy = api.search(captured, cluster=CLUSTER, memory=memory["flags"].split()[1])
    assert step_s(roomy) <= memory["step_s"]


def test_pipelines_that_do_not_fit_are_explained(captured: api.Captured) -> None:
    with pytest.raises(InfeasibleError, match="stages") as caught:
        api.search(captured, cluster=CLUSTER, memory=TIGHT // 8, method="gpipe")
    assert "  weights" in str(caught.value)
    changes: Any = caught.value.document["changes"]
    assert any(change["flags"].startswith("--memory") for change in changes)


@pytest.mark.slow
def test_a_change_that_leaves_too_much_weight_is_not_tried(
    captured: api.Captured,
    shortage: InfeasibleError,
    told: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(request: Request) -> Choice:
        raise InfeasibleError("no plan fits")

    monkeypatch.setattr(changes, "chosen", refused)
    roomier: list[str] = []
    with pytest.raises(InfeasibleError):
        api.search(captured, cluster=CLUSTER, memory=20 * MIB, progress=roomier.append)
    for said, tried in ((roomier, True), (told, False)):
        assert any(line.startswith("trying --batch") for line in said) == tried


def test_shorter_sequences_are_priced_for_as_many_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of half as many tokens counts as half of the samples that were asked for."""
    asked: list[Request] = []

    def fits_in_a_second(request: Request) -> Choice:
        asked.append(request)
        best = ScoredPlan(Decisions(), Prediction(1.0, 1))
        return Choice(best, (best,), lambda prediction: True)

    monkeypatch.setattr(changes, "chosen", fits_in_a_second)
    found = api.capture("zoo:gpt", batch=8, seq=64)
    machine = machine_for("2xcpu")
    request = Request(found.graph, machine, found.optimizer, 2**40)
    origin = changes.Origin(found.source, "", found.otherwise)
    priced = {c.flags: c for c in changes.priced_changes(request, origin, lambda text: None)
              if isinstance(c, Change)}  # fmt: skip
    assert priced["--batch 4"].device_s == priced["--seq 32"].device_s == 2 * 1.0 / 4
    assert priced["--optimizer sgd"].device_s == 2 * 1.0 / 8
    (shorter,) = (own.graph for own in asked if num_tokens(factorize(own.graph)) == 8 * 32
                  and num_samples(factorize(own.graph)) == 8)  # fmt: skip
    assert {e.value.spec.shape for e in shorter.of_kind("batch")} == {(8, 32)}
    assert unasked_words(found.source, found.graph, 8) == ("parameters in float32 (--dtype)",)
    plain = replace(found.source, batch=None, seq=None)
    assert unasked_words(plain, found.graph, 8)[1:] == (
        "a batch of 8 (--batch)",
        "samples of 64 tokens (--seq)",
    )


@pytest.mark.slow
def test_pins_that_make_it_too_large_are_named(
    captured: api.Captured, free: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert free.prediction is not None
    monkeypatch.setattr(answer, "priced_changes", lambda *_: iter(()))
    pins = ["*=weights:replicated", "*=optimizer:replicated", "layers.0=n"]
    with pytest.raises(InfeasibleError) as caught:
        api.search(captured, cluster=CLUSTER, memory=free.prediction.peak_bytes, pin=pins[:2])
    assert caught.value.document["pins"] == ["--pin *=optimizer:replicated"]
    assert "without these pins a plan fits; give up one:" in str(caught.value)


def test_pins_that_contradict_each_other(captured: api.Captured) -> None:
    pins = ["layers.2=n", "layers.0=replicated", "layers.0=n:x"]
    with pytest.raises(InfeasibleError) as caught:
        api.search(captured, cluster=CLUSTER, pin=pins)
    assert caught.value.document == {"pins": [f"--pin {pin}" for pin in pins[1:]]}
    assert str(caught.value) == (
        "no plan on a mesh of one or two axes holds these 2 together; give up one:\n"
        "  --pin layers.0=replicated\n"
        "  --pin layers.0=n:x"
    )


def test_rules_of_thumb_have_axes_of_their_own(captured: api.Captured) -> None:
    pins = ["layers.0=n:tensor"]
    asked: dict[str, Any] = {"cluster": "2x2xcpu", "pin": pins}
    found = api.search(captured, method="megatron", microbatches=2, **asked)
    assert found.method == "megatron"
    with pytest.raises(InputError, match="no axis 'tensor'; known: x, y; or a number of devices"):
        api.search(captured, **asked)


def test_a_plan_file_that_does_not_hold_a_pin(
    free: Plan, captured: api.Captured, tmp_path: Path
) -> None:
    path = api.save(free, tmp_path)["plan"]
    assert api.search(captured, cluster=CLUSTER, method=str(path)).decisions == free.decisions
    with pytest.raises(InputError, match="is not as asked: --pin"):
        api.search(captured, cluster=CLUSTER, method=str(path), pin=["*=replicated"])


@pytest.mark.parametrize("played", [0, 6])
def test_ctrl_c_while_rules_are_simulated_keeps_those_that_were(
    captured: api.Captured, monkeypatch: pytest.MonkeyPatch, played: int
) -> None:
    predict, count = Request.predict, iter(range(100))

    def interrupted(request: Request, *given: Any) -> Prediction:
        if next(count) >= played:
            raise KeyboardInterrupt
        return predict(request, *given)

    monkeypatch.setattr(Request, "predict", interrupted)
    if not played:
        with pytest.raises(KeyboardInterrupt):
            api.search(captured, cluster=CLUSTER)
        return
    found = api.search(captured, cluster=CLUSTER)
    assert found.interrupted
    assert found.prediction is not None
    assert found.alternatives
    assert not any(other.name.startswith("auto") for other in found.alternatives)


def interrupt(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Ctrl-C in search `number` of those that are to come, when it has plans of the first mesh."""
    run, searches = optimize.Driver.run, iter(range(99))

    def stopped(driver: optimize.Driver) -> None:
        count = next(searches)
        if count < number:
            run(driver)
            return
        driver.contexts.meshes = driver.contexts.meshes[:1]
        driver.contexts.counts = driver.contexts.counts[:1]
        run(driver)
        assert count == number, "a search after Ctrl-C"
        raise KeyboardInterrupt

    monkeypatch.setattr(optimize.Driver, "run", stopped)


PINS = ["layers.0=replicated", "layers.1=k"]


@pytest.fixture(scope="module")
def pinned(captured: api.Captured) -> Plan:
    return api.search(captured, cluster=CLUSTER, pin=PINS)


@pytest.mark.parametrize(("number", "priced"), [(1, []), (2, ["--pin layers.0=replicated"])])
def test_ctrl_c_while_costs_are_found_keeps_the_plan(
    captured: api.Captured, pinned: Plan, monkeypatch: pytest.MonkeyPatch, number: int,
    priced: list[str],
) -> None:  # fmt: skip
    interrupt(monkeypatch, number)
    said: list[str] = []
    found = api.search(captured, cluster=CLUSTER, pin=PINS, progress=said.append)
    assert found.interrupted
    assert any(
        "was asked for is priced by 3 more searches: Ctrl-C ends that" in line for line in said
    )
    assert found.decisions == pinned.decisions
    known = [c for c in pinned.constraints if c.text in priced]
    pins = [f"--pin {pin}" for pin in PINS]
    assert list(found.constraints) == [
        *known, *(Constraint(pin) for pin in pins if pin not in priced)
    ]  # fmt: skip
    assert all(pin in found.command() for pin in pins)
    unknown = "--pin layers.1=k" if priced else "all of these"
    assert found.notes[0].startswith(f"what {unknown} costs is left out: interrupted")


def test_more_memory_is_priced_by_a_search(
    captured: api.Captured, shortage: InfeasibleError
) -> None:
    """Not by the smallest plan, which is smaller than it has to be."""
    changes: Any = shortage.document["changes"]
    (more,) = (change for change in changes if change["flags"].startswith("--memory"))
    found = api.search(captured, cluster=CLUSTER, memory=more["flags"].split()[1])
    assert step_s(found) <= more["step_s"] < 1.1 * step_s(found)


def test_ctrl_c_while_changes_are_priced_keeps_those_that_were(
    captured: api.Captured, shortage: InfeasibleError, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt(monkeypatch, 2)
    with pytest.raises(InfeasibleError) as caught:
        api.search(captured, cluster=CLUSTER, memory=TIGHT)
    found: dict[str, Any] = dict(caught.value.document)
    every: Any = shortage.document["changes"]
    assert 1 < len(found["changes"]) < len(every)
    assert all(change in every for change in found["changes"])
    assert found["untried"] == ["the rest: interrupted"]


def test_ctrl_c_while_pins_are_blamed_keeps_what_is_known(
    captured: api.Captured, free: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert free.prediction is not None
    monkeypatch.setattr(answer, "priced_changes", lambda *_: iter(()))
    interrupt(monkeypatch, 2)
    pins = ["*=weights:replicated", "*=optimizer:replicated"]
    with pytest.raises(InfeasibleError, match="not tried: the rest: interrupted") as caught:
        api.search(captured, cluster=CLUSTER, memory=free.prediction.peak_bytes, pin=pins)
    assert "pins" not in caught.value.document


def test_a_gap_is_compared_with_what_was_asked_for(free: Plan) -> None:
    gap = free.gap
    assert gap is not None
    api.check_gap(free, None)
    api.check_gap(free, gap)
    with pytest.raises(GapError, match=r"the gap is .*: ask for less$"):
        api.check_gap(free, gap / 2)
    spent = replace(free, status=Status.OUT_OF_BUDGET)
    with pytest.raises(GapError, match=r"ask for less, or a larger --budget$"):
        api.check_gap(spent, gap / 2)
    with pytest.raises(GapError, match="no bound was proved"):
        api.check_gap(replace(free, bound_s=None), gap)


def test_nothing_is_claimed_to_be_proved_of_a_padded_plan(tmp_path: Path) -> None:
    """Of 10,007 words and of 4,099 samples nothing can be split; Megatron pads the words."""
    path = tmp_path / "tied.py"
    path.write_text(PADDED, encoding="utf-8")
    found = api.search(api.capture(f"{path}:make"), cluster="8xH100")
    assert found.method == "megatron"
    assert found.decisions.rewrites
    assert found.bound_s is None
    assert found.solver_gap is None
    assert any("is not of this plan" in note for note in found.notes)
    with pytest.raises(GapError, match="no bound was proved"):
        api.check_gap(found, 0.01)


def test_constraints_are_in_the_file(captured: api.Captured) -> None:
    found = api.search(captured, cluster=CLUSTER, method="fsdp", forbid=["layers.0=n"])
    assert '"text": "--forbid layers.0=n"' in plan_to_json(found)


@pytest.mark.sample(9)
@pytest.mark.parametrize("method", METHODS)
def test_every_method_works_on_one_device(captured: api.Captured, method: str) -> None:
    found = api.search(captured, cluster="1xcpu", method=method)
    assert found.decisions.mesh.num_ranks == 1
    assert step_s(found) > 0


TWO_BLOCKS = """
from parloom import zoo

def make():
    return zoo.build("gpt", depth=2, batch=4, seq=32, width=64)
"""


@pytest.mark.slow
def test_one_device_with_little_memory_recomputes(tmp_path: Path) -> None:
    path = tmp_path / "two_blocks.py"
    path.write_text(TWO_BLOCKS, encoding="utf-8")
    captured = api.capture(f"{path}:make")
    free = api.search(captured, cluster="1xcpu")
    assert free.prediction is not None
    tight = api.search(captured, cluster="1xcpu", memory=int(0.9 * free.prediction.peak_bytes))
    assert {a.policy for a in tight.decisions.activations} == {"recompute"}
    assert step_s(tight) > step_s(free)
    pinned = api.search(captured, cluster="1xcpu", pin=["blocks.0=recompute"])
    assert [a.prefix for a in pinned.decisions.activations] == ["blocks.0"]
    assert pinned.constraints[0].step_s == step_s(free)


def test_a_budget_ends_the_search_at_the_same_place(captured: api.Captured, free: Plan) -> None:
    for budget in (1, 30):
        found = api.search(captured, cluster=CLUSTER, budget=budget)
        again = api.search(captured, cluster=CLUSTER, budget=budget)
        assert plan_to_json(found) == plan_to_json(again)
        assert any("(--budget) is used up" in line for line in found.notes)
        assert found.bound_s is not None
        assert free.bound_s is not None
        assert 0 < found.bound_s <= free.bound_s  # computing alone
        assert found.solver_gap is None
        assert step_s(found) >= step_s(free)
    plenty = api.search(captured, cluster=CLUSTER, budget=10**6)
    assert plan_to_json(plenty) == plan_to_json(free)
    with pytest.raises(
        InfeasibleError, match="within --budget 1 fits in 20 MiB per device; give it"
    ):
        api.search(captured, cluster=CLUSTER, budget=1, memory="20MiB")


def test_the_end_of_a_search_is_kept(
    captured: api.Captured, free: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while the evaluation program is checked: the plan is there, without it."""

    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(complete, "evaluation_program", interrupted)
    plan = api.search(captured, cluster=CLUSTER)
    assert plan.interrupted
    assert plan.decisions == free.decisions
    assert free.evaluation_graph
    assert not plan.evaluation_graph
    assert plan.notes[-1].startswith("no evaluation program: interrupted")
