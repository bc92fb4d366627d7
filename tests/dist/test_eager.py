"""The captured program against the user's module, and what that comparison finds."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from parloom import api
from parloom.capture import Loaded, capture
from parloom.errors import CaptureError
from parloom.execute import eager
from parloom.execute.eager_calls import NotComparedError, training_calls
from parloom.execute.eager_compare import DIFFERS, EQUAL, NOT_COMPARED, EagerReport, compare
from parloom.execute.eager_process import Build, ForkServer
from parloom.execute.prove import prove
from parloom.ir.plan import ModelSource
from parloom.ir.text import print_graph
from tests.dist import eager_models as models

FILE = Path(models.__file__)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


def programs(build: Callable[[], models.Made]) -> tuple[str, str]:
    model, batch = build()
    training = print_graph(capture(model, batch))
    return training, print_graph(capture(model, batch, training=False))


def compared(
    module: Callable[[], models.Made], captured: Callable[[], models.Made] | None = None
) -> EagerReport:
    """One module beside the program that was captured from it, or from another one."""
    calls = training_calls(lambda: Loaded(*module()), other=module is not models.bags, again=True)
    return compare(list(calls), *programs(captured or module))


@pytest.mark.parametrize(
    "build",
    [models.net, models.averaging, models.all_used, models.scaled, models.bags, models.double],
)
def test_what_is_captured_equals_the_module(build: Callable[[], models.Made]) -> None:
    report = compared(build)
    assert report.outcome == EQUAL, report
    assert report.calls == 4
    assert report.worst <= 1e-12


@pytest.mark.parametrize("build", [models.drawing, models.checkpointed, models.attending])
def test_draws_are_replayed(build: Callable[[], models.Made]) -> None:
    report = compared(build)
    assert report.outcome == EQUAL, report
    assert report.draws >= 3
    assert "random draws replayed" in str(report)


@pytest.mark.parametrize(
    ("module", "captured", "tensor"),
    [
        (models.net, models.relu, "loss in call 1"),
        (models.averaging, models.net, "buffer mean in call 1"),
        (models.net, models.averaging, "buffer mean in call 1"),
        (models.all_used, models.net, "gradient of unused.weight in call 1 (the captured"),
        (models.net, models.all_used, "gradient of unused.weight in call 1 (the module"),
        (models.warming, models.net, "loss in call 2"),
        (models.scaled, models.net, "loss in evaluation"),
    ],
)
def test_another_program_is_found(
    module: Callable[[], models.Made], captured: Callable[[], models.Made], tensor: str
) -> None:
    report = compared(module, captured)
    assert report.outcome == DIFFERS
    assert report.difference.startswith(tensor), report
    assert "is not what the module does" in str(report)


def test_draws_in_another_order_are_not_compared() -> None:
    report = compared(models.drawing, models.checkpointed)
    assert report.outcome == NOT_COMPARED
    assert "random draws could not be replayed" in str(report)


def test_a_module_that_raises_is_not_compared() -> None:
    def build() -> Loaded:
        model, _ = models.net()
        return Loaded(model, {"x": torch.randn(8, 5)})

    with pytest.raises(NotComparedError, match="the module raised RuntimeError"):
        list(training_calls(build, other=True, again=True))


def test_a_loss_that_is_not_finite_is_not_compared() -> None:
    report = compared(models.undefined)
    assert (report.outcome, report.calls) == (NOT_COMPARED, 0)
    assert "own loss in call 1 is not finite" in str(report)


def test_samples_in_another_order_that_mean_nothing_are_left_out() -> None:
    model, batch = models.bags()
    with ForkServer() as server:
        report = server.compare(_bags, capture(model, batch), "")
    assert report.outcome == EQUAL, report


def test_tolerances_follow_the_least_precise_dtype() -> None:
    assert compared(models.double).tolerance < compared(models.net).tolerance
    report = compared(models.rotating)
    assert (report.outcome, report.tolerance) == (EQUAL, compared(models.net).tolerance)
    report = compared(models.half)
    assert (report.outcome, report.dtype) == (EQUAL, "bfloat16")


def test_the_process_shares_nothing_with_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A global that this process changes after the fork is as it was there."""
    with ForkServer() as server:
        monkeypatch.setattr(models.Net, "middle", models.Relu.middle)
        model, batch = models.net()
        report = server.compare(_loaded, capture(model, batch), "")
    assert report.outcome == DIFFERS


