"""From a model to a plan that serves it, and what is said where there is none."""

import io
import json
import re
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from parloom import api, cli, objectives
from parloom.candidates import Candidates
from parloom.cost.tasks import COMPUTE
from parloom.errors import InfeasibleError, InputError
from parloom.execute.inference import inference_programs
from parloom.inference import Captured, positions_beyond
from parloom.ir.expected import Objective, Status
from parloom.ir.graph import CACHE
from parloom.ir.plan import Plan
from parloom.ir.plan_json import plan_from_json, plan_to_json
from parloom.report.inference import inference_document, inference_screen, rate_of
from parloom.report.words import constraint_lines
from tests.dist.inference_plans import CONFIGS, served


def _silent(text: str) -> None:
    """Drop progress messages."""


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Captured:
    """A model from a config, with prompts of eight and eight tokens after each."""
    folder = tmp_path_factory.mktemp("gpt2")
    config = CONFIGS["gpt2"]()
    config.architectures = ["GPT2LMHeadModel"]
    config.save_pretrained(folder)
    return api.capture_inference(str(folder), batch=4, seq=8, new_tokens=8, progress=_silent)


def _found(captured: Captured, **asked: object) -> Plan:
    return api.search_inference(captured, cluster="2xcpu", progress=_silent, **asked)  # type: ignore[arg-type]


def test_the_answer_is_a_prompt_and_the_tokens_after_its_first(gpt2: Captured) -> None:
    assert any("equals the module itself" in line for line in gpt2.assumptions)
    plan = _found(gpt2, method="megatron", devices=2)
    assert plan.inference is not None
    assert plan.inference.prefill is not None
    assert plan.prediction is not None
    assert plan.aim is not None
    answer_s = plan.inference.prefill.step_s + 7 * plan.prediction.step_s
    assert plan.inference.answer_s(plan.prediction.step_s) == pytest.approx(answer_s)
    assert plan.aim.objective is Objective.LATENCY
    assert plan.aim.value == pytest.approx(answer_s)
    rate, unit = rate_of(plan)
    assert rate == pytest.approx(4 * 8 / answer_s)
    assert unit == "tokens"
    # Half of the heads of 16 positions of four samples, in float32, keys and values of two layers.
    half = 4 * 16 * 32 * 4 * 2 * 2 // 2
    assert plan.inference.cache_bytes == half
    held = dict(plan.prediction.memory)
    assert held["buffers"] >= half
    assert not held["gradients"]
    assert not held["optimizer"]
    document = inference_document(plan, "plan.json", 0.0, 0.0)
    assert document["memory"]["cache"] == half
    assert document["passes"] == {"prefill": 1, "step": 7}
    assert {*inference_programs(plan)} == {"decode", "prefill"}
    assert "--inference" in plan.command()
    assert "--new-tokens 8" in plan.command()


def test_throughput_is_the_time_of_each_token(gpt2: Captured) -> None:
    plan = _found(gpt2, method="data_parallel", objective="throughput")
    assert plan.inference is not None
    assert plan.prediction is not None
    assert plan.aim is not None
    each_s = plan.inference.answer_s(plan.prediction.step_s) / (4 * 8)
    assert plan.aim.objective is Objective.THROUGHPUT
    assert plan.aim.value == pytest.approx(each_s)


@pytest.mark.slow
def test_passes_of_tokens_in_stages_follow_each_other(gpt2: Captured) -> None:
    """A token takes as long as the busiest stage is at all microbatches, or the way of one."""
    plan = _found(gpt2, objective="throughput", pin=("stages=2",), devices=2)
    assert plan.prediction is not None
    played = api.simulate(plan)
    assert played.period_ps is not None
    assert plan.prediction.step_s == played.period_s
    busiest = max(dict(played.busy(index))[COMPUTE] for index in range(2))
    assert played.period_ps >= busiest
    halves = replace(plan.decisions, num_microbatches=2, schedule="1f1b", actions=())
    one = api.simulate(replace(plan, decisions=replace(halves, num_microbatches=1)))
    two = api.simulate(replace(plan, decisions=halves))
    assert two.each_ps < two.step_ps  # passes overlap
    assert one.each_ps > one.step_ps  # a pass, and the token on its way back
    told = _screen(replace(plan, decisions=halves))
    assert "2 microbatches: stages begin the next token of one" in told
    alone = _screen(replace(plan, decisions=replace(halves, num_microbatches=1)))
    assert "one microbatch: no two passes overlap" in alone


