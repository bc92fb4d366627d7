"""Example calls of norms, attention and recurrent layers."""

from dataclasses import replace

from tests.property.operator_cases import (
    Case,
    Operand,
    buffer,
    case,
    fixed,
    flag,
    index,
    real,
)


def cases() -> list[Case]:
    return [*norms(), *low_precision(), *attention(), *recurrent()]


def norms() -> list[Case]:
    x = real(4, 6, 12)
    image = real(6, 4, 2, 6)
    statistics = (buffer(4), buffer(4))
    training = case("batch_norm", image, real(4), real(4), *statistics, True, 0.1, 1e-5)
    return [
        case("layer_norm", x, (12,), real(12), real(12), 1e-5),
        case("layer_norm", x, (6, 12), real(6, 12), label="two_dims"),
        case("layer_norm", x, (12,), label="plain"),
        case("layer_norm", x, (12,), None, real(12), 1e-3, label="bias"),
        case("rms_norm", x, (12,), real(12), 1e-5),
        case("rms_norm", x, (12,), real(12), label="default_eps"),
        case("rms_norm", x, (6, 12), label="plain"),
        replace(training, updates=(1, 2)),
        case("batch_norm", image, real(4), real(4), None, None, True, 0.1, 1e-5, label="no_stats"),
        case("batch_norm", real(12, 4), None, None, *statistics, False, 0.1, 1e-5, label="eval"),
        replace(
            case("batch_norm", real(12, 4), None, None, buffer(4), buffer(4), True, 0.3, 1e-5,
                 label="plain"),
            updates=(1, 2),
        ),
        replace(
            case("batch_norm", image, None, None, buffer(4), buffer(4), True, 1, 1e-5,
                 label="integer_momentum"),
            updates=(1, 2),
        ),
        case("_weight_norm_interface", real(4, 6, 3), real(4, 1, 1)),
        case("_weight_norm_interface", real(4, 6), real(1, 6), 1, label="last"),
        case("group_norm", real(4, 12, 6), 3, real(12), real(12), 1e-5),
        case("group_norm", real(4, 12, 6), 2, real(12), real(12), 1e-5, False, label="cudnn"),
        case("group_norm", real(2, 12, 4, 6), 6, label="plain"),
        case("group_norm", real(4, 6), 1, real(6), None, label="flat"),
        case("instance_norm", image, real(4), real(4), None, None, True, 0.1, 1e-5, False),
        case("instance_norm", image, None, None, None, None, True, 0.1, 1e-5, False,
             label="plain"),
        case("instance_norm", image, real(4), real(4), *statistics, False, 0.1, 1e-5, False,
             label="eval"),
    ]  # fmt: skip


def low_precision() -> list[Case]:
    """Norms far from zero: gradients and losses are rough, outputs are not (`test_operators`)."""

    def far(*shape: int) -> Operand:
        return Operand(shape, "far", dtype="bfloat16")

    def vector(n: int) -> Operand:
        return Operand((n,), "positive", dtype="bfloat16")

    label = "bfloat16"
    # with statistics in bfloat16 torch itself rounds the mean
    channels = [Operand((4,), "positive", role=r, dtype="float32") for r in ("parameter", "buffer")]
    norm = case(
        "batch_norm", far(6, 4, 6), channels[0], replace(channels[0]), channels[1],
        replace(channels[1]), True, 0.5, 1e-5, label=label,
    )  # fmt: skip
    found = [
        case("layer_norm", far(4, 12), (12,), vector(12), vector(12), 1e-5, label=label),
        case("rms_norm", far(4, 12), (12,), vector(12), label=label),
        replace(norm, updates=(1, 2)),
        case("softmax", far(4, 12), -1, label=label),
        case("log_softmax", far(4, 12), -1, label=label),
        case("cross_entropy_loss", far(4, 12), index(12, 4), label=label),
    ]
    return [replace(c, tolerance=0.2) for c in found]


