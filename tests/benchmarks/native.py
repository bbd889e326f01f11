"""PyTorch's own parallelism, as a user would set it up: the other side of the comparisons with `scaling.strategies`.

The model is the book's stack as an nn.Sequential of blocks of two `nn.Linear` without bias, wrapped by
DistributedDataParallel, fully_shard (each block, then the root), DTensor's parallelize_module, both, or
DistributedDataParallel with ZeroRedundancyOptimizer. An nn.Linear's weight is the transpose of the book's.

And the same Transformer: an nn.Module of nn.Linear, nn.RMSNorm and scaled_dot_product_attention; fully_shard for each
block, then the root; parallelize_module with sequence parallelism (norms and the residual stream split along T) and a
loss over a split vocabulary; stages by ScheduleInterleaved1F1B. PyTorch averages gradients over X, hence the factor in
the loss.
"""

import warnings
from collections.abc import Callable
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from scaling.configs import Config
from scaling.models.rope import rotate, tables

with warnings.catch_warnings():  # torch's own import of it uses what torch deprecates
    warnings.simplefilter("ignore")
    from torch.distributed.optim import ZeroRedundancyOptimizer

STRATEGIES = ("data_parallel", "zero", "fsdp", "tensor_parallel", "fsdp_tp")
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


class Native:
    """A wrapped model and its optimizer. `step(In, target)` makes one training step in place and returns this rank's
    share of the loss, whose gradients are those of the whole batch's sum of squares / rows; `layout` is that of
    activations between layers over Y: "D" as the book has it, "B" (sequence parallelism), or "whole" (an AllReduce).
    `tuned`: the fastest settings instead of the default ones; `compiled`: forward and backward by torch.compile.
    """

    def __init__(
        self, strategy, params: dict, mesh, optimizer="adamw", lr=1e-3, layout="D", tuned=False, compiled=False
    ):
        self.strategy, sizes = strategy, mesh.sizes
        self.model = nn.Sequential(*map(Block, params["W_in"], params["W_out"])).to(mesh.device)
        self.replicas = sizes.get("X", 1)
        devices = mesh.device_mesh if mesh.size() > 1 else None
        tensor = devices["Y"] if strategy == "fsdp_tp" else devices
        data = devices["X"] if strategy == "fsdp_tp" else devices
        if strategy in ("tensor_parallel", "fsdp_tp"):
            split_over_tensor_axis(self.model, tensor, LAYOUTS[layout])
        if strategy in ("fsdp", "fsdp_tp", "fsdp_kept"):
            again = strategy != "fsdp_kept"  # whether weights are thrown away after the forward
            for block in self.model:
                fully_shard(block, mesh=data, reshard_after_forward=again)
            fully_shard(self.model, mesh=data, reshard_after_forward=again)
        if strategy in ("data_parallel", "zero"):
            group = mesh.group(("X",)).pg
            self.model = DistributedDataParallel(self.model, process_group=group, gradient_as_bucket_view=tuned)
        self.call = torch.compile(self.model) if compiled else self.model
        rule, weights = OPTIMIZERS[optimizer], list(self.model.parameters())
        # Of a DTensor there is no fused SGD: foreach is then the best there is.
        fast = "foreach" if optimizer == "sgd" and isinstance(weights[0], DTensor) else "fused"
        options = {"lr": lr} | ({fast: True} if tuned else {})
        if strategy == "zero":
            self.optimizer = ZeroRedundancyOptimizer(weights, optimizer_class=rule, process_group=group, **options)
        else:
            self.optimizer = rule(weights, **options)

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

    def params(self) -> dict:
        """The whole params in the book's form: W_in[L, D, F], W_out[L, F, D]."""
        return self._stacked(lambda layer: layer.weight.detach())

    def grads(self) -> dict:
        return self._stacked(lambda layer: layer.weight.grad)

    def _stacked(self, read: Callable) -> dict:
        blocks = self.model.module if isinstance(self.model, DistributedDataParallel) else self.model
        halves = {"W_in": [whole(read(b.up)).T for b in blocks], "W_out": [whole(read(b.down)).T for b in blocks]}
        return {name: torch.stack(weights) for name, weights in halves.items()}


def split_over_tensor_axis(model: nn.Sequential, devices, layout) -> None:
    """up by columns, down by rows, activations between blocks laid out as said; in and out are local tensors."""
    plan = {}
    for i in range(len(model)):
        plan[f"{i}.up"] = ColwiseParallel(input_layouts=layout)
        plan[f"{i}.down"] = RowwiseParallel(output_layouts=layout)
    parallelize_module(model, devices, plan)


