# %% [markdown]
"""Part 6, Training LLaMA 3 on TPUs: the memory and the days that LLaMA-3 70B takes, and how to shard it over a v5p pod.
https://jax-ml.github.io/scaling-book/applied-training

First everything is computed by hand, as in the book. Then the planner does it, on meshes that a pod's torus of 16 x 20
x 28 chips really has. It also counts the exchange of keys and values that the book's sequence sharding needs, and calls
it CP. The book asks about four pods and about LLaMA-3 405B on eight, and gives no answers; ours are at the end. More
plans: python -m scaling.plan --help.
"""

# %%
from scaling import cost
from scaling.book.answers import Answer
from scaling.book.page import Page
from scaling.configs import get
from scaling.cost import transformer as tm
from scaling.hardware import chip
from scaling.mesh import AbstractMesh
from scaling.plan import Estimate, Fixed, Job, Layout, evaluate, failures, plans
from scaling.plan.network import book as rings
from scaling.show import svg
from scaling.show.bars import Bar, text

page = Page(__doc__, plot=True)
V5P = chip("v5p")
C, POD = V5P.flops("bf16"), V5P.pod_chips
L8, L70, L405 = (get(f"llama3-{size}") for size in ("8b", "70b", "405b"))
DAY, YEAR = 86400, 365 * 86400
B = 4 * 1024 * 1024  # tokens: 1,024 sequences of 4,096
B405 = 16 * 1024 * 1024


def ici(axes: int) -> float:
    """Return the bytes/s of a chip's collectives over so many axes of the torus, both ways round."""
    return V5P.bandwidth("ici", axes=axes)


def days(flops: float, chips: float) -> float:
    """Return the days at 40% MFU."""
    return cost.seconds_at(flops, chips, C, 0.4) / DAY


# %% [markdown]
# ## What LLaMA 3 looks like
# The table gives each letter with its key in the model's config.json on Hugging Face: L layers, D numbers a token in
# the residual stream, F in the hidden layer of the MLP, N query heads, K heads of keys and values, H numbers a head, V
# tokens in the vocabulary. H has no key there; it is D/N. The three models share V, K and H.

# %%
KEYS = {"L": "num_hidden_layers", "D": "hidden_size", "F": "intermediate_size", "N": "num_attention_heads",
        "K": "num_key_value_heads", "H": "-", "V": "vocab_size"}  # fmt: skip
page.title("The hyperparameters")
page.table([(letter, key, *(getattr(c, letter) for c in (L8, L70, L405))) for letter, key in KEYS.items()],
           ["", "config.json", *(c.name for c in (L8, L70, L405))])  # fmt: skip

# %% [markdown]
# ## Counting params and FLOPs
# How long will the run take? The letters are enough to say so before anything is rented. The MLPs have 3LDF params
# (gate, in and out), the two vocabulary matrices 2VD, and attention 2LD(N + K)H: N heads of queries and of outputs, K
# of keys and of values. A token in training costs 6 FLOPs a param, 2 forward and 4 backward, since each matmul has two
# gradients (Part 4). From here on the book takes 70e9 params and 15T tokens. *MFU* (model FLOPs utilization) is the
# share of the chips' peak that these FLOPs use; 40% is a modest guess.
#
# The MLPs have four fifths of the params, so for memory and FLOPs one can often look at them alone.

# %%
count = tm.params(L70)
token, flops = 6 * 70e9, 6 * 70e9 * 15e12
page.answers([
    Answer("MLP params", "56.3e9", count["mlp"], "params"),
    Answer("vocabulary params", "2.1e9", count["vocab"], "params"),
    Answer("attention params", "12e9", count["attention"], "params"),
    Answer("LLaMA-3 70B", "70.4e9", tm.num_params(L70), "params",
           rounded=(56.3e9 + 2.1e9 + 12e9, "the sum of the three as rounded")),
    Answer("FLOPs of a token, training", "4.2e11", float(tm.rule_of_thumb(L70, 1)), "FLOPs"),
    Answer("a token on one v5p", "1", 1e3 * token / C, "ms"),
    Answer("FLOPs of 15T tokens", "6.3e24", tm.rule_of_thumb(L70, 15e12), "FLOPs"),
    Answer("15T tokens on one v5p", "435", cost.seconds_at(flops, 1, C) / YEAR, "years"),
    Answer("15T tokens on a pod at 40% MFU", "3.8e6", cost.seconds_at(flops, POD, C, 0.4), "s"),
    Answer("15T tokens on a pod at 40% MFU, in days", "44", days(flops, POD), "days"),
])  # fmt: skip

