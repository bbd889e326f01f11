"""The likely time to a request's first token and of each further one: the bound's terms, at the rates of engines.

An engine reads memory at a lower rate than the peak, starts kernels and AllReduces one at a time, and runs other
requests' prompts between its steps. `GPU` has each time as a multiple of the bound's. Its constants, and those of
ENGINES, are fitted to 2,265 measured rows of 83 groups of model, system, TP and precision
(github.com/ai-dynamo/aiconfigurator, systems/silicon_sample.csv, 2026; H100 to GB300). Fitted to one half of the
groups, they forecast the time of a token of the other half with a median error of 19% and 21%. 84 rows of TensorRT-LLM
are of servers that send 20 tokens at a time, so their first text is taken to be 19 tokens later. `TPU` has Part 1's
share of the memory's peak.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from scaling.cost import decoding
from scaling.hardware import Chip

if TYPE_CHECKING:
    from scaling.plan.serve.candidates import Service, ServingPlan

ERRORS = {
    "gpu": (0.17, "2,265 measured rows"),
    "tpu": (0.10, "24 published steps of a v5e"),
}  # the median error, and its rows


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
        apart: Seconds of a layer if replicas of attention have different sequences.
        host: Seconds for each sequence on the host.
    """

    weights: float
    kv: float
    flops: float
    sent: float
    layer: float = 0.0
    experts: float = 0.0
    hop: float = 0.0
    apart: float = 0.0
    host: float = 0.0


GPU = Rates(1.34, 2.0, 3.0, 3.0, layer=24e-6, experts=54e-6, hop=8.5e-6, apart=137e-6, host=8e-6)
TPU = Rates(1.05, 1.05, 1.5, 1.0)


@dataclass(frozen=True)
class EngineDelays:
    """The delays of a prompt in a serving engine.

    `queue`: the number of prompts that run before a request's own, as a share of the other requests; 0.5 if all arrive
    at once. In seconds, `request` is what each request costs besides its prompt, and `layer` and `latent` what the
    kernels of a layer cost, without and with latent attention. `error`: the median error of the time to the first token
    on `rows` measured rows, where it is fitted to the other half of the groups.
    """

    queue: float
    request: float
    layer: float
    latent: float
    error: float
    rows: int


ENGINES = {
    "vllm": EngineDelays(0.09, 0.0, 0.95e-3, 1.8e-3, 0.18, 696),
    "trtllm": EngineDelays(0.09, 78e-3, 0.0, 2.2e-3, 0.33, 686),
    "sglang": EngineDelays(0.5, 0.27, 0.0, 0.0, 0.39, 528),
}
PROMPT = (1.4, 3.75)  # a prompt's time as a multiple of its FLOPs' at the peak, of dense models and of experts
CHUNK = 8192  # tokens of prompts that run in one step
APART = 1.6e-3  # more seconds of a layer if sequences are on replicas of attention
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

    @property
    def peak(self) -> float:
        """Seconds of the prompt's FLOPs at the peak."""
        s = self.service
        return s.prompt_flops / (self.chips * self.chip.flops(s.compute))

    def taken(self, ranks: int) -> float:
        """Return the seconds in which the chips compute and send, if `ranks` of them share attention."""
        c, chip = self.service.config, self.chip
        if chip.kind != "gpu":
            width = 2 * self.service.prompt * c.D
            moved = decoding.StepCollective("AllReduce", "X", "Y", width, 2 * c.L)
            sizes = {"Y": self.chips}
            reduced = decoding.collective_seconds(moved, chip, self.shape, sizes) if self.chips > 1 else 0.0
            return max(self.peak / self.service.mfu, reduced)
        sent = 2 * c.L * 2 * self.service.prompt * c.D / chip.bandwidth("node")  # switches add the partial sums
        return PROMPT[c.moe] * self.peak + (sent if ranks > 1 else 0.0)

    @property
    def kernels(self) -> float:
        """Seconds in which the kernels of all layers start."""
        c, engine = self.service.config, ENGINES[self.service.engine]
        return c.L * (engine.latent if c.latent else engine.layer) if self.chip.kind == "gpu" else 0.0

    @property
    def starts(self) -> float:
        """Seconds of a request besides the work of its prompt."""
        return self.kernels + (ENGINES[self.service.engine].request if self.chip.kind == "gpu" else 0.0)

    @property
    def alone(self) -> float:
        """Seconds to the first token on chips that run prompts alone, and are BUSY."""
        return self.starts + (1 + WAIT) * self.taken(self.chips)

    @property
    def rate(self) -> float:
        """Prompts per second on chips that run prompts alone."""
        return BUSY / self.taken(self.chips)


def first_token(plan: "ServingPlan") -> float:
    """Return the likely seconds to a request's first token (TTFT), where prompts run between the steps."""
    s, own = plan.service, PromptRun(plan.service, plan.chip, plan.shape)
    work = own.taken(plan.chips // plan.groups)
    before = ENGINES[s.engine].queue * (plan.batch - 1) * (work + own.kernels * s.prompt / CHUNK)
    apart = APART * s.config.L if plan.groups > 1 and plan.chip.kind == "gpu" else 0.0
    return own.starts + work + before + apart


@dataclass(frozen=True)
class Forecast:
    """Seconds per token of each request (TPOT), by kind of work."""

    weights: float
    flops: float
    caches: float
    kernels: float
    collectives: float
    prompts: float

    @property
    def seconds(self) -> float:
        """Seconds per token."""
        return max(self.weights, self.flops) + self.caches + self.kernels + self.collectives + self.prompts

    @property
    def parts(self) -> dict[str, float]:
        """The terms of the sum, by name."""
        matmuls = {"weights": self.weights} if self.weights >= self.flops else {"FLOPs": self.flops}
        rest = {"caches": self.caches, "kernels": self.kernels, "collectives": self.collectives}
        return matmuls | rest | {"other requests' prompts": self.prompts}


def likely_token(plan: "ServingPlan") -> Forecast:
    """Return the likely time of a token of each request on a plan; it is never less than the bound."""
    s, c, chip, step = plan.service, plan.service.config, plan.chip, plan.step
    rates = GPU if chip.kind == "gpu" else TPU
    ranks = plan.chips // plan.groups  # ranks that share a sequence's attention
    own = plan.batch / plan.groups
    starts = rates.layer + (rates.experts if c.moe else 0.0) + (rates.apart if plan.groups > 1 else 0.0)
    if chip.kind == "gpu":
        nbytes = 2 * c.L * 2 * (1 - 1 / ranks) * own * c.D * 2
        sizes = dict(plan.sizes)
        moved = decoding.collectives(plan.form, c, plan.batch, sizes)  # `apart` has those over E, and AllToAlls
        hops = (
            one.times * math.log2(math.prod(sizes.get(axis, 1) for axis in one.axes))
            for one in moved if one.op != "AllToAll" and "E" not in one.axes
        )  # fmt: skip
        sent = rates.sent * nbytes / chip.bandwidth("node") + rates.hop * sum(hops)
    else:
        sent = rates.sent * sum(plan.comms.values())
    kernels = c.L * starts + rates.host * own
    between = 0.0 if plan.apart else PromptRun(s, chip, plan.shape).taken(ranks) * plan.batch / s.generated
    return Forecast(
        rates.weights * step.weights, rates.flops * step.math, rates.kv * step.kv, kernels, sent, between
    )  # fmt: skip
