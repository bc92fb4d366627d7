"""What repeats in a model is traced once, and the graph is that of the whole trace."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from parloom.capture import build, capture
from parloom.capture.aside import Aside
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
        super().__init__(model, run=None)
        self.kinds.clear()


def captured(monkeypatch: pytest.MonkeyPatch, make: Make, training: bool) -> tuple[str, str, int]:
    """The text of the short trace and that of the whole one, and the calls that were repeated.

    A model that is refused has the text of the error.
    """
    made: list[Repeats] = []
    whole: list[bool] = []

    class Noted(Repeats):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            made.append(self)

    def traced(*given: Any) -> Any:
        whole.append(given[-1] is None)
        return trace(*given)

    monkeypatch.setattr(build, "trace", traced)
    texts: list[str] = []
    for kind in (Whole, Noted):  # a short trace that was left half done would change the whole one
        monkeypatch.setattr(build, "Repeats", kind)
        torch.manual_seed(0)
        try:
            texts.append(print_graph(capture(make(), batch(), training=training)))
        except CaptureError as error:
            texts.append(str(error))
    return texts[1], texts[0], 0 if whole[-1] else made[-1].repeated


@pytest.mark.sample(3)
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


@pytest.mark.sample(3)
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


@pytest.mark.parametrize("name", ["plain", "tied weights", "default that is filled in"])
def test_parameters_of_repeated_layers_are_no_inputs_of_the_trace(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    model = HONEST[name]()
    before = [(name, id(p)) for name, p in model.named_parameters(remove_duplicate=False)]
    programs = []

    def traced(*given: Any) -> Any:
        programs.append(trace(*given).program)
        raise KeyboardInterrupt

    monkeypatch.setattr(build, "trace", traced)
    with pytest.raises(KeyboardInterrupt):
        capture(model, batch())
    parameters = set(programs[0].graph_signature.parameters)
    assert "model.layers.1.up.bias" in parameters
    assert "model.layers.3.up.bias" not in parameters
    assert [(n, id(p)) for n, p in model.named_parameters(remove_duplicate=False)] == before


def test_a_short_trace_that_is_given_up_leaves_nothing_behind() -> None:
    """It runs to its end: the model would otherwise leave another function in torch."""
    own = functional.gelu
    capture(DECEIVING["function of torch replaced"](), batch())
    assert functional.gelu is own


def test_another_parameter_in_the_place_of_one_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: every layer that is not traced reads one layer's parameters."""
    real = Aside.__init__

    def confused(self: Aside, *given: Any) -> None:
        real(self, *given)
        self.parameters = {
            key: (name.replace(".5.", ".3."), p) for key, (name, p) in self.parameters.items()
        }

    monkeypatch.setattr(Aside, "__init__", confused)
    short, whole, repeated = captured(monkeypatch, HONEST["plain"], training=True)
    assert repeated > 0
    assert short != whole