# %% [markdown]
# ## Memory
# Does the memory need thousands of chips? All chips together store the params in bf16 (2 bytes each), Adam's two
# moments in float32 (8 bytes a param), and what the backward pass reads. For the last, the book saves 4 arrays [B, D]
# in bf16 for each layer, where B is a batch of 4M tokens. They are 97% of all bytes. The book leaves the gradients out.
#
# So the memory of 226 chips would be enough, but they would compute for almost five years. On a whole pod of 8,960 a
# chip uses 2.4 of its 96 GB. One rents a pod for its FLOPs, not for its memory.


# %%
def memory(checkpoints: int) -> cost.Memory:
    saved = cost.checkpoint_bytes(4e6, [L70.D] * checkpoints, L70.L)
    return cost.training_memory(70e9, saved, grad_bytes=0)


four, twelve = memory(4), memory(12)
page.answers([
    Answer("params in bf16", "140e9", four.params, "bytes"),
    Answer("optimizer state", "560e9", four.optimizer, "bytes"),
    Answer("4 checkpoints a layer", "20.9e12", four.activations, "bytes"),
    Answer("params, optimizer state and checkpoints", "21.6e12", four.total, "bytes"),
    Answer("fewest chips that hold them", "225", four.total / V5P.hbm_bytes, "v5p", "226 whole ones"),
    Answer("days on 225 chips", "1752", days(flops, 225), "days", rounded=(44 * POD / 225, "44 days on a pod")),
    Answer("1752 days in years ('nearly four')", "4", days(flops, 225) / 365, "years", erratum="4.8 years"),
    Answer("memory of a chip on a pod", "2.4e9", four.total / POD, "bytes"),
    Answer("memory of a chip with 12 checkpoints a layer", "8e9", twelve.total / POD, "bytes",
           erratum="(0.7 + 62.9) TB / 8960"),
])  # fmt: skip

# %% [markdown]
# ## How to shard it
# FSDP alone is the first thing to try, because it needs nothing but the gathers of the weights. It fails here for two
# reasons. A batch of 4M tokens has 1,024 sequences, so only 1,024 chips would have one. If sequences are split as well,
# each of 8,960 chips has 468 tokens. That is too few: to hide its gathers behind the matmuls, FSDP needs C/W tokens a
# chip, which is 2,550 on one axis of the torus and 2,550 / 3 = 850 on all three (Part 5). TP makes the gathers shorter,
# as each chip gathers only its share of a weight, and pays by moving activations in the forward and backward pass of
# every layer. With both, 2550^2 / (2F) = 113 tokens a chip are enough.
#
# How many ways of TP are best? The plot shows the longer of both collectives over the matmuls' time, with two axes of
# the torus for FSDP and one for TP. Where a curve is below 1, the matmuls hide all communication. On the left FSDP's
# gathers take longer, and more TP makes them shorter. On the right TP's collectives take longer, and less TP makes them
# shorter. The curve of 70B on four pods is below 1 only near 11 ways, and no axes of a pod multiply to 11.

# %%
JOBS = {"70B, a pod": (L70, B), "70B, 4 pods": (L70, B / 4), "405B, 8 pods": (L405, B405 / 8)}  # tokens a pod


