# %% [markdown]
"""Part 7, Designing an Effective Inference Engine: batching policies, continuous batching, prefix caching.
https://jax-ml.github.io/scaling-book/inference

One scheduler, a pure function (state, events) -> (state, actions), drives both an engine that computes with a small
model, and a simulator with the step times of LLaMA-3 70B in int8 on v5e 4x4s. This chapter draws the batching
policies side by side, measures their TTFT (time to the first token) and TPOT (time per token after it), counts the
tokens of prompts that are found in a cache, and simulates Part 8's three prefill servers for one generation server.
"""

# %% [markdown]
# ## Why a scheduler?
# Requests arrive at any time, with prompts and answers of any length. A batch that waits until all of its members are
# done leaves slots idle, and a prompt that runs alone delays the next token of everyone else. So which request runs in
# which step decides how long a user waits for the first token, how steadily the others follow, and how much of the
# hardware is used.
#
# These aims conflict, and each policy below neglects one of them. For a job without users, such as an evaluation, none
# of this matters: the largest batch that fits is best.

# %%
import random

import torch

from scaling import serve
from scaling.book import layout
from scaling.book.answers import Answer
from scaling.book.page import Page
from scaling.configs import Config, get
from scaling.cost import serving
from scaling.hardware import chip
from scaling.models import transformer
from scaling.plan.serve.traces import gantt, request_bars
from scaling.serve import engine
from scaling.serve.requests import Request
from scaling.serve.simulate import simulate
from scaling.serve.states import POLICIES, Move, Options, Run
from scaling.show import svg

page = Page(__doc__, seed=True, plot=True)
V5E, CHIPS = chip("v5e"), 16
LOAD = serving.load(get("llama3-70b"), "int8", "int8")


def modelled(action: Run | Move) -> float:
    """Return the seconds of a step or of a cache's move by the cost model, with all prompts and decodes in one pass."""
    if isinstance(action, Move):
        return LOAD.kv(action.tokens) / (CHIPS * V5E.dcn_bw)
    works = [(len(work.tokens), work.start + len(work.tokens)) for work in action.works]
    return serving.mixed(LOAD, works, V5E, CHIPS).seconds


# %% [markdown]
# ## Policies, drawn
# Six requests, one row each, run on a server with room for four at a time (slots). In a terminal `P` means that the
# prompt runs, `d` that the request decodes, `.` that it waits, and `>` that its cache moves; on a page these are
# colours. With the policy `static`, no request enters before the whole batch is done. With `interleaved`, requests
# enter at any time, but a prompt stops all others while it runs. With `chunked`, a step has at most 512 tokens, of
# decodes and of parts of prompts, so nobody stops. With `disaggregated` there are two slices, one for prompts and one
# for decodes; no decode waits for a prompt, and the caches move between the slices.

# %%
ARRIVALS = [(0.0, 2000, 40), (0.0, 3000, 12), (0.05, 1000, 25), (0.1, 4000, 30), (0.3, 2000, 20), (0.4, 1000, 10)]
WIDTH = 34


def requests(rows) -> list[tuple[float, Request]]:
    """Return [(seconds, request)] from rows of (seconds, prompt, output), where no two prompts share a token."""
    return [(t, Request(id, tuple(range(id * 10**6, id * 10**6 + prompt)), output)) for id, (t, prompt, output)
            in enumerate(rows)]  # fmt: skip


drawn = {}
for policy in POLICIES:
    options = Options(pages=1200, page=16, slots=4, budget=512, policy=policy, prefix=False)
    drawn[policy] = simulate(requests(ARRIVALS), options, modelled)
longest = max(served.seconds for served in drawn.values())
page.title(f"Six requests, {longest:.2f} s across")
pictures = [f"{policy}: {served.seconds:.2f} s\n{gantt(served, WIDTH, longest)}" for policy, served in drawn.items()]
COLOURS = {"prompt": "#f5a45d", "decodes": "#86aef0", "its cache moves": "#5fc7b0", "waits": "#e4e4e4"}
lines = [(f"{policy}: {served.seconds:.2f} s", request_bars(served)) for policy, served in drawn.items()]
page.show(layout.beside(pictures, gap=2, columns=80), lambda: svg.time_lines(lines, COLOURS, "in s", longest))

# %% [markdown]
# ## How policies change latency
# Now requests arrive at random, with prompts and outputs of different lengths. Compare the medians (p50) with the 95th
# percentiles (p95). With `static`, a request waits for the slowest of a batch before it begins; its tokens then come
# steadily, as no prompt runs meanwhile. With `interleaved`, some requests have tokens several times as slowly as
# others, because every prompt stops all decodes; chunks make this better. With `disaggregated`, the first token takes
# as long, since prompts wait for each other, but the tokens after it come steadily. This takes twice the chips: so few
# requests do not fill both slices, and it makes half as many tokens a chip.

