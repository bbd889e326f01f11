"""A museum of silent bugs: `python tests/museum/museum.py` plants each of BUGS in a copy of the source and prints the
table of docs/museum.md, which says how each bug is found. It exits with 1 if a bug is not found.

Each is a published bug that gave wrong numbers and no error. It is planted by `edits` of this project's own source,
{text in the file: its replacement}, which do here what the bug did there. It is found in one of three ways: a rule of
the judge, which runs the file on an abstract mesh (`refused`), the error of a call on an AbstractMesh, where nothing is
sent (`raises`), or a test that compares with one device (`fails`)."""

import importlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import FunctionType, ModuleType
from typing import NamedTuple

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "check"))
from mutant_programs import judgement

from scaling.check import check_source
from scaling.check.findings import RULES
from scaling.check.lines import check_lines
from scaling.common import tables
from scaling.common.console import Parser
from scaling.configs import Config
from scaling.mesh import AbstractMesh
from scaling.models import transformer as model
from scaling.strategies.transformer import api

ROOT = Path(__file__).parents[2]
PLAIN = Config("plain", 2, 16, 24, 4, 2, 8, 32)
CALLS: dict[str, tuple[Config, dict, dict]] = {  # model, mesh and options; an AbstractMesh sends nothing
    "experts": (PLAIN.with_(E=4, k=2), {"X": 2, "E": 2}, {}),
    "one_kv_head": (PLAIN.with_(K=1), {"Y": 2}, {}),
    "two_way": (PLAIN, {"Y": 2}, {}),
    "in_blocks": (PLAIN.with_(D=256, F=256, H=64), {"X": 4}, {"precision": "fp8-128", "zero": 2}),
}
EIGHT = "chapters/12_eight_bits.py"
EXPERT, TRANSFORMER = (f"scaling/strategies/{name}/" for name in ("expert", "transformer"))


class Bug(NamedTuple):
    """`there`: where it happened, as owner/name#number; `what`: what went wrong there."""

    name: str
    there: str
    what: str
    file: str
    edits: dict[str, str]
    refused: str = ""
    raises: tuple[str, str] = ("", "")
    fails: str = ""

    @property
    def links(self) -> list[str]:
        return ["https://github.com/" + place.replace("#", "/issues/") for place in self.there.split()]