def shares(name: str, ways: float) -> dict[str, float]:
    """Return the times of FSDP's and of TP's collectives in the MLP's forward pass, each over that of its matmuls."""
    config, tokens = JOBS[name]
    math = 4 * tokens * config.D * config.F / POD / C
    fsdp, tp = 4 * config.D * config.F / ways / ici(2), 4 * tokens * config.D * ways / POD / ici(1)
    return {"FSDP": fsdp / math, "TP": tp / math}


def longer(name: str, ways: float) -> float:
    return max(shares(name, ways).values())


def regime(name: str) -> str:
    """Return the strategy that keeps a pod compute-bound: FSDP if it can alone, else FSDP + TP at its best X, else
    neither."""
    config, tokens = JOBS[name]
    if cost.data_threshold(C, ici(3)) < tokens / POD:
        return "FSDP"
    return "FSDP+TP" if cost.mixed_threshold(config.F, C, ici(2), ici(1)) < tokens / POD else "neither"


best_ways = {name: POD / cost.mixed_optimum(tokens, config.F, POD, 2, 1) for name, (config, tokens) in JOBS.items()}
every = sorted({*(2 ** (i / 4) for i in range(21)), *best_ways.values()})
page.chart(
    "ways", {name: [(ways, longer(name, ways)) for ways in every] for name in JOBS}, "TP, ways",
    "collectives / matmuls", "v5p pods: compute-bound below 1", height=14, marks=[("y", 1, "ratio 1")],
)  # fmt: skip

# %% [markdown]
# A mesh has whole sizes. The table has the same ratios at the sizes that a pod's axes give, each with the strategy
# whose collectives take longer. After it come the book's own steps; X_opt is the number of FSDP's ways at which both
# take equally long.

# %%
page.title("The longer of both collectives over the matmuls, and its strategy")
page.table(
    [(ways, POD // ways, *(f"{longer(name, ways):.2f} {max(s := shares(name, ways), key=s.__getitem__)}"
                           for name in JOBS)) for ways in (1, 2, 4, 8, 16)],
    ["TP,\nways", "FSDP,\nways", *(name.replace(", ", ",\n") for name in JOBS)],
)  # fmt: skip
page.answers([
    Answer("FSDP without sequence sharding: ways", "1024", B / 4096, "ways"),
    Answer("FSDP without sequence sharding fills a pod", "no", "yes" if POD <= B / 4096 else "no"),
    Answer("FSDP over batch and sequence: tokens a chip", "468", B / POD, "tokens"),
    Answer("FSDP on three axes needs: tokens a chip", "850", cost.data_threshold(C, ici(3)), "tokens"),
    Answer("FSDP+TP needs: tokens a chip", "113", cost.mixed_threshold(L70.F, C, ici(2), ici(1)), "tokens"),
    Answer("70B on a pod is compute-bound by", "FSDP+TP", regime("70B, a pod")),
    Answer("X_opt", "1618", cost.mixed_optimum(4.19e6, L70.F, POD, 2, 1), "ways"),
    Answer("2048 x 4: chips", "8960", AbstractMesh({"X": 2048, "Y": 4}).size(), "v5p",
           erratum="no slice of 16x20x28; 2240 x 4 is all of it"),
])  # fmt: skip

# %% [markdown]
# ## The planner's meshes
# The planner also counts attention, the vocabulary and the exchange of keys and values, and its mesh axes must consist
# of axes of the torus. The last column is a step's time over that of its compute alone, so 1 means that all
# communication is hidden. With keys and values counted, LLaMA-3 70B stays a little above 1: at 1.09 on the meshes of a
# whole pod, and at 1.15 on four. That is little compared with the factor of 2.5 between 40% MFU and the peak.

