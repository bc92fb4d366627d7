"""The reader of the text form (`ir.text`): line by line, literals only, nothing executed."""

import ast
import re
import warnings
from collections.abc import Iterator

from parloom.errors import InputError
from parloom.ir.graph import (
    CACHE,
    DTYPE_BYTES,
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
from parloom.ir.ops import is_operator

NAME = re.compile(r"[A-Za-z_]\w*\Z", re.ASCII)
VALUE = re.compile(r"([A-Za-z_]\w*): ([a-z]\w*)\[([\d, ]*)\](?:, |\Z)", re.ASCII)
STRING = r'"(?:[^"\\]|\\.)*"'
CODE = re.compile(rf"(?:[^\"'#]|{STRING}|'(?:[^'\\]|\\.)*')*")
GRAPH = re.compile(rf"graph ({STRING}) training=(True|False)\Z")
INPUT = re.compile(r"input ([^=]*?) = (.*)\Z", re.DOTALL)
RESULT = re.compile(rf"(output|update) ({STRING}) = (\w+)\Z")
ASSIGNMENT = re.compile(r"((?:[A-Za-z_]\w*: [a-z]\w*\[[\d, ]*\](?:, )?)+) = ", re.ASCII)
COMMENT = re.compile(
    rf"#(?: (?P<path>{STRING}|[^\s\"@#]\S*))?(?: #(?P<index>\d+))?"
    rf"(?: @ (?P<source>{STRING}|\S+))?\Z"
)
KINDS = ("parameter", "buffer", "batch", CACHE, "constant")
MAX_TEXT_CHARS = 1 << 28


class Parser:
    """Reads one graph; `position` is the line being read."""

    def __init__(self, text: str) -> None:
        if len(text) > MAX_TEXT_CHARS:
            raise InputError(f"the graph text has {len(text)} characters; at most {MAX_TEXT_CHARS}")
        self.lines = text.split("\n")
        self.position = 0

    def error(self, reason: str) -> InputError:
        line = self.lines[self.position] if self.position < len(self.lines) else "end of text"
        return InputError(f"graph text, line {self.position + 1}: {reason}: {line.strip()[:120]!r}")

    def peek(self) -> str | None:
        """The next line that is not blank, or None at the end."""
        while self.position < len(self.lines) and not self.lines[self.position].strip():
            self.position += 1
        return self.lines[self.position] if self.position < len(self.lines) else None

    def graph(self) -> Graph:
        """The whole text."""
        with warnings.catch_warnings():
            # Odd text may be odd Python; that is no news to anybody here.
            warnings.simplefilter("ignore", SyntaxWarning)
            warnings.simplefilter("ignore", DeprecationWarning)
            return self.whole()

    def whole(self) -> Graph:
        head = GRAPH.match(self.peek() or "")
        if not head:
            raise self.error('expected `graph "NAME" training=True`')
        self.position += 1
        inputs = tuple(self.inputs())
        functions = tuple(self.functions())
        main = self.main(tuple(i.value for i in inputs))
        loss: str | None = None
        pairs: dict[str, list[tuple[str, str]]] = {"output": [], "update": []}
        recompute: list[str] = []
        while (line := self.peek()) is not None:
            result = RESULT.match(line)
            if result:
                pairs[result[1]].append((self.string(result[2]), self.name(result[3])))
            elif line.startswith("loss ") and loss is None:
                loss = self.name(line.removeprefix("loss "))
            elif line.startswith("recompute "):
                recompute.append(self.string(line.removeprefix("recompute ")))
            else:
                raise self.error("expected `loss`, `output`, `update` or `recompute`")
            self.position += 1
        return Graph(
            self.string(head[1]), functions, main, inputs, loss,
            tuple(pairs["output"]), tuple(pairs["update"]), head[2] == "True", tuple(recompute),
        )  # fmt: skip

    def inputs(self) -> Iterator[Input]:
        """The `input` lines."""
        while (line := self.peek()) is not None and line.startswith("input "):
            found = INPUT.match(line)
            if not found:
                raise self.error("expected `input NAME: dtype[shape] = kind(...)`")
            (value,) = self.values(found[1], 1)
            call = self.expression(found[2])
            if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name)):
                raise self.error("expected a kind of input")
            kind = call.func.id
            if kind not in KINDS or len(call.args) != 1:
                raise self.error(f"an input is one of {', '.join(KINDS)}, with one name")
            yield self.input(value, kind, call)
            self.position += 1

    def input(self, value: Value, kind: str, call: ast.Call) -> Input:
        target = self.argument(call.args[0])
        extras = {k.arg: self.argument(k.value) for k in call.keywords}
        trainable = extras.pop("trainable", False)
        aliases = extras.pop("aliases", ())
        data = extras.pop("data", None)
        samples = extras.pop("samples", None)
        strings = isinstance(aliases, tuple) and all(isinstance(a, str) for a in aliases)
        known = isinstance(target, str) and isinstance(trainable, bool) and strings and not extras
        if not known or not (samples is None or type(samples) is int):
            raise self.error("malformed input")
        assert isinstance(target, str)
        assert isinstance(trainable, bool)
        names = tuple(str(a) for a in aliases) if isinstance(aliases, tuple) else ()
        dim = samples if isinstance(samples, int) else None
        return Input(value, kind, target, trainable, names, data, dim)

    def functions(self) -> Iterator[Function]:
        """The `def` blocks."""
        while (line := self.peek()) is not None and line.startswith("def "):
            name = self.name(line.removeprefix("def ").removesuffix("("))
            self.position += 1
            values: list[Value] = []
            while (line := self.peek()) is not None and line != "):":
                values += self.values(line.strip().removesuffix(","), 1)
                self.position += 1
            if line is None:
                raise self.error("expected `):`")
            self.position += 1
            body, outputs = self.body()
            yield Function(name, tuple(values), body, outputs)

    def main(self, inputs: tuple[Value, ...]) -> Function:
        line = self.peek() or ""
        if not (line.startswith("main ") and line.endswith(":")):
            raise self.error("expected `main NAME:`")
        name = self.name(line[len("main ") : -1])
        self.position += 1
        body, outputs = self.body()
        return Function(name, inputs, body, outputs)

    def body(self) -> tuple[tuple[Node | Call, ...], tuple[str, ...]]:
        """Indented lines up to `return`."""
        items: list[Node | Call] = []
        while (line := self.peek()) is not None and line.startswith("    "):
            text = line[4:]
            if text == "return" or text.startswith("return "):
                names = text.removeprefix("return").strip()
                outputs = tuple(self.name(n) for n in names.split(", ")) if names else ()
                self.position += 1
                return tuple(items), outputs
            items.append(self.item(text))
            self.position += 1
        raise self.error("expected `return`")

    def item(self, text: str) -> Node | Call:
        """One node or call."""
        code = CODE.match(text)
        end = code.end() if code else 0
        statement, comment = text[:end].rstrip(), text[end:]
        results: tuple[Value, ...] = ()
        assignment = ASSIGNMENT.match(statement)
        if assignment:
            results = self.values(assignment[1])
            statement = statement[assignment.end() :]
        call = self.expression(statement)
        if not isinstance(call, ast.Call):
            raise self.error("expected an operator call")
        if isinstance(call.func, ast.Subscript):
            return self.block_call(call, call.func, results, comment)
        op = dotted(call.func)
        if not is_operator(op):
            raise self.error("expected an operator's name")
        kwargs = tuple((self.name(k.arg or ""), self.argument(k.value)) for k in call.keywords)
        args = tuple(self.argument(a) for a in call.args)
        return Node(op, args, kwargs, results, *self.notes(comment))

    def block_call(
        self, call: ast.Call, target: ast.Subscript, results: tuple[Value, ...], comment: str
    ) -> Call:
        prefix = self.argument(target.slice)
        args = [self.argument(a) for a in call.args]
        names = tuple(a.name for a in args if isinstance(a, Ref))
        plain = isinstance(target.value, ast.Name) and isinstance(prefix, str)
        if not plain or len(names) != len(args) or call.keywords or comment:
            raise self.error('expected `FUNCTION["prefix"](values)`')
        return Call(self.name(dotted(target.value)), str(prefix), names, results)

    def notes(self, comment: str) -> tuple[str, int, str]:
        """(path, index, source) of the comment after a node."""
        found = COMMENT.match(comment) if comment else None
        if found is None:
            if comment:
                raise self.error("expected `# PATH #INDEX @ SOURCE`")
            return "", 0, ""
        parts = [self.unquoted(found[key] or "") for key in ("path", "source")]
        return parts[0], self.integer(found["index"] or "0"), parts[1]

    def unquoted(self, text: str) -> str:
        return self.string(text) if text.startswith('"') else text

    def integer(self, text: str) -> int:
        try:
            return int(text)
        except ValueError as err:
            raise self.error("malformed number") from err

    def values(self, text: str, count: int | None = None) -> tuple[Value, ...]:
        """`a: float32[2, 3], b: int64[]`."""
        values: list[Value] = []
        start = 0
        while start < len(text):
            found = VALUE.match(text, start)
            if not found:
                raise self.error("expected `NAME: dtype[shape]`")
            shape = tuple(self.integer(n) for n in found[3].split(",") if n.strip())
            values.append(Value(found[1], TensorSpec(shape, self.dtype(found[2]))))
            start = found.end()
        if count is not None and len(values) != count:
            raise self.error(f"expected {count} value")
        return tuple(values)

    def name(self, text: str) -> str:
        if not NAME.match(text):
            raise self.error(f"{text!r} is not a name")
        return text

    def dtype(self, name: str) -> str:
        if name not in DTYPE_BYTES:
            raise self.error(f"unknown dtype {name!r}")
        return name

    def string(self, text: str) -> str:
        value = self.argument(self.expression(text))
        if not isinstance(value, str):
            raise self.error("expected a string")
        return value

    def expression(self, text: str) -> ast.expr:
        """The syntax tree of one expression; nothing is evaluated."""
        try:
            return ast.parse(text, mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as err:
            raise self.error(f"not an expression ({type(err).__name__})") from err

    def argument(self, node: ast.expr) -> Arg:
        """A literal, name, dtype or tuple of these."""
        match node:
            case ast.Constant(value=None | bool() | int() | float() | str() as value):
                return value
            case ast.Name(id=name):
                return Ref(self.name(name))
            case ast.Tuple(elts=elements):
                return tuple(self.argument(e) for e in elements)
            case ast.Attribute(value=ast.Name(id="dtype"), attr=name):
                return Dtype(self.dtype(name))
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
                return -number
            case ast.Call(
                func=ast.Name(id="float"),
                args=[ast.Constant(value="inf" | "-inf" | "nan" as word)],
                keywords=[],
            ):
                return float(word)
        raise self.error(f"{type(node).__name__} is not allowed here")


def dotted(node: ast.expr) -> str:
    """`a.b` of a name or attribute, ``""`` of anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        owner = dotted(node.value)
        return f"{owner}.{node.attr}" if owner else ""
    return ""
