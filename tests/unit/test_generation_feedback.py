"""Which programs are given what the pass before them chose."""

from dataclasses import replace

import pytest

from parloom.ir.generation import feedback, feeds_itself
from parloom.ir.graph import CACHE
from tests.unit.graphs import perceptron


@pytest.mark.parametrize("kept", [True, False])
def test_a_model_of_one_pass_may_have_inputs_of_these_names(kept: bool) -> None:
    """Programs of tokens have caches: that of one pass is given all that it reads."""
    graph = perceptron()
    entry, other = graph.of_kind("batch")[0], graph.of_kind("parameter")[0]
    names = {entry.value.name: "input_ids"}
    inputs = [
        replace(own, target=names.get(own.value.name, own.target))
        if own is not other
        else replace(own, kind=CACHE if kept else "batch", target="cache_0_key")
        for own in graph.inputs
    ]
    count = replace(entry, value=replace(entry.value, name="count"), target="generated")
    last = graph.main.outputs[0]
    program = replace(graph, inputs=(*inputs, count), outputs=(("logits", last),))
    assert feeds_itself(program) == kept
    assert feedback((program,)) == (((0, 0),) if kept else ())
