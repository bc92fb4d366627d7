"""Settings that hold for every test; they must be made before torch is imported."""

import gc
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.pop("COLUMNS", None)  # workers of pytest-xdist have one; a pipe has none

import pytest
from hypothesis import HealthCheck, settings

from tests.selection import Collected, kept

# The same examples on every machine; a shared core is no reason to fail.
settings.register_profile(
    "parloom", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
# Other examples in every run, and more of them: `make nightly`, or --hypothesis-profile nightly.
settings.register_profile(
    "nightly",
    derandomize=False,
    max_examples=1000,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("parloom")
LONGEST = "tests/web/"
# A trace makes many values and few cycles, beside all that torch keeps: looks for cycles are rare.
gc.set_threshold(10_000, 20, 50)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-docs", action="store_true", help="Rewrite the outputs of the pages in docs."
    )
    parser.addoption(
        "--whole", action="store_true", help="Slow tests, too, and all cases of those sampled."
    )
    parser.addoption(
        "--report",
        metavar="FILE",
        action="append",
        default=[],
        help="Drive this report in tests/web, not those that the tests make.",
    )
    parser.addoption(
        "--update-golden", action="store_true", help="Rewrite the files in tests/golden/data."
    )


def pytest_collection_finish() -> None:
    """What is there for good (modules, torch's tables, tests) is in no cycle that is looked for."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Slow tests and cases beyond samples are left out, unless they are asked for. The longest
    files come first: at the end both workers should have something to do.
    """
    items.sort(key=lambda item: LONGEST not in item.nodeid)
    asked = any(map(config.getoption, ("--whole", "--update-docs", "-m")))
    if not asked and not any("::" in own for own in config.args):
        chosen = set(kept([_described(item) for item in items]))
        left_out = [item for place, item in enumerate(items) if place not in chosen]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for place, item in enumerate(items) if place in chosen]
    _skip_without_a_gpu(items)


def _described(item: pytest.Item) -> Collected:
    sample = item.get_closest_marker("sample")
    return Collected(
        item.nodeid.partition("[")[0],
        item.get_closest_marker("slow") is not None,
        None if sample is None else sample.args[0],
    )


def _skip_without_a_gpu(items: list[pytest.Item]) -> None:
    """Tests marked gpu are skipped where there is none; torch is asked only if there are such."""
    marked = [item for item in items if "gpu" in item.keywords]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