def test_pins_and_limits_say_what_they_cost(gpt2: Captured, tmp_path: Path) -> None:
    """With the best answers without them; the plan's command has them again."""
    free = _found(gpt2, method="data_parallel")
    assert free.counted is not None
    limit = free.counted.peak_bytes + 1_000_000
    found = _found(gpt2, method="data_parallel", pin=("mesh=2",), memory=limit, devices=2)
    texts = [constraint.text for constraint in found.constraints]
    assert texts == ["--pin mesh=2", f"--memory {limit}B", "--devices 2"]
    assert found.counted is not None
    assert found.name == found.alternatives[found.own or 0].name
    without = [constraint.step_s for constraint in found.constraints]
    assert all(step_s is not None and step_s <= found.counted.step_s for step_s in without)
    assert found.command().endswith(f"--pin mesh=2 --memory {limit}B --devices 2")
    told = _screen(found)
    assert "--pin mesh=2 costs nothing" in told
    assert found.status is Status.COMPLETE
    assert inference_document(found, "p", 0, 0)["constraints"][0]["text"] == "--pin mesh=2"
    assert not free.constraints


@pytest.mark.parametrize(("number", "texts"), [(2, ()), (3, ("--pin mesh=2",))])
def test_ctrl_c_keeps_the_best_answers(
    gpt2: Captured, monkeypatch: pytest.MonkeyPatch, number: int, texts: tuple[str, ...]
) -> None:
    """In the search of prompts those of the program of tokens; among prices those that are there,
    and every flag.
    """
    calls, right = count(1), objectives.proposed

    def interrupted(*given: Any) -> Candidates:
        if next(calls) == number:
            raise KeyboardInterrupt
        return right(*given)

    monkeypatch.setattr("parloom.inference_plan.proposed", interrupted)
    pins = ("mesh=2", "lm_head=d0:data") if texts else ()
    found = _found(gpt2, method="data_parallel", pin=pins, devices=2)
    assert found.status is Status.INTERRUPTED
    assert found.interrupted
    priced = tuple(one.text for one in found.constraints if one.step_s is not None)
    assert priced == texts
    asked = [*(f"--pin {pin}" for pin in pins), "--devices 2"]
    assert [one.text for one in found.constraints] == asked
    assert all("was not looked for" in line for line in constraint_lines(found)[len(texts) :])
    assert any("interrupted" in note for note in found.notes)


