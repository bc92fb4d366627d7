"""Out of memory: before a run, in a run; and a model that cannot be had."""

import re
import shutil
from pathlib import Path

import pytest

import parloom
from parloom.errors import LaunchError
from parloom.execute import train
from parloom.runtime import Trainer
from tests.dist.test_out_of_memory import ERROR, seen
from tests.docs.commands import run
from tests.docs.test_terminal import FOLDER
from tests.scenes.told import told


@pytest.mark.slow
def test_does_not_fit(reader: Path) -> None:
    """What fills memory, the bound over all plans, and what would fit, each with its price."""
    told("parloom plan zoo:mlp --cluster 1x2xA100-40GB --memory 6MB", code=3).says(
        r"no plan fits in .* per device; each one that is searched holds .* or more",
        r"^  +(optimizer|weights|activations) +\S+ \S+ \(\d+%\)",
        r"what would fit, the cheapest first",
        r"^ +--\S+ .*: \S+ \S+ a step",
    )


def test_in_a_run(reader: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank, predicted and real, fragmentation, the snapshot, the next command. No GPU is here:
    an allocator that says so stands in for it.
    """

    def fails(*_: object, **__: object) -> None:
        raise ERROR

    told("parloom plan zoo:mlp --cluster 2xcpu --method fsdp --devices 2 --out runs/mlp")
    shutil.copy(FOLDER / "train.py", reader)
    plan = parloom.load(Path("runs/mlp"))
    monkeypatch.setattr(Trainer, "step", fails)
    monkeypatch.setattr(train, "seen_on", lambda *_: seen(plan))
    said, code = run(["run", "runs/mlp", "--", "train.py"])
    assert code == LaunchError.exit_code
    for words in (
        "rank 0 ran out of GPU memory in step 1",
        r"\+25% in the run",
        "parloom plan .*--memory",
    ):
        assert re.search(words, said), f"{words} not in\n{said}"


def test_offline(reader: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told("parloom plan acme/no-such-model --cluster 2xcpu", code=2).says(
        r"no network, and the config for acme/no-such-model is not in .*: run once online, or name "
        "a local folder"
    )
