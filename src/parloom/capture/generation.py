"""The programs of a model that generates tokens: one for the prompt, one for each token after it.

Both are the model's own forward with memory for keys and values, which are inputs of the program of
the kind `cache` and leave it written to. The first token after the prompt comes of the prompt's
program, and every other of a pass of the decoding one. Where an encoder reads the prompt, the
decoder begins with its start token in that first pass, and the encoder's keys are kept, too.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from parloom.capture.blame import without_wrapper
from parloom.capture.build import capture_flat, without_covered
from parloom.capture.check import check_weights
from parloom.capture.hugging_face import library, quiet
from parloom.capture.program import TRACE_FAILURES, mode
from parloom.capture.quantized import quantized
from parloom.errors import CaptureError, InputError, one_line
from parloom.ir.fold import fold
from parloom.ir.generation import GENERATED, LOGITS, TOKENS
from parloom.ir.graph import CACHE, Call, Function, Graph, Input, Node, numbered, without_gradients
from parloom.ir.naming import readable

CROSS = "cross"  # caches of what an encoder made
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
    model: nn.Module, batch: Mapping[str, Tensor], new_tokens: int, weights: str | None = None
) -> Generation:
    """The programs of a batch of prompts and `new_tokens` tokens after each.

    Raises: CaptureError where the model cannot be traced, or keeps nothing of a prompt; InputError
    for a batch of something else.
    """
    prompts = prompts_of(model, batch)
    check_weights(model)
    memory = memory_of(model, prompts, new_tokens)
    device = next(model.parameters()).device
    caches = memory.tensors(device)
    first = {TOKENS: prompts, **caches}
    count = torch.ones((), dtype=torch.int64, device=prompts.device)
    later = {TOKENS: prompts[:, :1], GENERATED: count, **caches}
    length = prompts.shape[1]
    try:
        traced = [_flat(model, given, length) for given in (first, later)]
    except CaptureError as error:
        # Some cut positions out of all by how many there were before, unless they are given some;
        # not all count these from 0, so that they are given where nothing else goes.
        if "position_ids" not in signature(model.forward).parameters or has_encoder(model):
            raise
        try:
            traced = [_flat(model, given, length, tells=True) for given in (first, later)]
        except CaptureError:
            raise error from None
    flat, classes = zip(*traced, strict=True)
    made = quantized(flat, weights)
    prefill, decode = map(partial(_folded, frozenset(caches)), made, classes)
    return Generation(prefill, decode)


def prompts_of(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """The prompts of a batch. Raises `InputError` where there is something else beside them."""
    mask = batch.get("attention_mask")
    if mask is not None and not mask.is_meta and not bool(mask.bool().all()):
        raise InputError(
            "attention_mask hides a part of the prompts: prompts are not padded; give a batch of"
            " equal lengths"
        )
    other = batch.keys() - {TOKENS, *IGNORED}
    if TOKENS not in batch or other:
        has = ", ".join(batch)
        raise InputError(
            f"{type(model).__name__} generates from {TOKENS!r} alone, and the batch has {has}"
        )
    return batch[TOKENS]


def has_encoder(model: nn.Module) -> bool:
    """Whether an encoder reads the prompts."""
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


def starts_of(model: nn.Module, prompts: Tensor) -> Tensor:
    """What a decoder behind an encoder begins with."""
    config: Any = model.config
    return torch.full_like(prompts[:, :1], int(config.decoder_start_token_id))


def memory_of(model: nn.Module, prompts: Tensor, new_tokens: int) -> Memory:
    """What a model keeps of these prompts and so many tokens after each.

    The model is exported, as its programs are: some of it (experts, masks) is written for that and
    for numbers, and not for tensors of the meta device.
    """
    layers = import_module("parloom.capture.cache_layers")
    own, crossed = layers.seen_layers(), layers.seen_layers()
    given: dict[str, Any] = {TOKENS: prompts, "use_cache": True}
    # The last token is not read again: its position is there because a prompt and its tokens
    # together divide over devices more often than all but one of them do.
    length, kinds = prompts.shape[1] + new_tokens, {CACHE: own}
    if has_encoder(model):
        length, kinds = new_tokens, {CACHE: own, CROSS: crossed}
        given |= {"decoder_input_ids": starts_of(model, given[TOKENS])}
    both = layers.cache_of_both(own, crossed, is_there=False)
    with quiet(library()), mode(model, training=False), torch.no_grad():
        try:
            torch.export.export(_First(model, both if has_encoder(model) else own), (), given)
        except TRACE_FAILURES as err:
            what = f"cannot call {type(model).__name__} with prompts and a cache"
            raise CaptureError(f"{what}: {one_line(err)}") from err
    caches = []
    for kind, found in kinds.items():
        for index, layer in enumerate(found.layers):
            for part, tensor in zip(("key", "value"), layer.seen or (), strict=False):
                batch, heads, there, width = tensor.shape
                shape = (batch, heads, there if kind == CROSS else length, width)
                caches.append((f"{kind}_{index}_{part}", shape, tensor.dtype))
    if not caches or len(caches) != 2 * sum(len(found.layers) for found in kinds.values()):
        raise CaptureError(f"{type(model).__name__} keeps no keys and values of its prompts")
    return Memory(tuple(caches))


class _First(nn.Module):
    """A call of a model with a cache that notes what it is told; the logits."""

    def __init__(self, model: nn.Module, cache: Any) -> None:
        super().__init__()
        self.model, self.cache = model, cache

    def forward(self, **given: Any) -> Tensor:
        output: Any = self.model(**given, past_key_values=self.cache)
        logits: Tensor = output.logits
        return logits


class _Pass(nn.Module):
    """A call of a model with the memory that it is given; the logits of the last position.

    `generated`: how many tokens there are after the prompts, the last of which is read. A model
    that is not told (`tells`) which positions these are counts what it has read before.
    """

    def __init__(self, model: nn.Module, length: int, tells: bool) -> None:
        super().__init__()
        self.model, self.length = model, length
        wanted = signature(model.forward).parameters
        self.options = {"logits_to_keep": 1} if "logits_to_keep" in wanted else {}
        self.tells = tells
        self.layers = import_module("parloom.capture.cache_layers")

    def forward(
        self, input_ids: Tensor, generated: Tensor | None = None, **caches: Tensor
    ) -> dict[str, Tensor]:
        encodes = has_encoder(self.model)
        before = 0 if encodes else self.length - 1
        position = None if generated is None else generated + before
        made = {
            kind: self._cache({n: t for n, t in caches.items() if n.startswith(kind)}, at)
            for kind, at in {CACHE: position, **({CROSS: None} if encodes else {})}.items()
        }
        given: dict[str, Any] = {TOKENS: input_ids, "past_key_values": made[CACHE]}
        if self.tells:
            places = torch.arange(input_ids.shape[1], device=input_ids.device)
            given["position_ids"] = (places if position is None else places + position)[None]
        if encodes:
            given = self._decoding(input_ids, generated is not None)
            both = self.layers.cache_of_both(*made.values(), is_there=generated is not None)
            given["past_key_values"] = both
        output: Any = self.model(**given, use_cache=True, **self.options)
        left = [
            t for own in made.values() for layer in own.layers for t in (layer.keys, layer.values)
        ]
        return {LOGITS: output.logits[:, -1:], **dict(zip(caches, left, strict=True))}

    def _cache(self, tensors: Mapping[str, Tensor], position: Tensor | None) -> Any:
        pairs = zip(*[iter(tensors.values())] * 2, strict=True)
        return self.layers.cache_of([self.layers.GivenLayer(k, v, position) for k, v in pairs])

    def _decoding(self, input_ids: Tensor, later: bool) -> dict[str, Any]:
        """The prompts and the decoder's start, or a token alone: what the encoder made of the
        prompts is in the caches, and only its length is looked at.
        """
        if not later:
            return {TOKENS: input_ids, "decoder_input_ids": starts_of(self.model, input_ids)}
        dtype = next(self.model.parameters()).dtype
        encoded = torch.zeros(
            (len(input_ids), self.length, 1), dtype=dtype, device=input_ids.device
        )
        return {"decoder_input_ids": input_ids, "encoder_outputs": (encoded,)}


def _flat(
    model: nn.Module, batch: Mapping[str, Tensor], length: int, *, tells: bool = False
) -> tuple[Graph, dict[str, str]]:
    """One program before folding, and the class of every module path."""
    was = [(module, module.training) for module in model.modules()]
    with quiet(library()):
        try:
            flat, classes = capture_flat(_Pass(model, length, tells).eval(), batch, training=False)
        finally:
            for module, training in was:
                module.training = training
    classes = {without_wrapper(path): name for path, name in classes.items() if path}
    return _unwrapped(flat, type(model).__name__), classes


def _folded(caches: frozenset[str], flat: Graph, classes: dict[str, str]) -> Graph:
    """The program with its caches, in which nothing is trained."""
    graph = with_caches(flat, caches)
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
