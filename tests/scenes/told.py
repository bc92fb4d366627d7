"""A command line as a user types it: its exit code, its result and what it says meanwhile."""

import io
import re
import shlex
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass

from parloom import cli

# A model with an optimizer of its own, as users have it in a file.
MODEL = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up = nn.Linear(16, width)
        self.down = nn.Linear(width, 4)

    def forward(self, x, labels):
        return nn.functional.cross_entropy(self.down(torch.relu(self.up(x))), labels)


def build(width={width}):
    torch.manual_seed(0)
    model = Net(width)
    batch = {{"x": torch.randn(8, 16), "labels": torch.randint(0, 4, (8,))}}
    return model, batch, torch.optim.AdamW(model.parameters(), lr=1e-3)
"""


@dataclass(frozen=True, slots=True)
class Told:
    """What one command told."""

    code: int
    out: str
    err: str

    def says(self, *patterns: str) -> None:
        """Fail unless stdout, and what went to stderr after it, match every pattern."""
        text = self.out + self.err
        missing = [p for p in patterns if not re.search(p, text, re.M)]
        assert not missing, f"{missing} not in\n{text}"
        assert "Traceback" not in text


def told(line: str, code: int = 0) -> Told:
    """Run `parloom ...` in this process; its exit code must be `code`."""
    words = shlex.split(line)
    assert words[0] == "parloom", f"not a command of parloom: {line}"
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        found = cli.main(words[1:])
    assert found == code, f"exit code {found} of {line}\n{out.getvalue()}{err.getvalue()}"
    return Told(found, out.getvalue(), err.getvalue())
