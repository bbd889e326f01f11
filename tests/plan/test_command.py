"""What the planner's commands say, in at most 100 columns, and how they end; what they say as JSON;
every option with values that it cannot have."""

import json
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from machine import ended
from refused import named, read_table
from test_serve import by_hand

from scaling.configs import get
from scaling.cost.serving import load
from scaling.cost.transformer import kv_cache_bytes, num_params
from scaling.hardware import chip
from scaling.plan import Job, __main__, explain, guide, plans
from scaling.plan.__main__ import main
from scaling.plan.job import Fixed, Question
from scaling.plan.one_layer import layer_chart, layer_passes, svg_of
from scaling.plan.report import Budget, bottlenecks
from scaling.plan.serve import command as serve_command
from scaling.plan.serve import published as serving

H100, L8, L70 = chip("h100"), get("llama3-8b"), get("llama3-70b")
POD = "--model llama3-70b --chip v5p --chips 8960 --batch 4M"
NODE = "--model llama3-70b --chip h100 --chips 8 --batch 512k"
SOME = "--model llama3-8b --chip h100 --chips 16 --batch 1M"
SERVE = "serve --model llama3-70b --chip v5e --context 8192"
SHORT = "serve --model llama3-8b --chip v5e --prompt 1000 --output 24"
LOAD = f"{SHORT} --chips 4 --rate 4 --requests 8 --policy interleaved"


