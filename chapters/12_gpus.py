# %% [markdown]
"""Part 12, How to Think About GPUs: the units and memories of a GPU, compared with a TPU's.
https://jax-ml.github.io/scaling-book/gpus

This chapter has the GPUs as data, compares an H100's units with a v5p's, draws rooflines of matmuls and of vector
addition, and answers Quiz 1. How GPUs are joined is in 12_gpu_networks.py, and the limits of training on them in
12_gpu_rooflines.py.
"""

# %%
import math

import torch

from scaling import cost
from scaling.book.answers import Answer
from scaling.book.layout import format_number
from scaling.book.page import Page
from scaling.hardware import chip

page = Page(__doc__, plot=True)
H100, B200, H200, V5P = chip("h100", "part12"), chip("b200", "part12"), chip("h200"), chip("v5p", "part12")
GPUS = ("v100", "a100", "h100", "h200", "b200", "gb200")
SUBPARTITIONS, LANES, REGISTERS = 4, 32, 16384  # of an SM; fp32 cores of each; 32-bit registers of each
KIB, MB = 1024, 1e6

# %% [markdown]
# ## Summary of GPU specs
# A GPU is a set of small cores, the *streaming multiprocessors* (SMs), around one memory, the HBM. Each SM has four
# parts, and each part has a Tensor Core, which multiplies matrices, 32 CUDA cores, which do everything else, and 16,384
# registers. An SM also has its own fast memory (SMEM, or L1), into which a program copies what it multiplies; L2 is a
# cache that all SMs share. Threads run in *warps* of 32, all at the same instruction. Each part of an SM has a *warp
# scheduler*, which switches to another warp while one waits for memory.
#
# The last column is C/W in bf16, the FLOPs for each byte of HBM. It is about 300 for an H100 and a B200, near a v5e's
# 240; an H200's faster HBM makes it 206. So a matmul needs about as many rows as on a TPU to be compute-bound.


# %%
def cells(*values) -> list[str]:
    return [format_number(value) if value else "-" for value in values]


page.title("GPU specs: bytes, bytes/s, FLOPs/s of a chip")
rows = []
for hw in map(chip, GPUS):
    peaks = dict(hw.peaks)
    rates = [peaks.get(dtype) for dtype in ("bf16", "fp8", "fp4")]
    alpha = f"{peaks['bf16'] / hw.hbm_bw:.0f}" if "bf16" in peaks else "-"
    clock = f"{hw.clock_base / 1e9:.2f}-{hw.clock / 1e9:.2f}" if hw.clock_base and hw.clock else "-"
    sizes = cells(hw.smem_bytes / 1e3, hw.l2_bytes, hw.hbm_bytes, hw.hbm_bw)
    rows.append((hw.name, clock, hw.sms, *sizes, *cells(*rates), alpha))
page.table(rows, ["GPU", "GHz", "SMs", "SMEM\nkB", "L2", "HBM", "HBM/s", "bf16", "fp8", "fp4", "C/W"])
page.say(f"The book's text and quizzes, and all below, take {format_number(H100.hbm_bw)} bytes/s for an H100's HBM and "
         f"{format_number(B200.flops())} bf16 FLOPs/s for a B200.")  # fmt: skip

# %% [markdown]
# ## GPUs vs. TPUs at the chip level
# A GPU has hundreds of small cores and a TPU two large ones; both multiply matrices in special units, at similar
# clocks. Small cores are flexible, since each can do something else, and harder to use well: a large matmul has to be
# cut into tiles for all of them, whose memories are small. A TPU's one program feeds a large unit from a large memory.
#
# The table sets each unit of a GPU beside what does its work in a TPU (Part 2): the MXU multiplies matrices, the VPU
# computes with vectors, and VMEM is the fast memory. Compare the memories: an H100 holds as much in registers as in
# SMEM. A TPU has few registers, and four times as much VMEM as an H100 has SMEM.

