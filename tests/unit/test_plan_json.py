"""Plan files: exact round trips, one line for one change, and a place in every complaint."""

import json
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parloom.errors import InputError, VerifyError
from parloom.ir.expected import Alternative, Constraint, Prediction
from parloom.ir.mesh import Mesh, MeshAxis, PrimeAxis, grid
from parloom.ir.plan import (
    ActivationDecision,
    Decisions,
    ModelSource,
    NodeDecision,
    Optimizer,
    ParameterDecision,
    Plan,
    Stage,
    Storage,
    one_stage,
)
from parloom.ir.plan_json import plan_from_json, plan_to_json
from parloom.ir.text import print_graph
from parloom.rewrite.rewrites import parse_rewrite
from tests.unit.graphs import perceptron

AXES = ("x", "y")
BIG = [{"size": 2**31, "stride": 1, "level": 0}] * 600
ONE = Mesh((MeshAxis("data", (PrimeAxis(1, 1, 0),)),))
SHARDED = Storage(("y",), 0)


def example() -> Plan:
    decisions = Decisions(
        stages=one_stage(grid({"x": 2, "y": 3})),
        nodes=(
            NodeDecision("transformer.h.10.attn:addmm#0", (("n1", ("x",)), ("b", ("y",)))),
            NodeDecision("transformer.h.2.attn:addmm#0", (("n1", ("x",)),)),
        ),
        parameters=(
            ParameterDecision("transformer.wte.weight", SHARDED, SHARDED, SHARDED),
            ParameterDecision("lm_head.bias", optimizer=Storage(("x", "y"), 1, "host")),
        ),
        activations=(
            ActivationDecision("transformer.h.2", "recompute"),
            ActivationDecision(
                "transformer.h.3", "recompute", ("act:gelu#0", "ln:layer_norm#0"), ("hidden",)
            ),
        ),
        num_microbatches=4,
        master_dtype="float32",
    )
    return Plan(
        source=ModelSource("zoo:gpt", 8, 16, "bfloat16"),
        cluster="6xcpu",
        fingerprint="9f3c",
        optimizer=Optimizer(),
        method="fsdp",
        decisions=decisions,
        graph=print_graph(perceptron()),
        prediction=Prediction(0.1 + 0.2, 10**9, (("weights", 7), ("gradients", 8))),
        alternatives=(Alternative("fsdp", 0.398, 7, True),),
        assumptions=("links as usual",),
        notes=("ü",),
    )


def test_round_trip_is_exact() -> None:
    plan = example()
    text = plan_to_json(plan)
    assert plan_from_json(text, "plan.json") == plan
    assert plan_to_json(plan_from_json(text.encode(), "plan.json")) == text
    priced = Constraint("--forbid rewrite=a", 0.5, 7, "the same by other rules: b")
    plan = replace(plan, constraints=(Constraint("--pin a=n"), priced))
    assert plan_from_json(plan_to_json(plan), "plan.json") == plan


def test_the_command_says_all_that_was_asked() -> None:
    assert example().command() == (
        "parloom plan zoo:gpt --cluster 6xcpu --batch 8 --seq 16 --dtype bf16 --optimizer adamw"
        " --method fsdp --microbatches 4"
    )
    source = ModelSource("my model.py:build")
    plain = replace(
        example(), source=source, seed=3, decisions=Decisions(one_stage(grid({"x": 2})))
    )
    assert plain.command() == (
        "parloom plan 'my model.py:build' --cluster 6xcpu --optimizer adamw --method fsdp --seed 3"
    )


def test_one_device() -> None:
    plan = replace(example(), decisions=Decisions(one_stage(ONE)))
    assert plan_from_json(plan_to_json(plan), "plan.json") == plan


def test_numbers_in_names_have_any_length() -> None:
    """Python reads no text of more than 4,300 digits as a number."""
    long = "9" * 5000
    names = [f"h.{long}.w", "h.10.w", "h.9.w", "h.010.v", f"h.1{long}.w"]
    decided = tuple(ParameterDecision(name) for name in names)
    ordered = [p.name for p in Decisions(one_stage(grid({"x": 2})), parameters=decided).parameters]
    assert ordered == ["h.9.w", "h.010.v", "h.10.w", f"h.{long}.w", f"h.1{long}.w"]
    with pytest.raises(InputError, match="unknown rewrite"):
        parse_rewrite(f"pad w 5 {long}")
    with pytest.raises(InputError, match="unknown rewrite"):
        parse_rewrite("pad w 5 ²")


