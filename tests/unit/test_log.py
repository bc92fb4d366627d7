"""The step line and the JSON-lines log."""

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest

from parloom.errors import InputError
from parloom.execute.log import (
    RunRecord,
    StageTimes,
    StepLog,
    StepRecord,
    last_observed,
    step_line,
    waits_line,
)
from parloom.ir.expected import Prediction
from parloom.runtime.spans import ActionSpan

RECORD = StepRecord(12, 2.9131, 0.412, 16974, "tok", 1288490189, "process", 0.398, True)


def test_step_line() -> None:
    assert step_line(RECORD) == (
        "step 12 loss 2.913 | 412 ms (predicted 398, +3.5 %) | 41.2k tok/s | process 1.2 GiB"
    )
    assert step_line(RECORD, compare=False) == (
        "step 12 loss 2.913 | 412 ms | 41.2k tok/s | process 1.2 GiB"
    )
    assert "predicted" not in step_line(replace(RECORD, calibrated=False))
    plain = StepRecord(0, 1.0, 12.0, 24, "samples")
    assert step_line(plain) == "step 0 loss 1 | 12 s | 2 samples/s"


def test_waits_line() -> None:
    found = [StageTimes(3, (0, 2), 0.214, 0.18), StageTimes(3, (1,), 0.04)]
    said = "waits for other stages, of a step: stages 0, 2 21% (predicted 18%), stage 1 4%"
    assert waits_line(found) == said


def logged(path: Path, plan_hash: str, *steps: int) -> list[StageTimes]:
    """A run of two stages in a log, with steps that were observed; the last of these."""
    found: list[StageTimes] = []
    with StepLog(0, [path], console=io.StringIO()) as log:
        log.begin(RunRecord(plan_hash, "2026-01-02T03:04:05+00:00", 7, 4))
        for step in steps:
            log.write(replace(RECORD, step=step))
            spans = (ActionSpan("F0", 0.0, 0.1), ActionSpan("B0", 0.1, 0.4 + step, 0.05))
            found = [StageTimes(step, (0, 2), 0.1, 0.2, spans), StageTimes(step, (1,), 0.0)]
            log.observed(found)
    return found


def test_the_last_observed_step_is_read_back(tmp_path: Path) -> None:
    file = tmp_path / "log.jsonl"
    logged(file, "abc", 3)
    last = logged(file, "abc", 3, 10)
    logged(file, "other", 3)
    assert last_observed(file, "abc") == last


def test_logs_without_an_observed_step_of_the_plan_are_told(tmp_path: Path) -> None:
    file = tmp_path / "log.jsonl"
    with pytest.raises(InputError, match=r"cannot read the log .*log\.jsonl"):
        last_observed(file, "abc")
    logged(file, "other", 3)
    with pytest.raises(InputError, match=r"no run of this plan \(abc\), but of other"):
        last_observed(file, "abc")
    logged(file, "abc", 3)
    logged(file, "abc")
    with pytest.raises(InputError, match="last run of this plan has no observed step"):
        last_observed(file, "abc")
    for wrong in ("{", '{"plan_hash": "abc"}\n{"step": 3, "actions": [{"name": 1}]}', "[]"):
        file.write_text(wrong, encoding="utf-8")
        with pytest.raises(InputError, match=r"line \d, is no record of a run"):
            last_observed(file, "abc")


def test_no_log_is_added_to_a_plan(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_text('{"format": "parloom.plan"}', encoding="utf-8")
    with pytest.raises(InputError, match="a plan is there, which would be lost"):
        StepLog(0, [file])
    assert file.read_text(encoding="utf-8") == '{"format": "parloom.plan"}'


def test_rank_0_writes_both_and_others_nothing(tmp_path: Path) -> None:
    console = io.StringIO()
    file = tmp_path / "run" / "log.jsonl"
    with StepLog(0, [file], console=console, every=2) as log:
        log.begin(RunRecord("abc", "2026-01-02T03:04:05+00:00", 7, 4))
        log.write(replace(RECORD, lr=0.1, grad_norm=float("inf")))
        log.write(StepRecord(13, float("nan"), 0.4, 1))
    with StepLog(1, [tmp_path / "other.jsonl"], console=console) as log:
        log.begin(RunRecord("abc", "2026-01-02T03:04:05+00:00", 7, 4))
        log.write(RECORD)
    assert len(console.getvalue().splitlines()) == 1
    run, first, second = map(json.loads, file.read_text(encoding="utf-8").splitlines())
    assert run == {
        "plan_hash": "abc",
        "time": "2026-01-02T03:04:05+00:00",
        "seed": 7,
        "ranks": 4,
    }
    assert (first["step"], first["lr"], first["unit"]) == (12, 0.1, "tok")
    assert (first["grad_norm"], second["grad_norm"]) == ("inf", None)
    assert second["loss"] == "nan"
    assert not (tmp_path / "other.jsonl").exists()


def test_the_prediction_is_told_three_times(tmp_path: Path) -> None:
    console = io.StringIO()
    with StepLog(0, [tmp_path / "log.jsonl"], console=console) as log:
        for step in range(5):
            log.write(replace(RECORD, step=step))
    told = ["predicted" in line for line in console.getvalue().splitlines()]
    assert told == [True, True, True, False, False]
    records = map(json.loads, (tmp_path / "log.jsonl").read_text(encoding="utf-8").splitlines())
    assert [record["predicted_s"] for record in records] == [0.398] * 5


def test_data_sheets_are_told_once_and_compared_with_no_step() -> None:
    console = io.StringIO()
    with StepLog(0, console=console) as log:
        log.begin(RunRecord("abc", "", 7, 4), Prediction(0.010, 1, error=2.2))
        for step in range(3):
            log.write(replace(RECORD, step=step, calibrated=False))
    first, *lines = console.getvalue().splitlines()
    assert first == (
        "predicted 10 ms a step, 1.11 ms to 90.3 ms nine times in ten: from data sheets, not"
        " calibrated, so that steps are not compared with it (`parloom calibrate`)"
    )
    assert not any("predicted" in line or "%" in line for line in lines)
    console = io.StringIO()
    with StepLog(0, console=console) as log:
        log.begin(RunRecord("abc", "", 7, 4), Prediction(0.010, 1, source="measured"))
        log.write(RECORD)
    with StepLog(1, console=console) as log:
        log.begin(RunRecord("abc", "", 7, 4), Prediction(0.010, 1))
    assert console.getvalue().count("predicted") == 1
