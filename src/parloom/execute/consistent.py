"""Whether the operators of a graph make the results that the graph declares.

A graph may come from a file. Its operators are run as the reference runs them, on tensors without
memory: where torch refuses, or makes another shape or dtype, the error names the user's module path
before anything of the program is run. Each block kind is checked once.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from parloom.capture.operators import check_operators, is_unregistered
from parloom.errors import InputError, has_controls
from parloom.execute.experts import experts
from parloom.execute.reference import input_values, run_node, torch_argument
from parloom.ir.graph import Function, Graph, Node, TensorSpec, node_key
from parloom.ir.ops import Site, op_of
from parloom.ir.ops import experts as mixture

# torch cannot run these without values; none of them relies on what the graph declares.
NEED_VALUES = frozenset({
    "geqrf", "histogram", "istft", "repeat_interleave", "transformers.grouped_mm_fallback",
})  # fmt: skip
LOGGER = "torch._subclasses.fake_tensor"
MAX_BYTES = 1 << 48  # of one tensor: no machine holds it


def check_results(graph: Graph) -> None:
    """Raise `InputError` for the first operator that torch does not run on operands of these shapes
    with the results that the graph declares, and `VerifyError` for one that is on no list.

    Operators that the user's own code is still to register are taken at their word.
    """
    functions = (graph.main, *graph.functions)
    nodes = (i for f in functions for i in f.body if isinstance(i, Node))
    check_operators(node for node in nodes if not is_unregistered(node.op))
    _check_names(graph)
    _check_constants(graph)
    prefixes = {
        item.function: item.prefix for item in graph.main.body if not isinstance(item, Node)
    }
    with FakeTensorMode(allow_fallback_kernels=False), torch.no_grad(), _silent(LOGGER):
        for function in functions:
            _check_function(function, prefixes.get(function.name, ""))


def _check_names(graph: Graph) -> None:
    """Names are printed and quoted, so they are on one line."""
    nodes = [i for f in (graph.main, *graph.functions) for i in f.body if isinstance(i, Node)]
    calls = [i.prefix for i in graph.main.body if not isinstance(i, Node)]
    inputs = [name for i in graph.inputs for name in (i.target, *i.aliases)]
    ends = [name for name, _ in (*graph.outputs, *graph.updates)]
    texts = (text for node in nodes for text in (node.path, node.source))
    for name in (graph.name, *texts, *calls, *inputs, *ends, *graph.recompute):
        if has_controls(name):
            raise InputError(f"the graph's name {name!a} has control characters")


@contextmanager
def _silent(name: str) -> Iterator[None]:
    """Without the log of errors that are told here."""
    logger = logging.getLogger(name)
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _check_constants(graph: Graph) -> None:
    for entry in graph.of_kind("constant"):
        try:
            input_values(replace(graph, inputs=(entry,)), {})
        except (InputError, RuntimeError, TypeError, ValueError, OverflowError) as error:
            data = f"constant {entry.target!r} is no {_words([entry.value.spec])}"
            raise InputError(f"the graph's {data}: {error}") from error


def _check_function(function: Function, prefix: str) -> None:
    values = {v.name: _empty(v.spec) for v in function.inputs}
    for item in function.body:
        if isinstance(item, Node) and not (item.op in NEED_VALUES or is_unregistered(item.op)):
            made = _made(item, node_key(prefix, item), values)
        else:
            made = [_empty(v.spec) for v in item.results]
        values.update(zip((v.name for v in item.results), made, strict=True))


def _empty(spec: TensorSpec) -> Tensor:
    if spec.num_bytes > MAX_BYTES:
        raise InputError(f"the graph has a tensor {_words([spec])}, more than any machine holds")
    return torch.empty(spec.shape, dtype=getattr(torch, spec.dtype))


def _made(node: Node, key: str, values: Mapping[str, Tensor]) -> list[Tensor]:
    """The results of a call, which are as its node says."""
    run = _experts if node.op == mixture.NAME else partial(run_node, key=key, dropout=None)
    try:
        # Rules look at what torch looks at where there is memory only, or never: bounds, norms.
        op_of(node).rule(Site(node, tuple(_spec(values[name]) for name in node.refs)))
        made = run(node, values=values)
        found = [_spec(tensor) for tensor in made]
    except Exception as error:  # whatever torch raises: the arguments are a file's
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise InputError(f"the graph's {key} cannot be run: {reason[:300]}") from error
    said = [v.spec for v in node.results]
    if found != said:
        raise InputError(f"the graph's {key} makes {_words(found)}, and says {_words(said)}")
    return made


def _spec(tensor: Tensor) -> TensorSpec:
    return TensorSpec(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


def _experts(node: Node, values: Mapping[str, Tensor]) -> list[Tensor]:
    """The result of a mixture of experts whose first expert has all rows, which values decide."""
    given: list[Any] = [torch_argument(a, values) for a in node.args]
    tokens, ids, weights, known, tensors, steps = given
    counts = [ids.numel(), *[0] * (len(known) - 1)]
    return [experts(tokens, ids, weights, known, tensors, steps, counts)]


def _words(specs: Iterable[TensorSpec]) -> str:
    return ", ".join(f"{spec.dtype}{list(spec.shape)}" for spec in specs)