def test_text_is_readable() -> None:
    text = plan_to_json(example())
    assert '      "transformer.h.2.attn:addmm#0": {"n1": ["x"]},\n' in text
    assert text.index("h.2.attn") < text.index("h.10.attn")
    assert '    "    return loss",\n' in text
    assert '    {"name": "fsdp", "step_s": 0.398, "peak_bytes": 7, "fits": true}\n' in text
    assert '"transformer.h.2": "recompute"' in text
    assert max(map(len, text.splitlines())) <= 110


def test_one_decision_is_one_line() -> None:
    plan = example()
    nodes = (NodeDecision("transformer.h.10.attn:addmm#0"), *plan.decisions.nodes[:1])
    other = replace(plan, decisions=replace(plan.decisions, nodes=nodes))
    before, after = plan_to_json(plan).splitlines(), plan_to_json(other).splitlines()
    assert len([1 for old, new in zip(before, after, strict=True) if old != new]) == 1


def test_order_of_maps_has_no_meaning() -> None:
    decisions = example().decisions
    shuffled = replace(
        decisions, nodes=decisions.nodes[::-1], parameters=decisions.parameters[::-1]
    )
    assert shuffled == decisions


def test_a_name_decided_twice_is_refused() -> None:
    node = NodeDecision("a:b#0")
    with pytest.raises(VerifyError, match="'a:b#0' is decided twice"):
        Decisions(one_stage(grid({"x": 2})), nodes=(node, node))


# Control characters, which names may not have, are refused (test_printed_names).
alphabet = st.characters(exclude_categories=["Cc", "Cs", "Zl", "Zp"])
names = st.text(alphabet, min_size=1, max_size=8)
axes = st.lists(st.sampled_from(AXES), unique=True).map(tuple)
storages = st.builds(Storage, axes, st.integers(0, 3), st.sampled_from(["device", "host"]))
factors = st.dictionaries(names, axes, max_size=3).map(lambda d: tuple(d.items()))
numbers = st.floats(0, 1e6)


@st.composite
def stages(draw: st.DrawFn) -> Stage:
    """Of six devices, in ranges that are apart."""
    sizes = draw(st.sampled_from([(6,), (1, 5), (2, 1, 3)]))
    devices, start = [], draw(st.integers(0, 9))
    for size in sizes:
        devices.append(range(start, start + size))
        start += size + draw(st.integers(1, 9))
    mesh = grid({"x": 2, "y": 3})
    return Stage(tuple(draw(st.lists(names, max_size=3))), tuple(devices), mesh)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    nodes = draw(st.lists(st.builds(NodeDecision, names, factors), max_size=4))
    parameters = draw(
        st.lists(st.builds(ParameterDecision, names, storages, storages, storages), max_size=4)
    )
    decisions = Decisions(
        stages=draw(st.lists(stages(), min_size=1, max_size=3).map(tuple)),
        nodes=tuple({n.key: n for n in nodes}.values()),
        parameters=tuple({p.name: p for p in parameters}.values()),
        activations=tuple(
            ActivationDecision(*item)
            for item in draw(
                st.dictionaries(st.text(alphabet, max_size=5), st.sampled_from(["keep", "offload"]))
            ).items()
        ),
        num_microbatches=draw(st.integers(1, 64)),
        rewrites=tuple(draw(st.lists(names, max_size=2))),
    )
    return replace(
        example(),
        decisions=decisions,
        graph=draw(st.text(alphabet, max_size=60)),
        seed=draw(st.integers(0, 2**62)),
        bound_s=draw(st.none() | numbers),
        prediction=draw(st.none() | st.builds(Prediction, numbers, st.integers(0, 2**50))),
        notes=tuple(draw(st.lists(st.text(alphabet, max_size=9), max_size=2))),
    )


@given(plans())
def test_any_plan_round_trips(plan: Plan) -> None:
    text = plan_to_json(plan)
    again = plan_from_json(text.encode("utf-8"), "plan.json")
    assert again == plan
    assert plan_to_json(again) == text


