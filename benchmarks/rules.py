"""How much of a captured program has a rule that splits it over devices."""

from typing import Any

from parloom.ir.factors import factorize
from parloom.ir.graph import Graph
from parloom.ir.ops import OPS, Site, op_of, why_whole

Row = dict[str, Any]


def coverage(graph: Graph) -> Row:
    """How much has a rule that splits something: calls, work, and the others by operator."""
    factored = factorize(graph)
    calls, flops = 0, 0.0
    rest: dict[str, Row] = {}
    specs = {f.name: f.specs() for f in (graph.main, *graph.functions)}
    for flat in graph.flat():
        node = flat.node
        site = Site(node, tuple(specs[flat.function][n] for n in node.refs))
        rule = factored.rule(flat.function, node)
        entry = op_of(node)
        work = entry.flops(site, rule)
        if node.op not in OPS:
            # No entry says its work: two operations per pair of elements read and written.
            work = 2.0 * max((s.num_elements for s in (*site.operands, *site.results)), default=0)
        calls, flops = calls + 1, flops + work
        reason = why_whole(site, rule)
        if reason:
            row = rest.setdefault(node.op, {"calls": 0, "flops": 0.0, "reasons": []})
            row["calls"] += 1
            row["flops"] += work
            if reason not in row["reasons"]:
                row["reasons"].append(reason)
    return {
        "calls": calls,
        "flops": flops,
        "rule_calls": 1 - sum(row["calls"] for row in rest.values()) / max(calls, 1),
        "rule_flops": 1 - sum(row["flops"] for row in rest.values()) / max(flops, 1.0),
        "unsplit": rest,
    }
