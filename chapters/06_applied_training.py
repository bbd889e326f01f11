"""Part 6, Training LLaMA 3 on TPUs: https://jax-ml.github.io/scaling-book/applied-training

LLaMA-3 70B by hand: its params, FLOPs, memory and days, how to shard it over a v5p pod, and the planner's mesh beside
the book's. Then the worked problems (four pods; 405B on eight), to which the book gives no answers. The planner lays
its meshes on the pod's torus of 16 x 20 x 28; "CP" is the book's sequence sharding, whose exchange of keys and values
counts.
"""

import argparse
import sys

from tabulate import tabulate

from scaling import cost
from scaling.book.answers import Answer, report
from scaling.configs import get
from scaling.cost import transformer as tm
from scaling.hardware import chip
from scaling.plan import Estimate, Fixed, Job, Layout, evaluate, plans
from scaling.plan.network import book as rings
from scaling.plan.report import Budget, text

V5P = chip("v5p")
C, POD = V5P.flops("bf16"), V5P.pod_chips
L70, L405 = get("llama3-70b"), get("llama3-405b")
DAY, YEAR = 86400, 365 * 86400
B = 4 * 1024 * 1024  # tokens: 1,024 sequences of 4,096


def ici(axes: int) -> float:
    return V5P.bandwidth("ici", axes=axes)


# %% The models' hyperparameters
def configs() -> str:
    letters = ("L", "D", "F", "N", "K", "H", "V")
    rows = [(name, *(getattr(get(name), x) for x in letters)) for name in ("llama3-8b", "llama3-70b", "llama3-405b")]
    return tabulate(rows, ("", *letters), intfmt=",")


# %% Memory: params, Adam's state and checkpoints of the whole batch, over all chips together (70e9 params, as the book)
def memory(checkpoints: int) -> cost.Memory:
    saved = cost.checkpoint_bytes(4e6, [L70.D] * checkpoints, L70.L)
    return cost.training_memory(70e9, saved, grad_bytes=0)


# %% What keeps a pod compute-bound
def regime(config, batch: float, chips: int) -> str:
    """FSDP if it can do it alone, else FSDP+TP at its best X, else none."""
    if cost.data_threshold(C, ici(3)) < batch / chips:
        return "FSDP"
    return "FSDP+TP" if cost.mixed_threshold(config.F, C, ici(2), ici(1)) < batch / chips else "none"