def test_a_process_that_dies_or_hangs_is_said_so() -> None:
    model, batch = models.net()
    graph = capture(model, batch)
    with ForkServer() as server:
        assert "exit code" in server.compare(_dies, graph, "").reason
        assert "too long" in server.compare(_hangs, graph, "", timeout_s=0.5).reason
        assert server.compare(_loaded, graph, "").outcome == EQUAL


def _loaded() -> Loaded:
    return Loaded(*models.net())


def _bags() -> Loaded:
    return Loaded(*models.bags())


def _dies() -> Loaded:
    import os

    os._exit(3)


def _hangs() -> Loaded:
    import time

    time.sleep(60)
    raise AssertionError


def test_plan_refuses_what_capture_did_not_see(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("parloom.capture.steady.Watch.check", lambda *_: None)
    with pytest.raises(CaptureError, match=r"cannot capture Warming: .*loss in call 2"):
        api.capture(f"{FILE}:warming")


def test_plan_and_verify_say_what_was_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = api.plan(f"{FILE}:double", cluster="2xcpu", devices=2, method="data_parallel")
    line = "the captured program equals the module itself (4 calls, float64, limit 1e-09)"
    assert line in plan.assumptions
    report = prove(plan, small=False, progress=lambda text: None)
    assert report.passed
    assert line in str(report)
    wrong = EagerReport(DIFFERS, difference="loss in call 1 (relative difference 1.0e+00)")
    monkeypatch.setattr("parloom.execute.prove.check", lambda *_, **__: wrong)
    report = prove(plan, small=False, progress=lambda text: None)
    assert not report.passed
    assert report.first_difference == wrong.difference


def source(name: str) -> Build:
    return Build(ModelSource(f"{FILE}:{name}", None, None, None), 0)


def checked(name: str, captured: Callable[[], models.Made]) -> EagerReport:
    """The module of a factory in this file's models, beside what another one is captured as."""
    model, batch = captured()
    with ForkServer() as server:
        return eager.check(server, source(name), capture(model, batch), "", eager.VERIFY)


def test_half_precision_that_rounds_otherwise_is_compared_in_float32() -> None:
    assert compared(models.turning).outcome == DIFFERS
    report = checked("turning", models.turning)
    assert report.outcome == EQUAL, report
    assert "3 calls, float32 in place of bfloat16, limit 1e-04" in str(report)


def test_half_precision_with_another_gradient_is_found() -> None:
    report = checked("turning", models.halved)
    assert report.outcome == DIFFERS
    assert "gradient of a.weight in call 1" in report.difference


def test_a_large_model_is_compared_in_small_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "PLAN", replace(eager.PLAN, weights=1_000_000))
    found = api.capture("zoo:gpt")
    line = next(line for line in found.assumptions if "module itself" in line)
    assert "equals the module itself" in line
    assert "shrunk: " in line


def test_a_model_without_a_small_copy_is_compared_in_a_proof(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(api, "PLAN", replace(eager.PLAN, weights=100))
    plan = api.plan(f"{FILE}:double", cluster="2xcpu", devices=2, method="data_parallel")
    line = next(line for line in plan.notes if "not compared with the module itself" in line)
    assert "at most 0 M and 10 are compared here, more in `parloom verify`" in line
    found = prove(plan, small=False, progress=lambda text: None).eager
    assert found is not None
    assert found.outcome == EQUAL
