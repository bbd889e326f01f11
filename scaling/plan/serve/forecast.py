"""The likely time to a request's first token and of each further one: the bound's terms, at the rates of engines.

An engine reads memory at a lower rate than the peak, starts kernels and AllReduces one at a time, and runs other
requests' prompts between its steps. rates.toml has the constants and says how far such forecasts are off;
`python -m scaling.plan serve measured FILE` fits them again.
"""

import math
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from scaling.cost import decoding
from scaling.cost.lanes import Amount
from scaling.cost.serving import DecodeStep
from scaling.hardware import Chip

if TYPE_CHECKING:
    from scaling.plan.serve.candidates import Service, ServingPlan

TABLE = tomllib.loads(Path(__file__).with_name("rates.toml").read_text(encoding="utf-8"))
ERRORS = TABLE["errors"]  # (the median error, the rows), by kind of chip and by engine
MEASURED = TABLE["on"]  # the chips of these rows
AT_ONCE = 0.5  # the share of other requests whose prompts run before a request's own if all come at once, at most


@dataclass(frozen=True)
class TokenWork:
    """The work of a token on one plan, or on many: each field is a number or an array.

    Attributes:
        weights: Seconds of reading weights at the peak.
        flops: Seconds of computing at the peak.
        caches: Seconds of reading caches at the peak.
        sent: Seconds of sending at the peak.
        layers: The number of layers, whose kernels start one at a time.
        experts: The number of layers with experts.
        hops: The doublings of ranks, summed over all collectives.
        comms: Seconds of all collectives at the peak, also of those over the network.
        prompts: Seconds of other requests' prompts.
    """

    weights: Amount
    flops: Amount
    caches: Amount
    sent: Amount
    layers: Amount
    experts: Amount
    hops: Amount
    comms: Amount
    prompts: Amount


@dataclass(frozen=True)
class Rates:
    """The time of each kind of work as a multiple of its time at the peak, and the seconds of overheads.

    Attributes:
        weights: The multiple for reading weights.
        kv: The multiple for reading caches.
        flops: The multiple for computing.
        sent: The multiple for sending bytes.
        layer: Seconds for starting the kernels of a layer.
        experts: Seconds for starting the further kernels of a layer of experts.
        hop: Seconds of a collective for each doubling of its ranks.
    """

    weights: float
    kv: float
    flops: float
    sent: float
    layer: float
    experts: float
    hop: float

    def token(self, work: TokenWork) -> "Forecast":
        """Return the seconds of a token, by kind of work; matmuls and kernels hide collectives, as in the bound."""
        weights, flops = self.weights * work.weights, self.flops * work.flops
        kernels = self.layer * work.layers + self.experts * work.experts
        unhidden = work.comms - np.maximum(weights, flops) - kernels
        collectives = np.maximum(self.sent * work.sent + self.hop * work.hops, unhidden)
        return Forecast(weights, flops, self.kv * work.caches, kernels, collectives, work.prompts)


@dataclass(frozen=True)
class FirstWork:
    """The work before a first token on one plan, or on many: each field is a number or an array.

    Attributes:
        peak: Seconds of the prompt's FLOPs at the peak.
        weights: Seconds of reading the weights once, as forecast.
        sent: Seconds of sending its activations.
        layers: The number of layers whose kernels start.
        latent: Whether the model has latent attention.
        experts: Whether the model has experts.
        fp4: Whether the chips have FP4, and the weights are quantized.
        batch: The number of requests at once.
        replicas: The number of replicas of attention, which run their prompts at the same time.
        wait: The decode steps that the engine is set to wait before it runs a prompt.
        token: Seconds of a token.
    """

    peak: Amount
    weights: Amount
    sent: Amount
    layers: Amount
    latent: Amount
    experts: Amount
    fp4: Amount
    batch: Amount
    replicas: Amount
    wait: Amount
    token: Amount


