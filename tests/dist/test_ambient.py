"""Settings of the process: recorded in the plan, compared before each step; contexts are
refused.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from parloom import api, zoo
from parloom.capture import capture
from parloom.capture.ambient import READ, settings
from parloom.errors import CaptureError, FingerprintError, InputError
from parloom.execute.train import Trainer
from parloom.ir.plan import Plan
from parloom.ir.plan_json import plan_from_json, plan_to_json

SIZES: dict[str, Any] = {"batch": 4, "features": 4, "hidden": 4, "depth": 1, "classes": 2}
FACTORY = """
import torch
from parloom import zoo
{set}
def build():
    return zoo.build("mlp", batch=4, features=4, hidden=4, depth=1, classes=2)
"""
BACKENDS: Any = torch.backends


def attribute(owner: object, name: str, value: object) -> AbstractContextManager[None]:
    @contextmanager
    def changed() -> Iterator[None]:
        old = getattr(owner, name)
        setattr(owner, name, value)
        try:
            yield
        finally:
            setattr(owner, name, old)

    return changed()


@contextmanager
def called(call: Callable[[Any], object], value: object, back: object) -> Iterator[None]:
    call(value)
    try:
        yield
    finally:
        call(back)


MATMUL = BACKENDS.cuda.matmul
SETTINGS: dict[str, tuple[Callable[[], AbstractContextManager[None]], str]] = {
    "torch.set_default_dtype": (
        lambda: called(torch.set_default_dtype, torch.float64, torch.float32),
        r"torch\.float64 here and was torch\.float32",
    ),
    "torch.set_default_device": (
        lambda: called(torch.set_default_device, "meta", None),
        "meta here and was cpu",
    ),
    "torch.use_deterministic_algorithms": (
        lambda: called(torch.use_deterministic_algorithms, True, False),
        "True here and was False",
    ),
    "torch.set_float32_matmul_precision": (
        lambda: called(torch.set_float32_matmul_precision, "medium", "highest"),
        "medium here and was highest",
    ),
    "torch.backends.cudnn.deterministic": (
        lambda: attribute(BACKENDS.cudnn, "deterministic", True),
        "True here and was False",
    ),
    "torch.backends.cudnn.enabled": (
        lambda: attribute(BACKENDS.cudnn, "enabled", False),
        "False here and was True",
    ),
    "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction": (
        lambda: attribute(MATMUL, "allow_bf16_reduced_precision_reduction", False),
        "False here",
    ),
    "torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction": (
        lambda: attribute(MATMUL, "allow_fp16_reduced_precision_reduction", False),
        "False here",
    ),
    "torch.backends.cuda.enable_flash_sdp": (
        lambda: called(BACKENDS.cuda.enable_flash_sdp, False, True),
        "False here and was True",
    ),
    "torch.backends.cuda.enable_mem_efficient_sdp": (
        lambda: called(BACKENDS.cuda.enable_mem_efficient_sdp, False, True),
        "False here and was True",
    ),
    "torch.backends.cuda.enable_math_sdp": (
        lambda: called(BACKENDS.cuda.enable_math_sdp, False, True),
        "False here and was True",
    ),
    "torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp": (
        lambda: called(BACKENDS.cuda.allow_fp16_bf16_reduction_math_sdp, True, False),
        "True here and was False",
    ),
}


class Doubled(TorchFunctionMode):
    """Something that changes what operators compute."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Watching(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The same below autograd."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


AROUND: dict[str, tuple[Callable[[], AbstractContextManager[Any]], str]] = {
    "autocast": (
        lambda: torch.autocast("cpu", dtype=torch.bfloat16),
        r"under torch\.autocast\('cpu', dtype=torch\.bfloat16\)",
    ),
    "autocast without a cache": (
        lambda: torch.autocast("cpu", dtype=torch.float16, cache_enabled=False),
        r"under torch\.autocast\('cpu', dtype=torch\.float16\)",
    ),
    "function mode": (Doubled, "under the mode Doubled"),
    "dispatch mode": (Watching, "under the mode Watching"),
    "saved tensors": (
        lambda: torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x),
        r"under torch\.autograd\.graph\.saved_tensors_hooks",
    ),
}


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    path = tmp_path_factory.mktemp("model") / "ambient_model.py"
    path.write_text(FACTORY.format(set=""))
    return api.plan(f"{path}:build", cluster="1xcpu", method="data_parallel", optimizer="sgd")


