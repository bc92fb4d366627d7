"""A parallel graph as text: one line per operator or movement, with layouts (for people)."""

from collections.abc import Iterator

from parloom.ir.graph import Arg, Dtype, Ref
from parloom.ir.layout import describe
from parloom.ir.lower_stages import LoweredStages
from parloom.ir.mesh import Mesh
from parloom.ir.moves import ADJOINTS
from parloom.ir.ops.rule import RING
from parloom.ir.pcg import PCG, Compute, Item, Movement, PFunction, PParameter, PValue
from parloom.ir.step_program import step_program


def print_pcg(pcg: PCG) -> str:
    """Mesh, parameters, then every lowered function."""
    axes = ", ".join(f"{axis.name}={axis.size}" for axis in pcg.mesh.axes)
    lines = [f"mesh {axes}", "", "parameters"]
    lines += [f"  {_parameter(p, pcg.mesh)}" for p in pcg.parameters]
    lines += [f"  in one memory: {', '.join(group)}" for group in pcg.adjacent]
    for function in (*pcg.functions, pcg.main):
        lines += ["", *_function(function, pcg.mesh)]
    if pcg.loss is not None:
        lines.append(f"  loss {pcg.loss.name}")
    lines += ["", "step program", *(f"  {node}" for node in step_program(pcg))]
    return "\n".join(lines) + "\n"


def print_stages(lowered: LoweredStages) -> str:
    """Every stage of a pipeline, followed by what it sends to others."""
    pcgs = lowered.pcgs
    parts = []
    for stage, pcg in enumerate(pcgs):
        lines = [f"stage {stage}", print_pcg(pcg)]
        for each in (t for t in lowered.transfers if t.source == stage):
            received = _value(each.received, pcgs[each.target].mesh)
            back = ", gradient back" if each.received.differentiable else ""
            lines.append(
                f"transfer {_value(each.sent, pcg.mesh)} to stage {each.target} as {received}{back}"
            )
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def _parameter(parameter: PParameter, mesh: Mesh) -> str:
    entry, decision = parameter.input, parameter.decision
    text = f"{entry.target} {describe(parameter.layout, entry.value.spec.shape, mesh)}"
    if parameter.reduce:
        text += f"  gradient summed over {', '.join(parameter.reduce)}"
    for name in ("weight", "gradient", "optimizer"):
        storage = getattr(decision, name)
        if storage.axes:
            text += f"  {name} stored by {'x'.join(storage.axes)} along dim {storage.dim}"
    return text


def _function(function: PFunction, mesh: Mesh) -> Iterator[str]:
    yield f"{function.name}"
    for value in function.inputs:
        yield f"  input {_value(value, mesh)}"
    for item in function.body:
        yield f"  {_item(item, mesh)}"
    if function.outputs:
        yield f"  return {', '.join(v.name for v in function.outputs)}"
    if function.remake is not None:
        yield f"  again {', '.join(v.name for v in function.remake.outputs)}"


def _value(value: PValue, mesh: Mesh) -> str:
    return f"{value.name} {describe(value.layout, value.spec.shape, mesh)}"


def _item(item: Item, mesh: Mesh) -> str:
    if isinstance(item, Movement):
        row = ADJOINTS[item.step.row]
        axes = "x".join(item.step.axes)
        return (
            f"{_value(item.result, mesh)} = {item.step.row} over {axes} of {item.operand.name}"
            f"  ({row.forward} | {row.backward})"
        )
    made = ", ".join(_value(v, mesh) for v in item.results)
    if isinstance(item, Compute):
        chosen = ", ".join(f"{f}: {'x'.join(axes)}" for f, axes in item.assignment)
        call = f"{item.node.op}({', '.join(_arg(a) for a in item.node.args)})"
        over = item.rule.routed(dict(item.assignment), mesh)
        how = "ring" if any(kind == RING for _, kind in item.rule.kinds) else "all_to_all"
        sends = f"  ({how} over {'x'.join(over)})" if over else ""
        return f"{made} = {call}" + (f"  {{{chosen}}}" if chosen else "") + sends
    names = ", ".join(v.name for v in item.args)
    return f"{made} = {item.function}({names})  @ {item.prefix}"


def _arg(arg: Arg) -> str:
    if isinstance(arg, Ref):
        return arg.name
    if isinstance(arg, Dtype):
        return arg.name
    if isinstance(arg, tuple):
        return f"[{', '.join(_arg(a) for a in arg)}]"
    return repr(arg)