def answers() -> list[Answer]:
    count, four, twelve = tm.params(L70), memory(4), memory(12)
    flops = 6 * 70e9 * 15e12
    chips = four.total / V5P.hbm_bytes
    days = cost.seconds_at(flops, POD, C, 0.4) / DAY
    alone = days * POD / 225
    mixed = cost.mixed_threshold(L70.F, C, ici(2), ici(1))
    sharded = Fixed(zero=3)  # FSDP, as the book
    found = plans(Job(L70, B), V5P, POD, sharded)
    best, fsdp = found[0], next(found[i] for i, layout in found.layouts() if layout.shards == POD)
    layout = Layout(fsdp=1024, context=2, tensor=4, zero=3)  # each axis a ring, as the book assumes
    book = evaluate(Job(L70, B), rings(V5P, layout.sizes, {"fsdp": 1, "context": 1, "tensor": 1}), layout)
    four_pods = plans(Job(L70, B), V5P, 4 * POD, sharded)[0]
    B405 = 16 * 2**20
    eight = plans(Job(L405, B405), V5P, 8 * POD, sharded)[0]
    many, mixed405 = tm.num_params(L405), cost.mixed_threshold(L405.F, C, ici(2), ici(1))
    return [
        Answer("FFW params", "56.3e9", count["mlp"]),
        Answer("vocabulary", "2.1e9", count["vocab"]),
        Answer("attention", "12e9", count["attention"]),
        Answer("LLaMA-3 70B", "70.4e9", tm.num_params(L70), erratum="70.55e9: the book adds the rounded parts"),
        Answer("FLOPs a token, training", "4.2e11", 6 * 70e9),
        Answer("a token on one v5p", "1", 1e3 * 6 * 70e9 / C, "ms"),
        Answer("FLOPs of 15T tokens", "6.3e24", flops),
        Answer("on one v5p", "435", cost.seconds_at(flops, 1, C) / YEAR, "years"),
        Answer("on a pod at 40% MFU", "3.8e6", cost.seconds_at(flops, POD, C, 0.4), "s"),
        Answer("the same", "44", days, "days"),
        Answer("batch 4M: params", "140e9", four.params, "bytes"),
        Answer("optimizer", "560e9", four.optimizer, "bytes"),
        Answer("4 checkpoints a layer", "20.9e12", four.activations, "bytes"),
        Answer("in all", "21.6e12", four.total, "bytes"),
        Answer("fewest chips", "225", chips, "v5p", note="226 whole ones"),
        Answer("days on them, from 44", "1752", 44 * POD / 225, "days", note=f"unrounded {alone:,.0f}"),
        Answer("the same", "4", alone / 365, "years", erratum="1752 days are 4.8 years"),
        Answer("memory a chip on a pod", "2.4e9", four.total / POD, "bytes"),
        Answer("with 12 checkpoints a layer", "8e9", twelve.total / POD, "bytes", erratum="(0.7 + 62.9) TB / 8960"),
        Answer("FSDP without sequence sharding: ways", "1024", B / 4096, "sequences"),
        Answer("so FSDP over 8,960", "no", "yes" if POD <= B / 4096 else "no"),
        Answer("FSDP with it: tokens a chip", "468", B / POD, "tokens"),
        Answer("what it needs", "850", cost.data_threshold(C, ici(3)), "tokens"),
        Answer("bound by", "fsdp", fsdp.cost.bound,
               note=f"planner, {fsdp.name}: {fsdp.bound / fsdp.cost.math:.2f} x compute"),
        Answer("FSDP+TP: smallest batch per chip", "113", mixed, "tokens"),
        Answer("compute-bound", "yes", "yes" if regime(L70, B, POD) == "FSDP+TP" else "no"),
        Answer("X_opt", "1618", cost.mixed_optimum(4.19e6, L70.F, POD, 2, 1)),
        Answer("2048 x 4: chips", "8960", 2048.0 * 4, "v5p", erratum="8,192, which is no slice of 16x20x28"),
        Answer("DP 1024 x SP 2 x TP 4 bound by", "compute", book.cost.bound,
               note=f"on rings, 8,192 chips: {shares(book)}"),
        Answer("the planner's mesh of 8,960", "compute", best.cost.bound, note=f"{best.name}: {shares(best)}"),
        Answer("1 four pods: tokens a chip", "", B / (4 * POD), "tokens",
               note=f"FSDP+TP needs {mixed:.0f}: {regime(L70, B / 4, POD)}, by a hair; FSDP alone is far off"),
        Answer("1 tokens a pod", "", B / 4, "tokens", note="DCN needs 73,440: data parallelism over pods is free"),
        Answer("1 X_opt in a pod", "", cost.mixed_optimum(B / 4, L70.F, POD, 2, 1), note="about 810 x 11"),
        Answer("1 scheme", "", four_pods.name, note=f"planner: {shares(four_pods)}"),
        Answer("1 days at 40% MFU", "", days / 4, "days", note="44.3 / 4"),
        Answer("2a LLaMA-3 405B", "", many, "params", note="3 LDF + 2LD(N+K)H + 2DV + norms"),
        Answer("2a FLOPs a token", "", tm.rule_of_thumb(L405, 1), note="6 x params"),
        Answer("2a FLOPs a step of 16M tokens", "", tm.rule_of_thumb(L405, B405), note="6 x params x 2^24"),
        Answer("2a FLOPs of 15T tokens", "", tm.rule_of_thumb(L405, 15e12), note="6 x params x tokens"),
        Answer("2b eight pods, 16M: tokens a chip", "", B405 / (8 * POD), "tokens",
               note=f"FSDP+TP needs {mixed405:.0f}: {regime(L405, B405 / 8, POD)}"),
        Answer("2b X_opt in a pod", "", cost.mixed_optimum(B405 / 8, L405.F, POD, 2, 1), note="about 840 x 10.7"),
        Answer("2b scheme", "", eight.name, note=f"planner: {shares(eight)}"),
        Answer("2b days at 40% MFU", "", cost.seconds_at(tm.rule_of_thumb(L405, 15e12), 8 * POD, C, 0.4) / DAY, "days",
               note="compute-bound, so FLOPs / (chips C 0.4)"),
    ]  # fmt: skip


def shares(found: Estimate) -> str:
    """The bound of a step, and how long each axis communicates in it, in % of computing."""
    parts = {"forward": found.cost.parts[0], "backward": found.cost.parts[1]}
    each = [
        f"{way} " + ", ".join(f"{axis} {seconds / part.math:.0%}" for axis, seconds in part.axes)
        for way, part in parts.items()
    ]
    return f"at least {found.bound:.3f} s a step; communication in % of compute: {'; '.join(each)}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", action="store_true", help="also print the planner's report for 70B and 405B")
    args = parser.parse_args()
    print(configs() + "\n")
    if args.plan:
        for config, batch, pods in ((L70, B, 1), (L405, 4 * B, 8)):
            job = Job(config, batch)
            print(text(job, V5P, pods * POD, plans(job, V5P, pods * POD), Budget(), 4) + "\n")
    return report(answers())


if __name__ == "__main__":
    sys.exit(main())
