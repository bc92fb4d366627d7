"""What a captured program must have before anything is planned: a loss to train, sane weights."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import combinations

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from parloom.errors import CaptureError, InputError, has_controls
from parloom.ir.gradients import with_gradients
from parloom.ir.graph import Graph, Input, Node
from parloom.ir.ops import op_of
from parloom.ir.simplify import nodes_of

# Modules that do something else in training, and how a remark calls them.
MODED = ((_DropoutNd, "dropout"), (_NormBase, "batch norm"))
# Operators that torch computes for operands of one dtype only.
ONE_DTYPE = frozenset({
    "linear", "addmm", "addmv", "addbmm", "baddbmm", "mm", "bmm", "matmul", "mv", "dot", "bilinear",
    "einsum", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d",
    "conv_transpose3d", "lstm", "gru", "rnn_tanh", "rnn_relu", "scaled_dot_product_attention",
})  # fmt: skip


def check_keys(model: nn.Module) -> None:
    """Raise `InputError` for a name that was put past torch, which takes texts without dots."""
    todo, seen = [model], {model}
    while todo:
        module = todo.pop()
        if isinstance(module, torch.jit.ScriptModule):
            raise InputError(
                f"{module.original_name} is compiled by torch.jit.script or torch.jit.trace, and"
                " has no Python to capture; give the module that it was made from"
            )
        for name in (*module._modules, *module._parameters, *module._buffers):
            if not isinstance(name, str) or not name or "." in name:
                raise InputError(
                    f"a {type(module).__name__} has a part under the name {name!r}; names of"
                    " modules, parameters and buffers are texts without dots: use add_module,"
                    " register_parameter or register_buffer"
                )
        inner = {part for part in module._modules.values() if part is not None} - seen
        seen |= inner
        todo += inner


def check_initialised(model: nn.Module) -> None:
    """Raise `InputError` for a module whose shapes are to be those of its first input."""
    check_keys(model)
    for path, module in model.named_modules():
        tensors = (*module._parameters.values(), *module._buffers.values())
        if any(isinstance(t, UninitializedBuffer | UninitializedParameter) for t in tensors):
            name = ".".join(part for part in (type(model).__name__, path) if part)
            raise InputError(
                f"{name} is a {type(module).__name__} that has seen no input, so that its weights"
                " have no shapes: call the model once on a batch before it is given to parloom, in"
                " the factory for example"
            )


def check_loss(loss: object) -> None:
    """Raise `InputError` for a loss that has weights of its own to train."""
    if not isinstance(loss, nn.Module):
        return
    check_initialised(loss)
    trained = [name for name, p in loss.named_parameters() if p.requires_grad]
    if trained:
        raise InputError(
            f"the loss {type(loss).__name__} has weights of its own ({', '.join(trained[:3])}), and"
            " the optimizer of a plan trains those of the model: make it a part of the model, whose"
            " forward then returns the loss, or turn its requires_grad off"
        )


def check_weights(model: nn.Module) -> None:
    """Raise `InputError` for a parameter that holds NaN; those without values are passed over."""
    check_initialised(model)
    for name, parameter in model.named_parameters():
        if parameter.is_meta or not parameter.is_floating_point() or not holds_nan(parameter):
            continue
        count = int(parameter.detach().isnan().sum())
        raise InputError(
            f"parameter {name!r} of {type(model).__name__} is NaN in {count} of"
            f" {parameter.numel()} elements, so every loss would be: load the weights again, or"
            " initialise them (torch.empty holds whatever was there)"
        )


def holds_nan(tensor: Tensor) -> bool:
    """Whether any element is NaN; one pass that needs no memory."""
    total = tensor.detach().sum(dtype=torch.float64)
    return bool(total.isnan()) and bool(tensor.detach().isnan().any())


def check_memory(model: str, tensors: Mapping[str, Tensor]) -> None:
    """Raise `CaptureError` where a trainable parameter shares memory with another tensor.

    As one changes in training, so does the other; a plan holds each by itself. Two that stay as
    they are may share what they like, and tied parameters are one tensor.
    """
    changed = {name for name, tensor in tensors.items() if tensor.requires_grad}
    spans: dict[int, list[tuple[int, int, str]]] = {}
    for name, tensor in tensors.items():
        if tensor.is_meta or tensor.layout != torch.strided or not tensor.numel():
            continue
        first = tensor.data_ptr()
        reach = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
        storage = tensor.untyped_storage().data_ptr()
        last = first + reach * tensor.element_size()
        spans.setdefault(storage, []).append((first, last, name))
    for found in spans.values():
        for (_, end, one), (start, _, other) in combinations(sorted(found), 2):
            if start > end or not changed & {one, other}:
                continue
            if interleaved(tensors[one], tensors[other]):
                continue
            raise CaptureError(
                f"cannot capture {model}: {one!r} and {other!r} lie in the same memory without"
                " being one parameter: a step changes both at once, and a plan would train each by"
                " itself; tie them (b.weight = a.weight), or give one a .clone()"
            )


def interleaved(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors in one storage have no byte in common though their spans cross."""
    if one.is_contiguous() and other.is_contiguous():
        return False
    taken = torch.zeros(one.untyped_storage().nbytes(), dtype=torch.bool)

    def bytes_of(tensor: Tensor) -> Tensor:
        size = tensor.element_size()
        shape, steps = (*tensor.shape, size), (*(n * size for n in tensor.stride()), 1)
        return taken.as_strided(shape, steps, tensor.storage_offset() * size)

    bytes_of(one).fill_(True)
    return not bool(bytes_of(other).any())