# %%
draw = random.Random(page.args.seed)
many, now, lengths = 16 if page.small else 80, 0.0, []
for _ in range(many):
    now += draw.expovariate(4)
    lengths.append((now, draw.choice((500, 1000, 2000, 4000)), draw.randint(8, 64)))
trace, rows = requests(lengths), []
setting = {"pages": 4000, "page": 16, "slots": 16, "budget": 512, "prefix": False}
ran = {policy: simulate(trace, Options(policy=policy, **setting), modelled) for policy in POLICIES}
for policy, served in ran.items():
    ttft, tpot = ([1e3 * served.percentile(what, p) for p in (50, 95)] for what in ("ttft", "tpot"))
    rows.append((policy, *ttft, *tpot, served.throughput / CHIPS / (2 if policy == "disaggregated" else 1)))
page.title(f"{many} requests, ms")
page.table(rows, ["policy", "TTFT,\np50", "p95", "TPOT,\np50", "p95", "tokens/s\na chip"])
page.chart(
    "ttft", {policy: [(1e3 * t, (i + 1) / many) for i, t in enumerate(sorted(r.ttft for r in served.requests.values()))]
             for policy, served in ran.items()},
    "TTFT, ms", "share", "Share of the requests that have their first token", height=10, log="x",
)  # fmt: skip
p95 = {policy: (served.percentile("ttft", 95), served.percentile("tpot", 95)) for policy, served in ran.items()}
page.check("all requests are served", all(len(r.at) == o for s in ran.values() for r, (_, _, o) in
                                          zip(s.requests.values(), lengths, strict=True)))  # fmt: skip
page.check("static has the worst TTFT", max(p95, key=lambda policy: p95[policy][0]) == "static")
tpots = [p95[policy][1] for policy in ("disaggregated", "chunked", "interleaved")]
page.check("prompts beside decodes slow tokens down", tpots == sorted(tpots))

# %% [markdown]
# ## The engine takes the same steps
# Does a request's answer depend on its neighbours? It must not. A small model in float64 serves all requests at once,
# and each gets the same tokens as alone. The engine runs exactly the steps that the simulator has predicted.
# (`disaggregated` is left out there, because its order depends on how long steps take.) There are deliberately too few
# pages for the cache, so some requests are *preempted*: they lose their pages and start again later.
#
# The book's JetStream has three methods. Prefill and generate are one pass here, over new tokens of prompts and of
# sequences. Insert costs nothing, because a prompt's keys and values are written into pages that later steps read.

# %%
config = Config("small", L=2, D=32, F=64, N=4, K=2, H=8, V=64)
params = transformer.init(config, page.args.seed, torch.float64)
g = torch.Generator().manual_seed(page.args.seed)
prompts = [tuple(torch.randint(0, config.V, (n,), generator=g).tolist()) for n in (9, 4, 14, 6, 11)]
small = [(0.0, Request(id, prompt, 6)) for id, prompt in enumerate(prompts)]
alone = serve.generate(params, prompts, config, 6)
page.title("Five requests in the engine")
for policy in POLICIES:
    options = Options(pages=8, page=4, slots=3, budget=8, policy=policy)
    real = engine.serve(params, config, small, options)
    given = [real.requests[id].tokens for id in range(len(prompts))]
    same = simulate(small, options, modelled, token=lambda id, place, t=given: t[id][place - len(prompts[id])])
    if policy != "disaggregated":  # with two workers, the order depends on the times
        page.check(f"{policy}: steps", same.steps == real.steps)
    held = page.check(f"{policy}: tokens", [list(tokens) for tokens in given] == alone)
    again = sum(times.preempted for times in real.requests.values())
    page.say(f"{policy}: {len(real.steps)} steps; requests preempted: {again}; the same tokens as alone: {held}")

# %% [markdown]
# ## Prefix caching
# Prefill is expensive, and chats often begin with the same tokens: the system's instructions, or the chat so far. A
# token's keys and values depend only on the tokens before it, so equal beginnings have equal caches and need to be
# computed only once. The price is memory for caches that nobody may ask for again, and that a chat must return to the
# server that has its cache.
#
# Here some chats share their first 1,000 tokens, and some are later turns of earlier chats. Pages of 16 tokens form a
# trie, a tree in which a prompt walks down its own tokens as far as they are cached. If memory is short, the page that
# has been unused for longest is dropped. The hits are compared with brute force over all earlier sequences.

# %%
system, chats, turns = tuple(range(1000)), [], []
for id in range(12):
    earlier = chats[draw.randrange(len(chats))] if chats and id % 2 else system
    chats.append((*earlier, *(10**6 + 1000 * id + i for i in range(draw.randrange(100, 300)))))
    turns.append((3.0 * id, Request(id, chats[-1], 8)))
hits = {p: simulate(turns, Options(pages=2000, page=16, slots=4, prefix=p), modelled) for p in (True, False)}


