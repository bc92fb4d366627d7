# mypy: disable-error-code="override,operator,union-attr,assignment,no-any-return,no-untyped-call"
"""Stacks of layers that look alike and are not, each in its own way; and some that are."""

import random
import sys
from collections.abc import Callable
from contextvars import ContextVar
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn

DEPTH, WIDTH, BATCH = 6, 8, 4
CURRENT = ContextVar("CURRENT", default=0)
TABLE: dict[int, float] = {}
LOSSES: list[Tensor] = []
SHARED: dict[str, float] = {"scale": 1.0}


class Layer(nn.Module):
    """A residual layer with an index that nothing reads."""

    calls = 0

    def __init__(self, index: int = 0) -> None:
        super().__init__()
        self.index = index
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.gelu(self.up(self.norm(x)))


class Stack(nn.Module):
    """Layers in a row, and a loss."""

    def __init__(self, layers: list[Any], *parts: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.extra = nn.ModuleList(parts)
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.loss(self.run(x))

    def loss(self, x: Tensor) -> Tensor:
        return self.head(x).square().mean()

    def run(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def rows(layer: Callable[[int], nn.Module] = Layer) -> list[nn.Module]:
    return [layer(index) for index in range(DEPTH)]


class At(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2 if self.index == 4 else super().forward(x)


class Scaled(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / (self.index + 1)


class Listed(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1, 1, 1, 2, 1, 1)[self.index]


class Rated(Layer):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.drop = nn.Dropout(index / 20)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.up(x))


class Periodic(Layer):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.kind = "local" if index % 3 else "global"

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.tanh() if self.kind == "local" else x)


class Closed(Layer):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.then = lambda x: x * (3.0 if index == 5 else 1.0)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.then(super().forward(x))
        return out


class Varied(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * CURRENT.get()


class Tabled(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * TABLE[id(self)]


class OfDict(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * SHARED["scale"]


class Framed(Layer):
    def forward(self, x: Tensor) -> Tensor:
        frame: Any = sys._getframe()
        while "place" not in frame.f_locals:
            frame = frame.f_back
        return super().forward(x) * (frame.f_locals["place"] + 1)


class Last(Layer):
    def __init__(self, index: int, owner: list["Stack"]) -> None:
        super().__init__(index)
        self.owner = owner

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x if self is self.owner[0].layers[-1] else x.tanh()


class Counted(Layer):
    def forward(self, x: Tensor) -> Tensor:
        Layer.calls += 1
        return super().forward(x) * (2 if Layer.calls == 5 else 1)


class Losing(Layer):
    def forward(self, x: Tensor) -> Tensor:
        LOSSES.append(x.square().mean())
        return super().forward(x)


class Stashing(Layer):
    def forward(self, x: Tensor) -> Tensor:
        torch.__dict__.setdefault("_stash_of_a_test", []).append(x.square().mean())
        return super().forward(x)


class Writing(Layer):
    def forward(self, x: Tensor, total: Tensor) -> Tensor:
        out = super().forward(x)
        total.add_(out.mean())
        return out


class Viewing(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).view(-1, WIDTH)[:BATCH]


@cache
def table_of(width: int) -> Tensor:
    return torch.arange(width).float()


class Cached(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + table_of(WIDTH)


class Drawing(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if random.random() < 0.5 else x


class Gated(Layer):
    def forward(self, x: Tensor, on: Tensor) -> Tensor:
        return super().forward(x) * (2 if getattr(x, "doubled", False) else 1)


class Constant(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * torch.tensor(0.5)


class Attending(Layer):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q = self.up(x).view(1, 1, BATCH, WIDTH)
        return x + F.scaled_dot_product_attention(q, q, q, mask).view(BATCH, WIDTH)


class Twice(Layer):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.act = nn.Sequential(nn.GELU(), nn.Identity())

    def forward(self, x: Tensor) -> Tensor:
        return self.act(x + self.act(self.up(x)))


class Framing(Stack):
    def run(self, x: Tensor) -> Tensor:
        for place, layer in enumerate(self.layers):
            x = layer(x)
            assert place < DEPTH
        return x


class Varying(Stack):
    def run(self, x: Tensor) -> Tensor:
        for place, layer in enumerate(self.layers):
            token = CURRENT.set(place)
            x = layer(x)
            CURRENT.reset(token)
        return x


class OfGlobal(Stack):
    def run(self, x: Tensor) -> Tensor:
        for place, layer in enumerate(self.layers):
            SHARED["scale"] = 2.0 if place == 4 else 1.0
            x = layer(x)
        SHARED["scale"] = 1.0
        return x


class Counting(Stack):
    def run(self, x: Tensor) -> Tensor:
        x = super().run(x)
        Layer.calls = 0
        return x


class Summing(Stack):
    def run(self, x: Tensor) -> Tensor:
        LOSSES.clear()
        x = super().run(x) + sum(LOSSES)
        LOSSES.clear()
        return x


class Unstashing(Stack):
    def run(self, x: Tensor) -> Tensor:
        x = super().run(x)
        return x + sum(torch.__dict__.pop("_stash_of_a_test"))


class Totaling(Stack):
    def run(self, x: Tensor) -> Tensor:
        total = torch.zeros(())
        for layer in self.layers:
            x = layer(x, total)
        return x + total


class Patching(Stack):
    def run(self, x: Tensor) -> Tensor:
        for place, layer in enumerate(self.layers):
            if place == 5:
                own, F.gelu = F.gelu, F.silu
            x = layer(x)
            if place == 5:
                F.gelu = own
        return x


class Grading(Stack):
    def run(self, x: Tensor) -> Tensor:
        for place, layer in enumerate(self.layers):
            with torch.set_grad_enabled(place != 2):
                x = layer(x)
        return x


class Casting(Stack):
    def run(self, x: Tensor) -> Tensor:
        for place, layer in enumerate(self.layers):
            with torch.autocast("cpu", torch.bfloat16, enabled=place == 4):
                x = layer(x.float())
        return x.float()


class Randomly(Stack):
    def run(self, x: Tensor) -> Tensor:
        before = random.getstate()
        random.seed(3)
        x = super().run(x)
        random.setstate(before)
        return x


class Marking(Stack):
    def run(self, x: Tensor) -> Tensor:
        for place, layer in enumerate(self.layers):
            x = x * 1
            if place == 4:
                x.doubled = True  # type: ignore[attr-defined]
            x = layer(x, x)
        return x


class Masking(Stack):
    """Full attention in every layer but one."""

    def run(self, x: Tensor) -> Tensor:
        full = torch.ones(BATCH, BATCH, dtype=torch.bool)
        for place, layer in enumerate(self.layers):
            x = layer(x, full.tril() if place == 4 else full)
        return x


class Collecting(Stack):
    def run(self, x: Tensor) -> Tensor:
        states = [x]
        for layer in self.layers:
            states.append(layer(states[-1]))
        return torch.stack(states).mean(0)


class Alone(Stack):
    """One layer, called again and again."""

    def run(self, x: Tensor) -> Tensor:
        for _ in range(DEPTH):
            x = self.layers[0](x)
        return x


class Again(Stack):
    """All layers twice, the second time backwards, and then a part of one."""

    def run(self, x: Tensor) -> Tensor:
        for layer in (*self.layers, *reversed(self.layers)):
            x = layer(x)
        return x + self.layers[4].norm(x)


class Checkpointed(Stack):
    def run(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
        return x


class Settling(Stack):
    """The first call fills in a default that every layer could read."""

    def __init__(self, layers: list[Any]) -> None:
        super().__init__(layers)
        self.defaults: dict[str, str] = {}
        for layer in layers:
            layer.defaults = self.defaults

    def run(self, x: Tensor) -> Tensor:
        self.defaults.setdefault("problem", "regression")
        return super().run(x)


class Unsettled(Settling):
    """A layer does something else once the first call has filled in its default."""

    def run(self, x: Tensor) -> Tensor:
        x = Stack.run(self, x)
        self.defaults.setdefault("problem", "regression")
        return x


class Reading(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2.0 if self.defaults else 1.0)


class Decaying(Stack):
    """The loss reads a weight of every layer."""

    def loss(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer.up.weight.square().sum()
        return super().loss(x)


def tied() -> Stack:
    model = Stack(rows())
    model.layers[4].up.weight = model.layers[1].up.weight
    model.layers[5].up.bias = model.layers[3].up.bias
    return model


def of_owner() -> Stack:
    owner: list[Stack] = []
    owner.append(Stack([Last(i, owner) for i in range(DEPTH)]))
    return owner[0]


def tabled() -> Stack:
    model = Stack(rows(Tabled))
    TABLE.update({id(layer): float(i) for i, layer in enumerate(model.layers)})
    return model


def frozen() -> Stack:
    model = Stack(rows())
    model.layers[3].up.weight.requires_grad_(False)
    return model


def hooked() -> Stack:
    model = Stack(rows())
    model.layers[4].register_forward_hook(lambda module, args, out: out * 2)
    return model


def evaluated() -> Stack:
    model = Stack(rows(lambda _: Rated(4)))
    model.train()
    model.layers[4].eval()
    return model


def nested() -> Stack:
    return Stack([nn.Sequential(*(Layer() for _ in range(3))) for _ in range(DEPTH)])


HONEST: dict[str, Callable[[], Stack]] = {
    "plain": lambda: Stack(rows()),
    "periodic": lambda: Stack(rows(Periodic)),
    "index that is compared": lambda: Stack(rows(At)),
    "collected states": lambda: Collecting(rows()),
    "one layer again and again": lambda: Alone([Layer()], *rows()),
    "layers twice": lambda: Again(rows()),
    "checkpoints": lambda: Checkpointed(rows()),
    "nested lists": nested,
    "a part called twice": lambda: Stack(rows(Twice)),
    "frozen": frozen,
    "hook on one": hooked,
    "one in evaluation mode": evaluated,
    "autocast around one": lambda: Casting(rows()),
    "context variable": lambda: Varying(rows()),
    "default that is filled in": lambda: Settling(rows()),
    "weights in the loss": lambda: Decaying(rows()),
    "tied weights": tied,
}
DECEIVING: dict[str, Callable[[], Stack]] = {
    "index in arithmetic": lambda: Stack(rows(Scaled)),
    "index of a table": lambda: Stack(rows(Listed)),
    "rates": lambda: Stack(rows(Rated)),
    "closures": lambda: Stack(rows(Closed)),
    "context variable": lambda: Varying(rows(Varied)),
    "dict by address": tabled,
    "global that is set between": lambda: OfGlobal(rows(OfDict)),
    "frames": lambda: Framing(rows(Framed)),
    "the last of its owner": of_owner,
    "counter of a class": lambda: Counting(rows(Counted)),
    "list of losses": lambda: Summing(rows(Losing)),
    "losses in torch's namespace": lambda: Unstashing(rows(Stashing)),
    "total written to": lambda: Totaling(rows(Writing)),
    "returns a view": lambda: Stack(rows(Viewing)),
    "function of torch replaced": lambda: Patching(rows()),
    "no gradient through one": lambda: Grading(rows()),
    "Python's generator": lambda: Randomly(rows(Drawing)),
    "attribute of a tensor": lambda: Marking(rows(Gated)),
    "mask of one": lambda: Masking(rows(Attending)),
    "cached table": lambda: Stack(rows(Cached)),
    "constants": lambda: Stack(rows(Constant)),
    "default that layers read": lambda: Unsettled(rows(Reading)),
}  # fmt: skip


def batch() -> dict[str, Tensor]:
    return {"x": torch.ones(BATCH, WIDTH)}
