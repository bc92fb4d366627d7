"""Hand-made graphs for tests of what never sees a model."""

from parloom.ir.graph import Arg, Function, Graph, Input, Node, Ref, TensorSpec, Value
from parloom.ir.mesh import Cluster, Device, Level, Link

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