# between bars what is said, among other things
SAID = """
arguments  exit status, and what is said
--model llama3-70b --chip v5p --chips 8960 --batch 4M
    0 Best of | X_opt = 1,619 (FSDP), 5.5 (TP) | Bound: | Forecast:
--model llama3-70b --chip v5p --chips 1024 --batch 4M --mesh fsdp=1024  0 FSDP 1,024 ring of 8
--model llama3-8b --chip h100 --chips 16384 --batch 128M --mesh data=16384  0 data 16,384 network
--model llama3-405b --chip h100 --chips 1024 --batch 1M
    0 data parallelism across nodes needs 2,475 | TP in a node stays compute-bound up to 24.2 ways
--model llama3-8b --chip h100 --chips 7 --batch 1M --failures  0 98.8% busy | one every 7,240 hours | Young 23 hours
--model llama3-70b --chip h100 --chips 8 --batch 512k  1 Nothing fits | chips: | Adam on the host
--model llama3-8b --chip rtx3090 --chips 4 --batch 64k
    1 Nothing fits | 8-bit Adam | Adam on the host | LoRA | QLoRA | holds
guide --model llama3-8b --gpu rtx4090  0 Take: LoRA, one GPU + checkpointing | QLoRA: | 42e6 params
guide --model llama3-8b --gpu h100 --gpus 1024  0 Take: FSDP | 16 stages + TP 8 + 1024
--model llama3-8b --chip h100 --chips 4096 --batch 4096 --mesh data=4096
    1 no plan: no mesh of 4,096 h100 suits llama3-8b: more replicas than the 1 sequences
--model llama3-8b --chip h100 --chips 64 --batch 1M --mesh tensor=64,pipe=1  1 TP does not divide the 32 heads
--model llama9 --chip v5p --chips 16 --batch 1M  2 unknown model
--model llama3-8b --chip v9 --chips 16 --batch 1M  2 unknown chip
--model llama3-8b --chip v5e --dtype fp8 --chips 16 --batch 1M  2 no FLOPs/s for fp8
--model llama3-70b --chip v5p --chips 8960 --batch 4M --mfu 2  2
--model llama3-70b --chip v5p --chips 8960 --batch 4M --headroom 0  2
--model llama3-70b --chip v5p --chips 8960 --batch 4M --batch 1e400  2
--model llama3-70b --chip v5p --chips 8960 --batch 4M --batch 4x  2
--model llama3-70b --chip v5p --chips 8960 --batch 4M --batch 4.2.1  2
--model llama3-70b --chip v5p --chips 8960 --batch 4M --mesh seq=2  2
--model llama3-70b --chip v5p --chips 8960 --batch 4M --dtype int4  2
--model llama3-70b --chip h100 --chips 8 --batch 512k --microbatches 100000
    1 100,000 microbatches are more than the 128 sequences
--model llama3-70b --chip h100 --chips 8 --batch 512k --microbatches 100 --mesh data=8
    1 100 microbatches are more than a replica's 16 sequences
--model llama3-70b --chip h100 --chips 8 --batch 512k --chips 4x8x8
    2 is a slice; fix: give the number of its chips, 256
--model llama3-70b --chip h100 --chips 8 --batch 512k --chips 8.5
    2 '8.5' is 8.5, not a whole number; fix: give 8 or 9
--model llama3-70b --chip h100 --chips 8 --batch 512k --mesh tensor=2,tensor=4  2 tensor is given twice
--model llama3-70b --chip h100 --chips 8 --batch 512k --mesh tensor=0  2 not an axis with its size
--model llama3-70b --chip h100 --chips 8 --batch 512k --pods 2
    1 h100 has no pods: replicas over its network are data=2
--model llama3-70b --chip h100 --chips 8 --batch 512k --mesh pod=2  1 h100 has no pods
--model llama3-70b --chip v5p --chips 8960 --batch 4M --pods 3  1 3 pods do not divide 8,960 chips
--model llama3-70b --chip h100 --chips 8 --batch 512k --mesh tensor=3  1 tensor=3 does not divide 8 chips
--model llama3-70b --chip h100 --chips 8 --batch 512k --zero 3 --mesh data=8  1 ZeRO-3 shards params, over fsdp
--model llama3-70b --chip v100 --chips 8 --batch 512k
    2 no dtype at all fix: choose a variant that has, such as v100:nvidia
--model llama3-8b --chip v100:nvidia --chips 8 --batch 512k --dtype fp16  0 Best of
--model llama3-70b --chip v100:amd --chips 8 --batch 512k  2 v100 has no variant 'amd': it has nvidia
--model llama3-8b --chip h100 --chips 6 --seq 8192 --batch 1M --mesh pipe=2,data=3  0 PP 2 x DP 3
--model llama3-70b --chip gb200 --chips 64 --batch 4M --mesh tensor=2,pipe=4  0 PP 4 x DP 8 x TP 2
--model llama3-70b --chip 7x --chips 256 --batch 4M  0 ring of 4 x ring of 8 x ring of 8
--model llama3-8b --chip rtx4090 --chips 16 --batch 1M  2 nothing is known of its network beyond the node
--model llama3-70b --chip mi355x --chips 8 --batch 512k --tokens 10G
    0 on 10e9 tokens | mi355x reaches, so the a100's share is
serv --model llama3-8b  2 there is no command 'serv' | guide, posttrain, published, serve
guide --model llama3-8b  2 --gpu rtx4090, or its memory
guide --model llama3-8b --memory 24  2 --memory 24 is less than 1 GB | as in --memory 24GB
guide --model llama3-70b --memory 24GiB  1 Nothing fits | too large for the 23.2 GB
published --only gpt-9  2 nothing is called 'gpt-9'
guide --model llama3-8b --gpu h100 --gpus 8  0 Take: FSDP
guide --model llama3-70b --gpu 4090 --gpus 2  1 Nothing fits | QLoRA | on 4 chips: TP 4 holds
guide --model llama3-8b --gpu h100 --gpus 16384 --sequences 32768  0 DDP 16384 1 145 GB
guide --model llama3-8b --gpu h100 --gpus 64 --sequences 8  0 8 sequences of 2,048 a step
guide --model llama3-8b --gpu v5p  2 --model llama3-8b --chip v5p --chips 1
serve --model llama3-70b --chip v5e --context 8192 --chips 16
    0 Take: | 4x4, 16 chips | no wraparound | KV cache int8 | Binds: | prefill servers | Others, as forecast:
    | What would change the most tokens | Latency against throughput, as forecast (balanced: | with weights alone
serve --model llama3-8b --chip v5e --prompt 1000 --output 24 --chips 4 --rate 4 --requests 8 --policy interleaved
    0 Simulated as forecast: 8 requests, 4 a second, interleaved on one slice
serve --model llama3-8b --chip v5e --prompt 1000 --output 24 --chips 4 --requests 8 --policy interleaved --rate 400
    0 such plans would serve 400
serve --model llama3-8b --chip h100 --chips 8 --context 1M --output 1 --rate 1e6 --requests 1
    0 1,000,000 a second | such plans would serve 1,000,000
    | tokens/s; TTFT p50 | ms the plan
serve --model llama3-70b --chip v5e --context 8192 --latency 1  1 nothing is fast enough: the fastest step is
serve --model llama3-70b --chip v5e --context 8192 --chips 16 --batch 4096
    0 Of 4,096 requests | fit at once in each replica; the others wait.
serve --model llama3-70b --chip v5e --context 8192 --chips 4
    1 nothing fits: weights and caches are 71.9 GB, at least 5 chips
serve --model llama3-70b --chip v5e --context 8192 --chips 3 --replicas 1
    1 no slice of 3 chips over 1 replicas fix: choose one of 1, 4, 8,
serve --model llama3-70b --chip v5e --context 8192 --chips 6
    1 at least 5 chips of 14.4 GB; 6 are no slice of v5e, but 1, 4, 8, 16,
serve --model llama3-70b --chip v5e --context 8192 --chip h100 --chips 3 --replicas 1
    1 N_YZ: N = 64 does not divide over 3 chips
serve --model llama3-70b --chip v5e --context 8192 --prompt 100 --output 200  2 is not --prompt 100 + --output 200
serve --model llama3-70b --chip v5e --context 8192 --output 8192  2 fix: give a context as long as prompt and output
serve --model llama3-70b --chip v5e --context 8192 --compute fp4  2 no FLOPs/s for fp4
serve --model llama3-70b --chip tpu-v5e --chips 16  0 Counted with 8,192 tokens a sequence
serve --model llama3-70b --chip 3090 --chips 2  1 nothing fits | fix: give --weights int4, which fits
serve --model llama3-8b --chip h100 --chips 0  2 '0' is not a whole number of at least 1
serve --model llama3-8b --chip h100 --chips -3  2 '-3' is not a whole number of at least 1
serve --model llama3-8b --chip h100 --chips 1.5  2 '1.5' is 1.5, not a whole number; fix: give 1 or 2
serve --model mixtral-8x7b --chip h100 --chips 1G  2 '1G' is more than 1,000,000,000 chips
serve --model mixtral-8x7b --chip h100 --chips 1e9 --context 8192  0 250,000,000 x 4
serve --model llama3-8b --chip h100 --batch 0  2 '0' is not a whole number of at least 1
serve published --only gpt-9  2 nothing is called 'gpt-9'
"""
SLOW = """
arguments  exit status, and what is said
--model llama3-70b --chip v5p --chips 35840 --batch 4M  0 pods
--model mixtral-8x7b --chip gb200 --chips 96 --batch 2M --dtype fp8  0 EP
--model llama3-8b --chip h100 --chips 16 --batch 1M --explain
    0 One layer in time | What else could be had | What would change the answer | half the memory
"""


