"""A thousand GPUs from a login node that has none, mixed machines, and colleagues."""

import io
import json
import os
import shlex
import shutil
import signal
import sys
from pathlib import Path

import pytest

import parloom
from parloom import cli
from tests.docs.commands import trained
from tests.docs.test_terminal import FOLDER
from tests.forked import forked
from tests.scenes.told import told


class Interrupting(io.StringIO):
    """A user who presses Ctrl-C as soon as progress says how good the best plan is."""

    def write(self, text: str) -> int:
        if "best so far" in text:
            os.kill(os.getpid(), signal.SIGINT)
        return super().write(text)


def test_ctrl_c_keeps_the_best_plan(reader: Path) -> None:
    """A thousand GPUs from a machine that has none, and a user who has seen enough."""

    def work() -> int:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.stderr = Interrupting()
        asked = "plan zoo:gpt --cluster 128x8xH100 --batch 1024 --out runs/big"
        return cli.main(shlex.split(asked))

    code, _ = forked(work, 120)
    assert code == 130
    assert parloom.load(Path("runs/big")).cluster == "128x8xH100-SXM5-80GB"


def test_submit(reader: Path) -> None:
    """A job says at its start that it is not what was planned for: exit code 8. That its ranks say
    so in one message is shown by the script itself, in tests/dist/test_export.py.
    """
    told("parloom plan zoo:mlp --cluster 2x2xA100 --method fsdp --devices 4 --out runs/mlp")
    told("parloom export runs/mlp --to slurm -- train.py").says(
        r"^launch/train.sbatch: 2 x 2 ranks of plan \w+$"
    )
    assert "#SBATCH --nodes=2" in Path("launch/train.sbatch").read_text()
    told("parloom plan zoo:mlp --cluster 4xcpu --method fsdp --devices 4 --out runs/here")
    shutil.copy(FOLDER / "train.py", reader)
    said, code = trained(["run", "runs/here", "--", "train.py"], num_ranks=3)
    assert code == 8
    assert "error: the plan is for 4 ranks (4xcpu) and this job has 3; start 4 processes" in said


@pytest.mark.slow
def test_money(reader: Path) -> None:
    asked = (
        "parloom plan zoo:gpt --cluster 1x2xH100,1x4xH100 --method fsdp --price 2.10/gpu-h"
        " --tokens 2T --pareto"
    )
    told(asked).says(
        r"\$/run +days", r"^prices\n.*\$2\.10 an hour of a device \(--price, as given\)"
    )
    document = json.loads(told(f"{asked} --json").out)
    assert document["pareto"][0]["cost"]["usd"] > 0


@pytest.mark.slow
def test_mixed_cluster(reader: Path) -> None:
    text = (FOLDER / "lab.yaml").read_text()
    Path("lab.yaml").write_text(text)
    told("parloom plan zoo:mlp --cluster lab.yaml --batch 4096").says(
        r"2 x V100-SXM2-16GB stay idle: with them \S+ ms \(\+\S+%\), without"
    )
    Path("lab.yaml").write_text(text.replace("bandwidth: 25Gbit/s", "bandwith: 25Gbit/s"))
    told("parloom cluster check lab.yaml", code=2).says(
        r"lab\.yaml:\d+:\d+: unknown key 'bandwith'; did you mean 'bandwidth'"
    )
    Path("lab.yaml").write_text(text.replace("25Gbit/s", "25Gb/s"))
    told("parloom cluster check lab.yaml", code=2).says(
        r"lab\.yaml:\d+:\d+: .*'25Gb/s'.*25Gbit/s or 25GB/s"
    )


@pytest.mark.slow
def test_share_and_export(reader: Path) -> None:
    told("parloom plan zoo:mlp --cluster 4xcpu --out runs/mlp")
    told("parloom report runs/mlp --out report.html").says("needs no network")
    assert Path("report.html").stat().st_size < 2 * 2**20
    for framework in ("torchtitan", "accelerate", "deepspeed", "megatron"):
        told(f"parloom export runs/mlp --to {framework}").says("^not expressible there:\n  ")
        told(f"parloom export runs/mlp --to {framework} --strict", code=3).says("not expressible")
