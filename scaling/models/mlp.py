"""The book's model (Part 5): L blocks In[B, D] *_D W_in[D, F] -> activation -> *_F W_out[F, D]; and a byte model.

    MLPStack        In[B, D] -> Out[B, D], params {"W_in": W_in[L, D, F], "W_out": W_out[L, F, D]}: stateless, built on
                    the meta device and called with `torch.func.functional_call`
    the byte model  the last K bytes -> logits of the next: In[B, D] = sum over k of E[k, token_k, :], MLPStack,
                    W_head[D, V]

Both are the references on one device that every strategy has to equal.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from scaling import tree
from scaling.mesh import AbstractMesh
from scaling.models.pointwise import act, check_activation, rms_norm, second_moment
from scaling.spec import parse

STACK_SPECS = {"W_in": "W_in[L, D, F]", "W_out": "W_out[L, F, D]"}
SPECS = {"embed": "E[K, V, D]", "blocks": STACK_SPECS, "head": "W_head[D, V]"}  # whole: nothing is sharded


@dataclass(frozen=True)
class MLPConfig:
    """Sizes as in the book (L layers, D model, F feed-forward, V vocabulary) and K, the bytes of context.

    With `residual`, Out = In + block(In). With `norm`, each block and the head get the rms_norm of their input.
    """

    L: int = 4
    D: int = 128
    F: int = 512
    K: int = 8
    V: int = 256
    activation: str = "gelu"
    residual: bool = True
    norm: bool = True

    def __post_init__(self):
        check_activation(self.activation)
        for dim, size in self.sizes.items():
            if size < 1:
                raise ValueError(f"MLPConfig: {dim} must be at least 1; got {size}\n  fix: give a positive int")

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each dim."""
        return {"L": self.L, "D": self.D, "F": self.F, "K": self.K, "V": self.V}

    def shapes(self) -> dict:
        """Return the shapes of the whole arrays, as a tree like the params."""
        return tree.map(lambda spec: torch.Size(parse(spec).global_shape(self.sizes)), SPECS)

    def inits(self) -> dict:
        """Return initial values that keep In at unit scale through the stack, for `tree.init`: std 1/sqrt(fan_in).

        W_out is scaled up by the loss of scale in the activation, and down by sqrt(2L) if its output is added to In.
        """
        gain = 1 / math.sqrt(second_moment(self.activation)) / (math.sqrt(2 * self.L) if self.residual else 1)
        blocks = {"W_in": tree.Normal(self.D**-0.5), "W_out": tree.Normal(gain * self.F**-0.5)}
        return {"embed": tree.Normal(self.K**-0.5), "blocks": blocks, "head": tree.Normal(self.D**-0.5)}

    def num_params(self) -> int:
        """Return the number of params."""
        return sum(shape.numel() for shape in tree.leaves(self.shapes()))


def block(In: Tensor, W_in: Tensor, W_out: Tensor, activation: str = "gelu") -> Tensor:
    """In[B, D] *_D W_in[D, F] -> activation -> *_F W_out[F, D]; on shards of F, Out is `{U_Y}`."""
    return act(In @ W_in, activation) @ W_out


class MLPStack(nn.Module):
    """L blocks on the meta device, with params stacked over layers."""

    def __init__(self, config: MLPConfig):
        super().__init__()
        self.config = config
        self.W_in = nn.Parameter(torch.empty(config.L, config.D, config.F, device="meta"))
        self.W_out = nn.Parameter(torch.empty(config.L, config.F, config.D, device="meta"))

    def forward(self, In: Tensor) -> Tensor:
        """Return the output of the last block."""
        for W_in, W_out in zip(self.W_in.unbind(), self.W_out.unbind(), strict=True):
            Out = block(rms_norm(In) if self.config.norm else In, W_in, W_out, self.config.activation)
            In = In + Out if self.config.residual else Out
        return In


def embed(E: Tensor, tokens: Tensor) -> Tensor:
    """E[K, V, D], tokens[B, K] -> In[B, D]: the sum over k of E[k, tokens[:, k]]."""
    K, V, D = E.shape
    return F.embedding(tokens + V * torch.arange(K, device=tokens.device), E.reshape(K * V, D)).sum(1)


def head(Out: Tensor, W_head: Tensor, norm: bool = True) -> Tensor:
    """Out[B, D] *_D W_head[D, V] -> logits[B, V], of Out's rms_norm where the model has norms."""
    return (rms_norm(Out) if norm else Out) @ W_head


def cross_entropy(logits: Tensor, targets: Tensor, batch: int | None = None) -> Tensor:
    """Return the mean over the batch of -log p(target), in nats.

    If these rows are only a part of the `batch` rows on the whole mesh, the result is the part's share,
    `Loss[] {U_X}`, and the shares add up to the mean.
    """
    return F.cross_entropy(logits, targets, reduction="sum") / (len(targets) if batch is None else batch)


def init(config: MLPConfig, seed: int = 0, dtype=torch.float32, mesh=None, specs=None, device=None):
    """Return params of the byte model; with a mesh and sharded `specs`, like `SPECS`, only this device's shards.

    They are on the mesh's device unless another is given. Without a mesh they are whole and on the CPU.
    """
    if mesh is None:
        mesh, device = AbstractMesh({}), device or "cpu"
    return tree.init(config.inits(), specs or SPECS, config.sizes, mesh, seed, dtype, device)


def logits(params, tokens: Tensor, config: MLPConfig) -> Tensor:
    """Compute the byte model on one device: tokens[B, K] -> logits[B, V]."""
    Out = functional_call(MLPStack(config), params["blocks"], (embed(params["embed"], tokens),))
    return head(Out, params["head"], config.norm)


def loss_fn(params, tokens: Tensor, targets: Tensor, config: MLPConfig, batch: int | None = None) -> Tensor:
    """Return the mean cross entropy of tokens[B, K] and targets[B], in nats per byte; `batch` as in `cross_entropy`."""
    return cross_entropy(logits(params, tokens, config), targets, batch)


def bits_per_byte(loss):
    """Convert nats to bits: the length of an ideal code for each byte."""
    return loss / math.log(2)
