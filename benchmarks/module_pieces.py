# ruff: noqa: E501 - lines of other files
"""Pieces of random modules: each takes `h` of shape [batch, SEQ, WIDTH] to another such `h`.

A piece with a `trap` is of a class that capture once let through silently: it is refused, or equal.
"""

from dataclasses import dataclass

SEQ, WIDTH, VOCABULARY = 4, 8, 16


@dataclass(frozen=True, slots=True)
class Piece:
    """Source lines for `__init__`, `forward` and the file; `{i}` is the number of the piece.

    `draws` says that it draws random numbers in training.
    """

    name: str
    forward: str
    init: str = ""
    outside: str = ""
    trap: str = ""
    draws: bool = False


PLAIN: tuple[Piece, ...] = (
    Piece("linear", "h = self.l{i}(h)", "self.l{i} = nn.Linear(8, 8)"),
    Piece("residual", "h = h + F.gelu(self.l{i}(h))", "self.l{i} = nn.Linear(8, 8)"),
    Piece(
        "mlp",
        "h = h + self.m{i}(h)",
        "self.m{i} = nn.Sequential(nn.Linear(8, 16), nn.ReLU(inplace=True), nn.Linear(16, 8))",
    ),
    Piece("layer_norm", "h = self.n{i}(h)", "self.n{i} = nn.LayerNorm(8)"),
    Piece(
        "rms_norm",
        "h = h * torch.rsqrt(h.square().mean(-1, True) + 1e-6) * self.w{i}",
        "self.w{i} = nn.Parameter(torch.ones(8))",
    ),
    Piece(
        "batch_norm",
        "h = self.n{i}(h.transpose(1, 2)).transpose(1, 2)",
        "self.n{i} = nn.BatchNorm1d(8)",
    ),
    Piece(
        "group_norm",
        "h = self.n{i}(h.transpose(1, 2)).transpose(1, 2)",
        "self.n{i} = nn.GroupNorm(2, 8)",
    ),
    Piece(
        "conv",
        "h = h + torch.tanh(self.c{i}(h.transpose(1, 2)).transpose(1, 2))",
        "self.c{i} = nn.Conv1d(8, 8, 3, padding=1)",
    ),
    Piece(
        "attention",
        "h = h + self.a{i}(h, h, h, need_weights=False)[0]",
        "self.a{i} = nn.MultiheadAttention(8, 2, batch_first=True)",
    ),
    Piece(
        "causal",
        "q, k, v = self.l{i}(h).chunk(3, -1)\n"
        "h = h + F.scaled_dot_product_attention(q, k, v, is_causal=True)",
        "self.l{i} = nn.Linear(8, 24)",
    ),
    Piece(
        "heads",
        "q = self.l{i}(h).view(*h.shape[:2], 2, 4).transpose(1, 2)\n"
        "h = h + torch.softmax(q @ q.mT, -1).matmul(q).transpose(1, 2).flatten(2)",
        "self.l{i} = nn.Linear(8, 8)",
    ),
    Piece(
        "gated",
        "a, b = self.l{i}(h).chunk(2, -1)\nh = F.silu(a) * b",
        "self.l{i} = nn.Linear(8, 16)",
    ),
    Piece("embedding", "h = h + self.e{i}(ids)", "self.e{i} = nn.Embedding(16, 8)"),
    Piece(
        "position",
        "h = h + self.e{i}(torch.arange(h.shape[1], device=h.device))",
        "self.e{i} = nn.Embedding(4, 8)",
    ),
    Piece(
        "average",
        "self.mean{i}.mul_(0.9).add_(0.1 * h.detach().mean((0, 1)))\nh = h - self.mean{i}.clone()",
        'self.register_buffer("mean{i}", torch.zeros(8))',
    ),
    Piece(
        "average_no_grad",
        "with torch.no_grad():\n"
        "    self.mean{i}.lerp_(h.mean((0, 1)), 0.1)\nh = h - self.mean{i}.clone()",
        'self.register_buffer("mean{i}", torch.zeros(8))',
    ),
    Piece(
        "assigned_buffer",
        "self.mean{i} = 0.5 * self.mean{i} + 0.5 * h.detach().mean((0, 1))\nh = h - self.mean{i}",
        'self.register_buffer("mean{i}", torch.zeros(8))',
    ),
    Piece(
        "counted",
        "self.count{i} += 1\nh = h * (1 + 0.01 * self.count{i})",
        'self.register_buffer("count{i}", torch.zeros((), dtype=torch.int64))',
    ),
    Piece("in_place", "h = h.clone()\nh.mul_(0.5).add_(1)\nh[:, 0] = 0"),
    Piece("slice_write", "out = torch.zeros_like(h)\nout[:, 1:] = h[:, :-1]\nh = out + h"),
    Piece("view_write", "h = h.clone()\nh[..., :4].mul_(2)\nh.view(-1, 8)[:, 1].add_(1)"),
    Piece("masked", "h = h.masked_fill(ids.unsqueeze(-1) % 3 == 0, 0.25)"),
    Piece("where", "h = torch.where(h > 0, h, 0.1 * h)"),
    Piece("detached", "h = h * torch.sigmoid(h.detach())"),
    Piece(
        "teacher",
        "with torch.no_grad():\n    t = self.l{i}(h)\nh = self.l{i}(h) - 0.5 * t",
        "self.l{i} = nn.Linear(8, 8)",
    ),
    Piece("straight_through", "h = h + (h.round() - h).detach()"),
    Piece("cumulative", "h = h.cumsum(1) / torch.arange(1, 5, device=h.device).view(1, 4, 1)"),
    Piece("sorted", "h = h + h.sort(-1)[0]"),
    Piece("gathered", "h = h + h.gather(1, (ids % 4).unsqueeze(-1).expand_as(h))"),
    Piece(
        "einsum",
        "h = torch.einsum('bsd,de->bse', h, self.w{i})",
        "self.w{i} = nn.Parameter(torch.randn(8, 8) * 0.3)",
    ),
    Piece(
        "tied",
        "h = self.l{i}(F.relu(F.linear(h, self.l{i}.weight.t())))",
        "self.l{i} = nn.Linear(8, 8)",
    ),
    Piece("twice", "h = self.l{i}(torch.tanh(self.l{i}(h)))", "self.l{i} = nn.Linear(8, 8)"),
    Piece(
        "frozen",
        "h = h + self.l{i}(h)",
        "self.l{i} = nn.Linear(8, 8)\nself.l{i}.weight.requires_grad_(False)",
    ),
    Piece("unused", "h = h * 1.0", "self.u{i} = nn.Linear(8, 3)"),
    Piece(
        "checkpoint",
        "h = h + checkpoint(self.m{i}, h, use_reentrant=False)",
        "self.m{i} = nn.Sequential(nn.Linear(8, 8), nn.Tanh())",
    ),
    Piece(
        "single",
        "h = h + self.l{i}(h).float().softmax(-1).to(h.dtype)",
        "self.l{i} = nn.Linear(8, 8)",
    ),
    Piece("constant", "h = h * self.scale{i}", "self.scale{i} = torch.linspace(0.5, 1.5, 8)"),
    Piece(
        "mask_cache",
        "if self.mask{i} is None:\n"
        "    self.mask{i} = torch.ones(4, 4, dtype=torch.bool).tril()\n"
        "h = h + F.scaled_dot_product_attention(h, h, h, self.mask{i})",
        "self.mask{i} = None",
    ),
    Piece("noted", "self.last{i} = h.detach()\nh = h * 0.9", "self.last{i} = None"),
    Piece("logged", "self.log{i}.append(tuple(h.shape))\nh = h + 0.1", "self.log{i} = []"),
    Piece(
        "forward_hook",
        "h = self.l{i}(h)",
        "self.l{i} = nn.Linear(8, 8)\n"
        "self.l{i}.register_forward_hook(lambda module, args, out: 0.5 * out)",
    ),
    Piece(
        "module_list",
        "for layer in self.s{i}:\n    h = h + layer(h)",
        "self.s{i} = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))",
    ),
    Piece(
        "norm_weight",
        "h = F.linear(h, F.normalize(self.w{i}, dim=1))",
        "self.w{i} = nn.Parameter(torch.randn(8, 8))",
    ),
    Piece("helper", "h = helper{i}(h)", outside="def helper{i}(x):\n    return x * x.sigmoid()"),
    Piece("exponent", "h = h.clamp(-3, 3).exp().log1p()"),
    Piece("pooled", "h = h + F.avg_pool1d(h.transpose(1, 2), 2, 2).repeat_interleave(2, -1).mT"),
    Piece("dropout", "h = self.d{i}(h)", "self.d{i} = nn.Dropout(0.2)", draws=True),
    Piece("noise", "h = h + 0.1 * torch.randn_like(h)", draws=True),
    Piece("gumbel", "h = h + F.gumbel_softmax(h, tau=0.7)", draws=True),
)