def version_1(plan: Plan) -> dict[str, Any]:
    """The document of a plan as version 1 had it."""
    document: dict[str, Any] = json.loads(plan_to_json(plan)) | {"version": "1.0"}
    decisions = document["decisions"]
    (stage,) = decisions["stages"]
    whole: list[Any] = [{"prefixes": [], "submesh": {}}]
    document["decisions"] = {"mesh": stage["mesh"]} | decisions | {"stages": whole, "submeshes": {}}
    return document


@pytest.mark.parametrize("mesh", [grid({"x": 2, "y": 3}), Mesh(()), ONE])
def test_version_1_is_read(mesh: Mesh) -> None:
    plan = replace(example(), decisions=Decisions(one_stage(mesh)))
    found = plan_from_json(json.dumps(version_1(plan)), "plan.json")
    assert found == plan
    assert '"version": "2.0"' in plan_to_json(found)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(submeshes={"a:b#0": {"x": 1}}), "stages of version 1 never ran"),
        (lambda d: d["stages"][0].update(prefixes=["h"]), "stages of version 1 never ran"),
        (lambda d: d.pop("mesh"), "no decisions of version 1 .KeyError"),
        (lambda d: d.update(mesh=[3]), "no decisions of version 1 .TypeError"),
        (lambda d: d["mesh"][1]["primes"][0].update(size=7), "strides do not number the ranks"),
        (lambda d: d["mesh"][0]["primes"][0].update(size="a"), "no decisions of version 1"),
        (lambda d: d["mesh"][0]["primes"].extend(BIG), "no decisions of version 1"),
        (lambda d: d.update(stages=3), "stages of version 1 never ran"),
    ],
)
def test_bad_plans_of_version_1_are_refused(
    change: Callable[[dict[str, Any]], object], message: str
) -> None:
    document = version_1(example())
    change(document["decisions"])
    with pytest.raises(InputError, match=r"^plan.json.*" + message):
        plan_from_json(json.dumps(document), "plan.json")


def test_every_truncation_is_refused_with_a_place() -> None:
    text = plan_to_json(example())
    for end in range(len(text.rstrip()) - 1, 0, -97):
        with pytest.raises(InputError, match=r"^plan.json:\d+:\d+: .*(truncated|not JSON)"):
            plan_from_json(text[:end], "plan.json")


def edited(change: Callable[[dict[str, Any]], object]) -> str:
    document = json.loads(plan_to_json(example()))
    change(document)
    return json.dumps(document, indent=1)


def only(document: dict[str, Any]) -> dict[str, Any]:
    """The stage of a document with one."""
    found: dict[str, Any] = document["decisions"]["stages"][0]
    return found