def made() -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    return zoo.build("mlp", **SIZES)


@pytest.fixture(scope="module")
def trainer(plan: Plan) -> Trainer:
    return api.parallelize(made()[0], plan, optimizer=lambda named: torch.optim.SGD(named, lr=0.1))


def test_a_plan_made_under_torchs_defaults_has_no_settings(plan: Plan) -> None:
    assert settings() == plan.settings == ()
    assert '"settings"' not in plan_to_json(plan)
    assert len(READ) > len(SETTINGS)


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_is_recorded_and_compared_in_each_call(
    plan: Plan, trainer: Trainer, name: str
) -> None:
    change, told = SETTINGS[name]
    _, batch = made()
    with change():
        recorded = settings()
        assert name in dict(recorded)
        for call in (trainer.step, trainer.evaluate):
            with pytest.raises(FingerprintError, match=f"{name} is {told}"):
                call(batch)
    there = replace(plan, settings=recorded)
    assert plan_from_json(plan_to_json(there), "plan.json") == there
    other = api.parallelize(
        made()[0], there, optimizer=lambda named: torch.optim.SGD(named, lr=0.1)
    )
    with pytest.raises(FingerprintError, match=rf"{name} is .* here and was .* when the plan"):
        other.step(batch)
    trainer.step(batch)


@pytest.mark.parametrize("name", AROUND)
def test_a_context_around_a_call_is_refused(plan: Plan, trainer: Trainer, name: str) -> None:
    enter, told = AROUND[name]
    model, batch = made()
    with enter():
        for call in (trainer.step, trainer.evaluate):
            with pytest.raises(InputError, match=rf"{told}.*inside of the model's forward"):
                call(batch)
        with pytest.raises(CaptureError, match=rf"{told}.*inside of forward"):
            capture(model, batch)
        with pytest.raises(FingerprintError, match=rf"{told}.*inside of forward"):
            api.parallelize(made()[0], plan, optimizer=lambda named: torch.optim.SGD(named, lr=0.1))
    trainer.step(batch)


def test_a_step_needs_gradients_and_an_evaluation_does_not(trainer: Trainer) -> None:
    _, batch = made()
    for off in (torch.no_grad, torch.inference_mode):
        with off():
            with pytest.raises(InputError, match=r"gradients are off .*trainer\.evaluate"):
                trainer.step(batch)
            trainer.evaluate(batch)


def test_what_a_factory_sets_is_in_its_plan(tmp_path: Path) -> None:
    path = tmp_path / "ambient_factory.py"
    path.write_text(FACTORY.format(set="torch.set_float32_matmul_precision('medium')"))
    try:
        plan = api.plan(f"{path}:build", cluster="1xcpu", method="data_parallel")
        assert dict(plan.settings)["torch.set_float32_matmul_precision"] == "medium"
        trainer = api.parallelize(made()[0], plan, optimizer=torch.optim.AdamW)
        trainer.step(made()[1])
    finally:
        torch.set_float32_matmul_precision("highest")
    with pytest.raises(FingerprintError, match="is highest here and was medium when the plan"):
        trainer.step(made()[1])


@pytest.mark.parametrize("bad", ["\x1b[31m", "a b", "", "x" * 101])
def test_settings_of_a_plan_file_are_names(plan: Plan, bad: str) -> None:
    for pair in ((bad, "x"), ("x", bad)):
        with pytest.raises(InputError, match="settings"):
            plan_from_json(plan_to_json(replace(plan, settings=(pair,))), "plan.json")
