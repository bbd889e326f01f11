"""Parts `rates`, `train`, `decode`, `attention`, `beside` and `trace` of gpu.py, which says what each of them is."""

import importlib.util
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import versus_torch
import versus_torch_transformer as whole
from gpu_equal import join
from harness import SIZES, Contest, Size, compared, raced, seconds_of, split
from torch.nn.attention import SDPBackend, sdpa_kernel
from versus_torch_transformer import SMALL

from scaling import serve, tree
from scaling.common.torchrun import world_size
from scaling.configs import Config, get
from scaling.configs.hugging_face_write import write_config
from scaling.cost.transformer import prefill_flops
from scaling.mesh import Mesh
from scaling.models import attention as forms
from scaling.models import transformer as model
from scaling.profile import profile
from scaling.serve.fixed import Steps

BF16 = torch.bfloat16
LLAMA = get("llama3-8b").with_(name="llama3", L=4, V=32768)  # layers as in the model, but fewer
MODELS = {
    "SmolLM2 135M's layers": whole.Size(Config("smollm2", 8, 576, 1536, 9, 3, 64, 49152), 16, 2048, dtype=BF16),
    "Llama 3 8B's layers": whole.Size(LLAMA, 2, 4096, dtype=BF16),
}
SERVED = Config("llama-1b", 16, 2048, 8192, 32, 8, 64, 32768, tied=True)  # as Llama 3.2 1B, with a smaller vocabulary
ON_ALL = whole.Size(LLAMA, 8, 4096, dtype=BF16)  # of all ranks together
LARGE = Size(8, 4096, 16384, 16384, dtype=BF16)
TINY = replace(SMALL, config=SMALL.config.with_(L=1))
EAGER, COMPILED = ("ours", "tuned"), ("ours compiled", "tuned compiled")


def cases_rates(device, tiny):
    n, m, dtype = (256, 1 << 20, torch.float32) if tiny else (8192, 1 << 29, BF16)

    def product():
        a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
        rate = 2 * n**3 / seconds_of(lambda: a @ b)
        return [{"what": f"product in {str(dtype).removeprefix('torch.')}, FLOPs/s", "rate": rate}]

    def memory():
        x = torch.ones(m, device=device)
        y = torch.empty_like(x)
        return [{"what": "copy, bytes/s read and written", "rate": 2 * x.nbytes / seconds_of(lambda: y.copy_(x))}]

    def launch():
        x = torch.ones(8, device=device)
        return [{"what": "one small operation, seconds", "rate": seconds_of(lambda: x.add_(1))}]

    return {"product": product, "memory": memory, "launch": launch}


def race(contest: Contest, sides: Sequence[str], mesh, size: Any, tiny: bool, about: dict) -> list[dict]:
    """The row of one contest on the ranks of this run."""
    mine = raced(mesh, contest, sides, size, "adamw", 3 if tiny else 10)
    ranks: list = [mine] * mesh.size()
    if mesh.size() > 1:
        dist.all_gather_object(ranks, mine)
    return [{**about, "sides": sides, **compared(ranks, size)}]


def cases_train(device, tiny):
    """A step with AdamW beside the same nn.Module with a fused one: eager and compiled apart, since either may fail."""
    mesh = Mesh({"X": 1}, device)
    models = {"tiny": TINY} if tiny else MODELS

    def one(name, how, sides, remat="none"):
        contest, size = replace(whole.CONTESTS["fsdp"], ours=partial(whole.ours, remat=remat)), models[name]
        about = {"model": f"{name}, {size}", "how": how, "tokens": size.B * size.T}
        return race(contest, sides, mesh, size, tiny, about)

    cases = {}
    for how, sides in (("eager", EAGER), ("compiled", COMPILED)):
        cases |= {f"{name}, {how}": partial(one, name, how, sides) for name in models}
    if not tiny:
        cases["Llama 3 8B's layers, remat"] = partial(one, "Llama 3 8B's layers", "eager, remat block", EAGER, "block")
    return cases


