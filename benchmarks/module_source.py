# ruff: noqa: E501 - lines of other files
"""Random modules as source: a file that a seed decides, whose `factory` is `MODEL` for parloom."""

import random
import re
from dataclasses import dataclass
from textwrap import indent

from module_pieces import PLAIN, TRAPS, Piece

BATCH = 8
TRAPPED = 0.3  # of all modules

HEADER = '''"""Made by random_modules.py, seed {seed}: {names}; loss {loss}."""

import itertools
import random
import time
import types

import numpy
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

'''

NET = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
{init}

    def forward(self, {arguments}):
        h = x
{forward}
{end}


def factory():
    batch = {{
{inputs}
    }}
    return {made}
"""

INPUTS = {
    "x": "torch.randn({batch}, 4, 8, dtype=torch.float64)",
    "ids": "torch.randint(0, 16, ({batch}, 4))",
    "labels": "torch.randint(-1, 16, ({batch}, 4)).masked_fill(torch.rand({batch}, 4) < 0.2, -1)",
}
UNREAD = 0.2  # of the inputs that a module does not read are in its batch


@dataclass(frozen=True, slots=True)
class Ending:
    """How a module ends: lines of `forward`, lines of the file, the loss that `factory` returns."""

    name: str
    forward: str
    outside: str = ""
    loss: str = ""
    trap: str = ""


ENDINGS = (
    Ending("mse", "return (self.head(h)[..., :8] - x).square().mean()"),
    Ending("cross_entropy", "return F.cross_entropy(self.head(h).flatten(0, 1), labels.flatten(),"
           " ignore_index=-1)"),
    Ending("counted", "known = labels >= 0\nterms = self.head(h).square().mean(-1)\n"
           "return (terms * known).sum() / known.sum()"),
    Ending("mapping", "logits = self.head(h)\nreturn {'logits': logits, 'loss': logits.abs().mean()}"),
    Ending("sum", "out = self.head(h)\nreturn (out.sum() * 0.01) ** 2 + out.std()"),
    Ending("function", "return self.head(h)", "def loss(output, batch):\n"
           "    return F.cross_entropy(output.flatten(0, 1), batch['labels'].flatten(),"
           " ignore_index=-1)", "loss"),
    Ending("object", "return {'logits': self.head(h), 'aux': h.square().mean()}",
           "class Loss:\n    def __init__(self, weight):\n        self.weight = weight\n"
           "    def __call__(self, output, batch):\n"
           "        return output['logits'].square().mean() + self.weight * output['aux']",
           "Loss(0.3)"),
)  # fmt: skip

TRAPPED_ENDINGS = (
    Ending("warm_loss", "return self.head(h)", "class Loss:\n    n = 0\n"
           "    def __call__(self, output, batch):\n        self.n += 1\n"
           "        return output.square().mean() * min(1.0, self.n / 50)", "Loss()", "B"),
    Ending("moving_loss", "return self.head(h)", "class Loss:\n    m = 1.0\n"
           "    def __call__(self, output, batch):\n        l = output.square().mean() / self.m\n"
           "        self.m = l.detach()\n        return l", "Loss()", "B"),
    Ending("closure_loss", "return self.head(h)", "def made():\n    seen = []\n"
           "    def loss(output, batch):\n        seen.append(1)\n"
           "        return output.square().mean() * len(seen)\n    return loss", "made()", "B"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Source:
    """The text of a file, the classes of its traps, and whether it draws random numbers."""

    text: str
    traps: tuple[str, ...]
    draws: bool


def source(seed: int, only: str = "") -> Source:
    """The module of `seed`; with `only` (`A1`, `B`) it has a trap of that class."""
    draw = random.Random(seed)
    pieces = [draw.choice(PLAIN) for _ in range(draw.randint(2, 5))]
    ending = draw.choice(ENDINGS)
    if only or draw.random() < TRAPPED:
        every: tuple[Piece | Ending, ...] = (*TRAPS, *TRAPPED_ENDINGS)
        traps = [t for t in every if not only or t.trap == only]
        trap = draw.choice(traps)
        if isinstance(trap, Ending):
            ending = trap
        else:
            pieces.insert(draw.randint(0, len(pieces)), trap)
            # A trap on the input alone would cut nothing.
            pieces.insert(0, next(p for p in PLAIN if p.name == "linear"))
    names = [p.name for p in pieces]
    parts = [HEADER.format(seed=seed, names=", ".join(names), loss=ending.name)]
    parts += [_numbered(p.outside, i) + "\n\n" for i, p in enumerate(pieces) if p.outside]
    parts += [ending.outside + "\n\n"] if ending.outside else []
    init = "\n".join(_numbered(p.init, i) for i, p in enumerate(pieces) if p.init)
    forward = "\n".join(_numbered(p.forward, i) for i, p in enumerate(pieces))
    read = " ".join((forward, ending.forward, ending.outside))
    inputs = [n for n in INPUTS if n == "x" or re.search(rf"\b{n}\b", read)
              or draw.random() < UNREAD]  # fmt: skip
    made = "Net().double(), batch" + (f", {ending.loss}" if ending.loss else "")
    text = "".join(parts) + NET.format(
        init=indent(f"{init}\nself.head = nn.Linear(8, 16)".strip(), " " * 8),
        forward=indent(forward, " " * 8),
        end=indent(ending.forward, " " * 8),
        arguments=", ".join(inputs),
        inputs="\n".join(f'        "{n}": {INPUTS[n].format(batch=BATCH)},' for n in inputs),
        made=made,
    )
    found = (*(p.trap for p in pieces), ending.trap)
    return Source(text, tuple(t for t in found if t), any(p.draws for p in pieces))


def _numbered(text: str, number: int) -> str:
    return text.replace("{i}", str(number))
