"""What repeats in a model is traced once, and the graph is that of the whole trace."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from parloom.capture import build, capture
from parloom.capture.program import trace
from parloom.capture.repeats import First, Repeats
from parloom.capture.state.alike import Found
from parloom.errors import CaptureError
from parloom.ir.text import print_graph
from tests.capture.deceivers import DECEIVING, HONEST, Stack, batch

Make = Callable[[], Stack]


class Whole(Repeats):
    """The whole model is traced."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.kinds.clear()


def captured(monkeypatch: pytest.MonkeyPatch, make: Make, training: bool) -> tuple[str, str, int]:
    """The text of the short trace and that of the whole one, and the calls that were repeated.

    A model that is refused has the text of the error.
    """
    made: list[Repeats] = []
    whole: list[bool] = []

    class Noted(Repeats):
        def __init__(self, model: nn.Module) -> None:
            super().__init__(model)
            made.append(self)

    def traced(*given: Any) -> Any:
        whole.append(given[-1] is None)
        return trace(*given)

    monkeypatch.setattr(build, "trace", traced)
    texts = []
    for kind in (Noted, Whole):
        monkeypatch.setattr(build, "Repeats", kind)
        torch.manual_seed(0)
        try:
            texts.append(print_graph(capture(make(), batch(), training=training)))
        except CaptureError as error:
            texts.append(str(error))
    return texts[0], texts[1], 0 if whole[:-1] == [False, True] else made[0].repeated


@pytest.mark.parametrize("name", HONEST)
def test_what_repeats_is_traced_once(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    short, whole, repeated = captured(monkeypatch, HONEST[name], training=True)
    assert short == whole
    assert repeated > 0


@pytest.mark.parametrize("name", ["plain", "periodic", "collected states"])
def test_evaluation_is_traced_once_too(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    short, whole, repeated = captured(monkeypatch, HONEST[name], training=False)
    assert short == whole
    assert repeated > 0


@pytest.mark.parametrize("name", DECEIVING)
def test_what_only_looks_alike_is_traced(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    short, whole, _ = captured(monkeypatch, DECEIVING[name], training=True)
    assert short == whole


@pytest.mark.parametrize(
    "name", ["index in arithmetic", "rates", "global that is set between", "counter of a class"]
)
def test_a_guard_that_sees_nothing_is_deceived(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The negative control: calls of one class that are all taken to be alike."""
    monkeypatch.setattr(First, "is_like", lambda self, found, nested: True)
    monkeypatch.setattr(Found, "is_unchanged", lambda self, before: True)
    short, whole, repeated = captured(monkeypatch, DECEIVING[name], training=True)
    assert repeated > 0
    assert short != whole
