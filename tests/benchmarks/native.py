"""PyTorch's own parallelism, as a user would set it up: the other side of the comparisons with `scaling.strategies`.

The model is the book's stack as an nn.Sequential of blocks of two `nn.Linear` without bias, wrapped by
DistributedDataParallel, fully_shard (each block, then the root), DTensor's parallelize_module, both, or
DistributedDataParallel with ZeroRedundancyOptimizer. An nn.Linear's weight is the transpose of the book's.

And the same Transformer: an nn.Module of nn.Linear, nn.RMSNorm and scaled_dot_product_attention; fully_shard for each
block, then the root; parallelize_module with sequence parallelism (norms and the residual stream split along T) and a
loss over a split vocabulary. Both on stages, too, by a schedule of torch's. PyTorch averages gradients over X, hence
the factor in the loss.
"""

import warnings
from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, parallel

from scaling.configs import Config
from scaling.models.rope import rotate, tables

with warnings.catch_warnings():  # torch's own import of it uses what torch deprecates
    warnings.simplefilter("ignore")
    from torch.distributed.optim import ZeroRedundancyOptimizer

LAYOUTS = {"D": Shard(-1), "B": Shard(0), "whole": Replicate()}  # of the activations between layers, over Y
OPTIMIZERS = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}


def linear(W: Tensor) -> nn.Linear:
    """A layer with the book's W[in, out]."""
    layer = nn.Linear(*W.shape, bias=False, device="meta")
    layer.weight = nn.Parameter(W.T.clone(memory_format=torch.contiguous_format))
    return layer


class Block(nn.Module):
    """In[B, D] -> gelu(In W_in) W_out."""

    def __init__(self, W_in: Tensor, W_out: Tensor):
        super().__init__()
        self.up, self.down = linear(W_in), linear(W_out)

    def forward(self, In: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(In)))


def optimizer_of(weights: Iterable, rule: str, lr: float, tuned: bool, group=None):
    """`tuned`: fused; of a DTensor there is no fused SGD: foreach is then the best there is. `group`: its states are
    split over it."""
    weights = list(weights)
    fast = "foreach" if rule == "sgd" and isinstance(weights[0], DTensor) else "fused"
    options = {"lr": lr} | ({fast: True} if tuned else {})
    if group is None:
        return OPTIMIZERS[rule](weights, **options)
    return ZeroRedundancyOptimizer(weights, optimizer_class=OPTIMIZERS[rule], process_group=group, **options)


class Trained:
    """A wrapped model and its optimizer. `step(In, loss)` makes one training step in place and returns this rank's
    share of the loss. `compiled`: forward and backward by torch.compile."""

    def __init__(self, model: nn.Module, mesh, compiled: bool, optimizer: str, lr: float, tuned: bool, group=None):
        self.model, self.replicas = model, mesh.sizes.get("X", 1)
        self.call = torch.compile(model) if compiled else model
        self.optimizer = optimizer_of(model.parameters(), optimizer, lr, tuned, group)

    def backward(self, In: Tensor, loss: Callable[[Tensor], Tensor]) -> Tensor:
        """Gradients of loss(Out), this rank's share, into `.grad`; those over X are averaged, hence the factor."""
        self.optimizer.zero_grad()
        share = loss(self.call(In))
        (share * self.replicas).backward()
        return share.detach()

    def step(self, In: Tensor, loss: Callable[[Tensor], Tensor]) -> Tensor:
        share = self.backward(In, loss)
        self.optimizer.step()
        return share


class Native(Trained):
    """The book's stack by a strategy. `layout` is that of activations between layers over Y: "D" as the book has it,
    "B" (sequence parallelism), or "whole" (an AllReduce). `tuned`: the fastest settings instead of the default ones."""

    def __init__(self, strategy, params, mesh, optimizer="adamw", lr=1e-3, layout="D", tuned=False, compiled=False):
        self.blocks = model = nn.Sequential(*map(Block, params["W_in"], params["W_out"])).to(mesh.device)
        devices, group = mesh.device_mesh if mesh.size() > 1 else None, None
        tensor, data = (devices["Y"], devices["X"]) if strategy == "fsdp_tp" else (devices, devices)
        if strategy in ("tensor_parallel", "fsdp_tp"):  # up by columns, down by rows; in and out are local tensors
            plan = {f"{i}.up": parallel.ColwiseParallel(input_layouts=LAYOUTS[layout]) for i in range(len(model))}
            plan |= {f"{i}.down": parallel.RowwiseParallel(output_layouts=LAYOUTS[layout]) for i in range(len(model))}
            parallel.parallelize_module(model, tensor, plan)
        if strategy in ("fsdp", "fsdp_tp", "fsdp_kept"):
            fully_sharded(model, model, data, keep=strategy == "fsdp_kept")
        if strategy in ("data_parallel", "zero"):
            group = mesh.group(("X",)).pg
            model = nn.parallel.DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=tuned)
        super().__init__(model, mesh, compiled, optimizer, lr, tuned, group if strategy == "zero" else None)

    def params(self) -> dict:
        """The whole params in the book's form: W_in[L, D, F], W_out[L, F, D]."""
        return self._stacked(lambda layer: layer.weight.detach())

    def grads(self) -> dict:
        return self._stacked(lambda layer: layer.weight.grad)

    def _stacked(self, read: Callable) -> dict:
        halves = {"W_in": [block.up for block in self.blocks], "W_out": [block.down for block in self.blocks]}
        return {name: torch.stack([whole(read(layer)).T for layer in layers]) for name, layers in halves.items()}