def node(document: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = document["decisions"]["nodes"]["transformer.h.2.attn:addmm#0"]
    return found


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(sead=1), r"\d+:2: sead: unknown key; did you mean 'seed'"),
        (lambda d: d.pop("method"), r"key 'method' is missing"),
        (
            lambda d: d.update(version="3.0"),
            r"version '3.0', and this parloom reads '2.0' and '1.0'",
        ),
        (lambda d: d.update(format="other"), r"format is 'other', expected 'parloom.plan'"),
        (lambda d: d.pop("format"), r"format is none"),
        (lambda d: d.update(seed="1"), r"\d+:10: seed: .*valid integer, got '1'"),
        (lambda d: d.update(seed=True), r"seed: .*valid integer"),
        (lambda d: node(d).update(n1=["z"]), r"\d+:6: .*n1.0: unknown mesh axis 'z'; known: x, y"),
        (lambda d: node(d).update(n1=["x", "x"]), r"mesh axis 'x' is given twice"),
        (lambda d: node(d).update(n1="x"), r"n1: .*valid list"),
        (lambda d: d["decisions"].update(num_microbatches=0), r"num_microbatches: "),
        (lambda d: d["decisions"].update(master_dtype="float31"), r"float64, got 'float31'"),
        (lambda d: d["decisions"].update(reduce_dtype="int64"), r"reduce_dtype: .*got 'int64'"),
        (lambda d: d["decisions"].update(reduce_dtype="float16"), r"reduce_dtype: .*'float16'"),
        (lambda d: d["decisions"].update(batch_norm="none"), r"batch_norm: .*'global' or 'local'"),
        (lambda d: only(d)["mesh"][0]["primes"][0].update(stride=5), r"strides do not numb"),
        (lambda d: only(d)["mesh"][0].update(axis="y"), r"axis 'y' is given twice"),
        (lambda d: only(d)["mesh"][0].update(steps=2), r"steps: unknown key"),
        (lambda d: only(d)["mesh"][0].update(primes=[]), r"primes: .*at least 1 item"),
        (lambda d: d["decisions"].update(mesh=[]), r"decisions.mesh: unknown key"),
        (lambda d: d["decisions"].update(stages=[]), r"decisions.stages: .*at least 1 item"),
        (lambda d: only(d).update(devices="0-4"), r"0.devices: 5 of them, and the mesh numbers 6"),
        (lambda d: only(d).update(devices="3-5,0-2"), r"ascending and apart.*not 3-5,0-2"),
        (lambda d: only(d).update(devices="0-2,3-5"), r"ascending and apart"),
        (lambda d: only(d).update(devices="5-0"), r"ascending and apart"),
        (lambda d: only(d).update(devices="0-x"), r"0.devices: .*pattern"),
        (lambda d: only(d).update(devices="0-" + "9" * 5000), r"0.devices: .*pattern"),
        (lambda d: only(d).update(items=[""]), r"stages.0.items.0: "),
        (
            lambda d: d["decisions"]["parameters"]["lm_head.bias"]["optimizer"].update(axs=1),
            r"lm_head.bias.optimizer.axs: unknown key; did you mean 'axes'",
        ),
        (lambda d: d["decisions"]["activations"].update(a="burn"), r"activations.a: "),
        (lambda d: d["decisions"]["activations"].update(a={}), r"activations.a: no value is lis"),
        (
            lambda d: d["decisions"]["activations"].update(a={"value": ["b"]}),
            r"activations.a.value: unknown key; did you mean 'values'",
        ),
        (
            lambda d: d["decisions"]["activations"].update(a={"moves": ["b", "c", "b"]}),
            r"activations.a.moves.2: 'b' is given twice",
        ),
        (lambda d: d["decisions"]["activations"].update(a={"values": [3]}), r"a.values.0: .*got 3"),
        (lambda d: d["prediction"].update(step_s=-1), r"prediction.step_s: "),
        (lambda d: d.update(graph="x"), r"graph: .*valid list"),
        (lambda p: p.update(ranges={"x": [3, 1]}), r"ranges\.x: .*least value, 3, is above.*1"),
    ],
)
def test_hand_edited_nonsense_is_refused(
    change: Callable[[dict[str, Any]], object], message: str
) -> None:
    with pytest.raises(InputError, match=r"^plan.json:.*" + message) as caught:
        plan_from_json(edited(change), "plan.json")
    assert "parloom" in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "ends too early"),
        ("[]", "expected an object"),
        ("{} {}", "not JSON: Extra data"),
        ('{"format": 1, "format": 2}', "key 'format' is given twice"),
        ('{"format": NaN}', "NaN is no JSON number"),
        ("[" * 100_000, "nested too deeply"),
        ('{"a": ' + "9" * 5000 + "}", "not a plan"),
    ],
)
def test_what_is_no_plan(text: str, message: str) -> None:
    with pytest.raises(InputError, match=rf"^plan.json.*{message}"):
        plan_from_json(text, "plan.json")


class Planted:
    """What an attacker would pickle: unpickling it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("protocol", [0, 2, 5])
def test_a_planted_pickle_is_refused_and_not_run(tmp_path: Path, protocol: int) -> None:
    marker = tmp_path / "ran"
    data = pickle.dumps(Planted(marker), protocol)
    with pytest.raises(InputError, match=r"^plan.json:.*not (a plan|JSON)"):
        plan_from_json(data, "plan.json")
    assert not marker.exists()


def test_a_binary_file_is_named() -> None:
    with pytest.raises(InputError, match="a zip archive, and plans are JSON"):
        plan_from_json(b"PK\x03\x04\xff\xfe", "plan.json")