BUGS = (
    Bug("label smoothing over a part of the vocabulary", "NVIDIA/Megatron-LM#7452 NVIDIA/Megatron-LM#737",
        "the mean over V is each rank's own: the loss differs by rank, and the gradient is wrong",
        TRANSFORMER + "ends.py", refused="partial-plus-whole", edits={
            "torch.stack([exp.sum(-1), pick, every])": "torch.stack([exp.sum(-1), pick])",
            "total, pick, every = all_reduce(": "total, pick = all_reduce("}),
    Bug("gathered logits in a vocabulary-parallel loss", "NVIDIA/Megatron-LM#7452",
        "exp is summed over V on every rank and over the ranks: the loss is log|Y| too large",
        TRANSFORMER + "ends.py", refused="reduced-twice", edits={
            "    logits = soft_cap(": (
                '    line = "logits[R_PXEC, V_Y] -> logits[R_PXEC, V]"\n'
                "    logits = all_gather(line, logits, mesh)\n"
                "    logits = soft_cap(")}),
    Bug("a loss divided by each rank's own count of tokens", "NVIDIA/Megatron-LM#7452 huggingface/transformers#34191",
        "with unequal counts a mean of means: 14/3 where 4 is right",
        TRANSFORMER + "api.py", refused="nonlinear", edits={
            '    total = all_reduce("total[] {U_PXEC} -> total[]", total, mesh)\n': ""}),
    Bug("means that are added up", "NVIDIA/Megatron-LM#673 pytorch/torchtune#1875",
        "each rank's mean is summed over ranks: gradients are off by their number, which users then put in by hand",
        TRANSFORMER + "api.py", refused="how-reduced", edits={
            '    total = einsum("w[B_PXE, T_C] -> total[] {U_PXEC}", w)\n': "    total = w.mean()\n"}),
    Bug("gradients averaged that are to be added", "NVIDIA/Megatron-LM#906 NovaSky-AI/SkyRL#1420",
        "the loss is a sum over the whole batch, the gradients' AllReduce a mean: 1/|X| too small",
        "scaling/strategies/data_parallel.py", refused="how-reduced", edits={
            "dW_in, mesh, async_op=True, donate=True)": 'dW_in, mesh, async_op=True, donate=True, op="mean")'}),
    Bug("a loss that is differentiated after it was summed over ranks", "pytorch/pytorch#58005",
        "every rank differentiates every rank's terms: gradients are too large by the number of ranks",
        "chapters/05_tp.py", refused="loss", edits={
            "import all_gather, einsum, reduce_scatter": "import all_gather, all_reduce, einsum, reduce_scatter",
            "        return Out.square().sum()  #":
                '        return all_reduce("Loss[] {U_Y} -> Loss[]", Out.square().sum(), mesh)  #'}),
    Bug("a bias added before the reduction", "huggingface/text-generation-inference#1036 Wenyueh/MinivLLM#80",
        "every rank adds it: |Y| times the bias",
        TRANSFORMER + "layer.py", refused="partial-plus-whole", edits={
            "    Attn = reduce_scatter(":
                '    Attn = Attn + W["b_O"] if "b_O" in W else Attn\n    Attn = reduce_scatter(',
            '    return biased(Attn, W, "b_O"), s\n': "    return Attn, s\n"}),
    Bug("an AllReduce in place that is not in place", "microsoft/ltp-megatron-lm#68",
        "its result is thrown away: experts are balanced by each rank's own counts",
        EXPERT + "routing.py", refused="discarded", edits={
            "            load = all_reduce(": "            all_reduce("}),
    Bug("a raw collective inside what is differentiated",
        "Dao-AILab/flash-attention#1244 lucidrains/vector-quantize-pytorch#158",
        "the forward pass is right; backward, the sum over ranks is missing",
        TRANSFORMER + "layer.py", refused="untyped", edits={
            '    Out = reduce_scatter("Out[B_PXE, T_C, D] {U_Y}':
            '    torch.distributed.all_reduce(Out, group=at.mesh.group("Y"))\n    Out = shard("Out[B_PXE, T_C, D]'}),
    Bug("a gradient of keys that all heads share, each rank's own", "bigcode-project/Megatron-LM#37",
        "each rank has the sum over its own heads alone: a loss of 3.74 where 2.64 was right",
        "scaling/models/latent.py", refused="unreduced", edits={
            "import all_gather, reduce_scatter, wait": "import all_gather, reduce_scatter, shard, wait",
            "    dC_KV = torch.cat([dC_KV, dK_R], -1)\n": "",
            "dC_KV[B_PXE, T_C, M] {U_Y} -> dC_KV[B_PXE, T_CY, M]":
                "dC_KV[B_PXE, T_C, C] {U_Y} -> dC_KV[B_PXE, T_CY, C]",
            "    dC_KV, dK_R = wait(dC_KV).tensor_split([rank], -1)\n":
            '    dC_KV = wait(dC_KV)\n    dK_R = shard("dK_R[B_PXE, T_C, I] -> dK_R[B_PXE, T_CY, I]", dK_R, mesh)\n'}),
    Bug("activations gathered again over another group", "NVIDIA/Megatron-LM#7452",
        "recomputation puts together shards of other ranks' tokens",
        "scaling/strategies/fsdp_tp.py", refused="split", edits={
            'all_gather("In[B_X, D_Y] -> In[B_X, D]", In, mesh)  # 7.':
                'all_gather("In[B, D_X] -> In[B, D]", In, mesh)  # 7.'}),
    Bug("experts' gradients summed over the experts' ranks", "pytorch/pytorch#160285 NVIDIA/Megatron-LM#5956",
        "tokens of all ranks are in them already: |E| times too large, and the loss looks the same",
        TRANSFORMER + "step.py", raises=("experts", "mesh axis E is used twice"), edits={
            " and axis not in used.axes]": "]"}),
    Bug("fewer KV heads than ranks", "sgl-project/sglang#20967 deepspeedai/DeepSpeed#8316 pytorch/torchtitan#2577",
        "a head is cut in two, or a rank gets none: garbled text, a crash or a hang",
        TRANSFORMER + "types.py", raises=("one_kv_head", "dim K of size 1 does not divide into 2 blocks"), edits={
            '(*gone, "Y") if name in whole_heads': '(*gone, "Y") if name not in whole_heads'}),
    Bug("an unembedding that was never split", "huggingface/picotron#27",
        "a plain layer took the place of the column-parallel one: each rank has all of V, and counts it as its part",
        TRANSFORMER + "api.py", raises=("two_way", "unembed"), edits={
            "    return tree.shard(arranged, types.specs(config, mesh, zero=zero, schedule=schedule), mesh)": (
                "    split = tree.shard(arranged, types.specs(config, mesh, zero=zero, schedule=schedule), mesh)\n"
                '    return split | {"unembed": params["unembed"]}')}),
    Bug("a product of scaled arrays whose sum over ranks is forgotten", "pytorch/pytorch#191992",
        "an MXFP8 product over a split dim is typed as split: each rank's term is taken for a part", EIGHT,
        refused="illegal-line", edits={"{Q_B} -> dW_out[F, D] {U_X}": "{Q_B} -> dW_out[F_X, D]"}),
    Bug("a scale of a partial sum", "pytorch/torchtitan#3109",
        "the maximum is that of each rank's term: NaN at the third step", EIGHT, refused="illegal-line", edits={
            'dW_out = reduce_scatter("': 'q = quantize("dW[F, D] {U_X} -> dW[F, D] {Q_D}", dW_out, mesh, r.weights)\n'
            '        dW_out = reduce_scatter("'}),
    Bug("a weight's transpose with the scales of its rows", "NVIDIA/Megatron-LM#5470",
        "scales along one dim do not follow from those along the other: the backward has other weights", EIGHT,
        refused="illegal-line", edits={"* W_out[F, D] {Q_D} -> dAct": "* W_out[F, D] {Q_F} -> dAct"}),
    Bug("values of eight bits without their scales", "Lightricks/LTX-2#172 leejet/stable-diffusion.cpp#1898",
        "weights are used as they are stored, some 770 times too large: noise, and no error", EIGHT,
        refused="illegal-line", edits={'-> W_in[D, F] {Q_D}", W_in': '-> W_in[D, F]", W_in'}),
    Bug("a shard smaller than its quantization block", "vllm-project/vllm#52997",
        "each shard's count of scales is rounded up, so one shard's scale overwrites another's",
        TRANSFORMER + "types.py", raises=("in_blocks", "64 of D on each rank, in blocks of 128"), edits={
            '(() if zero == 3 else ("X",))': "()"}),
    Bug("ring attention's backward reads the first block of keys at every hop",
        "huggingface/diffusers#14265 NVIDIA/Megatron-LM#1464",
        "the forward pass is right, dQ, dK and dV are not",
        "scaling/models/blockwise.py", fails="tests/strategies/test_context.py::test_equal_to_dense[4]", edits={
            "block_backward(dO, O, lse, Q, KV, here)": "block_backward(dO, O, lse, Q, torch.stack([K, V]), here)"}),
    Bug("gradients of a pipeline that are not divided by the tokens", "pytorch/torchtitan#2972",
        "with stages they are larger by the number of tokens, without them they are not",
        TRANSFORMER + "stages.py",
        fails="tests/strategies/test_transformer_mesh.py::test_equal_to_one_device[rich {Z: 2}]", edits={
            "weights[some], step.terms": "weights[some] * weights.numel(), step.terms"}),
    Bug("norms' gradients not summed over the sequence's ranks", "NVIDIA-NeMo/RL#3716 NVIDIA/Megatron-LM#1446",
        "each rank along Y has the gradient of its own tokens: replicas of a gain drift apart",
        TRANSFORMER + "step.py",
        fails="tests/strategies/test_transformer_mesh.py::test_equal_to_one_device[plain {Y: 4}]", edits={
            'TOKENS = ("P", "X", "E", "C", "Y")': 'TOKENS = ("P", "X", "E", "C")'}),
    Bug("gradients clipped by the norm of a part", "pytorch/torchtitan#596",
        "the norm is that of each stage's params: stages are clipped by different factors",
        "scaling/optim/clipping.py", fails="tests/optim/test_optim.py::test_clipping_counts_each_element_once", edits={
            '(all_reduce(f"Norm[] {{U_{axes}}} -> Norm[]", square, mesh) if axes else square)': "square"}),
    Bug("squares of millions of elements added up one by one in float32",
        "pytorch/pytorch#68326 pytorch/pytorch#151761",
        "the norm is 0.1% too small, by another share on every mesh, and so is what gradients are clipped by",
        "scaling/common/limits.py",
        fails="tests/optim/test_optim.py::test_the_norm_of_a_large_leaf_is_the_same_however_it_is_split", edits={
            "row: int = 1024": "row: int = 1 << 40"}),
    Bug("experts chosen again where a layer is computed again", "pytorch/torchtitan#3336 pytorch/torchtitan#1117",
        "of scores that almost tie another one wins: the counts no longer fit, or gradients are of another routing",
        "scaling/models/moe.py",
        fails="tests/strategies/test_expert.py::test_bytes_are_real_and_computing_again_routes_nothing", edits={
            "f(params, x, decided[0])[0]": "f(params, x, None)[0]"}),
)  # fmt: skip


