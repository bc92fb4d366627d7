"""Plans by hand for mixtures of experts: what is divided, and what moves."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest

from parloom.comparators.configuration import Configuration
from parloom.comparators.handmade import Program, program
from parloom.cost.clusters import load_cluster
from parloom.cost.step import priced
from parloom.errors import InputError
from parloom.ir.graph import Graph
from parloom.ir.pcg import Movement
from parloom.ir.plan import Optimizer
from parloom.ir.repeat import repeated, stage

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SIZES = {"seq": 8, "vocab": 64, "width": 32, "heads": 4, "groups": 2, "head_width": 16, "inner": 24,
         "experts": 8, "slots": 2}  # fmt: skip
DEPTH = 3
EXPERTS = DEPTH * 8 * 3 * 24 * 32
NORMS = (2 * DEPTH + 1) * 32
OTHERS = 2 * 64 * 32 + DEPTH * (2 * 4 * 16 * 32 + 2 * 2 * 16 * 32 + 8 * 32) + NORMS
PLAIN = Configuration(master_dtype=None)


@pytest.fixture(scope="module")
def graph() -> Iterator[Graph]:
    sys.path.insert(0, str(BENCHMARKS))
    published = import_module("published")
    yield repeated(published.captured(published.Shape("moe", SIZES, 16, "bfloat16")), DEPTH)
    sys.path.remove(str(BENCHMARKS))


def built(graph: Graph, chosen: Configuration) -> Program:
    return program(graph, chosen, load_cluster(f"{chosen.ranks}xA100"))


def stored(found: Program) -> dict[str, int]:
    """Elements of weights, gradients and optimizer states of a rank."""
    own = load_cluster(f"{found.chosen.ranks}xA100")
    part = priced(found.lowered[0], own, found.parts[0].decisions, Optimizer("adamw", 2))
    return {name: size // 2 for name, size in part.parameters.stored_bytes().items()}


def moves(found: Program) -> set[tuple[str, tuple[str, ...]]]:
    """(row of the table of adjoints, axes) of all movements of blocks."""
    return {
        (item.step.row, item.step.axes)
        for function in found.lowered[0].functions
        for item in function.body
        if isinstance(item, Movement)
    }


def test_experts_are_divided_and_the_rest_is_not(graph: Graph) -> None:
    whole = stored(built(graph, replace(PLAIN, data=4, num_microbatches=4)))
    assert whole["weights"] == EXPERTS + OTHERS
    divided = stored(built(graph, replace(PLAIN, data=4, expert=4, num_microbatches=4)))
    assert divided["weights"] == EXPERTS // 4 + OTHERS
    both = replace(PLAIN, data=8, expert=4, zero=1, num_microbatches=2)
    # Two ranks have the same experts, eight the same of the rest.
    assert stored(built(graph, both))["optimizer"] == 2 * (EXPERTS // 4 // 2 + OTHERS // 8)


def test_tokens_are_gathered_and_go_back_to_where_they_were(graph: Graph) -> None:
    found = moves(built(graph, replace(PLAIN, data=8, expert=4, num_microbatches=2)))
    rows = {row for row, axes in found if "expert" in axes}
    assert rows == {"combine", "combine_varying", "reduce_scatter"}
    assert not any("data" in axes for _, axes in found)
    assert not moves(built(graph, replace(PLAIN, data=8, num_microbatches=2)))


def test_experts_over_data_and_tensor_ranks(graph: Graph) -> None:
    chosen = replace(PLAIN, tensor=2, data=2, expert=4, num_microbatches=8, sequence_parallel=True)
    found = built(graph, chosen)
    assert stored(found)["weights"] == EXPERTS // 4 + (OTHERS - NORMS - DEPTH * 8 * 32) // 2 + (
        NORMS + DEPTH * 8 * 32
    )
    assert found.play(load_cluster("4xA100")).step_s > 0
    alone = built(graph, replace(chosen, data=1, expert=2, num_microbatches=16))
    assert stored(alone)["weights"] == stored(found)["weights"] + EXPERTS // 4


def test_experts_in_a_pipeline(graph: Graph) -> None:
    chosen = replace(PLAIN, data=2, expert=2, pipeline=3, num_microbatches=8)
    played = program(graph, chosen, load_cluster("6xA100")).play(load_cluster("6xA100"))
    assert len(played.processes) == 3


def test_a_stage_without_blocks_hands_on_what_depends_on_weights(graph: Graph) -> None:
    """Tables of positions are computed in every stage."""
    first, rest = stage(graph, range(0), (True, False)), stage(graph, range(1), (False, False))
    ((name, _),) = first.outputs
    assert [i.target for i in rest.of_kind("batch")] == [name]
    assert len([i for i in first.inputs if i.kind == "parameter"]) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": 4, "expert": 3}, "of which 3 share the experts"),
        ({"data": 2, "tensor": 2, "expert": 3}, "neither a part of the 2"),
        ({"data": 8, "expert": 4, "shard": 2}, "ZeRO over 2"),
        ({"data": 16, "expert": 16}, "do not divide over 16"),
    ],
)
def test_what_does_not_divide_is_refused(
    graph: Graph, changes: dict[str, int], message: str
) -> None:
    chosen = Configuration(master_dtype=None, **changes)  # type: ignore[arg-type]
    batch = replace(chosen, num_microbatches=16 // chosen.data)
    with pytest.raises(InputError, match=message):
        built(graph, batch)
