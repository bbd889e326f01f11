"""What tests of strategies share: how what a mesh gives is held beside one device, by the law of cotangents and through
steps of training; the book's strategies, sizes and meshes; a layer of experts."""

from collections import Counter

import torch
from torch.func import functional_call, vjp

from scaling import optim, tree
from scaling.configs import Config
from scaling.models.mlp import MLPConfig, MLPStack
from scaling.spec import parse, present
from scaling.strategies import data_parallel, expert, fsdp, fsdp_tp, tensor_parallel

ADAMW = optim.adamw(0.01)
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5}  # relative to the largest element; never to be loosened


def close(got, wanted, limit=None):
    """Each leaf, to the tolerance of its dtype or another, relative to the largest element of the wanted one."""
    for (where, a), b in zip(tree.named_leaves(got, "found").items(), tree.leaves(wanted), strict=True):
        off, largest = (a - b).abs().max(), b.abs().max()
        assert off <= (limit or TOLERANCE[b.dtype]) * largest, f"{where}: {off} of {largest}"


def same(a, b) -> bool:
    """Whether two trees have one structure and the same numbers to the bit."""
    return tree.structure(a) == tree.structure(b) and all(map(torch.equal, tree.leaves(a), tree.leaves(b)))


def drawn(*shapes, seed=0):
    """Normal numbers in float64 of each shape."""
    rng = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, dtype=torch.float64, generator=rng) for shape in shapes]


def pulled(f, mesh, operands, types, results, cotangents, by=vjp):
    """f of whole operands' shards: its results, and the operands' gradients, made whole. Replicas of a result have each
    a part of its cotangent, and those of an operand each a part of its gradient."""

    def part(cotangent, text):
        spec = parse(text)
        replicas = mesh.size([axis for axis in mesh.sizes if axis not in spec.axes + spec.unreduced])
        return tree.shard(cotangent, spec.with_unreduced(()), mesh) / replicas

    found, pull = by(f, *tree.shard(operands, types, mesh))
    grads = pull(tree.map(part, cotangents, results))
    return tree.unshard(found, results, mesh), summed(grads, types, mesh)


def summed(grads, types, mesh):
    """Whole gradients of what is typed so: sums over the axes along which it is replicated."""

    def partial_sums(text):
        return parse(text).with_unreduced([axis for axis in mesh.sizes if axis not in parse(text).axes])

    return tree.unshard(grads, tree.map(partial_sums, types), mesh)


def rows_on(mesh, *whole):
    """This rank's part of arrays[B, T] of a batch, as a step of the Transformer takes them."""
    return tree.shard([*whole], [present("t[B_PXE, T_C]", mesh)] * len(whole), mesh)


def on_one_device(f, operands, cotangents):
    found, pull = vjp(f, *operands)
    return found, pull(cotangents)


def trained(params, loss_and_grads, batches, rule=ADAMW):
    """The losses, what was found of the first batch beside its loss, and the params after a step for each batch."""
    losses, first = [], None
    state = rule.init(params)
    for batch in batches:
        loss, *found = loss_and_grads(params, batch)  # gradients first
        losses.append(loss)
        first = first or found
        params, state = rule.update(found[0], state, params)
    return torch.stack(losses), first, params


STRATEGIES = {s.__name__.split(".")[-1]: s for s in (data_parallel, fsdp, tensor_parallel, fsdp_tp)}
L, B, D, F = 3, 16, 16, 32
SIZES = {"L": L, "B": B, "D": D, "F": F}
BLOCKS = [("gelu", True, True), ("gelu", False, False), ("relu", False, False), ("none", False, False)]


def specs(strategy):
    """The params' types with their stacked layers."""
    return {name: strategy.SPECS[name].replace("[", "[L, ") for name in ("W_in", "W_out")}


def whole(dtype=torch.float64, L=L):
    """Params, and the inputs and targets of three steps."""
    batches, W_in, W_out = drawn((3, 2, B, D), (L, D, F), (L, F, D))
    params = {"W_in": W_in / D**0.5, "W_out": W_out / F**0.5}
    return tree.map(lambda p: p.to(dtype), params), batches.to(dtype)


def squares(Out, Target):
    """The mean over the batch of the squared error, as the terms of the rows at hand."""
    return (Out - Target).square().sum() / B


def stack(params, In, block=BLOCKS[0]):
    """An nn.Module of the book's layers."""
    sizes = {"activation": block[0], "residual": block[1], "norm": block[2]}
    return functional_call(MLPStack(MLPConfig(len(params["W_in"]), D, F, **sizes)), params, (In,))


def one_device(dtype=torch.float64, block=BLOCKS[0], L=L, steps=3):
    """The losses, (gradients, dIn) of the first batch, and the params after the steps."""
    params, batches = whole(dtype, L)

    def step(params, batch):
        def loss(params, In):
            return squares(stack(params, In, block), batch[1])

        grads, value = torch.func.grad_and_value(loss, argnums=(0, 1))(params, batch[0])
        return value, *grads

    return trained(params, step, batches[:steps])


def counts(log):
    return Counter((event.op, "".join(event.axes)) for event in log.collectives())


OF_EXPERTS = {"L": 1, "D": 6, "F": 8, "N": 2, "K": 1, "H": 4, "V": 7}
SOFTMAX = Config("softmax", **OF_EXPERTS, E=8, k=2)
SIGMOID = Config(
    "sigmoid", **OF_EXPERTS, E=8, k=3, shared=2, routing="sigmoid", expert_groups=4, top_groups=2, routed_scale=2.5
)


def problem(config: Config, how: str):
    """Params, x[4, 6, D] and the cotangent dy, whole: normal numbers, in which no two tokens or experts are alike."""
    rng = torch.Generator().manual_seed(len(how))

    def normal(*shape):
        return torch.randn(shape, generator=rng, dtype=torch.float64)

    types = expert.specs(config, None)
    params = tree.map(lambda text: normal(*parse(text).global_shape(config.sizes)) / 2, types)
    x, dy = normal(4, 6, config.D), normal(4, 6, config.D)
    if how == "one":  # all tokens choose expert 5 first; most others are empty
        x[..., 0] = x[..., 0].abs() + 1
        params["router"] *= 0.1
        params["router"][0] = torch.tensor([0, 0, 0, 0, 0, 9.0, 0, 0])
    if how == "ties":
        params["router"][:, 4:] = params["router"][:, :4]
        x[1] = 0
    return params, x, dy