def cases_decode(device, tiny):
    """Decode steps: eager, captured, compiled (on CUDA, and captured); of transformers, eager and compiled."""
    config, T, steps = (TINY.config, 16, 4) if tiny else (SERVED, 512, 24)
    mesh, dtype, room = Mesh({"Y": 1}, device), torch.float32 if tiny else BF16, T + 8 * steps
    cuda = device == "cuda"

    def prompt(B):
        return torch.randint(config.V, (B, T), generator=torch.Generator().manual_seed(0)).to(device)

    def row(B, side, start, more):
        """`more()`: `steps` tokens, always from the end of the prompt."""
        params = model.init(config, 0, dtype, "meta")
        read = tree.nbytes(params) + 2 * config.L * B * (T + steps // 2) * config.K * config.H * dtype.itemsize
        read -= 0 if config.tied else params["embed"].nbytes  # of an embedding only the tokens' rows
        about = {"B": B, "T": T, "side": side, "bytes": read, "flops": prefill_flops(config, T, B)}
        return [{**about, "prefill": seconds_of(start, 3, 0), "decode": seconds_of(more, 3, 0) / steps}]

    def ours(B, side, **how):
        params, ids = model.init(config, 0, dtype, device), prompt(B)

        def start():
            empty = serve.init_cache(config, B, room, dtype=dtype, mesh=mesh)
            return serve.prefill(params, ids, empty, config, mesh, donate=True)[1]

        step = Steps(params, config, start(), mesh, **how)
        if step.fixed != (side != "ours"):
            raise ValueError(f"{side}: {step.why}")

        def more():
            for n in range(steps):
                step([[7]] * B, [T + n] * B)

        return row(B, side, start, more)

    def theirs(B, side, static=False):
        import transformers

        with torch.device(device):
            made = transformers.LlamaForCausalLM(transformers.LlamaConfig(**write_config(config)))
        net, ids = made.to(dtype).eval(), prompt(B)
        step = torch.compile(net, mode="reduce-overhead") if static else net

        def start():
            if not static:
                return net(ids, use_cache=True, logits_to_keep=1).past_key_values
            cache = transformers.StaticCache(config=net.config, max_cache_len=room)
            return net(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).past_key_values

        def more():
            for n in range(steps):
                where = torch.full((B, 1), T + n, device=device)
                step(ids[:, :1], past_key_values=past, use_cache=True, position_ids=where)
            if not static:
                past.crop(-steps)  # negative: so many are taken away

        with torch.no_grad():
            past = start()
            return row(B, f"{side} {transformers.__version__}", start, more)

    sides = {"ours": partial(ours, capture=False), "ours compiled": partial(ours, compile="inductor")}
    sides |= {"ours captured": ours} if cuda else {}
    if importlib.util.find_spec("transformers"):
        sides |= {"transformers": theirs} | ({"transformers compiled": partial(theirs, static=True)} if cuda else {})
    return {
        f"B={B}, {side}": partial(call, B, side)
        for B in ((1, 4) if tiny else (1, 8, 64))
        for side, call in sides.items()
    }


def cases_attention(device, tiny):
    """Causal, grouped queries, forward and with the backward: what torch picks for ours, and each of its kernels."""
    B, T, N, K, H = (1, 64, 4, 2, 16) if tiny else (2, 4096, 32, 8, 128)
    dtype = torch.float32 if tiny else BF16
    kernels = {"flash": SDPBackend.FLASH_ATTENTION, "math": SDPBackend.MATH}
    if device == "cuda":
        kernels |= {"cudnn": SDPBackend.CUDNN_ATTENTION, "efficient, heads repeated": SDPBackend.EFFICIENT_ATTENTION}

    def timed(name, attend):
        Q, K_, V = heads = [torch.randn(B, T, n, H, device=device, dtype=dtype).requires_grad_() for n in (N, K, K)]
        dO = torch.ones(B, T, N, H, device=device, dtype=dtype)
        forward = seconds_of(lambda: attend(Q.detach(), K_.detach(), V.detach()))
        both = seconds_of(lambda: torch.autograd.grad(attend(Q, K_, V), heads, dO))
        flops = 2 * B * T * (T + 1) * N * H  # of the pairs that are visible
        return [{"kernel": name, "forward": forward, "both": both, "flops": flops, "both flops": 3.5 * flops}]

    def by(kernel, Q, K_, V):
        grouped = kernel != SDPBackend.EFFICIENT_ATTENTION  # which takes no groups of queries
        K_, V = (K_, V) if grouped else (x.repeat_interleave(N // K, 2) for x in (K_, V))
        heads = [x.transpose(1, 2) for x in (Q, K_, V)]
        with sdpa_kernel(kernel):
            return F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=grouped).transpose(1, 2)

    cases: dict[str, Callable] = {"scaling.models.attention.sdpa": forms.sdpa}
    cases |= {f"torch, {name}": partial(by, kernel) for name, kernel in kernels.items()}
    return {name: partial(timed, name, attend) for name, attend in cases.items()}


def cases_beside(device, tiny):
    mesh_of, ranks = join(device), world_size()
    size, large = (SIZES["tiny"], SMALL) if tiny else (LARGE, ON_ALL)
    cases = {}

    def one(contest, ours, sides, size):
        mesh = mesh_of(split(contest.axes, ranks))
        about = {"model": str(size), "ours": ours, "theirs": contest.rival, "mesh": mesh.sizes}
        return race(contest, sides, mesh, size, tiny, about)

    for name in ("dp", "fsdp", "tp-rows", "fsdp_tp", "1f1b"):
        contest = versus_torch.CONTESTS[name]
        if contest.fits(size, ranks):
            sides = EAGER if tiny or "Z" in contest.axes else EAGER + COMPILED
            cases[f"{name}, adamw"] = partial(one, contest, name, sides, size)
    for name, contest in whole.CONTESTS.items():
        if contest.fits(large, ranks):
            cases[f"Transformer, {name}"] = partial(one, contest, f"Transformer, {name}", EAGER, large)
    if not tiny:
        fsdp = whole.CONTESTS["fsdp"]
        cases["Transformer, fsdp, compiled"] = partial(one, fsdp, "Transformer, fsdp", COMPILED, large)
    return cases


def cases_trace(device, tiny):
    """One step of the Transformer under FSDP, profiled on all ranks after two that were not."""
    mesh = join(device)({"X": world_size()})

    def traced():
        size = SMALL if tiny else ON_ALL
        step = whole.ours(mesh, size, "adamw")
        for _ in range(2):
            step()
        with profile() as found:
            step()
        if mesh.rank == 0:
            found.save(Path(os.environ["GPU_OUT"]) / "trace.json")
        return [{"file": "trace.json", "seconds": found.seconds, "ranks": mesh.size()}]

    return {"Transformer under FSDP": traced}
