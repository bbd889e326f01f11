"""Part 12, Rooflines for LLM Scaling on GPUs: https://jax-ml.github.io/scaling-book/gpus#rooflines-for-llm-scaling-on-gpus

What data, tensor, expert and pipeline parallelism ask for on H100, B200 and GB200, and Quiz 5.
"""

import argparse
import sys

from tabulate import tabulate

from scaling import cost
from scaling.book.answers import Answer, report
from scaling.cost import gpu
from scaling.hardware import chip

H100, B200, GB200 = chip("h100", "part12"), chip("b200", "part12"), chip("gb200")


# %% Rooflines of the strategies: what each asks for, by kind of node
def strategies(F: int = 28672) -> str:
    rows = []
    for hw in (H100, B200, GB200):
        inside, across = hw.intensity("node"), hw.intensity("scale-out")
        limits = (F / inside, gpu.tensor_limit_across(F, hw))
        node = hw.node_gpus
        rows.append((
            hw.name, node, f"{inside:.0f}", f"{across:.0f}", f"{gpu.data_threshold(hw, 2):.0f}",
            f"{across / 8:.0f}", *(f"{limit:.1f}" for limit in limits),
            f"{gpu.expert_min_width(2 * node, 8, hw):.0f}", f"{gpu.expert_min_width(64 * node, 8, hw):.0f}",
        ))  # fmt: skip
    head = [
        "",
        "node",
        "DP in a node",
        "DP across",
        "over 2 nodes",
        "model on 8 nodes",
        f"TP in a node, F={F}",
        "TP across",
    ]
    head += ["EP on 2 nodes: F >", "on 64: F >"]
    return tabulate(rows, head, disable_numparse=True)


MEGATRON = {  # layers aside, the rows that Quiz 5 asks about: TP, PP, GPUs, sequences of 4096 tokens
    "16B": (4, 1, 192, 192), "70B": (8, 2, 768, 384), "314B": (8, 8, 3072, 1536),
}  # fmt: skip


