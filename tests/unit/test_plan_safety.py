"""Plans made by hand to run code: each is refused, and what it would have written is not there."""

import ast
import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from parloom import api
from parloom import runtime as rt
from parloom.capture.operators import packet
from parloom.codegen.source import generate, identifier, printable
from parloom.errors import CaptureError, InputError, LayoutError, VerifyError
from parloom.execute.program import compile_pcg
from parloom.ir.graph import Dtype, Function, Graph, Input, Ref, TensorSpec, Value
from parloom.ir.lower import lower
from parloom.ir.mesh import grid
from parloom.ir.ops.opdef import keywords, literal
from parloom.ir.plan import Decisions, ModelSource, NodeDecision, Optimizer, Plan, one_stage
from parloom.ir.plan_json import plan_from_json, plan_to_json
from parloom.ir.text import parse_graph, print_graph
from tests.unit.graphs import graph, node, perceptron

Document = dict[str, Any]


def victim(program: Graph | None = None) -> Document:
    """A sound plan on two ranks, as a document."""
    nodes = (NodeDecision("up:linear#0", (("d0", ("x",)),)),) if program is None else ()
    plan = Plan(
        source=ModelSource("zoo:mlp"),
        cluster="2xcpu",
        fingerprint="0",
        optimizer=Optimizer(),
        method="hand",
        decisions=Decisions(one_stage(grid({"x": 2})), nodes),
        graph=print_graph(program or perceptron()),
    )
    document: Document = json.loads(plan_to_json(plan))
    return document


def source(document: Document) -> str:
    """Read, verify and generate, with a digest that fits whatever the graph was changed to."""
    whole = "\n\n".join("\n".join(document[n]) for n in ("graph", "evaluation_graph"))
    document["graphs_sha256"] = hashlib.sha256(whole.encode()).hexdigest()
    return api.generate(plan_from_json(json.dumps(document), "plan.json"))


def opens(code: str) -> bool:
    """Whether the program mentions `open` outside of strings and comments."""
    return any(isinstance(n, ast.Name) and n.id == "open" for n in ast.walk(ast.parse(code)))


def line(document: Document, mark: str) -> int:
    return next(i for i, text in enumerate(document["graph"]) if mark in text)


def test_a_sound_plan_is_generated() -> None:
    assert "F.linear" in source(victim())


def test_microbatches_that_do_not_divide_are_told_of_the_plan() -> None:
    document = victim()
    document["decisions"]["num_microbatches"] = 7919
    told = r"^invalid plan, made for zoo:mlp on 2xcpu: .*do not divide into 7919 microbatches"
    with pytest.raises(LayoutError, match=told):
        source(document)


@pytest.mark.parametrize(
    "name",
    [
        "x\n    open({!r}, 'w')\n    #",
        "x\nopen({!r}, 'w')\ndef f():\n    #",
        "x\ropen({!r}, 'w') #",
        "x\n",
        "micro",
        "",
        "2x",
        "x" * 33,
        "\u00b5",
        "x'",
    ],
)
def test_axis_names_are_short_identifiers(tmp_path: Path, name: str) -> None:
    marker = tmp_path / "ran"
    document = victim()
    evil = json.dumps(name.replace("{!r}", repr(str(marker))))
    document["decisions"] = json.loads(json.dumps(document["decisions"]).replace('"x"', evil))
    with pytest.raises(InputError, match=r"^plan.json:\d+:\d+: decisions.stages.0.mesh.0"):
        source(document)
    assert not marker.exists()


def test_axes_in_time_are_no_part_of_a_file() -> None:
    document = victim()
    document["decisions"]["stages"][0]["mesh"].append({"axis": "t", "steps": 1})
    with pytest.raises(InputError, match=r"mesh.1"):
        source(document)


@pytest.mark.parametrize("separator", ["\n", "\r", "\f", "\v", "\u2028", "\x85"])
@pytest.mark.parametrize("field", ["path", "source"])
def test_paths_and_sources_stay_in_their_comment(
    tmp_path: Path, field: str, separator: str
) -> None:
    marker = tmp_path / "ran"
    bad = f"up{separator}    open({str(marker)!r}, 'w')"
    text = f"{json.dumps(bad)} @ a.py:1" if field == "path" else f"up2 @ {json.dumps(bad)}"
    document = victim()
    at = line(document, " gelu(")
    document["graph"][at] = document["graph"][at].split("  #")[0] + f"  # {text}"
    made = source(document)
    assert not opens(made)
    assert not marker.exists()


