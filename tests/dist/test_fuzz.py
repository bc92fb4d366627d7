"""A few cases of `benchmarks/fuzz.py`, which makes 2,000 of each kind."""

import subprocess
import sys
from pathlib import Path

FUZZ = Path(__file__).parents[2] / "benchmarks" / "fuzz.py"


def test_mutated_files_and_command_lines_end_as_documented(tmp_path: Path) -> None:
    command = [sys.executable, str(FUZZ), "--kind", "all", "--count", "2", "--seed", "1"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("2 cases, 0 fail") == 5
