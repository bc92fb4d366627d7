"""A few of the benchmark's random modules, and that it finds what a check misses."""

import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def benchmark() -> Iterator[ModuleType]:
    torch.set_num_threads(1)
    sys.path.insert(0, str(BENCHMARKS))
    yield import_module("random_modules")
    sys.path.remove(str(BENCHMARKS))


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(2))
def test_a_random_module_is_equal_or_refused(
    benchmark: ModuleType, tmp_path: Path, seed: int
) -> None:
    row = benchmark.examine(seed, "", "", tmp_path)
    assert row["outcome"] in (benchmark.EQUAL, benchmark.REFUSED), row
    assert row["outcome"] == benchmark.EQUAL or row["traps"], row


@pytest.mark.parametrize("fault", ["state", "writes"])
def test_a_check_that_is_missing_is_found(
    benchmark: ModuleType, tmp_path: Path, fault: str
) -> None:
    trap = benchmark.FAULTS[fault].trap
    # The first modules do not read what they change.
    rows = (benchmark.examine(seed, trap, fault, tmp_path) for seed in range(2, 20))
    assert any(row["outcome"] == benchmark.SILENT for row in rows)


def test_equal_seeds_make_equal_modules(benchmark: ModuleType) -> None:
    assert benchmark.source(3) == benchmark.source(3)
    assert benchmark.source(3) != benchmark.source(4)
