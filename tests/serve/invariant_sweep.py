"""The batch-invariant mode over random traces, and what it costs: `python tests/serve/invariant_sweep.py`.

Each request of a trace runs in an engine with its own policy, pages, slots and budget, and alone, its prompt at once or
a token at a time; the logits of all tokens must be the same bits. A trace is a function of its seed: `--first 300
--traces 100` goes on after the first 300, and 0 traces leave the cost alone.
"""

import random
import time
from collections import Counter

import torch

from scaling.configs import Config
from scaling.console import Parser
from scaling.models import transformer
from scaling.serve import init_cache, invariant, quantize
from scaling.serve.engine import Engine
from scaling.serve.simulate import drive
from scaling.serve.states import Options, Preempt, Request
from scaling.serve.step import decode

DENSE = Config("gqa, window", L=2, D=32, F=48, N=4, K=2, H=8, V=47, window=(None, 9))
MOE = Config("experts", L=2, D=24, F=20, N=4, K=2, H=8, V=43, E=5, k=2, shared=1)
SIGMOID = Config("sigmoid", L=1, D=29, F=19, N=2, K=2, H=8, V=43, E=7, k=3, routing="sigmoid", norm_topk=True)


def _model(config: Config, int8: bool = False, cache: torch.dtype | None = None):
    params = transformer.init(config, 0, torch.float32)
    return (quantize(params, config) if int8 else params), config, cache


MODELS = [  # (params, config, the cache's dtype)
    _model(Config("mha", L=2, D=24, F=40, N=3, K=3, H=8, V=53)),
    _model(DENSE),
    _model(Config("mqa, tied, gelu", L=1, D=37, F=53, N=10, K=1, H=4, V=31, tied=True, qk_norm=True, gated=False)),
    _model(DENSE, int8=True),
    _model(DENSE, cache=torch.int8),
    _model(MOE),
    _model(SIGMOID),
    _model(MOE, int8=True, cache=torch.int8),
]


def alone(params, config, dtype, tokens, first: int, chunk: int) -> list[torch.Tensor]:
    """The logits from place `first` on, in a contiguous cache: the prompt in chunks, then each token by itself."""
    cache, found = init_cache(config, 1, 200, dtype=dtype), []
    parts = [tokens[at : min(at + chunk, first)] for at in range(0, first, chunk)] + [(t,) for t in tokens[first:]]
    for part in parts:
        logits, cache = invariant.prefill(params, torch.tensor([part]), cache, config, donate=True)
        found.append(logits[0])
    return found[-(len(tokens) - first) - 1 :]


def trace(seed: int) -> Counter:
    chance = random.Random(seed)
    params, config, dtype = MODELS[seed % len(MODELS)]
    page = chance.choice([1, 4, 7, 16])
    options = Options(
        pages=-(-chance.randint(100, 260) // page), page=page, slots=chance.randint(1, 9), budget=chance.randint(1, 90),
        policy=chance.choice(["static", "interleaved", "chunked", "disaggregated"]), prefix=chance.random() < 0.7,
        proposals=(proposals := chance.choice([0, 0, 3])),
    )  # fmt: skip
    stem = [chance.randrange(config.V) for _ in range(72)]
    arrivals = []
    for id in range(chance.randint(2, 8)):
        prompt = stem[: chance.choice([0, 16, 40, 72])] + [chance.randrange(config.V)] * chance.choice([1, 2, 9])
        arrivals.append((chance.choice([0.0, 0.01]), Request(id, tuple(prompt), chance.randint(1, 12))))
    seen: dict[tuple[int, int], torch.Tensor] = {}
    counts: Counter[str] = Counter()

    def watch(state, actions):
        counts["preempted"] += sum(isinstance(action, Preempt) for action in actions)

    keep = lambda id, place, logits: seen.update({(id, place): logits})  # noqa: E731
    draft = "ngram" if proposals else None
    engine = Engine(params, config, options, dtype=dtype, batch_invariant=True, draft=draft, logits=keep)
    served = drive(arrivals, options, engine, watch=watch)
    counts["drafted"] += bool(proposals)
    for _, request in arrivals:
        times = served.requests[request.id]
        counts["hits"] += times.cached > 0
        if times.tokens:
            first, chunk = len(request.prompt), chance.choice([1, 7, 99, 99])
            wanted = alone(params, config, dtype, (*request.prompt, *times.tokens[:-1]), first, chunk)
            for n, logits in enumerate(wanted):
                assert torch.equal(seen[request.id, first + n], logits), (seed, request.id, n)
                counts["compared"] += 1
    return counts


def cost(B: int, S: int = 256) -> tuple[float, float]:
    """A core's milliseconds for a decode step of B rows with S tokens held: plain, batch-invariant; taken in turns."""
    config = Config("100M", L=12, D=768, F=2048, N=12, K=12, H=64, V=32000)
    params = transformer.init(config, 0, torch.float32)
    sizes = invariant.agreeing(params, config)
    cache = init_cache(config, B, S + 8, dtype=torch.float32, page=16) | {"lengths": torch.full((B,), S)}
    tokens = torch.arange(B)[:, None] % config.V
    calls = {
        "plain": lambda: decode(params, tokens[:, 0], dict(cache), config, donate=True),
        "invariant": lambda: invariant.prefill(params, tokens, dict(cache), config, donate=True, sizes=sizes),
    }
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(6):
        for name, call in calls.items():
            start = time.process_time()
            call()
            best[name] = min(best[name], 1e3 * (time.process_time() - start))
    return best["plain"], best["invariant"]


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("--first", type=int, default=0, help="the first trace's seed")
    parser.add_argument("--traces", type=int, default=1000)
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 8, 32], help="rows of the steps that are timed")
    args = parser.parse_args()
    torch.set_num_threads(1)
    total: Counter[str] = Counter()
    for done, seed in enumerate(range(args.first, args.first + args.traces), 1):
        total += trace(seed)
        if done % 20 == 0 or done == args.traces:
            counts = ", ".join(f"{what} {n:,}" for what, n in sorted(total.items()))
            print(f"traces {args.first} to {seed}, the same bits: {counts}", flush=True)
    for B in args.batch:
        plain, own = cost(B)
        print(f"a decode step of a 100M-like model, B={B}: {plain:.1f} ms, invariant {own:.1f} ms, {own / plain:.2f}x")


if __name__ == "__main__":
    main()
