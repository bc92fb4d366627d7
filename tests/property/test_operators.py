"""Every operator of the registry: split, run and recombine equals whole, gradients included."""

import random
import re
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given

from parloom.errors import LayoutError
from parloom.ir.graph import Node
from parloom.ir.layout import Layout
from parloom.ir.mesh import Mesh
from parloom.ir.ops import OPS, OpDef, op_of
from parloom.ir.ops.opdef import Emission
from parloom.ir.ops.rule import HALO, LOCAL, Assignment, Rule, Site, broadcast, build, einsum
from tests.equality import TOLERANCE, gap, parallel, size
from tests.examples import TIMES, examples
from tests.property.any_case import any_case
from tests.property.cases import all_cases
from tests.property.one_operator import (
    SQUARE,
    Around,
    Program,
    Trial,
    combined,
    local_site,
    routed,
    singles,
)
from tests.property.operator_cases import Case

torch.set_num_threads(1)

CASES = {c.id: c for c in all_cases()}
# Elementwise operators share one rule: each gets few of the assignments, others all on one factor.
ALIKE = frozenset(op.name for op in OPS.values() if op.rule is broadcast)
FEW, MANY = 2, 3 * TIMES


def test_every_operator_has_a_case() -> None:
    """A new registry entry needs at least one example call in `tests/property/cases`."""
    assert set(OPS) == {c.op for c in CASES.values()}
    assert len(CASES) == len(all_cases()), "two cases have the same operator and label"


def trials(rule: Rule, limit: int, seed: str) -> list[Trial]:
    """Axes on single factors, all of them unless `limit` is small, and some combinations."""
    single, rng = singles(rule), random.Random(seed)
    kept = single if limit > FEW else rng.sample(single, min(limit, len(single)))
    for many in (combined(rule), routed(rule)):
        kept = kept + rng.sample(many, min(limit, len(many)))
    return kept


