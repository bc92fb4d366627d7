"""Caches of Hugging Face models whose memory a program is given: imported where they are needed,
since they are classes of the library.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicLayer,
    EncoderDecoderCache,
)

from parloom.capture.write_cache import write_cache


class GivenLayer(CacheLayerMixin):  # type: ignore[misc]
    """Keys and values of one layer in memory of a fixed length, `[batch, heads, length, width]`.

    In the first pass, without a `position`, queries see the new keys alone, which are all that
    there are; in later ones the whole memory, of which masks hide what is not yet written.
    """

    is_compileable = True  # masks are made by position, whatever the length
    is_sliding = False

    def __init__(self, keys: Tensor, values: Tensor, position: Tensor | None) -> None:
        super().__init__()
        self.keys, self.values, self.position = keys, values, position
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing is left to make."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        self.keys = write_cache(self.keys, 2, self.position, key_states)
        self.values = write_cache(self.values, 2, self.position, value_states)
        return (key_states, value_states) if self.position is None else (self.keys, self.values)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length if self.position is None else self.get_max_length(), 0

    def get_seq_length(self) -> int | Tensor:
        return 0 if self.position is None else self.position

    def get_max_length(self) -> int:
        return int(self.keys.shape[2])


class SeenLayer(CacheLayerMixin):  # type: ignore[misc]
    """Notes what a pass without a past would keep, and keeps nothing."""

    is_sliding = False

    def __init__(self) -> None:
        super().__init__()
        self.seen: tuple[Tensor, Tensor] | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """There is no memory."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        self.seen = key_states, value_states
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1


def growing() -> Any:
    """A cache that keeps all positions, as the library's own."""
    return Cache(layer_class_to_replicate=DynamicLayer)


def cache_of(layers: Sequence[CacheLayerMixin]) -> Any:
    """The library's cache of these layers."""
    return Cache(layers=list(layers))


def seen_layers() -> Any:
    """A cache that grows by layers that note what they would keep."""
    return Cache(layer_class_to_replicate=SeenLayer)


def cache_of_both(own: Any, crossed: Any, *, is_there: bool) -> Any:
    """The caches of a decoder's own attention and of that to an encoder, which a pass before has
    left where it `is_there`.
    """
    both = EncoderDecoderCache(own, crossed)
    both.is_updated = dict.fromkeys(range(len(own.layers)), is_there)
    return both
