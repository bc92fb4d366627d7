"""The pipeline schedule of a published run, from the columns of its row that are free text.

Columns say it in the words of papers and flags: `ZB-2p`, `1F1B-I`, `schedule=GPipe`. "Zero bubble"
alone is the name of a framework, in which its paper's baselines run, too.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from parloom.ir.schedules import SPLIT, round_of

INTERLEAVED = "interleaved_1f1b"
# The first that a text has decides: shorter names are parts of longer ones.
NAMES = (
    ("zb_h1", r"\bzb[-_ ]?h1\b"),
    ("zb_h2", r"\bzb[-_ ]?h2\b"),
    ("zb_1p", r"\bzb[-_ ]?1p\b"),
    ("zb_2p", r"\bzb[-_ ]?2p\b"),
    # Chunks in the shape of a V (Qi et al., arXiv:2405.15362), and torch's interleaved one.
    ("zb_v", r"\bzb[-_ ]?v|interleaved[-_ ]?zero[-_ ]?bubble"),
    # With conditions: how many chunks there are says it.
    ("1f1b", r"interleav\w* (?:where|if|when)|(?:no|not|without) interleav"),
    (INTERLEAVED, r"\b1f1b[-_ ]?(?:i\b|interleav|vpp)|interleaved?[-_ ]?1f1b"),
    (INTERLEAVED, r"interleaved (?:pipeline|schedule)|interleav\w+ 1f1b|schedule ?= ?interleaved"),
    ("1f1b", r"\b1f1b|pipedream[-_ ]?flush"),
    ("gpipe", r"\bgpipe|\bafab\b|all[-_ ]forward[-_ ]all[-_ ]backward"),
)
# Where a plan, a framework and remarks say different things, the plan's word counts.
COLUMNS = ("other_plan", "framework", "notes")
ASKED = re.compile(r"\bschedule ?[=:] ?[^;,|]*")
VALIDATED = re.compile(r"(no |not |without |w/o )?(?:optimizer )?post[-_ ]?validation")


@dataclass(frozen=True, slots=True)
class RowSchedule:
    """The schedule of a configuration; `assumed` is what the row does not say."""

    name: str = ""
    chunks: int = 1
    synchronizes: bool = True
    assumed: tuple[str, ...] = ()


def schedule_of(
    row: Mapping[str, str], pipeline: int, num_microbatches: int, layers: int
) -> RowSchedule:
    """How a row's pipeline runs: what it names, otherwise 1F1B in the chunks that it states."""
    if pipeline == 1:
        return RowSchedule()
    texts = [(row.get(column) or "").lower() for column in COLUMNS]
    name = next(filter(None, map(_named, texts)), "")
    stated = (row.get("vpp") or "").strip()
    chunks = round(float(stated)) if re.fullmatch(r"\d+(?:\.0*)?", stated) else 0
    if name in SPLIT or name == "zb_v":
        like = ("ZB-1p, whose memory it has",) if name == "zb_v" else ()
        # Zero-bubble's own Megatron validates after the update; others wait for the norm.
        said = VALIDATED.search(" ".join(texts))
        validates = not said[1] if said else "torch" not in texts[1]
        return RowSchedule("zb_1p" if like else name, 1, not validates, like)
    if name == "gpipe":
        return RowSchedule(name)
    assumed: list[str] = []
    if name == INTERLEAVED and not chunks:
        # One block a chunk; embedding and loss stand for one each where they must.
        chunks = next(
            (n // pipeline for n in (layers, layers + 2) if not n % pipeline), layers // pipeline
        )
        assumed.append(f"{chunks} chunks a rank")
    if chunks <= 1:
        return RowSchedule("1f1b" if name else "", assumed=tuple(assumed))
    if num_microbatches % pipeline:
        assumed.append(f"rounds of {round_of(pipeline, num_microbatches)} microbatches")
    return RowSchedule("", chunks, assumed=tuple(assumed))


def _named(text: str) -> str:
    """The schedule that a text names: where it sets one, that."""
    asked = ASKED.search(text)
    for said in ([asked[0]] if asked else []) + [text]:
        for name, pattern in NAMES:
            if re.search(pattern, said):
                return name
    return ""
