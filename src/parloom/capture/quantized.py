"""Weights of products in int8 or fp8, with a scale for each output channel.

Only storage is narrow. A product casts its weight where it reads it and multiplies its result by
the scales: `linear(x, W) = linear(x, q) * scale` where `W = q * scale` and the scale belongs to an
output channel. So the programs have two parameters in the place of one, and operators that there
are anyway: layouts, prices and proofs need nothing new. A weight that anything else reads, as an
embedding that the head shares, is left as it is.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from torch import Tensor, nn

from parloom.capture.build import parameters_of
from parloom.errors import InputError
from parloom.ir.graph import (
    Dtype,
    Function,
    Graph,
    Input,
    Node,
    Ref,
    TensorSpec,
    Value,
    numbered,
)

# By the name of the flag: torch's name, and the largest value.
WEIGHTS = MappingProxyType({"int8": ("int8", 127.0), "fp8": ("float8_e4m3fn", 448.0)})
LARGEST = MappingProxyType(dict(WEIGHTS.values()))
# Behind the weight's name: no model has a tensor of that name beside the weight.
SCALE = ".scale"

# Products that are looked at: the place of the weight among their arguments, its dim of output
# channels, and the place of the bias.
PRODUCTS = MappingProxyType({"linear": (1, 0, 2), "addmm": (2, 1, 0), "mm": (1, 1, None)})


@dataclass(frozen=True, slots=True)
class _Stored:
    """A weight that becomes narrow, its dim of output channels, and the value of its scales."""

    weight: Input
    dim: int
    dtype: str
    scales: str

    @property
    def scale(self) -> Input:
        spec = self.weight.value.spec
        value = Value(self.scales, TensorSpec((spec.shape[self.dim],), spec.dtype))
        aliases = tuple(alias + SCALE for alias in self.weight.aliases)
        return replace(self.weight, value=value, target=self.weight.target + SCALE, aliases=aliases)

    @property
    def narrow(self) -> Input:
        value = self.weight.value
        return replace(
            self.weight, value=replace(value, spec=replace(value.spec, dtype=self.dtype))
        )


def quantized(graphs: Sequence[Graph], weights: str | None) -> tuple[Graph, ...]:
    """The flat programs of one model with the weights of products stored as `weights` says, alike
    in all of them, also where a program does not read them.

    Raises `InputError` where no product has a weight of its own.
    """
    if weights is None:
        return tuple(graphs)
    dims = _channels(graphs)
    if not dims:
        name = graphs[0].name
        raise InputError(f"--weights {weights}: {name} has no product with a weight of its own")
    return tuple(_narrowed(graph, dims, WEIGHTS[weights][0]) for graph in graphs)


def _narrowed(graph: Graph, dims: Mapping[str, int], dtype: str) -> Graph:
    stored: dict[str, _Stored] = {}
    inputs: list[Input] = []
    names = set(graph.main.specs())
    for entry in graph.inputs:
        inputs.append(entry)
        if entry.target in dims and entry.kind == "parameter":
            scales = f"{entry.value.name}_scale"
            while scales in names:
                scales += "_"
            names.add(scales)
            one = stored[entry.value.name] = _Stored(entry, dims[entry.target], dtype, scales)
            inputs[-1:] = one.narrow, one.scale
    body = tuple(made for node in _nodes(graph) for made in _reading(node, stored))
    values = tuple(entry.value for entry in inputs)
    main = Function(graph.main.name, values, numbered(body), graph.main.outputs)
    return replace(graph, inputs=tuple(inputs), main=main)


def _nodes(graph: Graph) -> Iterator[Node]:
    for node in graph.main.body:
        assert isinstance(node, Node), "a graph before folding"
        yield node


def _channels(graphs: Sequence[Graph]) -> dict[str, int]:
    """The dim of output channels of floating weights that only products read, all along one;
    products that scale what they add (`beta`, `alpha`) are left as they are.
    """
    found: dict[str, set[int | None]] = {}
    for graph in graphs:
        targets = {entry.value.name: entry.target for entry in graph.of_kind("parameter")}
        for name in graph.main.outputs:
            if name in targets:
                found.setdefault(targets[name], set()).add(None)
        for node in _nodes(graph):
            place, dim, _ = PRODUCTS.get(node.op, (None, None, None))
            for name in filter(targets.__contains__, node.refs):
                alone = place is not None and node.args[place] == Ref(name) and not node.kwargs
                own = dim if alone and node.refs.count(name) == 1 else None
                found.setdefault(targets[name], set()).add(own)
    specs = {e.target: e.value.spec for graph in graphs for e in graph.of_kind("parameter")}
    usual = {n for n, spec in specs.items() if spec.is_float and len(spec.shape) == 2}
    alike = ((name, next(iter(dims))) for name, dims in found.items() if len(dims) == 1)
    return {name: dim for name, dim in alike if dim is not None and name in usual}


def _reading(node: Node, stored: Mapping[str, _Stored]) -> Iterator[Node]:
    """A node, or a product with the cast before it and its scales and bias behind it."""
    place, _, at = PRODUCTS.get(node.op, (None, None, None))
    read = None if place is None else node.args[place]
    one = stored.get(read.name) if isinstance(read, Ref) else None
    if one is None or place is None:
        yield node
        return
    (result,) = node.results
    bias = None if at is None or at >= len(node.args) else node.args[at]
    steps = ("cast", "product", *(["scaled"] if bias is not None else []))
    cast, product, *scaled = (f"{result.name}_{step}" for step in steps)
    yield replace(
        node,
        op="_to_copy",
        args=(Ref(one.weight.value.name),),
        kwargs=(("dtype", Dtype(one.weight.value.spec.dtype)),),
        results=(Value(cast, one.weight.value.spec),),
    )
    operands = [Ref(cast) if i == place else arg for i, arg in enumerate(node.args) if i != at]
    op = "mm" if node.op == "addmm" else node.op
    yield replace(node, op=op, args=tuple(operands), results=(replace(result, name=product),))
    multiplied = result if bias is None else replace(result, name=scaled[0])
    factors = Ref(product), Ref(one.scale.value.name)
    yield replace(node, op="mul", args=factors, kwargs=(), results=(multiplied,))
    if bias is not None:
        terms = Ref(multiplied.name), bias
        yield replace(node, op="add", args=terms, kwargs=(), results=(result,))


# Values.


def without_scales(graph: Graph) -> Graph:
    """The graph without what a model has no tensors of: to look up those that it has."""
    scales = {name + SCALE for name in _narrow([graph])}
    return replace(graph, inputs=tuple(e for e in graph.inputs if e.target not in scales))


def stored_values(
    graphs: Sequence[Graph], read: Callable[[str], Tensor]
) -> Callable[[str], Tensor]:
    """What inputs of programs hold, by name, where `read` gives the model's own tensors."""
    narrow, dims = _narrow(graphs), _dims(graphs)
    scales = {name + SCALE: name for name in narrow}

    def stored(name: str) -> Tensor:
        if name in scales:
            return scale_of(read(scales[name]), dims[scales[name]], narrow[scales[name]])
        if name in narrow:
            return quantize(read(name), dims[name], narrow[name])
        return read(name)

    return stored