@dataclass(frozen=True)
class EngineRates:
    """The delays of a serving engine before a request's first token, and the kernels' times, as all call such kernels.

    Attributes:
        layer: Seconds for starting the kernels of a prompt's layer, which no graph has captured.
        latent: A further multiple of `layer` for latent attention.
        queue: The prompts that run before a request's own, as a share of the other requests; at most AT_ONCE.
        steps: The decode steps that run before the first text is sent.
        wait: The share of the steps that the engine is set to wait which do pass.
        burst: Seconds for each square root of the number of requests, as bursts of random arrivals grow with it; none
            where `fp4` counts.
        dense: The time of a dense model's prompt as a multiple of its FLOPs' time at the peak.
        moe: The multiple for models with experts.
        fp4: A further multiple for quantized weights on chips with FP4, whose kernels are younger and farther from
            their peaks.
    """

    layer: float
    latent: float
    queue: float
    steps: float
    wait: float
    burst: float
    dense: float
    moe: float
    fp4: float

    def prompt(self, work: FirstWork) -> Amount:
        """Return the seconds in which chips compute and send a prompt.

        A short prompt of a model with experts takes as long as reading the experts.
        """
        rate = np.where(work.experts, self.moe, self.dense) * np.where(work.fp4, self.fp4, 1.0)
        return np.maximum(rate * work.peak, work.weights) + work.sent

    def starts(self, work: FirstWork) -> Amount:
        """Return the seconds in which a prompt's kernels start."""
        return self.layer * work.layers * np.where(work.latent, self.latent, 1.0)

    def first(self, work: FirstWork) -> Amount:
        """Return the seconds to the first token, where prompts run between the steps.

        A prompt takes the chips of its replica alone, and so `replicas` times as long as on all chips.
        """
        before = np.minimum(AT_ONCE, self.queue) * (work.batch - work.replicas)
        steps = (self.steps + self.wait * work.wait) * work.token
        burst = np.where(work.fp4, 0.0, self.burst) * work.batch**0.5
        return self.starts(work) + (work.replicas + before) * self.prompt(work) + steps + burst


GPU, TPU = (Rates(**TABLE[kind]) for kind in ("gpu", "tpu"))
ENGINES = {name: EngineRates(**rates, **TABLE["kernels"]) for name, rates in TABLE["engines"].items()}
BUSY = 0.7  # the share of time that chips which only run prompts are busy
WAIT = BUSY / (2 * (1 - BUSY))  # the mean wait for such chips, in units of a prompt's time (a queue of random arrivals)


@dataclass(frozen=True)
class PromptRun:
    """The times of a prompt on a slice: the seconds of its work, and the seconds in which its kernels start."""

    service: "Service"
    chip: Chip
    shape: tuple[int, ...]

    @property
    def chips(self) -> int:
        """The number of chips."""
        return math.prod(self.shape)

    def work(self, ranks: int, batch: int = 1, token: float = 0.0) -> FirstWork:
        """Return the work of a prompt on GPUs where `ranks` chips share a sequence's attention."""
        s, c, chip = self.service, self.service.config, self.chip
        sent = 2 * c.L * 2 * s.prompt * c.D / chip.bandwidth("node") if ranks > 1 else 0.0  # switches add partial sums
        read = GPU.weights * s.load.read(s.prompt) / (self.chips * chip.need("hbm_bw"))
        fp4 = "fp4" in dict(chip.peaks) and s.weights != "bf16"
        replicas = self.chips / ranks
        return FirstWork(self.peak, read, sent, c.L, bool(c.latent), c.moe, fp4, batch, replicas, s.wait, token)

    @property
    def peak(self) -> float:
        """Seconds of the prompt's FLOPs at the peak."""
        return self.service.prompt_flops / (self.chips * self.chip.flops(self.service.compute))

    def taken(self, ranks: int) -> float:
        """Return the seconds in which the chips compute and send, if `ranks` of them share attention."""
        c, chip = self.service.config, self.chip
        if chip.kind == "gpu":
            return float(ENGINES[self.service.engine].prompt(self.work(ranks)))
        moved = decoding.StepCollective("AllReduce", "X", "Y", 2 * self.service.prompt * c.D, 2 * c.L)
        reduced = decoding.collective_seconds(moved, chip, self.shape, {"Y": self.chips}) if self.chips > 1 else 0.0
        return max(self.peak / self.service.mfu, reduced)

    @property
    def starts(self) -> float:
        """Seconds in which its kernels start."""
        gpu = self.chip.kind == "gpu"
        return float(ENGINES[self.service.engine].starts(self.work(self.chips))) if gpu else 0.0

    @property
    def alone(self) -> float:
        """Seconds to the first token on chips that run prompts alone, and are BUSY."""
        return self.starts + (1 + WAIT) * self.taken(self.chips)

    @property
    def rate(self) -> float:
        """Prompts per second on chips that run prompts alone."""
        return BUSY / self.taken(self.chips)


