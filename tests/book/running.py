"""Chapters run in this process, as scripts with a small size on a terminal of 80 columns, cell by cell if need be; and
what comes of what they propose to try."""

import functools
import re
from pathlib import Path

import pytest

from scaling.book.recap import ScriptRun, run_script

CHAPTERS = Path(__file__).parents[2] / "chapters"
ALL = sorted(path.stem for path in CHAPTERS.glob("*.py"))
ON_A_PAGE = [name for name in ALL if name != "11_recap"]  # the recap runs the others

TRAIN = {  # those that train, and how the tests run them; the site has all on their own meshes
    **dict.fromkeys(("05_dp", "05_fsdp"), "--steps 2 --mesh X=2"),
    "05_tp": "--steps 2 --mesh Y=2",
    "05_pods": "--steps 2 --mesh P=2,X=2",
    "05_pp": "--steps 2",
    "05_fsdp_tp": "--steps 2 --mesh X=2,Y=2",
    "06_train_llama": "--steps 3 --mesh X=2,C=2",
    "12_eight_bits": "--steps 2",
}


def source(name: str) -> str:
    return (CHAPTERS / f"{name}.py").read_text(encoding="utf-8")


def run(name: str, *options: str, code: str | None = None) -> ScriptRun:
    """The chapter, or an edited text of it, with these options and `--small`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "80")
        return run_script(CHAPTERS / f"{name}.py", [*TRAIN.get(name, "").split(), *options], code)


@functools.cache
def chapter(name: str) -> ScriptRun:
    """The chapter as run once for all tests."""
    return run(name)


def cells(name: str) -> list[tuple[str, str, str]]:
    """The chapter's cells in order: ("markdown" or "code", what stands beside its mark, text)."""
    before, *found = re.split(r"^# %%(.*)\n", source(name), flags=re.M)
    assert before == "", f"{name} begins with something that is in no cell"
    kinds = ["markdown" if "[markdown]" in mark else "code" for mark in found[::2]]
    return list(zip(kinds, found[::2], found[1::2], strict=True))


def things_to_try(name: str) -> dict[str, str]:
    """The last cell's three: {"old": ..., "new": ..., "expression": ..., "flag": ...}."""
    cell = re.sub(r"\n# ?", "\n", source(name).split("# %% [markdown]")[-1])
    found = re.fullmatch(
        r" ## Three things to try 1\. Edit: replace `(?P<old>.+?)` by `(?P<new>.+?)`.*"
        r" 2\. Question: .*?Evaluate `(?P<expression>.+?)`.* 3\. Flag: run with `(?P<flag>.+?)`.*",
        re.sub(r"\s+", " ", cell),
    )
    assert found, f"{name} does not end with three things to try"
    return found.groupdict()


def tried_in(name: str) -> str:
    """The text that the proposed edit is made in: without the cells that train, one layer is left."""
    text = source(name).rpartition("# %% [markdown]")[0]
    found = re.search(r"^# %% \[markdown\]\n# ## (Four layers, and training|Training, by)", text, flags=re.M)
    return text[: found.start()] + text[text.index("page.end()") :] if found else text


