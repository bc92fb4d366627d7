"""Names of a plan's text and what they stand for."""

import pytest

from parloom.errors import InputError
from parloom.ir.graph import FlatNode
from parloom.report.names import Below, Names, Tensor
from tests.unit.graphs import fused, stack

NAMES = Names(stack(3))


def found(name: str) -> str:
    """What a name stands for, in short."""
    named = NAMES.find(name)
    if isinstance(named, FlatNode):
        return named.key
    if isinstance(named, Below):
        return f"{len(named.operators)} and {len(named.inputs)} below {named.path}"
    if named.input is not None:
        return f"{named.input.kind} {named.input.target}"
    assert named.maker is not None
    return f"result {named.result} of {named.maker.key}"


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("blocks.1.up:linear#0", "blocks.1.up:linear#0"),
        ("blocks.1.up:linear", "blocks.1.up:linear#0"),
        ("blocks.1.up", "blocks.1.up:linear#0"),
        ("head", "head:linear#0"),
        (":view", "2 and 0 below :view"),
        (":view#1", ":view#1"),
        ("blocks.1", "5 and 3 below blocks.1"),
        ("blocks", "15 and 9 below blocks"),
        ("block", "5 and 3 below blocks.0"),
        ("main", "5 and 0 below main"),
        ("blocks.2.down.weight", "parameter blocks.2.down.weight"),
        ("ids", "batch ids"),
        ("logits", "result 0 of head:linear#0"),
        ("blocks_1", "result 0 of blocks.1:add#0"),
        ("blocks.2/wide", "result 0 of blocks.2.up:linear#0"),
        ("block/wide", "result 0 of blocks.0.up:linear#0"),
        ("wide", "result 0 of blocks.0.up:linear#0"),
        ("blocks.1/hidden", "result 0 of blocks.0:add#0"),
        ("blocks.1/up_weight", "parameter blocks.1.up.weight"),
        ("blocks_1_up_weight", "parameter blocks.1.up.weight"),
    ],
)
def test_names(name: str, what: str) -> None:
    assert found(name) == what


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("blocks.1.upp:linear#0", "blocks.1.up:linear#0"),
        ("haed.weight", "head.weight"),
        ("logit", "logits"),
        ("blokcs.1", "blocks.1"),
    ],
)
def test_unknown_names_give_the_nearest(name: str, hint: str) -> None:
    with pytest.raises(InputError, match="did you mean") as error:
        NAMES.find(name)
    assert repr(hint) in str(error.value)


def test_where_nothing_is_near_the_top_is_shown() -> None:
    with pytest.raises(InputError) as error:
        NAMES.find("zzz")
    assert str(error.value).endswith("; at the top are main, block, tokens, blocks, head")


def test_a_graph_without_blocks() -> None:
    names = Names(fused())
    heads = names.find("heads")
    assert isinstance(heads, Tensor)
    assert heads.maker is not None
    assert heads.maker.key == ":view#0"
    with pytest.raises(InputError):
        names.find("")