def told(table: str) -> list[tuple[str, int, list[str]]]:
    cells = ((arguments, said.partition(" ")) for arguments, said in named(table).items())
    return [(arguments, int(code), re.split(r"\s+\|\s+", words)) for arguments, (code, _, words) in cells]


SAID = [*told(SAID), *(pytest.param(*case, marks=pytest.mark.slow) for case in told(SLOW))]
SAID += [("serve published", 0, ["none beats its bound", *serving.data()["sources"].values()])]


@pytest.mark.parametrize(("arguments", "code", "words"), SAID)
def test_what_a_command_says(capsys, arguments, code, words):
    found = ended(main, arguments.split())
    out, err = capsys.readouterr()
    assert found == code
    refused = code > 0 and "Nothing fits" not in words  # which is an answer
    assert bool(err) == refused
    assert [word for word in words if word not in " ".join((err if refused else out).split())] == []
    assert max(map(len, out.splitlines()), default=0) <= 100


HYBRID = {
    "model_type": "olmo_hybrid",
    "full_attention_interval": 4,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 48,
}
HYBRID |= {"num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "vocab_size": 151936}
HYBRID |= {"num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512}
SCOUT = {"model_type": "llama4_text", "hidden_size": 5120, "intermediate_size": 8192, "num_hidden_layers": 48}
SCOUT |= {"num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 202048}
SCOUT |= {"num_local_experts": 16, "num_experts_per_tok": 1}
WHERE = {"": "--chip v5p --chips 64 --batch 1M", "guide": "--gpu h100 --gpus 64", "serve": "--chip v5p --context 8192"}


@pytest.mark.parametrize("kind", WHERE)
def test_what_is_not_computed_is_said(kind, tmp_path, capsys):
    """12 of a hybrid's 48 layers have a cache: 24 KiB a token; Scout has 107.8e9 params, as its card says."""
    files = {name: tmp_path / f"{name}.json" for name in ("hybrid", "scout")}
    for file, table in zip(files.values(), (HYBRID, {"text_config": SCOUT, "model_type": "llama4"}), strict=True):
        file.write_text(json.dumps(table))
    hybrid, scout = (get(file) for file in files.values())
    assert (kv_cache_bytes(hybrid), load(hybrid).kv_token) == (24 * 1024, 24 * 1024)
    assert num_params(scout) == pytest.approx(107.8e9, rel=1e-3)
    for name, said in (("hybrid", "model_type 'olmo_hybrid'"), ("scout", "model_type 'llama4'")):
        main([*kind.split(), "--model", str(files[name]), *WHERE[kind].split()])
        assert f"Not computed here: {said}" in " ".join(capsys.readouterr().out.split())
    if kind != "guide":
        assert said in as_json(capsys, f"{kind} --model {files['scout']} {WHERE[kind]}")["uncomputed"]


def as_json(capsys, arguments, code=0, more=()):
    assert main([*arguments.split(), "--json", *more]) == code
    return json.loads(capsys.readouterr().out)


def test_a_plan_as_json(capsys):
    got = as_json(capsys, POD)
    assert got["fits"]
    assert got["closed_form"]["X_opt"] == pytest.approx(1618, rel=1e-3)
    assert got["closed_form"]["compute_bound"] == "FSDP+TP"
    assert got["closed_form"]["mixed_threshold"] == pytest.approx(113, abs=1)
    assert got["at_mfu"]["dollars"] == pytest.approx(got["at_mfu"]["days"] * 24 * 8960 * 4.2)
    best = got["best"]
    assert best["bound_seconds"] <= best["forecast_seconds"] == pytest.approx(sum(best["forecast"].values()))
    assert got["at_mfu"]["seconds"] * 0.4 == pytest.approx(best["mfu"] * best["forecast_seconds"])
    parts = {k: -v if k == "apart" else v for k, v in best["memory"].items() if k != "total"}
    assert best["memory"]["total"] == pytest.approx(sum(parts.values()))
    need = as_json(capsys, NODE, 1)["help"]
    assert need["missing"] == pytest.approx(need["held"] - 0.9 * 80e9)


@pytest.mark.slow
def test_reasons_as_json_and_one_layer_drawn(capsys, tmp_path):
    got = as_json(capsys, f"{SOME} --explain", more=["--svg", str(tmp_path / "layer.svg")])["explained"]
    assert set(got) == {"layer", "shares", "break_even", "pareto", "changes"}
    assert [part["pass"] for part in got["layer"]] == ["forward", "backward"]
    assert all(change["seconds"] or change["why"] for change in got["changes"])
    assert ET.parse(tmp_path / "layer.svg").getroot().tag.endswith("svg")


def test_a_plan_of_serving_as_json(capsys):
    got = as_json(capsys, f"{SERVE} --chips 8 --batch 32 --headroom 1 --form heads")["best"]
    assert (got["batch"], got["chips"], got["mesh"]) == (32, 8, {"Y": 8})
    assert got["step_seconds"] == pytest.approx(
        by_hand((2, 4), "heads", 8, 1, 32, (8192 - 512 / 2) * (1 + 4 / 128))[0]
    )  # with scales
    assert as_json(capsys, SHORT.replace("v5e", "h100"))["context"] == 1024
    simulated = as_json(capsys, LOAD)["simulated"]
    assert simulated["ttft_p50"] <= simulated["ttft_p95"]
    assert simulated["requests"] == 8


def test_the_ladder_is_climbed_as_the_model_grows():
    def taken(L, gpus):
        job = Job(L8.with_(L=L, V=32000), 32 * 2048, 2048)
        return guide.choose_rung(guide.climb(job, H100, gpus)).rung.name

    assert taken(2, 1) == "one GPU"
    assert taken(2, 8) == "DDP"
    assert taken(20, 8) in ("DDP", "FSDP")
    assert taken(32, 8) == taken(60, 8) == "FSDP"
    first = next(step for step in guide.climb(Job(L70, 32 * 8192, 8192), H100, 32) if step.found.fits)
    assert first.rung.name.startswith("FSDP + checkpointing")
    assert guide.climb(Job(L8, 2**16), H100, 2)[-1].rung.name == "FSDP + checkpointing + TP 2"


# --- Why: a layer in time, what else could be had, and what would change the answer

JOBS = read_table(
    """
job                                   chip    chips  fixed
Job(L70, 4 * 2**20)                   "v5p"   1024   Fixed()
Job(L70, 2**20)                       "h100"  64     Fixed((("fsdp", 8), ("tensor", 8)), remat="block")
Job(L8, 2**17, 2**16)                 "h100"  16     Fixed((("context", 8), ("tensor", 2)), remat="matmuls")
Job(get("mixtral-8x7b"), 256 * 4096)  "h100"  64     Fixed((("expert", 8),))
Job(get("deepseek-v3"), 2**23)        "h800"  256    Fixed(schedule="dualpipev")
""",
    globals(),
)


@pytest.mark.parametrize(("job", "name", "n", "fixed"), JOBS, ids=lambda x: x if isinstance(x, str) else None)
def test_the_layers_in_time_sum_to_the_forecast(job, name, n, fixed):
    found = plans(job, chip(name), n, fixed)[0]
    passes, parts = layer_passes(found), found.parts
    layers = found.layout.microbatches * float(found.compute.layers) * sum(part.seconds for part in passes)
    reached = found.network.chip.flops(job.wide) * found.network.chip.efficiency.of_matmul(job.wide)
    ends = found.layout.microbatches * 3 * float(found.compute.head) / reached
    rest = float(parts.bubble + parts.once + parts.update)
    assert layers + ends == pytest.approx(found.forecast - rest, rel=0.04)
    for part in passes:
        computed = sorted((bar for bar in part.bars if bar.row == "compute"), key=lambda bar: bar.start)
        assert all(a.end <= b.start + 1e-12 for a, b in pairwise(computed))
        for lane in part.lanes:
            bars = sorted((bar for bar in part.bars if bar.row == lane), key=lambda bar: bar.start)
            assert all(0 <= bar.start < bar.end <= part.seconds * (1 + 1e-9) for bar in bars)
        assert set(part.lanes[1:]) <= {entry.axis for entry in found.entries}
        assert all(0 <= share <= 1 + 1e-9 for share in part.hidden.values())


def test_weights_run_behind_a_layer_and_bind_where_links_are_slow():
    fixed = Fixed((("fsdp", 64),), zero=3, microbatches=1)
    fast, slow = (layer_passes(plans(Job(L8, 2**21), explain.links(H100, k), 64, fixed)[0]) for k in (1, 1 / 64))
    assert fast[0].hidden == {"fsdp": pytest.approx(1)}
    assert slow[0].hidden["fsdp"] < 0.7
    assert slow[0].seconds > 1.4 * fast[0].seconds


def test_the_drawings():
    job = Job(L70, 4 * 2**20)
    passes = layer_passes(plans(job, chip("v5p"), 1024, Fixed((("data", 256), ("tensor", 4))))[0])
    drawn = layer_chart(passes)
    assert max(len(line) for line in drawn.splitlines()) <= 100
    assert [line.split()[0] for line in drawn.splitlines()] == ["forward:", "compute", "tensor", "behind", "backward:",
                                                                 "compute", "tensor", "behind"]  # fmt: skip
    bars = [each for each in ElementTree.fromstring(svg_of(passes, "a < b")).iter() if each.get("stroke") == "#fff"]
    assert len(bars) == sum(len(part.bars) for part in passes)
    for part, kept in zip(passes, (bars[: len(passes[0].bars)], bars[len(passes[0].bars) :]), strict=True):
        end = max(float(each.get("x", 0)) + float(each.get("width", 0)) for each in kept)
        start = min(float(each.get("x", 0)) for each in kept)
        shares = sum(float(each.get("width", 0)) for each in kept) / (end - start)
        assert shares == pytest.approx(sum(bar.seconds for bar in part.bars) / part.seconds, rel=0.02)


def test_nothing_in_the_table_is_beaten():
    job = Job(L8, 2**20)
    found = explain.pareto_of_chips(Question(job, H100, 16), Budget(price=2.0))
    best = (planned := plans(job, H100, 16))[0]
    assert not re.search(r"\de\+\d", explain.text(planned, Budget(price=2.0)))  # thousands of days
    assert {one.chips for one in found} == {8, 16, 32}
    assert any(one.forecast <= 1.03 * best.forecast for one in found if one.chips == 16)
    choices = [explain.plan_costs(one, Budget(price=2.0)) for one in found]
    for one in choices:
        assert one[3] == pytest.approx(Budget().tokens / 2**20 * one[0] / 3600 * 2.0 * one[2])
        for other in choices:
            assert other == one or not all(x <= y for x, y in zip(other, one, strict=True))
    assert len({nbytes for _, nbytes, *_ in choices}) > 1


def test_what_would_change_the_answer_is_planned_again():
    job = Job(L8, 2**17)
    asked = {
        "half the batch": (replace(job, batch=2**16), H100, 16),
        "twice the batch": (replace(job, batch=2**18), H100, 16),
        "sequences of 4 times the length": (replace(job, seq=4 * 4096), H100, 16),
        "links half as fast": (job, explain.links(H100, 0.5), 16),
        "links twice as fast": (job, explain.links(H100, 2), 16),
        "half the memory": (job, replace(H100, hbm_bytes=40e9), 16),
        "twice the memory": (job, replace(H100, hbm_bytes=160e9), 16),
        "twice the chips": (job, H100, 32),
        "matmuls in fp8": (replace(job, dtype="fp8"), H100, 16),
    }
    fixed = Fixed((("tensor", 16),))
    found = {change.what: change for change in explain.changes(Question(job, H100, 16, fixed))}
    assert "no mesh" in found.pop("half the chips").why
    wanted = {what: plans(*question, fixed)[0] for what, question in asked.items()}
    assert {what: (change.found.forecast, change.found.room) for what, change in found.items()} == {
        what: (one.forecast, one.room) for what, one in wanted.items()
    }
    assert found["links half as fast"].found.per_chip < 0.8 * found["links twice as fast"].found.per_chip


def test_break_evens_are_where_the_axis_takes_as_long_as_computing():
    job = Job(L8, 2**20)
    found = plans(job, H100, 64, Fixed((("data", 64),), microbatches=1))[0]
    share = max(dict(part.axes)["data"] / part.math for part in found.cost.parts)
    [said] = explain.break_evens(found)
    assert f"{share:.0%} of computing" in said
    slower = plans(job, explain.links(H100, share), 64, Fixed((("data", 64),), microbatches=1))[0]
    assert max(dict(part.axes)["data"] / part.math for part in slower.cost.parts) == pytest.approx(1, rel=0.01)
    assert sum(share for _, share in bottlenecks(found)) == pytest.approx(1, abs=0.005)


WRONG = ("0", "8.5", "1e400", "nan", "", "3", "100000", "tensor=3", "data=2,pipe=-1")
ASKED = {
    "": (__main__._parser, "--model llama3-8b --chip h100 --chips 8 --batch 1M"),
    "guide": (guide._parser, "--model llama3-8b --gpu h100 --gpus 8"),
    "serve": (serve_command._parser, "--model llama3-8b --chip v5e --chips 4 --prompt 1000 --output 24"),
}


@pytest.mark.parametrize("kind", ASKED)
def test_every_option_with_a_wrong_value_ends_in_words_or_in_a_sound_plan(kind, capsys):
    make, given = ASKED[kind]
    for action in make()._actions:
        if action.nargs == 0 or action.dest in ("svg", "model", "requests", "rate"):
            continue
        for value in WRONG:
            arguments = [*kind.split(), *given.split(), f"{action.option_strings[-1]}={value}"]
            code = ended(__main__.main, arguments + ["--json"] * (kind != "guide"))
            out, err = capsys.readouterr()
            assert code in (0, 1, 2), (arguments, err)
            assert "Traceback" not in err
            assert code != 2 or "rror" in err, arguments
            if code == 0 and not kind:
                best = json.loads(out)["best"]
                assert best["bound_seconds"] <= best["forecast_seconds"], arguments