# What a reader sees who tries what a chapter proposes: words after the edit, the question's value, words with the flag;
# several of them with dots in between.
TRIED = {
    "01_roofline": ("compute-bound 120 60.06 tokens -49.9% DIFFERS", 20_445, "wrote roofline-question-3.svg"),
    "02_tpus": (
        "259 of 128 MiB ... 512 2 compute 1,395.3 2,101.2 1,579.5", 128 + 15 * 128 + 64 + 2 * 127, "wrote q4.svg"),
    "02_networking": (
        "5 bytes over bandwidth 188 93.21 us -50.4% DIFFERS", 16, "v5e 16 ring 8 4.00 1.8e11 8.0 8.0 8.0"),
    "05_context": ("1e+00 1e+00 NO ... 2 FAILED: the ring above", 2 * 4.59e14 / 9e10, "B=2 T=32 N=4"),
    "05_dp": ("dW_in 5.0e-01 1e-12 NO", 2550, "forward pass as it ran on rank 0: B=16"),
    "05_fsdp": ("dW_out 5.0e-01 1e-12 NO", 4706, "B=16 D=16 F=32"),
    "05_tp": ("dIn 1.0e+00 1e-12 NO", 22.49, "B=32 D=32 F=64"),
    "05_fsdp_tp": ("Out 5.0e-01 1e-12 NO", 113.4, "B=32 D=32 F=64"),
    "05_pods": ("FAILED: both orders give the same", 4 * 73_440, "4 times as many bytes cross P"),
    "05_pp": ("weights after the step ... NO", 285, "zb-h1: loss"),
    "05_transformer": ("W_out 1.0e-01 1e-11 NO ... 9 FAILED: x, ", "W_K[L, D_X, K, H]",
        "Forward on X=1, Y=4 ... Z=1, Y=4"),
    "05_muon": ("1e-12 NO ... 1 FAILED: on_shards", 5 * (4 * 4096**2 * 14336 + 2 * 4096**3), "on X=2"),
    "05_latent_attention": ("1e-11 NO dW_DKV ... 1 FAILED: dW_DQ", 7168 - 576, "on X=1, Y=4"),
    "05_moe": ("1e-11 NO W_in ... FAILED: router", 990e12 / 3.4e12 * 32, "forward on 2 ranks"),
    "03_sharding": ("AllToAll_Y(A[B_Y, D_X]) ... A[B_Y, D_X] P('Y', 'X') [8, 256] [4, 64]", 4 * 256 * 2048,
        "A[B_X, D_Y] P('X', 'Y') [8, 256] [4, 64] ... AllGather_Y(A[B_X, D_Y])"),
    "03_products": ("1. A[I_X, J] = AllGather_Y(A[I_X, J_Y]) 2. B[J, K_Y] = AllGather_X(B[J_X, K_Y])",
        ("AllGather_X A, then AllToAll_X C", "AllGather_X B"), "A[I_XY, J] -> A[I_X, J] AllGather_Y A 0 yes"),
    "03_plans": ("6. Out[B_X, D] = AllReduce_Y(Out[B_X, D] {U_Y}) ... 8BD/X + 12DF/Y 419,430,400 402,653,184 NO", 7.89,
        "dW_out"),
    "03_collectives": ("the mean dA[I_X, J] -> NO", 3 / 25, "The primitives on X=2 ... ring AllGather, both ways"),
    "03_timings": ("by time, X and Y 46.6 1. A[B, D] = AllGather_YX(A[B_YX, D])", 61.2, "wrote times-bandwidth.svg"),
    "03_overlap": ("3 FAILED: collective matmul: Out, collective matmul: dA, collective matmul: dW", 0.4016,
        "A[4, 16] W[16, 8] over 2 devices"),
    "04_transformers": (
        "Q[B,T,K,G,H] K[B,S,K,H] 6BTSNH 10,080 5,040 NO", 8_030_261_248 - 2 * 4096 * 128256, "wrote share.svg"),
    "04_flash_attention": ("dQ 9.4e-01 1e-12 NO", 2 * 8 * 96 / 64, "96 2.7564 10.7723 -0.3542 ... 96 18,432"),
    "04_problems": ("block ... 7.97 1.00 1.00 yes", 120.12 * 4, "wrote attention.svg"),
    "05_when_bound": ("recipe of a pod: 1M tokens, X = 1024, compute compute DIFFERS", 2550**2 / (2 * 53248),
        "wrote bound-ratio.svg ... wrote bound-time.svg"),
    "06_applied_training": (
        "fewest chips that hold them 225 61.91 v5p -72.5% DIFFERS", 2550**2 / (2 * 14336), "wrote ways.svg"),
    "06_train_llama": ("1 FAILED: the loss of every step is one device's", "g[L, D]", "X=2, C=1, Y=2, Z=2"),
    "06_posttraining": ("2 FAILED: the reward rises, both sides", 17.64, "wrote reward.svg"),
    "07_kv_cache": ("1 FAILED: tokens taken back", 103_809_024 / 6_291_456, "wrote cache.svg"),
    "07_bottlenecks": ("Quiz: a step of 4 2.5 1.393 ms -44.3% DIFFERS ... Quiz: a step of 256 21 20.86 ms -0.7% agrees",
        0.5 * 1.84e15 / (2 * 1.6e12), "wrote inference-intensity.svg ... wrote inference-llama2-13b.svg"),
    "07_sharded_decode": ("FAILED: two AllToAlls and an AllReduce", 53248 / 2 / 8 * 9e10 / 8.2e11,
        "heads_batch AllReduce"),
    "07_cache_costs": ("windowed layers, places 0 to 16 ... yes NO ... 1 FAILED: windowed layers, places 0 to 16",
        4 * 32 * 4096 * 2**20 / (24576 * 2**20 + 36 * (2**21 + 3 * 2**14)), "wrote bytes.svg"),
    "07_attention_by_data": ("1,024 64 7.3 7.4 8.4 11.0 14.8", 16384 * 8 / 256, "on E=1, Y=4, 16 requests"),
    "07_latent_decode": ("S over Z ... NO ... 1 FAILED: S over Z", 990e12 / 3.4e12 * 128 / (128 * (2 * 512 + 64) / 576),
        "on Y=4, Z=1"),
    "07_engine": ("Six requests, 0.53 s across",
        1e3 * (32 * 4096 + 1000) * 163_840 / (16 * 8.2e11) + 1e3 * 2 * 1032 * 69_503_033_344 / (16 * 1.97e14),
        "wrote ttft.svg"),
    "07_decode_listing": ("A, causal 1. ... 1e-12 NO ... 1 FAILED: A, causal", 48.65,
        "Q[B, N_YZ, H] = X[B, D] * W_Q[D, N_YZ, H]"),
    "07_speculative": ("redrawn from p 0.0872 0.2798", (1 - 0.8**7) / 0.2, "wrote gain.svg"),
    "08_applied_inference": ("KV cache a token, int8 160 320 KiB +100.0% DIFFERS ... 4x2: a step of 32 17 23.69 ms", 20,
        "wrote pareto.svg"),
    "09_profiling": ("rank 0 is ... 1 FAILED: the slow rank is named first, with its line", 8 * 256 * 4,
        "A step of the block on X=1, Y=4"),
    "09_quiz": ("FAILED: it is read rightly, all are read rightly", 128, "Quiz 2: one training step ... 40 right"),
    "10_modes": ("2. T1[B_X, F]: as asked for 3. Out[B_X, D] = T1[B_X, F] *_F W_out[D, F] ... all hold",
        2 * 8192 * 2 + 3 * 2 * 8192 * 2, "AllGather_X 3,072 4 4 4"),
    "10_shard_map": ("1 FAILED: refused: a sum over X, and over Y", 2, "23 checks: all hold"),
    "10_collective_matmul": ("2 FAILED: AllReduce, 1 way, AllReduce, 2 ways", 4 * 1.97e14 / 4.5e10,
        "3 devices, result and gradients"),
    "10_problems": ("1 FAILED: 1.2: roll(x, 5) - x", 4 * 8 * 2, "Question 2.3 and 2.4 on 2 devices"),
    "11_recap": ("Part 12 136 102 14 12 8 0", 2, "Part 4 39 24 3 3 9 0"),
    "12_eight_bits": ("fp8-row 8.008 0.16%", 9 / 32 + 4 / (2 * 8192 * 28672), "compared with one device"),
    "12_gpus": ("1.4 the time with 512 rows 15 34.71 us +131.4% DIFFERS", 281.25 / (1 - 281.25 * (1 / 4096 + 1 / 8192)),
        "wrote roofs.svg"),
    "12_gpu_networks": (
        "3 x 5: top out B(M - 1) 2 3 NO ... 3 FAILED: 4 x 8: top out", 2 * 64e6 * 31 / 32 / 400e3, "wrote bus.svg"),
    "12_gpu_rooflines": (
        "DP in a node of H800s: tokens per 3300 4950 tokens +50.0% DIFFERS", 2475 * (32 - 8) / 8, "wrote dp.svg"),
}  # fmt: skip
