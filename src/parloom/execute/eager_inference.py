"""Captured programs of inference beside the user's own module, on the numbers of the planned batch.

The module is built once more and called as its users call it: with a cache of the library that
grows, or in one pass. The tokens are those that it finds the likeliest itself.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from parloom.capture import Loaded, named_tensors
from parloom.capture.forward import asked_of
from parloom.capture.generation import has_encoder, prompts_of, starts_of
from parloom.capture.quantized import round_weights, state_of
from parloom.execute.eager import Limits, is_small
from parloom.execute.eager_compare import (
    DIFFERS,
    EQUAL,
    NOT_COMPARED,
    EagerReport,
    tolerance_of,
)
from parloom.execute.inference import FLOOR, PROVED_TOKENS, one_pass, replayed
from parloom.execute.relative import Difference, judged, relative_difference
from parloom.ir.generation import TOKENS
from parloom.ir.graph import Graph

LARGE = "the model is large; --shrink compares a small copy"
DRAWN = 0.1  # the standard deviation of what is added to parameters that are all alike
Tensors = Mapping[str, Tensor]


def compare_inference(
    build: Callable[[], Loaded],
    graph: Graph,
    prefill: Graph | None,
    new_tokens: int,
    limits: Limits,
) -> EagerReport:
    """How the captured programs compare with the module, which `build` makes with its weights."""
    started = time.monotonic()
    if not is_small(graph if prefill is None else prefill, limits):
        return EagerReport(NOT_COMPARED, LARGE)
    dtype, tolerance = tolerance_of(graph)
    loaded = build()
    model = drawn(loaded.model).eval()
    graphs = (graph,) if prefill is None else (graph, prefill)
    state = state_of(model, *graphs)
    round_weights(model, *graphs)
    with torch.no_grad():
        if prefill is None:
            pairs = list(_forward_pairs(model, state, loaded.batch, graph))
            calls = 1
        else:
            calls = min(PROVED_TOKENS, new_tokens)
            prompts = prompts_of(model, loaded.batch)
            pairs = list(_generated_pairs(model, state, prompts, (prefill, graph), calls))
    compared = judged(
        (Difference(n, relative_difference(e, g, FLOOR)) for n, e, g in pairs), tolerance
    )
    return EagerReport(
        EQUAL if compared.first is None else DIFFERS,
        difference=str(compared.first or ""),
        worst=compared.worst,
        worst_tensor=compared.worst_tensor,
        dtype=dtype,
        tolerance=tolerance,
        calls=calls,
        num_tensors=compared.num_tensors,
        seconds=time.monotonic() - started,
    )


def drawn(model: nn.Module) -> nn.Module:
    """The model, whose parameters of one value alone are drawn: biases and gates that start at zero
    and norms that start at one would hide that a program leaves them out or adds them twice.
    """
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            first = parameter.flatten()[:1]
            if parameter.is_floating_point() and bool((parameter == first).all()):
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.add_((noise * DRAWN).to(parameter))
    return model


def _forward_pairs(
    model: nn.Module, state: Tensors, batch: Tensors, graph: Graph
) -> Iterator[tuple[str, Tensor, Tensor | None]]:
    """What the module makes of a batch beside what the program does."""
    outputs = one_pass(graph, state, batch, {})[0]
    made = dict(named_tensors(model(**asked_of(model, batch))))
    for name, _ in graph.outputs:
        yield f"output {name}", made[name], outputs.get(name)


def _generated_pairs(
    model: nn.Module,
    state: Tensors,
    prompts: Tensor,
    graphs: tuple[Graph, Graph],
    count: int,
) -> Iterator[tuple[str, Tensor, Tensor | None]]:
    """Logits of the module with a cache that grows beside those of both programs, and what is in
    the caches.
    """
    layers = import_module("parloom.capture.cache_layers")
    own, crossed = layers.growing(), layers.growing()
    called: dict[str, Any] = {"past_key_values": own, "use_cache": True}
    given = prompts
    if has_encoder(model):
        given = starts_of(model, prompts)
        called["past_key_values"] = layers.cache_of_both(own, crossed, is_there=False)
        called[TOKENS] = prompts
    expected, tokens = list[Tensor](), list[Tensor]()
    name = "decoder_input_ids" if has_encoder(model) else TOKENS
    for _ in range(count):
        expected.append(model(**called | {name: given}).logits[:, -1])
        given = expected[-1].argmax(-1, keepdim=True)
        tokens.append(given)
    logits, caches = replayed(*graphs, state, prompts, tokens)
    for number, (one, other) in enumerate(zip(expected, logits, strict=True), 1):
        yield f"logits of token {number}", one, other
    kept = [*own.layers, *crossed.layers]
    there = [t for layer in kept for t in (layer.keys, layer.values)]
    for (what, found), one in zip(caches.items(), there, strict=True):
        yield f"{what} after {count} tokens", one, found[:, :, : one.shape[2]]
