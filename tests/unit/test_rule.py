"""Rules: factors of an operator's dims, and the layouts that an assignment gives."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from parloom.errors import LayoutError
from parloom.ir.factors import follow
from parloom.ir.graph import Arg, Node, TensorSpec
from parloom.ir.layout import Layout, Shard
from parloom.ir.mesh import Mesh, MeshAxis, grid
from parloom.ir.ops import OPS, Assignment, Rule, Site
from parloom.ir.ops.rule import RING, WHOLE, broadcast, build, einsum, opaque
from parloom.ir.pcg import TIME
from tests.unit.graphs import node

MESH = grid({"x": 2, "y": 3})


def site(made: Node, *shapes: tuple[int, ...]) -> Site:
    return Site(made, tuple(TensorSpec(s, "float32") for s in shapes))


LINEAR_SITE = site(
    node("linear", "x", "w", "b", to="y", shape=(4, 6, 12)), (4, 6, 18), (12, 18), (12,)
)
LINEAR = einsum("... k, n k, + n -> ... n")(LINEAR_SITE)


def test_an_einsum_names_leading_dims() -> None:
    assert dict(LINEAR.sizes) == {"d0": 4, "d1": 6, "k": 18, "n": 12}
    assert LINEAR.operands == ((("d0",), ("d1",), ("k",)), (("n",), ("k",)), (("n",),))
    assert LINEAR.results == ((("d0",), ("d1",), ("n",)),)


def test_contracted_factors_leave_partial_results() -> None:
    assignment = {"k": ("y",), "d0": ("x",)}
    assert LINEAR.result_layout(0, assignment, MESH) == Layout((Shard("x", 0, 2),), (("y", "sum"),))
    assert LINEAR.operand_layout(0, assignment, MESH) == Layout(
        (Shard("x", 0, 2), Shard("y", 2, 6))
    )
    assert LINEAR.operand_layout(2, assignment, MESH) == Layout()


def test_missing_factors_leave_partial_gradients() -> None:
    assignment = {"d0": ("x",), "n": ("y",)}
    assert LINEAR.varying(0, assignment) == ("y",)
    assert LINEAR.varying(1, assignment) == ("x",)
    assert LINEAR.varying(2, assignment) == ("x",)


def test_joint_axes_are_outermost_first() -> None:
    layout = LINEAR.operand_layout(1, {"n": ("x", "y")}, MESH)
    assert layout == Layout((Shard("x", 0, 6), Shard("y", 0, 2)))


@pytest.mark.parametrize(
    ("assignment", "text"),
    [
        ({"z": ("x",)}, "up:linear#0: factor 'z' cannot be sharded; there is: d0, d1, k, n"),
        ({"d0": ("y",)}, "up:linear#0: factor 'd0' of size 4 does not divide by y = 3"),
        ({"d0": ("x", "y")}, "up:linear#0: factor 'd0' of size 4 does not divide by x * y = 6"),
        ({"d0": ("x",), "n": ("x",)}, "up:linear#0: an axis is assigned twice: ['x', 'x']"),
        ({"n": ("z",)}, "no mesh axis 'z'; the mesh has ['x', 'y']"),
    ],
)
def test_errors_name_operator_factor_and_sizes(
    assignment: dict[str, tuple[str, ...]], text: str
) -> None:
    with pytest.raises(LayoutError) as caught:
        LINEAR.check(assignment, MESH, "up:linear#0")
    assert str(caught.value) == text


def test_an_axis_in_time_is_called_microbatches() -> None:
    axis = MeshAxis(TIME, steps=3)
    mesh = Mesh((axis, *grid({"x": 2}).axes))
    with pytest.raises(LayoutError, match=r"does not divide by microbatches \* x = 6"):
        LINEAR.check({"d0": (TIME, "x")}, mesh, "up:linear#0")


def test_whole_factors_cannot_be_sharded() -> None:
    rule = opaque(site(node("strange", "x", to="y", shape=(4,)), (4,)))
    assert rule.shardable == ()
    with pytest.raises(LayoutError, match="factor 'w0' cannot be sharded; there is: none"):
        rule.check({"w0": ("x",)}, MESH, "op")


def test_broadcast_dims_have_no_factor() -> None:
    rule = broadcast(site(node("add", "x", "y", to="z", shape=(4, 6)), (4, 1), (6,)))
    assert rule.operands == ((("d0",), ()), (("d1",),))
    assert rule.varying(1, {"d0": ("x",)}) == ("x",)


def test_split_factors_keep_their_place() -> None:
    rule = LINEAR.split({"n": (3, 4), "k": (18,)})
    assert dict(rule.sizes) == {"d0": 4, "d1": 6, "k": 18, "n0": 3, "n1": 4}
    assert rule.results == ((("d0",), ("d1",), ("n0", "n1")),)
    assert rule.operand_layout(1, {"n1": ("x",)}, MESH) == Layout((Shard("x", 0, 2),))
    kinds = Rule((("v", 6),), ((("v",),),), ((("v",),),), (("v", "offset"),)).split({"v": (2, 3)})
    assert kinds.kinds == (("v0", "offset"), ("v1", "offset"))


def test_a_rule_must_match_the_shapes() -> None:
    with pytest.raises(LayoutError, match=r":add#0: rule \['a'\] does not match shape \(4, 6\)"):
        build([["a"]], [["a"]], site(node("add", "x", to="y", shape=(4,)), (4, 6)))


def test_arguments_by_position_name_and_default() -> None:
    made = site(node("sum", "x", (0, -1), to="y", shape=(), keepdim=True), (4, 6))
    assert made.integers(1, "dim") == (0, -1)
    assert made.arg(5, "keepdim") is True
    assert made.arg(5, "dtype", 3) == 3
    with pytest.raises(LayoutError, match=":sum#0: dim must be an integer, got"):
        made.integer(1, "dim")
    with pytest.raises(LayoutError, match=":sum#0: argument 3 is no tensor"):
        made.spec(3)


@pytest.mark.parametrize(
    ("op", "args", "partial", "passes"),
    [
        ("add", "xy", (True, True), True),
        ("add", "xy", (True, False), False),
        ("add", ("x", 2), (True,), False),  # plus a number: it would count once per rank
        ("add", ("x", 0), (True,), True),
        ("sub", ("x", 0.5), (True,), False),
        ("rsub", ("x", 0.0), (True,), True),
        ("mul", "xy", (True, False), True),
        ("mul", "xy", (True, True), False),
        ("div", "xy", (True, False), True),
        ("div", "xy", (False, True), False),
        ("sum", "x", (True,), True),
        ("exp", "x", (True,), False),
        ("view", ("x", (2,)), (False,), False),
    ],
)
def test_which_operators_let_partial_sums_through(
    op: str, args: Sequence[Arg], partial: tuple[bool, ...], passes: bool
) -> None:
    made = node(op, *args, to="z", shape=(2,))
    assert OPS[op].passes_partial(made, partial) is passes


def test_squeezed_dims_are_those_of_global_size_one() -> None:
    rule = OPS["squeeze"].rule(site(node("squeeze", "x", to="y", shape=(2, 6)), (2, 1, 6)))
    assert rule.results == ((("d0",), ("d2",)),)


def test_views_share_factors_where_running_products_meet() -> None:
    def view(source: tuple[int, ...], target: tuple[int, ...]) -> Rule:
        return OPS["view"].rule(site(node("view", "x", target, to="y", shape=target), source))

    rule = view((4, 24), (4, 3, 2, 4))
    assert [rule.size(f) for f in rule.operands[0][1]] == [3, 2, 4]
    assert rule.operands[0][1] == tuple(f for dim in rule.results[0][1:] for f in dim)
    odd = view((4, 6), (6, 4))
    assert {odd.kind(f) for f, _ in odd.sizes} == {WHOLE}


# A mixture in small: rows of expert and token, tokens, a table of experts.
ROUTED = Rule(
    (("t", 12), ("e", 6), ("k", 4)),
    ((("t",), ("k",)), (("e",), ("k",))),
    ((("e", "t"), ()), (("t",),)),
    routes=(("t", "e"),),
)


def test_a_routed_axis_shards_both_sides_and_leaves_no_sums() -> None:
    both = {"t": ("x", "y"), "e": ("y",)}
    ROUTED.check(both, MESH, "here")
    assert ROUTED.routed(both, MESH) == ("y",)
    assert ROUTED.operand_layout(0, both, MESH) == Layout((Shard("x", 0, 6), Shard("y", 0, 2)))
    assert ROUTED.operand_layout(1, both, MESH) == Layout((Shard("y", 0, 2),))
    assert ROUTED.result_layout(1, both, MESH) == Layout((Shard("x", 0, 6), Shard("y", 0, 2)))
    assert ROUTED.varying(0, both) == ()
    assert ROUTED.varying(1, both) == ("x",)
    assert ROUTED.result_layout(1, {"e": ("y",)}, MESH).partial == (("y", "sum"),)


def test_rows_are_routed_to_the_second_factor() -> None:
    """The axis leaves its digit of tokens and takes one of experts; the other keeps its own."""
    both = {"t": ("y", "x"), "e": ("y",)}
    assert ROUTED.result_layout(0, both, MESH).shards == (Shard("y", 0, 24), Shard("x", 0, 2))
    back = replace(ROUTED, routes=(("e", "t"),))
    assert back.result_layout(0, both, MESH).shards == (Shard("y", 0, 4), Shard("x", 0, 2))


def test_places_are_factors_alone_and_routes() -> None:
    assert ROUTED.places == ((), ("t",), ("e",), ("k",), ("e", "t"))
    cut = ROUTED.split({"t": (3, 4), "e": (2, 3)})
    assert cut.routes == (("t0", "e0"), ("t0", "e1"), ("t1", "e0"), ("t1", "e1"))


@pytest.mark.parametrize(
    "assignment", [{"t": ("x",), "k": ("x",)}, {"t": ("x",), "e": ("x",), "k": ("x",)}]
)
def test_an_axis_is_on_two_factors_of_a_route_only(assignment: Assignment) -> None:
    with pytest.raises(LayoutError, match="assigned twice"):
        ROUTED.check(assignment, MESH, "here")


# Queries, keys and what is made of them: blocks of keys go around where queries are, too.
AROUND = Rule(
    (("s", 12), ("t", 12), ("e", 4)),
    ((("s",),), (("t",), ("e",))),
    ((("s",), ("e",)),),
    (("t", RING), ("e", WHOLE)),
    routes=(("s", "t"),),
)


def test_blocks_go_around_where_queries_are_sharded() -> None:
    both = {"s": ("x", "y"), "t": ("y",)}
    AROUND.check(both, MESH, "here")
    assert AROUND.routed(both, MESH) == ("y",)
    assert AROUND.operand_layout(1, both, MESH) == Layout((Shard("y", 0, 4),))
    assert AROUND.result_layout(0, both, MESH).partial == ()
    assert AROUND.varying(1, both) == ("x",)  # the gradients of keys come home along y
    assert AROUND.places == ((), ("s",), ("s", "t"))
    for alone in ({"t": ("y",)}, {"s": ("x",), "t": ("y",)}):
        with pytest.raises(LayoutError, match="'t' must be on s, too"):
            AROUND.check(alone, MESH, "here")


def test_what_is_cut_alike_goes_around_alike() -> None:
    both = AROUND.split({"s": (3, 4), "t": (3, 4)})
    assert both.routes == (("s0", "t0"), ("s1", "t1"))
    assert both.places == ((), ("s0",), ("s1",), ("s0", "t0"), ("s1", "t1"))
    other = AROUND.split({"s": (3, 4), "t": (4, 3)})
    assert other.routes == (("s0", "t0"), ("s0", "t1"), ("s1", "t0"), ("s1", "t1"))


def test_keys_are_gathered_unless_a_decision_says_otherwise() -> None:
    lying = (Layout((Shard("x", 0, 6),)), Layout((Shard("x", 0, 6),)))
    assert follow(AROUND, lying, MESH) == {"s": ("x",)}
