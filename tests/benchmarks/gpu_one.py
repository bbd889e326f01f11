"""Parts `rates`, `train`, `decode` and `attention` of gpu.py: what one device does; and, for parts of several ranks
too, contests on the ranks of this run and seconds of one call."""

import importlib.util
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import versus_torch_transformer as whole
from harness import losses_of, raced, settle, slowest
from report import quartiles, ratios
from torch.nn.attention import SDPBackend, sdpa_kernel
from versus_torch_transformer import SMALL

from scaling import serve, tree
from scaling.configs import Config, get
from scaling.cost.transformer import prefill_flops, train_flops
from scaling.mesh import Mesh
from scaling.models import attention as forms
from scaling.models import transformer as model

BF16 = torch.bfloat16
MODELS = {  # name -> (config, sequences, tokens of each); layers as in the model, but fewer
    "SmolLM2 135M's layers": (Config("smollm2", 8, 576, 1536, 9, 3, 64, 49152), 16, 2048),
    "Llama 3 8B's layers": (get("llama3-8b").with_(name="llama3", L=4, V=32768), 2, 4096),
}
SERVED = Config("llama-1b", 16, 2048, 8192, 32, 8, 64, 32768, tied=True)  # as Llama 3.2 1B, with a smaller vocabulary
BATCHES = (1, 4, 16, 64)


def race_here(sides: dict[str, Callable], samples: int, size: Any, flops: float, pairs: dict, **about) -> dict:
    """A row: ms of each side's step as `raced` has them, peak memory, and the ratios of `pairs` {name: (side, other)}.
    `flops`: of a step on all ranks, for the MFU."""
    ranks = everyone(raced(sides, samples, size))
    times = {name: slowest([rank["seconds"][name] for rank in ranks]) for name in ranks[0]["seconds"]}
    losses, wrong = losses_of(ranks, size.dtype)
    failed = ranks[0]["failed"] | ({"losses": wrong} if wrong else {})
    row = {**about, "failed": failed, "flops": flops, "ranks": len(ranks), "losses": losses}
    row["ms"] = {name: [1e3 * t for t in quartiles(each)] for name, each in times.items()}
    row["MB"] = {name: max(rank["peaks"][name] for rank in ranks) / 1e6 for name in times}
    row["ratio"] = {
        name: ratios(times[mine], times[other]) for name, (mine, other) in pairs.items() if {mine, other} <= {*times}
    }
    return row