@pytest.mark.parametrize(
    ("replacement", "error", "reason"),
    [
        ('load_library.__builtins__.get("eval", h)', InputError, "operator's name"),
        ('higher_order.wrap(h, "open({!r}, 1)")', VerifyError, "may not stand in a graph"),
        ("load_library.x(h)", VerifyError, "may not stand in a graph"),
        ("inductor._reinterpret_tensor(h, (9,), (1,), -9)", VerifyError, "may not stand"),
        ("inductor._alloc_from_pool(h, 0, 6, (9,), (1,))", VerifyError, "may not stand"),
        ("prims.copy_to(h, h)", InputError, "operator's name"),
        ("aten.linear(h, h)", InputError, "operator's name"),
        ("parloom.keyed_draw(h)", InputError, "operator's name"),
        ("set_(h, h)", InputError, "operator's name"),
        ("relu(h, out=h)", VerifyError, "takes no argument 'out'"),
        ("add(h, h, out=h)", VerifyError, "takes no argument 'out'"),
        ('zeros((8, 12), device="cuda")', VerifyError, "takes no argument 'device'"),
        ("gelu(h, hidden=1)", VerifyError, "takes no argument 'hidden'"),
        ("segment_reduce(h, \"sum\", lengths=h, unsafe=True)", VerifyError, "no argument 'unsafe'"),
        ("as_strided(h, (8, 12), (12, 1), 1)", CaptureError, "reach element 96 of a tensor"),
        ("as_strided(h, (8, 12), (12, 1), -1)", CaptureError, "must be counts"),
        ("as_strided(h, (8, 12), (-12, 1))", CaptureError, "must be counts"),
        ("as_strided(h, (8, 12), (1,))", CaptureError, "reach element"),
        ("as_strided(h, (8, 12), (1000000000, 1))", CaptureError, "reach element"),
        ("as_strided_scatter(h, h, (8, 12), (12, 1), 1)", CaptureError, "reach element"),
        ("__class__(h)", InputError, "operator's name"),
        ("_dir(h)", InputError, "operator's name"),
        ("aten.__dict__(h)", InputError, "operator's name"),
        ("Eval(h)", InputError, "operator's name"),
        ('save(h, "{!s}")', InputError, "operator's name"),
        ('from_file("{!s}", True, 96)', InputError, "operator's name"),
        ("_to_copy(h, dtype=dtype.load)", InputError, "unknown dtype"),
        ('layer_norm(h, (12,), None, None, "1); open({!r}, 1)")', None, ""),
    ],
)  # fmt: skip
def test_operators_and_arguments(
    tmp_path: Path, replacement: str, error: type[Exception] | None, reason: str
) -> None:
    marker = tmp_path / "ran"
    text = replacement.replace("{!r}", f"'{marker}'").replace("{!s}", str(marker))
    document = victim()
    at = line(document, " gelu(")
    document["graph"][at] = document["graph"][at].split(" = ")[0] + f" = {text}"
    if error is None:
        assert not opens(source(document))
    else:
        with pytest.raises(error, match=reason):
            source(document)
    assert not marker.exists()


def test_unknown_dtypes_are_refused() -> None:
    document = victim()
    at = line(document, "input x:")
    document["graph"][at] = document["graph"][at].replace("float32", "load")
    with pytest.raises(InputError, match="unknown dtype 'load'"):
        source(document)


@pytest.mark.parametrize("name", ["torch", "rt", "ctx", "def", "a b", "", "x\n"])
def test_names_that_code_generation_refuses(name: str) -> None:
    with pytest.raises(VerifyError):
        identifier(name)


