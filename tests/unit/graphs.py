"""Hand-made graphs for tests of what never sees a model."""

from parloom.ir.graph import Arg, Function, Graph, Input, Node, Ref, TensorSpec, Value
from parloom.ir.mesh import Cluster, Device, Level, Link
from parloom.ir.text import parse_graph

Shape = tuple[int, ...]


def node(
    op: str,
    *args: Arg,
    to: str,
    shape: Shape,
    path: str = "",
    number: int = 0,
    dtype: str = "float32",
    **kwargs: Arg,
) -> Node:
    """A node with one result; strings among `args` are values."""

    def reference(arg: Arg) -> Arg:
        if isinstance(arg, tuple):
            return tuple(reference(a) for a in arg)
        return Ref(arg) if isinstance(arg, str) else arg

    result = Value(to, TensorSpec(shape, dtype))
    given = tuple(kwargs.items())
    return Node(op, tuple(reference(a) for a in args), given, (result,), path, number, "model.py:7")


def graph(
    parameters: dict[str, Shape],
    batch: dict[str, tuple[Shape, str]],
    *body: Node,
    loss: str = "loss",
) -> Graph:
    """A flat graph; parameters are float32 and trainable."""
    inputs = [
        Input(Value(n, TensorSpec(s, "float32")), "parameter", n, True)
        for n, s in parameters.items()
    ]
    inputs += [Input(Value(n, TensorSpec(*s)), "batch", n) for n, s in batch.items()]
    main = Function("main", tuple(i.value for i in inputs), body, (loss,))
    return Graph("Hand", (), main, tuple(inputs), loss)


def perceptron(batch: int = 8) -> Graph:
    """x [batch, 6] -> up [batch, 12] -> gelu -> down [batch, 4] -> mean of squares."""
    wide, narrow = (batch, 12), (batch, 4)
    return graph(
        {"up": (12, 6), "up_bias": (12,), "down": (4, 12)},
        {"x": ((batch, 6), "float32")},
        node("linear", "x", "up", "up_bias", to="h", shape=wide, path="up"),
        node("gelu", "h", to="a", shape=wide, path="act"),
        node("linear", "a", "down", to="y", shape=narrow, path="down"),
        node("mul", "y", "y", to="square", shape=narrow),
        node("mean", "square", to="loss", shape=()),
    )


def fused(batch: int = 4) -> Graph:
    """One projection for 3 x heads x width, seen through a view, and its way back."""
    heads = (batch, 5, 3, 4, 2)
    return graph(
        {"qkv": (24, 6), "out": (6, 24)},
        {"x": ((batch, 5, 6), "float32")},
        node("linear", "x", "qkv", to="packed", shape=(batch, 5, 24), path="qkv"),
        node("view", "packed", heads, to="heads", shape=heads),
        node("relu", "heads", to="active", shape=heads),
        node("view", "active", (batch, 5, 24), to="flat", shape=(batch, 5, 24), number=1),
        node("linear", "flat", "out", to="y", shape=(batch, 5, 6), path="out"),
        node("sum", "y", to="loss", shape=()),
    )


def cluster(*sizes: int) -> Cluster:
    """A cluster with these levels, slowest first, as in `2x8`."""
    device = Device("toy", (("float32", 1e12),), 2**30, 1e11)
    levels = tuple(Level(f"level{i}", s, Link(1e10, 1e-6)) for i, s in enumerate(reversed(sizes)))
    return Cluster("toy", device, levels)


def stack(
    depth: int,
    batch: int = 16,
    seq: int = 8,
    width: int = 32,
    vocab: int = 64,
    tied: bool = False,
) -> Graph:
    """A language model of `depth` perceptrons with skips, without attention."""
    inner, rows = 4 * width, batch * seq
    hidden = f"float32[{batch}, {seq}, {width}]"
    wide = f"float32[{batch}, {seq}, {inner}]"
    shapes = {"norm": [width], "up": [inner, width], "down": [width, inner]}
    weights = [("tokens_weight", "tokens.weight", [vocab, width])]
    calls, before = [], "x"
    for i in range(depth):
        own = [(f"blocks_{i}_{n}_weight", f"blocks.{i}.{n}.weight", s) for n, s in shapes.items()]
        weights += own
        arguments = ", ".join([before, *(name for name, _, _ in own)])
        before = f"blocks_{i}"
        calls.append(f'    {before}: {hidden} = block["blocks.{i}"]({arguments})')
    head = "tokens_weight" if tied else "head_weight"
    if not tied:
        weights.append((head, "head.weight", [vocab, width]))
    inputs = [
        f'input {name}: float32{shape} = parameter("{target}", trainable=True)'
        for name, target, shape in weights
    ]
    formal = [f"{name}_weight: float32{shape}" for name, shape in shapes.items()]
    lines = [
        'graph "Stack" training=True', "", *inputs,
        f'input ids: int64[{batch}, {seq}] = batch("ids")',
        f'input labels: int64[{batch}, {seq}] = batch("labels")',
        "", "def block(", f"    hidden: {hidden},", *(f"    {line}," for line in formal), "):",
        f"    normed: {hidden} = mul(hidden, norm_weight)  # norm",
        f"    wide: {wide} = linear(normed, up_weight)  # up",
        f"    active: {wide} = relu(wide)  #",
        f"    out: {hidden} = linear(active, down_weight)  # down",
        f"    sum: {hidden} = add(hidden, out)  #",
        "    return sum", "", "main main:",
        f"    x: {hidden} = embedding(tokens_weight, ids)  # tokens",
        *calls,
        f"    logits: float32[{batch}, {seq}, {vocab}] = linear({before}, {head})  # head",
        f"    flat: float32[{rows}, {vocab}] = view(logits, ({rows}, {vocab}))  #",
        f'    targets: int64[{rows}] = view(labels, ({rows},))  # "" #1',
        "    loss: float32[] = cross_entropy_loss(flat, targets)  #",
        "    return loss", "", "loss loss",
    ]  # fmt: skip
    return parse_graph("\n".join(lines) + "\n")