def everyone(mine: dict) -> list[dict]:
    """What each rank has, in their order."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [mine]
    found: list = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


def seconds_of(call: Callable, samples: int = 5, least: float = 0.02) -> float:
    """Seconds of one call: the median of samples, each long enough for the clock."""
    call()
    settle()
    start = perf_counter()
    call()
    settle()
    often = 1 + int(least / max(perf_counter() - start, 1e-7))
    found = []
    for _ in range(samples):
        start = perf_counter()
        for _ in range(often):
            call()
        settle()
        found.append((perf_counter() - start) / often)
    return quartiles(found)[1]


def tiny_config() -> Config:
    return SMALL.config.with_(name="tiny", L=1, D=64, H=8, F=128, V=256)


def cases_rates(device: str, tiny: bool) -> dict[str, Callable]:
    def product(dtype: torch.dtype) -> list[dict]:
        n = 256 if tiny else 8192
        a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
        rate = 2 * n**3 / seconds_of(lambda: a @ b)
        return [{"what": f"product in {str(dtype).removeprefix('torch.')}, FLOPs/s", "rate": rate}]

    def memory() -> list[dict]:
        x = torch.ones((1 << 20) if tiny else (1 << 29), device=device)
        y = torch.empty_like(x)
        found = [{"what": "copy, bytes/s read and written", "rate": 2 * x.nbytes / seconds_of(lambda: y.copy_(x))}]
        return [*found, {"what": "sum, bytes/s read", "rate": x.nbytes / seconds_of(x.sum)}]

    def launch() -> list[dict]:
        x = torch.ones(8, device=device)
        return [{"what": "one small operation, seconds", "rate": seconds_of(lambda: x.add_(1))}]

    cases = {str(dtype): partial(product, dtype) for dtype in (BF16, torch.float32)}
    return cases | {"memory": memory, "launch": launch}


def cases_train(device: str, tiny: bool) -> dict[str, Callable]:
    """A step with AdamW beside the same nn.Module with a fused one: eager and compiled apart, since either may fail."""
    mesh = Mesh({"X": 1}, device)
    models = {"tiny": (tiny_config(), 2, 32)} if tiny else MODELS

    def one(name: str, compiled: bool, remat: str) -> list[dict]:
        config, B, T = models[name]
        size = whole.Size(config, B, T, dtype=torch.float32 if tiny else BF16)
        sides = {
            "ours": partial(whole.ours, mesh, size, "adamw", remat=remat, compiled=compiled),
            "tuned": partial(whole.theirs, mesh, size, "adamw", tuned=True, compiled=compiled),
        }
        flops = sum(train_flops(config, B, T, causal=True).values())
        about = {"model": f"{name}, {size}", "compiled": compiled, "remat": remat, "tokens": B * T}
        return [race_here(sides, 3 if tiny else 10, size, flops, {"": ("ours", "tuned")}, **about)]

    cases = {}
    for compiled in (False, True):
        for name in models:
            cases[f"{name}, {'compiled' if compiled else 'eager'}"] = partial(one, name, compiled, "none")
    if not tiny:
        cases["Llama 3 8B's layers, eager, remat"] = partial(one, "Llama 3 8B's layers", False, "block")
    return cases


def cases_decode(device: str, tiny: bool) -> dict[str, Callable]:
    config, T, steps = (tiny_config(), 16, 4) if tiny else (SERVED, 512, 24)
    mesh, dtype = Mesh({"Y": 1}, device), torch.float32 if tiny else BF16

    def prompt(B: int) -> torch.Tensor:
        return torch.randint(config.V, (B, T), generator=torch.Generator().manual_seed(0)).to(device)

    def ours(B: int) -> list[dict]:
        params = model.init(config, 0, dtype, device)
        ids = prompt(B)

        def empty() -> dict:
            return serve.init_cache(config, B, T + 8 * steps, dtype=dtype, mesh=mesh)

        first = seconds_of(lambda: serve.prefill(params, ids, empty(), config, mesh, donate=True), 3, 0)
        _, cache = serve.prefill(params, ids, empty(), config, mesh, donate=True)
        kept = dict(cache)

        def more() -> None:  # `steps` tokens, always from the end of the prompt
            now = kept | {"lengths": kept["lengths"].clone()}
            for _ in range(steps):
                _, now = serve.decode(params, ids[:, 0], now, config, mesh, donate=True)

        each = seconds_of(more, 3, 0) / steps
        context = T + steps // 2
        read = tree.nbytes(params) + 2 * config.L * B * context * config.K * config.H * dtype.itemsize
        read -= 0 if config.tied else params["embed"].nbytes  # of an embedding only the tokens' rows
        flops = prefill_flops(config, T, B)
        return [{"B": B, "T": T, "side": "ours", "prefill": first, "decode": each, "bytes": read, "flops": flops}]

    def theirs(B: int) -> list[dict]:
        import transformers

        sizes = {"hidden_size": config.D, "num_attention_heads": config.N, "num_key_value_heads": config.K}
        sizes |= {"head_dim": config.H, "num_hidden_layers": config.L, "intermediate_size": config.F}
        sizes |= {"vocab_size": config.V, "tie_word_embeddings": config.tied}
        with torch.device(device):
            net = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).to(dtype).eval()
        ids = prompt(B)

        def start():
            return net(ids, use_cache=True, logits_to_keep=1).past_key_values

        with torch.no_grad():
            first, past = seconds_of(start, 3, 0), start()

            def more() -> None:
                for _ in range(steps):
                    net(ids[:, :1], past_key_values=past, use_cache=True)
                past.crop(-steps)  # negative: so many are taken away

            each = seconds_of(more, 3, 0) / steps
        return [{"B": B, "T": T, "side": f"transformers {transformers.__version__}", "prefill": first, "decode": each}]

    batches = BATCHES[:2] if tiny else BATCHES
    cases = {f"B={B}": partial(ours, B) for B in batches}
    if importlib.util.find_spec("transformers"):
        cases |= {f"B={B}, transformers": partial(theirs, B) for B in batches}
    return cases


def cases_attention(device: str, tiny: bool) -> dict[str, Callable]:
    """Causal, grouped queries, forward and with the backward: what torch picks for ours, and each of its kernels."""
    B, T, N, K, H = (1, 64, 4, 2, 16) if tiny else (2, 4096, 32, 8, 128)
    dtype = torch.float32 if tiny else BF16
    kernels = {"flash": SDPBackend.FLASH_ATTENTION, "math": SDPBackend.MATH}
    if device == "cuda":
        kernels |= {"cudnn": SDPBackend.CUDNN_ATTENTION, "efficient, heads repeated": SDPBackend.EFFICIENT_ATTENTION}

    def timed(name: str, attend: Callable) -> list[dict]:
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