def state_of(model: nn.Module, *graphs: Graph) -> dict[str, Tensor]:
    """The tensors of all parameters and buffers of a model's programs, narrow ones made of its own;
    the first program has all of them.
    """
    own = {n: t.detach() for n, t in parameters_of(model, without_scales(graphs[0])).items()}
    read, kinds = stored_values(graphs, own.__getitem__), ("parameter", "buffer")
    return {e.target: read(e.target) for e in graphs[0].inputs if e.kind in kinds}


def round_weights(model: nn.Module, *graphs: Graph) -> None:
    """Give the model the values that its narrow weights stand for."""
    own, dims = parameters_of(model, without_scales(graphs[0])), _dims(graphs)
    with torch.no_grad():
        for name, entry in _narrow(graphs).items():
            weight, dim = own[name], dims[name]
            narrow = quantize(weight, dim, entry).to(weight.dtype)
            weight.copy_(narrow * _spread(scale_of(weight, dim, entry), dim))


def _narrow(graphs: Sequence[Graph]) -> dict[str, Input]:
    """The weights that have scales: a model may have others of a narrow dtype."""
    entries = {entry.target: entry for graph in graphs for entry in graph.of_kind("parameter")}
    return {name: entry for name, entry in entries.items() if name + SCALE in entries}


def _dims(graphs: Sequence[Graph]) -> dict[str, int]:
    """The dim of output channels of each narrow weight, as the products that read it say."""
    found: dict[str, int] = {}
    for graph in graphs:
        for name, entry in _narrow([graph]).items():
            for cast, _ in graph.uses.get(entry.value.name, ()):
                (product, _), *_ = graph.uses[cast.results[0]]
                found[name] = PRODUCTS[product.node.op][1]
    return found


def scale_of(weight: Tensor, dim: int, narrow: Input) -> Tensor:
    """What each output channel is divided by: its largest value becomes the largest there is."""
    largest = weight.abs().amax(1 - dim).to(torch.float64) / LARGEST[narrow.value.spec.dtype]
    scale = largest.to(weight.dtype)  # which may be zero now
    return torch.where(scale > 0, scale, torch.ones_like(scale))


def quantize(weight: Tensor, dim: int, narrow: Input) -> Tensor:
    """The weight in units of its scales, rounded to a narrow dtype."""
    dtype = narrow.value.spec.dtype
    units = weight.double() / _spread(scale_of(weight, dim, narrow), dim).double()
    units = units.clamp(-LARGEST[dtype], LARGEST[dtype])
    if dtype == "int8":
        return units.round().to(torch.int8)
    return units.float().to(getattr(torch, dtype))


def _spread(scale: Tensor, dim: int) -> Tensor:
    return scale[:, None] if dim == 0 else scale
