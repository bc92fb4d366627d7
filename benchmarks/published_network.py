"""The network between nodes that a published run's row describes in its own words."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from parloom.cost.devices import Network, find_interconnect

# Words of a fabric, and its kind of link; the first that a text has decides. TCP over the NICs of a
# cloud (GPUDirect-TCPX, gVNIC) and Slingshot are Ethernet; the latter carries RDMA.
FABRICS = (
    (r"omni-?path|\bopa\b", "Omni-Path"), (r"\befa", "EFA"), (r"tcp|gvnic|gve", "Ethernet"),
    (r"ro?ce|rdma|slingshot|spectrum-?x|e-w|\bew\b", "RoCE"),
    (r"\bib\b|infiniband|quantum|\bhdr|\bndr|\bedr|\bxdr|\bfdr", "InfiniBand"),
    (r"ethernet|gbe\b", "Ethernet"), (r"\bdcn\b", "DCN"),
)  # fmt: skip
# Gbit/s of a port by its generation (InfiniBand Trade Association, roadmap: 4x links).
GENERATIONS = (
    (r"ndr ?200", 200), (r"hdr ?100", 100), (r"xdr", 800), (r"ndr", 400), (r"hdr", 200),
    (r"edr", 100), (r"fdr", 56),
)  # fmt: skip
# Gbit/s that ports have: what is written as bytes is bits where it is one of these.
PORTS = frozenset({1, 10, 25, 40, 50, 56, 100, 200, 400, 800, 1600})
# Gbit/s of one port where a node's total is told and no number of ports.
USUAL_PORT = 100
RATE = re.compile(r"(\d+(?:\.\d+)?) ?(T|G) ?(b|B)(?:it|yte|E)?s? ?(?:/ ?s(?:ec)?|/Sec|ps)?\b")
COUNT = re.compile(r"(\d+) ?[x\u00d7]|(\d+)(?= (?:ports|nics|hcas|ndr|hdr|edr)\b)", re.IGNORECASE)
WORDS = {"two": "2", "four": "4", "eight": "8"}
EACH_DEVICE = re.compile(
    r"^\W*(?:[a-z0-9-]+ ){0,2}(?:per|each|/) ?(?:gpu|device|accelerator|rank|chip)"
)
EACH_NODE = re.compile(
    r"^\W*(?:[a-z0-9-]+ ){0,2}(?:per|/|each|a) ?(?:node|server|host|vm|machine|tray)"
)
LABEL = re.compile(r"\b(storage|management|compute)\b[^:,]*: ?")


@dataclass(frozen=True, slots=True)
class Rate:
    """`count` ports of `gbit_per_s` each; of all devices together, of each, or of the node."""

    count: int
    gbit_per_s: float
    each_device: bool = False
    of_node: bool = False


def network(row: Mapping[str, str], per_node: int, usual: Network | None) -> Network | None:
    """What a row says of the network between nodes of `per_node` devices; None where it says
    nothing, and the device's usual network stands.
    """
    text = _compute(row.get("interconnect_inter") or "")
    kind = next((name for words, name in FABRICS if re.search(words, text.lower())), None)
    ports = usual.ports if usual is not None else 1
    rates = [r for r in _rates(text, ports) if r.gbit_per_s >= 5]  # others are for management
    if kind is None and rates and usual is not None:
        kind = usual.interconnect.name
    if kind is None and not rates:
        return None
    link = find_interconnect(kind or "InfiniBand")
    assert link is not None
    if not rates:
        if usual is None or kind in ("Ethernet", usual.interconnect.name):
            return None  # Ethernet alone may be for management
        return Network(link, usual.bytes_per_s, usual.devices, usual.ports)
    best = max(rates, key=lambda r: r.count * r.gbit_per_s * (per_node if r.each_device else 1))
    total = best.count * best.gbit_per_s / 8e-9
    if best.each_device:
        return Network(link, total * per_node, per_node, per_node * best.count)
    ports = max(1, best.count)
    if ports == 1 and (best.of_node or best.gbit_per_s > 800) and best.gbit_per_s > USUAL_PORT:
        ports = max(1, min(per_node, round(best.gbit_per_s / USUAL_PORT)))
    return Network(link, total, per_node, ports)


def _compute(text: str) -> str:
    """Of a list of networks by their purpose, those for computing."""
    labels = list(LABEL.finditer(text.lower()))
    ends = [*(found.start() for found in labels), len(text)][1:]
    parts = [
        text[found.end() : end]
        for found, end in zip(labels, ends, strict=True)
        if "compute" in found[0]
    ]
    return " ".join(parts) if parts else text


def _rates(text: str, usual_ports: int) -> Iterator[Rate]:
    """What a text says in numbers, else by generations; these are of all ports that are usual."""
    text = re.sub(r"\b(two|four|eight)\b", lambda word: f"{WORDS[word[0]]} x", text)
    clauses = [c for c in re.split(r"[,;+] ", text) if "pcie" not in c.lower()]
    named = [rate for clause in clauses for rate in _named(clause)]
    yield from named
    if not named:
        for clause in clauses:
            for words, gbit in GENERATIONS:
                if re.search(rf"\b{words}", clause.lower()):
                    yield Rate(_count(clause, usual_ports), gbit)
                    break


def _named(clause: str) -> Iterator[Rate]:
    """The rates that a clause has in numbers."""
    before = 0
    for found in RATE.finditer(clause):
        number = float(found[1])
        gbit = number * (1000 if found[2] == "T" else 1)
        rest = clause[found.end() :].lower()
        device, node = bool(EACH_DEVICE.match(rest)), bool(EACH_NODE.match(rest))
        if found[3] == "B" and (device or node or number not in PORTS):
            gbit *= 8
        yield Rate(_count(clause[before : found.start()]), gbit, device, node)
        before = found.end()


def _count(clause: str, usual: int = 1) -> int:
    found = COUNT.search(clause)
    return int(found[1] or found[2]) if found else usual
