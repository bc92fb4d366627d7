"""Random rules, most of them false, given to each proof alone: what differs in numbers on some
shapes is proved by neither.
"""

import re
from collections.abc import Callable, Iterator
from random import Random

import pytest

from parloom.rewrite.rules import Rule, difference, prove, rule
from parloom.rewrite.shapes import ARGUMENTS, Dims, Shapes
from parloom.rewrite.symbolic import ONE, NotExpressed, dim
from parloom.rewrite.terms import evaluate, parse_inputs, parse_term, size_in, size_text

INPUTS = parse_inputs(
    "x[a, b], y[a, b], n[b, a], w[c, b], q[a, a], r[a, a], s[1, b], v[b], o[1], k[a, 1],"
    " z[c, a, b], p[b, c, a], l[1, a, b]"
)
NAMES = {name: dim(name) for name in "abc"}
SHAPES = {
    own.name: Dims(tuple(size_in(s, NAMES, ONE) for s in own.sizes if not isinstance(s, str)))
    for own in INPUTS
}
# All different, all one, and alike in part: squares, parts of one size, and dims that are repeated.
EXTENTS = [(3, 4, 5), (2, 2, 2), (1, 1, 1), (1, 2, 2), (2, 1, 2), (2, 2, 1), (2, 3, 3), (3, 2, 3)]
# What may be done to tensors, and what one might think it equals. `d` and `e` are dims; `A:d` is
# the size of one.
PAIRS = [
    ("sum(add(A, B), (d,))", "add(sum(A, (d,)), sum(B, (d,)))"),
    ("mean(add(A, B), (d,))", "add(mean(A, (d,)), mean(B, (d,)))"),
    ("linear(add(A, B), C)", "add(linear(A, C), linear(B, C))"),
    ("linear(A, add(B, C))", "add(linear(A, B), linear(A, C))"),
    ("mul(add(A, B), C)", "add(mul(A, C), mul(B, C))"),
    ("relu(cat((A, B), d))", "cat((relu(A), relu(B)), d)"),
    ("softmax(cat((A, B), d), e)", "cat((softmax(A, e), softmax(B, e)), d)"),
    ("split_with_sizes(cat((A, B), d), (B:d, A:d), d)[0]", "A"),
    ("split_with_sizes(cat((A, B), d), (A:d, B:d), d)[0]", "B"),
    ("split_with_sizes(cat((A, B), d), (A:d, B:d), d)[1]", "B"),
    ("split_with_sizes(cat((A, B), d), (A:d, B:d), d)[e]", "A"),
    ("transpose(linear(A, C), -1, -2)", "linear(C, A)"),
    ("transpose(matmul(A, B), -1, -2)",
     "matmul(transpose(B, -1, -2), transpose(A, -1, -2))"),
    ("matmul(matmul(A, B), C)", "matmul(A, matmul(B, C))"),
    ("sum(mul(A, B), (d,))", "mul(sum(A, (d,)), B)"),
    ("sum(matmul(A, B), (d,))", "matmul(sum(A, (d,)), B)"),
    ("linear(A, C)", "linear(A, transpose(C, -1, -2))"),
    ("sum(cat((A, B), d), (e,))", "add(sum(A, (e,)), sum(B, (e,)))"),
    ("sum(cat((A, B), d), (e,))", "cat((sum(A, (e,)), sum(B, (e,))), d)"),
    ("sum(A, (d,))", "sum(transpose(A, -1, -2), (d,))"),
    ("sum(sum(A, (d,)), (e,))", "sum(sum(A, (e,)), (d,))"),
    ("mean(cat((A, B), d), (d,))", "mul(add(mean(A, (d,)), mean(B, (d,))), 0.5)"),
    ("softmax(transpose(A, -1, -2), d)", "transpose(softmax(A, e), -1, -2)"),
    ("matmul(cat((A, B), d), C)", "cat((matmul(A, C), matmul(B, C)), d)"),
    ("matmul(cat((A, B), d), cat((B, C), e))", "add(matmul(A, B), matmul(B, C))"),
    ("add(cat((A, B), d), cat((C, A), d))", "cat((add(A, C), add(B, A)), d)"),
    ("add(cat((A, B), d), cat((B, A), d))", "cat((add(A, B), add(A, B)), d)"),
    ("cat((cat((A, B), d), cat((B, A), d)), e)", "cat((cat((A, B), e), cat((B, A), e)), d)"),
    ("add(A, B)", "add(B, A)"),
    ("mul(A, add(A, B))", "add(mul(A, B), mul(A, A))"),
]  # fmt: skip
# A function around both, so that shapes that differ are not what tells them apart.
AROUND = ["{}", "{}", "sum({}, (-1,))", "sum({}, (-2,))", "sum({}, (-3,))", "relu({})",
          "relu(linear(relu({}), q))"]  # fmt: skip