def check_dtypes(graph: Graph) -> None:
    """Raise `CaptureError` where torch would refuse to multiply tensors of different dtypes.

    Tracing computes shapes only, and lets such a product pass.
    """
    dtypes = {i.value.name: i.value.spec.dtype for i in graph.inputs}
    given = {i.value.name: f" ({i.target})" for i in graph.inputs}
    for node in nodes_of(graph):
        dtypes.update((v.name, v.spec.dtype) for v in node.results)
        # Attention masks may be bool.
        operands = {dtypes[name]: name for name in reversed(node.refs) if dtypes[name] != "bool"}
        if node.op in ONE_DTYPE and len(operands) > 1:
            where = ".".join(part for part in (graph.name, node.path) if part)
            line = f" ({node.source})" if node.source else ""
            found = ", ".join(f"{d}{given.get(name, '')}" for d, name in sorted(operands.items()))
            raise CaptureError(
                f"cannot capture {where}{line}: {node.op} takes tensors of one dtype, and gets"
                f" {found}; cast the model or the batch, or plan with --dtype, which casts both"
            )


def with_trained(graph: Graph) -> Graph:
    """The graph with those parameters trainable that the loss has a gradient for.

    Autograd leaves the others without one, and optimizers then leave them as they are.

    Raises: CaptureError if there are none in a training program.
    """
    if not graph.training:
        return graph
    trained = with_gradients(graph)
    wanted = [i for i in graph.inputs if i.trainable]
    if not any(i.value.name in trained for i in wanted):
        detached = "some are read, but " if readers(graph, wanted) else ""
        raise CaptureError(
            f"the loss of {graph.name} depends on no trainable parameter ({len(wanted)} are"
            f" trainable; {detached}no gradient reaches one); check requires_grad, detach, no_grad"
            " and integer operations on the way to the loss"
        )
    inputs = (replace(i, trainable=i.trainable and i.value.name in trained) for i in graph.inputs)
    return replace(graph, inputs=tuple(inputs))


def readers(graph: Graph, wanted: list[Input]) -> list[Node]:
    """The nodes that read one of these inputs."""
    names = {i.value.name for i in wanted}
    return [node for node in nodes_of(graph) if names.intersection(node.refs)]