def test_ctrl_c_in_the_search_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The plan so far is saved, and the exit code says that it is one."""
    right = objectives.proposed

    def interrupted(*given: Any) -> Candidates:
        return replace(right(*given), status=Status.INTERRUPTED)

    monkeypatch.setattr("parloom.inference_plan.proposed", interrupted)
    asked = ["plan", "zoo:mlp", "--inference", "--cluster", "2xcpu", "--method", "data_parallel"]
    assert cli.main([*asked, "--out", str(tmp_path / "plan")]) == 130
    assert "ZeRO-1: interrupted; this is the best of what was found" in capsys.readouterr().out
    assert api.load(tmp_path / "plan" / "plan.json").interrupted


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--cluster", "2xnone"], "none"),
        (["--objective", "memory"], "memory is of training"),
        (["--devices", "3"], "3"),
        (["--calibration", "nowhere.json"], "nowhere.json"),
        (["--steps", "2", "--new-tokens", "2"], "--steps are passes of a model that"),
    ],
)
def test_questions_without_an_answer_are_refused_before_the_model_is_built(
    flags: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def built(*_: object, **__: object) -> None:
        raise AssertionError("the model is built")

    monkeypatch.setattr(api, "capture_inference", built)
    assert cli.main(["plan", "zoo:mlp", "--inference", "--cluster", "2xcpu", *flags]) == 2
    assert said in capsys.readouterr().err


def _screen(plan: Plan) -> str:
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(inference_screen(plan, api.load_cluster(plan.cluster).cluster, {}))
    return console.export_text()


def test_candidates_are_shown_beside_the_plan(gpt2: Captured) -> None:
    shown = _screen(_found(gpt2, method="data_parallel"))
    own = next(line for line in shown.splitlines() if "this plan" in line)
    assert "+0.0%" in own
    assert re.search(r"alternatives +answers +against plan +peak +fits", shown)


def test_what_fits_nowhere_says_what_is_missing(gpt2: Captured) -> None:
    with pytest.raises(InfeasibleError, match=r"needs .* more: weights .*, caches .* KiB") as found:
        _found(gpt2, method="megatron", memory=60_000)
    assert found.value.document["short_bytes"] == (
        sum(
            size
            for name, size in found.value.document.items()
            if name in ("weights_bytes", "cache_bytes", "working_set_bytes")
            and isinstance(size, int)
        )
        - 60_000
    )
    caches = sum(e.value.spec.num_bytes for e in gpt2.graph.of_kind(CACHE))
    with pytest.raises(InfeasibleError, match="the caches of 4 prompts and 8 tokens after each"):
        _found(gpt2, memory=caches // 2 - 1)


def test_questions_of_training_are_refused(gpt2: Captured, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="time is of training; --inference has latency or"):
        _found(gpt2, objective="time")
    with pytest.raises(InputError, match="--objective latency goes with --inference"):
        api.plan("zoo:mlp", cluster="2xcpu", objective="latency")
    with pytest.raises(InputError, match="MLP keeps no keys and values between calls"):
        api.capture_inference("zoo:mlp", new_tokens=4, progress=_silent)
    with pytest.raises(InputError, match="--new-tokens: must be a whole number from 1 on"):
        api.capture_inference("zoo:mlp", new_tokens=0, progress=_silent)


def test_one_pass_is_searched() -> None:
    """The bound is of the pass alone."""
    captured = api.capture_inference("zoo:mlp", batch=64, progress=_silent)
    assert captured.prefill is None
    assert captured.graph.loss is None
    assert [entry.target for entry in captured.graph.of_kind("batch")] == ["x"]
    plan = _found(captured)
    assert plan.inference is not None
    assert plan.inference.prefill is None
    assert plan.aim is not None
    assert plan.aim.bound is not None
    assert plan.gap is not None
    assert plan.aim.bound <= plan.aim.value
    assert rate_of(plan)[1] == "samples"


def test_steps_of_a_denoiser() -> None:
    """An answer takes as many passes, and so does its bound."""
    sizes = {"batch": 4, "progress": _silent}
    with pytest.raises(InputError, match="--steps are passes of a model that generates no tokens"):
        api.capture_inference("zoo:mlp", new_tokens=2, steps=2, progress=_silent)
    one, many = (api.capture_inference("zoo:mlp", **sizes, steps=n) for n in (None, 50))  # type: ignore[arg-type]
    first, plan = (_found(captured, method="data_parallel") for captured in (one, many))
    assert plan.inference is not None
    assert plan.prediction is not None
    assert plan.aim is not None
    assert first.aim is not None
    assert plan.aim.value == pytest.approx(50 * first.aim.value)
    assert plan.inference.steps == 50
    assert plan.inference.passes == (0, 50)
    document = inference_document(plan, "plan.json", 0.0, 0.0)
    assert document["latency_s"] == pytest.approx(50 * plan.prediction.step_s)
    assert document["passes"] == {"prefill": 0, "step": 50}
    assert "--steps 50" in plan.command()
    assert "--steps" not in first.command()
    assert plan_from_json(plan_to_json(plan), "plan") == plan


def test_verbs_of_inference_plans(
    gpt2: Captured, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are about a pass of the program of tokens; those of training say so."""
    plan = _found(gpt2, method="data_parallel")
    api.save(plan, tmp_path / "run")
    path = str(tmp_path / "run")
    assert plan.prediction is not None
    for verb in ("explain", "simulate"):
        assert cli.main([verb, path, "--json"]) == 0
        document = json.loads(capsys.readouterr().out)
        assert document["step_s"] == pytest.approx(plan.prediction.step_s)
    assert cli.main(["report", path, "--out", str(tmp_path / "page.html")]) == 0
    assert cli.main(["export", path, "--to", "ranks", "--out", str(tmp_path / "there")]) == 0
    said = {
        ("scale",): "scale is of training steps, and this plan is for inference",
        ("run", "--resume", "--", "requests.jsonl"): "--resume is about training, and this plan is",
        ("export", "--to", "slurm"): "--to slurm is about training",
        ("export", "--to", "deepspeed"): "--to deepspeed is about training",
    }
    for (verb, *rest), words in said.items():
        capsys.readouterr()
        assert cli.main([verb, path, *rest]) == 2
        assert words in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(("new_tokens", "said"), [(9, False), (10, True)])