# %%
SHARDED = Fixed(zero=3)  # FSDP, as in the book
alone = plans(Job(L70, B), V5P, POD, SHARDED)
layout = Layout(fsdp=1024, context=2, tensor=4, zero=3)
found: dict[str, Estimate] = {
    "70B, a pod, no TP": next(alone[i] for i, layout in alone.layouts() if layout.shards == POD),
    "70B, the book's": evaluate(Job(L70, B), rings(V5P, layout.sizes, {"fsdp": 1, "context": 1, "tensor": 1}), layout),
    "70B, a pod": alone.faster or alone[0],  # it may split short sequences, as the book does
    "70B, 4 pods": plans(Job(L70, B), V5P, 4 * POD, SHARDED)[0],
    "405B, 8 pods": plans(Job(L405, B405), V5P, 8 * POD, SHARDED)[0],
}
page.title("The fastest meshes of the planner, with FSDP, and the book's")
page.table(
    [(name, plan.name, plan.cost.bound, plan.bound, plan.bound / plan.cost.math) for name, plan in found.items()],
    ["", "mesh", "bound by", "s a step,\nat least", "over\ncompute"],
)
page.say(
    "\nForward and backward are judged apart. Where compute binds the step and the last column is above 1, only "
    "one of the two waits. The book's 8,192 chips are no slice of a pod; each of its axes counts as a ring."
)
page.answers([
    Answer("the planner: FSDP alone on a pod is bound by", "", found["70B, a pod, no TP"].cost.bound, "", "468 < 850"),
    Answer("the planner: the book's DP 1024 x SP 2 x TP 4", "", found["70B, the book's"].cost.bound, "", "113 < 468"),
    Answer("the planner: its own mesh of 8,960", "", found["70B, a pod"].cost.bound, "", "by its lower bound"),
])  # fmt: skip

# %% [markdown]
# ## When chips fail
# The days above assume that nothing breaks. A run of months on thousands of chips is interrupted every few hours, and
# each time it loses the work since it last saved. LLaMA-3 405B was interrupted 419 times in 54 days on 16,384 H100s, or
# once in 50,677 hours of one chip. Saving often costs time, and saving rarely costs work. Young's interval, sqrt(2 x
# seconds of a save x seconds between failures), balances the two; Daly's, which the planner takes, refines it.
# *Goodput* is the share of the time in which the run advances.
#
# The picture shows one random day of such a job: when it computed, which work it lost, and how long it stood still.

# %%
state = 14 * tm.num_params(L405) / 16_384  # bytes of a chip: params in bf16, their copy and Adam's moments in fp32
broken = failures.of_job(16_384, failures.save_seconds(state))
names = {"work": "computes", "lost": "lost", "restart": "restarts"}  # a save is too short to be seen
drawn = failures.simulated(broken, DAY, seed=3)
day = [Bar(names[what], "", start / 3600, min(end, DAY) / 3600) for what, start, end in drawn if what in names]
day.sort(key=lambda bar: [*names.values()].index(bar.row))
page.title("A day of LLaMA-3 405B on 16,384 H100s, from hour 0 to 24")
page.show(text(day, 48, 24, idle=" ", fill="#"), lambda: svg.time_lines([("", day)], unit="in h"))
page.answers([
    Answer("hours between failures, 54 x 24 / 419", "", broken.mtbf / 3600, "hours", "one chip: 50,677 hours"),
    Answer("seconds of a save", "", broken.save, "s", "5.7 TB of state at Llama 3's 2 TB/s"),
    Answer("minutes between saves, by Daly", "", broken.interval / 60, "minutes", "Young: sqrt(2 x 2.8 x 11,139) s"),
    Answer("goodput", "", broken.goodput, "", "Meta reports more than 0.90"),
    Answer("spare hosts", "", broken.spares, "hosts", "enough 99% of the time, if a repair takes a day"),
])  # fmt: skip
page.say("\nMost of the lost time goes to restarts of ten minutes. As saves take seconds, faster starts gain more "
         "than saving more often. More: python -m scaling.plan --failures.")  # fmt: skip

# %% [markdown]
# ## The problems
# The book gives no answers; the note in each row says how ours follows. The batch stays as it is on four pods, so a
# chip has a quarter of the tokens, and the bound of FSDP + TP is the one to look at.