def test_meshes_made_in_python_are_printed_safely(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    evil = f"x\n    open({str(marker)!r}, 'w')\n    #"
    nodes = (NodeDecision("up:linear#0", (("d0", (evil,)),)),)
    with pytest.raises(VerifyError, match="no identifier"):
        generate(lower(perceptron(), Decisions(one_stage(grid({evil: 2})), nodes)), "title")
    assert not opens(
        generate(lower(perceptron(), Decisions(one_stage(grid({evil: 2})))), 'a"""\nopen(1)\0')
    )
    assert not marker.exists()


def test_an_embedding_takes_a_number_for_padding() -> None:
    def made(padding: Any) -> str:

        look = node("embedding", "w", "x", to="y", shape=(8, 4))
        look = replace(look, args=(*look.args, padding))
        program = graph(
            {"w": (6, 4)}, {"x": ((8,), "int64")}, look, node("sum", "y", to="loss", shape=())
        )
        nodes = (NodeDecision(":embedding#0", (("v", ("x",)),)),)
        return generate(lower(program, Decisions(one_stage(grid({"x": 2})), nodes)), "title")

    assert "padding=3)" in made(3)
    with pytest.raises(LayoutError, match="padding_idx must be an integer"):
        made("0) or open(1")


@pytest.mark.parametrize("arg", [Ref("x"), [1], b"x", 1j, (1, {}), Dtype("load")])
def test_only_literals_are_written(arg: Any) -> None:
    with pytest.raises(VerifyError):
        literal(arg)


def test_literals_read_back() -> None:
    values = (None, True, -0.0, 10**5000, "\n'\u2028", (1,), (), ((), ("a", 2.5)), float("-inf"))
    assert eval(literal(values)) == values
    assert printable("a\tb\u2028\udc80\x1b\u00b7") == "a?b???\u00b7"
    assert keywords((("dim", "1"),)) == ["dim=1"]
    for name in ("a b", "def", "", "x=1, y"):
        with pytest.raises(VerifyError):
            keywords(((name, "1"),))


@pytest.mark.parametrize("op", ["linear", "cumprod", "_softmax"])
def test_operators_of_torch_are_found(op: str) -> None:
    assert packet(op)


def constant(name: str, data: Any, shape: tuple[int, ...]) -> Input:
    return Input(Value(name, TensorSpec(shape, "float32")), "constant", name, data=data)


def test_constants_that_are_not_finite_run() -> None:
    """Through text, a plan file and generated code; a dim of size 0 keeps what lies beyond it."""
    plain = graph(
        {"w": (4,)},
        {"x": ((4,), "float32")},
        node("mul", "x", "w", to="y", shape=(4,)),
        node("minimum", "y", "bounds", to="z", shape=(4,), path="clip"),
        node("sum", "z", to="part", shape=()),
        node("sum", "empty", to="zero", shape=(), number=1),
        node("add", "part", "zero", to="loss", shape=()),
    )
    extra = (
        constant("bounds", (float("inf"), float("nan"), 1.0, float("-inf")), (4,)),
        constant("empty", (), (0, 3)),
    )
    inputs = (*plain.inputs, *extra)
    main = Function("main", tuple(i.value for i in inputs), plain.main.body, plain.main.outputs)
    program = Graph("Constants", (), main, inputs, "loss")
    made = source(victim(program))
    assert 'float("nan")' in made
    assert "(), torch.float32, (0, 3))" in made
    pcg = lower(parse_graph(print_graph(program)), Decisions(one_stage(grid({"x": 1}))))
    compiled = compile_pcg(pcg, "test").program
    batch = {"x": torch.ones(4)}

    def rank(comm: rt.Comm) -> float:
        trainer = rt.Trainer(
            compiled,
            {"w": nn.Parameter(torch.ones(4)).detach()},
            optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1),
            comm=comm,
        )
        return float(trainer.step(batch).loss)

    assert rt.run_threads(compiled.mesh, rank)[0] != rt.run_threads(compiled.mesh, rank)[0]  # nan


# Programs in plan files: read, and refused before anything of them is run.


def written(folder: Path, document: Document) -> Path:
    whole = "\n\n".join("\n".join(document[n]) for n in ("graph", "evaluation_graph"))
    document["graphs_sha256"] = hashlib.sha256(whole.encode()).hexdigest()
    path = folder / "plan.json"
    path.write_text(json.dumps(document))
    return path


def with_gelu(text: str, mesh: str = "") -> Document:
    """The sound plan with another operator in the place of `gelu`."""
    document = victim()
    at = line(document, " gelu(")
    head = document["graph"][at].split(" = ")[0]
    document["graph"][at] = f"{head} = {text}  # layers.3.act"
    return document


def test_a_sound_plan_file_is_read(tmp_path: Path) -> None:
    assert api.load(written(tmp_path, victim())).decisions.mesh.num_ranks == 2


@pytest.mark.parametrize("what", ["graph", "evaluation_graph"])
@pytest.mark.parametrize(
    "call",
    [
        "inductor._reinterpret_tensor(h, (8, 12), (12, 1), -4096)",
        "inductor._alloc_from_pool(h, -4096, 6, (8, 12), (12, 1))",
        "as_strided(h, (8, 12), (12, 1), 100000)",
        "as_strided(h, (8, 12), (4096, 1))",
        "as_strided_scatter(h, h, (8, 12), (12, 1), 100000)",
    ],
)
def test_memory_of_others_is_not_read(tmp_path: Path, call: str, what: str) -> None:
    """The process keeps its secrets: a plan file cannot name memory beyond its own tensors."""
    document = with_gelu(call)
    if what == "evaluation_graph":
        document |= {"graph": victim()["graph"], "evaluation_graph": document["graph"]}
    with pytest.raises(InputError, match=rf"plan.json: {what}: .*layers.3.act|may not stand"):
        api.load(written(tmp_path, document))


