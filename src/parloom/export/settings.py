"""A file of settings for another framework, and the decisions of a plan that it cannot hold.

A target's module says what it can hold; the words for all that it cannot are here, once.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from parloom.export.description import Description, Kind
from parloom.ir.plan import GLOBAL
from parloom.report.folded import names_text
from parloom.rewrite.pad import Padding
from parloom.rewrite.rewrites import paddings_of

BATCH_NORMS = frozenset({"batch_norm"})


@dataclass(frozen=True, slots=True)
class Settings:
    """The name and text of a file, and what is not expressible there, in words."""

    name: str
    text: str
    missing: tuple[str, ...] = ()


def beyond(found: Description) -> Iterator[str]:
    """What no framework of degrees can hold: layouts of its own, rewrites, ranks that repeat work,
    stripes, batch norms over all devices, quantized communication.
    """
    yield from found.are(Kind.LAYOUT, Kind.ORDER, Kind.REWRITE)
    if found.chosen.copies > 1:
        yield f"{found.chosen.copies} ranks that do the same work"
    if found.chosen.striped and found.chosen.context > 1:
        yield f"stripes of positions over {found.chosen.context} context-parallel ranks"
    norms = any(flat.node.op in BATCH_NORMS for flat in found.graph.flat())
    if norms and found.chosen.data > 1 and found.plan.decisions.batch_norm == "global":
        yield "batch norm over the samples of all ranks (torch.nn.SyncBatchNorm computes so)"
    if sent := found.plan.decisions.sent_dtypes:
        yield f"gradients and gathered weights in {', '.join(sent)}"


def stages_words(found: Description) -> Iterator[str]:
    """What is irregular about the stages of a pipeline and their schedule."""
    yield from found.are(Kind.STAGES, Kind.SCHEDULE)


def pipeline_words(found: Description) -> Iterator[str]:
    """A whole pipeline, for targets without."""
    count = len(found.stages)
    if count > 1:
        cut = ", ".join(map(str, found.blocks_of_stages))
        even = "even" if found.even else "uneven"
        yield (
            f"pipeline of {count} {even} stages ({cut} blocks) over {found.chosen.pipeline} groups"
            f" of ranks, schedule {found.plan.decisions.schedule}"
        )
        yield from stages_words(found)


def padding_words(padding: Padding) -> str:
    """A padded vocabulary."""
    return f"padding of {padding.name} from {padding.size} to {padding.padded} rows"


def paddings(found: Description) -> tuple[Padding, ...]:
    """The padded vocabularies."""
    return paddings_of(found.plan.decisions.rewrites)


def recompute_words(found: Description, there: str) -> str:
    """Recomputation of some blocks or values; `there`: what the target does instead."""
    own = found.recompute
    parts = []
    if any(own.whole):
        chosen = [b for b, whole in zip(found.blocks, own.whole, strict=True) if whole]
        parts.append(names_text(chosen))
    if own.some:
        parts.append(names_text(own.some))
    return f"recomputation of {'; '.join(parts)} ({there})"


def loss_words(found: Description) -> Iterator[str]:
    """A loss that is normalized over all microbatches, for targets that average those of each."""
    decisions = found.plan.decisions
    if decisions.num_microbatches > 1 and decisions.batch_semantics == GLOBAL:
        yield (
            "a loss over the valid labels of the whole batch (the mean over microbatches there,"
            " equal where all have equally many)"
        )


def experts_words(found: Description) -> Iterator[str]:
    """Experts over ranks that are not neighbors."""
    own = found.chosen
    if own.tensor > 1 and 1 < own.expert <= own.data:
        yield (
            f"experts over {own.expert} data-parallel ranks (tensor-parallel ranks share experts"
            " there, too)"
        )


def unknown_dtype(found: Description) -> Iterator[str]:
    """Weights of a dtype that training frameworks do not have."""
    if found.dtype not in ("float32", "bfloat16", "float16"):
        yield f"weights in {found.dtype}"