def check_names(model: nn.Module, batch: Mapping[str, Tensor]) -> None:
    """Raise `CaptureError` for a name with control characters: plans and messages quote names."""
    modules = (name for name, _ in model.named_modules())
    tensors = (name for name, _ in (*model.named_parameters(), *model.named_buffers()))
    for name in (*modules, *tensors, *batch):
        if has_controls(name):
            raise CaptureError(
                f"cannot capture {type(model).__name__}: the name {name!a} has control characters;"
                " rename the module, tensor or key of the batch"
            )


def remarks(model: nn.Module, graph: Graph) -> tuple[str, ...]:
    """What a user should know about a captured program: parameters that no loss trains, settings of
    a Hugging Face config that were left out, and a dtype of it that the model does not have.
    """
    lines: list[str] = []
    named = getattr(getattr(model, "config", None), "dtype", None)
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
    if isinstance(named, torch.dtype) and len(dtypes) == 1 and named not in dtypes:
        planned, (made,) = str(named).removeprefix("torch."), dtypes
        lines.append(
            f"the config says {planned}, the model is planned in {str(made).removeprefix('torch.')}"
            f" (--dtype {planned} plans it as the config says)"
        )
    left_out = getattr(getattr(model, "config", None), "parloom_left_out", ())
    if left_out:
        lines.append(
            f"left out of the config: {', '.join(left_out)}; the model is planned with"
            " transformers' own classes, its weights not quantized"
        )
    if graph.training:
        lines += modes_said(model)
    trained = {i.target for i in graph.inputs if i.trainable}
    left = [n for n, p in model.named_parameters() if p.requires_grad and n not in trained]
    if left and graph.training:
        some = ", ".join(left[:3]) + (", ..." if len(left) > 3 else "")
        lines.append(
            f"{len(left)} parameters get no gradient from the loss and stay as they are: {some}"
        )
    return tuple(lines)


def modes_said(model: nn.Module) -> list[str]:
    """Where dropout and batch norm are in evaluation mode as the model is handed over."""
    found: dict[str, list[str]] = {}
    for name, module in model.named_modules():
        if module.training or (isinstance(module, _DropoutNd) and not module.p):
            continue
        for kind, what in MODED:
            if isinstance(module, kind):
                found.setdefault(what, []).append(name or type(module).__name__)
    named = ", ".join(
        f"{what} ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})"
        for what, names in found.items()
    )
    if not model.training:
        changes = (
            f"{named} differ from what it did" if named else "no dropout or batch norm is in it"
        )
        return [
            "the model was handed over in evaluation mode (eval, as from_pretrained returns it) and"
            f" is trained in training mode: {changes}; freeze parts by .eval() after model.train()"
        ]
    return [f"{named} were in evaluation mode and stay so"] if named else []


def scalars_apart(evaluation: Graph) -> tuple[str, ...]:
    """Outputs that are as a loss is and neither part of the loss nor made of it: a second one, say.

    Metrics are among them where only `detach` says so, which evaluation programs are without.
    """
    nodes = tuple(evaluation.flat())
    if not any(evaluation.loss in flat.results for flat in nodes):
        return ()
    part = {evaluation.loss}
    for flat in reversed(nodes):
        if part.intersection(flat.results):
            part.update(flat.operands)
    flows = {i.value.name for i in evaluation.inputs if i.trainable}
    made = {evaluation.loss}
    scalars: set[str] = set()
    for flat in nodes:
        if made.intersection(flat.operands):
            made.update(flat.results)
        if op_of(flat.node).differentiable and flows.intersection(flat.operands):
            for name, value in zip(flat.results, flat.node.results, strict=True):
                if value.spec.is_float:
                    flows.add(name)
                    scalars.update(() if value.spec.shape else (name,))
    return tuple(n for n, v in evaluation.outputs if v in scalars - part - made)
