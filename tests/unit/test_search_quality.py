"""How the table of searches goes on from a file, and what it says of rows."""

import json
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
METHODS = "data_parallel", "fsdp", "megatron", "auto", "alpa"
ROW = {
    "model": "m", "cluster": "4xcpu", "step_s": dict.fromkeys(METHODS), "errors": {},
    "peak_bytes": dict.fromkeys(METHODS), "cpu_s": {"auto": 2.0, "alpa": 1.0}, "lost": False,
    "gap": None, "solver_gap": None, "search_s": 2.0, "rss_bytes": 3 << 30,
    "rss_before_bytes": 1 << 30,
}  # fmt: skip


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return import_module("search_quality")


def test_a_row_where_nothing_fits_says_so_for_every_method(table: ModuleType) -> None:
    cells = table._line(ROW, ("alpa",)).split(" | ")
    assert cells[2:7] == ["does not fit"] * 4 + ["does not fit (1.0 s)"]
    assert cells[-3:] == ["", "2.0 s", "3 GiB (1 GiB) |"]


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
    ("change", "compared", "made"),
    [
        ({}, ("alpa",), True),
        ({}, (), True),
        ({}, ("alpa", "tofu"), False),
        ({"model": "n"}, (), False),
        ({"cluster": "8xcpu"}, (), False),
        ({"errors": {"auto": "ValueError: no"}}, (), False),
        ({"error": "its process ended"}, (), False),
    ],
)
def test_a_row_is_made_again_where_something_is_missing(
    table: ModuleType, change: dict[str, Any], compared: tuple[str, ...], made: bool
) -> None:
    assert table._is_made(ROW | change, "m", ["4xcpu"], compared) == made


def test_the_exponent_is_the_power_that_seconds_follow(table: ModuleType) -> None:
    assert table.exponent([8, 16, 32], [3 * n**0.7 for n in (8, 16, 32)]) == pytest.approx(0.7)
