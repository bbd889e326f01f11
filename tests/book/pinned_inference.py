"""What the chapters of Parts 7 to 12 answer where the book gives no number: see pinned.py."""

P70 = 80 * (8192 * (3 * 28672 + 2 * 72 * 128) + 2 * 8192) + 8192 + 2 * 8192 * 128_256  # LLaMA-3 70B
READ70 = P70 - 8192 * 128_256  # a step does not read the embedding
READ405 = 126 * (16384 * (3 * 53248 + 2 * 136 * 128) + 2 * 16384) + 16384 + 16384 * 128_256
CACHE70 = 8192 * 163_840  # bytes of a cache of 8k tokens
GEMMA3 = 62 * (5376 * (3 * 21504 + 2 * 48 * 128) + 4 * 5376 + 256) + 5376 + 5376 * 262_208  # Gemma 3 27B
TOKEN70 = 2 * READ70 / 1.97e14  # seconds of a token's FLOPs on a v5e
FULL = 16e9 / 8.2e11 * 512  # seconds of 512 steps that read all of a v5e's HBM
EXPERTS = 16 * 64 * 3 * 4096 * 16384  # of the toy model of Part 7
TOY = 64 * 4096 * (3 * 16384 + 512 * 40 + 2) + 4096 * 32129
MOE = EXPERTS + 64 * 4096 * (16 + 512 * 40 + 2) + 4096 * 32129
MM = 2 * 512 * 2048 * 8192 / 4 / 1.97e14  # seconds of Part 10's product, of a device's part, on a v5e
HOP = 2 * 512 * 2048 / 4 / 4.5e10  # and of a hop of a quarter of its operand, one way


def decode_of_138(size: float, chips: int) -> float:
    """Return the seconds of a step of 138 sequences of 8k tokens, with params and caches of `size` bytes a number."""
    read = 138 * CACHE70 * size / (chips * 8.2e11)
    return read + max(READ70 * size / (chips * 8.2e11), 138 * TOKEN70 / chips)


def read_for_a_token(params: float, cache: float, batch: int) -> float:
    """Return the bytes that H200s could read in a token's time: its cache, and fp8 weights or 2 FLOPs a param."""
    return cache + params * max(1 / batch, 2 * 4.8e12 / 2e15)