def planted(bug: Bug) -> str:
    """The file's text with the bug."""
    text = (ROOT / bug.file).read_text(encoding="utf-8")
    for old, new in bug.edits.items():
        if text.count(old) != 1:
            raise ValueError(f"{bug.name}: {bug.file} has {text.count(old)} of {old!r}: rewrite the edit")
        text = text.replace(old, new)
    return text


def rules_broken(file: str, text: str) -> Iterator[str]:
    """The rules that a file of this text breaks: first of its lines alone, then as the judge runs it."""
    of_lines = check_source(text, file) if "STRATEGY =" in text else check_lines(text, file)[0]
    yield from (fault.rule for fault in of_lines)
    yield from (fault.rule for fault in judgement(file, text).findings)


@cache
def broken_as_it_is(file: str) -> list[str]:
    return list(rules_broken(file, (ROOT / file).read_text(encoding="utf-8")))


def answer(name: str) -> str:
    """The error that a call gets; "" if it gets none."""
    config, sizes, options = CALLS[name]
    mesh = AbstractMesh(sizes)
    tokens = torch.empty(2, 64, dtype=torch.int64, device="meta")
    try:
        params = api.shard(model.init(config, 0, torch.float32, "meta"), config, mesh, zero=options.get("zero", 3))
        api.loss_and_grads(params, tokens, tokens, config, mesh, **options)
    except ValueError as error:
        return f"{type(error).__name__} {error}"
    return ""