def test_a_program_that_reads_other_memory_is_not_generated() -> None:
    """Nor where it comes some other way than through a file."""
    secret = torch.full((96,), 7.0)
    for call in ("inductor._reinterpret_tensor", "inductor._alloc_from_pool"):
        with pytest.raises(VerifyError, match="may not stand in a graph"):
            source(with_gelu(f"{call}(h, (8, 12), (12, 1), {secret.storage_offset()})"))


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        ("relu(x)", r"makes float32\[8, 6\], and says float32\[8, 12\]"),
        ("linear(h, down)", "makes|cannot be run"),
        ("_to_copy(h, dtype=dtype.float64)", r"makes float64\[8, 12\], and says float32"),
        ("view(h, (8, 13))", "cannot be run"),
        ("view(h, (-1, 12, 5))", "cannot be run"),
        ("matmul(h, h)", "cannot be run"),
        ("add(1, 2)", "makes"),
        ("cat((h, 3))", "cannot be run"),
        ("split(h, 4)", "makes"),
        ("select(h, 9, 0)", "cannot be run"),
        ("slice(h, 0, 0, 4, 0)", "cannot be run"),
        ("unfold(h, 0, -2, 1)", "cannot be run"),
        ("softmax(h, 0, 1, 2, 3, 4)", "cannot be run"),
        ("sum(h)", "makes"),
        ("one_hot(x, 10)", "cannot be run|makes"),
        ("full((8, 1000000000000), 0.0)", "makes|cannot be run"),
        ("repeat(h, (1000000000000, 1000000000000))", "makes|cannot be run"),
        ("pad(h, (9223372036854775807, 9223372036854775807))", "makes|cannot be run"),
        ("clone(h, memory_format=\"load\")", "cannot be run"),
        ("sort(h)", "makes"),
        ("dropout(h, 7.0)", "cannot be run"),
        ("max_pool2d(h, (0, 0))", "cannot be run"),
        ("_weight_norm_interface(h, x, 0)", "norms .* are none of weights"),
    ],
)  # fmt: skip
def test_shapes_that_do_not_follow_are_told(tmp_path: Path, call: str, reason: str) -> None:
    with pytest.raises(
        InputError, match=rf"plan.json: graph: the graph's layers.3.act.*({reason})"
    ):
        api.load(written(tmp_path, with_gelu(call)))


def test_segments_lie_within_their_data() -> None:
    """With others torch ends the process, or reads what is not the tensor's."""
    for offsets in ([0, 10**9, 4], [0, 3, 2]):
        with pytest.raises(RuntimeError, match="descend"):
            rt.segment_reduce(torch.ones(4, 6), "sum", offsets=torch.tensor(offsets))
    made = rt.segment_reduce(torch.ones(4, 6), "sum", offsets=torch.tensor([0, 1, 4]))
    assert made[:, 0].tolist() == [1.0, 3.0]


def test_blocks_that_call_blocks_are_refused(tmp_path: Path) -> None:
    """A page of calls would unfold to 2^40 operators."""
    document = victim()
    blocks = [
        "def b0(",
        "    a: float32[2],",
        "):",
        "    b: float32[2] = relu(a)",
        "    return b",
        "",
    ]
    for n in range(1, 40):
        blocks += [f"def b{n}(", "    a: float32[2],", "):"]
        blocks += [f'    x: float32[2] = b{n - 1}["p"](a)', f'    b: float32[2] = b{n - 1}["q"](x)']
        blocks += ["    return b", ""]
    at = line(document, "main ")
    document["graph"][at:at] = blocks
    with pytest.raises(InputError, match="calls stand in main"):
        api.load(written(tmp_path, document))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("x: float32[8, 6]", "x: float32[8000000000000, 6000000000000]"),
        ("x: float32[8, 6]", "x: float32[" + "9" * 4400 + ", 6]"),
        ("x: float32[8, 6]", "x: float32[-8, 6]"),
    ],
)
def test_sizes_beyond_all_memory_are_refused(tmp_path: Path, old: str, new: str) -> None:
    document = victim()
    assert any(old in text for text in document["graph"])
    document["graph"] = [text.replace(old, new) for text in document["graph"]]
    with pytest.raises(InputError, match=r"plan.json|graph text"):
        api.load(written(tmp_path, document))


