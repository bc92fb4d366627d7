"""Commands whose seconds are measured, and what is said of them."""

from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
ROW = {
    "model": "llama3_8b", "cluster": "8x8xH100", "batch": 64, "exit": 0, "cpu_s": 19.0,
    "wall_s": 20.0, "rss_bytes": 1 << 30, "step_s": 1.2, "peak_bytes": 1 << 33, "bound_s": None,
    "solver_gap": 0.001,
}  # fmt: skip


@pytest.fixture
def speed(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return import_module("plan_speed")


def test_a_command_has_the_flags_of_its_case(speed: ModuleType, tmp_path: Path) -> None:
    case = {"config": {"model_type": "t5"}, "batch": 8, "batches": [8, 16], "dtype": "bf16"}
    words = speed.command(case, "4xcpu", 16, tmp_path)
    assert words[3:5] == ["plan", str(tmp_path / "config.json")]
    assert words[5:11] == ["--cluster", "4xcpu", "--batch", "16", "--dtype", "bf16"]
    assert (tmp_path / "config.json").read_text() == '{"model_type": "t5"}'


def test_goals_that_are_missed_are_named(speed: ModuleType) -> None:
    assert not speed.missed(ROW)
    assert speed.missed(ROW | {"cpu_s": 21.0}) == "over 20 s"
    assert speed.missed(ROW | {"rss_bytes": 3 << 30}) == "over 2 GB"
    assert speed.missed(ROW | {"exit": 3, "said": "no plan"}) == "exit code 3: no plan"
    assert speed.line(ROW).count("|") == 12
    assert speed.uneven([ROW, ROW | {"cpu_s": 10.0}]) == []
    assert len(speed.uneven([ROW, ROW | {"cpu_s": 9.0}])) == 1


def test_every_case_of_scale_says_batches_and_clusters(speed: ModuleType) -> None:
    for case in speed.documented()["scale"].values():
        assert case["batch"] in case["batches"]
        assert case["clusters"]
