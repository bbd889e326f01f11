"""Define a run's settings, and make the learning-rate schedule and the optimizer from them."""

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from scaling import optim, tree
from scaling.common.console import integer, number, place, shortened
from scaling.configs import Config
from scaling.cost.transformer import POLICIES, REDUCES
from scaling.models.leaves import matrices_of
from scaling.models.lora import Lora
from scaling.scaled import RECIPES
from scaling.schedules import make

DTYPES = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16, "fp16": torch.float16}


def as_flag(default: Any, help: str, kind: Callable | None = None, **how: Any) -> Any:
    """Make a field that is also a flag of the command.

    Args:
        default: The default of the field and the flag.
        help: The flag's help.
        kind: The function that parses the flag's text.
        **how: Other arguments of argparse's add_argument.
    """
    return field(default=default, metadata={"help": help, "type": kind} | how)


def pipeline_name(text: str) -> str:
    """Check, as a type for argparse, the name of a pipeline's schedule."""
    try:
        make(text, 2, 4)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error).replace("\n  ", "; ")) from None
    return text


def two_betas(text: str) -> str:
    """Check, as a type for argparse, the betas of AdamW, such as "0.9,0.95"."""
    try:
        betas = [float(part) for part in text.split(",")] if len(text) <= 50 else []
    except ValueError:
        betas = []
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise argparse.ArgumentTypeError(
            f"{shortened(text)!r} is not two numbers from 0 to below 1; fix: write 0.9,0.95, say"
        )
    return ",".join(map(str, betas))


