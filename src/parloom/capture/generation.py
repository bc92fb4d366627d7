"""The programs of a model that generates tokens: one for the prompt, one for each token after it.

Both are the model's own forward with memory for keys and values, which are inputs of the program of
the kind `cache` and leave it written to. The first token after the prompt comes of the prompt's
program, and every other of a pass of the decoding one.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from parloom.capture.blame import without_wrapper
from parloom.capture.build import capture_flat, without_covered
from parloom.capture.check import check_weights
from parloom.capture.hugging_face import library, quiet
from parloom.capture.program import TRACE_FAILURES
from parloom.errors import CaptureError, InputError, one_line
from parloom.ir.fold import fold
from parloom.ir.graph import CACHE, Call, Function, Graph, Input, Node, numbered, without_gradients
from parloom.ir.naming import readable

TOKENS, POSITION, LOGITS = "input_ids", "position", "logits"
IGNORED = ("labels", "attention_mask")  # of a batch for training: prompts are as long as it is


@dataclass(frozen=True, slots=True)
class Generation:
    """The programs of the prompt and of each token after it, which have the same caches."""

    prefill: Graph
    decode: Graph


@dataclass(frozen=True, slots=True)
class Memory:
    """What a model keeps of a prompt: by name, the shape of each cache with its full length."""

    caches: tuple[tuple[str, tuple[int, ...], torch.dtype], ...]

    def tensors(self, device: torch.device) -> dict[str, Tensor]:
        """Empty caches."""
        return {
            name: torch.zeros(shape, dtype=dtype, device=device)
            for name, shape, dtype in self.caches
        }


def generates(model: nn.Module) -> bool:
    """Whether a model keeps keys and values between calls, as far as its class says."""
    return "past_key_values" in signature(model.forward).parameters


def capture_generation(
    model: nn.Module, batch: Mapping[str, Tensor], new_tokens: int
) -> Generation:
    """The programs of a batch of prompts and `new_tokens` tokens after each.

    Raises: CaptureError where the model cannot be traced, or keeps nothing of a prompt; InputError
    for a batch of something else.
    """
    prompts = prompts_of(model, batch)
    check_weights(model)
    memory = memory_of(model, prompts, prompts.shape[1] + new_tokens)
    device = next(model.parameters()).device
    caches = memory.tensors(device)
    first = {TOKENS: prompts, **caches}
    later = {
        TOKENS: prompts[:, :1],
        POSITION: torch.full((), prompts.shape[1], dtype=torch.int64, device=prompts.device),
        **caches,
    }
    return Generation(*(_captured(model, given, frozenset(caches)) for given in (first, later)))


def prompts_of(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """The prompts of a batch. Raises `InputError` where there is something else beside them."""
    other = batch.keys() - {TOKENS, *IGNORED}
    if TOKENS not in batch or other:
        has = ", ".join(batch)
        raise InputError(
            f"{type(model).__name__} generates from {TOKENS!r} alone, and the batch has {has}"
        )
    return batch[TOKENS]


def memory_of(model: nn.Module, prompts: Tensor, length: int) -> Memory:
    """What a model keeps of these prompts, with room for `length` positions.

    The model is called on the meta device, where nothing is computed.
    """
    layers = import_module("parloom.capture.cache_layers")
    seen = layers.seen_layers()
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    meta = {name: tensor.detach().to("meta") for name, tensor in state.items()}
    given = {TOKENS: prompts.to("meta"), "past_key_values": seen, "use_cache": True}
    with quiet(library()), torch.device("meta"), torch.no_grad():
        try:
            functional_call(model, meta, (), given)
        except TRACE_FAILURES as err:
            what = f"cannot call {type(model).__name__} with prompts and a cache"
            raise CaptureError(f"{what}: {one_line(err)}") from err
    caches = []
    for index, layer in enumerate(seen.layers):
        for kind, tensor in zip(("key", "value"), layer.seen or (), strict=False):
            batch, heads, _, width = tensor.shape
            shape = (batch, heads, length, width)
            caches.append((f"{CACHE}_{index}_{kind}", shape, tensor.dtype))
    if not caches or len(caches) != 2 * len(seen.layers):
        raise CaptureError(f"{type(model).__name__} keeps no keys and values of its prompts")
    return Memory(tuple(caches))


class _Pass(nn.Module):
    """A call of a model with the memory that it is given; the logits of the last position."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        wanted = signature(model.forward).parameters
        self.options = {"logits_to_keep": 1} if "logits_to_keep" in wanted else {}
        self.layers = import_module("parloom.capture.cache_layers")

    def forward(
        self, input_ids: Tensor, position: Tensor | None = None, **caches: Tensor
    ) -> dict[str, Tensor]:
        names = list(caches)
        pairs = zip(names[::2], names[1::2], strict=True)
        cache = self.layers.cache_of(
            [self.layers.GivenLayer(caches[k], caches[v], position) for k, v in pairs]
        )
        given = {TOKENS: input_ids, "past_key_values": cache, "use_cache": True}
        output: Any = self.model(**given, **self.options)
        left = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]
        return {LOGITS: output.logits[:, -1:], **dict(zip(names, left, strict=True))}


def _captured(model: nn.Module, batch: Mapping[str, Tensor], caches: frozenset[str]) -> Graph:
    """One program, in which nothing is trained."""
    was = [(module, module.training) for module in model.modules()]
    with quiet(library()):
        try:
            flat, classes = capture_flat(_Pass(model).eval(), batch, training=False)
        finally:
            for module, training in was:
                module.training = training
    graph = with_caches(_unwrapped(flat, type(model).__name__), caches)
    classes = {without_wrapper(path): name for path, name in classes.items() if path}
    return without_gradients(readable(without_covered(fold(graph, classes))))


def _unwrapped(graph: Graph, name: str) -> Graph:
    """The graph under the names that the model itself gives."""

    def item(one: Node | Call) -> Node | Call:
        return replace(one, path=without_wrapper(one.path)) if isinstance(one, Node) else one

    main = replace(graph.main, body=numbered(tuple(map(item, graph.main.body))))
    inputs = tuple(
        replace(
            entry,
            target=without_wrapper(entry.target),
            aliases=tuple(map(without_wrapper, entry.aliases)),
        )
        for entry in graph.inputs
    )
    return replace(graph, name=name, main=main, inputs=inputs)


def with_caches(graph: Graph, names: frozenset[str]) -> Graph:
    """The graph with these entries of the batch as caches, and what it leaves in them as updates;
    those that nothing writes to are left as they are.
    """
    entries = {entry.target: entry for entry in graph.inputs if entry.target in names}

    def inputs() -> Iterator[Input]:
        for entry in graph.inputs:
            yield replace(entry, kind=CACHE) if entry.target in names else entry

    outputs = tuple(pair for pair in graph.outputs if pair[0] not in names)
    updates = tuple(
        (name, value)
        for name, value in graph.outputs
        if name in names and value != entries[name].value.name
    )
    returned = tuple(dict.fromkeys(value for _, value in (*outputs, *updates)))
    main = Function(graph.main.name, graph.main.inputs, graph.main.body, returned)
    return replace(graph, inputs=tuple(inputs()), main=main, outputs=outputs, updates=updates)
