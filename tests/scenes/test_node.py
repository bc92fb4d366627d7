"""One node: what is there, how fast it is, runs, reasons, wishes, and models that changed."""

import json
import shutil
from functools import partial
from pathlib import Path

import pytest

from parloom.execute import calibrate as measuring
from parloom.execute.calibrate import calibrate
from tests.docs.commands import run
from tests.docs.test_terminal import FOLDER
from tests.scenes.told import MODEL, told
from tests.unit.test_detect import H100, Use, use

__all__ = ["use"]


def test_detect(reader: Path, use: Use) -> None:
    use(H100)
    told("parloom cluster show").says(
        r"8 x H100", "NVLink", "PCIe", "driver", r"GPU 3 has 21 GB in use by pid 4411"
    )
    assert len(json.loads(told("parloom cluster show --json").out)["gpus"]) == 8


def test_calibrate(reader: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was measured says so in later predictions, of another machine with a wider band."""
    monkeypatch.setattr(measuring, "calibrate", partial(calibrate, least_s=1e-3))
    told("parloom calibrate --out here.json").says("^next: parloom plan .* --calibration here.json")
    asked = "parloom plan zoo:mlp --cluster 2xcpu --method data_parallel --calibration"
    told(f"{asked} here.json").says(r"^step time .*from measured rates; likely")
    document = json.loads(Path("here.json").read_text())
    document["fingerprint"]["processor"] = "another"
    Path("there.json").write_text(json.dumps(document))
    told(f"{asked} there.json").says(
        "that calibration is of another machine: processor: another, not"
    )


def test_run(reader: Path) -> None:
    told("parloom plan zoo:mlp --cluster 2xcpu --method fsdp --devices 2 --out runs/mlp")
    shutil.copy(FOLDER / "train.py", reader)
    out, code = run(["run", "runs/mlp", "--", "train.py"])
    assert code == 0
    assert "step 1 loss " in out
    assert " ms | " in out


@pytest.mark.slow
def test_explain(reader: Path) -> None:
    told("parloom plan zoo:mlp --cluster 4xcpu --out runs/mlp")
    told("parloom explain runs/mlp layers.1:linear#0").says(
        "^which device makes which part", "^what it costs", "^the next best of "
    )
    told("parloom explain runs/mlp --versus fsdp").says(
        r"^fsdp .* is .* slower than the plan, most of all for waiting", "^step time by cause"
    )
    told("parloom plan zoo:mlp --cluster 4xcpu --method megatron --out runs/mine")
    told("parloom explain runs/mlp --versus runs/mine/plan.json").says("^step time by cause")


@pytest.mark.slow
def test_constrain(reader: Path) -> None:
    asked = "parloom plan zoo:mlp --cluster 4xcpu --pin head=replicated --pin stages=1"
    told(f"{asked} --memory 12MB").says(
        "^asked for\n", r"--pin head=replicated costs", r"--memory 12MB costs"
    )
    told("parloom plan zoo:mlp --cluster 2xcpu --pin head=n:x --forbid head=n:x", code=3).says(
        r"holds these 2 together; give up one:\n +--pin head=n:x\n +--forbid head=n:x"
    )


def test_edited_model(reader: Path) -> None:
    file = reader / "mymodel.py"
    file.write_text(MODEL.format(width=64))
    told("parloom plan mymodel.py:build --cluster 2xcpu --out runs/own")
    file.write_text(MODEL.format(width=96))
    told("parloom verify runs/own", code=5).says(
        r"made for another model: 3 of 4 parameters differ: up\.weight \(\(96, 16\), planned "
        r"\(64, 16\)\)",
        r"plan again: parloom plan mymodel\.py:build --cluster 2xcpu",
    )
