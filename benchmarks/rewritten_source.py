"""Random models as source, with much that rewrites apply to: a file that a seed decides.

Values of few widths are multiplied, joined, cut, added up and gated in any order; weights are used
again, some without a bias, some frozen; parts are repeated blocks, convolutions, embeddings, drop
out, stop gradients, or leave the loss.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from textwrap import indent

HEADER = '''"""Made by rewritten_plans.py, seed {seed}."""

import torch
from torch import nn
from torch.nn import functional as F

'''

MODULE = """
class {name}(nn.Module):
    def __init__(self):
        super().__init__()
{init}

    def forward(self, {arguments}):
{forward}

"""

FACTORY = """
def factory():
    torch.manual_seed({seed})
    model = Net(){cast}
    batch = {{
{inputs}
    }}
    return model, batch
"""
WIDTHS = (4, 8, 12, 16, 32)
FUNCTIONS = ("relu", "tanh", "sigmoid", "F.gelu", "F.silu", "F.softplus", "F.elu", "F.leaky_relu")
NUMBERS = (0.5, 2, -1.0, 0.125, 3.0, 1e-3, -0.25)
CASTS = {"float64": ".double()", "float32": "", "bfloat16": ".bfloat16()", "autocast": ""}
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Made:
    """The text of a file; whether its model draws random numbers; the dtype of its weights, or
    "autocast".
    """

    text: str
    draws: bool
    dtype: str


@dataclass
class Draft:
    """A module as far as it is drawn: its lines, its values with their shapes, its weights.

    Widths and numbers of samples are `scale` times as large.
    """

    rng: Random
    values: dict[str, Shape]
    outside: list[str] = field(default_factory=list)
    init: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    linears: list[tuple[str, int, int]] = field(default_factory=list)
    matrices: list[tuple[str, int, int]] = field(default_factory=list)
    draws: bool = False
    is_block: bool = False
    scale: int = 1

    def width(self) -> int:
        """Some width."""
        return self.rng.choice(WIDTHS) * self.scale

    def add(self, line: str, shape: Shape) -> str:
        """A value more."""
        name = f"v{len(self.lines)}"
        self.lines.append(f"{name} = {line}")
        self.values[name] = shape
        return name

    def part(self, text: str) -> str:
        """A part of the module more."""
        name = f"p{len(self.init)}"
        self.init.append(f"self.{name} = {text}")
        return f"self.{name}"

    def one(self) -> str:
        """Some value, most often a late one."""
        names = list(self.values)
        return self.rng.choice(names[-4:] if self.rng.random() < 0.6 else names)

    def alike(self, name: str) -> str | None:
        """Another value of the same shape."""
        own = self.values[name]
        others = [n for n, shape in self.values.items() if shape == own and n != name]
        return self.rng.choice(others) if others else None

    def linear(self, width: int) -> tuple[str, int]:
        """A product with a weight, at times one that is used already, and its width."""
        rng = self.rng
        known = [(name, n) for name, k, n in self.linears if k == width]
        if known and rng.random() < 0.25:
            return rng.choice(known)
        out = self.width()
        bias = "" if rng.random() < 0.5 else ", bias=False"
        name = self.part(f"nn.Linear({width}, {out}{bias})")
        if rng.random() < 0.12:
            self.init.append(f"{name}.weight.requires_grad_(False)")
        self.linears.append((name, width, out))
        return name, out

    def matrix(self, rows: int, columns: int) -> str:
        """A weight by itself, at times one that is used already."""
        known = [name for name, *own in self.matrices if own == [rows, columns]]
        if known and self.rng.random() < 0.3:
            return self.rng.choice(known)
        name = self.part(f"nn.Parameter(torch.randn({rows}, {columns}) / {rows**0.5:.2f})")
        self.matrices.append((name, rows, columns))
        return name


def product(d: Draft) -> None:
    name = d.one()
    layer, out = d.linear(d.values[name][-1])
    d.add(f"{layer}({name})", (*d.values[name][:-1], out))


def products(d: Draft) -> None:
    """Of one operand, as queries, keys and values are."""
    name = d.one()
    for _ in range(d.rng.randint(2, 3)):
        layer, out = d.linear(d.values[name][-1])
        made = d.add(f"{layer}({name})", (*d.values[name][:-1], out))
        if d.rng.random() < 0.3:
            d.add(f"torch.tanh({made})", d.values[made])


def one_weight(d: Draft) -> None:
    """One weight for two operands."""
    name = d.one()
    other = d.alike(name) or name
    layer, out = d.linear(d.values[name][-1])
    shape = (*d.values[name][:-1], out)
    made = [d.add(f"{layer}({own})", shape) for own in (name, other)]
    if d.rng.random() < 0.6:
        join(d, made)


def join(d: Draft, names: list[str]) -> None:
    shape = d.values[names[0]]
    kind = d.rng.choice(("+", "*", "-", "cat", "stack"))
    if kind == "cat":
        d.add(f"torch.cat([{', '.join(names)}], -1)", (*shape[:-1], shape[-1] * len(names)))
    elif kind == "stack":
        d.add(f"torch.stack([{', '.join(names)}], 0).sum(0)", shape)
    else:
        d.add(f" {kind} ".join(names), shape)


def two(d: Draft) -> None:
    name = d.one()
    other = d.alike(name)
    if other:
        join(d, [name, other])


def cut(d: Draft) -> None:
    name = d.one()
    shape = d.values[name]
    half = (*shape[:-1], shape[-1] // 2)
    if shape[-1] % 2 or shape[-1] < 4:
        return
    kind = d.rng.choice(("chunk", "split", "gate"))
    if kind == "gate":
        d.add(f"(lambda a, b: F.silu(a) * b)(*{name}.chunk(2, -1))", half)
        return
    text = f"{name}.chunk(2, -1)" if kind == "chunk" else f"torch.split({name}, {half[-1]}, -1)"
    d.lines.append(f"a{len(d.lines)}, b{len(d.lines)} = {text}")
    number = len(d.lines) - 1
    d.values |= {f"a{number}": half, f"b{number}": half}


def function(d: Draft) -> None:
    name = d.one()
    own = d.rng.choice(FUNCTIONS)
    d.add(f"{own if '.' in own else 'torch.' + own}({name})", d.values[name])


def number(d: Draft) -> None:
    name = d.one()
    kind, factor = d.rng.choice("*+/"), d.rng.choice(NUMBERS)
    d.add(f"{name} {kind} {factor}", d.values[name])


def low_rank(d: Draft) -> None:
    """A chain of products without functions between, in some order."""
    name = d.one()
    width = d.values[name][-1]
    rank, out = d.rng.choice((1, 2, 4, 8)) * d.scale, d.width()
    p, q = d.matrix(width, rank), d.matrix(rank, out)
    text = d.rng.choice((f"{name} @ ({p} @ {q})", f"{name} @ {p} @ {q}",
                         f"F.linear({name}, ({p} @ {q}).t())"))  # fmt: skip
    d.add(text, (*d.values[name][:-1], out))


def combined_weight(d: Draft) -> None:
    """A product with a weight that is a sum, a multiple or two joined."""
    name = d.one()
    width, out = d.values[name][-1], d.width()
    p, q = d.matrix(out, width), d.matrix(out, width)
    text, more = d.rng.choice(
        ((f"{p} + {q}", 1), (f"0.5 * {p}", 1), (f"torch.cat([{p}, {q}])", 2), (f"{p} * {q}", 1))
    )
    d.add(f"F.linear({name}, {text})", (*d.values[name][:-1], out * more))


def rows(d: Draft) -> None:
    name = d.one()
    shape = d.values[name]
    text = d.rng.choice((f"torch.softmax({name}, -1)", f"F.layer_norm({name}, ({shape[-1]},))",
                         f"{name} * {d.part(f'nn.Parameter(torch.ones({shape[-1]}))')}",
                         f"{d.part(f'nn.LayerNorm({shape[-1]})')}({name})",
                         f"{name} - {name}.mean(-1, keepdim=True)"))  # fmt: skip
    d.add(text, shape)


def joined_functions(d: Draft) -> None:
    """One function of two values, joined or added up."""
    name = d.one()
    other = d.alike(name)
    if other:
        own = d.rng.choice(("torch.relu", "torch.tanh", "F.gelu"))
        made = [d.add(f"{own}({n})", d.values[n]) for n in (name, other)]
        join(d, made)


def stopped(d: Draft) -> None:
    """Products of one operand, of which one has no gradient, or another path."""
    name = d.one()
    (first, out), (second, _) = d.linear(d.values[name][-1]), d.linear(d.values[name][-1])
    d.add(f"{first}({name})", (*d.values[name][:-1], out))
    text = d.rng.choice((".detach()", ".sign()", ".round()", ".detach().sigmoid()"))
    shape = (*d.values[name][:-1], next(n for own, _, n in d.linears if own == second))
    d.add(f"{second}({name}){text}", shape)


def dropout(d: Draft) -> None:
    name = d.one()
    d.draws = True
    d.add(f"{d.part('nn.Dropout(0.3)')}({name})", d.values[name])


def images(d: Draft) -> None:
    """Convolutions of one operand, some of one geometry."""
    name, rng = d.one(), d.rng
    shape = d.values[name]
    channels = rng.choice([c for c in (1, 2, 4) if shape[-1] % c == 0])
    places = shape[-1] // channels
    flat = rng.random() < 0.6 or places % 2
    form = (channels, places) if flat else (channels, 2, places // 2)
    image = d.add(f"{name}.reshape(-1, {', '.join(map(str, form))})", (0, *form))
    del d.values[image]
    size = rng.choice((1, 3))
    outs, made = [rng.choice((2, 4)) for _ in range(rng.randint(2, 3))], []
    for out in outs:
        own = size if rng.random() < 0.8 else 1
        bias = rng.choice(("", ", bias=False"))
        groups = 2 if channels % 2 == 0 and rng.random() < 0.2 else 1
        layer = d.part(
            f"nn.Conv{len(form) - 1}d({channels}, {out}, {own}, padding={own // 2},"
            f" groups={groups}{bias})"
        )
        made.append(d.add(f"{layer}({image})", ()))
        del d.values[made[-1]]
        if rng.random() < 0.3:
            norm = d.part(f"nn.BatchNorm{len(form) - 1}d({out})")
            made[-1] = d.add(f"{norm}({made[-1]})", ())
            del d.values[made[-1]]
        if rng.random() < 0.3:
            made[-1] = d.add(f"torch.relu({made[-1]})", ())
            del d.values[made[-1]]
    whole = f"torch.cat([{', '.join(made)}], 1)"
    lead = ", ".join(map(str, ("-1", *shape[1:-1])))
    d.add(f"{whole}.reshape({lead}, {sum(outs) * places})", (*shape[:-1], sum(outs) * places))
    # Widths stay small.
    narrow = d.part(f"nn.Linear({sum(outs) * places}, {8 * d.scale})")
    d.add(f"{narrow}({list(d.values)[-1]})", (*shape[:-1], 8 * d.scale))


def norms(d: Draft) -> None:
    """Batch norm, at times with the statistics that it has."""
    name = d.one()
    shape = d.values[name]
    if len(shape) == 2:
        width = shape[-1]
        if d.rng.random() < 0.5:
            d.add(f"{d.part(f'nn.BatchNorm1d({width})')}({name})", shape)
        else:
            d.init.append(f"self.register_buffer('m{len(d.init)}', torch.ones({width}))")
            mean = f"self.m{len(d.init) - 1}"
            d.add(f"F.batch_norm({name}, {mean} * 0.1, {mean} * 2, training=False)", shape)


def table(d: Draft) -> None:
    """Rows of a table, and a product of them; or a table added up with another."""
    shape = next(iter(d.values.values()))
    if d.is_block:
        return
    width = d.width()
    e = d.part(f"nn.Embedding(16, {width})")
    at = "ids" if len(shape) == 3 else "ids[:, 0]"
    text = f"{e}({at})"
    if d.rng.random() < 0.4:
        text += f" + {d.part(f'nn.Embedding(16, {width})')}({at})"
    name = d.add(text, (*shape[:-1], width))
    layer, out = d.linear(width)
    d.add(f"{layer}({name})", (*shape[:-1], out))


def turned(d: Draft) -> None:
    """Heads: a dim cut and moved."""
    name = d.one()
    shape = d.values[name]
    if len(shape) == 3 and shape[-1] % 4 == 0:
        made = []
        for _ in range(3):
            layer = d.part(f"nn.Linear({shape[-1]}, {8 * d.scale})")
            made.append(f"{layer}({name}).unflatten(-1, (2, {4 * d.scale})).transpose(1, 2)")
        d.add(
            f"F.scaled_dot_product_attention({', '.join(made)}).transpose(1, 2).flatten(-2)",
            (*shape[:-1], 8 * d.scale),
        )


def integers(d: Draft) -> None:
    """Arithmetic of whole numbers, and functions of it."""
    if not d.is_block:
        shape = next(iter(d.values.values()))
        lead = "ids" if len(shape) == 3 else "ids[:, 0]"
        name = d.one()
        own = d.rng.choice(("{0} * 2 + {0} * 2", "{0} > 3", "({0} * 0.5).to(x.dtype)"))
        own = f"({own.format(lead)}).unsqueeze(-1)"
        d.add(f"{name} * {own}", d.values[name])


def masks(d: Draft) -> None:
    """Products with masks, or small integers, added up or joined."""
    name = d.one()
    shape = d.values[name]
    kind = d.rng.choice(("({0} > 0)", "({0} * 100).to(torch.uint8)", "({0} * 9).to(torch.int64)"))
    one, other = (f"{name} * {kind.format(n)}.detach()" for n in (name, f"({name} + 0.5)"))
    join(d, [d.add(one, shape), d.add(other, shape)])


def blocks(d: Draft) -> None:
    """Repeated blocks of one kind that keep the width."""
    if d.is_block:
        return
    name = d.one()
    shape = d.values[name]
    inner = Draft(d.rng, {"h": shape}, is_block=True, scale=d.scale)
    draw(inner, d.rng.randint(2, 4))
    last = list(inner.values)[-1]
    width = inner.values[last][-1]
    layer = inner.part(f"nn.Linear({width}, {shape[-1]})")
    kind = f"Block{len(d.outside)}"
    forward = "\n".join((*inner.lines, f"return h + {layer}({last})"))
    d.outside.append(
        MODULE.format(
            name=kind,
            init=indent("\n".join(inner.init), " " * 8),
            arguments="h",
            forward=indent(forward, " " * 8),
        )
    )
    d.draws |= inner.draws
    parts = d.part(f"nn.ModuleList({kind}() for _ in range({d.rng.randint(2, 3)}))")
    d.lines += [f"h = {name}", f"for block in {parts}:\n    h = block(h)"]
    d.add("h * 1.0" if d.rng.random() < 0.3 else "h", shape)


PIECES: tuple[tuple[int, Callable[[Draft], None]], ...] = (
    (3, product), (4, products), (3, one_weight), (3, two), (2, cut), (2, function), (2, number),
    (3, low_rank), (2, combined_weight), (2, rows), (3, joined_functions), (2, stopped),
    (1, dropout), (2, images), (1, norms), (2, table), (1, turned), (1, integers), (1, masks),
    (2, blocks),
)  # fmt: skip


def draw(d: Draft, count: int) -> None:
    weights, pieces = zip(*PIECES, strict=True)
    for _ in range(count):
        d.rng.choices(pieces, weights)[0](d)


def source(seed: int, scale: int = 1) -> Made:
    """The model of `seed`; widths and numbers of samples are `scale` times as large."""
    rng = Random(seed)
    samples, *lengths = rng.choice(((8,), (24,), (8, 4)))
    lead = (scale * samples, *lengths)
    width = rng.choice(WIDTHS) * scale
    d = Draft(rng, {"x": (*lead, width), "y": (*lead, width)}, scale=scale)
    draw(d, rng.randint(3, 7))
    dtype = rng.choices(("float64", "float32", "bfloat16", "autocast"), (8, 3, 1, 2))[0]
    used = set(re.findall(r"\w+", " ".join(line.partition("=")[2] for line in d.lines)))
    read = [n for n in d.values if n not in used]
    ends = (read or [list(d.values)[-1]])[-4:]
    # At times one end is no part of the loss.
    beside = ends.pop(0) if len(ends) > 1 and rng.random() < 0.3 else ""
    d.lines.append("loss = " + " + ".join(
        rng.choice((f"{n}{'.float()' if dtype == 'autocast' else ''}.square().mean()",
                    f"{n}.mean().square()", f"F.mse_loss({n}, torch.zeros_like({n}))"))
        for n in ends))  # fmt: skip
    d.lines.append(f"return loss, {beside}" if beside else "return loss")
    lines = d.lines
    if dtype == "autocast":
        inner = indent("\n".join(lines), "    ")
        lines = [f"with torch.autocast('cpu', dtype=torch.bfloat16):\n{inner}"]
    body = "\n".join(lines)
    number = "double" if dtype == "float64" else "bfloat16" if dtype == "bfloat16" else "float32"
    shape = ", ".join(map(str, lead))
    inputs = {n: f"torch.randn({shape}, {width}, dtype=torch.{number})" for n in ("x", "y")}
    ids = (*lead, 4) if len(lead) == 1 else lead
    inputs["ids"] = f"torch.randint(0, 16, ({', '.join(map(str, ids))}))"
    words = set(re.findall(r"\w+", body))
    given = [n for n in inputs if n == "x" or n in words]
    text = HEADER.format(seed=seed) + "".join(d.outside) + MODULE.format(
        name="Net", init=indent("\n".join(d.init) or "pass", " " * 8), arguments=", ".join(given),
        forward=indent(body, " " * 8),
    ) + FACTORY.format(
        seed=seed, cast=CASTS[dtype],
        inputs="\n".join(f'        "{n}": {inputs[n]},' for n in given),
    )  # fmt: skip
    return Made(text, d.draws, dtype)