def megatron() -> dict[str, tuple[float, float]]:
    """Tokens per GPU of each model, and the data-parallel threshold at its TP x PP."""
    found = {}
    for name, (tp, pp, gpus, sequences) in MEGATRON.items():
        nodes = max(1, tp * pp // H100.node_gpus)
        found[name] = (sequences * 4096 / gpus, gpu.data_threshold(H100, model_nodes=nodes))
    return found


def fewest_gpus(params: float, tensor: int) -> int:
    """GPUs over which ZeRO-3 must spread a replica for its params, gradients and Adam's state to fit, TP included."""
    share = cost.training_memory(params, Y=tensor).total
    return tensor * -(-int(share) // int(H100.hbm_bytes))


# %% Answers of the text and of Quiz 5
def answers() -> list[Answer]:
    alpha, F, B, params = H100.intensity("scale-out"), 28672, 4e6, 70e9
    h800, node = chip("h800"), chip("h100").intensity("node")
    held, seconds = (
        cost.training_memory(params, Y=8, grad_bytes=0),
        cost.seconds_at(6 * params * 15e12, 4096, 990e12, 0.45),
    )
    dp, fsdp = (
        cost.layer(s, cost.LayerShape(B, 8192, F), cost.Links(990e12, X=400e9), X=8, direction=d)
        for s, d in (("dp", "backward"), ("fsdp", "forward"))
    )
    ratio = (fsdp.comms / fsdp.math) / (dp.comms / dp.math)
    own, piped = B / 4096, gpu.data_threshold(H100, model_nodes=8)
    stages = 64
    hops = cost.pipeline_comms(1, 1, 2, stages, 2 * stages)  # in units of 2BD/W
    mega = megatron()
    return [
        Answer("DP in a node, H100: tokens per GPU", "2200", node),
        Answer("DP beyond the node", "2475", gpu.data_threshold(H100)),
        Answer("TPU v5p on three axes", "850", cost.data_threshold(4.59e14, chip("v5p").bandwidth("ici", 3))),
        Answer("LLaMA-3's 16,000 H100: batch", "40e6", 16000 * alpha, "tokens"),
        Answer("H800: tokens per GPU", "3300", h800.intensity("node")),
        Answer("DeepSeek-V3's 2048: batch", "6.7e6", 2048 * h800.intensity("node"), "tokens"),
        Answer(
            "and what it used", "4e6", 4096 * 15360, "tokens",
            erratum="15,360 sequences of 4096, as the book says below",
        ),
        Answer("MoE, E = 128, k = 4", "79,200", cost.expert_inflation(128, 4) * alpha, "tokens/GPU"),
        Answer("DP over 2 nodes", "1237", gpu.data_threshold(H100, 2), "tokens/GPU"),
        Answer(
            "'About 2500 on an H100 or B200'", "2500", gpu.data_threshold(B200), "tokens/GPU",
            erratum="5625 on a B200 (Quiz 5)",
        ),
        Answer("TP, F = 28000", "11", cost.tensor_limit(28000, 990e12, 400e9), "ways"),
        Answer("TP over two nodes", "19", gpu.tensor_limit_across(28000, H100), "ways"),
        Answer("EP, Z >> k: F > alpha x", "8", gpu.expert_min_width(2**13, 1, H100) / alpha),
        Answer("EP over 2 nodes, k = 8: F > alpha (Z - 8)/k", "2475", gpu.expert_min_width(16, 8, H100)),
        Answer("PP: hops' time over 2BD/W, M = 2 stages", "1.5", hops),
        Answer("5.1 B200: TP and DP in a node", "2500", B200.intensity("node")),
        Answer("5.1 B200: DP beyond", "5625", gpu.data_threshold(B200)),
        Answer(
            "5.1 GB200: DP beyond", "", B200.flops() / GB200.bandwidth("scale-out"), "tokens/GPU",
            "2250e12 / 3.6e12",
        ),
        Answer("App. A: better than an H100's by", "4", alpha * GB200.bandwidth("scale-out") / B200.flops(), "times"),
        Answer("5.2.1 GPUs for 70B and Adam", "9", float(gpu.replicas_fit(params, H100))),
        Answer("5.2.2 seconds for 15T tokens", "3.5e6", seconds, "s"),
        Answer("5.2.2 days", "40", seconds / 86400, "days"),
        Answer(
            "5.2.3 most TP", "14.372", cost.tensor_limit(F, 990e12, 450e9), "ways",
            erratum="990e12/450e9 is 2200, not 1995",
        ),
        Answer("5.2.3 8-way TP and DP: a GPU holds", "87.5", held.total / 1e9, "GB"),
        Answer("5.2.3 which fits", "no", "yes" if held.fits(H100.hbm_bytes) else "no"),
        Answer("5.2.3 tokens per GPU", "976", own),
        Answer("5.2.3 ZeRO-3 is compute-bound", "no", "yes" if own > alpha else "no"),
        Answer(
            "5.2.3 ZeRO-3's threshold over DP's", "2", ratio, "times",
            erratum="the same: 4DF to 4BDF forward, 8DF to 8BDF backward",
        ),
        Answer("5.2.3 threshold with 8-way PP", "309", piped, "tokens/GPU"),
        Answer("5.2.3 which is compute-bound", "yes", "yes" if own > piped else "no"),
        Answer("5.3 16B: tokens per GPU", "4096", mega["16B"][0]),
        Answer("5.3 70B", "2048", mega["70B"][0]),
        Answer("5.3 314B", "2048", mega["314B"][0]),
        Answer("5.3 16B's threshold", "2,472", mega["16B"][1], erratum="990e12/400e9 is 2475, as above"),
        Answer("5.3 70B's ('roughly 1k')", "1e3", mega["70B"][1], erratum="two nodes a replica: 2475/2 = 1237"),
        Answer("5.3 314B's", "300", mega["314B"][1], note="eight nodes a replica"),
        Answer(
            "5.3 all three are compute-bound", "yes",
            "yes" if all(b > least for b, least in mega.values()) else "no",
        ),
    ]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    print("Tokens per GPU for DP, ways of TP, width of experts (k = 8)\n" + strategies() + "\n")
    return report(answers())


if __name__ == "__main__":
    sys.exit(main())
