"""Planning on systems that are not Linux, and without a network or transformers."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from parloom.capture.load import full_name

# What macOS or Windows do not have is gone before anything is imported.
ELSEWHERE = """
import multiprocessing, os, signal, sys
import psutil, torch, torch.distributed.run  # they have code of their own for each system
GONE = ("resource", "fcntl", "pwd", "grp", "termios", "transformers", "pynvml")
class Gone:
    def find_spec(name, path=None, target=None):
        if name in GONE:
            raise ModuleNotFoundError("no module " + name, name=name)
sys.meta_path.insert(0, Gone)
for name in GONE:
    sys.modules.pop(name, None)
import multiprocessing.context
multiprocessing.get_all_start_methods = lambda: ["spawn"]
for name in ("fork", "sched_getaffinity", "getuid", "O_NONBLOCK", "O_CLOEXEC"):
    if hasattr(os, name):
        delattr(os, name)
for name in ("SIGALRM", "setitimer", "SIGKILL", "SIGHUP", "SIGQUIT"):
    if hasattr(signal, name):
        delattr(signal, name)
from parloom import cli
sys.exit(cli.main(sys.argv[1:]))
"""


def elsewhere(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", ELSEWHERE, *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True)


@pytest.mark.slow
def test_plans_where_processes_cannot_be_forked(tmp_path: Path) -> None:
    file = tmp_path / "two.yaml"
    file.write_text("device: cpu\nlevels: [{name: loopback, size: 2, bandwidth: 0.9GB/s}]\n")
    asked = "plan", "zoo:mlp", "--cluster", str(file), "--method", "data_parallel", "--out"
    done = elsewhere(*asked, str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "processes cannot be forked on this system" in done.stdout
    assert json.loads((tmp_path / "plan.json").read_text(encoding="utf-8"))["version"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_a_script(shell: str) -> None:
    code = "import sys; from parloom.__main__ import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", code, "--show-completion", shell],
        check=False, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "_PARLOOM_COMPLETE" in done.stdout


def test_a_file_comes_before_a_bundled_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert full_name("gpt2") == "zoo:gpt2"
    assert full_name("owner/gpt2") == "owner/gpt2"
    (tmp_path / "gpt2").mkdir()
    assert full_name("gpt2") == "gpt2"
