"""Ctrl-C while modules are imported: exit code 130 and one line, from the first import on."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from parloom.execute.files import uninterrupted

# Sends the signal to itself when a module is looked for.
PROGRAM = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == {name!r}:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Finder())
from parloom.__main__ import main
sys.exit(main())
"""


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("parloom.cli", ["--help"]),
        ("typer", ["--version"]),
        ("rich.console", ["doctor"]),
        ("parloom.candidates", ["plan"]),
        ("yaml", ["cluster", "show", "2xcpu"]),
        ("torch", ["plan", "zoo:mlp", "--cluster", "2xcpu"]),
        ("torch._C", ["verify", "nothing"]),
        ("numpy", ["explain", "nothing"]),
        ("parloom.api", ["simulate", "nothing"]),
        ("parloom.execute.launch", ["run", "nothing", "--", "x.py"]),
    ],
)
def test_an_interrupted_import_is_one_line(name: str, arguments: list[str]) -> None:
    program = PROGRAM.format(name=name)
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, check=False, capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"interrupted\n")


@pytest.mark.slow
def test_a_parent_that_ignores_the_signal_has_its_way() -> None:
    program = PROGRAM.format(name="typer").replace("signal.default_int_handler", "signal.SIG_IGN")
    command = [sys.executable, "-c", program, "--version"]
    done = subprocess.run(command, check=False, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")


SEARCH = """
import os, signal, sys, types
signal.signal(signal.SIGINT, signal.default_int_handler)

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "wave":
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Finder())
from parloom import __main__ as command
from parloom.search import optimize

runs = optimize.Driver.run

def run(driver):
    runs(driver)
    exec("def late():\\n    import wave\\n    while True: pass", vars(optimize))
    optimize.late()

optimize.Driver.run = run
sys.argv[1:] = ["plan", "zoo:mlp", "--cluster", "2xcpu", "--out", "out"]
sys.exit(command.main())
"""


@pytest.mark.slow
def test_an_import_in_a_search_ends_before_the_search_with_its_best_plan(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SEARCH]
    done = subprocess.run(command, check=False, capture_output=True, cwd=tmp_path, timeout=300)
    assert done.returncode == 130, done.stderr
    assert done.stderr.endswith(b"interrupted\n"), done.stderr
    assert (tmp_path / "out" / "plan.json").is_file()


def test_what_is_saved_is_saved_whole_before_the_signal_counts() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    saved = []
    try:
        with pytest.raises(KeyboardInterrupt), uninterrupted():  # noqa: PT012
            os.kill(os.getpid(), signal.SIGINT)
            saved.append("plan")
        assert saved == ["plan"]
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        with uninterrupted():
            saved.append("source")
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with uninterrupted():
            os.kill(os.getpid(), signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
    assert saved == ["plan", "source"]