def prompt_run(plan: "ServingPlan") -> PromptRun:
    """Return the run of a prompt on a plan's slice."""
    return PromptRun(plan.service, plan.chip, plan.shape)


def first_work(plan: "ServingPlan") -> FirstWork:
    """Return the work before a request's first token on GPUs."""
    return prompt_run(plan).work(plan.chips // plan.groups, plan.batch, plan.tpot)


def first_token(plan: "ServingPlan") -> float:
    """Return the likely seconds to a request's first token (TTFT), where prompts run between the steps."""
    engine = ENGINES[plan.service.engine]
    if plan.chip.kind == "gpu":
        return float(engine.first(first_work(plan)))
    return (1 + engine.queue * (plan.batch - 1)) * prompt_run(plan).taken(plan.chips)


@dataclass(frozen=True)
class Forecast:
    """Seconds per token of each request (TPOT), by kind of work."""

    weights: Amount
    flops: Amount
    caches: Amount
    kernels: Amount
    collectives: Amount
    prompts: Amount

    @property
    def seconds(self) -> Amount:
        """Seconds per token."""
        matmuls = np.maximum(self.weights, self.flops)
        return matmuls + self.caches + self.kernels + self.collectives + self.prompts

    @property
    def parts(self) -> dict[str, float]:
        """The terms of the sum, by name."""
        matmuls = {"weights": self.weights} if self.weights >= self.flops else {"FLOPs": self.flops}
        rest = {"caches": self.caches, "kernels": self.kernels, "collectives": self.collectives}
        return matmuls | rest | {"other requests' prompts": self.prompts}


def collective_work(plan: "ServingPlan", tokens: int) -> tuple[float, float, float]:
    """Return `sent`, `hops` and `comms` of a decode step of `tokens` sequences."""
    c, chip, sizes = plan.service.config, plan.chip, dict(plan.sizes)
    moved = decoding.collectives(plan.form, c, tokens, sizes)
    comms = sum(decoding.collective_seconds(one, chip, plan.shape, sizes) for one in moved)
    if chip.kind != "gpu":
        return comms, 0.0, comms
    hops = sum(
        one.times * math.log2(math.prod(sizes.get(axis, 1) for axis in one.axes))
        for one in moved if one.op != "AllToAll" and "E" not in one.axes
    )  # fmt: skip
    ranks = plan.chips // plan.groups  # ranks that share a sequence's attention
    return 4 * c.L * (1 - 1 / ranks) * tokens / plan.groups * c.D * 2 / chip.bandwidth("node"), hops, comms


def token_work(plan: "ServingPlan") -> TokenWork:
    """Return the work of a token of each request."""
    s, c, step = plan.service, plan.service.config, plan.step
    between = 0.0 if plan.apart else prompt_run(plan).taken(plan.chips // plan.groups) * plan.batch / s.generated
    sent, hops, comms = collective_work(plan, plan.batch)
    return TokenWork(step.weights, step.math, step.kv, sent, c.L, c.L * c.moe, hops, comms, between)


def rates_of(chip: Chip) -> Rates:
    """Return the rates of a chip's kind."""
    return GPU if chip.kind == "gpu" else TPU


def likely_token(plan: "ServingPlan") -> Forecast:
    """Return the likely time of a token of each request on a plan; it is never less than the bound."""
    return rates_of(plan.chip).token(token_work(plan))


def likely_step(plan: "ServingPlan") -> Callable[[DecodeStep | None, int, int], float]:
    """Return a function that forecasts the seconds of a step on a plan.

    It takes the bounds of the sequences that decode (None if there are none), their number, and the tokens of prompts,
    which are multiplied with the same weights.
    """
    run, rates, c, prompt = prompt_run(plan), rates_of(plan.chip), plan.service.config, plan.service.prompt
    seconds, starts = run.taken(plan.chips // plan.groups) / prompt, run.starts / prompt
    moved = cache(partial(collective_work, plan))

    def of(step: DecodeStep | None, sequences: int, tokens: int) -> float:
        if step is None:
            return tokens * (seconds + starts)
        flops = step.math + tokens * seconds / rates.flops
        sent, hops, comms = moved(sequences)
        work = TokenWork(step.weights, flops, step.kv, sent, c.L, c.L * c.moe, hops, comms, 0.0)
        return tokens * starts + float(rates.token(work).seconds)

    return of
