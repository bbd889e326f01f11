"""Every layout of the Transformer against one device, outside the suite: `python tests/sweeps/layouts.py --out FILE`.

Each axis alone, all pairs of axes, triples, experts with tensor and data, 16 ranks on four axes; then meshes, sizes and
options drawn at random. Each case trains three AdamW steps in float64, clipped so that it bites, on batches of which
the last is ragged, with unequal weights, packed documents and a rank without tokens. Loss, norm, every leaf's gradient
and the params afterwards are held against one device, which goes by microbatches, as F.cross_entropy has it.

A line of JSON for each case is added to FILE; started again with it, the sweep goes on. The exit status is 1 if a case
failed: loss or norm off by 1e-11, a gradient by 1e-11 of its leaf's maximum, params by 1e-9 of theirs. With `--compile
aot_eager`, or another backend, a step is one graph of torch.compile, on the meshes of two or four ranks without stages
and experts, which are refused there.
"""

import math
import random
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import combinations
from pathlib import Path

import torch
import torch.nn.functional as F
from rows import Rows
from torch import Tensor
from torch.func import grad_and_value

from scaling import launch, optim, tree
from scaling.common.console import Parser
from scaling.configs import Config
from scaling.models import transformer as model
from scaling.spec import present
from scaling.spec.sizes import parse_mesh
from scaling.strategies import transformer

LIMIT = 0.05  # of the gradients' norm
LIMITS = {"loss": 1e-11, "norm": 1e-11, "grads": 1e-11, "params": 1e-9}
PLAIN = Config("plain", 2, 16, 24, 4, 2, 8, 32)
MODELS = {
    "plain": PLAIN,
    "rich": PLAIN.with_(
        L=3, attention_bias=True, output_bias=True, qk_norm=True, tied=True, window=(None, 5, 3), theta=100.0
    ),
    "one KV head": PLAIN.with_(K=1, gated=False, window=4),
    "experts": PLAIN.with_(E=4, k=2, aux_coef=0.1, z_coef=0.01, shared=1),
    "sigmoid": PLAIN.with_(E=6, k=3, aux_coef=0.1, routing="sigmoid", routed_scale=2.5, K=4, qk_norm=True),
}
AXES = "PZXCYE"
LARGER = ["Z=2,C=2,Y=2", "X=2,C=2,Y=2", "Z=2,X=2,Y=2", "X=2,E=2,Y=2", "Z=2,X=2,C=2,Y=2"]
MESHES = [*({axis: size} for axis in AXES for size in (2, 4)), *({a: 2, b: 2} for a, b in combinations(AXES, 2))]
MESHES += map(parse_mesh, LARGER)  # each axis alone, by two and by four, all pairs, triples, and sixteen ranks
HEADS = (4, 2), (6, 3), (6, 1), (12, 4)  # N, K
CHOICES = {"microbatches": (2,), "remat": ("none", "block"), "label_smoothing": (0.0, 0.1), "z_loss": (0.0, 0.01)}
CHOICES |= {"context": ("zigzag", "ring", "gather", "ulysses"), "zero": (0, 3)}
CHOICES |= {"schedule": ("gpipe", "1f1b", "interleaved", "zb-h1", "dualpipev")}
CHOICES |= dict.fromkeys(("packed", "weighted"), (False, True))


def models_of(sizes: dict) -> list[str]:
    return ["experts", "sigmoid"] if "E" in sizes else list(MODELS)


