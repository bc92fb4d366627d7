"""A random batch for a Hugging Face model: the inputs its forward takes, the labels of its task.

Shapes come from the config, by the names that the library gives to sizes.
"""

from collections.abc import Callable, Mapping
from inspect import signature
from math import prod
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from parloom.errors import InputError

DEFAULT_BATCH = 8
DEFAULT_SEQ = 1024
IMAGE_SIZE = 224  # ImageNet's usual crop
POSITION_KEYS = ("max_position_embeddings", "n_positions", "n_ctx", "max_source_positions")
MOST_ELEMENTS = 1 << 30  # of a batch that is made here
IGNORED = -100  # labels of this value count in no loss of the library


def make_batch(
    model: nn.Module, config: Any, batch: int | None, seq: int | None
) -> dict[str, Tensor]:
    """Random inputs and labels of the shapes that the model takes, from torch's global generator.

    Raises: InputError where its kind of input is not known here, or there is too much of it.
    """
    with torch.device("meta"):
        check_elements(random_batch(model, config, batch, seq))
    return random_batch(model, config, batch, seq)


def check_elements(batch: Mapping[str, Tensor]) -> None:
    """Raise `InputError` for a batch that is beyond what anybody makes at once."""
    if sum(t.numel() for t in batch.values()) > MOST_ELEMENTS:
        shown = ", ".join(f"{name} {list(t.shape)}" for name, t in batch.items())
        raise InputError(f"a batch of more than {MOST_ELEMENTS:,} elements ({shown}); ask for less")


def random_batch(
    model: nn.Module, config: Any, batch: int | None, seq: int | None
) -> dict[str, Tensor]:
    """As `make_batch`, of any size."""
    size = DEFAULT_BATCH if batch is None else batch
    names = tuple(signature(model.forward).parameters)
    main = str(getattr(model, "main_input_name", "input_ids"))
    wanted = [n for n in ("input_ids", "pixel_values") if n in names]
    # A model of two kinds of input that has no labels compares the one with the other.
    pair = len(wanted) == 2 and "return_loss" in names
    inputs: dict[str, Tensor] = {}
    for name in wanted if pair else (main,):
        make = INPUTS.get(name)
        if make is None:
            raise InputError(
                f"{type(model).__name__} takes {name!r}, for which no batch is made here; name a"
                " factory that returns the model with a batch (file.py:factory)"
            )
        inputs[name] = make(config, size, seq)
    return inputs | labels_for(type(model).__name__, names, config, inputs)


def text_length(config: Any, seq: int | None) -> int:
    """Tokens of a sample: `seq`, or the model's positions up to 1024."""
    text = config.get_text_config()
    limits = [getattr(text, key, None) for key in POSITION_KEYS]
    limit = next((n for n in limits if isinstance(n, int) and n > 0), None)
    if seq is not None and limit is not None and seq > limit:
        raise InputError(f"--seq {seq} is more than the model's {limit} positions")
    return seq if seq is not None else min(limit or DEFAULT_SEQ, DEFAULT_SEQ)


def token_ids(config: Any, batch: int, seq: int | None) -> Tensor:
    """Uniform token ids."""
    return torch.randint(config.get_text_config().vocab_size, (batch, text_length(config, seq)))


def pixels(config: Any, batch: int, seq: int | None) -> Tensor:
    """Normal pixels of the configured size, 224 where it takes any; frames come before colours."""
    part = part_of(config, "vision_config")
    side = getattr(part, "image_size", None) or IMAGE_SIZE
    height, width = (side, side) if isinstance(side, int) else tuple(side)
    frames = getattr(part, "num_frames", None)
    colours: int = getattr(part, "num_channels", 0) or getattr(part, "in_channels", 3)
    return torch.randn(batch, *([frames] if frames else []), colours, height, width)


def waveform(config: Any, batch: int, seq: int | None) -> Tensor:
    """A signal that the model's convolutions turn into `seq` frames, or a spectrogram."""
    part = part_of(config, "audio_config")
    bins = getattr(part, "num_mel_bins", None)
    if bins:
        return torch.randn(batch, part.max_length, bins)
    length = DEFAULT_SEQ if seq is None else seq
    pairs = zip(part.conv_kernel, part.conv_stride, strict=True)
    for kernel, stride in reversed(list(pairs)):
        length = (length - 1) * stride + kernel
    return torch.randn(batch, length)


