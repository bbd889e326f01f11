"""The likely time of a decode step: the terms of its bound, at the rates that serving engines reach.

The bound overlaps everything at the peaks. An engine reads memory at a lower rate, starts kernels and AllReduces one at
a time, and runs other requests' prompts between its steps. `GPU` says how many times as long each takes. Its constants
are fitted to 2,265 measured rows of 83 groups of model, system, TP and precision (github.com/ai-dynamo/aiconfigurator,
systems/silicon_sample.csv, 2026; vLLM, SGLang and TensorRT-LLM on H100 to GB300). Fitted to every other group, they
forecast the rest with an error of 19% and 21% in the median. `TPU` has Part 1's share of the memory's peak.
"""

import math
from dataclasses import dataclass

from scaling.cost import transformer as tm
from scaling.plan.serve.candidates import ServingPlan

ERRORS = {
    "gpu": (0.17, "2,265 measured rows"),
    "tpu": (0.10, "24 published steps of a v5e"),
}  # the median error, and its rows


@dataclass(frozen=True)
class Rates:
    """The time of each kind of work as a multiple of its time at the peak, and the seconds of overheads.

    `weights`, `kv`, `flops`, `prompts`, `sent`: reading weights and caches, FLOPs, prompts between steps, bytes sent.
    Seconds: `layer` and `experts`, the kernels of a layer, and of a layer of experts; `hop`, an AllReduce, for each
    doubling of its ranks; `apart`, a layer whose sequences are on replicas of attention; `prompt`, a layer for each
    prompt that runs between steps; `host`, a sequence, on the host.
    """

    weights: float
    kv: float
    flops: float
    prompts: float
    sent: float
    layer: float = 0.0
    experts: float = 0.0
    hop: float = 0.0
    apart: float = 0.0
    prompt: float = 0.0
    host: float = 0.0


GPU = Rates(
    1.34, 2.0, 3.0, 1.26, 3.0, layer=24e-6, experts=54e-6, hop=8.5e-6, apart=137e-6, prompt=2.2e-4, host=8e-6
)  # fmt: skip
TPU = Rates(1.05, 1.05, 1.5, 1.5, 1.0)


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


def likely_token(plan: ServingPlan) -> Forecast:
    """Return the likely time of a token of each request on a plan; it is never less than the bound."""
    s, c, chip, step = plan.service, plan.service.config, plan.chip, plan.step
    rates = GPU if chip.kind == "gpu" else TPU
    ranks = plan.chips // plan.groups  # ranks that share a sequence's attention
    own = plan.batch / plan.groups
    starts = rates.layer + (rates.experts if c.moe else 0.0) + (rates.apart if plan.groups > 1 else 0.0)
    if chip.kind == "gpu":
        nbytes = 2 * c.L * 2 * (1 - 1 / ranks) * own * c.D * 2
        sent = rates.sent * nbytes / chip.bandwidth("node") + 2 * c.L * rates.hop * math.log2(ranks)
    else:
        sent = rates.sent * sum(plan.comms.values())
    prompt = rates.prompts * tm.prefill_flops(c, s.prompt) / (plan.chips * chip.flops(s.compute))
    kernels = c.L * starts + rates.host * own
    between = (prompt * plan.batch + rates.prompt * c.L * own) / s.generated
    return Forecast(
        rates.weights * step.weights, rates.flops * step.math, rates.kv * step.kv, kernels, sent, between
    )  # fmt: skip
