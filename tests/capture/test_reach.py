"""The key of a model is of everything that its forward can reach, and of nothing else."""

import functools
import itertools
import os
import subprocess
import sys
import types
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from parloom.capture.state.reach import key, walk
from tests.capture import models

SCALE = 2.0


@dataclass(frozen=True, slots=True)
class Sizes:
    heads: int
    inner: tuple[int, ...] = (1, 2)


class Slotted:
    __slots__ = ("count", "inner")

    def __init__(self, count: int) -> None:
        self.count, self.inner = count, [types.SimpleNamespace(deep=count)]


class Callable_:
    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, x: Tensor) -> Tensor:
        return x * self.factor


def closure(factor: Any) -> Callable[[Tensor], Tensor]:
    def scale(x: Tensor) -> Tensor:
        result: Tensor = x * factor
        return result

    return scale


def with_default(factor: float) -> Callable[[Tensor], Tensor]:
    def scale(x: Tensor, by: float = factor) -> Tensor:
        return x * by

    return scale


def with_attribute(factor: float) -> Any:
    def scale(x: Tensor) -> Tensor:
        result: Tensor = x * scale.factor  # type: ignore[attr-defined]
        return result

    scale.factor = factor  # type: ignore[attr-defined]
    return scale


def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output * SCALE


def advanced(steps: int) -> Any:
    found = iter([1, 2, 3])
    for _ in range(steps):
        next(found)
    return found


class Net(nn.Module):
    def __init__(self, part: Any = None) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.part = part

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = F.gelu(self.a(x)) * SCALE
        return h.sum()


class Rectified(Net):
    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = F.relu(self.a(x)) * SCALE
        return h.sum()


def chain(length: int, last: Any) -> Any:
    for _ in range(length):
        last = types.SimpleNamespace(next=[last])
    return last


MAKERS: list[Callable[[Any], Any]] = [
    lambda v: v,
    lambda v: [v],
    lambda v: {"a": (v,)},
    lambda v: {v: 1},
    lambda v: {(v, 2): 1},
    lambda v: {v},
    lambda v: frozenset({v, "x"}),
    lambda v: deque([v], 4),
    lambda v: OrderedDict(a=v),
    lambda v: chain(3, v),
    lambda v: chain(3000, v),
    Sizes,
    Slotted,
    Callable_,
    closure,
    lambda v: closure(chain(3, v)),
    with_default,
    with_attribute,
    lambda v: functools.partial(F.layer_norm, eps=v),
    lambda v: functools.partial(hook, nn.Identity(), v),
    lambda v: Callable_(v).__call__,
    lambda v: numpy.full(3, v),
    numpy.float32,
    lambda v: torch.full((3,), float(v)),
    lambda v: nn.Dropout(v / 10),
    lambda v: types.MappingProxyType({"a": v}),
    advanced,
    itertools.repeat,
    lambda v: enumerate([v]),
    lambda v: (i for i in [v]),
    lambda v: property(closure(v)),
    lambda v: Path(str(v)),
    lambda v: nn.ModuleList([nn.LayerNorm(4, eps=v)]),
]


@pytest.mark.parametrize("make", MAKERS)
def test_every_value_that_can_be_reached_counts(make: Callable[[Any], Any]) -> None:
    one, same, other = Net(make(1)), Net(make(1)), Net(make(2))
    assert key(one) == key(same) == key(one)
    assert key(one) != key(other)
    assert key(one, make(1)) != key(one, make(2))
    one.register_forward_hook(closure(make(1)))  # type: ignore[arg-type]
    same.register_forward_hook(closure(make(2)))  # type: ignore[arg-type]
    assert key(one) != key(same)


def test_code_counts_and_values_of_weights_do_not() -> None:
    one, other = Net(), Net()
    assert key(one) == key(other)
    assert key(one) != key(Rectified())
    other.a.weight.requires_grad_(False)
    assert key(one) != key(other)
    other = Net()
    other.a = nn.Linear(4, 4, bias=False)
    assert key(one) != key(other)
    other.a = nn.Linear(4, 4, dtype=torch.float64)
    assert key(one) != key(other)


def test_globals_that_code_names_count(monkeypatch: pytest.MonkeyPatch) -> None:
    before = key(Net())
    monkeypatch.setitem(globals(), "UNUSED", 1)
    assert key(Net()) == before
    monkeypatch.setitem(globals(), "SCALE", 3.0)
    assert key(Net()) != before


def test_what_is_put_into_a_library_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _batch = models.llama()
    found = {key(model)}
    name = type(model.get_submodule("model.layers.0.mlp")).__module__
    monkeypatch.setattr(sys.modules[name], "apply_rotary_pos_emb", lambda q, k, *_: (q, k))
    found.add(key(model))
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: x @ self.weight.T)
    found.add(key(model))
    monkeypatch.setattr(F, "silu", closure(3))
    found.add(key(model))
    settings: Any = model.config
    settings.rms_norm_eps = 1e-3
    found.add(key(model))
    assert len(found) == 5


def test_a_model_that_is_not_in_training_is_put_into_it() -> None:
    frozen = Net(nn.Dropout())
    before = key(frozen)
    assert key(frozen.eval()) == before
    frozen.train().part.eval()
    assert key(frozen) != before


def test_hidden_states_of_generators_do_not_count() -> None:
    assert key(Net(Random(1))) == key(Net(Random(2)))


FILE = """
from torch import nn
from torch.nn import functional as F
NAMES = {"e", "f", "g", "h"}
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.names = {"p", "q", "r", (1, "s")}
        for name in NAMES:
            setattr(self, name, object())
        self.kinds = {nn.Linear, nn.Conv2d, nn.LayerNorm}
    def forward(self, x):
        return F.gelu(self.a(x)).sum() if x.dim() in {1, 2} else None
"""
SCRIPT = """
import sys
sys.path.insert(0, {folder!r})
if {main}:
    exec(open({folder!r} + "/network.py").read())
else:
    from network import Net
from parloom.capture.state.reach import key
print(key(Net()))
"""


@pytest.mark.slow
def test_equal_in_every_process_folder_and_file(tmp_path: Path) -> None:
    found = set()
    for seed, lines, main in ((0, 0, False), (1, 3, False), (2, 0, True)):
        folder = tmp_path / str(seed)
        folder.mkdir()
        (folder / "network.py").write_text("# more\n" * lines + FILE)
        script = SCRIPT.format(folder=str(folder), main=main)
        environment = {**os.environ, "PYTHONHASHSEED": str(seed)}
        command = [sys.executable, "-c", script]
        run = subprocess.run(
            command, capture_output=True, text=True, check=True, cwd=folder, env=environment
        )
        found.add(run.stdout)
    assert len(found) == 1


def test_paths_say_where() -> None:
    model = Net(types.SimpleNamespace(steps=[None, Slotted(3)]))
    found = {held.label(name) for held in walk(model) for name, _ in held.aspect.parts}
    assert {"self.part.steps[1].count", f"{__name__}.SCALE", "self.a.in_features"} <= found


def test_what_a_rewriter_of_assertions_names_is_not_walked() -> None:
    """pytest puts itself into the globals of a file with `assert`, under names of its own."""

    class Checked(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            assert x.shape[0] > 1, x.shape
            return x * SCALE

    rewritten = [name for name in globals() if not name.isidentifier()]
    assert rewritten, "this file is one"
    owners = {
        held.aspect.owner.get("__name__")
        for held in walk(Checked())
        if held.aspect.style == "global"
    }
    assert __name__ in owners
    assert not {name for name in owners if str(name).startswith("_pytest")}
