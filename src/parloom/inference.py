"""From a model to its programs for inference."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from parloom import arguments
from parloom.capture import fingerprint, load_abstract, load_model
from parloom.capture.ambient import Settings, settings
from parloom.capture.generation import has_encoder
from parloom.capture.inference import capture_inference
from parloom.capture.load import full_name
from parloom.capture.quantized import WEIGHTS
from parloom.capture.ranges import Ranges, ranges_of
from parloom.errors import CaptureError, InputError
from parloom.execute.consistent import check_results
from parloom.execute.eager import PLAN
from parloom.execute.eager_compare import DIFFERS, EQUAL
from parloom.execute.eager_inference import compare_inference
from parloom.execute.tables import check_tables
from parloom.ir.factors import factorize
from parloom.ir.generation import GENERATED, TOKENS
from parloom.ir.graph import CACHE, Graph
from parloom.ir.plan import (
    DTYPES,
    ModelSource,
)
from parloom.ir.samples import num_samples

Say = Callable[[str], None]
NO_TOKENS = 0  # of a model that is asked for one pass


@dataclass(frozen=True, slots=True)
class Captured:
    """The programs of a model for inference: of each token and of prompts, or of one pass."""

    source: ModelSource
    fingerprint: str
    graph: Graph
    prefill: Graph | None
    new_tokens: int
    steps: int
    weights: str | None
    assumptions: tuple[str, ...]
    notes: tuple[str, ...]
    seed: int
    settings: Settings
    ranges: Ranges

    @property
    def samples(self) -> int:
        """Answers that are worked on at once."""
        return num_samples(factorize(self.graph))

    @property
    def cache_bytes(self) -> int:
        """Bytes of all caches, on all devices together."""
        return sum(entry.value.spec.num_bytes for entry in self.graph.of_kind(CACHE))


def capture(
    model: str,
    *,
    batch: int | None = None,
    seq: int | None = None,
    dtype: str | None = None,
    new_tokens: int | None = None,
    steps: int | None = None,
    weights: str | None = None,
    seed: int = 0,
    progress: Say,
) -> Captured:
    """Build the model, capture its programs, and compare them with the module itself.

    `new_tokens` are generated after each prompt; without them the model makes one pass, or as many
    `steps` as a sampler of a diffusion model asks for. `weights` "int8" or "fp8" is how those of
    products are stored. Raises `InputError` where it keeps no caches and is asked for tokens.
    """
    arguments.check(model, {"batch": batch, "seq": seq, "dtype": dtype, "seed": seed})
    check_answer(new_tokens, steps, weights)
    source = ModelSource(full_name(model), batch, seq, DTYPES.get(dtype, dtype) if dtype else None)
    built = {"batch": batch, "seq": seq, "dtype": source.dtype, "seed": seed}
    progress(f"building {model}")
    # Without weights where that can be: caches may be larger than this machine.
    loaded = load_abstract(model, **built, limit=0)  # type: ignore[arg-type]
    progress(f"capturing {'the programs of prompts and of tokens' if new_tokens else 'a pass'}")
    graph, prefill = capture_inference(loaded, new_tokens or 0, weights)
    for program in (graph, *([prefill] if prefill else [])):
        check_results(program)
    check_positions(graph, prefill, new_tokens or 0)
    progress("comparing with the module itself")
    eager = compare_inference(
        lambda: load_model(source.spec, **built),  # type: ignore[arg-type]
        graph,
        prefill,
        new_tokens or 0,
        PLAN,
    )
    if eager.outcome == DIFFERS:
        raise CaptureError(f"cannot capture {type(loaded.model).__name__}: {eager}")
    said = (str(eager),)
    equal, other = (said, ()) if eager.outcome == EQUAL else ((), said)
    entries = (prefill or graph).of_kind("batch")
    shapes = ", ".join(f"{e.target} {list(e.value.spec.shape)}" for e in entries)
    return Captured(
        source,
        fingerprint(loaded.model, loaded.batch),
        graph,
        prefill,
        new_tokens or NO_TOKENS,
        steps or 1,
        weights,
        (*equal, f"batch as built: {shapes}"),
        (*other, *positions_beyond(loaded.model, prefill, new_tokens or 0)),
        seed,
        settings(),
        ranges_of(loaded.batch),
    )


def check_positions(graph: Graph, prefill: Graph | None, new_tokens: int) -> None:
    """Raise `InputError` where a program reads what a table of the model does not have: of the
    program of tokens in its last pass.
    """
    if prefill is None:
        check_tables(graph, {}, "the batch is larger than the model has room for")
        return
    check_tables(prefill, {}, "prompts are longer than the model has positions; shorten them")
    if new_tokens > 1:
        few = "prompts and tokens are more than the model has positions; ask for fewer"
        check_tables(graph, {GENERATED: torch.tensor(new_tokens - 1)}, f"{few} (--new-tokens)")


def positions_beyond(
    model: torch.nn.Module, prefill: Graph | None, new_tokens: int
) -> tuple[str, ...]:
    """A note where a model computes positions, as by rotations, beyond those of its config."""
    config = getattr(model, "config", None)
    inner = getattr(config, "get_text_config", lambda: config)()
    most = getattr(inner, "max_position_embeddings", None)
    if prefill is None or not isinstance(most, int):
        return ()
    prompts = (e.value.spec.shape[-1] for e in prefill.of_kind("batch") if e.target == TOKENS)
    read, made = max(prompts, default=0), new_tokens - 1
    longest = max(read, made) if has_encoder(model) else read + made
    if longest <= most:
        return ()
    return (
        f"{longest} positions are read, and the model is made for {most} (max_position_embeddings):"
        " answers may be worse",
    )


def check_answer(new_tokens: int | None, steps: int | None, weights: str | None) -> None:
    """Raise `InputError` for an answer that is none."""
    for flag, count in (("--new-tokens", new_tokens), ("--steps", steps)):
        if count is not None and count < 1:
            raise InputError(f"{flag}: must be a whole number from 1 on, got {count}")
    if weights is not None and weights not in WEIGHTS:
        raise InputError(f"--weights: none is {weights!r}; there are {', '.join(WEIGHTS)}")
    if new_tokens and steps:
        raise InputError("--steps are passes of a model that generates no tokens; leave one out")