def common(a: tuple, b: tuple) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def brute(id: int) -> int:
    """Return the tokens in whole pages that an earlier sequence shares; at least one token must be computed."""
    found = max((common(chats[id], earlier) for earlier in chats[:id]), default=0)
    return min(found, len(chats[id]) - 1) // 16 * 16


cached = [times.cached for times in hits[True].requests.values()]
mean = {prefix: sum(t.ttft for t in served.requests.values()) / len(turns) for prefix, served in hits.items()}
page.title("12 prompts with common beginnings")
page.same([("tokens found", "sum", sum(brute(id) for id in range(12)), sum(cached))],
          ["", "of pages", "by brute force", "by the trie"])  # fmt: skip
page.check("each hit is as brute force says", cached == [brute(id) for id in range(12)])
page.say(f"{sum(cached) / sum(map(len, chats)):.0%} of the prompts' tokens were cached; mean TTFT "
         f"{1e3 * mean[True]:.0f} ms, {1e3 * mean[False]:.0f} ms without")  # fmt: skip
dogs, cats = ("I", "like", "dogs"), ("I", "like", "cats")
page.answers([
    Answer("'I like cats' after 'I like dogs': share left to compute", "0.33", 1 - common(dogs, cats) / 3, "",
           "1/3, with pages of one token"),
    Answer("Host DRAM of 8 v5e for prefixes: caches of 8k tokens", "", int(450 * 2**30 // LOAD.kv(8192)), "",
           "450 GiB of int8 caches of LLaMA-3 70B, 1.34 GB each"),
])  # fmt: skip

# %% [markdown]
# ## Three prefill servers for each generation server
# How many servers of each kind does one need? In Part 8 a generation server runs 32 sequences with steps of 19 ms. Each
# needs 512 steps, so the server ends 32 / (0.019 x 512) = 3.3 sequences a second and needs as many new ones. A prompt
# of 8192 tokens takes a prefill server 0.91 s, so 3.3 x 0.91 = 2.99 of them keep up.
#
# The simulator confirms it. Prompts are always waiting, and r prefill servers are modelled as one that is r times as
# fast. Up to r = 3 each server adds sequences to a step, and a fourth adds hardly any. The simulation uses an eighth of
# the tokens and an eighth of a prompt's time, which has the same ratio and reaches its steady state sooner. (A step has
# a little less than its 32 sequences on average, because the batch fills at the start and empties at the end.)

# %%
count = 100 if page.small else 600
saturated, rows, batches = requests([(0.0, 8, 64)] * count), [], {}
for r in (1, 2, 3, 4, 6):

    def timed(action, r=r):
        return 0.0 if isinstance(action, Move) else 0.91 / 8 / r if action.worker == "prefill" else 0.019

    served = simulate(saturated, Options(pages=80, page=36, slots=32, policy="disaggregated", prefix=False), timed)
    runs = [span for span in served.spans if isinstance(span.action, Run)]
    busy = {w: sum(s.end - s.start for s in runs if s.action.worker == w) for w in ("prefill", "decode")}
    steps = [len(s.action.works) for s in runs if s.action.worker == "decode"]
    batches[r] = sum(steps) / len(steps)
    rows.append((r, served.throughput, batches[r], f"{busy['prefill'] / served.seconds:.0%}"))
page.title(f"{count} prompts, r prefill servers for one generation server")
page.table(rows, ["r", "tokens/s", "mean batch of a step", "prefill busy"])
page.check("a third server helps, a sixth hardly", batches[3] > 1.3 * batches[2] and batches[6] < 1.1 * batches[3])
page.answers([
    Answer("Prefill servers for each that generates", "3", serving.prefill_servers(0.91, 0.019, 32, 512), "", "2.99"),
])  # fmt: skip
page.end()

# %% [markdown]
# ## Three things to try
# 1. Edit: replace `mixed(LOAD, works, V5E, CHIPS)` by `mixed(LOAD, works, V5E, 2 * CHIPS)`. Which policy gains least?
#    Answer: Disaggregated: the six requests are done after 0.45 s in place of 0.65, and with the static policy after
#    0.53 s in place of 0.95. Requests waited least where prefill has chips of its own, and no policy can end long
#    before the last request has come.
# 2. Question: how many ms does a step take in which 32 sequences of 4,096 tokens decode beside a prompt of 1,000?
#    Evaluate `1e3 * serving.mixed(LOAD, [(1, 4096)] * 32 + [(1000, 1000)], V5E, CHIPS).seconds`.
#    Answer: 47: reading the caches takes 1.6 ms, and the FLOPs of 1,032 tokens the other 45.5.
# 3. Flag: run with `--plot ttft.svg`. At which share do interleaved and chunked cross?
#    Answer: About one half. With `--small` the curves lie on each other up to a quarter; the eighth of 16 requests
#    waits 90.9 ms chunked and 94.5 ms interleaved, and those after it a little longer chunked. The gain of chunks is in
#    decoding: the 95th percentile of TPOT is 20.5 ms in place of 25.7.
