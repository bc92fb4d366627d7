"""The diagnosis: what it says, and when it refuses."""

from typing import Any

import pytest

from parloom.errors import LaunchError
from parloom.execute import doctor


def found(**changes: Any) -> dict[str, Any]:
    packages = {"parloom": "0.1.0", "torch": "2.13.0+cpu"} | changes.pop("packages", {})
    return {
        "python": "3.11.7",
        "executable": "python",
        "platform": "Linux",
        "packages": packages,
        "cpus": 4,
        "usable_cpus": 2,
        "memory_bytes": 2**34,
        "available_memory_bytes": 2**33,
        "backends": ["gloo"],
        "cuda": None,
        "gpus": [],
        "environment": {"WORLD_SIZE": "4"},
    } | changes


def test_lines_are_ready_to_paste() -> None:
    lines = doctor.lines(found(gpus=["H100, 80 GiB"]))
    assert "torch: 2.13.0+cpu" in lines
    assert "cpus: 2 usable of 4" in lines
    assert "memory: 8 GiB free of 16 GiB" in lines
    assert "backends: gloo" in lines
    assert "gpu 0: H100, 80 GiB" in lines
    assert "WORLD_SIZE=4" in lines


@pytest.mark.parametrize("version", ["2.12.1", "2.130.0", None])
def test_another_torch_is_refused(version: str | None) -> None:
    with pytest.raises(LaunchError, match=r"needs 2.13: pip install 'torch==2.13"):
        doctor.check(found(packages={"torch": version}))


def test_no_backend_is_refused() -> None:
    with pytest.raises(LaunchError, match="neither gloo nor nccl"):
        doctor.check(found(backends=[]))


def test_a_usable_machine_passes() -> None:
    doctor.check(found())