# %%
schedulers = {"h100": H100.sms * SUBPARTITIONS, "v5p": V5P.cores * V5P.vector_alus // (8 * 128)}
smem = {hw.name: hw.sms * hw.smem_bytes for hw in (H100, B200)}
registers = H100.sms * SUBPARTITIONS * REGISTERS * 4
page.title("The units of an H100 and of a v5p")
page.table([
    ("streaming multiprocessor / TensorCore", H100.sms, V5P.cores),
    ("warp scheduler / slot of the VPU", schedulers["h100"], schedulers["v5p"]),
    ("CUDA core / ALU of the VPU", schedulers["h100"] * LANES, V5P.cores * V5P.vector_alus),
    ("Tensor Core / MXU", H100.sms * SUBPARTITIONS, V5P.cores * V5P.mxus),
    ("SMEM / VMEM, MB", f"{smem['h100'] / MB:.1f}", f"{V5P.sram_bytes / MB:.1f}"),
    ("registers / vector registers, MB", f"{registers / MB:.1f}", f"{V5P.registers_bytes / MB:.2f}"),
], ["GPU / TPU", "H100", "v5p"])  # fmt: skip

# %% [markdown]
# ## Rooflines of an H100 and a B200
# A matmul becomes compute-bound at the corner of its roofline. The points are fp16[B, 4096] fp16[4096, 8192] on a B200,
# from Question 1.4: with 64 rows the memory binds it, with 512 the Tensor Cores do.

# %%
rows_of_X = (1, 8, 64, 512, 4096)
label = f"matmul on a B200, B = {', '.join(map(str, rows_of_X))}"
products = [cost.matmul(B, 4096, 8192, B200.flops(), B200.hbm_bw) for B in rows_of_X]
roofs = {hw.name: [(x, cost.attainable(x, hw.flops(), hw.hbm_bw)) for x in sorted((1, 1e4, hw.intensity("hbm")))]
         for hw in (H100, B200)}  # fmt: skip
page.chart(
    "rooflines", roofs, "FLOPs/byte", "FLOPs/s", "bf16 rooflines", height=14,
    points={label: [(op.intensity, op.attained) for op in products]},
    marks=[("x", hw.intensity("hbm"), f"{hw.name}: {hw.intensity('hbm'):.0f}") for hw in (H100, B200)],
)  # fmt: skip

# %% [markdown]
# ## The numbers of the text, and Quiz 1
# First come the numbers of the text: FLOPs/s from the units and their clock, and an H100 compared with a v5p. An FMA
# multiplies and adds in one instruction, which NVIDIA counts as two FLOPs.

# %%
cores = {hw.name: hw.sms * SUBPARTITIONS * LANES for hw in (H100, B200)}
tensor = {hw.name: hw.flops() / hw.sms / SUBPARTITIONS / clock for hw, clock in ((H100, 1.76e9), (B200, 1.86e9))}
vector, memory = cores["h100"] * H100.clock, H100.hbm_bw
page.answers([
    Answer("bf16 FLOPs a cycle of an H100's Tensor Core, a power of two", "1024", 2 ** round(math.log2(tensor["h100"])),
           "", f"{tensor['h100']:.0f} by 132 SMs at 1.76 GHz"),
    Answer("bf16 FLOPs a cycle of a B200's Tensor Core, a power of two", "2048", 2 ** round(math.log2(tensor["b200"])),
           "", f"{tensor['b200']:.0f} by 148 SMs at 1.86 GHz"),
    Answer("matmul FLOPs/s of an H100 ('990 TFLOPs/s')", "990e12", H100.flops(), "FLOPs/s"),
    Answer("FLOPs/s of an H100's CUDA cores, FMA counted twice", "66e12", 2 * vector, "FLOPs/s"),
    Answer("Registers of an SM", "256", SUBPARTITIONS * REGISTERS * 4 / KIB, "KiB"),
    Answer("Warps of 32 threads with 256 registers that fit an SM", "8", SUBPARTITIONS * REGISTERS / (32 * 256)),
    Answer("L2 over HBM bandwidth, H100", "1.6", H100.l2_bw / memory, "times"),
    Answer("HBM bandwidth of a B200, in the text", "9e12", B200.hbm_bw, "bytes/s",
           erratum="8e12 in the table and the quizzes"),
    Answer("FLOPs/s of an H200 over a v5p ('close to 2x')", "2", H200.flops() / V5P.flops(), "times"),
    Answer("HBM of an H200 over a v5p", "1.5", H200.hbm_bytes / V5P.hbm_bytes, "times"),
    Answer("Comparison: warp schedulers of an H100", "528", schedulers["h100"]),
    Answer("Comparison: VPU slots of a v5p", "8", schedulers["v5p"]),
    Answer("Comparison: MXUs of a v5p", "8", V5P.cores * V5P.mxus),
    Answer("Comparison: SMEM of an H100", "32", smem["h100"] / MB, "MB", coarse="132 x 256 kB; the quiz has 33"),
    Answer("Comparison: vector registers of a v5p", "256", V5P.registers_bytes / KIB, "KiB",
           erratum="those of one of its two cores (Part 2)"),
])  # fmt: skip

# %% [markdown]
# Quiz 1 asks for cores and FLOPs/s, intensities, two matmuls on a B200, and the addition of vectors on an H100.

# %%
small, large = (cost.matmul(B, 4096, 8192, B200.flops(), B200.hbm_bw) for B in (64, 512))
add = {N: cost.roofline(N, 12 * N, vector, memory) for N in (1024, 65536, 2**30)}
X = torch.ones(64, dtype=torch.float32)
page.say()
page.same([("1.7 bytes of adding two fp32[64]", "3 x 4N", 12 * 64, X.nbytes + X.nbytes + (X + X).nbytes)],
          ["question", "the book's", "value", "of tensors"])  # fmt: skip
page.answers([
    Answer("1.1 fp32 cores of an H100", "16,896", cores["h100"]),
    Answer("1.1 fp32 cores of a B200", "18,944", cores["b200"]),
    Answer("1.1 vector ALUs of a v5p", "8,192", V5P.cores * V5P.vector_alus),
    Answer("1.2 vector FLOPs/s of an H100", "26.9", cores["h100"] * H100.clock_base / 1e12, "TFLOPs/s"),
    Answer("1.2 vector FLOPs/s of an H100, with boost", "33.5", vector / 1e12, "TFLOPs/s"),
    Answer("1.2 matmul over vector FLOPs/s of an H100", "30", H100.flops() / vector, "times"),
    Answer("1.3 intensity of an H100, fp16", "295", H100.intensity("hbm", "fp16"), "FLOPs/B"),
    Answer("1.3 intensity of a B200, fp16", "281", B200.intensity("hbm", "fp16"), "FLOPs/B"),
    Answer("1.3 intensity of an H100, fp8", "590", H100.intensity("hbm", "fp8"), "FLOPs/B"),
    Answer("1.3 intensity of a B200, fp8", "562", B200.intensity("hbm", "fp8"), "FLOPs/B"),
    Answer("1.4 fp16[64, 4096] x fp16[4096, 8192] on a B200: bytes", "69e6", small.nbytes, "bytes"),
    Answer("1.4 the time of this product", "8.6", 1e6 * small.lower, "us", f"bound by {small.bound}"),
    Answer("1.4 the time with 512 rows", "15", 1e6 * large.lower, "us", f"bound by {large.bound}"),
    Answer("1.5 SMEM of an H100", "33", smem["h100"] / MB, "MB"),
    Answer("1.5 SMEM and registers of an H100", "66", (smem["h100"] + registers) / MB, "MB", rounded=(
        2 * 33, "33 for each")),
    Answer("1.5 VMEM of a TPU", "120", V5P.sram_bytes / 2**20, "MiB", coarse="128, as in the comparison and Part 2"),
    Answer("1.6 clock of a B200 with 80 TFLOPs/s of FMA", "2.1", 80e12 / (2 * cores["b200"]) / 1e9, "GHz"),
    Answer("1.7 intensity of fp32 add", "0.083", add[1024].intensity, "FLOPs/B", "1/12"),
    Answer("1.7 intensity of the CUDA cores", "10", vector / memory, "FLOPs/B"),
    Answer("1.7 SMs that 1024 CUDA cores take, one for each sum", "8", 1024 / (SUBPARTITIONS * LANES)),
    Answer("1.7 math of N = 1024: longer than on all SMs", "16", H100.sms / (1024 / (SUBPARTITIONS * LANES)), "times"),
    Answer("1.7 adding N = 1024", "", 1e9 * add[1024].lower, "ns",
           "asked but not answered: 12N over HBM/s; launching it takes longer"),
    Answer("1.7 adding N = 65,536", "0.23", 1e6 * add[65536].lower, "us", "1.5 measured in the book: latency"),
    Answer("1.7 adding N = 2^30", "3.84", 1e3 * add[2**30].lower, "ms", "4.1 measured in the book"),
])  # fmt: skip
page.end()

# %% [markdown]
# ## Three things to try
# 1. Edit: replace `(cost.matmul(B, 4096, 8192, B200.flops()` by `(cost.matmul(B, 4096, 8192, H200.flops()`. With an
#    H200's FLOPs/s and a B200's memory, what binds 512 rows?
#    Answer: Compute, as before: 512 rows have 431 FLOPs for a byte, and the corner of this mixed roof is at 124, which
#    is 990e12 / 8e12. The product takes 34.7 us in place of 15.3.
# 2. Question: from how many rows on is fp16[B, 4096] x fp16[4096, 8192] compute-bound on a B200, exactly? Evaluate
#    `cost.critical_batch(B200.flops(), B200.hbm_bw, 4096, 8192)`.
#    Answer: 314, more than the ridge of 281, because the rows and the result are read and written as well.
# 3. Flag: run with `--plot roofs.svg`. Which of the points lie on the level part of the roof?
#    Answer: The points of 512 and 4,096 rows, with 431 and 1,638 FLOPs for a byte: the corner of a B200 is at 281.
