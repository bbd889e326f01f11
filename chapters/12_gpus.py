"""Part 12, How to Think About GPUs: https://jax-ml.github.io/scaling-book/gpus

GPUs as data, their tree of switches level by level, what collectives cost in a node and beyond it, and Quizzes 1 to 4.
The rooflines of training on them and Quiz 5 are 12_gpu_rooflines.py.
"""

import argparse
import sys

from tabulate import tabulate

from scaling import cost
from scaling.book.answers import Answer, report
from scaling.cost import gpu
from scaling.hardware import chip, chips
from scaling.show import charts as plot

H100, B200, GB200 = chip("h100", "part12"), chip("b200", "part12"), chip("gb200")
KIB, SUBPARTITIONS, LANES = 1024, 4, 32
IB = H100.levels[1].link_bw  # a cable of 400 Gbit/s


# %% Specifications
def specifications() -> str:
    rows = []
    for hw in map(chip, chips()):
        if hw.kind == "gpu":
            rates = [f"{dict(hw.peaks)[d]:.3g}" if d in dict(hw.peaks) else "-" for d in ("bf16", "fp8", "fp4")]
            levels = " | ".join(f"{level.name} {level.degree} x {level.child_bw:.3g}" for level in hw.levels)
            rows.append((hw.name, hw.sms, f"{hw.hbm_bytes:.3g}", f"{hw.hbm_bw:.3g}", *rates, levels))
    head = ["GPU", "SMs", "HBM", "HBM/s", "bf16", "fp8", "fp4", "levels: children x bytes/s of each"]
    return tabulate(rows, head, disable_numparse=True)


# %% The tree: bandwidth of each level, three ways
def tree() -> str:
    rows = []
    for hw in (H100, GB200):
        for row in gpu.levels_table(hw):
            switch = f"{row['switch_bw'] / 1e12:.1f}" if row["switch_bw"] else "-"
            shares = [f"{row[key] / 1e9:.0f}" for key in ("gpu_bw", "node_bw")]
            exact = f"{gpu.collective_bw(hw, row['gpus']) / 1e9:.0f}"
            rows.append((hw.name, row["level"], row["gpus"], f"{row['unit_bw'] / 1e12:.1f}", switch, *shares, exact))
    head = [
        "",
        "level",
        "GPUs",
        "unit TB/s",
        "its switches TB/s",
        "a GPU GB/s",
        "fat tree GB/s",
        "AllGather GB/s, exact",
    ]
    return tabulate(rows, head, disable_numparse=True)


# %% Collectives of an array of 64 MB
def collectives(V: float = 64e6) -> str:
    rows = []
    for n in (2, 8, 16, 64, 256, 1024):
        calls = (gpu.all_gather(V, H100, n), gpu.all_reduce(V, H100, n), gpu.all_reduce(V, H100, n, sharp=True))
        calls += (gpu.all_to_all(V, H100, n), gpu.all_to_all(V, H100, n, k=2))
        rows.append((n, *(f"{1e6 * t:.1f}" for t in calls)))
    head = ["GPUs", "AllGather us", "AllReduce us", "with SHARP", "AllToAll us", "ragged, k = 2"]
    return tabulate(rows, head, disable_numparse=True)