def whole(x: Tensor) -> Tensor:
    if not isinstance(x, DTensor):
        return x.clone()
    with warnings.catch_warnings():  # torch's own code calls what torch deprecates
        warnings.simplefilter("ignore")
        return x.full_tensor()


def fully_sharded(model: nn.Module, blocks: Iterable, devices, keep: bool = False) -> None:
    """Each block, then the root. `keep`: gathered weights stay until the backward, as pipelines want it."""
    for module in (*blocks, model):
        fully_shard(module, mesh=devices, reshard_after_forward=not keep)


def staged(
    stage: Callable[[int, int], nn.Module], layers: int, chunks: int, schedule: str, microbatches: int, mesh,
    In: Tensor, target: Tensor, loss: Callable, optimizer: str, lr: float, tuned: bool,
) -> Callable:  # fmt: skip
    """step() -> this rank's share of the loss, `loss(Out, target)`, on stages of `stage(first layer, last)`, so many on
    each rank, by a schedule of torch's."""
    from torch.distributed import pipelining

    Z, z, X, group = mesh.sizes["Z"], mesh.coord["Z"], mesh.sizes.get("X", 1), mesh.group(("Z",)).pg
    own, depth = range(z, chunks * Z, Z), layers // (chunks * Z)
    modules = [stage(s * depth, (s + 1) * depth) for s in own]
    stages = [
        pipelining.PipelineStage(module, s, chunks * Z, mesh.device, group=group)
        for module, s in zip(modules, own, strict=True)
    ]
    options = {"loss_fn": lambda Out, target: X * loss(Out, target), "scale_grads": False}
    run = getattr(pipelining, schedule)(stages if chunks > 1 else stages[0], microbatches, **options)
    update = optimizer_of((W for module in modules for W in module.parameters()), optimizer, lr, tuned)

    def step():
        update.zero_grad()
        losses: list = []
        given = {"target": target, "losses": losses} if z == Z - 1 else {}
        run.step(*([In] if z == 0 else []), **given)
        update.step()
        return sum(losses).detach() / X if losses else torch.zeros((), device=mesh.device)

    return step


def norm(config: Config, like: Tensor) -> nn.RMSNorm:
    return nn.RMSNorm(config.D, eps=config.eps, device=like.device, dtype=like.dtype)


class TransformerBlock(nn.Module):
    def __init__(self, W: dict, config: Config):
        super().__init__()
        self.H = config.H
        self.norm_attn, self.norm_mlp = (norm(config, W["W_Q"]) for _ in range(2))
        self.q, self.k, self.v = (linear(W[name].flatten(1)) for name in ("W_Q", "W_K", "W_V"))
        self.o = linear(W["W_O"].flatten(0, 1))
        self.up, self.gate, self.down = (linear(W[name]) for name in ("W_in", "W_gate", "W_out"))
        self.attention, self.mlp = nn.Identity(), nn.Identity()  # where tensor parallelism gathers the sequence

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        y = self.attention(self.norm_attn(x))
        q, k, v = (each(y).unflatten(-1, (-1, self.H)) for each in (self.q, self.k, self.v))
        heads = (h.transpose(1, 2) for h in (rotate(q, cos, sin), rotate(k, cos, sin), v))
        O = F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True).transpose(1, 2)
        x = x + self.o(O.flatten(2))
        y = self.mlp(self.norm_mlp(x))
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Model(nn.Module):
    """Layers `first` to `last` of the model, with the embedding if it begins there and the head if it ends there."""

    def __init__(self, params: dict, config: Config, T: int, first: int, last: int):
        super().__init__()
        self.embed = nn.Embedding.from_pretrained(params["embed"].clone(), freeze=False) if first == 0 else None
        layers = [{name: W[l] for name, W in params["layers"].items()} for l in range(first, last)]
        self.blocks = nn.ModuleList(TransformerBlock(W, config) for W in layers)
        like = params["embed"]
        self.norm = norm(config, like) if last == config.L else None
        self.unembed = linear(params["unembed"]) if last == config.L else None
        both = tables(torch.arange(T, device=like.device), config.H, config.theta, None, like.dtype)
        for name, table in zip(("cos", "sin"), both, strict=True):
            self.register_buffer(name, table, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.embed is None else self.embed(x)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return x if self.unembed is None else self.unembed(self.norm(x))


def split_over_y(model: Model, devices) -> None:
    """Heads, features and vocabulary over Y; between them the sequence."""
    rows, whole = Shard(1), Replicate()
    gathered = parallel.PrepareModuleInput(input_layouts=(rows,), desired_input_layouts=(whole,))
    norms, columns = parallel.SequenceParallel(), parallel.ColwiseParallel()
    ends = {
        "embed": parallel.RowwiseParallel(input_layouts=whole, output_layouts=rows),
        "norm": norms,
        "unembed": parallel.ColwiseParallel(input_layouts=rows, output_layouts=Shard(-1), use_local_output=False),
    }
    parallel.parallelize_module(model, devices, ends)
    for block in model.blocks:
        plan = {"norm_attn": norms, "norm_mlp": norms, "attention": gathered, "mlp": gathered}
        plan |= dict.fromkeys(("q", "k", "v", "up", "gate"), columns)
        plan |= dict.fromkeys(("o", "down"), parallel.RowwiseParallel(output_layouts=rows))
        parallel.parallelize_module(block, devices, plan)