def answer_with(bug: Bug) -> str:
    """The error that its call gets while its module has what the edited text defines."""
    module = importlib.import_module(bug.file.removesuffix(".py").replace("/", "."))
    edited = ModuleType(module.__name__)
    exec(compile(planted(bug), bug.file, "exec"), edited.__dict__)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in vars(edited).items():
            own = getattr(value, "__module__", "") == module.__name__
            if own and (isinstance(value, FunctionType) or hasattr(value, "cache_clear")):
                patch.setattr(module, name, value)
        return answer(bug.raises[0])


def tested(bug: Bug, plant: bool) -> str:
    """What the test that sees a bug prints in a copy of the project, with the bug or without it."""
    with tempfile.TemporaryDirectory(prefix="museum-") as folder:
        for part in ("scaling", "tests"):
            shutil.copytree(ROOT / part, f"{folder}/{part}", ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", folder)
        if plant:
            Path(folder, bug.file).write_text(planted(bug), encoding="utf-8")
        env = os.environ | {"PYTHONPATH": folder, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, "-m", "pytest", "-x", bug.fails]
        run = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
        return run.stdout + run.stderr


def seen(bug: Bug) -> bool:
    """Whether the bug, planted, is answered as BUGS says; and, without it, nothing is."""
    if bug.refused:
        return bug.refused in rules_broken(bug.file, planted(bug)) and not broken_as_it_is(bug.file)
    if bug.fails:
        printed = tested(bug, True)  # it must fail by what is compared: a crash is not silent
        words = "AssertionError" if "RankFailed" in printed else "(assert |AssertionError)"  # else also lines of ranks
        held = re.search(rf"^E +{words}", printed, re.M) and "1 failed" in printed
        return bool(held) and " passed" in tested(bug, False)
    call, words = bug.raises
    return not answer(call) and words in answer_with(bug)


def here(bug: Bug) -> str:
    """What happens here, in a few words."""
    if bug.refused:
        return f"refused before it runs [{bug.refused}]: {RULES[bug.refused]}"
    if bug.raises[0]:
        return f"ShardingError before anything is sent: {bug.raises[1]}"
    file, _, test = bug.fails.rpartition("/")[2].partition("[")[0].partition("::")
    return f"fails {file}: {test.removeprefix('test_').replace('_', ' ')}"


def table() -> str:
    rows = [(i, bug.name, bug.what, here(bug)) for i, bug in enumerate(BUGS, 1)]
    shown = tables.table(rows, ["", "bug", "what happened there", "what happens here"], 100)
    typed = sum(not bug.fails for bug in BUGS)
    return f"{shown}\n{typed} of {len(BUGS)} are refused by type, {len(BUGS) - typed} by a test against one device.\n"


def main() -> int:
    unseen = [bug.name for bug in BUGS if not seen(bug)]
    print(table(), end="")
    for name in unseen:
        print(f"not seen: {name}")
    return 1 if unseen else 0


if __name__ == "__main__":
    Parser(description=__doc__).parse_args()
    sys.exit(main())
