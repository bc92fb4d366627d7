"""`capture`: from a model and a batch to a folded, readable graph with the loss inside."""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.export.graph_signature import InputKind, InputSpec, OutputKind

from parloom.capture.blame import without_wrapper
from parloom.capture.check import (
    check_dtypes,
    check_memory,
    check_names,
    check_weights,
    with_trained,
)
from parloom.capture.experts import with_experts
from parloom.capture.program import Loss, Traced, trace
from parloom.capture.repeats import Repeats
from parloom.capture.translate import Translator, spec_of
from parloom.errors import CaptureError
from parloom.ir.fold import fold
from parloom.ir.graph import Arg, Call, Function, Graph, Input, Node, Value, numbered
from parloom.ir.naming import readable
from parloom.ir.simplify import nodes_of, simplified

MAX_CONSTANT_ELEMENTS = 4096
Results = tuple[str | None, tuple[tuple[str, str], ...], tuple[tuple[str, str], ...]]
STATE_KINDS = (InputKind.PARAMETER, InputKind.BUFFER)


def capture(
    model: nn.Module,
    batch: Mapping[str, Tensor],
    *,
    loss: Loss | None = None,
    training: bool = True,
) -> Graph:
    """What the model computes on this batch, as a graph with the loss inside.

    `batch` holds the model's keyword arguments (meta tensors will do). The loss is
    `loss(output, batch)`, or the output's `.loss`, or its first tensor; entries of the batch that
    `forward` does not take are for a loss function alone. In training only the loss
    and the buffer updates are kept; otherwise the outputs are too, and there may be no loss.

    Raises: CaptureError where the model cannot be traced, InputError for an unusable batch.
    """
    check_weights(model)
    flat, classes = capture_flat(model, batch, loss=loss, training=training)
    return readable(without_covered(fold(flat, classes)))


def capture_flat(
    model: nn.Module,
    batch: Mapping[str, Tensor],
    *,
    loss: Loss | None = None,
    training: bool = True,
) -> tuple[Graph, dict[str, str]]:
    """The graph before folding, with raw value names, and the class name of every module path."""
    check_names(model, batch)
    state = State.of(model)
    if training:
        check_memory(type(model).__name__, state.tensors)
    traced, translator, results = translated(model, batch, loss, training, state)
    loss_name, outputs, updates = results
    inputs = tuple(inputs_of(traced, translator, state, batch))
    returned = (*([loss_name] if loss_name else []), *(v for _, v in (*outputs, *updates)))
    main = Function(
        "main",
        tuple(i.value for i in inputs),
        numbered(tuple(translator.nodes)),
        tuple(dict.fromkeys(returned)),
    )
    graph = Graph(type(model).__name__, (), main, inputs, loss_name, outputs, updates, training)
    check_dtypes(graph)
    graph = without_unused_constants(with_trained(with_experts(simplified(graph))))
    recompute = checkpointed(graph, translator.checkpoints) if training else ()
    return replace(graph, recompute=recompute), translator.classes


def translated(
    model: nn.Module, batch: Mapping[str, Tensor], loss: Loss | None, training: bool, state: "State"
) -> tuple[Traced, Translator, Results]:
    """The trace, its nodes and its results; what repeats in a model is traced once, if it can be.

    A trace in which calls were repeated and that fails in any way says nothing of the model.
    """
    first = Repeats(model)
    repeats = first if first.kinds else None
    while True:
        try:
            traced = trace(model, batch, loss, training, repeats)
            translator = translator_for(traced, state, batch)
            translator.translate(traced.program.graph.nodes)
            results = results_of(traced, translator, state)
            loss_name, outputs, updates = results
            translator.expansion.check((loss_name or "", *(v for _, v in (*outputs, *updates))))
        except Exception as err:
            if repeats is None or not repeats.did:
                raise
            repeats = repeats.fewer()
            how = "the whole model" if repeats is None else "more of the model"
            logging.getLogger(__name__).debug("%s is traced: %s", how, err)
        else:
            return traced, translator, results


