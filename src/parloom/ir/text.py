"""The text form of a graph: what a person reads, and an exact round trip.

    graph "GPT2LMHeadModel" training=True

    input wte_weight: float32[97, 24] = parameter("transformer.wte.weight", trainable=True)

    def gpt2_block(
        hidden: float32[2, 16, 24],
        ln_1_weight: float32[24],
    ):
        ln_1: float32[2, 16, 24] = layer_norm(hidden, (24,), ln_1_weight)  # ln_1 @ model.py:273
        return ln_1

    main main:
        h_0: float32[2, 16, 24] = gpt2_block["transformer.h.0"](wte, h_0_ln_1_weight)
        return h_0

    loss h_0

Names are values, `dtype.float32` is a dtype, `float("inf")` what has no literal; the rest are
Python literals. After `#` stand a node's module path (with `#2` for the third node of that path and
operator) and `@` its source line.
"""

import math
import re
from collections.abc import Iterator

from parloom.errors import VerifyError
from parloom.ir.graph import (
    Arg,
    Call,
    Dtype,
    Function,
    Graph,
    Input,
    Node,
    Ref,
    TensorSpec,
    Value,
)
from parloom.ir.parse import Parser

PLAIN = re.compile(r"[\w.:/\-@<>+]*\Z", re.ASCII)
DECIMAL_BITS = 4096


def print_graph(graph: Graph) -> str:
    """The text of a graph; `parse_graph` gives an equal graph back.

    Raises: VerifyError where main's inputs are not the graph's inputs.
    """
    if graph.main.inputs != tuple(i.value for i in graph.inputs):
        raise VerifyError("the inputs of main differ from the graph's inputs")
    blocks: list[list[str]] = [
        [f"graph {quoted(graph.name)} training={graph.training}"],
        [print_input(i) for i in graph.inputs],
        *(list(function_lines(f)) for f in graph.functions),
        [f"main {graph.main.name}:", *body_lines(graph.main)],
        list(result_lines(graph)),
    ]
    return "\n\n".join("\n".join(block) for block in blocks if block) + "\n"


def parse_graph(text: str) -> Graph:
    """The graph that a text describes; nothing in the text is executed.

    Raises: InputError with the line number.
    """
    return Parser(text).graph()


def print_input(item: Input) -> str:
    """One input of main: its spec, kind, and the user's name of it."""
    extras = ", trainable=True" if item.trainable else ""
    if item.aliases:
        extras += f", aliases={print_arg(item.aliases)}"
    if item.data is not None:
        extras += f", data={print_arg(item.data)}"
    if item.samples is not None:
        extras += f", samples={item.samples}"
    return f"input {print_value(item.value)} = {item.kind}({quoted(item.target)}{extras})"


def function_lines(function: Function) -> Iterator[str]:
    """A block function: one line per input and per node."""
    yield f"def {function.name}("
    for value in function.inputs:
        yield f"    {print_value(value)},"
    yield "):"
    yield from body_lines(function)


def body_lines(function: Function) -> Iterator[str]:
    """The indented body, with `return` at its end."""
    for item in function.body:
        yield "    " + (print_node(item) if isinstance(item, Node) else print_call(item))
    yield "    " + " ".join(("return", ", ".join(function.outputs))).rstrip()


def result_lines(graph: Graph) -> Iterator[str]:
    """What the program is for: loss, outputs and buffer updates; what the user recomputes."""
    if graph.loss is not None:
        yield f"loss {graph.loss}"
    for kind, pairs in (("output", graph.outputs), ("update", graph.updates)):
        for name, value in pairs:
            yield f"{kind} {quoted(name)} = {value}"
    for prefix in graph.recompute:
        yield f"recompute {quoted(prefix)}"


def print_node(node: Node) -> str:
    """`q: float32[2, 4], k: float32[2, 4] = split(x, 4)  # attn#1 @ model.py:10`."""
    arguments = [print_arg(a) for a in node.args]
    arguments += [f"{name}={print_arg(value)}" for name, value in node.kwargs]
    notes = []
    if node.path or node.index:
        notes.append(plain(node.path) + (f" #{node.index}" if node.index else ""))
    if node.source:
        notes.append(f"@ {plain(node.source)}")
    comment = "  # " + " ".join(notes) if notes else ""
    return f"{print_results(node.results)}{node.op}({', '.join(arguments)}){comment}"


def print_call(call: Call) -> str:
    """`h_0: float32[2, 4] = block["h.0"](x, w)`."""
    arguments = ", ".join(call.args)
    return f"{print_results(call.results)}{call.function}[{quoted(call.prefix)}]({arguments})"


def print_results(results: tuple[Value, ...]) -> str:
    """`a: float32[2], b: float32[2] = `, or nothing."""
    return ", ".join(map(print_value, results)) + " = " if results else ""


def print_value(value: Value) -> str:
    """`a: float32[2, 3]`."""
    return f"{value.name}: {print_spec(value.spec)}"


def print_spec(spec: TensorSpec) -> str:
    """`float32[2, 3]`."""
    return f"{spec.dtype}[{', '.join(map(str, spec.shape))}]"


def print_arg(arg: Arg) -> str:
    """An argument as the parser reads it back, bit for bit."""
    if isinstance(arg, Ref):
        return arg.name
    if isinstance(arg, Dtype):
        return f"dtype.{arg.name}"
    if isinstance(arg, tuple):
        return "(" + ", ".join(map(print_arg, arg)) + ("," if len(arg) == 1 else "") + ")"
    if isinstance(arg, str):
        return quoted(arg)
    if isinstance(arg, float) and not math.isfinite(arg):
        return f'float("{arg}")'
    if isinstance(arg, int) and not isinstance(arg, bool) and arg.bit_length() > DECIMAL_BITS:
        # Python refuses to print or read longer decimal numbers.
        return hex(arg)
    return repr(arg)


def plain(text: str) -> str:
    """A path or source as it is where nothing in it could confuse the parser, else quoted."""
    return text if text and PLAIN.match(text) and not text.startswith("@") else quoted(text)


def quoted(text: str) -> str:
    """A string literal with everything but plain ASCII escaped."""
    escaped = text.encode("unicode_escape").decode("ascii").replace('"', '\\"')
    return f'"{escaped}"'