# %% Pop Quiz 3: the outer AllGather of bf16[D_X, F_Y] as the inner axis Y spans more of a unit of 256 GPUs
def sharded_all_gather(D: int = 8192, F: int = 32768) -> tuple[str, list[float]]:
    rows, approximate = [], []
    for Y in (1, 2, 4, 8, 16, 32, 64, 128):
        times = [gpu.all_gather(2 * D * F, H100, 256 // Y, inner=Y, exact=exact) for exact in (False, True)]
        approximate.append(times[0])
        rows.append((Y, *(f"{1e3 * t:.3f}" for t in times)))
    return tabulate(rows, ["Y", "V / W ms", "exact ms"], disable_numparse=True), approximate


# %% Quiz 4: the bytes that switches move, message by message
def gather_ledger(nodes: int, gpus: int) -> dict[str, float]:
    """Bytes in and out of one node's switch and of the one above, AllGather of one byte over nodes of GPUs."""
    moved, shard = dict.fromkeys(("node in", "node out", "top in", "top out"), 0.0), 1 / (nodes * gpus)
    for source in range(nodes * gpus):
        home = source // gpus
        moved["top in"] += shard  # one copy goes up, and from there one to each other node
        moved["top out"] += shard * (nodes - 1)
        here = home == 0  # the ledger of node 0's switch: in from its GPU or from above
        moved["node in"] += shard
        moved["node out"] += shard * ((gpus - 1) + 1 if here else gpus)  # to its GPUs, and its own also up
    return moved


def sharp_ledger(gpus: int) -> tuple[float, float]:
    """Bytes in and out of a node's switch, AllReduce of one byte with SHARP, by its four phases."""
    shard, into, out = 1 / gpus, 0.0, 0.0
    for gpu_ in range(gpus):
        for owner in range(gpus):
            into += shard * (gpu_ != owner)  # partial sums for every other owner go up
        out += shard  # the switch adds them up and sends each owner its sum
        into += shard  # the owner adds its own part, and sends it back
        out += shard * (gpus - 1)  # multicast to the others
    return into, out


# %% Answers: what a GPU is (Quiz 1)
def quiz_1() -> list[Answer]:
    cores = {hw.name: hw.sms * SUBPARTITIONS * LANES for hw in (H100, B200)}
    v5p, h200, smem = chip("v5p", "part12"), chip("h200"), H100.sms * H100.smem_bytes / 1e6
    vector, memory = cores["h100"] * H100.clock, H100.hbm_bw
    small, large = (cost.matmul(B, 4096, 8192, chip("b200").flops(), B200.hbm_bw) for B in (64, 512))
    add = [cost.roofline(N, 12 * N, vector, memory) for N in (1024, 65536, 2**30)]
    return [
        Answer(
            "FLOPs/cycle of an H100's Tensor Core", "1.0e3", H100.flops() / H100.sms / 4 / 1.76e9, "",
            "1024 by design",
        ),
        Answer("the same of a B200, at 1.86 GHz", "2.0e3", B200.flops() / B200.sms / 4 / 1.86e9, "", "2048 by design"),
        Answer("Warps of 32 threads with 256 registers that fit", "8", 256 * KIB / (4 * 32 * 256)),
        Answer("L2 over HBM bandwidth, H100", "1.6", H100.l2_bw / memory, "times"),
        Answer(
            "HBM bandwidth of a B200, text", "9e12", B200.hbm_bw, "bytes/s",
            erratum="8e12 in the table and the quizzes",
        ),
        Answer("FLOPs/s of an H200 over a v5p", "2", h200.flops() / v5p.flops(), "times"),
        Answer("HBM of an H200 over a v5p", "1.5", h200.hbm_bytes / v5p.hbm_bytes, "times"),
        Answer("SMEM of an H100, comparison table", "32", smem, "MB", erratum="132 x 256 kB; the quiz has 33"),
        Answer("Warp schedulers of an H100", "528", float(H100.sms * SUBPARTITIONS)),
        Answer("1.1 fp32 cores of an H100", "16,896", float(cores["h100"])),
        Answer("1.1 of a B200", "18,944", float(cores["b200"])),
        Answer("1.1 vector ALUs of a v5p", "8,192", float(v5p.cores * v5p.vector_alus)),
        Answer("1.2 vector FLOPs/s of an H100", "26.9", cores["h100"] * H100.clock_base / 1e12, "TFLOPs/s"),
        Answer("1.2 with boost", "33.5", vector / 1e12, "TFLOPs/s"),
        Answer("1.2 matmul over vector", "30", H100.flops() / vector, "times"),
        Answer("1.3 critical intensity, H100, fp16", "295", H100.intensity("hbm", "fp16"), "FLOPs/byte"),
        Answer("1.3 B200, fp16", "281", B200.intensity("hbm", "fp16"), "FLOPs/byte"),
        Answer("1.3 H100, fp8", "590", H100.intensity("hbm", "fp8"), "FLOPs/byte"),
        Answer("1.3 B200, fp8", "562", B200.intensity("hbm", "fp8"), "FLOPs/byte"),
        Answer("1.4 matmul of 64 rows on a B200", "8.6", 1e6 * small.lower, "us", f"bound by {small.bound}"),
        Answer("1.4 of 512 rows", "15", 1e6 * large.lower, "us", f"bound by {large.bound}"),
        Answer("1.5 SMEM of an H100", "33", smem, "MB"),
        Answer("1.5 with registers", "66", 2 * smem, "MB", erratum="33 was rounded down before doubling"),
        Answer("1.6 clock of a B200", "2.1", 80e12 / (2 * cores["b200"]) / 1e9, "GHz"),
        Answer("1.7 intensity of fp32 add", "0.083", add[0].intensity, "FLOPs/byte", "1/12"),
        Answer("1.7 of the CUDA cores", "10", vector / memory, "FLOPs/byte"),
        Answer(
            "1.7 N = 1024", "", 1e9 * add[0].lower, "ns",
            "asked but not answered: 12N/3.35e12; launching takes longer",
        ),
        Answer("1.7 N = 65,536", "0.23", 1e6 * add[1].lower, "us"),
        Answer("1.7 N = 2^30", "3.84", 1e3 * add[2].lower, "ms"),
    ]  # fmt: skip


# %% Networks and collectives (Quizzes 2, 3 and 4)
def quizzes_2_to_4() -> list[Answer]:
    node, leaf, spine = gpu.levels_table(H100)
    units = spine["gpus"] // leaf["gpus"], leaf["gpus"] // node["gpus"]  # SUs, and nodes in each
    switches = units[0] * units[1] * node["switches"] + units[0] * leaf["switches"] + spine["switches"]
    V, ports, moved = 2 * 4096 * 65536, H100.levels[1].ports, gather_ledger(4, 8)
    pop, small, W = 2 * 1024 * 16384, [gpu.all_gather(1, H100, n) for n in (8, 256, 1024)], H100.levels[0].child_bw
    slow, fast = (gpu.all_reduce(1, H100, 8, sharp=sharp) for sharp in (False, True))
    two = gpu.all_to_all(1, H100, 16) / gpu.all_to_all(1, H100, 8)
    spine_bw = H100.levels[2].child_bw * 4 / 3 / 1e12
    _, times = sharded_all_gather()
    Z = {z: [gpu.nonzero_share(z, 4, random) * (z - 1) / z for random in (True, False)] for z in (4, 16, 64)}
    return [
        Answer("2.1 switches of a node", "6.4", node["switch_bw"] / 1e12, "TB/s"),
        Answer("2.1 so a node's GPUs get", "3.6", min(node["unit_bw"], node["switch_bw"]) / 1e12, "TB/s"),
        Answer("2.2 bisection of a node", "3.6", gpu.bisection_bw(H100, 8) / 1e12, "TB/s", "both directions"),
        Answer("2.3 AllGather of bf16[4096, 65536]", "1.04", 1e3 * gpu.all_gather(V, H100, 8), "ms"),
        Answer("2.3 approximately", "1.19", 1e3 * gpu.all_gather(V, H100, 8, exact=False), "ms"),
        Answer("Switches of a SuperPod of 1024", "560", float(switches)),
        Answer("Egress of a v5p, all axes", "540", chip("v5p").bandwidth("ici", 3) / 1e9, "GB/s"),
        Answer("Egress of a GB200 node", "3.6", GB200.levels[1].child_bw / 1e12, "TB/s"),
        Answer("over an H100 node's", "9", GB200.levels[1].child_bw / H100.levels[1].child_bw, "times"),
        Answer("3.1 cables of a node", "400", leaf["node_bw"] / 1e9, "GB/s"),
        Answer("3.1 leaf switches, half their ports, a node", "400", leaf["switch_bw"] / 2 / units[1] / 1e9, "GB/s"),
        Answer("3.1 cables of an SU to the spine", "12.8", H100.levels[2].child_bw / 1e12, "TB/s"),
        Answer("3.1 spine switches", "51.2", spine["switch_bw"] / 1e12, "TB/s", "400 GB/s a node"),
        Answer("3.2 spine switches for 2048 GPUs", "32", 2048 / 8 * leaf["node_bw"] / (ports * IB)),
        Answer("3.2 cables of each leaf to each of them", "1", ports / 2 / 32),
        Answer(
            "3.2 spine switches for 4096, half their ports up", "128",
            4096 / 8 * leaf["node_bw"] / (ports / 2 * IB),
        ),
        Answer("3.2 core switches above them", "64", 4096 / 8 * leaf["node_bw"] / (ports * IB)),
        Answer("Pop 1: AllGather of bf16[1024, 16384]", "75", 1e6 * gpu.all_gather(pop, H100, 8, exact=False), "us"),
        Answer("Pop 1: precisely", "65", 1e6 * gpu.all_gather(pop, H100, 8), "us"),
        Answer(
            "AllToAll in a node: TPU's B/4W over it", "2", 0.25 / W / gpu.all_to_all(1, H100, 8, exact=False),
            "times",
        ),
        Answer("Pop 2: with 4 of 8 entries", "0.5", gpu.all_to_all(1, H100, 8, k=4) / gpu.all_to_all(1, H100, 8)),
        Answer(
            "SHARP's gain in a node, in theory", "75", 100 * (slow / fast - 1),
            "%",
        ),
        Answer("AllGather bandwidth of a node", "514", 1 / small[0] / 1e9, "GB/s"),
        Answer("of an SU", "413", 1 / small[1] / 1e9, "GB/s"),
        Answer("of the spine's own ring", "17.1", spine_bw, "TB/s"),
        Answer("of 1024 GPUs", "413", 1 / small[2] / 1e9, "GB/s"),
        Answer(
            "AllToAll over 2 nodes against 1: more than", "4", two, "times",
            erratum="of the approximations; exactly 2.57",
        ),
        Answer(
            "Collective bandwidth: bisection x 2/N", "450", 2 * gpu.bisection_bw(H100, 8) / 8e9, "GB/s",
            erratum="3.6e12 counts both directions already: bisection/N",
        ),
        Answer("Pop 3: Y <= 8", "1.34", 1e3 * times[3], "ms", "figure; precisely 1.30"),
        Answer("Pop 3: Y = 16", "0.67", 1e3 * times[4], "ms"),
        Answer("Pop 3: Y = 128", "0.084", 1e3 * times[7], "ms"),
        Answer("4.1 node switch: bytes in, of B", "1", moved["node in"], "B", "counted, 4 nodes of 8"),
        Answer("4.1 node switch: bytes out, of B", "8", moved["node out"], "B", "BN"),
        Answer("4.1 top switch: bytes in", "1", moved["top in"], "B"),
        Answer("4.1 top switch: bytes out", "3", moved["top out"], "B", "B(M - 1)"),
        Answer("4.2 SHARP AllReduce: bytes in", "8", sharp_ledger(8)[0], "B", "BN"),
        Answer("4.2 bytes out", "8", sharp_ledger(8)[1], "B", "BN"),
        Answer(
            "4.3 AllReduce in a node, Y = 2: time over B/W", "0.5", gpu.all_reduce(1, H100, 4, 2, sharp=True) * W, "",
            "1/Y",
        ),
        Answer(
            "4.4 AllReduce at the spine, Y = 256", "12.8", 1e-12 / gpu.all_reduce(1, H100, 4, 256, sharp=True),
            "TB/s",
        ),
        Answer(
            "4.5 AllGather over 2 nodes", "514", gpu.collective_bw(H100, 16) / 1e9, "GB/s",
            "the node, not the leaf: 800",
        ),
        *(Answer(f"App. B: ragged AllToAll, k = 4 of {z}", book, share[0], "", f"approximately {share[1]:.3g}")
          for (z, share), book in zip(Z.items(), ("0.513", "0.213", "0.060"), strict=True)),
    ]  # fmt: skip


def answers() -> list[Answer]:
    return quiz_1() + quizzes_2_to_4()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plot", metavar="FILE", help="write the time of collectives against bytes as PNG or SVG")
    args = parser.parse_args()
    print("Specifications\n" + specifications())
    print("\nThe tree of switches\n" + tree())
    print("\nCollectives of 64 MB on H100s\n" + collectives())
    print("\nAllGather over X of bf16[8192_X, 32768_Y], Y inside, 256 GPUs\n" + sharded_all_gather()[0] + "\n")
    if args.plot:
        sizes = [10**e for e in range(4, 11)]
        lines = {f"AllGather over {n}": [(V, gpu.all_gather(V, H100, n)) for V in sizes] for n in (8, 256)}
        lines |= {f"AllToAll over {n}": [(V, gpu.all_to_all(V, H100, n)) for V in sizes] for n in (8, 256)}
        print(f"wrote {plot.save(args.plot, lines, 'bytes', 'seconds', 'H100')}\n")
    return report(answers())


if __name__ == "__main__":
    sys.exit(main())