# %%
four_pods, eight = "70B, 4 pods", "405B, 8 pods"
many = tm.num_params(L405)
page.answers([
    Answer("1 four pods: tokens a chip", "", B / (4 * POD), "tokens", "a quarter of 468"),
    Answer("1 four pods are compute-bound by", "", regime(four_pods), "", "117 > 113, by a hair; FSDP alone needs 850"),
    Answer("1 four pods: TP at the best X", "", best_ways[four_pods], "ways", "8960 / sqrt(2 x 2^20 x 8960 / 28672)"),
    Answer("1 four pods, at the best X: collectives over matmuls", "", longer(four_pods, best_ways[four_pods]), "times",
           "sqrt(113.4 / 117.0)"),
    Answer("1 four pods of 1120 x 8: collectives over matmuls", "", longer(four_pods, 8), "times",
           "bound by FSDP's gathers; a pod has this mesh"),
    Answer("1 tokens that a pod needs for the DCN", "73,440", cost.pod_threshold(C, V5P.need("dcn_bw")), "tokens",
           "a pod has 2^20: data parallelism over pods is free"),
    Answer("1 four pods: days at 40% MFU", "", days(flops, 4 * POD), "days", "44.3 / 4"),
    Answer("2a LLaMA-3 405B", "", many, "params", "3LDF + 2LD(N + K)H + 2DV, and the norms"),
    Answer("2a 405B: FLOPs of a token", "", float(tm.rule_of_thumb(L405, 1)), "FLOPs", "6 x params"),
    Answer("2a 405B: FLOPs of a step of 16M tokens", "", float(tm.rule_of_thumb(L405, B405)), "FLOPs",
           "6 x params x 2^24"),
    Answer("2a 405B: FLOPs of 15T tokens", "", tm.rule_of_thumb(L405, 15e12), "FLOPs", "6 x params x tokens"),
    Answer("2b eight pods, 16M tokens: tokens a chip", "", B405 / (8 * POD), "tokens", "2^24 / 71,680"),
    Answer("2b 405B: tokens a chip that FSDP+TP needs", "", cost.mixed_threshold(L405.F, C, ici(2), ici(1)), "tokens",
           "2550^2 / (2 x 53248)"),
    Answer("2b eight pods are compute-bound by", "", regime(eight), "", "FSDP alone needs 850"),
    Answer("2b eight pods: TP at the best X", "", best_ways[eight], "ways", "8960 / sqrt(2 x 2^21 x 8960 / 53248)"),
    Answer("2b eight pods of 1120 x 8: collectives over matmuls", "", longer(eight, 8), "times",
           "FSDP's, which the matmuls hide"),
    Answer("2b eight pods: days at 40% MFU", "", days(tm.rule_of_thumb(L405, 15e12), 8 * POD), "days",
           "compute-bound, so FLOPs / (0.4 x chips x C)"),
])  # fmt: skip
page.end()

# %% [markdown]
# ## Three things to try
# 1. Edit: replace `four, twelve = memory(4), memory(12)` by `four, twelve = memory(1), memory(12)`. With one checkpoint
#    a layer, how many chips are enough?
#    Answer: 62: the checkpoints take 5.2 TB in place of 21.0, so all takes 5.9 TB, and 61.9 chips hold that. Four rows
#    of the table then say DIFFERS.
# 2. Question: how many tokens a chip does FSDP + TP need for LLaMA-3 8B? Evaluate
#    `cost.mixed_threshold(L8.F, C, ici(2), ici(1))`. Why is it more than for 70B?
#    Answer: 227, twice the 113 of 70B: the threshold goes as 1/F, and 8B has half of the F.
# 3. Flag: run with `--plot ways.svg`. Where is the lowest point of each curve, and which two collectives are equal
#    there?
#    Answer: At 5.5 ways for 70B on a pod (0.49), at 11.1 on four pods (0.98) and at 10.7 for 405B (0.51). To the left
#    FSDP's gathers are the longer, to the right TP's collectives, and at the lowest point both take the same time.