@pytest.mark.parametrize(
    ("shape", "data"),
    [
        ("10", "(1.0, 2.0)"), ("1000000000000", "(1.0,)"), ("2", "((1.0,), (2.0, 3.0))"),
        ("2", '("a", "b")'), ("2", "(None, 1.0)"), ("1", "(1e400, 2)"), ("2", "None"),
        ("1", "(" + "(" * 80 + "1.0," + "),)" * 80 + ")"), ("1", f"({10**400},)"),
    ],
)  # fmt: skip
def test_constants_are_of_the_size_they_say(tmp_path: Path, shape: str, data: str) -> None:
    document = victim()
    at = line(document, "input x:")
    document["graph"].insert(at, f'input c: float32[{shape}] = constant("c", data={data})')
    with pytest.raises(InputError, match=r"constant 'c'|graph text|no tensor"):
        api.load(written(tmp_path, document))


FIRST_AXIS = ("decisions", "stages", 0, "mesh", 0, "primes")


@pytest.mark.parametrize(
    ("path", "value", "where"),
    [
        (("decisions", "num_microbatches"), 10**9, "decisions.num_microbatches"),
        (("decisions", "num_microbatches"), 10**30, "decisions.num_microbatches"),
        (FIRST_AXIS, [{"size": 2**30, "stride": 1, "level": 0}], "1073741824 ranks"),
        (("seed",), 2**64, "seed"),
        (("seed",), -1, "seed"),
        (("bound_s",), float("inf"), "not a plan"),
        (("bound_s",), float("nan"), "not a plan"),
        (("notes",), [["x"] * 9], "notes"),
        (("decisions", "nodes"), {"up:linear#0": {"d0": ["x"] * 10**5}}, "given twice"),
    ],
)
def test_counts_beyond_all_clusters_are_refused(
    tmp_path: Path, path: tuple[str | int, ...], value: Any, where: str
) -> None:
    document = victim()
    place: Any = document
    for part in path[:-1]:
        place = place[part]
    place[path[-1]] = value
    with pytest.raises(InputError, match=where):
        api.load(written(tmp_path, document))


def test_text_that_nests_without_end_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    for text in ("[" * 200_000, '{"a":' * 200_000, "[" + "9" * 5000 + "]", '{"format": 1e99999}'):
        file.write_text(text)
        with pytest.raises(InputError, match=r"plan.json.*plan"):
            api.load(file)
    for deep in ("(" * 5000, "-" * 100_000 + "1", "relu(" * 5000, "1+" * 100_000 + "1"):
        with pytest.raises(InputError, match="graph text"):
            api.load(written(tmp_path, with_gelu(deep)))


# Text of a plan in generated code.

HOSTILE = (
    "'", '"', '"""', "'''", "\\", "\\'", "\n", "\r\n", "{x}", "{", "}}", "#", "\u2028", "\x00",
    "\x1b", "\u202e", "$", "%s", "`", "; open(1)", '"); open(1); ("', "'); open(1); ('",
    "x\n    open(1)\n", '"""\nopen(1)\n"""', "\\\nopen(1)", "\ud800",
)  # fmt: skip


def shape_of(code: str) -> str:
    """The program without its strings: structure, names and numbers."""
    tree = ast.parse(code)
    for found in ast.walk(tree):
        if isinstance(found, ast.Constant) and isinstance(found.value, str):
            found.value = ""
    return ast.dump(tree)


def named(text: str) -> str:
    """A program whose every user's name is `text`."""
    plain = perceptron()

    def item(n: int, found: Any) -> Any:
        return replace(found, path=f"{text}{n}", source=text)

    body = tuple(item(n, found) for n, found in enumerate(plain.main.body))
    main = replace(plain.main, body=body)
    inputs = tuple(replace(i, target=f"{text}{n}") for n, i in enumerate(plain.inputs))
    kind = constant("con", (1.0,), (1,))
    inputs = (*inputs, replace(kind, target=text))
    main = replace(main, inputs=tuple(i.value for i in inputs))
    outputs = ((text, main.outputs[0]),)
    made = Graph(text, (), main, inputs, plain.loss, outputs)
    return generate(lower(made, Decisions(one_stage(grid({"x": 2})))), text)


@pytest.mark.parametrize("text", HOSTILE)
def test_text_reaches_code_as_literals_only(text: str) -> None:
    """The program of hostile names has the structure of that of plain ones."""
    hostile = named(f"a{text}b")
    assert shape_of(hostile) == shape_of(named("ab"))
    assert not opens(hostile)
    assert not any(ord(c) < 32 for c in hostile.replace("\n", "")), "control characters in code"