def checkpointed(graph: Graph, numbers: Mapping[str, int]) -> tuple[str, ...]:
    """Paths of modules all of whose values are made inside one checkpoint, by `numbers`.

    And those of modules that own other nodes inside of checkpoints.
    """
    inside: dict[str, set[int | None]] = {}
    for node in nodes_of(graph):
        found = {numbers.get(v.name) for v in node.results}
        for path in paths_to(node.path):
            inside.setdefault(path, set()).update(found)
    whole = {path for path, found in inside.items() if len(found) == 1 and None not in found}
    loose = {
        node.path or graph.name: None
        for node in nodes_of(graph)
        if any(v.name in numbers for v in node.results) and whole.isdisjoint(paths_to(node.path))
    }
    return (*(path for path in inside if path in whole), *loose)


def paths_to(path: str) -> tuple[str, ...]:
    """The paths of a module and of those around it, outermost first; without the model's own."""
    parts = path.split(".") if path else []
    return tuple(".".join(parts[: depth + 1]) for depth in range(len(parts)))


def without_covered(graph: Graph) -> Graph:
    """The folded graph with what is recomputed named once: block calls, and the rest outermost."""
    wanted = dict.fromkeys(graph.recompute)
    calls = {c.prefix: None for c in graph.main.body if isinstance(c, Call) and c.prefix in wanted}
    around = {outer for prefix in calls for outer in paths_to(prefix)}
    rest = {path: None for path in wanted if path not in around
            and calls.keys().isdisjoint(paths_to(path))}  # fmt: skip
    outermost = (path for path in rest if rest.keys().isdisjoint(paths_to(path)[:-1]))
    return replace(graph, recompute=(*calls, *outermost))


@dataclass(frozen=True, slots=True)
class State:
    """Parameters and buffers of the user's model, by canonical name, and every name's canonical."""

    tensors: dict[str, Tensor]
    names: dict[str, tuple[str, ...]]
    canonical: dict[str, str]

    @classmethod
    def of(cls, model: nn.Module) -> "State":
        """Tied tensors are one tensor under the first of its names."""
        found: dict[int, list[str]] = {}
        tensors: dict[int, Tensor] = {}
        every = (
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        )
        for name, tensor in every:
            found.setdefault(id(tensor), []).append(name)
            tensors[id(tensor)] = tensor
        return cls(
            {names[0]: tensors[key] for key, names in found.items()},
            {names[0]: tuple(names) for names in found.values()},
            {name: names[0] for names in found.values() for name in names},
        )


def translator_for(traced: Traced, state: State, batch: Mapping[str, Tensor]) -> Translator:
    """A translator that knows the value name and spec of every placeholder.

    Tied parameters come as one placeholder per name; all of them get one value.
    """
    program = traced.program
    placeholders = [n for n in program.graph.nodes if n.op == "placeholder"]
    names = {}
    specs = {f"state:{target}": spec_of(tensor) for target, tensor in state.tensors.items()}
    for node, spec in zip(placeholders, program.graph_signature.input_specs, strict=True):
        name = value_name(spec, state)
        names[node] = name
        if isinstance(node.meta.get("val"), Tensor):
            specs[name] = spec_of(node.meta["val"])
    translator = Translator(names, specs, traced.hidden, traced.loss_place)
    for node, spec in zip(placeholders, program.graph_signature.input_specs, strict=True):
        if spec.kind is InputKind.CONSTANT_TENSOR and node.users:
            translator.constant(node)
    return translator


def value_name(spec: InputSpec, state: State) -> str:
    """A raw name for a placeholder, unique by its kind and the user's name of it."""
    if spec.kind in STATE_KINDS:
        return f"state:{state.canonical[without_wrapper(spec.target or '')]}"
    if spec.kind is InputKind.USER_INPUT:
        return f"batch:{spec.arg.name}"
    if spec.kind is InputKind.CONSTANT_TENSOR:
        return f"constant:{without_wrapper(spec.target or '')}"
    raise CaptureError(
        f"the model uses an object that is no tensor: {spec.target}; if it is a torch.Generator,"
        " leave generator= out: all draws are keyed by the seed of parloom.parallelize"
    )


