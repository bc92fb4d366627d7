"""The command in processes of its own: interrupted at any time, and the same bytes every time."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from parloom.execute.files import read_plan

PLAN = [sys.executable, "-m", "parloom", "plan", "zoo:mlp", "--cluster", "2x4xcpu"]


def interrupted_at(line: str, out: Path) -> tuple[int, str]:
    """Exit code and stderr of a `plan` that gets Ctrl-C when its progress says `line`."""
    said = []
    with subprocess.Popen(
        [*PLAN, "--out", str(out)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as running:
        assert running.stderr is not None
        for text in running.stderr:
            said.append(text)
            if text.startswith(line):
                running.send_signal(signal.SIGINT)
                break
        said += running.stderr
    return running.returncode, "".join(said)


def test_ctrl_c_in_the_search_keeps_the_best_plan(tmp_path: Path) -> None:
    code, said = interrupted_at("mesh ", tmp_path / "plan")
    assert code == 130, said
    assert "Traceback" not in said
    assert said.rstrip().endswith("interrupted")
    found = read_plan(tmp_path / "plan")
    assert found.interrupted
    assert found.bound_s is None  # what was not looked at may be faster
    assert (tmp_path / "plan" / "program.py").exists()


def test_ctrl_c_before_there_is_a_plan_leaves_nothing(tmp_path: Path) -> None:
    code, said = interrupted_at("capturing", tmp_path / "plan")
    assert code == 130, said
    assert "Traceback" not in said
    assert not (tmp_path / "plan").exists()


ASKED = (
    ["zoo:mlp", "--cluster", "2xcpu", "--pin", "layers.*=n", "--forbid", "head=n"],
    ["zoo:dlrm", "--cluster", "2x2xcpu", "--memory", "40MiB", "--budget", "60"],
)
ALL_OF = f"""
import sys
from parloom import cli
for number, asked in enumerate({ASKED!r}):
    code = cli.main(["plan", *asked, "--out", f"{{sys.argv[1]}}/{{number}}"])
    if code:
        sys.exit(code)
"""


@pytest.mark.slow
def test_the_same_question_gives_the_same_bytes(tmp_path: Path) -> None:
    """Whatever order sets have, and however many threads there are."""
    files = []
    for seed, threads in (("1", "1"), ("2", "2")):
        folder = tmp_path / seed
        subprocess.run(
            [sys.executable, "-c", ALL_OF, str(folder)],
            env=os.environ | {"PYTHONHASHSEED": seed, "OMP_NUM_THREADS": threads},
            check=True,
            capture_output=True,
        )
        names = [f"{i}/{name}" for i in range(len(ASKED)) for name in ("plan.json", "program.py")]
        files.append([(folder / name).read_bytes() for name in names])
    assert files[0] == files[1]