def fitting(name: str, config: Config, sizes: dict, options: dict) -> tuple[Config, dict]:
    """The model with as many layers, heads and features as the mesh asks for; options that go with the mesh."""
    X, Y, Z, E, C = (sizes.get(axis, 1) for axis in "XYZEC")
    options = dict(options)
    if Z > 1:
        options["microbatches"] = 2 * Z
        chunks = 2 if options["schedule"] in ("interleaved", "dualpipev") else 1
        L = max(config.L, chunks * Z + 1)  # uneven stages
        window = config.window if not isinstance(config.window, tuple) else (None, *[5, 3] * L)[:L]
        config = config.with_(L=L, window=window)
    else:
        del options["schedule"]
    if options["context"] == "ulysses" and (config.N // Y) % C:
        options["context"] = "zigzag"
    K = 1 if config.K % Y and Y % config.K else config.K
    N, F, V = math.lcm(config.N, Y), math.lcm(config.F, Y), math.lcm(config.V, Y * Z)
    experts = math.lcm(config.E, E) if config.moe else 1
    config = config.with_(name=name, D=math.lcm(config.D, X), E=experts, N=N, F=F, V=V, K=math.gcd(N, K))
    return config, options


def cases(drawn: int, seed: int):
    """(name, mesh, config, options) of the matrix, each mesh with two models, and of `drawn` random ones."""
    draw = random.Random(seed)

    def case(what: str, name: str, config: Config, sizes: dict):
        options = {key: draw.choice(values) for key, values in CHOICES.items()}
        return f"{what}{name} {sizes}", sizes, *fitting(name, config, sizes, options)

    for i, sizes in enumerate(MESHES):
        names = models_of(sizes)
        for name in (names[i % len(names)], names[(i + 1) % len(names)]):
            yield case("", name, MODELS[name], sizes)
    for i in range(drawn):
        axes = draw.sample(AXES, draw.randint(1, 3))
        sizes = {axis: draw.choice((2, 3, 4) if len(axes) < 3 else (2, 3)) for axis in axes}
        if math.prod(sizes.values()) > 18:
            continue
        name, H, (N, K) = draw.choice(models_of(sizes)), draw.choice((4, 6, 8)), draw.choice(HEADS)
        config = MODELS[name].with_(D=draw.choice((8, 12, 20)), F=draw.choice((10, 16)), H=H, N=N, K=K)
        yield case(f"drawn {seed}.{i} ", name, config, sizes)


def batches(config: Config, sizes: dict, options: dict) -> list[tuple[Tensor, ...]]:
    """(tokens, targets, weights, segments) of three steps; the last has half the rows. Rank 0's rows have no target."""
    g = torch.Generator().manual_seed(7)
    data, M = parts(sizes), options["microbatches"]
    T = 2 * sizes.get("C", 1) * sizes.get("Y", 1) * 3
    found = []
    for rows in (2, 2, 1):
        B = rows * data * M
        tokens, targets = (torch.randint(0, config.V, (B, T), generator=g) for _ in range(2))
        targets[torch.rand(B, T, generator=g) < 0.3] = -100
        if data > 1:
            targets[: B // data] = -100
        weights = torch.rand(B, T, generator=g, dtype=torch.float64) * 3
        found.append((tokens, targets, weights, (torch.rand(B, T, generator=g) < 0.2).cumsum(1)))
    return found


def parts(sizes: dict) -> int:
    """Into how many parts the batch is split."""
    return math.prod(sizes.get(axis, 1) for axis in "PXE")


def start(config: Config):
    """Params of which nothing is uniform: gains and biases too."""
    g = torch.Generator().manual_seed(3)
    params = model.init(config, 0, torch.float64)
    return tree.map(lambda W: W + 0.1 * torch.randn(W.shape, generator=g, dtype=W.dtype), params)


def trained(params, steps, loss_and_grads: Callable, clipped: Callable, whole: Callable, **where) -> dict:
    """Of steps of AdamW by `loss_and_grads` and `clipped`: losses, norms, gradients; and the params after them."""
    adamw, found = optim.adamw(0.01), {"loss": [], "norm": [], "grads": []}
    state = adamw.init(params)
    for batch in steps:
        loss, grads = loss_and_grads(params, *batch)
        scaled, norm = clipped(grads)
        for key, x in zip(found, (loss, norm, whole(grads)), strict=True):
            found[key].append(x)
        params, state = adamw.update(scaled, state, params, **where)
    return found | {"params": whole(params)}


def one_device(config: Config, sizes: dict, options: dict) -> dict:
    """Three steps by microbatches: those of all parts of the batch together."""
    M, smoothing = options["microbatches"], options["label_smoothing"]

    def loss_and_grads(params, tokens, targets, weights, segments):
        w = (weights if options["weighted"] else 1) * (targets != -100).double()

        def loss(params):
            total, rows = 0, torch.arange(len(tokens)).view(parts(sizes), M, -1)
            for some in (rows[:, m].flatten() for m in range(M)):
                given = segments[some] if options["packed"] else None
                logits, extra = model._forward(params, tokens[some], "none", model.sdpa, config, given)
                flat = logits.flatten(0, 1)
                ce = F.cross_entropy(flat, targets[some].flatten(), reduction="none", label_smoothing=smoothing)
                ce = ce + options["z_loss"] * flat.logsumexp(-1).square()
                total = total + (w[some].flatten() * ce).sum() / w.sum() + extra / M
            return total

        return grad_and_value(loss)(params)[::-1]

    def clipped(grads):
        norm = torch.cat([g.flatten() for g in tree.leaves(grads)]).norm()
        assert norm > LIMIT, "clipping must bite"
        return tree.map(lambda g: g * LIMIT / (norm + 1e-6), grads), norm

    return trained(start(config), batches(config, sizes, options), loss_and_grads, clipped, lambda whole: whole)


def on_mesh(mesh, config: Config, sizes: dict, options: dict, wanted: dict, backend: str) -> dict:
    """The largest errors of this rank, by kind, and where."""
    layout = {key: options[key] for key in ("schedule", "zero") if key in options}
    types = transformer.specs(config, mesh, **layout)
    clipped = partial(optim.clip_by_global_norm, specs=types, mesh=mesh, max_norm=LIMIT)
    whole = partial(transformer.unshard, config=config, mesh=mesh, **layout)
    given = {key: value for key, value in options.items() if key not in ("packed", "weighted")}

    def loss_and_grads(params, tokens, targets, weights, segments):
        extra = {"weights": weights} if options["weighted"] else {}
        extra |= {"segments": segments} if options["packed"] else {}
        return transformer.loss_and_grads(params, tokens, targets, config, mesh, **given, **extra)

    if backend:
        loss_and_grads = torch.compile(loss_and_grads, backend=backend, fullgraph=True, dynamic=False)
    rows = [tree.shard(x, [str(present("t[B_PXE, T_C]", mesh))] * 4, mesh) for x in batches(config, sizes, options)]
    params = transformer.shard(start(config), config, mesh, **layout)
    found = trained(params, rows, loss_and_grads, clipped, whole, specs=types, mesh=mesh)
    return {key: largest(found[key], wanted[key]) for key in LIMITS}


def largest(found, wanted) -> tuple[float, str]:
    """(the largest error, relative to its leaf's maximum; where): of a NaN infinity."""
    leaves = zip(tree.named_leaves(found).items(), tree.leaves(wanted), strict=True)
    relative = [((a - b).abs().max() / b.abs().max().clamp(min=1e-30), where) for (where, a), b in leaves]
    return max((error.nan_to_num(math.inf).item(), where) for error, where in relative)


def outcome(sizes: dict, config: Config, options: dict, backend: str) -> dict:
    try:
        wanted = one_device(config, sizes, options)
        ranks = launch.run(on_mesh, sizes, config, sizes, options, wanted, backend)
        most = {key: max(rank[key] for rank in ranks) for key in LIMITS}
        return most | {"ok": all(most[key][0] <= limit for key, limit in LIMITS.items())}
    except Exception as error:
        return {"ok": False, "error": f"{type(error).__name__}: {error}"[-2000:]}


def main() -> int:
    parser = Parser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="a line of JSON for each case; those there are not run")
    parser.add_argument("--drawn", type=int, default=40, help="random cases after the matrix")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="cases whose name has this")
    parser.add_argument("--compile", default="", metavar="BACKEND", help="of torch.compile")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = Rows(args.out)
    done = {row["case"] for row in rows}
    for name, sizes, config, options in cases(args.drawn, args.seed):
        compiles = math.prod(sizes.values()) <= 4 and "Z" not in sizes and not config.moe
        if name in done or args.only not in name or (args.compile and not compiles):
            continue
        began = time.time()
        found = outcome(sizes, config, options, args.compile)
        rows.add({"case": name, "options": options} | found | {"seconds": round(time.time() - began, 1)})
        print(f"{'ok' if found['ok'] else 'FAILED':7}{name}", flush=True)
    most = {key: max((row[key][0] for row in rows if key in row), default=0.0) for key in LIMITS}
    failed = sum(not row["ok"] for row in rows)
    print(f"{len(rows)} cases, {failed} failed; worst: " + ", ".join(f"{k} {v:.1e}" for k, v in most.items()))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
