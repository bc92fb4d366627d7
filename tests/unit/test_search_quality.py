"""Which rows the table of searches has, how it goes on from a file, and what it says of rows."""

import argparse
import json
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
ROW = {
    "model": "m", "cluster": "4xcpu", "samples": 4, "limit": 0.5, "auto_s": None, "gap": None,
    "solver_gap": None, "simulated_gap": None, "step_s": {"alpa": None}, "cpu_s": {"alpa": 1.0},
    "errors": {}, "best": None, "ratio": None, "lost": False, "peak_bytes": None, "search_s": 2.0,
    "rss_bytes": 3 << 30, "rss_before_bytes": 1 << 30,
}  # fmt: skip
FOUND = {"auto_s": 1.0, "peak_bytes": 1 << 30, "gap": 0.2, "solver_gap": 0.02, "simulated_gap": 0.1}


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return import_module("search_quality")


def options(**changed: Any) -> argparse.Namespace:
    asked = {"cases": "gpt,llama3_8b", "clusters": "4xcpu,8x8xH100", "samples": "case,1",
             "limits": "1,0.5", "draw": None, "shard": "1/1"}  # fmt: skip
    return argparse.Namespace(**asked | changed)


def test_rows_are_cases_in_a_device_and_samples_under_limits(table: ModuleType) -> None:
    rows = table.every_row(options())
    own = [table.Asked("gpt", "4xcpu")]
    own += [table.Asked("gpt", "4xcpu", 1, share) for share in (1.0, 0.5)]
    assert rows[:3] == own
    assert {row.cluster for row in rows if row.model == "llama3_8b"} == {"8x8xH100"}
    assert len(rows) == 9


def test_drawn_rows_depend_on_the_seed_alone_and_shards_are_all_of_them(table: ModuleType) -> None:
    every = options(cases=",".join(table.documented()["cases"]), samples="1,4", draw=3)
    drawn = table.every_row(every)
    assert drawn == table.every_row(every)
    assert len(set(drawn)) == table.DRAWN
    every.draw = 4
    assert drawn != table.every_row(every)
    every.draw = 3
    parts = []
    for part in ("1/2", "2/2"):
        every.shard = part
        parts += table.every_row(every)
    assert set(parts) == set(drawn)


def test_a_row_where_nothing_fits_says_so(table: ModuleType) -> None:
    cells = table.line(ROW)[2:-2].split(" | ")
    assert len(cells) == len(table.TITLES)
    assert cells[2:5] == ["4", "50%", "does not fit"]
    assert cells[8:] == ["none fits", "", "", "2.0 s", "3 GiB (1 GiB)"]


def test_a_plan_that_loses_or_finds_nothing_where_another_fits(table: ModuleType) -> None:
    assert table._best(2.0, {"alpa": 1.0, "fsdp": None}) == ("alpa", 0.5)
    assert table._best(None, {"alpa": 1.0}) == ("alpa", None)
    assert table._best(1.0, {"fsdp": None}) == (None, None)


def test_what_is_allowed_is_compared(table: ModuleType) -> None:
    said = list(table.summary([ROW, ROW | FOUND | {"samples": None, "lost": True}]))
    assert said[0] == "2 rows, 0 failed, another method faster in 1"
    assert said[1] == (
        "gap, batch of the case, 4xcpu: median 20.0% of 1 rows, allowed 2.3%: **not held**"
    )
    assert said[-1] == "solver_gap: at most 2.0%, above 1% in 1 of 1"


def test_rows_of_the_same_revision_only_are_gone_on_from(
    table: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    common, path = sys.modules["common"], tmp_path / "rows.json"
    for written, now, kept in (
        ("a1", "a1", [ROW]),
        ("a1", "b2", []),
        ("a1-dirty", "a1-dirty", []),
        ("", "", []),
    ):
        monkeypatch.setattr(common, "revision", lambda written=written: written)
        table.report("search_quality", [ROW], str(path))
        monkeypatch.setattr(common, "revision", lambda now=now: now)
        assert table.reported(str(path)) == kept
    assert json.loads(path.read_text())["rows"] == [ROW]
    assert not list(tmp_path.glob("*.part"))


@pytest.mark.parametrize(
    ("change", "methods", "made"),
    [
        ({}, ("alpa",), True),
        ({}, (), True),
        ({}, ("alpa", "tofu"), False),
        ({"errors": {"alpa": "ValueError: no"}}, (), False),
        ({"error": "its process ended"}, (), False),
    ],
)
def test_a_row_is_made_again_where_something_is_missing(
    table: ModuleType, change: dict[str, Any], methods: tuple[str, ...], made: bool
) -> None:
    assert table.is_made(ROW | change, methods) == made


def test_the_exponent_is_the_power_that_seconds_follow(table: ModuleType) -> None:
    assert table.exponent([8, 16, 32], [3 * n**0.7 for n in (8, 16, 32)]) == pytest.approx(0.7)
