"""What pages that run share: a folder each, the cores of one laptop, and captured models."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from parloom import api
from parloom.execute import machine

CORES = 8


@pytest.fixture(scope="session")
def captured() -> Callable[..., Any]:
    """`api.capture` that captures each model of the zoo once."""
    known: dict[object, Any] = {}
    real = api.capture

    def capture(model: str, **asked: Any) -> Any:
        if not model.startswith("zoo:"):
            return real(model, **asked)
        key = model, *sorted((k, v) for k, v in asked.items() if k != "progress" and v is not None)
        if key not in known:
            known[key] = real(model, **asked)
        return known[key]

    return capture


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, captured: Callable[..., Any]) -> Path:
    """The folder of somebody who follows a page on a laptop."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)  # as a script finds what is beside it
    monkeypatch.setattr(machine, "num_cores", lambda: CORES)
    monkeypatch.setattr(api, "capture", captured)
    return tmp_path
