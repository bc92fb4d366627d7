"""What `benchmarks/algebra.py` says of its rows."""

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
FORBIDDEN = "auto --forbid rewrite="


@pytest.fixture
def tables() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield import_module("algebra_tables")


def row(method: str, step_s: float, sent: int = 100, *rules: str, **more: Any) -> dict[str, Any]:
    takes = [{"rules": [rule], "values": 2, "in": "main"} for rule in rules]
    return {
        "model": "m", "cluster": "c", "method": method, "step_s": step_s, "cpu_s": 1.0,
        "sent_bytes": {"all_reduce": sent}, "peak_bytes": 10**9, "name": method, "takes": takes,
        "rules": dict.fromkeys(rules, 1), **more,
    }  # fmt: skip


def test_a_method_that_is_faster_than_auto_is_a_fault(tables: Any) -> None:
    rows = [row("auto", 1.0), row("unity", 1.0), row("alpa", 0.5)]
    assert tables.faults(rows) == ["m on c: auto takes 2.00000 times as long as alpa"]


def test_a_plan_that_cannot_be_read_back_is_a_fault(tables: Any) -> None:
    rows = [row("auto", 1.0, unreadable="it differs")]
    assert tables.faults(rows) == ["m on c: the plan of auto: it differs"]


def test_a_case_without_a_plan_of_auto_is_a_fault(tables: Any) -> None:
    rows = [{"model": "m", "cluster": "c", "method": "auto", "error": "late"}, row("alpa", 1.0)]
    assert tables.faults(rows) == ["m on c: alpa has a plan, auto has none: late"]


def test_tables_say_what_is_large_what_layouts_give_and_what_is_left(tables: Any) -> None:
    rows = [
        row("auto", 1.0, 100, "merge_linear"),
        row("auto --no-rewrites", 1.0, 100),
        row("sequential", 1.5, 300, "other"),
        row(f"{FORBIDDEN}merge_linear", 1.25),
    ]
    said = tables.tables(rows, ["m", "n"], ["c"], ["auto", "auto --no-rewrites", "sequential"])
    assert "- step: 1.500, m on c" in said
    assert "- bytes: 3.000, m on c" in said
    assert "- m on c: 1.500; without rewrites 1.000; `auto` merge_linear x1, auto;" in said
    assert "- m on c: 1.00000 times the step of `auto`; auto merge_linear x1" in said
    assert "- c: n: all methods" in said
    assert "| merge_linear | several | 1 | 1 | 250 | 250 | 25 |" in said
