"""The step line and the JSON-lines log."""

import io
import json
from dataclasses import replace
from pathlib import Path

from parloom.execute.log import RunRecord, StepLog, StepRecord, Waits, step_line, waits_line
from parloom.ir.plan import Prediction

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
    found = [Waits("stages 0, 2", 0.214, 0.18), Waits("stage 1", 0.04)]
    said = "waits for other stages, of a step: stages 0, 2 21% (predicted 18%), stage 1 4%"
    assert waits_line(found) == said


def test_rank_0_writes_both_and_others_nothing(tmp_path: Path) -> None:
    console = io.StringIO()
    file = tmp_path / "run" / "log.jsonl"
    with StepLog(0, file, console=console, every=2) as log:
        log.begin(RunRecord("abc", "2026-01-02T03:04:05+00:00", 7, 4))
        log.write(replace(RECORD, lr=0.1, grad_norm=float("inf")))
        log.write(StepRecord(13, float("nan"), 0.4, 1))
    with StepLog(1, tmp_path / "other.jsonl", console=console) as log:
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
    with StepLog(0, tmp_path / "log.jsonl", console=console) as log:
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
