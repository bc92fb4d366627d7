"""The tables at the end of a generated program: mesh, tensors, parameters, units, schedule."""

from parloom.ir.gradients import with_gradients
from parloom.ir.graph import CACHE, DTYPE_BYTES, Input
from parloom.ir.layout import Layout, digits
from parloom.ir.mesh import Mesh
from parloom.ir.microbatches import whole_input
from parloom.ir.pcg import PCG, TIME, Compute, Movement, PParameter, PValue, operands_of
from parloom.ir.schedules import schedule
from parloom.ir.stages import ARRIVING
from parloom.ir.step_program import EACH_STEP, StepNode, step_program
from parloom.rewrite.pad import valid_rows

REQUIRED = ("inputs", "parameters")
WIDTH = 100


def tables(pcg: PCG) -> str:
    """`MESH` and `PROGRAM` as source."""
    lines = ["MESH = rt.Mesh(", "    ("]
    for axis in pcg.mesh.axes:
        primes = tuple((p.size, p.stride) for p in axis.primes)
        lines.append(f"        rt.Axis({axis.name!r}, {axis.size}, {primes!r}),")
    lines += ["    )", ")", "", "PROGRAM = rt.Program(", f"    name={pcg.graph.name!r},"]
    lines.append("    mesh=MESH,")
    batch = {v.name: v for v in pcg.main.inputs}
    read = _read(pcg)
    entries = pcg.graph.of_kind("batch")
    lines += _block(
        "inputs",
        [_input(i, batch[i.value.name], pcg) for i in entries if i.value.name in read],
    )
    lines += _block("unread", [repr(i.target) for i in entries if i.value.name not in read])
    lines += _block(
        "buffers",
        [_tensor(i.target, batch[i.value.name], pcg.mesh) for i in pcg.graph.of_kind("buffer")],
    )
    lines += _block(
        "caches",
        [_tensor(i.target, batch[i.value.name], pcg.mesh) for i in pcg.graph.of_kind(CACHE)],
    )
    arriving = [(i.target, i.value.name) for i in pcg.graph.of_kind(ARRIVING)]
    sent = zip(pcg.graph.leaving, pcg.leaving, strict=True)
    lines += _block("arriving", [_crossing(t, n, batch[n], pcg.mesh) for t, n in arriving])
    lines += _block("leaving", [_crossing(n, n, v, pcg.mesh) for n, v in sent])
    lines += _block("outputs", [_tensor(n, v, pcg.mesh) for n, v in pcg.outputs])
    lines += _block("parameters", [_parameter(p, pcg) for p in pcg.parameters])
    reached = with_gradients(pcg.graph)
    unreached = (p.input for p in pcg.parameters if p.input.value.name not in reached)
    lines += _block("zero_gradients", [repr(i.target) for i in unreached if i.trainable])
    lines += _block("adjacent", [repr(group) for group in pcg.adjacent])
    if pcg.loss is None:
        lines.append("    has_loss=False,")
    lines += _block("step", [_step_node(node) for node in step_program(pcg)])
    lines.append(f"    num_microbatches={pcg.num_microbatches},")
    if pcg.decisions.accumulates:
        lines.append("    by_microbatch=True,")
    (actions,) = schedule("one_stage", 1, pcg.num_microbatches)
    lines.append(f"    actions={tuple(map(str, actions))!r},")
    lines += _block("groups", [repr(group) for group in groups(pcg)])
    if pcg.decisions.reduce_dtype:
        lines.append(f"    reduce_dtype={pcg.decisions.reduce_dtype!r},")
    lines.append("    forward=forward,")
    if pcg.prologue:
        lines.append("    prologue=prologue,")
    lines.append(")")
    return "\n".join(lines)


def _read(pcg: PCG) -> set[str]:
    """The names of values of main that something reads."""
    left = [value for _, value in (*pcg.outputs, *pcg.updates, *pcg.hoisted)]
    items = (*pcg.prologue, *pcg.main.body)
    found = {value.name for item in items for value in operands_of(item)}
    return found | {value.name for value in (*left, *pcg.leaving, *pcg.main.outputs)}


def _block(name: str, entries: list[str]) -> list[str]:
    if not entries:
        return [f"    {name}=(),"] if name in REQUIRED else []
    return [f"    {name}=(", *(f"        {e}," for e in entries), "    ),"]


