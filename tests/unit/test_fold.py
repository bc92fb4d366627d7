"""Folding of repeated blocks on hand-made graphs, and its inverse."""

from dataclasses import replace

import pytest

from parloom.errors import InputError
from parloom.ir.fold import fold, outline, unfold
from parloom.ir.graph import Arg, Call, Function, Graph, Input, Node, Ref, TensorSpec, Value
from parloom.ir.naming import identifier, readable, snake_case
from parloom.ir.simplify import simplified
from parloom.ir.text import parse_graph, print_graph

SPEC = TensorSpec((2, 4), "float32")
WEIGHT = TensorSpec((4, 4), "float32")


def node(op: str, result: str, *args: Arg, path: str = "", spec: TensorSpec = SPEC) -> Node:
    return Node(op, args, (), (Value(result, spec),), path)


def graph(body: list[Node], weights: dict[str, str], loss: str, **kinds: bool) -> Graph:
    """`weights` maps value names to state-dict names; one batch tensor `x`."""
    inputs = [Input(Value("x", SPEC), "batch", "x")]
    for value, target in weights.items():
        inputs.append(Input(Value(value, WEIGHT), "parameter", target, kinds.get(value, True)))
    main = Function("main", tuple(i.value for i in inputs), tuple(body), (loss,))
    return Graph("M", (), main, tuple(inputs), loss)


def block(index: int, source: str, weight: str, scale: float = 0.5) -> list[Node]:
    path = f"h.{index}"
    return [
        node("linear", f"l{index}", Ref(source), Ref(weight), path=f"{path}.proj"),
        node("mul", f"m{index}", Ref(f"l{index}"), scale, path=path),
        node("add", f"a{index}", Ref(source), Ref(f"m{index}"), path=path),
    ]


def stack(*scales: float) -> Graph:
    body: list[Node] = []
    source = "x"
    for i, scale in enumerate(scales):
        body += block(i, source, f"w{i}", scale)
        source = f"a{i}"
    weights = {f"w{i}": f"h.{i}.proj.weight" for i in range(len(scales))}
    return graph([*body, node("sum", "loss", Ref(source))], weights, "loss")


def test_equal_blocks_become_one_function() -> None:
    folded = readable(fold(stack(0.5, 0.5, 0.5), {"h.1": "GPT2Block", "h.0": "GPT2Block",
                                                  "h.2": "GPT2Block"}))  # fmt: skip
    (function,) = folded.functions
    assert function.name == "gpt2_block"
    assert [v.name for v in function.inputs] == ["hidden", "proj_weight"]
    paths = [item.path for item in function.body if isinstance(item, Node)]
    assert paths == ["proj", "", ""]
    calls = [item for item in folded.main.body if isinstance(item, Call)]
    assert [c.prefix for c in calls] == ["h.0", "h.1", "h.2"]
    assert calls[1].args == ("h_0", "h_1_proj_weight")
    assert calls[1].results == (Value("h_1", SPEC),)
    assert "h.1.proj:linear#0" in [key for key, _ in folded.unfolded()]


def powers(*exponents: Arg) -> Graph:
    body = [node("linear", "a", Ref("x"), Ref("w"))]
    for i, exponent in enumerate(exponents):
        source = Ref(f"r{i - 1}" if i else "a")
        body.append(node("pow", f"p{i}", source, exponent, path=f"h.{i}"))
        body.append(node("relu", f"r{i}", Ref(f"p{i}"), path=f"h.{i}.act"))
    return graph(body, {"w": "w"}, f"r{len(exponents) - 1}")


def test_another_argument_is_another_block() -> None:
    folded = fold(powers(0.5, 0.5, 0.25))
    assert [c.prefix for c in folded.main.body if isinstance(c, Call)] == ["h.0", "h.1"]
    assert sum(isinstance(i, Node) for i in folded.main.body) == 3
    assert not fold(powers(0.5, 0.25)).functions
    # 1 and 1.0 are equal to Python and not to an operator
    assert not fold(powers(1, 1.0)).functions
    assert not fold(stack(1, 1.0)).functions


