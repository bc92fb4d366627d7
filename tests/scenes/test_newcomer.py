"""A newcomer on a laptop without a GPU."""

import json
import socket
from pathlib import Path

import pytest
import torch.distributed as dist

import parloom
from tests.scenes.told import MODEL, told

PARTS = ("weights", "gradients", "optimizer", "activations", "buffers")


def test_first_minute(reader: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GPT-2 for two RTX 4090s: no network, and all that one wants to know on one screen."""

    def refused(*_: object) -> None:
        raise OSError("there is no network")

    monkeypatch.setattr(socket.socket, "connect", refused)
    screen = told("parloom plan gpt2 --cluster 1x2xRTX4090")
    screen.says(
        r"^plan +axis \w+ over 2 devices",
        r"^step time .* \(from data sheets, not calibrated.*likely .* \.\. ",
        *(rf"^  {part} +.*%" for part in PARTS),
        r"^assumed\n",
        r"^next: parloom verify runs/.*/plan.json",
    )
    rows = screen.out.split("alternatives ")[1].split("\n\n")[0].splitlines()[1:]
    assert len(rows) >= 3


def test_no_cluster_given(reader: Path) -> None:
    told("parloom plan zoo:mlp --method data_parallel").says(
        r"^No accelerator found here; planning for this CPU \(\d+ cores?\): try --cluster 8xH100$"
    )


def test_own_model(reader: Path) -> None:
    """The same bytes from the command and from Python, and HTML in a notebook."""
    (reader / "mymodel.py").write_text(MODEL.format(width=64))
    told("parloom plan mymodel.py:build --cluster 2xcpu --out runs/file").says("^plan ")
    plan = parloom.plan("mymodel.py:build", cluster="2xcpu")
    parloom.save(plan, Path("runs/python"))
    files = [Path("runs", name, "plan.json").read_bytes() for name in ("file", "python")]
    assert files[0] == files[1]
    assert "<table" in str(plan._repr_html_())


def test_proof_without_a_gpu(reader: Path) -> None:
    """A plan for GPUs is proved here, on a smaller copy; a failed proof names the tensor."""
    told("parloom plan zoo:mlp --cluster 1x2xH100 --method megatron --devices 2 --out runs/gpus")
    told("parloom verify runs/gpus --shrink").says(
        r"^PASS: parallel equals single device, \d+ tensors on 2 ranks over 3 steps \(shrunk: .*\)"
        r": largest relative difference \S+ \(.*\), limit "
    )


def test_a_failed_proof(reader: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks whose gradients are never added up: the first tensor that differs is named."""
    monkeypatch.setattr(dist, "all_reduce", lambda *_, **__: Done())
    told("parloom plan zoo:mlp --cluster 2xcpu --method data_parallel --devices 2 --out runs/a")
    told("parloom verify runs/a", code=7).says(
        r"^FAIL: first tensor that differs: loss of step 1 .*; largest relative "
        r"difference 1\.0e\+00 \(gradient of "
    )


class Done:
    """A collective that did nothing, and has ended."""

    def wait(self, *_: object) -> None:
        pass


def test_typing_errors(reader: Path) -> None:
    told("parloom plan gpt2 --clustr 2x8xH100", code=2).says(r"No such option: --clustr.*--cluster")
    told("parloom plan gpt2 --cluster 2x8xH1000", code=2).says(
        r"unknown device 'H1000'; did you mean 'H100'", r"parloom cluster show --known"
    )
    told("parloom cluster show 8x2xH100").says(r"8 nodes x 2 devices = 16 x H100")


def test_unsupported_model(reader: Path) -> None:
    """A branch on data: where it is, and what to do."""
    (reader / "branching.py").write_text(
        MODEL.format(width=64).replace(
            "return nn.functional",
            "if x.sum() > 0:\n            x = -x\n        return nn.functional",
        )
    )
    screen = told("parloom plan branching.py:build --cluster 2xcpu", code=4)
    screen.says(r"branching\.py:\d+", r"if x\.sum\(\) > 0", "opaque|constant|torch.where")
    assert len(screen.err.splitlines()) < 20


def test_documents_are_json(reader: Path) -> None:
    screen = told("parloom plan zoo:mlp --cluster 2xcpu --method data_parallel --json")
    assert json.loads(screen.out)["step_s"] > 0