def _dims(layout: Layout, shape: tuple[int, ...], mesh: Mesh) -> str:
    return repr(tuple(digits(layout, d, n, mesh) for d, n in enumerate(shape)))


def _tensor(name: str, value: PValue, mesh: Mesh) -> str:
    spec = value.spec
    dims = _dims(value.layout, spec.shape, mesh)
    return f"rt.TensorSpec({name!r}, {spec.shape!r}, {spec.dtype!r}, {dims})"


def _crossing(target: str, name: str, value: PValue, mesh: Mesh) -> str:
    flows = ", True" if value.differentiable else ""
    return f"rt.Crossing({name!r}, {_tensor(target, value, mesh)}{flows})"


def _input(entry: Input, value: PValue, pcg: PCG) -> str:
    """A batch tensor; of a program of one microbatch, that of all of them."""
    shape = value.spec.shape
    dims = tuple(digits(value.layout, d, n, pcg.mesh) for d, n in enumerate(shape))
    if entry.samples is not None:
        dims = tuple((TIME, *d) if i == entry.samples else d for i, d in enumerate(dims))
        shape = whole_input(entry, pcg.num_microbatches).value.spec.shape
    return f"rt.TensorSpec({entry.target!r}, {shape!r}, {value.spec.dtype!r}, {dims!r})"


def _parameter(parameter: PParameter, pcg: PCG) -> str:
    mesh, master = pcg.mesh, pcg.decisions.master_dtype
    entry, decision = parameter.input, parameter.decision
    spec = entry.value.spec
    parts = [repr(entry.target), repr(spec.shape), repr(spec.dtype)]
    parts.append(_dims(parameter.layout, spec.shape, mesh))
    stored = [
        (kind, storage.axes)
        for kind, storage in (
            ("weight", decision.weight),
            ("gradient", decision.gradient),
            ("optimizer", decision.optimizer),
        )
        if storage.axes
    ]
    if stored:
        inner = ", ".join(f"{kind}={axes!r}" for kind, axes in stored)
        dim = decision.optimizer.dim
        parts.append(f"storage=rt.Storage({inner}, dim={dim})")
    if not entry.trainable:
        parts.append("trainable=False")
    if entry.aliases:
        parts.append(f"aliases={entry.aliases!r}")
    valid = valid_rows(pcg.decisions.rewrites, entry)
    if valid is not None:
        parts.append(f"valid={valid!r}")
    if master and spec.is_float and DTYPE_BYTES[spec.dtype] < DTYPE_BYTES[master]:
        parts.append(f"master_dtype={master!r}")
    return f"rt.ParameterSpec({', '.join(parts)})"


def _step_node(node: StepNode) -> str:
    parts = [repr(node.action), repr(node.kind), repr(node.axes)]
    if node.when != EACH_STEP:
        parts.append(f"when={node.when!r}")
    if node.unit is not None:
        parts.append(f"unit={node.unit!r}")
    if node.bucket_bytes:
        parts.append(f"bucket_bytes={node.bucket_bytes}")
    if node.dtype:
        parts.append(f"dtype={node.dtype!r}")
    if not node.parameters:
        return f"rt.StepNode({', '.join(parts)})"
    lines, line = [f"rt.StepNode({', '.join(parts)}, parameters=("], " " * 11
    for parameter in node.parameters:
        name = f" {parameter.input.target!r},"
        if len(line) + len(name) > WIDTH:
            lines.append(line)
            line = " " * 11
        line += name
    return "\n".join([*lines, line, "        ))"])


def groups(pcg: PCG) -> tuple[tuple[str, ...], ...]:
    """Every axis tuple over which the passes communicate, in order of first use."""
    found: dict[tuple[str, ...], None] = {}
    for function in (pcg.main, *pcg.functions):
        for item in function.body:
            if isinstance(item, Movement):
                found.setdefault(item.step.axes)
            elif isinstance(item, Compute):
                for _, axes in item.assignment:
                    found.setdefault(axes)
                found.setdefault(item.rule.routed(dict(item.assignment), pcg.mesh))
    space = [a.name for a in pcg.mesh.axes if not a.steps]
    return tuple(g for g in found if g and all(a in space for a in g))
