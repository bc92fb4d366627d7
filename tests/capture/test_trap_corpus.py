"""Every module in `traps` is captured as what it computes, or refused by name."""

import re
from functools import partial

import pytest
import torch

from parloom.capture import capture, load_model
from parloom.errors import CaptureError, InputError
from parloom.execute.eager_compare import EQUAL, EagerReport
from parloom.execute.eager_process import ForkServer
from parloom.ir.text import print_graph
from tests.capture.traps.corpus import Trap, traps


def compared(spec: str) -> EagerReport:
    """The module beside the programs captured from it."""
    torch.set_num_threads(1)
    build = partial(load_model, spec)
    with ForkServer() as server:
        found = build()
        graph = capture(found.model, found.batch, loss=found.loss)
        evaluation = capture(found.model, found.batch, loss=found.loss, training=False)
        return server.compare(build, graph, print_graph(evaluation))


def outcome(spec: str) -> str:
    """The refusal, how the captured program differs, or nothing where it is equal."""
    try:
        report = compared(spec)
    except (CaptureError, InputError) as error:
        return f"refused: {error}"
    return "" if report.outcome == EQUAL else str(report)


@pytest.mark.sample(56)
@pytest.mark.parametrize("trap", list(traps()), ids=str)
def test_trap(trap: Trap) -> None:
    found = outcome(trap.spec)
    if trap.refusal:
        assert re.search(f"^refused: .*{trap.refusal}", found, re.DOTALL), found or "not refused"
    else:
        assert not found