def inputs_of(
    traced: Traced, translator: Translator, state: State, batch: Mapping[str, Tensor]
) -> Iterator[Input]:
    """Main's inputs: parameters, buffers, batch tensors, constants."""
    for target, tensor in state.tensors.items():
        value = Value(f"state:{target}", spec_of(tensor))
        aliases = state.names[target][1:]
        if isinstance(tensor, nn.Parameter):
            yield Input(value, "parameter", target, tensor.requires_grad, aliases)
        else:
            yield Input(value, "buffer", target, False, aliases)
    for name, tensor in batch.items():
        yield Input(Value(f"batch:{name}", spec_of(tensor)), "batch", name)
    program = traced.program
    for node, spec in zip(program.graph.nodes, program.graph_signature.input_specs, strict=False):
        if spec.kind is InputKind.CONSTANT_TENSOR:
            name = value_name(spec, state)
            target = without_wrapper(spec.target or "")
            used = any(name in made.refs for made in translator.nodes)
            data = None
            if used:
                tensor = program.constants[spec.target]
                try:
                    data = constant_data(target, tensor)
                except CaptureError as err:
                    raise translator.refusal(next(iter(node.users)), str(err)) from None
            yield Input(Value(name, translator.specs[name]), "constant", target, data=data)


def constant_data(target: str, tensor: Tensor) -> Arg:
    """The values of a constant as nested tuples; complex ones are pairs."""
    named = f"tensor {target!r} of {tensor.numel()} elements"
    if tensor.numel() > MAX_CONSTANT_ELEMENTS:
        raise CaptureError(
            f"{named} is neither parameter nor buffer, and a constant may have"
            f" {MAX_CONSTANT_ELEMENTS} elements: register it with register_buffer"
        )
    if tensor.device.type == "meta":
        raise CaptureError(
            f"{named} is neither parameter nor buffer, and on the meta device it has no values:"
            " register it with register_buffer"
        )
    plain = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return nested(plain.detach().tolist())


def nested(data: object) -> Arg:
    """Nested lists as nested tuples."""
    if isinstance(data, list):
        return tuple(nested(item) for item in data)
    if isinstance(data, bool | int | float):
        return data
    raise CaptureError(f"a constant holds a {type(data).__name__}")


def results_of(traced: Traced, translator: Translator, state: State) -> Results:
    """(loss, outputs, updates) in terms of value names."""
    program = traced.program
    output = next(n for n in program.graph.nodes if n.op == "output")
    returned = output.args[0]
    names = iter(traced.names)
    loss: str | None = None
    outputs: list[tuple[str, str]] = []
    updates: list[tuple[str, str]] = []
    for node, spec in zip(returned, program.graph_signature.output_specs, strict=True):
        target = without_wrapper(spec.target or "")
        if spec.kind is OutputKind.USER_OUTPUT:
            name = next(names)
            if name is None:
                continue  # keeps a call in the trace
            if name:
                outputs.append((name, translator.value(node)))
            else:
                loss = translator.value(node)
        elif spec.kind is OutputKind.BUFFER_MUTATION:
            target = state.canonical[target]
            value = translator.value(node)
            if value != f"state:{target}":
                updates.append((target, value))
        else:
            kind = spec.kind.name.lower().replace("_", " ")
            way = "register it with register_buffer"
            if spec.kind is OutputKind.PARAMETER_MUTATION:
                way = "change parameters between steps (an embedding's max_norm does it in forward)"
            raise CaptureError(
                f"the model writes to {target or spec.arg.name!r} in forward ({kind}); only buffers"
                f" may be written to: {way}"
            )
    return loss, tuple(outputs), tuple(sorted(updates))


def without_unused_constants(graph: Graph) -> Graph:
    """The graph without constants that nothing reads."""
    used = {name for item in graph.main.body if isinstance(item, Node) for name in item.refs}
    used.update(graph.main.outputs)
    inputs = tuple(i for i in graph.inputs if i.kind != "constant" or i.value.name in used)
    main = Function(
        graph.main.name, tuple(i.value for i in inputs), graph.main.body, graph.main.outputs
    )
    return replace(graph, main=main, inputs=inputs)


def parameters_of(model: nn.Module, graph: Graph) -> dict[str, Tensor]:
    """The model's own parameters and buffers, by the targets of the graph's inputs."""
    state = State.of(model)
    wanted = [i.target for i in graph.inputs if i.kind in ("parameter", "buffer")]
    missing = [t for t in wanted if t not in state.tensors]
    if missing:
        raise CaptureError(f"the model has no {missing[0]!r}; was it captured from another model?")
    return {target: state.tensors[target] for target in wanted}
