"""What the chapters answer where the book gives no number, or a wrong, a rounded or a coarse one, computed by hand.

{chapter: {question: value or word}}. Written out from the formulas with the numbers in place, without the project's own
functions: what a chapter computes by its library must come out the same.
"""

from math import exp, expm1

from pinned_inference import INFERENCE, P70, READ405

V5E_4x4 = 2 * 2**14 * 2**14 / 4  # bytes that each axis of Part 3's Question 6 moves, n = 2^14
P405 = READ405 + 16384 * 128_256
BETWEEN, SAVE = 3600 * 54 * 24 / 419, 14 * P405 / 2e12  # seconds between failures of 16,384 GPUs, and of a save
INTERVAL = (2 * SAVE * BETWEEN) ** 0.5 * (1 + (SAVE / 2 / BETWEEN) ** 0.5 / 3 + SAVE / BETWEEN / 18) - SAVE

PINNED = INFERENCE | {
    "01_roofline": {
        "Intensity of a dot product, N = 2^20 (large N)": (2**21 - 1) / (2**22 + 2),
        "4 a matrix for each row of the batch: intensity, D = F = 8192": 2 * 8192 / (8192 + 2),
        "1e12 FLOPs on a v6e with the 9.2e14 FLOPs/s of Part 2's table": 1e15 / 9.2e14,
        "Critical intensity of v5p's VPU": 8 * 128 * 4 * 1.75e9 / (2.8e12 / 2),
        "FLOPs/B of a matmul by tiles of 128 x 512 and 512 x 256":
            2 * 128 * 256 * 2**20 / (2 * (2**20 * (128 + 256) + 128 * 256)),
        "1.4 int8, B = 100, D = F = 4096: at least": 1e6 * (100 * 4096 + 4096 * 4096 + 100 * 4096) / 8.2e11,
        "1.4 at most": 1e6 * ((100 * 4096 + 4096 * 4096 + 100 * 4096) / 8.2e11 + 200 * 4096**2 / 3.94e14),
        "3 corner of the plot, D = F = 4096": 4096 / (2 * 4096 * 8.2e11 / 1.97e14 - 2 - 2) ,
        "3 corner of the plot, D = F = 1024": 1024 / (2 * 1024 * 8.2e11 / 1.97e14 - 2 - 2),
    },
    "02_networking": {
        "HBM/s over PCIe, v4p ('close to 100x')": 1.2e12 / 1.6e10,
        "ICI of a v5p 'per axis'": 2 * 9e10,
        "5 bytes over bandwidth": 1e6 * 2 * 8 * 128 * 8192 / (2 * 4.5e10),
        "5 the whole transfer": 1e6 * 2 * 8 * 128 * 8192 / (2 * 4.5e10) + 6,
        "6 loading it over 16 PCIe links": 1e3 * 2**34 / 16 / 1.6e10,
        "6 gathering it over TPU{0,0}'s ICI links": 1e3 * 2**30 * 15 / 9e10,
        "6 in all, overlapped: at least": 1e3 * 2**30 * 15 / 9e10,
        "6 in all, one after the other: at most":
            1e3 * (2**30 / 1.6e10 + 2**30 * 15 / 9e10 + (2**34 + 4 * 8 * 2**17) / 8.2e11 + 2**38 / 1.97e14),
        "6 rejected: half of it over DCN between the hosts": 1e3 * 2**33 / 25e9,
        "6 rejected: and all of it over one PCIe link": 1e3 * 2**34 / 1.6e10,
        "6 it fits the HBM of TPU{0,0}": "no",
    },
    "02_tpus": {
        "1 reading 200B params in bf16 from 32 v4p": 1e3 * 2 * 200e9 / 32 / 1.23e12,
        "FLOPs/s of a core of v5p": 4.59e14 / 2,
        "Multiply-adds/s of a TPU's systolic arrays": 4.59e14 / 2,
        "2 FLOPs/s of a v5e pod": 256 * 1.97e14,
        "3 the same over v6e's own PCIe": 9.2e14 / 3.2e10,
        "3 no batch is enough unless D = F/4 is at least": 71_876,  # above 5/4 of 57,500
        "4.1 from HBM: compute-bound from B =": 4096 * 16384 / (2 * 4096 * 16384 * 8.2e11 / 3.94e14 - 4096 - 16384),
    },
    "03_collectives": {
        "10.3 AllToAll over AllGather, one way": 1 / 2,
        "10.4 AllGather both ways over one way": 16 / 31,
        "10.5 AllToAll both ways over one way": 1 / 8 / (31 / 64),
        "The footnote's AllToAll over V/(4W), all of the farthest chunk right": 1 + 2 / 32,
    },
    "03_overlap": {
        "Hidden of the sending, F = 32768": 100,
        "Time over that of AllGather, then multiply, F = 32768": 4 * 32768 / (4 * 32768 + 3 * 4 * 5100),
        "F from which everything is hidden, one way": 4 * 4.59e14 / 9e10,
    },
    "03_plans": {
        "5 its time, computing and then sending": 1e6 * (2 * 8192**3 / 64 / 2.75e14 + 2 * 8192**2 / 3 / 9e10),
        "5 spreading out pays from n = ": 64 * 17,  # above 1034.7 = 2.75e14 / (3 * 9e10) * 64/63
        "6a time of sending, I = J = K = 2^14": 1e6 * 2 * V5E_4x4 * 3 / 4 / 4.5e10,
        "6a time of computing": 1e6 * 2 * 2**42 / 16 / 1.97e14,
        "6a compute-bound from J =": 3 / 4 * 16 * 1.97e14 / 2 / 4.5e10,
        "6b time of sending, I = J = K = 2^14": 1e6 * V5E_4x4 * 3 / 4 / 4.5e10,
        "6b time of computing": 1e6 * 2 * 2**42 / 16 / 1.97e14,
        "6b compute-bound from I =": 3 / 4 * 16 * 1.97e14 / 4 / 4.5e10,
        "6c time of sending, I = J = K = 2^14": 0,
        "6c time of computing": 1e6 * 2 * 2**42 / 16 / 1.97e14,
        "7 FSDP: one weight on a chip, gathered": 2 * 2**13 * 2**15 / 1e6,
        "7 TP: both weights on a chip": 2 * 2 * 2**13 * 2**15 / 4 / 1e6,
        "7 FSDP: sending": 1e3 * 2 * 2 * 2**13 * 2**15 * 3 / 4 / 9e10,
        "7 TP: sending": 1e6 * 2 * 2 * 2**7 * 2**13 * 3 / 4 / 9e10,
        "7 TP: computing": 1e6 * 4 * 2**7 * 2**13 * 2**15 / 4 / 1.97e14,
        "7 TP: reading its weights from HBM": 1e6 * 2 * 2 * 2**13 * 2**15 / 4 / 8.2e11,
        "7 TP: bound by": "HBM",
    },
    "03_sharding": {
        "Pop quiz 2D sharding: loaded from an H100's HBM in": 1e9 * 4 * 64 * 4096 / 3.4e12,
        "The snippet's product, out_shardings P('X', 'Y'): local": "[2, 4096]",
    },
    "03_timings": {
        "Pop quiz 2: AllGather_Y([E_Y, F]), were it a ring": 1e6 * 2 * 2048 * 8192 / 9e10,
        "2.2 one axis after the other": 1e6 * (2 * 1024 * 4096 / 4 + 2 * 1024 * 4096) / 9e10,
        "2 fun fact: 2.1 over X and the idle Z": 1e6 * 2 * 1024 * 4096 / 4 / 2 / 9e10,
        "AllToAll over 16x16 over that over 16, if large": 1 / 16,
        "A hop of a ReduceScatter, over (V/Y) / W_ici": 9e10 / 4.5e10,
        "An AllGather one way over V / W_ici": 15 / 16 * 2,
    },
    "04_flash_attention": {
        "Flash attention is compute-bound from T = S =": 481,  # n/2 above 1.97e14 / 8.2e11 = 240.2
        "Scores in HBM: FLOPs a byte at most": 4 * 128 / 8 / (1 + 128 / 1e9),
        "... so at 8k it waits for HBM so many times as long": 1.97e14 / 8.2e11 / (64 * 8192 / (8192 + 128)),
    },
    "04_problems": {
        "Block remat: FLOPs, where none is 6": 6 + 2 * 33 / 35,  # all of a forward but the unembedding
        "Full activations by what autograd holds, F = 4D": 4e6 * 64 * (24 * 8192 + 64) * 2 / 1e12,
        "Big matmuls only, F = 4D": 4e6 * 64 * 13 * 8192 * 2 / 1e12,
        "6 FLOPs to rematerialize over BT^2NH": 4,
        "1 params": 64 * (3 * 4096 * 16384 + 4 * 4096**2 + 2 * 4096) + 2 * 4096 * 32000 + 4096,
        "4 decoding: intensity for S = 2^20, G = 8 (-> G)": 8 * 2**20 / (2**20 + 8),
        "4 prefill is compute-bound from S =": 481,  # above 2 x 240.24
        "4 prefill with G = 8 is compute-bound from S =": 271,  # above 9/8 x 240.24
        "4 prefill: attention takes as long as the MLP at T =": 3 * 8192 * 28672 // 8192 - 1,
        "4 decoding 240: attention takes as long as the MLP at T =": 6 * 8192 * 28672 // (240 * 4 * 1024) + 1,
    },
    "04_transformers": {
        "Gemma 2 27B as it is: attention as much as the rest at":
            ((3 * 4608 * 36864 + 2 * 4608 * 48 * 128) / (2 * 32 * 128)),
        "FLOPs of the vocabulary over BTDV": 6,
        "Takeaways: the MLP dominates the FLOPs up to T over D": 6,
    },
    "05_context": {
        "v5p, one way along one axis, G = 16: from T/C =": 2 * 4.59e14 / 9e10 / 16,
        "H100 within a node, G = 16: from T/C =": 2 * 990e12 / 450e9 / 16,
    },
    "05_latent_attention": {
        "DeepSeek-V3: latents gathered over Y, for D of heads": (1536 + 576) / 7168,
        "... bytes over Y of a layer's attention, forward and backward, for those of heads": (2112 + 7168) / 2 / 7168,
        "Params of its attention, one layer": (
            7168 * 2112 + 1536 * 128 * 192 + 512 * 128 * 256 + 128 * 128 * 7168
        ) / 1e6,
        "... with a key and a value for each of 128 heads": 4 * 7168 * 128 * 128 / 1e6,
        "Bytes of a token in the cache, bf16, all layers": 2 * 61 * 576,
        "... with keys and values": 2 * 128 * 128 / 576,
    },
    "05_moe": {"DeepSeek-V3's experts over 64 H100: F >": 990e12 / 400e9 * (64 - 8) / 8},
    "05_muon": {
        "FLOPs of Newton-Schulz of W_in[8192, 28672]": 5 * (4 * 8192**2 * 28672 + 2 * 8192**3) / 1e12,
        "... gathered, over those of a step's W_in with 1M tokens on 64 chips":
            (5 * (4 * 8192**2 * 28672 + 2 * 8192**3) * 64 / (6 * 2**20 * 8192 * 28672)),
        "Owners are the cheapest from so many matrices on 64 ranks": 9,
    },
    "05_pods": {"the same in the Takeaways": 4.59e14 / 6.25e9, "two pods: batch per chip": 1e6 / 8960},
    "05_when_bound": {
        "Gemma 7B as it is, two up-projections of F = 24,576": 1.5 * 24576 / 2550,
        "X_opt, N = 64, B = 48,000, F = 32768": (2 * 48e3 * 64 / 32768) ** 0.5,
        "TP only on 4x4x4 (figure): constant ratio": 3 * 30_000 / (64 * 2550),
        "the plotted 512 x 8 crosses the matmuls at (text: 4e5)": 4096 * 2550 / (8 * 2),
        "256 x 16 with M_Y = 1 is compute-bound from": "inf",  # Y alpha / F = 1.25
        "FSDP alone needs so many times as many": 850 * 2 * 32768 / 2550**2,
        "256 x 16, 'the minimum', has the best X at batch": 256**2 * 32768 / (2 * 4096),
        "recipe of a pod: 1M tokens, X = 1024, Y = 8 is bound by": "X",  # 1024 x 2550 / (2 x 1e6) = 1.31
        "recipe of a pod: FSDP's gathers over the matmuls": 1024 * 2550 / (2 * 1e6),
        "recipe with 512 x 16: the longer of both over the matmuls": 16 * 2550 / 30_000,
        "recipe at the best X of 8,192 chips": (2 * 1e6 * 8192 / 30_000) ** 0.5,
        "recipe at the best X: the longer of both over the matmuls": (2550**2 / (2 * 30_000) * 8192 / 1e6) ** 0.5,
        "Table, FSDP+TP: backward bytes over Y / (BD/X)": 4,
        "3.2 memory in all": 2 * 40 * 3e6 * (5120 + 2 * 13824) + 130e9,
        "3.2 memory per chip": (2 * 40 * 3e6 * (5120 + 2 * 13824) + 130e9) / 4096,
        "4 (2025 edition) 1M tokens are compute-bound by": "FSDP+TP",  # 2550^2 / (2 x 13824) = 235 < 244 < 850
        "4 (2025 edition) 10M tokens are compute-bound by": "FSDP",
    },
    "06_applied_training": {
        "LLaMA-3 70B": P70,
        "days on 225 chips": 6 * 70e9 * 15e12 / (225 * 4.59e14 * 0.4) / 86400,
        "1752 days in years ('nearly four')": 6 * 70e9 * 15e12 / (225 * 4.59e14 * 0.4) / 86400 / 365,
        "the planner: FSDP alone on a pod is bound by": "fsdp",
        "the planner: the book's DP 1024 x SP 2 x TP 4": "compute",
        "the planner: its own mesh of 8,960": "compute",
        "hours between failures, 54 x 24 / 419": 54 * 24 / 419,
        "seconds of a save": SAVE,
        "minutes between saves, by Daly": INTERVAL / 60,
        "goodput": INTERVAL / (BETWEEN * exp(600 / BETWEEN) * expm1((INTERVAL + SAVE) / BETWEEN)),
        "spare hosts": 15,  # of a Poisson distribution of mean 24 x 419 / (54 x 24) = 7.76
        "memory of a chip with 12 checkpoints a layer": (10 * 70e9 + 2 * 8192 * 4e6 * 12 * 80) / 8960,
        "2048 x 4: chips": 8192,
        "1 four pods: tokens a chip": 2**22 / (4 * 8960),
        "1 four pods are compute-bound by": "FSDP+TP",  # 113.4 < 117.03 < 850
        "1 four pods: TP at the best X": 8960 / (2 * 2**20 * 8960 / 28672) ** 0.5,
        "1 four pods, at the best X: collectives over matmuls": (2550**2 / (2 * 28672) / (2**22 / (4 * 8960))) ** 0.5,
        "1 four pods of 1120 x 8: collectives over matmuls": 2550 * 1120 / (2 * 2**20),
        "1 four pods: days at 40% MFU": 6 * 70e9 * 15e12 / (4 * 8960 * 4.59e14 * 0.4) / 86400,
        "2a LLaMA-3 405B": P405,
        "2a 405B: FLOPs of a token": 6 * P405,
        "2a 405B: FLOPs of a step of 16M tokens": 6 * P405 * 2**24,
        "2a 405B: FLOPs of 15T tokens": 6 * P405 * 15e12,
        "2b eight pods, 16M tokens: tokens a chip": 2**24 / (8 * 8960),
        "2b 405B: tokens a chip that FSDP+TP needs": 2550**2 / (2 * 53248),
        "2b eight pods are compute-bound by": "FSDP+TP",  # 61 < 234 < 850
        "2b eight pods: TP at the best X": 8960 / (2 * 2**21 * 8960 / 53248) ** 0.5,
        "2b eight pods of 1120 x 8: collectives over matmuls": 2550 * 1120 / (2 * 2**21),
        "2b eight pods: days at 40% MFU": 6 * P405 * 15e12 / (8 * 8960 * 4.59e14 * 0.4) / 86400,
    },
}  # fmt: skip
