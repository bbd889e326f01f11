"""What a run is made of: its options, the learning rate that they give, and the optimizer."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from scaling import optim, tree
from scaling.configs import Config
from scaling.models.leaves import matrices_of

DTYPES = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Settings:
    """What a run is made of beside its mesh. `batch`: sequences of the global batch, of `seq` tokens each. `weights`:
    a Hugging Face folder to begin with, if any. `tokenizer`: "bytes", a file or a folder, "" where none is known.
    `data`: a path, or several by weight, "A:3,B:1". `optimizer`: adamw or muon. `profile`: where a profile of a few
    steps is written, if anywhere. `chip`: of which MFU is a share. `norms`: write each leaf's gradient norm to
    norms.jsonl. `sample`: a prompt that each evaluation goes on from. `tensorboard`: a folder for its files."""

    model: Config
    data: str
    out: str
    batch: int = 32
    seq: int = 256
    steps: int = 200
    microbatches: int = 1
    optimizer: str = "adamw"
    lr: float = 1e-3
    warmup: int = 20
    schedule: str = "cosine"
    weight_decay: float = 0.1
    clip: float = 1.0
    seed: int = 0
    dtype: str = "fp32"
    remat: str = "none"
    keep_weights: bool = False
    save_every: int = 100
    keep: int = 3
    eval_every: int = 100
    eval_batches: int = 8
    guard_every: int = 50
    resume: bool = False
    weights: str = ""
    tokenizer: str = "bytes"
    chip: str = ""
    norms: bool = False
    profile: str = ""
    sample: str = ""
    tensorboard: str = ""


def rate(settings: Settings) -> Callable[[Tensor], Tensor]:
    """The learning rate by the number of updates: warmup, then cosine, wsd (down over the last tenth) or constant."""
    s = settings
    tail = max(1, s.steps // 10)

    def at(count: Tensor) -> Tensor:
        up = ((count + 1) / max(1, s.warmup)).clamp(max=1.0)
        if s.schedule == "cosine":
            gone = ((count - s.warmup) / max(1, s.steps - s.warmup)).clamp(0.0, 1.0)
            return s.lr * up * (0.1 + 0.45 * (1 + torch.cos(math.pi * gone)))
        if s.schedule == "wsd":
            return s.lr * up * ((s.steps - count) / tail).clamp(0.0, 1.0)
        return s.lr * up

    return at


def optimizer_of(settings: Settings) -> optim.Optimizer:
    """AdamW, or Muon for the layers' matrices with AdamW for the rest, at one learning rate; float32 masters for params
    of 16 bits, loss scaling for float16, no weight decay on norms, biases and embeddings."""
    options: dict[str, Any] = {"weight_decay": settings.weight_decay, "master": settings.dtype in ("bf16", "fp16")}
    rule = optim.adamw(rate(settings), (0.9, 0.95), mask=decayed, **options)
    if settings.optimizer == "muon":
        matrices = matrices_of(settings.model)
        rule = optim.muon(rate(settings), matrices, scale="match_rms_adamw", rest=rule, **options)
    return optim.loss_scaled(rule) if settings.dtype == "fp16" else rule


def decayed(params) -> Any:
    """Which leaves decay, as a tree of bools: the matrices but the embedding."""
    return tree.unflatten(params, ["W_" in where or "unembed" in where for where in tree.named_leaves(params)])
