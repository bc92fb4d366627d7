"""`--dtype fp16` from plan to log: prediction, program, proof, steps that are skipped,
checkpoint.
"""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parloom import api, changes, zoo
from parloom.errors import LaunchError
from parloom.ir.mesh import Device
from parloom.ir.plan import ModelSource, Plan
from parloom.ir.plan_json import plan_from_json, plan_to_json

SIZES: dict[str, Any] = {"batch": 8, "features": 8, "hidden": 16, "depth": 2, "classes": 4}
FACTORY = """
from parloom import zoo
def build():
    return zoo.build("mlp", batch=8, features=8, hidden=16, depth=2, classes=4)
"""
sgd = partial(torch.optim.SGD, lr=0.1)


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Plan]:
    path = tmp_path_factory.mktemp("model") / "model.py"
    path.write_text(FACTORY)
    return {
        dtype: api.plan(
            f"{path}:build", cluster="1xV100" if dtype != "cpu" else "1xcpu",
            method="data_parallel", optimizer="sgd", dtype="fp16" if dtype == "cpu" else dtype,
        )
        for dtype in ("fp16", "bf16", "cpu")
    }  # fmt: skip


def build(dtype: torch.dtype = torch.float16) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    model, batch = zoo.build("mlp", **SIZES)
    return model.to(dtype), {
        n: t.to(dtype) if t.is_floating_point() else t for n, t in batch.items()
    }


def test_a_plan_says_what_it_was_cast_to(plans: dict[str, Plan]) -> None:
    plan = plans["fp16"]
    assert plan.source.dtype == "float16"
    assert "--dtype fp16" in plan.command()
    decisions = plan.decisions
    assert (decisions.master_dtype, decisions.reduce_dtype) == ("float32", "float32")
    assert plan_from_json(plan_to_json(plan), "plan.json") == plan
    assert "the captured program equals the module itself (4 calls, float16" in str(
        plan.assumptions
    )
    assert "'unscale'" in api.generate(plan)
    assert "'unscale'" not in api.generate(plans["bf16"])


def test_on_volta_float16_is_faster_than_bfloat16(plans: dict[str, Plan]) -> None:
    """At an eighth of the rate bfloat16 is no choice there, which its plan says."""
    step_s = {}
    for dtype in ("fp16", "bf16"):
        large = api.plan(
            "zoo:mlp", batch=8192, cluster="1xV100", method="data_parallel", dtype=dtype
        )
        assert large.prediction is not None
        step_s[dtype] = large.prediction.step_s
    assert 2 * step_s["fp16"] < step_s["bf16"]
    advice = [line for line in plans["bf16"].assumptions if "--dtype fp16 computes at" in line]
    assert len(advice) == 1
    assert not any("lists no rate" in line for line in plans["fp16"].assumptions)


@pytest.mark.parametrize(
    ("rates", "dtype", "offered"),
    [
        ((("float16", 1e12), ("float32", 1e11)), None, "--dtype fp16"),
        ((("float16", 1e12), ("bfloat16", 1e12)), None, "--dtype bf16"),
        ((("float32", 1e12),), None, "--dtype bf16"),
        ((("float16", 1e12),), "float16", None),
        ((("float16", 1e12),), "bfloat16", None),
    ],
)
def test_the_half_precision_that_a_device_has_is_offered(
    rates: Any, dtype: str | None, offered: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(changes, "_captured", lambda request, origin, flags, *_: iter([flags]))
    device = Device("odd", rates, 2**30, 1e12)
    request: Any = SimpleNamespace(cluster=SimpleNamespace(device=device))
    origin: Any = SimpleNamespace(source=ModelSource("zoo:mlp", 8, None, dtype))
    found: list[Any] = list(changes._dtype(request, origin))
    assert found == ([offered] if offered else [])


def test_a_step_that_is_skipped_is_logged(
    plans: dict[str, Plan], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, batch = build()
    path = tmp_path / "log.jsonl"
    trainer = api.parallelize(model, plans["cpu"], optimizer=sgd, log_path=path)
    trainer.step(batch)
    before = trainer.state_dict()
    large = {n: t * 600 if n == "x" else t for n, t in batch.items()}
    capsys.readouterr()
    assert trainer.step(large).skipped
    first, second = capsys.readouterr().out.splitlines()
    assert first == "step 2 skipped: gradients overflowed at loss scale 65536; now 32768"
    assert second.startswith("step 2 loss ")
    after = trainer.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    trainer.step(batch)
    trainer.log.close()
    steps = [json.loads(line) for line in path.read_text().splitlines()][1:]
    assert [(s["skipped"], s["loss_scale"]) for s in steps] == [
        (False, 65536.0),
        (True, 65536.0),
        (False, 32768.0),
    ]
    trainer.save(tmp_path / "saved").wait()
    other = api.parallelize(build()[0], plans["cpu"], optimizer=sgd)
    other.load(tmp_path / "saved")
    assert other.loss_scale == trainer.loss_scale
    assert other.loss_scale is not None
    assert (other.loss_scale.scale, other.loss_scale.num_good) == (32768.0, 1)


def test_verify_proves_the_plan(plans: dict[str, Plan]) -> None:
    report = api.verify(replace(plans["cpu"]))
    assert report.passed
    assert "float16, limit 4e-03" in str(report)


def test_an_operator_without_a_kernel_is_named(
    plans: dict[str, Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch on CPUs lacks some in float16, as avg_pool3d."""
    model, batch = build()
    trainer = api.parallelize(model, plans["cpu"], optimizer=sgd)

    def missing(*_: object) -> None:
        torch.nn.functional.avg_pool3d(torch.ones(1, 1, 2, 2, 2).half(), 2)

    monkeypatch.setattr(trainer.parts[0].store, "finish_gradients", missing)
    with pytest.raises(LaunchError, match=r"avg_pool3d.* not implemented for 'Half'.*--dtype"):
        trainer.step(batch)
