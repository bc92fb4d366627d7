"""Graph text and generated source, byte for byte.

`pytest tests/golden --update-golden` rewrites the files; a commit that does so says why.
"""

import json
import os
import subprocess
import sys
from difflib import unified_diff
from functools import cache
from pathlib import Path

import pytest

from tests.golden import programs

DATA = Path(__file__).parent / "data"
FILES = sorted([*(f"{n}.graph" for n in programs.SIZES), *(f"{n}.py" for n in programs.PLANS)])

made = cache(programs.texts)


@pytest.mark.parametrize("name", FILES)
def test_golden(name: str, request: pytest.FixtureRequest) -> None:
    found, path = made()[name], DATA / name
    if request.config.getoption("--update-golden"):
        path.write_text(found, encoding="utf-8")
    wanted = path.read_text(encoding="utf-8") if path.exists() else ""
    lines = unified_diff(wanted.splitlines(), found.splitlines(), "golden", "now", lineterm="")
    assert found == wanted, "\n".join([f"{name} changed (--update-golden rewrites it)", *lines])


def test_there_is_no_stale_file() -> None:
    assert sorted(p.name for p in DATA.iterdir()) == FILES


def test_texts_do_not_depend_on_the_process() -> None:
    """Another process, with another order of sets, writes the same bytes."""
    script = "import json; from tests.golden import programs; print(json.dumps(programs.texts()))"
    seed = "1" if os.environ.get("PYTHONHASHSEED") == "0" else "0"
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"PYTHONHASHSEED": seed},
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout.splitlines()[-1]) == made()
