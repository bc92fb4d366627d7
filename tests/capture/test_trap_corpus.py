"""Every module in `traps` is captured as what it computes, or refused by name."""

import re

import pytest
import torch

from parloom.capture import capture, load_model
from parloom.errors import CaptureError, InputError
from tests.capture.models import assert_equal
from tests.capture.traps.corpus import Trap, traps


@pytest.mark.parametrize("trap", list(traps()), ids=str)
def test_trap(trap: Trap) -> None:
    torch.set_num_threads(1)
    found = load_model(trap.spec)
    try:
        graph = capture(found.model, found.batch, loss=found.loss)
    except (CaptureError, InputError) as error:
        assert trap.refusal, f"refused: {error}"
        assert re.search(trap.refusal, str(error)), error
    else:
        assert not trap.refusal, f"not refused: {trap.refusal}"
        assert_equal(graph, found.model, found.batch, found.loss)