TRAPS: tuple[Piece, ...] = (
    Piece("no_grad_clamp", "with torch.no_grad():\n    h.clamp_(-1, 1)", trap="A1"),
    Piece("no_grad_write", "h = h * 1.0\nwith torch.no_grad():\n    h[:, :2] = 0", trap="A1"),
    Piece("no_grad_view", "h = h * 1.0\nwith torch.no_grad():\n    h[..., 0].mul_(0.5)", trap="A1"),
    Piece("detached_write", "h = h * 1.0\nh.detach()[:, 0].fill_(0.25)", trap="A1"),
    Piece("data_write", "h = h * 1.0\nh.data.mul_(0.5)", trap="A1"),
    Piece("inference_write", "h = h * 1.0\nwith torch.no_grad():\n    part = h[:, 1:]\n"
          "    part.copy_(part.round())", trap="A1"),
    Piece("detach_", "h = self.l{i}(h)\ng = h * 1.0\ng.detach_()\nh = h + g",
          "self.l{i} = nn.Linear(8, 8)", trap="A2"),
    Piece("data_set", "self.b{i}.data = self.b{i} * 0.5 + 1\nh = h * self.b{i}",
          'self.register_buffer("b{i}", torch.ones(8))', trap="A2"),
    Piece("parameter_data", "self.w{i}.data = self.w{i}.data.clamp(-0.5, 0.5)\nh = h * self.w{i}",
          "self.w{i} = nn.Parameter(torch.ones(8))", trap="A2"),
    Piece("requires_grad_", "g = h.detach().requires_grad_()\nh = h + g.tanh()", trap="A2"),
    Piece("toggled", "self.w{i}.requires_grad_(False)\nh = h * self.w{i}",
          "self.w{i} = nn.Parameter(torch.ones(8))", trap="A2"),
    Piece("gradient_hook", "h = h * 1.0\nif h.requires_grad:\n"
          "    h.register_hook(lambda g: 2 * g)", trap="A3"),
    Piece("node_hook", "h = h.tanh()\nif h.grad_fn is not None:\n"
          "    h.grad_fn.register_prehook(lambda g: (2 * g[0],))", trap="A3"),
    Piece("saved_hooks", "with torch.autograd.graph.saved_tensors_hooks(\n"
          "    lambda t: t * 2 if t.is_floating_point() else t, lambda t: t\n):\n    h = h * h.tanh()",
          trap="A3"),
    Piece("reentrant", "h = h + checkpoint(self.l{i}, x, use_reentrant=True)",
          "self.l{i} = nn.Linear(8, 8)", trap="A3"),
    Piece("wrong_backward", "h = Wrong{i}.apply(h)", outside="class Wrong{i}(torch.autograd.Function):\n"
          "    @staticmethod\n    def forward(ctx, x):\n        ctx.save_for_backward(x)\n"
          "        return x * 2\n    @staticmethod\n    def backward(ctx, g):\n"
          "        return 2 * g * (ctx.saved_tensors[0] < 5)", trap="A4"),
    Piece("wrong_for_integers", "h = Pick{i}.apply(h, ids)",
          outside="class Pick{i}(torch.autograd.Function):\n    @staticmethod\n"
          "    def forward(ctx, x, n):\n        ctx.save_for_backward(n)\n        return x * 1\n"
          "    @staticmethod\n    def backward(ctx, g):\n"
          "        return g * (ctx.saved_tensors[0] < 7).unsqueeze(-1), None", trap="A4"),
    Piece("seeded", "torch.manual_seed(3)\nh = h + 0.1 * torch.randn_like(h)", trap="A5"),
    Piece("eval_inside", "self.n{i}.eval()\nh = self.n{i}(h.mT).mT\nself.n{i}.train()",
          "self.n{i} = nn.BatchNorm1d(8)", trap="A5"),
    Piece("call_count", "self.calls{i} += 1\nh = h * (1 + 0.1 * self.calls{i})", "self.calls{i} = 0",
          trap="B"),
    Piece("warm_up", "self.calls{i} += 1\nif self.calls{i} > 100:\n    h = h * 2",
          "self.calls{i} = 0", trap="B"),
    Piece("closure", "h = h * next{i}()", outside="def counter{i}():\n    n = 0\n    def step():\n"
          "        nonlocal n\n        n += 1\n        return 1 + 0.1 * n\n    return step\n\n"
          "next{i} = counter{i}()", trap="B"),
    Piece("cycle", "h = h * next(self.it{i})", "self.it{i} = itertools.cycle([1.0, 2.0])",
          trap="B"),
    Piece("generator", "h = h * next(self.g{i})", "self.g{i} = (1.0 + n for n in range(9999))",
          trap="B"),
    Piece("default", "h = h * self.grow{i}()",
          outside="def grow{i}(self, seen=[]):\n    seen.append(1)\n    return float(len(seen))",
          init="self.grow{i} = types.MethodType(grow{i}, self)", trap="B"),
    Piece("function_attribute", "h = h * tally{i}()", outside="def tally{i}():\n"
          "    tally{i}.n = getattr(tally{i}, 'n', 0) + 1\n    return 1.0 / tally{i}.n", trap="B"),
    Piece("array", "self.array{i} += 1\nh = h * float(self.array{i}.sum())",
          "self.array{i} = numpy.ones(2)", trap="B"),
    Piece("slots", "h = h * self.policy{i}()", "self.policy{i} = Policy{i}()",
          outside="class Policy{i}:\n    __slots__ = ('n',)\n    def __init__(self):\n        self.n = 0\n"
          "    def __call__(self):\n        self.n += 1\n        return 1.0 + self.n", trap="B"),
    Piece("deep", "h = h * self.box{i}.inner.inner[0].up()", "self.box{i} = Box{i}(Box{i}([Leaf{i}()]))",
          outside="class Box{i}:\n    def __init__(self, inner):\n        self.inner = inner\n\n"
          "class Leaf{i}:\n    n = 0\n    def up(self):\n        self.n += 1\n        return 1.0 + self.n",
          trap="B"),
    Piece("hook_cell", "h = self.l{i}(h)", "self.l{i} = nn.Linear(8, 8)\n"
          "self.l{i}.register_forward_hook(hook{i}())", outside="def hook{i}():\n    cell = [0]\n"
          "    def hook(module, args, out):\n        cell[0] += 1\n        return out * cell[0]\n"
          "    return hook", trap="B"),
    Piece("global", "global WARM{i}\nWARM{i} += 1\nh = h * WARM{i}", outside="WARM{i} = 0", trap="B"),
    Piece("carried", "h = h + self.last{i}\nself.last{i} = h.detach().mean()", "self.last{i} = 0.0",
          trap="B"),
    Piece("narrow_gumbel", "g = h.bfloat16().repeat(1, 1, 40)\n"
          "h = h + F.gumbel_softmax(g, dim=-1)[..., :8].to(h.dtype)", trap="D", draws=True),
    Piece("host_random", "h = h * random.random()", trap="B"),
    Piece("clock", "h = h * (time.perf_counter() % 1)", trap="B"),
)  # fmt: skip
