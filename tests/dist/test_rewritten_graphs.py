"""Graphs around what rewrites change, found by an attacker beside the proofs: keys of random
operators, signs of zero, readers of padded values, and long windows.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from parloom import api
from parloom.errors import InputError
from parloom.ir.plan import Plan
from parloom.rewrite.known import is_rule
from parloom.rewrite.rewrites import derived, takes_of

torch.set_num_threads(1)


class Dropping(nn.Module):
    """A part that is cut off again, and a dropout in it."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.head = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        made = self.q(x)
        both = torch.cat((made, F.dropout(torch.relu(made), 0.5)), -1)
        first, _ = torch.split(both, [16, 16], -1)
        loss: Tensor = self.head(F.dropout(first * 2.0, 0.5)).square().mean()
        return loss


class Signs(nn.Module):
    """Functions of zeros of both signs, between products that share weights."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.head = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        one = self.k(torch.copysign(self.q(x), 0.0))
        other = self.k(torch.copysign(self.q(z), -0.0))
        loss: Tensor = self.head(one * torch.sigmoid(other)).square().mean()
        return loss


class Classes(nn.Module):
    """Classes that no two devices share evenly, with weights of their own or of several each."""

    weights: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layer = nn.Embedding(257, 16), nn.Linear(16, 16)
        self.classes = nn.Linear(16, 257, bias=False)
        self.classes.weight = self.embedding.weight
        self.register_buffer("weights", torch.rand(257) + 0.5)

    def forward(self, rows: Tensor, targets: Tensor) -> Tensor:
        logits = self.classes(torch.relu(self.layer(self.embedding(rows))))
        weights = None if targets.is_floating_point() else self.weights
        return F.cross_entropy(logits, targets, weight=weights)


class Spectrum(nn.Module):
    """Windows as long as those of spectrograms, merged, and scaled by channel."""

    def __init__(self) -> None:
        super().__init__()
        self.real, self.imaginary = (
            nn.Conv1d(1, 8, 1024, stride=256, bias=False) for _ in range(2)
        )
        self.scale, self.head = nn.Parameter(torch.ones(8, 1)), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        made = torch.log1p((self.real(x) * self.scale).square() + self.imaginary(x).square())
        loss: Tensor = self.head(made.mean(-1)).square().mean()
        return loss


def dropping() -> tuple[nn.Module, dict[str, Tensor]]:
    return Dropping(), {"x": torch.randn(8, 16)}


def signs() -> tuple[nn.Module, dict[str, Tensor]]:
    return Signs(), {name: torch.randn(8, 16) for name in "xz"}


def weighted() -> tuple[nn.Module, dict[str, Tensor]]:
    rows = torch.randint(0, 257, (2, 8))
    return Classes(), {"rows": rows[0], "targets": rows[1]}


def shared() -> tuple[nn.Module, dict[str, Tensor]]:
    targets = torch.softmax(torch.randn(8, 257), -1)
    return Classes(), {"rows": torch.randint(0, 257, (8,)), "targets": targets}


def spectrum() -> tuple[nn.Module, dict[str, Tensor]]:
    return Spectrum(), {"x": torch.randn(8, 1, 4096)}


def planned(name: str, **asked: Any) -> Plan:
    captured = api.capture(f"{__file__}:{name}", optimizer="sgd")
    return api.search(captured, cluster="2xcpu", **asked)


@pytest.mark.parametrize("method", ["auto", "taso"])
def test_random_operators_that_nothing_reads_keep_the_keys_of_others(method: str) -> None:
    plan = planned("dropping", method=method)
    rules = [rule for take in takes_of(plan.decisions.rewrites) for rule in take.rules]
    assert any(rule.startswith("cat_split_with_sizes") for rule in rules)
    assert api.verify(plan).passed


def test_zeros_of_both_signs_are_different_arguments() -> None:
    plan = planned("signs")
    assert takes_of(plan.decisions.rewrites)
    assert not any("copysign(" in str(take) for take in takes_of(plan.decisions.rewrites))
    assert api.verify(plan).passed


@pytest.mark.parametrize("name", ["weighted", "shared"])
def test_losses_that_read_a_tensor_of_the_classes_are_not_padded(name: str) -> None:
    plan = planned(name, method="megatron", devices=2)
    assert not plan.decisions.rewrites
    assert api.verify(plan).passed


def test_long_windows_are_merged() -> None:
    plan = planned("spectrum", pin=["rewrite=merge_conv1d"])
    assert [take.rules for take in takes_of(plan.decisions.rewrites)] == [("merge_conv1d",)]
    assert api.verify(plan).passed


@pytest.mark.parametrize("digits", [400, 5_000])
def test_cases_of_endless_numbers_are_no_rules(digits: int) -> None:
    assert not is_rule(f"add_mul_ebca93_{'9' * digits}")


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        ('pad(x, (999999999, 1), "replicate")', "does not follow"),
        ("copysign(x, -0.0)", "is no call"),
    ],
)
def test_calls_that_are_too_wide_or_of_minus_zero_are_refused(call: str, reason: str) -> None:
    graph = api.capture(f"{__file__}:signs", optimizer="sgd").graph
    value = next(value.name for item in graph.main.body for value in item.results)
    text = f"take {value} in {graph.main.name} by merge_linear: {call}"
    with pytest.raises(InputError, match=reason):
        derived(graph, [text])
