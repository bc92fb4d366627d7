"""Sizes of a small copy of a model: which of its sizes may shrink, and how far.

A size is known by the name that Hugging Face configs and zoo models give it. Ratios that make the
structure of the graph are kept: query heads per key head, head widths per width, inner width per
width, an odd vocabulary stays odd, and what is 1 stays 1 (a dim of size 1 has no factor). Every
size stays divisible by the small mesh axes that the plan puts on factors of that size.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from math import gcd, lcm
from types import MappingProxyType
from typing import Any

Need = Callable[[int], int]
Sizes = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Attempt:
    """A choice of sizes: `spread` multiplies widths, `longer` is added to the sequence, `heads`
    are kept where that is affordable, and `broad` widens what `need_of` asks for.
    """

    spread: int = 1
    longer: int = 0
    heads: bool = False
    broad: bool = False


# From the smallest on. Partial rotary positions need wider heads, fused projections more heads, and
# odd widths remove coincidences.
ATTEMPTS = (
    Attempt(),
    Attempt(spread=4, longer=4),
    Attempt(spread=4, heads=True, broad=True),
    Attempt(spread=3, longer=2, broad=True),
)
MAX_HEADS = 32

LAYERS, WIDTH, INNER, HEADS, GROUPS, HEAD_WIDTH, VOCAB, POSITIONS, WINDOW, IMAGE, PATCH = (
    "layers", "width", "inner", "heads", "groups", "head width", "vocabulary", "positions",
    "window", "image", "patch",
)  # fmt: skip

ROLES: Mapping[str, str] = MappingProxyType(
    {
        key: role
        for role, keys in (
            (LAYERS, "num_hidden_layers num_layers n_layer n_layers encoder_layers decoder_layers"
                     " num_encoder_layers num_decoder_layers depth"),
            (WIDTH, "hidden_size n_embd d_model dim embed_dim width features channels"),
            (INNER, "intermediate_size n_inner d_ff ffn_dim hidden_dim encoder_ffn_dim"
                    " decoder_ffn_dim ffn_hidden_size embedding_size inner hidden"),
            (HEADS, "num_attention_heads n_head num_heads n_heads encoder_attention_heads"
                    " decoder_attention_heads heads"),
            (GROUPS, "num_key_value_heads num_kv_heads groups"),
            (HEAD_WIDTH, "head_dim d_kv"),
            (VOCAB, "vocab_size rows"),
            (POSITIONS, "max_position_embeddings n_positions n_ctx"),
            (WINDOW, "sliding_window attention_window"),
            (IMAGE, "image_size image"),
            (PATCH, "patch_size"),
        )
        for key in keys.split()
    }
)  # fmt: skip
STAGE_LISTS = ("hidden_sizes", "embed_dims")
MIN_BATCH = 4
MIN_SEQ = 4
MIN_VOCAB = 61
MIN_IMAGE = 16


def whole(value: object) -> bool:
    """Whether a setting is a size (bool is an int in Python)."""
    return isinstance(value, int) and not isinstance(value, bool)


def by_role(values: Mapping[str, Any]) -> dict[str, int]:
    """The first size of every role; of widths, the first that the heads share where one is."""
    found: dict[str, int] = {}
    for key, value in values.items():
        if key in ROLES and whole(value) and value > 0:
            found.setdefault(ROLES[key], value)
    widths = [v for k, v in values.items() if ROLES.get(k) == WIDTH and whole(v) and v > 0]
    shared = [w for w in widths if w % found.get(HEADS, 1) == 0]
    return found | ({WIDTH: shared[0]} if shared else {})


def atoms(values: Mapping[str, Any]) -> set[int]:
    """The sizes that factors of the graph are made of."""
    found = by_role(values)
    numbers = {v for k, v in values.items() if k in ROLES and whole(v)}
    numbers |= {v for key in STAGE_LISTS for v in values.get(key) or ()}
    if HEADS in found:
        numbers.add(found[HEADS] // found.get(GROUPS, found[HEADS]))
        if WIDTH in found:
            numbers.add(found[WIDTH] // found[HEADS])
    return {n for n in numbers if n > 1}


def need_of(needs: Mapping[int, int], sizes: Collection[int], *, broad: bool) -> Need:
    """What each size must divide by, from what the axes on factors of every size need.

    A factor belongs to the sizes that it equals, else to those that it is a part of, else to those
    that are parts of it; `broad` counts the parts also where a size is equal.
    """
    result: dict[int, int] = {}
    for number, divisor in needs.items():
        owners = [number] if number in sizes and not broad else []
        owners = owners or [s for s in sizes if s % number == 0]
        owners = owners or [s for s in sizes if number % s == 0]
        for size in owners:
            result[size] = lcm(result.get(size, 1), divisor)
    return lambda size: result.get(size, 1)


def small_seq(seq: int, need: Need, attempt: Attempt) -> int:
    """The shortest sequence that divides as `seq` does, and so that one less does too."""
    limit = 4 * max(need(seq), 1) * max(need(seq - 1), 1) + MIN_SEQ
    for length in range(MIN_SEQ + attempt.longer, min(limit + attempt.longer, seq)):
        if length % need(seq) == 0 and (length - 1) % need(seq - 1) == 0:
            return length
    return seq


def small_batch(batch: int, need: Need, num_microbatches: int, apart: bool) -> int:
    """The smallest batch of at least `MIN_BATCH` that divides, or where microbatches are `apart`,
    computed by themselves, of as many for each.

    Over two samples a batch norm gives +1 and -1 whatever they are, and its gradient is noise.
    """
    unit = need(batch) * num_microbatches
    least = MIN_BATCH * num_microbatches if apart else MIN_BATCH
    return min(batch, -(-least // unit) * unit)


def small_sizes(
    values: Mapping[str, Any], layers: int, seqs: tuple[int, int], need: Need, attempt: Attempt
) -> Sizes:
    """The settings of `values` that change in the small copy, with `layers` blocks per stack.

    `seqs` is the sequence before and after: positions must hold it, and windows that are shorter
    stay shorter.
    """
    seq = seqs[1]
    result: Sizes = dict(_stacks(values, layers))
    found = by_role(values)
    made = _widths(found, need, attempt)
    used = {*made.values(), seq}
    for key, value in values.items():
        role = ROLES.get(key)
        if role is None or not whole(value) or value <= 1 or role == LAYERS:
            continue
        if role in (WIDTH, INNER):
            small = _scaled(value, found, made, need, attempt.spread, used)
        elif role == HEADS and value != found[HEADS]:
            small = made[HEADS] * lcm(1, need(value))
        elif role in made:
            small = made[role]
        elif role == VOCAB:
            small = _free(value, MIN_VOCAB, need, used)
        elif role == POSITIONS:
            small = _free(value, 2 * seq + 2, need, used)
        elif role == WINDOW and value < seqs[0]:
            small = max(2, seq // 2)
        elif role == IMAGE and PATCH not in found:
            small = lcm(MIN_IMAGE, 4 * need(value))
        else:
            continue
        used.add(small)
        if small < value:
            result[key] = small
    result |= _patches(values, found, need)
    result |= _stages(values, need)
    if "vocab_size" in result:
        result |= dict(_token_ids(values, result["vocab_size"]))
    return result


def _widths(found: Mapping[str, int], need: Need, attempt: Attempt) -> dict[str, int]:
    """Heads, key heads, head width and width, in the ratios of the model."""
    spread = attempt.spread
    if WIDTH not in found and HEADS not in found:
        return {}
    if HEADS not in found:
        return {WIDTH: lcm(8, need(found[WIDTH])) * spread}
    heads = found[HEADS]
    groups = found.get(GROUPS, heads)
    own = found.get(HEAD_WIDTH) or max(1, found.get(WIDTH, heads) // heads)
    width = found.get(WIDTH, heads * own)
    small_groups = lcm(2, need(groups)) if groups > 1 else 1
    times = lcm(2, need(heads // groups)) if heads > groups else 1
    missing = need(heads) // gcd(need(heads), small_groups * times)
    if heads > groups:
        times *= missing
    else:
        small_groups *= missing
    if attempt.heads and heads <= MAX_HEADS:
        small_groups, times = groups, heads // groups
    small_heads = small_groups * times
    # Rotary positions halve the head width, and the halves must divide too.
    small_own = 2 * lcm(2, need(own)) * spread
    if width == heads * own:
        small_own *= need(width) // gcd(need(width), small_heads * small_own)
        small_width = small_heads * small_own
    else:
        unit = lcm(2 * small_heads, need(width))
        small_width = -(-width * small_heads * small_own // (heads * own * unit)) * unit
        if small_width == small_heads * small_own:
            small_width += unit
    made = {HEADS: small_heads, HEAD_WIDTH: small_own, WIDTH: small_width}
    return made | ({GROUPS: small_groups} if GROUPS in found else {})


def _scaled(
    value: int, found: Mapping[str, int], made: Mapping[str, int], need: Need, spread: int,
    used: Collection[int],
) -> int:  # fmt: skip
    """A width in its ratio to the first one."""
    if value == found.get(WIDTH):
        return made[WIDTH]
    if WIDTH not in made:
        return lcm(8, need(value)) * spread
    unit = lcm(2, need(value))
    small = max(1, -(-value * made[WIDTH] // (found[WIDTH] * unit))) * unit
    while small in used and small * found[WIDTH] != value * made[WIDTH]:
        small += unit
    return small


def _free(value: int, least: int, need: Need, used: Collection[int]) -> int:
    """A size from `least` on that divides, is odd where `value` is, and coincides with none."""
    unit = need(value)
    small = -(-least // unit) * unit
    while small in used or (small % 2 != value % 2 and unit % 2):
        small += unit
    return small


def _stacks(values: Mapping[str, Any], layers: int) -> Iterator[tuple[str, Any]]:
    """Block counts, and lists with an entry per block."""
    counts = {v for k, v in values.items() if ROLES.get(k) == LAYERS and whole(v)}
    for key, value in values.items():
        if ROLES.get(key) == LAYERS and whole(value) and value > layers:
            yield key, layers
        elif key == "depths":
            yield key, [min(2, d) for d in value]
        elif isinstance(value, list) and len(value) in counts and len(value) > layers:
            yield key, value[:layers]


def _patches(values: Mapping[str, Any], found: Mapping[str, int], need: Need) -> Sizes:
    """An image of few small patches."""
    if IMAGE not in found or PATCH not in found:
        return {}
    patch = min(4, found[PATCH])
    rows = 2
    patches = (found[IMAGE] // found[PATCH]) ** 2
    while rows**2 % need(patches):
        rows += 1
    sizes = {IMAGE: patch * rows, PATCH: patch}
    return {k: sizes[ROLES[k]] for k, v in values.items() if ROLES.get(k) in sizes and whole(v)}


def _stages(values: Mapping[str, Any], need: Need) -> Sizes:
    """Widths of the stages of a convolutional model, in their ratios."""
    result: Sizes = {}
    for key in STAGE_LISTS:
        widths = values.get(key)
        if not widths or not all(whole(w) for w in widths):
            continue
        # A stem is narrower than the first stage, a bottleneck has a quarter of its width (ResNet).
        stem = values.get("embedding_size") or 0
        unit, common = 4 * lcm(2, *(need(w) for w in widths)), gcd(*widths, stem)
        if unit >= common:
            continue
        result[key] = [w // common * unit for w in widths]
        if stem:
            result["embedding_size"] = stem // common * unit
    return result


def _token_ids(values: Mapping[str, Any], vocab: int) -> Iterator[tuple[str, Any]]:
    """Special tokens that the small vocabulary does not have move to its end."""
    ids = {k: v for k, v in values.items() if k.endswith("_token_id")}
    every = {i for v in ids.values() for i in (v if isinstance(v, list) else [v]) if whole(i)}
    moved = {old: vocab - 1 - n for n, old in enumerate(sorted(i for i in every if i >= vocab))}
    for key, value in ids.items():
        if isinstance(value, list):
            yield key, [moved.get(i, i) for i in value]
        elif value in moved:
            yield key, moved[value]