def spectrogram(config: Any, batch: int, seq: int | None) -> Tensor:
    """Features of a signal: bins before time where the model has a fixed time, else after it."""
    part = part_of(config, "audio_config")
    keys = ("num_mel_bins", "input_feat_per_channel", "feature_projection_input_dim")
    bins = next((getattr(part, key) for key in keys if getattr(part, key, None)), None)
    if bins is None:
        raise InputError(f"a {type(config).__name__} names no number of audio features")
    positions = getattr(part, "max_source_positions", None)
    if positions and hasattr(part, "num_mel_bins") and not hasattr(part, "num_conv_layers"):
        return torch.randn(batch, bins, 2 * positions)  # a stride of two leaves one per position
    return torch.randn(batch, DEFAULT_SEQ if seq is None else seq, bins)


def part_of(config: Any, name: str) -> Any:
    """The config of one part of a model of several; the config itself where there is none."""
    return getattr(config, name, None) or config


INPUTS: Mapping[str, Callable[[Any, int, int | None], Tensor]] = MappingProxyType(
    {
        "input_ids": token_ids,
        "pixel_values": pixels,
        "input_values": waveform,
        "input_features": spectrogram,
    }
)


def labels_for(
    kind: str, names: tuple[str, ...], config: Any, inputs: dict[str, Tensor]
) -> dict[str, Tensor]:
    """What the loss compares with, by the task that the model's class name ends with."""
    first = next(iter(inputs.values()))
    size = first.shape[0]
    classes = int(getattr(config, "num_labels", 2))
    if "start_positions" in names:
        positions = {"start_positions", "end_positions"}
        return {name: torch.randint(first.shape[1], (size,)) for name in sorted(positions)}
    if "bool_masked_pos" in names:
        return {"bool_masked_pos": hidden_patches(config, size)}
    if "labels" not in names:
        return {}
    if kind.endswith("ForMultipleChoice"):
        inputs["input_ids"] = torch.stack([inputs["input_ids"]] * 2, 1)
        return {"labels": torch.randint(2, (size,))}
    if kind.endswith("Classification") and not kind.endswith("TokenClassification"):
        if classes == 1:
            return {"labels": torch.randn(size)}
        return {"labels": torch.randint(classes, (size,))}
    if kind.endswith("SemanticSegmentation"):
        return {"labels": torch.randint(classes, (size, *first.shape[-2:]))}
    if kind.endswith("ForNextSentencePrediction"):
        return {"labels": torch.randint(2, (size,))}
    labels = {"next_sentence_label": torch.randint(2, (size,))}
    labels = {name: value for name, value in labels.items() if name in names}
    if kind.endswith("TokenClassification"):
        return {"labels": torch.randint(classes, first.shape), **labels}
    if "input_ids" in inputs:
        return {"labels": inputs["input_ids"].clone(), **labels}
    text = config.get_text_config(decoder=True)
    length = min(text_limit(text), DEFAULT_SEQ)
    return {"labels": torch.randint(1, text.vocab_size, (size, length)), **labels}


def text_limit(text: Any) -> int:
    """How many tokens a decoder takes; a few where the config does not say."""
    keys = ("max_target_positions", *POSITION_KEYS)
    limits = [getattr(text, key, None) for key in keys]
    return next((n for n in limits if isinstance(n, int) and n > 0), 16)


def hidden_patches(config: Any, batch: int) -> Tensor:
    """Which patches of an image are masked: the first half of each, so that all samples agree."""
    part = part_of(config, "vision_config")
    side, patch = part.image_size, part.patch_size
    height, width = (side, side) if isinstance(side, int) else tuple(side)
    tall, wide = (patch, patch) if isinstance(patch, int) else tuple(patch)[-2:]
    frames = getattr(part, "num_frames", 0) // max(getattr(part, "tubelet_size", 1), 1) or 1
    count = prod((frames, height // tall, width // wide))
    return (torch.arange(count) < count // 2).repeat(batch, 1)
