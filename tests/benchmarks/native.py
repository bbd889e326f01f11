"""PyTorch's own parallelism, as a user would set it up: the other side of the comparisons with `scaling.strategies`.

The model is the book's stack as an nn.Sequential of blocks of two `nn.Linear` without bias, wrapped by
DistributedDataParallel, fully_shard (each block, then the root), DTensor's parallelize_module, both, or
DistributedDataParallel with ZeroRedundancyOptimizer. An nn.Linear's weight is the transpose of the book's.
"""

import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

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
        return self.down(nn.functional.gelu(self.up(In)))


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
