"""Tables of `measured_forms.py`: predicted and measured forms, beside those of publications."""

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

Row = dict[str, Any]
ORIGINAL, TWICE = "original", "original, again"
KINDS = ("eager", "compiled")
# Speedup of inference in per cent over the original graph, TASO's and Tensat's.
SPEEDUPS: Mapping[str, tuple[float, float]] = MappingProxyType(
    {
        "bert": (8.5, 9.2),
        "resnext50": (5.5, 8.8),
        "inception_v3": (6.3, 10.0),
        "squeezenet": (6.7, 24.5),
        "nasrnn": (45.4, 68.9),
    }
)
# Inference on a V100 against the best of TensorFlow, XLA and TensorRT.
TASO_FACTORS: Mapping[str, float] = MappingProxyType(
    {"bert": 1.5, "resnext50": 3.1, "inception_v3": 1.1, "squeezenet": 1.3}
)
SOURCES = (
    "Published: `taso` and `tensat` are times of inference to the original graph's, from the"
    " speedups in the table of Tensat's authors (Yang et al., MLSys'21, arXiv:2101.01332;"
    " mwillsey.com/papers/tensat: Runtime Speedup (%), TASO and Tensat); `TASO vs. frameworks` is"
    " the figure in TASO's README (github.com/jiazhihao/TASO; Jia et al., SOSP'19, says up to"
    " 2.8x): V100, against the best of TensorFlow, XLA and TensorRT. Weights are put together ahead"
    " of time there, and in every step here."
)
# Predictions within a thousandth of 1 say nothing.
NOISE = 1e-3


def tables(rows: Sequence[Row]) -> str:
    """One table a mode, and lines on where a prediction has the wrong sign."""
    parts = []
    for mode in dict.fromkeys(row["mode"] for row in rows):
        own = [row for row in rows if row["mode"] == mode]
        parts.append(f"### {mode.capitalize()}\n\n" + "\n".join(_table(own)))
    parts.append(SOURCES)
    parts.append("Rules:\n\n" + ("\n".join(_rules(rows)) or "- none"))
    parts.append(
        "Predicted faster and measured slower, or the other way around:\n\n"
        + ("\n".join(f"- {line}" for line in wrong(rows)) or "- none")
    )
    return "\n\n".join(parts)


def _table(rows: Sequence[Row]) -> Iterator[str]:
    kinds = [kind for kind in KINDS if any(kind in row for row in rows)]
    measured = "".join(f" {kind} ms (quartiles) | to original (95 %) |" for kind in kinds)
    yield f"| model | form | rules | predicted ms | to original |{measured} published |"
    yield "|---|---|---|---|---|" + "---|---|" * len(kinds) + "---|"
    for row in rows:
        original = _original(rows, row)
        if row["form"] == TWICE:
            words = ["noise", "", ""]
        else:
            named = ", ".join(f"{rule} x{count}" for rule, count in row["rules"].items())
            words = [named or "-", f"{1e3 * row['predicted_s']:.1f}",
                     f"{row['predicted_s'] / original['predicted_s']:.3f}"]  # fmt: skip
        for kind in kinds:
            words += _measured(row.get(kind))
        yield f"| {row['model']} | {row['form']} | " + " | ".join((*words, published(row))) + " |"


def _original(rows: Sequence[Row], row: Row) -> Row:
    key = row["model"], row["mode"]
    return next(own for own in rows if (own["model"], own["mode"]) == key)


def _measured(found: Row | None) -> list[str]:
    if found is None:
        return ["", ""]
    low, high = found["quartiles_s"]
    ratio, least, most = found["ratio"]
    return [
        f"{1e3 * found['s']:.1f} ({1e3 * low:.1f} .. {1e3 * high:.1f})",
        f"{ratio:.3f} ({least:.3f} .. {most:.3f})",
    ]


def published(row: Row) -> str:
    """Of the model: ratios to the original that publications have of this form's method."""
    words, known = [], SPEEDUPS.get(row["model"])
    names = row["form"].split(", ")
    for name, percent in zip(("taso", "tensat"), known or (), strict=False):
        if name in names:
            words.append(f"{name} {1 / (1 + percent / 100):.3f}")
    factor = TASO_FACTORS.get(row["model"])
    if "taso" in names and factor is not None:
        words.append(f"TASO vs. frameworks {1 / factor:.2f}")
    return "; ".join(words)


def wrong(rows: Sequence[Row]) -> Iterator[str]:
    """Forms of which prediction and measurement say the opposite, both beyond noise."""
    for row in rows:
        predicted = row["predicted_s"] / _original(rows, row)["predicted_s"]
        for kind in KINDS:
            if kind not in row or row["form"] == TWICE:
                continue
            ratio, least, most = row[kind]["ratio"]
            slower = predicted < 1 - NOISE and least > 1
            faster = predicted > 1 + NOISE and most < 1
            if slower or faster:
                yield (
                    f"{row['model']}, {row['mode']}, {kind}, {row['form']}: predicted"
                    f" {predicted:.3f}, measured {ratio:.3f} ({least:.3f} .. {most:.3f})"
                )


def _rules(rows: Sequence[Row]) -> Iterator[str]:
    """The rewrites of each form, in words of the plan."""
    for row in rows:
        if row["rewrites"] and row["form"] != TWICE:
            yield f"- {row['model']}, {row['mode']}, {row['form']}:"
            for text in row["rewrites"]:
                yield f"  - `{text[:200]}`"