INFERENCE = {
    "07_bottlenecks": {
        "B_crit of an H100": 9.9e14 / 3.35e12,
        "v5e in bf16, D = 8192, F = 28672, activations counted":
            8192 * 28672 / (8192 * 28672 * 8.2e11 / 1.97e14 - 8192 - 28672),
        "PaLM: throughput flattens around batch": 2.75e14 / 1.2e12,
        "PaLM: least latency in bf16 over int8": (1080e9 + 2048 * 120_832) / (540e9 + 2048 * 120_832),
        "MHA, 13B: a layer's MLP params over a cache of 8192 tokens": 3 * 5120 * 13824 / (2 * 8192 * 5120),
        "Training, float32 optimizer state ('around 100GB')": 10 * 13_015_864_320 / 1e9,
        "A cache of the table, '6.7 GiB'": 6.7e9 / 2**30,
        "The largest batch that fits": 15,  # (128 - 26) / 6.7 = 15.2
        "All of them: times smaller ('over an order of magnitude')": 5 * 40 / (7 + 33 / 32) * 2,
        "5.4 FLOPs of a token": 2 * (64 * 4096 * (6 * 16384 + 16 + 512 * 40 + 2) + 4096 * 32129),
        "5 experts that a step of 8 tokens reads, of 16": 16 * (1 - (14 / 16) ** 8),
        "6.1 loading the weights on 8x16, split over all": 1e3 * MOE / (128 * 8.2e11),
        "6.1 ... experts over YZ, the rest over Y alone": 1e3 * (EXPERTS / 128 + (MOE - EXPERTS) / 8) / 8.2e11,
        "6.1 free HBM a chip, split over all": 16 - MOE / 128e9,
        "6.1 ... experts over YZ: free HBM": 16 - (EXPERTS / 128 + (MOE - EXPERTS) / 8) / 1e9,
        "6.2 smallest slice": "4x4",
        "App. A: params": 2 * 2**28,
        "App. A: least latency": 1e6 * 2**30 / 4 / 8.2e11,
        "App. C: latency-bound below so many W_ICI x 1e-6 ('total bytes')": 8 * 45 / 90,
        "App. C: 16 tokens, D = 8192, int8: latency-bound from Y > BD/45,000 =": 16 * 8192 / 45e3,
        "App. C: 8 ways on a line, as 8 of a v5e without wraparound": 7 * 45 / (7 / 8),
    },
    "07_cache_costs": {
        "LLaMA-2 7B: kB a token": 4 * 32 * 4096 / 1e3,
        "DeepSeek-V3: kB a token": 2 * 61 * 576 / 1e3,
        "Gemma 3: kB of a token beyond its windows": 4 * 10 * 2048 / 1e3,
        "GPT-OSS: times the bytes at 128k over 8k": (131_072 + 128) / (8192 + 128),
        "Qwen3-Next: a layer's state in tokens of keys and values": 1024 + 24,
        "LLaMA-3 70B at 128k: sequences on 8 H200": 21,  # (0.9 x 1128 - 70.55) / 42.95 = 21.99
        "... with 64 KV heads": 2,  # (1015.2 - 79.95) / 343.6 = 2.7
        "Price of a token at 128k over 8k: LLaMA-3 70B":
            read_for_a_token(READ70, 32 * CACHE70, 21) / read_for_a_token(READ70, 2 * CACHE70, 351),
        "Price of a token at 128k over 8k: Gemma 3":  # 88 and 891 sequences
            read_for_a_token(GEMMA3, 81_920 * 131_072 + 425_984 * 1024, 88)
            / read_for_a_token(GEMMA3, 81_920 * 8192 + 425_984 * 1024, 891),
    },
    "07_attention_by_data": {
        "Bytes of a token's latent cache, all layers, bf16": 2 * 61 * (512 + 64),
        "Copies of it with heads over 64": 64,
        "Attention by data is faster at context 1024 from a batch of": 256,
        "... at context 4096": 64,
        "Rows that an expert gets of 4,096 tokens, on average": 4096 * 8 / 256,
    },
    "07_latent_decode": {
        "DeepSeek-V3: FLOPs of a query, cached token and head, absorbed": 2 * (2 * 512 + 64),
        "... plain, without making keys and values": 2 * (192 + 128),
        "Queries of a sequence from which the plain form has fewer": 512 * 256 // (1024 - 256) + 1,
        "FLOPs per byte of the cache, bf16": 128 * (2 * 512 + 64) / 576,
        "... with keys and values for each head": 1,
        "An H800's ridge, FLOPs per byte": 990e12 / 3.4e12,
        "Copies of the cache on Y=8": 8,
        "64 requests, S over Z=4, heads over Y=8: Q's AllGather": 2 * 64 * 128 * 576 / 8 / 1e6,
        "... over that of queries of a key's width": 576 / 192,
    },
    "07_engine": {
        "Host DRAM of 8 v5e for prefixes: caches of 8k tokens": 360,  # 450 x 2^30 / (8192 x 163,840)
    },
    "07_sharded_decode": {
        "4.1 axes of a 4x4 that are rings": 0,
        "4.2 model parallelism is bound by ICI from Y =": 16384 * 2 * 4.5e10 / 1.97e14,
        "4.3 ways over the batch: KV[2, B_Z, S, K_Y, H]": 2,
        "4 a step of 1, context 8k": 1e3 * (8192 * 262_144 + TOY) / (16 * 8.2e11),
        "4 a step of 32, context 8k": 1e3 * (32 * 8192 * 262_144 + TOY) / (16 * 8.2e11),
        "4 a step of 7, context 128e3": 1e3 * (7 * 128e3 * 262_144 + TOY) / (16 * 8.2e11),
        "4 collectives of a step of 32, if nothing hides them":
            1e3 * (129 * 2 * 6e-6 + 128e-6 + 2 * 32 * 32128 * 15 / 16 / 9e10),
        "FSDP: gathering all weights on a 4x4 over reading a 16th": 16 * 8.2e11 / 9e10,
        "beta = W_hbm / W_ici of v5e ('around 8')": 8.2e11 / 9e10,
        "beta of v6e": 1.6e12 / 1.8e11,
        "F = 16384, B = 32: up to Y =": 16384 / 32 * 9e10 / 8.2e11,
        "Prefill: F = 16384 on one axis up to Y =": 16384 * 9e10 / 1.97e14,
        "B = 32, F = 16384 on a line, without wraparound": 16384 / 32 * 4.5e10 / 8.2e11,
        "7 with a gate, F = 4D: the first N": 145,  # above 64 x 4 x (3/4)^2 = 144
    },
    "07_decode_listing": {
        "... and with two KV heads a rank": "no",
        "LLaMA-3 70B, prefill on v5e: TP is compute-bound up to Y =": 1.5 * 28672 * 9e10 / 1.97e14,
        "... and then split along the sequence up to Z =":
            (2 * 8192 * 72 * 128 + 3 * 8192 * 28672) * 9e10 / (2 * 8 * 128 * 1.97e14),
        "Keys and values over activations, bytes": 2 * 8 * 128 / 8192,
    },
    "07_speculative": {
        "XSum, 70B with a 4B draft: 3 are best from a =": 0.438,  # a^3 / (1 + a + a^2) > 4 / 78
        "... and more than 4 from a =": 0.653,  # a^5 / (1 + a + a^2 + a^3 + a^4) > 4 / 86
        "... at a = 0.8, as code may have, k =": 7,  # 0.8^7 / 3.951 > 4/94, 0.8^8 / 4.161 < 4/98
        "8B for 70B, batch 1, 2k, a = 0.7: best k": 4,
        "... its gain": (1 - 0.7**5) / 0.3 * (READ70 + 2048 * 163_840) / (
            READ70 + 2048 * 163_840 + 4 * (8_030_261_248 - 128_256 * 4096 + 2048 * 65_536)
        ),
        "240 sequences of 2k, a = 0.7: best k": 0,
    },
    "08_applied_inference": {
        "FLOPs / $ of a v5e": 1.97e14 * 3600 / 1.2,
        "240 of them beside the weights: v5e": (P70 + 240 * 32768 * 163_840) / 16e9,
        "32 caches of 8192 tokens": 32 * CACHE70,
        "with the weights": (P70 + 32 * CACHE70) / 1e9,
        "4x2: tokens/s": 32 * 8 * 8.2e11 / (READ70 + 32 * CACHE70),
        "4x2: tokens/s a chip": 32 * 8.2e11 / (READ70 + 32 * CACHE70),
        "... on two axes without wraparound, as 4x2 and 4x4 are": 28672 * 2 * 4.5e10 / 1.97e14,
        "bf16: KV a token": 2 * 163.84,
        "bf16: chips at least": 2 * P70 / 16e9,
        "bf16: HBM left": 256 - 2 * P70 / 1e9,
        "bf16: queries/s a chip on twice the chips": 138 / (512 * decode_of_138(2, 32) * 32),
        "int8: KV a token": 163.84,
        "int8: chips at least": P70 / 16e9,
        "int8: queries/s a chip": 42 / (FULL * 8),
        "int8: queries/s a chip on twice the chips": 138 / (512 * decode_of_138(1, 16) * 16),
        "int4: chips at least": P70 / 2 / 16e9,
        "int4: queries/s a chip": 42 / (FULL * 4),
        "int4: queries/s a chip on twice the chips": 138 / (512 * decode_of_138(0.5, 8) * 8),
        "512 of them": 512 * 16e9 / 8.2e11,
        "Queries/s of the slice: 4.42": 42 / FULL,
        "bf16 on 4x8: HBM left for caches": 512 - 2 * P70 / 1e9,
        "bf16 on 4x8: queries/s of the slice": 138 / FULL,
        "B = 64: bound by HBM up to Y =": 28672 / (64 * 8.2e11 / 9e10),
        "T_math of a matmul": 1e6 * 2 * 64 * 8192 * 28672 / (32 * 1.97e14),
        "All collectives of a step on 4x8, no wraparound": 1e3 * 2 * 64 * 31 / 32 / 9e10 * (322 * 8192 + 128_256),
        "HBM time of that step's weights": 1e3 * 2 * READ70 / (32 * 8.2e11),
        "... with causal attention, the unembedding once": (
            2 * 8192 * 80 * (3 * 8192 * 28672 + 2 * 8192 * 72 * 128) + 2 * 80 * 8192 * 8193 * 8192 + 2 * 8192 * 128_256
        ) / (16 * 1.97e14 * 0.4),
        "... with the 42 caches that fit": 42 * 2 * P70 * 8192 / (16 * 1.97e14 * 0.4) / FULL,
        "Latency at batch 1, 8k": 1e3 * (READ70 + CACHE70) / (16 * 8.2e11),
        "Latency at the largest batch, 8k": 1e3 * 138 * (CACHE70 / 8.2e11 + TOKEN70) / 16,
        "Throughput plateaus at 2k context at ('around')": 1e-3 / (2048 * 163_840 / 8.2e11 + TOKEN70),
        "Doubling the latency lowers the cost by":
            (READ70 + 1024 * 163_840) / 8.2e11 / (1024 * 163_840 / 8.2e11 + TOKEN70),
        "Reading caches takes longer than FLOPs beyond": TOKEN70 * 8.2e11 / 163_840,
        "Its code's flops_time over 2 params B / C, in bf16": 2,
        "Its code at 8k: the largest batch": 138,  # (256e9 - 70.55e9) / 1.342e9 = 138.2
        "1 FLOPs a token of 405B": 2 * READ405 / 1e9,
        "1 least time of a token on N chips, by FLOPs": 1e3 * 2 * READ405 / 1.97e14,
        "1 least time of a step on N chips, by HBM, in int8": 1e3 * READ405 / 8.2e11,
        "2 8B in int8: params": 8.030261248,
        "2 240 caches of 8k": 240 * 8192 * 65_536 / 1e9,
        "2 peak activations: the MLP's, bf16": 240 * 14_336 * 2 / 1e6,
        "2 ... and the logits in float32": 240 * 128_256 * 4 / 1e6,
        "2 smallest slice at 8k": "4x4",  # 8.6 chips
        "2 smallest slice at 4k": "2x4",  # 4.5
        "2 smallest slice at 2k": "2x2",  # 2.5
        "3 smallest slice that holds 405B": 32,  # 25.4
        "3 best form within 15 ms, on 8x8": "heads_batch",
        "3 its batch": 56,
        "3 its tokens/s a chip": 56 / 64 / (
            56 * 8192 * 2 * 126 * 1024 / (64 * 8.2e11)
            + 2 * 56 * 63 / 64 * (506 * 16384 + 128_256) / 9e10 + 252 * 7e-6  # AllReduces; AllToAlls of 7 hops
        ),
        "3 if nothing were sent: the batch in 15 ms": 143,
        "3 least step on the pod, by HBM": 1e3 * READ405 / (256 * 8.2e11),
        "3 least step of all, with collectives": 1e3 * (  # 253 AllReduces of 2 x 15 hops on 8x16; 16 copies of caches
            506 * 15e-6 + 15e-6 + 16 * 8192 * 2 * 126 * 1024 / (128 * 8.2e11)
        ),
    },
    "09_profiling": {
        "FLOPs of the program: 2 x 128 x 256 x 16": 2 * 128 * 256 * 16 / 1e6,
        "bf16[32,32,8192] in T(8,128)(2,1)": 1,
        "bf16[4096] in T(1024)(128)(2,1): place of element 1": 2 * 2,
        "and as the book measured: share of the roofline": 2 * 32 * 1024 * 8192 * 32768 / (23e12 * 8) / 96e-3,
        "and as measured: share of the roofline": 2**27 / 1.2e11 / 1.13e-3,
        "Exercise: W_Q[8192, 32, 256], heads over Y": 2e3 * 32 * 1024 * 8192 * 8192 / (23e12 * 8),
        "Exercise: scores and their sum, if no mask is used": 4e3 * 32 * 1024 * 1024 * 8192 / (23e12 * 8),
    },
    "09_quiz": {
        "1 groups of eight": 16,
        "1 FLOPs per byte of the fusion": 4096 * 8192 / (4096 + 8192 + 4096 * 8192),
        "2 share of attention, with as many KV heads as heads":
            (8 * 8192 + 4 * 1024) / (4 * 32768 + 8 * 8192 + 4 * 1024),
        "2 a layer at the roofline, by the example's sizes":
            (32 * 1024 * 8192 * (4 * 32768 + 8 * 8192 + 4 * 1024) / (23e12 * 8) * 1e3),
    },
    "10_collective_matmul": {
        "Q4: one way over both ways, bytes of a link, 5 devices": 4 / 2,
        "Q4: one way over both ways, bytes of a link, 8 devices": 7 / 4,
        "The example's product on a device, v5e, bf16": 1e6 * 2 * 512 * 2048 * 2048 / 1.97e14,
        "Hidden over in sequence, AllGather, v5e": (MM / 4 + 2 * HOP) / (MM + 1.5 * HOP),
        "Q3.1: hidden over in sequence, AllReduce, v5e": (MM / 4 + 16 * HOP) / (MM + 12 * HOP),
        "Q3.1: Out[B_X, F] is, over Y": "replicated",
        "Q3.3: the block, in sequence over hidden, one way, v5e": (MM + 1.5 * HOP) / (MM / 4 + 3 * HOP),
        "Q4: the block, in sequence over hidden, both ways, v5e": (MM + 1.5 * HOP) / (MM / 4 + 2 * HOP),
        "Q4: the block, one way over both ways": (MM / 4 + 3 * HOP) / (MM / 4 + 2 * HOP),
    },
    "10_problems": {
        "1.2: the book's code, roll(x, 5), is what its question asks": "no",
        "1.2: element [1, 0], shift 5": 984,
        "1.2: the last element": -40,
        "2.1: FLOPs, masked over grouped, k = 2": 8 / 2,
    },
    "12_gpu_networks": {
        "3.1 32 ports of a leaf switch, '32 * 400 / 8'": 32 * 400 / 8 / 1000,
        "'T_AR or RS', the general rule: an AllReduce over a ReduceScatter": 2,
        "App. B: 'min(K / Z)' of K = 8 experts on Z = 4 devices": 1,
        "AllToAll over 2 nodes against 1: more than": (1 / 4 / 400) / (7 / 64 / 450),
        "Collective bandwidth of a node: bisection x 2/N": 2 * 3600 / 8,
    },
    "12_eight_bits": {"H100, FP8 products, MXFP8 gathers: forward, over bf16's": 2e15 / 9.9e14 * 33 / 64},
    "12_gpu_rooflines": {
        "PP: the hops' time over 2BD/W": 3 / 2 - 1 / 64,
        "EP over many nodes, Z >> k: F above alpha times": 8 - 8 * 8 / 2**13,
        "DeepSeek-V3's own batch ('they used 4M')": 15_360 * 4096,
        "DP over the 16 GPUs of 2 nodes": 7 / 8 * 990e12 / 450e9,
        "DP on an H100 or B200 ('about 2500')": 2250e12 / 400e9,
        "DeepSeek-V3: DP is compute-bound from": 256 / 8 * (990e12 / 400e9) / 128 / 2,
        "LLaMA-3: DP is compute-bound from": 990e12 / 400e9 / 16,
        "5.1 GB200: DP beyond, at a B200's 2250e12 FLOPs/s": 2250e12 / 3.6e12,
        "5.2.3 most TP in a node": 28672 * 450e9 / 990e12,
        "5.2.3 ZeRO-3's threshold over DP's": 1,
        "5.3 16B: compute-bound from": 990e12 / 400e9,
        "5.3 70B: compute-bound from ('roughly 1k')": 990e12 / 400e9 / 2,
        "5.3 a better layout of 314B: nodes a replica": 4,  # of two, 4 x 314/16 = 78.5 GB a GPU without activations
        "5.3 a better layout of 70B: TP over two nodes, up to": 8 + 28672 / (990e12 / 400e9),
        "5.3 a better layout of 16B: bytes a GPU with ZeRO-3 alone": 12 * 16 / 192,
    },
    "12_gpus": {
        "HBM bandwidth of a B200, in the text": 8e12,
        "Comparison: SMEM of an H100": 132 * 256e3 / 1e6,
        "Comparison: vector registers of a v5p": 2 * 64 * 8 * 128 * 4 / 1024,
        "1.5 VMEM of a TPU": 128,
        "1.5 SMEM and registers of an H100": (132 * 256e3 + 132 * 4 * 16384 * 4) / 1e6,
        "1.7 adding N = 1024": 1e9 * 12 * 1024 / 3.35e12,
    },
}  # fmt: skip
