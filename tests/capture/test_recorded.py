# mypy: disable-error-code="no-untyped-call,no-any-return,union-attr,func-returns-value"
"""Layers in which hooks of transformers record outputs are traced once, where all do the same."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from transformers import MixtralConfig, MixtralForCausalLM
from transformers.utils import output_capturing
from transformers.utils.output_capturing import install_output_capuring_hook

from parloom.capture import recorded
from parloom.capture.repeats import First, Repeats
from tests.capture import test_repeats
from tests.capture.deceivers import WIDTH, Layer, Stack, rows

STATES = "hidden_states"


class Router(nn.Module):
    """Two outputs of different values."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.gate(x)
        return scores, scores.softmax(-1)


class Routed(Layer):
    """A layer with a router in it."""

    def __init__(self, index: int = 0) -> None:
        super().__init__(index)
        self.router = Router()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.router(x)[1]


class Counting(Routed):
    """A layer that scales by what was recorded before it."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * len(output_capturing._active_collector.get()["scores"])


COLLECTOR = output_capturing._active_collector


class Named(Routed):
    """A layer that scales by what was recorded before it, by a name of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * len(COLLECTOR.get()["scores"])


class Shortening(Routed):
    """A layer that takes away what was recorded before it."""

    def forward(self, x: Tensor) -> Tensor:
        output_capturing._active_collector.get()["scores"].clear()
        return super().forward(x)


class Recording(Stack):
    """Has a loss of what is recorded; each entry has another weight."""

    keys: tuple[str, ...] = ("scores",)

    def run(self, x: Tensor) -> Tensor:
        found: dict[str, list[Tensor]] = {key: [] for key in self.keys}
        token = output_capturing._active_collector.set(found)
        try:
            x = super().run(x)
        finally:
            output_capturing._active_collector.reset(token)
        for entries in found.values():
            for weight, entry in enumerate(entries):
                x = x + entry * weight
        return x


def recording(
    kind: Callable[[int], nn.Module] = Routed, keys: tuple[str, ...] = ("scores",)
) -> Recording:
    model = Recording(rows(kind))
    model.keys = keys
    for layer in model.layers:
        install_output_capuring_hook(layer.router, "scores", 0)
        install_output_capuring_hook(layer, STATES, 0)
    return model


def another_output() -> Recording:
    model = recording()
    model.layers[4].router._forward_hooks.clear()
    install_output_capuring_hook(model.layers[4].router, "scores", 1)
    return model


def recorded_twice() -> Recording:
    model = recording()
    install_output_capuring_hook(model.layers[4].router, "scores", 0)
    return model


def a_hook_beside() -> Recording:
    model = recording()
    for index, layer in enumerate(model.layers):
        layer.router.register_forward_hook(lambda m, args, out, by=index: (out[0], out[1] * by))
    return model


HONEST: dict[str, Callable[[], Stack]] = {
    "an inner output": recording,
    "outputs of layers, and the input of the first": lambda: recording(keys=(STATES, "scores")),
    "nothing is recorded": lambda: recording(keys=()),
    "another output of one": another_output,
    "one twice": recorded_twice,
}
DECEIVING: dict[str, Callable[[], Stack]] = {
    "a layer that counts what is recorded": lambda: recording(Counting),
    "a layer that counts by another name": lambda: recording(Named),
    "a layer that takes away": lambda: recording(Shortening),
    "a hook beside": a_hook_beside,
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", HONEST)
def test_what_is_recorded_is_a_result(
    monkeypatch: pytest.MonkeyPatch, name: str, training: bool
) -> None:
    short, whole, repeated = test_repeats.captured(monkeypatch, HONEST[name], training)
    assert short == whole
    assert "cannot capture" not in whole
    assert repeated > 0


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", DECEIVING)
def test_what_only_looks_alike_is_traced(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    short, whole, _ = test_repeats.captured(monkeypatch, DECEIVING[name], training=True)
    assert short == whole


@pytest.mark.parametrize("name", ["another output of one", "one twice"])
def test_a_guard_that_sees_no_hook_is_deceived(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The negative control: calls of one class that are all taken to be alike."""
    monkeypatch.setattr(First, "is_like", lambda self, found, nested: True)
    short, whole, repeated = test_repeats.captured(monkeypatch, HONEST[name], training=True)
    assert repeated > 0
    assert short != whole


def test_lists_that_are_left_as_they_are_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: what a call would have recorded is left out."""
    monkeypatch.setattr(recorded, "add", lambda more: None)
    short, whole, repeated = test_repeats.captured(monkeypatch, recording, training=True)
    assert repeated > 0
    assert short != whole


@pytest.mark.slow
def test_router_logits_of_a_mixture_of_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model installs its hooks in the first trace, and repeats layers in every one."""
    config = MixtralConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=5, num_attention_heads=2,
        num_key_value_heads=2, vocab_size=32, num_local_experts=4, output_router_logits=True,
        use_cache=False,
    )  # fmt: skip
    ids = torch.arange(8).reshape(2, 4)
    monkeypatch.setattr(test_repeats, "batch", lambda: {"input_ids": ids, "labels": ids.clone()})
    aside: list[bool] = []
    original = Repeats.fewer
    monkeypatch.setattr(Repeats, "fewer", lambda self: aside.append(True) or original(self))
    short, whole, repeated = test_repeats.captured(
        monkeypatch, lambda: MixtralForCausalLM(config), training=True
    )
    assert short == whole
    assert repeated > 0
    assert not aside