def attention() -> list[Case]:
    op = "scaled_dot_product_attention"
    q, k, v = real(2, 4, 6, 4), real(2, 4, 6, 4), real(2, 4, 6, 4)
    wide = (real(2, 6, 4, 4), real(2, 3, 4, 4), real(2, 3, 4, 4))
    five = (real(1, 2, 6, 4, 4), real(1, 2, 3, 4, 4), real(1, 2, 3, 4, 4))
    blind = Operand((2, 1, 6, 6), "blind", role="batch", dtype="bool")  # one query sees nothing
    return [
        case(op, q, k, v),
        case(op, q, k, v, None, 0.0, True, label="causal"),
        case(op, *(real(2, 2, 8, 4) for _ in range(3)), None, 0.0, True, label="causal_stripes"),
        case(op, q, real(2, 4, 12, 4), real(2, 4, 12, 6), None, 0.0, True, label="causal_longer"),
        case(op, q, k, v, None, 0.3, label="dropout"),
        case(op, q, k, v, None, 0.3, True, label="causal_dropout"),
        case(op, q, k, v, flag(6, 6), label="mask"),
        case(op, q, k, v, fixed(2, 1, 6, 6), label="bias_per_sample"),
        case(op, q, k, v, fixed(1, 4, 1, 6), 0.3, label="bias_per_head_dropout"),
        case(op, q, k, v, flag(2, 1, 1, 6), 0.3, label="padding_dropout"),
        case(op, q, k, v, label="scale", scale=0.3),
        case(op, *wide, label="grouped", enable_gqa=True),
        case(op, *wide, None, 0.0, True, label="grouped_causal", enable_gqa=True),
        case(op, *wide, flag(2, 6, 4, 4), 0.3, label="grouped_mask_dropout", enable_gqa=True),
        case(op, *wide, flag(2, 1, 4, 4), label="grouped_mask", enable_gqa=True),
        case(op, q, k, v, blind, 0.3, label="blind_query_dropout"),
        case(op, q, k, v, blind, label="blind_query"),
        case(op, real(4, 6, 4), real(4, 6, 4), real(4, 6, 4), label="three_dims"),
        case(op, real(6, 4, 4), real(3, 4, 4), real(3, 4, 4), label="grouped_three_dims",
             enable_gqa=True),
        case(op, *five, flag(2, 6, 4, 4), label="grouped_five_dims", enable_gqa=True),
        case(op, *five, None, 0.3, True, label="grouped_five_dims_dropout", enable_gqa=True),
        case(op, real(2, 1, 6, 4), k, v, None, 0.3, label="one_query_head_dropout"),
        case(op, q, k, v, label="keyword_mask", attn_mask=flag(6, 6)),
        case(op, real(4, 6, 4), k, v, label="broadcast"),
        case(op, q, real(1, 4, 6, 4), real(2, 1, 6, 4), label="broadcast_ones"),
        *one_query(op),
    ]  # fmt: skip


def one_query(op: str) -> list[Case]:
    """Queries of one position, whose keys may be sharded."""
    q, k, v = real(2, 4, 1, 4), real(2, 4, 12, 4), real(2, 4, 12, 6)
    grouped = real(2, 6, 1, 4), real(2, 3, 12, 4), real(2, 3, 12, 4)
    blind = Operand((2, 4, 1, 12), "unseen", role="batch", dtype="bool")
    return [
        case(op, q, k, v, label="one_query"),
        case(op, q, k, v, flag(2, 1, 1, 12), label="one_query_mask", scale=0.3),
        case(op, q, k, v, fixed(1, 4, 1, 12), label="one_query_bias"),
        case(op, *grouped, flag(2, 6, 1, 12), label="one_query_grouped", enable_gqa=True),
        case(op, real(4, 1, 4), real(4, 6, 4), real(4, 6, 4), flag(1, 6), label="one_query_three"),
        case(op, q, k, v, blind, label="one_query_sees_nothing"),
    ]


def _weights(
    gates: int, width: int, hidden: int, ways: int = 1, bias: bool = True
) -> list[Operand]:
    """One layer's weights per direction."""
    rows = gates * hidden
    sizes: list[tuple[int, ...]] = [(rows, width), (rows, hidden)]
    if bias:
        sizes += [(rows,), (rows,)]
    return [real(*shape) for _ in range(ways) for shape in sizes]


def recurrent() -> list[Case]:
    x = real(3, 6, 4)
    found = []
    for name, gates in (("gru", 3), ("rnn_tanh", 1), ("rnn_relu", 1)):
        weights = tuple(_weights(gates, 4, 2))
        found.append(case(name, x, real(1, 6, 2), weights, True, 1, 0.0, True, False, False))
    states = (real(1, 6, 2), real(1, 6, 2))
    both = (real(2, 6, 2), real(2, 6, 2))
    plain = (True, 1, 0.0, True)
    ways = tuple(_weights(4, 4, 2, 2, bias=False))
    return [
        *found,
        case("lstm", x, states, tuple(_weights(4, 4, 2)), *plain, False, False),
        case("lstm", real(6, 3, 4), both, ways, False, 1, 0.0, True, True, True, label="both"),
    ]  # fmt: skip