def test_scales_that_differ_are_constants_of_the_calls() -> None:
    folded = readable(fold(stack(0.5, 0.5, 0.25)))
    (function,) = folded.functions
    assert [v.name for v in function.inputs] == ["hidden", "number", "proj_weight"]
    constants = {i.value.name: i.data for i in folded.of_kind("constant")}
    assert constants == {"number_0_5": 0.5, "number_0_25": 0.25}
    calls = [item for item in folded.main.body if isinstance(item, Call)]
    assert [constants[c.args[1]] for c in calls] == [0.5, 0.5, 0.25]
    assert parse_graph(print_graph(folded)) == folded
    # Half precision would round the number before it multiplies.
    low = TensorSpec((2, 4), "bfloat16")
    narrow = [
        replace(item, results=tuple(Value(v.name, low) for v in item.results))
        for item in stack(0.5, 0.25).main.body
        if isinstance(item, Node)
    ]
    weights = {f"w{i}": f"h.{i}.proj.weight" for i in (0, 1)}
    assert not fold(graph(narrow, weights, "loss")).functions


def test_a_value_read_outside_is_returned_by_all() -> None:
    plain = stack(0.5, 0.5)
    body = [*plain.main.body[:-1], node("add", "skip", Ref("m0"), Ref("a1")), plain.main.body[-1]]
    items = [i for i in body if isinstance(i, Node)]
    folded = fold(graph(items, {f"w{i}": f"h.{i}.proj.weight" for i in (0, 1)}, "loss"))
    (function,) = folded.functions
    assert len(function.outputs) == 2
    assert unfold(folded).main.body == tuple(
        folded_back for folded_back in unfold(fold(folded)).main.body
    )


def test_blocks_in_two_parts_stay_inline() -> None:
    first, second = block(0, "x", "w0"), block(1, "a0", "w1")
    late = node("mul", "late", Ref("a1"), 2.0, path="h.0")
    body = [*first, *second, late, node("sum", "loss", Ref("late"))]
    folded = fold(graph(body, {"w0": "h.0.proj.weight", "w1": "h.1.proj.weight"}, "loss"))
    assert not folded.functions


def test_inner_lists_are_folded_where_outer_ones_do_not_repeat() -> None:
    body: list[Node] = []
    source = "x"
    for stage, blocks in enumerate((2, 3)):
        for index in range(blocks):
            path, name = f"stage.{stage}.blocks.{index}", f"{stage}{index}"
            body.append(node("pow", f"m{name}", Ref(source), stage + 2.0, path=path))
            body.append(node("relu", f"r{name}", Ref(f"m{name}"), path=f"{path}.act"))
            source = f"r{name}"
    folded = fold(graph([*body, node("sum", "loss", Ref(source))], {}, "loss"))
    assert [f.name for f in folded.functions] == ["block", "block_2"]
    prefixes = [c.prefix for c in folded.main.body if isinstance(c, Call)]
    assert prefixes[0] == "stage.0.blocks.0"
    assert len(prefixes) == 5


def test_a_lone_layer_is_no_block() -> None:
    body: list[Node] = []
    for i in range(3):
        body.append(node("view", f"v{i}", Ref("x"), path=f"tables.{i}"))
        body.append(node("embedding", f"e{i}", Ref(f"v{i}"), path=f"tables.{i}"))
    body.append(node("cat", "loss", (Ref("e0"), Ref("e1"), Ref("e2"))))
    assert not fold(graph(body, {}, "loss")).functions


def test_unfold_is_the_inverse_up_to_names() -> None:
    plain = stack(0.5, 0.5, 0.5)
    back = unfold(readable(fold(plain)))
    assert readable(back) == readable(plain)
    assert [k for k, _ in readable(fold(plain)).unfolded()] == [k for k, _ in back.unfolded()]


