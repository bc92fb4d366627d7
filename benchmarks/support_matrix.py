"""Writes the support matrix, and its summary in the README, from what `breadth.py` found.

    python benchmarks/support_matrix.py [--check]

Reads `benchmarks/breadth.json` and replaces what is between two markers of both pages; `--check`
only says whether they would change, by exit code 1.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/breadth.json"
README = ROOT / "README.md"
PAGE = ROOT / "docs/support.md"
BEGIN = "<!-- support matrix: written by benchmarks/support_matrix.py, do not edit -->"
END = "<!-- end of support matrix -->"
BEGIN_SUMMARY = "<!-- support summary: written by benchmarks/support_matrix.py, do not edit -->"
END_SUMMARY = "<!-- end of support summary -->"
Row = dict[str, Any]
Document = dict[str, Any]
ROUNDING = 1e-5  # single precision sums in another order, where torch picks another kernel


def matrix(document: Document) -> str:
    """The lines between the markers."""
    rows: list[Row] = document["rows"]
    calls, flops = coverage(rows)
    dates = sorted(row["date"] for row in rows)
    when = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
    lines = [
        "Small copies of models, captured and trained for three steps with AdamW on four gloo ranks"
        " in float64 under",
        "`data_parallel`, `fsdp`, `megatron` at each degree and ten random plans. A plan is equal"
        " where losses, gradients,",
        "weights and buffers are those of one device to 1e-9. *Captured* compares loss and"
        " gradients of the captured program",
        "with the model's own in float32; *rule* counts what can be split over devices.",
        f"Measured by `benchmarks/breadth.py` ({when}, torch {document['torch']}, transformers"
        f" {document['transformers']}); `benchmarks/breadth.json` has",
        "the command and every plan's error.",
        "",
        "| model | captured | blocks | calls with a rule | of FLOPs | plans equal | worst error |",
        "|---|---|---|---|---|---|---|",
        *(line(row) for row in rows),
        "",
        f"Of all calls {share(calls)} have a rule, and of their FLOPs {share(flops)}.",
    ]
    return "\n".join([*lines, *unsplit(rows), *failures(rows)])


def coverage(rows: list[Row]) -> tuple[float, float]:
    """The share of all models' operator calls with a rule, and of their FLOPs.

    Each model's FLOPs weigh the same: a large model would hide what a small one cannot split.
    """
    found = [row for row in rows if "calls" in row]
    calls = sum(row["calls"] for row in found)
    ruled = sum(row["calls"] * row["rule_calls"] for row in found)
    return ruled / calls, sum(row["rule_flops"] for row in found) / len(found)


def line(row: Row) -> str:
    """One model."""
    model = row["model"].replace("zoo:", "zoo: ")
    if "failed" in row:
        return f"| {model} | no, see below | | | | | |"
    errors = [e for e in row["plans"].values() if not isinstance(e, str)]
    cells = (
        model,
        f"to {row['rounding']:.0e}" if row["rounding"] else "to the bit",
        ", ".join(f"{n} `{kind}`" for kind, n in row["kinds"].items() if kind != "(inline)"),
        f"{round(row['calls'] * row['rule_calls'])} of {row['calls']}",
        share(row["rule_flops"]),
        f"{len(errors)} of {len(row['plans'])}",
        f"{max(errors, default=0.0):.0e}",
    )
    return f"| {' | '.join(cell or '-' for cell in cells)} |"


def share(part: float) -> str:
    """A share in percent that is never rounded up to all."""
    if part == 1:
        return "100 %"
    return f"{min(part * 100, 99.999):.3f} %" if part > 0.999 else f"{part:.1%}".replace("%", " %")


def unsplit(rows: list[Row]) -> Iterator[str]:
    """A table of operators that are not split, with reasons."""
    found: dict[str, Row] = {}
    for row in rows:
        for op, rest in row.get("unsplit", {}).items():
            entry = found.setdefault(op, {"calls": 0, "most": 0.0, "models": [], "reasons": {}})
            entry["calls"] += rest["calls"]
            entry["most"] = max(entry["most"], rest["flops"] / max(row["flops"], 1.0))
            entry["models"].append(row["model"])
            entry["reasons"].update(dict.fromkeys(rest["reasons"]))
    if not found:
        return
    yield from (
        "", "These calls are never split; every rank computes them whole:", "",
        "| operator | calls | at most of a model's FLOPs | in | why |", "|---|---|---|---|---|",
    )  # fmt: skip
    for op, entry in sorted(found.items()):
        models = ", ".join(dict.fromkeys(entry["models"]))
        yield (
            f"| `{op}` | {entry['calls']} | {entry['most']:.2%} | {models} |"
            f" {'; '.join(entry['reasons'])} |"
        )


def failures(rows: list[Row]) -> Iterator[str]:
    """What is not captured or not equal, with reasons."""
    found = [text for row in rows for text in wrong(row)]
    yield from ("", "Not supported:", "", *found) if found else ("", "No plan differed or failed.")


def wrong(row: Row) -> Iterator[str]:
    """What is not as it should be in one model."""
    if "failed" in row:
        yield f"- {row['model']}: {row['failed']}"
    elif row["rounding"] > ROUNDING:
        yield f"- {row['model']}: {row['rounding_at']} differs by {row['rounding']:.0e} as captured"
    for plan, found in row.get("plans", {}).items():
        if isinstance(found, str):
            yield f"- {row['model']}, {plan}: {found}"


def summary(document: Document) -> str:
    """The matrix in a sentence."""
    rows: list[Row] = document["rows"]
    plans = [found for row in rows for found in row.get("plans", {}).values()]
    equal = sum(not isinstance(found, str) for found in plans)
    return (
        f"Small copies of {len(rows)} models were captured and trained on four ranks under"
        f" {len(plans)} plans: {equal} of these\nare equal to one device to 1e-9 in losses,"
        " gradients, weights and buffers."
    )


def updated(page: str, document: Document) -> str:
    """The page of the support matrix with that of a document of results."""
    return _between(page, BEGIN, matrix(document), END)


def summarized(readme: str, document: Document) -> str:
    """The README with the summary of a document of results."""
    return _between(readme, BEGIN_SUMMARY, summary(document), END_SUMMARY)


def _between(page: str, begin: str, text: str, end: str) -> str:
    before, rest = page.split(begin)
    _, after = rest.split(end)
    return f"{before}{begin}\n{text}\n{end}{after}"


def read(path: Path) -> Document:
    """The results in a file."""
    document: Document = json.loads(path.read_text(encoding="utf-8"))
    return document


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    document, changed = read(RESULTS), False
    for path, write in ((PAGE, updated), (README, summarized)):
        old = path.read_text(encoding="utf-8")
        new = write(old, document)
        changed |= new != old
        if not args.check:
            path.write_text(new, encoding="utf-8")
    return int(args.check and changed)


if __name__ == "__main__":
    raise SystemExit(main())
