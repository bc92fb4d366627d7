"""A model's programs for inference."""

from parloom.capture.forward import asked_of, capture_forward
from parloom.capture.generation import capture_generation, generates
from parloom.capture.load import Loaded
from parloom.errors import InputError
from parloom.ir.graph import Graph


def capture_inference(
    loaded: Loaded, new_tokens: int, weights: str | None = None
) -> tuple[Graph, Graph | None]:
    """The program of each token after the first and that of prompts; without `new_tokens` the
    forward pass alone. Products have `weights` in int8 or fp8 where that is said.

    Raises: InputError where the model is asked for tokens and keeps nothing between calls.
    """
    model, batch = loaded.model, loaded.batch
    if not new_tokens:
        return capture_forward(model, asked_of(model, batch), weights), None
    if not generates(model):
        raise InputError(
            f"{type(model).__name__} keeps no keys and values between calls, so that it generates"
            " no tokens; leave --new-tokens out to plan its forward pass"
        )
    made = capture_generation(model, batch, new_tokens, weights)
    return made.decode, made.prefill