def whole(x: Tensor) -> Tensor:
    if not isinstance(x, DTensor):
        return x.clone()
    with warnings.catch_warnings():  # torch's own code calls what torch deprecates
        warnings.simplefilter("ignore")
        return x.full_tensor()


# The Transformer


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

    def __init__(self, params: dict, config: Config, T: int, first: int = 0, last: int | None = None):
        super().__init__()
        last = config.L if last is None else last
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
    gathered = PrepareModuleInput(input_layouts=(rows,), desired_input_layouts=(whole,))
    ends = {
        "embed": RowwiseParallel(input_layouts=whole, output_layouts=rows),
        "norm": SequenceParallel(),
        "unembed": ColwiseParallel(input_layouts=rows, output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(model, devices, ends)
    columns, out = ("q", "k", "v", "up", "gate"), ("o", "down")
    for block in model.blocks:
        plan = {"norm_attn": SequenceParallel(), "norm_mlp": SequenceParallel(), "attention": gathered, "mlp": gathered}
        plan |= {name: ColwiseParallel() for name in columns} | {n: RowwiseParallel(output_layouts=rows) for n in out}
        parallelize_module(block, devices, plan)


def fully_sharded(model: Model, devices, keep: bool = False) -> None:
    """Each block, then the root. `keep`: gathered weights stay until the backward, as pipelines want it."""
    options = {"mesh": devices} | ({"reshard_after_forward": False} if keep else {})
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)


def step_of(params: dict, config: Config, mesh, tokens, targets, rate: float, tuned: bool, compiled: bool = False):
    """step() -> this rank's share of the mean loss, on tokens and targets [B_X, T] of this rank."""
    warnings.simplefilter("ignore")  # of torch's own code
    model, sizes = Model(params, config, tokens.shape[1]), mesh.sizes
    X, Y = sizes.get("X", 1), sizes.get("Y", 1)
    devices = mesh.device_mesh if X * Y > 1 else None
    if Y > 1:
        split_over_y(model, devices["Y"] if X > 1 else devices)
    if X > 1:
        fully_sharded(model, devices["X"] if Y > 1 else devices)
    update = torch.optim.AdamW(model.parameters(), lr=rate, **({"fused": True} if tuned else {}))
    count = targets.numel() * X
    call = torch.compile(model) if compiled else model

    def step():
        update.zero_grad()
        with loss_parallel() if Y > 1 else nullcontext():
            loss = F.cross_entropy(call(tokens).flatten(0, 1).float(), targets.flatten(), reduction="sum") / count
            (loss * X).backward()
        update.step()
        loss = loss.detach()
        return (loss.to_local() if Y > 1 else loss) / Y

    return step


def staged_step_of(params: dict, config: Config, mesh, tokens, targets, rate: float, tuned: bool, microbatches: int):
    """The same on stages, each rank two of them, by ScheduleInterleaved1F1B; fully_shard over X inside a stage."""
    from torch.distributed import pipelining

    warnings.simplefilter("ignore")
    Z, z, X = mesh.sizes["Z"], mesh.coord["Z"], mesh.sizes.get("X", 1)
    group, modules, stages, depth = mesh.group(("Z",)).pg, [], [], config.L // (2 * Z)
    for s in (z, z + Z):
        modules.append(Model(params, config, tokens.shape[1], s * depth, (s + 1) * depth))
        if X > 1:
            fully_sharded(modules[-1], mesh.device_mesh["X"], keep=True)
        stages.append(pipelining.PipelineStage(modules[-1], s, 2 * Z, mesh.device, group=group))
    count = targets.numel() * X

    def loss_of(logits, wanted):
        return F.cross_entropy(logits.flatten(0, 1).float(), wanted.flatten(), reduction="sum") / count * X

    run = pipelining.ScheduleInterleaved1F1B(stages, microbatches, loss_fn=loss_of, scale_grads=False)
    weights = [W for module in modules for W in module.parameters()]
    update = torch.optim.AdamW(weights, lr=rate, **({"fused": True} if tuned else {}))

    def step():
        update.zero_grad()
        losses: list = []
        given = {"target": targets, "losses": losses} if z == Z - 1 else {}
        run.step(*([tokens] if z == 0 else []), **given)
        update.step()
        return sum(losses).detach() / X if losses else torch.zeros((), device=mesh.device)

    return step