def worst(example: Case, limit: int) -> tuple[float, str]:
    """The largest error over all assignments that are tried, and where it is."""
    direct, copied = Program(example), Program(example, copied=True)
    found = [(*direct.error(direct.rule, {}, SQUARE, "whole"), "whole")]
    for seed, (mesh, rule, assignment) in enumerate(trials(direct.rule, limit, example.id)):
        program = direct if seed % 4 == 0 else copied
        around: Around = seed if seed % 2 else ("whole", "readers")[seed // 2 % 2]
        error, where = program.error(rule, assignment, mesh, around)
        found.append((error, where, f"{assignment} on {mesh.num_ranks} ranks, around {around}"))
    error, where, how = max(found)
    return error, f"{where}, {how}"


@pytest.mark.sample(235)
@pytest.mark.parametrize("name", CASES)
def test_split_run_recombined_equals_whole(name: str) -> None:
    example = CASES[name]
    error, where = worst(example, FEW if example.op in ALIKE else MANY)
    assert error <= example.tolerance, where


@pytest.mark.parametrize("name", CASES)
def test_an_axis_divides_the_work(name: str) -> None:
    program = Program(CASES[name])
    op, site, rule = OPS[CASES[name].op], program.site, program.rule
    whole = op.flops(site, rule)
    assert whole >= 0
    for mesh, cut, assignment in singles(rule):
        (factor,) = assignment
        if cut.kind(factor) in (LOCAL, HALO):
            continue
        ranks = {f: mesh.size(axes) for f, axes in assignment.items()}
        scaled = replace(cut, sizes=tuple((f, n // ranks.get(f, 1)) for f, n in cut.sizes))
        local = op.flops(local_site(site, cut, assignment, mesh), scaled)
        assert local * ranks[factor] == pytest.approx(whole), (factor, local, whole)


# What autograd keeps here and not on a GPU, or not as one of the call's own tensors.
KEPT_OTHERWISE = {
    "rms_norm": "written out on the CPU, fused on a GPU",
    "scaled_dot_product_attention": "written out with keyed dropout and for three dims",
    "lstm": "the gates of every step", "gru": "the gates of every step",
    "matmul-broadcast": "expanded copies", "matmul-left_vector": "expanded copies",
    "einsum-three": "the product of the first two",
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_saved_tensors_are_as_declared(name: str) -> None:
    """Bytes that autograd keeps are what the entry says, up to a factor of two and small change."""
    program = Program(CASES[name])
    op, site = OPS[CASES[name].op], program.site
    for kind, index in op.saves(site):
        there = site.operands if kind in ("operand", "other") else site.results
        assert index < len(there), f"{op.name} saves {kind} {index}, which is not there"
    if not op.emit:  # a program of others
        return
    leaves, made, kept = program.run_emitted()
    if not any(t.requires_grad for t in made) or {name, op.name} & KEPT_OTHERWISE.keys():
        return
    own = op.own_bytes(site, False) if op.own_bytes else 0
    declared = {
        id(t): t
        for kind, index in op.saves(site)
        for t in [made[index] if kind == "result" else leaves[site.node.refs[index]]]
    }
    found = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept}
    total = sum(found.values())
    said = own + sum(t.untyped_storage().nbytes() for t in declared.values())
    largest = max(t.untyped_storage().nbytes() for t in (*leaves.values(), *made))
    assert total <= 2 * said + largest / 3, (total, said)
    assert said <= 2 * total + largest / 3, (total, said)


@pytest.mark.parametrize("name", [n for n in CASES if n.endswith("-bfloat16")])
def test_local_programs_round_once(name: str) -> None:
    """In low precision outputs are one rounding from torch's own, whose kernels do not round
    in between.
    """
    program = Program(CASES[name])
    scales = {n: size(t) for n, t in program.expected.outputs.items()}
    for mesh, rule, assignment in singles(program.rule):
        pcg = program.lowered(rule, assignment, mesh, "whole")
        for pieces in parallel(pcg, program.state, program.batch):
            for piece in pieces:
                if piece.kind == "outputs":
                    expected = program.expected.outputs[piece.name][piece.where]
                    assert gap(expected, piece.value) <= 2**-7 * scales[piece.name], assignment


def test_rules_divide_the_shapes_they_are_given() -> None:
    """Per dim, factor sizes multiply to the size; every factor has one."""
    for example in CASES.values():
        program = Program(example)
        rule, site = program.rule, program.site
        specs = (*site.operands, *site.results)
        for dims, spec in zip((*rule.operands, *rule.results), specs, strict=True):
            for factors, extent in zip(dims, spec.shape, strict=True):
                product = 1
                for factor in factors:
                    product *= rule.size(factor)
                assert product == extent, (example.id, factors, extent)


@examples(40)
@given(any_case())
def test_calls_of_any_shape(example: Case) -> None:
    error, where = worst(example, 4)
    assert error <= TOLERANCE, (example.op, example.args, where)


# Negative controls: wrong entries that the same harness must catch.


def _along_nothing(site: Site) -> Rule:
    names = [f"d{i}" for i in range(len(site.operands[0].shape))]
    operands = [names[len(names) - len(s.shape) :] for s in site.operands]
    return build(operands, [names], site)


def _call(function: str) -> dict[str, object]:
    def emit(e: Emission) -> str:
        return f"{function}({e.arg(0)}, {e.arg(1)})"

    return {"emit": emit}


def _bias_everywhere(e: Emission) -> str:
    return f"F.linear({e.arg(0)}, {e.arg(1)}, {e.arg(2)})"


def _first_experts(e: Emission) -> str:
    rows, matrices, places, experts, pairs = (e.arg(i) for i in range(5))
    return f"rt.grouped_mm({rows}, {matrices}, {places}, torch.arange(len({experts})), {pairs})"


def _stays(e: Emission) -> str:
    tokens, ids, experts = (e.arg(i) for i in range(3))
    return f"rt.dispatch({tokens}, {ids}, {experts}, 6, ctx, {e.operand_digits(0)})"


def _plain_lookup(e: Emission) -> str:
    return f"F.embedding({e.arg(1)}, {e.arg(0)})"


def _causal_shard(e: Emission) -> str:
    inputs = ", ".join(e.arg(i) for i in range(3))
    return f"F.scaled_dot_product_attention({inputs}, is_causal=True)"


def _edited(op: str, old: str, new: str) -> dict[str, object]:
    """The right code with `new` in place of what the pattern `old` matches."""

    def emit(e: Emission) -> str:
        return re.sub(old, new, OPS[op].source(e))

    return {"emit": emit}


def _modulo(e: Emission) -> str:
    size = e.operand_shape(0)[-1]
    return f"torch.scatter_add({e.arg(0)}, -1, {e.arg(2)} % {size}, {e.arg(3)})"


def _own_classes(e: Emission) -> str:
    size = e.result_shape()[-1]
    return f"F.one_hot({e.arg(0)} % {size}, {size})"


def _own_draws(e: Emission) -> str:
    return f"torch.rand({e.result_shape()}, dtype=torch.float64)"


def _own_groups(e: Emission) -> str:
    return f"F.group_norm({e.arg(0)}, 1, {e.arg(2)}, {e.arg(3)})"


def _empty(*_: object) -> tuple[str, ...]:
    return ()


def _all_missing(rule: Rule, index: int, assignment: Assignment) -> tuple[str, ...]:
    return right_varying(replace(rule, added=()), index, assignment)


def _shards_only(rule: Rule, index: int, assignment: Assignment, mesh: Mesh) -> Layout:
    return Layout(right_layout(rule, index, assignment, mesh).shards)


ATTENTION = "scaled_dot_product_attention"
right_layout, right_varying = Rule.result_layout, Rule.varying
WRONG: dict[str, tuple[str, dict[str, object]]] = {
    "bias added on every rank": ("linear-bias", {"emit": _bias_everywhere}),
    "mean divides by the local count": ("mean-dim", _call("torch.mean")),
    "loss divides by the local count": ("mse_loss-reduction1", _call("F.mse_loss")),
    "softmax of each shard": ("softmax", {"rule": _along_nothing}),
    "norm of each shard": ("layer_norm", {"rule": _along_nothing}),
    "scan of each shard": ("cumsum", {"rule": _along_nothing}),
    "halo forgotten": ("conv2d", {"halo": lambda site: dict.fromkeys(("s0", "s1"), (2, 0, 0))}),
    "maximum added up": ("parloom.amax", {"rule": OPS["sum"].rule}),
    "gradient said to stop": ("mul", {"differentiable": False}),
    "mask counts from the shard": ("scaled_dot_product_attention-causal", {"emit": _causal_shard}),
    "a ring ends at its own keys": (
        ATTENTION,
        _edited(ATTENTION, r"rt\.ring(_att\w+\(\w+, \w+, \w+), .*", r"F.scaled_dot_product\1)"),
    ),
    "a ring shows keys that come later": (
        f"{ATTENTION}-causal", _edited(ATTENTION, r"(rt\.ring_attention.*), True", r"\1, False")
    ),
    "stripes taken for chunks": (
        f"{ATTENTION}-causal_stripes", _edited(ATTENTION, r"\(4, '([xy])'\)", r"('\1', 4)")
    ),
    "rows of a shard by global index": ("embedding", {"emit": _plain_lookup}),
    "experts count from the shard": ("parloom.grouped_mm", {"emit": _first_experts}),
    "routed rows stay where they are": ("parloom.dispatch", {"emit": _stays}),
    "rows come back to other tokens": (
        "parloom.collect",
        _edited("parloom.collect", r"(unroute.*?ctx, )\((.*?), (.*?)\)", r"\1(\3, \2)"),
    ),
    "borders of a maximum are zero": (
        "max_pool2d-padding", _edited("max_pool2d", r'float\("-inf"\)', "0.0")
    ),
    "windows do not drift": (
        "conv1d-drift", _edited("conv1d", r"drift=-\d", "drift=0")
    ),
    "what is written elsewhere is written here": ("scatter_add-longer", {"emit": _modulo}),
    "written sums count what was there on every rank": (
        "index_add", _edited("index_add", r"rt\.mask\((\w+), ctx, \(.*?\)\)", r"\1")
    ),
    "a bias counts on every rank": (
        "linear-bias", _edited("linear", r"rt\.mask\((\w+), ctx, \(.*?\)\)", r"\1")
    ),
    "gradients of a bias are summed": ("linear-bias", {"varying": _all_missing}),
    "what is multiplied is added": (
        "bilinear", {"rule": einsum("... i, + ... j, n i j, + n -> ... n")}
    ),
    "first of the shard": (
        "parloom.first_max", _edited("parloom.first_max", r"\('[xy]', \d\)", "(6,)")
    ),
    "classes count from the shard": ("one_hot", {"emit": _own_classes}),
    "every shard draws its own": ("rand", {"emit": _own_draws}),
    "all channels of a shard are one group": ("group_norm", {"emit": _own_groups}),
    "variance of each shard": ("var", {"rule": OPS["sum"].rule}),
    "triangle of the shard": ("tril", {"emit": ".tril"}),
    "each shard rolls": ("roll", {"rule": _along_nothing}),
    "contracted factor not partial": ("mm", {"result_layout": _shards_only}),
    "gradients of shared operands not partial": ("mm", {"varying": _empty}),
}  # fmt: skip


@pytest.mark.parametrize("mistake", WRONG)
def test_a_wrong_entry_is_caught(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, change = WRONG[mistake]
    wrong = OPS[CASES[name].op]
    for attribute, value in change.items():
        if hasattr(Rule, attribute):
            monkeypatch.setattr(Rule, attribute, value)
        else:
            wrong = replace(wrong, **{attribute: value})  # type: ignore[arg-type]

    def patched(node: Node) -> OpDef:
        return wrong if node.op == wrong.name else op_of(node)

    for module in ("parloom.ir.lower_body", "parloom.ir.factors", "parloom.codegen.source"):
        monkeypatch.setattr(f"{module}.op_of", patched)
    direct, copied = Program(CASES[name]), Program(CASES[name], copied=True)
    rule = wrong.rule(direct.site)

    def errors() -> Iterator[float]:
        for seed, (mesh, cut, assignment) in enumerate((*singles(rule), *routed(rule))):
            pairs: tuple[tuple[Program, Around], ...] = (
                (direct, "whole"), (copied, "readers"), (copied, seed)
            )  # fmt: skip
            for program, around in pairs:
                try:
                    yield program.error(cut, assignment, mesh, around)[0]
                except (RuntimeError, IndexError, LayoutError):  # loud is caught, too
                    yield float("inf")

    assert any(error > 1e-3 for error in errors())
