"""Every invariant of `ir.verify` holds for sound values and catches a damaged one."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

import pytest

from parloom.errors import VerifyError
from parloom.ir.graph import Call, Function, Graph, Node, TensorSpec, Value
from parloom.ir.layout import Layout, Shard
from parloom.ir.lower import lower
from parloom.ir.mesh import grid
from parloom.ir.pcg import PCG, Compute, Item, Movement, PValue, Remake
from parloom.ir.plan import (
    ActivationDecision,
    Decisions,
    NodeDecision,
    ParameterDecision,
    Storage,
    one_stage,
)
from parloom.ir.text import parse_graph, print_graph
from parloom.ir.verify import (
    DECISIONS,
    GRAPH,
    PARALLEL,
    verify_decisions,
    verify_graph,
    verify_pcg,
)
from tests.unit.graphs import perceptron

PERCEPTRON = perceptron()
# The batch over x, the hidden width over y: `down` leaves a sum over y, its input varies over it.
MEGATRON = Decisions(
    one_stage(grid({"x": 2, "y": 2})),
    (
        NodeDecision("up:linear#0", (("d0", ("x",)), ("n", ("y",)))),
        NodeDecision("act:gelu#0", (("d0", ("x",)), ("d1", ("y",)))),
        NodeDecision("down:linear#0", (("d0", ("x",)), ("k", ("y",)))),
        NodeDecision(":mul#0", (("d0", ("x",)),)),
    ),
)


def _replaced(graph: Graph, index: int, item: Node) -> Graph:
    body = list(graph.main.body)
    body[index] = item
    return replace(graph, main=replace(graph.main, body=tuple(body)))


def _first(graph: Graph) -> Node:
    found = graph.main.body[0]
    assert isinstance(found, Node)
    return found


def _called(graph: Graph) -> Graph:
    made = Value("z", TensorSpec((1,), "float32"))
    call = Call("missing", "block.0", ("x",), (made,))
    return replace(graph, main=replace(graph.main, body=(*graph.main.body, call)))


def _nested(graph: Graph) -> Graph:
    """A block that calls itself."""
    call = Call("block", "block.0", (), ())
    return replace(graph, functions=(Function("block", (), (call,), ()),))


BAD_GRAPHS: dict[str, Callable[[Graph], Graph]] = {
    "values are defined once": lambda g: _replaced(
        g,
        1,
        replace(g.main.body[1], results=_first(g).results),  # type: ignore[arg-type]
    ),
    "values are defined before use": lambda g: replace(
        g, main=replace(g.main, body=g.main.body[1:])
    ),
    "calls stand in main": _nested,
    "calls match their functions": _called,
    "loss, outputs and updates exist": lambda g: replace(g, loss="h"),
    "inputs are those of main": lambda g: replace(g, inputs=g.inputs[::-1]),
    "operator keys are unique": lambda g: _replaced(g, 2, replace(_first(g), results=_new("y", g))),
}


def _new(name: str, graph: Graph) -> tuple[Value, ...]:
    return tuple(v for i in graph.main.body for v in i.results if v.name == name)


BAD_DECISIONS: dict[str, Decisions] = {
    "decisions name operators of the model": replace(MEGATRON, nodes=(NodeDecision("up:conv#0"),)),
    "axes divide their factors": replace(
        MEGATRON, nodes=(NodeDecision("down:linear#0", (("n", ("x", "y", "x")),)),)
    ),
    "storage is a ZeRO level": replace(
        MEGATRON, parameters=(ParameterDecision("up", weight=Storage(("x",))),)
    ),
    "activation policies name blocks": replace(
        MEGATRON, activations=(ActivationDecision("up", "recompute"),)
    ),
    "decisions are executable": replace(MEGATRON, batch_norm="local"),
    "the program has the samples that it is decided to have": replace(
        MEGATRON, num_microbatches=2, batch_semantics="microbatch"
    ),
    "gradients and masters keep their precision": replace(MEGATRON, reduce_dtype="bfloat16"),
    "communication has a known data type": replace(
        MEGATRON, parameters=(ParameterDecision("up", gradient_sent="int7"),)
    ),
}


def _edited(pcg: PCG, edit: Callable[[Item], Item]) -> PCG:
    """The program with every item of its forward pass edited."""
    return replace(pcg, main=replace(pcg.main, body=tuple(edit(i) for i in pcg.main.body)))


def _row(old: str, new: str) -> Callable[[PCG], PCG]:
    """Another row of the adjoint table in a movement: its layouts do not tell."""

    def edit(item: Item) -> Item:
        if isinstance(item, Movement) and item.step.row == old:
            return replace(item, step=replace(item.step, row=new))
        return item

    return lambda pcg: _edited(pcg, edit)


def _values(edit: Callable[[PValue], PValue]) -> Callable[[PCG], PCG]:
    """Another claim about values, wherever they stand."""

    def edited(item: Item) -> Item:
        if isinstance(item, Movement):
            return replace(item, operand=edit(item.operand), result=edit(item.result))
        assert isinstance(item, Compute)
        return replace(
            item,
            operands=tuple(edit(v) for v in item.operands),
            results=tuple(edit(v) for v in item.results),
        )

    def damaged(pcg: PCG) -> PCG:
        inputs = tuple(edit(v) for v in pcg.main.inputs)
        return _edited(replace(pcg, main=replace(pcg.main, inputs=inputs)), edited)

    return damaged


def _hidden(layout: Layout) -> Callable[[PCG], PCG]:
    return _values(lambda v: replace(v, layout=layout) if v.name == "h" else v)


def _half_read(pcg: PCG) -> PCG:
    """What `up` makes is not what `act` reads."""
    first = next(i for i in pcg.main.body if isinstance(i, Compute))
    results = tuple(replace(v, layout=Layout()) for v in first.results)
    return _edited(pcg, lambda i: replace(first, results=results) if i is first else i)


def _sharded_loss(pcg: PCG) -> PCG:
    assert pcg.loss is not None
    return replace(pcg, loss=replace(pcg.loss, layout=Layout((Shard("x", 0, 1),))))


def _reduced_twice(pcg: PCG) -> PCG:
    first, *rest = pcg.parameters
    return replace(pcg, parameters=(replace(first, reduce=("x", "y")), *rest))


def _remade_of_nothing(pcg: PCG) -> PCG:
    """A function that makes its first value again, of operands that it does not have then."""
    first = next(i for i in pcg.main.body if isinstance(i, Compute))
    names = frozenset(v.name for v in first.results)
    remake = Remake("again", (), (first,), first.results, names)
    return replace(pcg, functions=(replace(pcg.main, remake=remake),))


def _in_two_places(pcg: PCG) -> PCG:
    name = pcg.parameters[0].input.target
    return replace(pcg, adjacent=((name, name),))


BAD_PROGRAMS: dict[str, Callable[[PCG], PCG]] = {
    "values are read as they were made": _half_read,
    "values are made again as they were made": _remade_of_nothing,
    "layouts divide": _hidden(Layout((Shard("x", 0, 3),))),
    "operators keep their rules": _hidden(Layout((Shard("y", 1, 6),))),
    "cotangents are whole where they are used": _values(lambda v: replace(v, varying=())),
    "movements follow the adjoint table": _row("reduce", "reduce_varying"),
    "the loss is whole or a sum": _sharded_loss,
    "parameters are sharded and reduced once per axis": _reduced_twice,
    "parameters lie in one memory where they are read so": _in_two_places,
}


@pytest.mark.parametrize(
    ("weight", "gradient", "state", "legal"),
    [
        ((), (), ("y",), True),
        (("y",), ("y", "x"), ("y", "x"), True),
        (("x",), ("y", "x"), ("y", "x"), False),  # not the first of them
        (("y",), (), ("y",), False),
        (("y",), ("y",), (), False),
        ((), (), ("y", "y"), False),
    ],
)
def test_axes_of_storage_begin_those_of_the_next(
    weight: tuple[str, ...], gradient: tuple[str, ...], state: tuple[str, ...], legal: bool
) -> None:
    stored = ParameterDecision("up", Storage(weight), Storage(gradient), Storage(state))
    decisions = replace(MEGATRON, parameters=(stored,))
    with nullcontext() if legal else pytest.raises(VerifyError, match="storage"):
        verify_decisions(PERCEPTRON, decisions)


def test_every_invariant_has_a_damaged_value() -> None:
    assert list(BAD_GRAPHS) == list(GRAPH)
    assert list(BAD_DECISIONS) == list(DECISIONS)
    assert list(BAD_PROGRAMS) == list(PARALLEL)


def test_sound_values_pass() -> None:
    assert verify_graph(PERCEPTRON) is PERCEPTRON
    verify_decisions(PERCEPTRON, MEGATRON)
    pcg = lower(PERCEPTRON, MEGATRON)
    assert verify_pcg(pcg) is pcg


@pytest.mark.parametrize("name", GRAPH)
def test_a_damaged_graph_is_caught(name: str) -> None:
    with pytest.raises(VerifyError, match=rf"\[{name}\]"):
        verify_graph(BAD_GRAPHS[name](PERCEPTRON))


@pytest.mark.parametrize("name", DECISIONS)
def test_a_bad_decision_is_caught(name: str) -> None:
    with pytest.raises(VerifyError, match=rf"\[{name}\]"):
        verify_decisions(PERCEPTRON, BAD_DECISIONS[name])


@pytest.mark.parametrize("name", PARALLEL)
def test_a_damaged_program_is_caught(name: str) -> None:
    with pytest.raises(VerifyError, match=rf"\[{name}\]"):
        verify_pcg(BAD_PROGRAMS[name](lower(PERCEPTRON, MEGATRON)))


def test_gradients_are_not_reduced_in_less_than_they_have() -> None:
    text = print_graph(PERCEPTRON).replace("float32", "float64")
    verify_decisions(PERCEPTRON, replace(MEGATRON, reduce_dtype="float32"))
    with pytest.raises(VerifyError, match="does not hold gradients of"):
        verify_decisions(parse_graph(text), replace(MEGATRON, reduce_dtype="float32"))