@dataclass(frozen=True)
class Settings:
    """The settings of a run, apart from its mesh. The help of each field made by `as_flag` describes it.

    Attributes:
        model: The model's config.
        data: A path, or several with weights, "A:3,B:1".
        out: The run's folder.
        weights: A Hugging Face folder whose weights the run begins with, or "".
        tokenizer: "bytes", a file or a folder, or "" if the tokenizer is not known.
        eos_id: The id that ends each document of text, or `NO_END`; None is the tokenizer's own, if it has one.
        no_template: Whether messages are written without the chat template.
        no_bos: Whether documents begin without the tokens that the tokenizer puts before a text.
    """

    model: Config
    data: str
    out: str
    batch: int = as_flag(32, "sequences per step", integer(1))
    seq: int = as_flag(256, "tokens per sequence", integer(1))
    steps: int = as_flag(200, "number of steps", integer(1))
    microbatches: int = as_flag(1, "microbatches per step", integer(1))
    pipeline: str = as_flag(
        "1f1b",
        "the schedule of the stages on Z: 1f1b, gpipe, interleaved:CHUNKS, with CHUNKS of layers a rank, zb-h1, "
        "dualpipev",
        pipeline_name,
        metavar="SCHEDULE",
    )
    optimizer: str = as_flag(
        "adamw", "adamw, or muon for the layers' matrices and adamw for the rest", choices=("adamw", "muon")
    )
    betas: str = as_flag(
        "0.9,0.95",
        "AdamW's rates of decay of the gradients' mean and of their squares' mean",
        two_betas,
        metavar="B1,B2",
    )
    lr: float | None = as_flag(
        None,
        "peak learning rate (default: 1e-3 from scratch; TRL's 2e-5 with weights and 1e-4 for adapters; in posttrain "
        "its 1e-6, and 1e-5 for adapters)",
        number(0, 10),
    )
    warmup: int = as_flag(20, "warmup steps of the learning rate", integer(0))
    schedule: str = as_flag(
        "cosine",
        "how the learning rate falls after the warmup: by a cosine, or only over the last tenth of the steps (wsd)",
        choices=("cosine", "wsd", "constant"),
    )
    min_lr: float | None = as_flag(
        None,
        "share of --lr to which the learning rate falls (default: 0.1 by a cosine, 0 with wsd)",
        number(0, 1),
        metavar="SHARE",
    )
    decay_steps: int = as_flag(
        0, "the step at which the learning rate has fallen to its end, where it stays; 0: --steps", integer(0)
    )
    weight_decay: float = as_flag(
        0.1, "weight decay of the matrices; embeddings, routers, norms and biases have none", number(0, 10)
    )
    bias_rate: float | None = as_flag(
        None,
        "after each step the biases that choose experts (DeepSeek-V3) move by this toward an even load (default 0.001, "
        "or 0 with --weights or --lora)",
        number(0, 1),
    )
    label_smoothing: float = as_flag(
        0.0,
        "share of each target's probability that is spread over the vocabulary, in training and not in evaluation",
        number(0, 1),
        metavar="SHARE",
    )
    z_loss: float = as_flag(
        0.0,
        "weight of the square of log(sum(exp(logits))), which the loss of training has in addition and that of "
        "evaluation has not",
        number(0, 1e3),
        metavar="WEIGHT",
    )
    clip: float = as_flag(1.0, "gradients are clipped to this global norm", number(1e-9))
    seed: int = as_flag(0, "of params, data and dropout", integer(0, 2**63 - 1))
    dtype: str = as_flag(
        "fp32", "dtype of the params; bf16 and fp16 keep float32 masters, fp16 scales the loss", choices=[*DTYPES]
    )
    remat: str = as_flag("none", "activation checkpointing: what is recomputed in the backward", choices=POLICIES)
    precision: str = as_flag(
        "",
        "scale the layers' products to 8 or 4 bits in training; params, sums and evaluation stay in --dtype",
        choices=["", *RECIPES],  # "" is in the record of a run without it
        metavar="|".join(RECIPES),
    )
    zero: int = as_flag(
        3,
        "what is sharded over X: the optimizer's state (1), gradients too (2), params too (3: FSDP), or nothing (0)",
        integer(0, 3),
        metavar="0|1|2|3",
    )
    reduce: str = as_flag(
        "once",
        "when gradients are reduced over X: once, as sums over the microbatches, or after each microbatch, which sends "
        "more and holds only sums of shards",
        choices=REDUCES,
    )
    keep_weights: bool = as_flag(
        False, "keep gathered weights to the end of a step; else they are thrown away and gathered again"
    )
    compile: bool = as_flag(False, "compile the forward and backward pass as one graph, by torch.compile (inductor)")
    save_every: int = as_flag(100, "steps between checkpoints; 0: only at the end", integer(0))
    keep: int = as_flag(3, "checkpoints to keep", integer(1))
    eval_every: int = as_flag(100, "steps between evaluations; 0: only at the end", integer(0))
    eval_batches: int = as_flag(8, "held-out batches per evaluation; 0: all", integer(0))
    valid: float = as_flag(
        0.05, "share of each corpus, at its end, that is held out for evaluation; at least one sequence", number(0, 0.9)
    )
    guard_every: int = as_flag(50, "steps between comparisons of replicas; 0: none", integer(0))
    resume: bool = as_flag(False, "continue the run in --out with its options; flags override them")
    new_data: bool = as_flag(
        False, "with --resume: the data are other ones than before, and are meant: a new epoch of them begins"
    )
    step: int = as_flag(0, "with --resume: the checkpoint to go on from; 0: the newest that is whole", integer(0))
    weights: str = ""
    tokenizer: str = "bytes"
    eos_id: int | None = None
    no_template: bool = False
    no_bos: bool = False
    lora: int = as_flag(0, "rank of low-rank adapters, which alone are trained; 0: all params are", integer(0))
    lora_on: str = as_flag("W_Q,W_V", "with --lora: the matrices that have adapters, as models.leaves names them")
    lora_alpha: float = as_flag(16.0, "with --lora: adapters are multiplied by alpha / rank", number(0, 1e6))
    lora_from: str = as_flag("", "begin with a PEFT folder's adapters, its rank, matrices and alpha", metavar="DIR")
    chip: str = as_flag("", "for MFU and --profile's predictions: h100, or what measure wrote")
    norms: bool = as_flag(False, "write each leaf's gradient norm to norms.jsonl")
    profile: str = as_flag("", "profile steps 3 to 7: FILE.json or a folder", place, metavar="PLACE")
    sample: str = as_flag("", "at each evaluation, show how the model continues this text", metavar="PROMPT")
    tensorboard: str = as_flag("", "also write the metrics for TensorBoard", metavar="DIR")

    @property
    def adapters(self) -> Lora | None:
        """The adapters that are trained, or None if all params are trained."""
        return Lora(self.lora, tuple(self.lora_on.split(",")), self.lora_alpha) if self.lora else None

    @property
    def peak(self) -> float:
        """The peak learning rate: `lr`, or if that is None, the default for what is trained.

        The rate that suits random params destroys trained ones. The defaults for these are those of TRL:
        2e-5 of its SFTConfig for all params, and 1e-4 for adapters, which its guide to SFTTrainer names. GRPO begins at
        lower ones: see `posttrain.command`.
        """
        if self.lr is not None:
            return self.lr
        return 1e-4 if self.lora else 2e-5 if self.weights else 1e-3

    @property
    def balancing(self) -> float:
        """The rate by which biases that choose experts move after a step, 0 in a model without them.

        DeepSeek-V3 was trained with 0.001, and with 0 for its last 500B tokens (arXiv:2412.19437, 4.2). So a model that
        begins with trained weights keeps its biases unless a rate is given.

        Raises:
            ValueError: A rate is given, and there are no such biases to train.
        """
        biased = self.model.moe and self.model.routing == "sigmoid" and not self.lora
        if self.bias_rate and not biased:
            why = "adapters alone are trained" if self.lora else f"{self.model.name} has none"
            raise ValueError(
                f"--bias-rate {self.bias_rate:g}: {why}\n  rule: it moves the biases of experts that are chosen by "
                "sigmoids (DeepSeek-V3)\n  fix: leave it out"
            )
        rate = (0.0 if self.weights else 0.001) if self.bias_rate is None else self.bias_rate
        return rate if biased else 0.0

    def pipeline_on(self, sizes: Mapping[str, int]) -> str | None:
        """Return the pipeline's schedule as `StepOptions` takes it: None is 1F1B, or a mesh without stages."""
        return self.pipeline if sizes.get("Z", 1) > 1 and self.pipeline != "1f1b" else None

    def layout(self, sizes: Mapping[str, int]) -> dict[str, Any]:
        """Return the options on a mesh of these sizes that say how params are stored."""
        return {"zero": self.zero, "schedule": self.pipeline_on(sizes), "lora": self.adapters}

    def step_options(self, sizes: Mapping[str, int]) -> dict[str, Any]:
        """Return the options of the step on a mesh of these sizes, as `StepOptions` has them."""
        names = ("microbatches", "remat", "keep_weights", "reduce", "precision", "context", "label_smoothing", "z_loss")
        return self.layout(sizes) | {name: getattr(self, name) for name in names}

    @property
    def context(self) -> str:
        """The form of attention over C: zig-zag, but plain order for linear layers, which hand a state on."""
        return "ring" if self.model.linear else "zigzag"