def test_positions_that_no_table_has_are_told(new_tokens: int, said: bool) -> None:
    """A Llama rotates any position: of eight in a prompt and sixteen in its config."""
    made = served("llama").made
    model = SimpleNamespace(config=SimpleNamespace(max_position_embeddings=16))
    found = positions_beyond(model, made.prefill, new_tokens)  # type: ignore[arg-type]
    assert [own.startswith("17 positions are read") for own in found] == [True] * said


def test_batches_of_one_pass_follow_each_other_in_stages() -> None:
    """`throughput` counts the time from batch to batch, `latency` the way of one through all
    stages.
    """
    captured = api.capture_inference("zoo:mlp", batch=64, progress=_silent)
    plan = _found(captured, objective="throughput", pin=("stages=2",), devices=2)
    assert plan.inference is not None
    assert plan.prediction is not None
    assert plan.aim is not None
    played = api.simulate(plan)
    assert plan.inference.period_s == played.period_s
    busiest = max(dict(played.busy(index))[COMPUTE] for index in range(2))
    assert busiest <= played.each_ps < played.step_ps
    assert plan.prediction.step_s == played.step_s
    assert plan.aim.value == pytest.approx(played.period_s / 64)
    assert plan.aim.bound is None or plan.aim.bound <= plan.aim.value
    rate, unit = rate_of(plan)
    assert rate == pytest.approx(64 / played.period_s)
    assert unit == "samples"
    assert "a batch every" in _screen(plan)
    assert plan_from_json(plan_to_json(plan), "plan").inference == plan.inference
    alone = _found(captured, pin=("stages=2",), devices=2)
    assert alone.inference is not None
    assert alone.aim is not None
    assert alone.prediction is not None
    assert alone.aim.value == alone.prediction.step_s
    assert alone.counted == alone.prediction
    # `run` serves it so, too.
    assert alone.inference.period_s == api.simulate(alone).period_s
    assert "a batch every" in _screen(alone)
    steps = api.capture_inference("zoo:mlp", batch=64, steps=5, progress=_silent)
    waiting = _found(steps, objective="throughput", pin=("stages=2",), devices=2)
    assert waiting.inference is not None
    assert waiting.prediction is not None
    assert waiting.inference.period_s is None
    assert waiting.counted is not None
    assert waiting.counted.step_s == pytest.approx(5 * waiting.prediction.step_s)
    assert api.simulate(waiting).period_ps is None
