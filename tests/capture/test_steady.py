"""Modules whose next call does something else are refused; those that only look so are not."""

import random
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from parloom.capture import capture
from parloom.errors import CaptureError
from tests.capture.models import assert_equal


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.calls = 0
        self.last: Any = None

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.a(x)
        return h


class Net(nn.Module):
    def __init__(self, inner: Inner) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.inner(x).square().sum()
        return loss


class Alternating(Inner):
    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        h: Tensor = self.a(x)
        return h if self.calls % 2 else h.relu()


class Recurrent(Inner):
    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.a(x)
        if self.last is not None:
            h = h + self.last
        self.last = h.detach()
        return h


class Dropped(Inner):
    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.a(x)
        return h if random.random() < 0.5 else x + h


class Masked(Inner):
    def forward(self, x: Tensor) -> Tensor:
        mask = torch.from_numpy(numpy.random.rand(4) < 0.5)
        h: Tensor = self.a(x) * mask
        return h


class Seeded(Inner):
    """Draws, but the same every time, as sparse attention does."""

    def forward(self, x: Tensor) -> Tensor:
        order = numpy.random.RandomState(3).permutation(4)
        numpy.random.seed(7)
        order = order[numpy.random.permutation(4)]
        h: Tensor = self.a(x)[:, torch.from_numpy(order)]
        return h


class Listing(Inner):
    """Keeps a list of its results."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.a(x)
        self.seen.append(h.detach())
        return h * len(self.seen)


class Table(Inner):
    """Keeps one in a dict that is in a dict, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: dict[str, dict[str, int]] = {"calls": {"all": 0}}

    def forward(self, x: Tensor) -> Tensor:
        self.notes["calls"]["all"] += 1
        h: Tensor = self.a(x)
        return h if self.notes["calls"]["all"] == 1 else h.relu()


class OfClass(Inner):
    number = 0

    def forward(self, x: Tensor) -> Tensor:
        OfClass.number += 1
        h: Tensor = self.a(x)
        return h if OfClass.number % 2 else h.relu()


class OfFile(Inner):
    def forward(self, x: Tensor) -> Tensor:
        COUNTS["calls"] += 1
        h: Tensor = self.a(x)
        return h * COUNTS["calls"]


class Late(Inner):
    """Makes its counter in the first call."""

    def forward(self, x: Tensor) -> Tensor:
        self.late = getattr(self, "late", 0) + 1
        h: Tensor = self.a(x)
        return h * self.late


class Collecting(Inner):
    """Hands on a list that begins anew in every call, as auxiliary losses are collected."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.losses.clear()
        h: Tensor = self.a(x)
        self.losses.append(h.square().mean())
        return h + self.losses[0]


COUNTS = {"calls": 0}


class Counting(Inner):
    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        h: Tensor = self.a(x)
        self.last = h
        return h


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Alternating, r"cannot capture Net\.inner: forward changes self\.calls and then .*buffer"),
        (Recurrent, r"cannot capture Net\.inner: forward changes self\.last and then"),
        (Listing, r"cannot capture Net\.inner: forward changes self\.seen and then"),
        (Table, r"cannot capture Net\.inner: forward changes self\.notes and then"),
        (OfClass, r"cannot capture Net: forward changes OfClass\.number and then"),
        (OfFile, r"cannot capture Net: forward changes tests\.capture\.test_steady\.COUNTS and"),
        (Late, r"cannot capture Net\.inner: forward changes self\.late and then"),
        (Dropped, r"cannot capture Net: forward draws from random, .*layer drop"),
        (Masked, r"forward draws from numpy\.random"),
    ],
)
def test_another_next_call_is_refused(kind: type[Inner], reason: str) -> None:
    model = Net(kind())
    with pytest.raises(CaptureError, match=reason):
        capture(model, {"x": torch.randn(3, 4)})
    assert (model.inner.calls, model.inner.last) == (0, None)
    left = {n: vars(model.inner).get(n) for n in ("seen", "notes", "late")}
    assert left["seen"] in (None, [])
    assert left["notes"] in (None, {"calls": {"all": 0}})
    assert left["late"] is None
    assert (OfClass.number, COUNTS["calls"]) == (0, 0)


def test_lists_that_begin_anew_are_captured_and_left_as_they_were() -> None:
    torch.manual_seed(0)
    inner = Collecting()
    model, batch = Net(inner), {"x": torch.randn(3, 4)}
    graph = capture(model, batch)
    assert inner.losses == []
    assert_equal(graph, model, batch)


def test_a_count_that_nobody_reads_does_not_matter() -> None:
    torch.manual_seed(0)
    model, batch = Net(Counting()), {"x": torch.randn(3, 4)}
    graph = capture(model, batch)
    assert (model.inner.calls, model.inner.last) == (0, None)
    model.inner.last = torch.zeros(1)
    assert_equal(graph, model, batch)


def test_draws_that_are_seeded_are_constants() -> None:
    torch.manual_seed(0)
    model, batch = Net(Seeded()), {"x": torch.randn(3, 4)}
    assert_equal(capture(model, batch), model, batch)


def test_a_trace_that_fails_is_quiet(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CaptureError, match=r"Net\.inner\.a .*batch \(x: float32\[3, 5\]\)"):
        capture(Net(Inner()), {"x": torch.randn(3, 5)})
    assert capfd.readouterr() == ("", "")