def test_names_are_identifiers_that_shadow_nothing() -> None:
    body = [
        node("sum", "a", Ref("x")),
        node("slice", "b", Ref("a"), path="class"),
        node("relu", "c", Ref("b"), path="0"),
        node("relu", "d", Ref("c"), path="rt"),
    ]
    named = readable(graph(body, {"w": "lambda"}, "d"))
    assert [v.name for v in named.main.inputs] == ["x", "lambda_1"]
    assert [i.results[0].name for i in named.main.body] == ["sum_1", "class_1", "n0", "rt_1"]
    assert identifier("a.b-c.d") == "a_b_c_d"
    assert snake_case("LlamaDecoderLayer") == "llama_decoder_layer"
    assert snake_case("T5LayerFF") == "t5_layer_ff"
    assert snake_case("ViTLayer") == "vit_layer"


def test_dead_nodes_and_idle_detaches_go() -> None:
    body = [
        node("detach", "d0", Ref("x")),
        node("linear", "l", Ref("d0"), Ref("w")),
        node("detach", "d1", Ref("l")),
        node("relu", "dead", Ref("l")),
        node("sum", "loss", Ref("d1")),
    ]
    trained = simplified(graph(body, {"w": "w"}, "loss"))
    assert [i.results[0].name for i in trained.main.body] == ["l", "d1", "loss"]
    frozen = simplified(graph(body, {"w": "w"}, "loss", w=False))
    assert [i.results[0].name for i in frozen.main.body] == ["l", "loss"]


def test_copies_go_where_only_a_view_reads_them() -> None:
    contiguous = (("memory_format", "contiguous_format"),)
    body = [
        Node("clone", (Ref("x"),), contiguous, (Value("c0", SPEC),)),
        node("view", "v", Ref("c0"), (8,)),
        Node("clone", (Ref("v"),), contiguous, (Value("c1", SPEC),)),
        node("relu", "r", Ref("c1")),
        node("linear", "loss", Ref("r"), Ref("w")),
    ]
    left = simplified(graph(body, {"w": "w"}, "loss"))
    assert [i.results[0].name for i in left.main.body] == ["v", "c1", "r", "loss"]


def test_modules_become_blocks_under_the_same_keys() -> None:
    plain = readable(fold(stack(0.5, 0.25, 0.5), {}))
    flat = readable(unfold(plain))
    outlined = outline(flat, ("h.1", "h.0"))
    assert all(name.isidentifier() for name in outlined.main.specs())
    (function,) = outlined.functions
    calls = [item for item in outlined.main.body if isinstance(item, Call)]
    assert [(call.prefix, call.function) for call in calls] == [
        ("h.0", function.name), ("h.1", function.name),
    ]  # fmt: skip
    assert sum(isinstance(item, Node) for item in outlined.main.body) == 4
    assert [key for key, _ in outlined.unfolded()] == [key for key, _ in flat.unfolded()]
    assert parse_graph(print_graph(outlined)) == outlined
    whole = outline(flat, ("h",))
    assert [item.prefix for item in whole.main.body if isinstance(item, Call)] == ["h"]


@pytest.mark.parametrize("module", ["h", "h.3", "h.1.proj", "h.2"])
def test_what_is_no_block_of_its_own_is_refused(module: str) -> None:
    """`h` holds a block, `h.3` is not there, a projection is too small, and `h.2` has
    an operator behind it.
    """
    body = [*stack(1, 0.5, 0.25).main.body[:-1], node("mul", "late", Ref("m1"), 2, path="h.2")]
    body += [
        node("add", "end", Ref("late"), Ref("a2")),
        node("relu", "last", Ref("end"), path="h.2"),
    ]
    items = [item for item in body if isinstance(item, Node)]
    weights = {f"w{i}": f"h.{i}.proj.weight" for i in range(3)}
    found = outline(graph([*items, node("sum", "loss", Ref("last"))], weights, "loss"), ["h.0"])
    with pytest.raises(InputError, match=f"'block {module}' does not apply to M: there is no such"):
        outline(found, [module])