def add_flags(parser: argparse.ArgumentParser, names: Sequence[str] = ()) -> None:
    """Add the flag of each field made by `as_flag`, or only of those in `names`: --save-every for `save_every`."""
    for each in fields(Settings):
        if "help" in each.metadata and (not names or each.name in names):
            how, default = {name: value for name, value in each.metadata.items() if value is not None}, each.default
            if default is False:
                how["action"] = "store_true"
            elif default not in ("", None):
                how["help"] += f" (default {default if isinstance(default, str) else f'{default:g}'})"
            parser.add_argument("--" + each.name.replace("_", "-"), default=default, **how)


def rate(settings: Settings) -> Callable[[Tensor], Tensor]:
    """Return the learning rate as a function of the number of updates.

    After the warmup it falls by a cosine, falls over the last tenth of the steps ("wsd"), or stays constant. It falls
    to `min_lr`, a share of its peak. After `decay_steps` it does not change any more.
    """
    s, peak = settings, settings.peak
    end = s.decay_steps or s.steps
    tail = max(1, end // 10)
    floor = s.min_lr if s.min_lr is not None else 0.1 if s.schedule == "cosine" else 0.0

    def at(count: Tensor) -> Tensor:
        up = ((count + 1) / max(1, s.warmup)).clamp(max=1.0)
        if s.schedule == "cosine":
            progress = ((count - s.warmup) / max(1, end - s.warmup)).clamp(0.0, 1.0)
            return peak * up * (floor + (1 - floor) / 2 * (1 + torch.cos(math.pi * progress)))
        if s.schedule == "wsd":
            return peak * up * (floor + (1 - floor) * ((end - count) / tail).clamp(0.0, 1.0))
        return peak * up

    return at


def optimizer_of(settings: Settings) -> optim.Optimizer:
    """Return the run's optimizer: AdamW, or Muon for the layers' matrices with AdamW for the rest.

    Both have the same learning rate. Params of 16 bits have float32 masters, and float16 has loss scaling. Norms,
    biases, routers and embeddings have no weight decay.

    Raises:
        ValueError: Muon is combined with adapters.
    """
    options: dict[str, Any] = {"weight_decay": settings.weight_decay, "master": settings.dtype in ("bf16", "fp16")}
    betas = tuple(float(beta) for beta in settings.betas.split(","))
    rule = optim.adamw(rate(settings), betas, mask=decayed, **options)
    if settings.optimizer == "muon":
        if settings.adapters:
            raise ValueError(
                "--optimizer muon with --lora\n  rule: Muon makes an update orthogonal, of a matrix W and not of A or B"
                "\n  fix: give --optimizer adamw"
            )
        matrices = matrices_of(settings.model)
        rule = optim.muon(rate(settings), matrices, scale="match_rms_adamw", rest=rule, **options)
    return optim.loss_scaled(rule) if settings.dtype == "fp16" else rule


def decayed(params) -> Any:
    """Return a tree of bools that says which leaves have weight decay: the matrices except the embedding."""
    return tree.unflatten(params, ["W_" in where or '["unembed"]' in where for where in tree.named_leaves(params)])