def shape_of(text: str) -> tuple[str, ...] | None:
    """The sizes of a term; None where it has none."""
    try:
        (made,) = evaluate((parse_term(text, INPUTS),), Shapes(), SHAPES, NAMES)
    except (NotExpressed, *ARGUMENTS):
        return None
    return tuple(map(size_text, made.shape))


def tensors(rng: Random) -> str:
    """An input, or a function of one or two."""
    one, other = (rng.choice(INPUTS).name for _ in range(2))
    made = ["relu({0})", "add({0}, {1})", "transpose({0}, -1, -2)", "linear({0}, {1})",
            "mul({0}, 0.5)", "cat(({0}, {1}), -2)", "relu(linear({0}, {1}))"]  # fmt: skip
    text = rng.choice([*["{0}"] * 8, *made]).format(one, other)
    return text if shape_of(text) is not None else one


def filled(pair: tuple[str, str], rng: Random) -> list[str]:
    """A pair of these tensors and dims; sizes that do not fit are left to whom they are given."""
    given = {name: tensors(rng) for name in "ABC"}
    dims = {name: str(rng.choice((-1, -2, -2, -3))) for name in "de"}
    words, found = {**given, **dims}, []
    for text in pair:
        text = text.replace("[e]", f"[{rng.randrange(2)}]")
        for name, own in given.items():
            sizes = shape_of(own) or ()
            at = -int(dims["d"])
            text = text.replace(f"{name}:d", sizes[-at] if at <= len(sizes) else "1")
        found.append(re.sub(r"\b[ABCde]\b", lambda own: words[own[0]], text))
    around = rng.choice(AROUND)
    return [around.format(text) for text in found]


def nested(rng: Random) -> list[str]:
    """Functions of sums of functions of sums, of squares that are transposed and change places."""
    depth, sides = rng.randint(2, 3), []
    functions = [rng.choice(("relu({})", "softmax({}, -1)", "gelu({})")) for _ in range(depth)]
    for _ in range(2):
        text = "n"
        for function in functions:
            factor = rng.choice(("q", "r", "t(q)", "mm(q, r)", "t(mm(t(r), t(q)))"))
            text = function.format(f"linear({text}, {factor})")
        sides.append(text)
    if rng.random() < 0.3:
        sides[1] = sides[0].replace("mm(q, r)", "t(mm(t(r), t(q)))")
    return sides


def drawn(seed: int) -> Iterator[Rule]:
    """Rules whose sides both have a shape."""
    rng, left = Random(seed), 16
    while left:
        sides = nested(rng) if rng.random() < 0.15 else filled(rng.choice(PAIRS), rng)
        if None not in map(shape_of, sides) and sides[0] != sides[1]:
            used = [own for own in INPUTS if any(own.name in _names(text) for text in sides)]
            yield rule("drawn", ", ".join(map(str, used)), sides[:1], sides[1:])
            left -= 1


def _names(text: str) -> set[str]:
    return set(re.findall(r"\b[a-z]\b", text))


def differs(found: Rule) -> bool:
    """Whether both sides differ in numbers where they have any."""
    for seed, extents in enumerate(EXTENTS):
        sizes = dict(zip("abc", extents, strict=True))
        try:
            said = difference(found, {n: sizes[n] for n in found.extents}, 1, seed)
        except ARGUMENTS:  # dims of one element that are no longer repeated
            continue
        if said.startswith("output"):
            return True
    return False


def by_axioms(found: Rule) -> str:
    axioms = pytest.importorskip("parloom.rewrite.generation.axioms", exc_type=ImportError)
    return str(axioms.prove_by_axioms(found))


SEEDS = range(7)


@pytest.mark.parametrize("proof", [prove, by_axioms])
def test_no_proof_alone_holds_for_what_differs_in_numbers(proof: Callable[[Rule], str]) -> None:
    wrong = proved = 0
    for seed in SEEDS:
        for found in drawn(seed):
            holds = not proof(found)
            false = differs(found)
            wrong, proved = wrong + false, proved + holds
            assert not (holds and false), f"{found.left[0]} = {found.right[0]}"
    assert wrong > 50
    assert proved > 20


@pytest.mark.parametrize("seed", range(8))
def test_equal_normal_forms_of_nested_functions_are_equal_numbers(seed: int) -> None:
    rng, inputs = Random(seed), "n[b, a], q[a, a], r[a, a]"
    for _ in range(12):
        left, right = nested(rng)
        found = rule("nested", inputs, [left], [right])
        assert (prove(found) == "") == (not differs(found)), f"{left} = {right}"
