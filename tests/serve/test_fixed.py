"""Steps of fixed shapes give the tokens of `serve.decode`, each shape as one graph, in which the host reads nothing:
compiled, on meshes, in the engine, and captured where there is a GPU."""

import math
import os
import re
import subprocess
import sys
from collections import Counter
from typing import Any

import pytest
import test_tokens
import torch
from probes import shaken
from refused import read_table
from test_decode import CONFIGS
from torch._dynamo.utils import counters
from torch._inductor.utils import run_and_get_code
from torch.fx.experimental.proxy_tensor import make_fx

from scaling import serve, tree
from scaling.configs.attention import Linear
from scaling.mesh import Mesh
from scaling.models import hf, transformer
from scaling.serve import fixed
from scaling.serve.fixed import by_length, why_not
from scaling.serve.generate_command import arguments
from scaling.serve.loading import read_served
from scaling.serve.slots import Slots
from scaling.serve.types import ONE
from scaling.spec import FORMATS

LINEAR = CONFIGS["gqa"].with_(name="linear", linear=Linear(2, 4, 8, 8, 4, (0,)))
READS = ("_local_scalar_dense", "nonzero", "masked_select", "bincount")  # of values, by the host
LENGTHS = torch.tensor([5, 1, 7, 4])
B, T, ROOM = len(LENGTHS), 7, 256
PAGED, INT8 = {"page": 4}, {"dtype": torch.int8}
SMALL = FORMATS["nvfp4"]._replace(block=2)
SHORT = """
model     options
gqa
experts
deepseek  PAGED
rich      PAGED, dtype=torch.float8_e4m3fn, weights=SMALL
"""
SWEPT = f"""{SHORT.rstrip()}
mha
mqa
rich
latent
gqa       PAGED
rich      PAGED
latent    PAGED
window
latent    INT8 | PAGED
rich      INT8
experts   INT8 | PAGED, weights="int8"
deepseek  INT8
"""


def watched(graphs: list[Counter]):
    """A backend of torch.compile that runs a graph as it is, and notes the operations of each."""

    def backend(graph, inputs):
        found = make_fx(graph)(*inputs).graph.nodes
        graphs.append(Counter(str(node.target) for node in found if node.op == "call_function"))
        return graph

    return backend


def uncompiled(f, **options):
    """In place of torch.compile: the same shapes, and no time to compile them."""
    return f


def filled(name: str, mesh=None, form="heads", *, weights=None, **cache):
    """Prompts of LENGTHS: (params, the logits after them, the cache, whose pages of a row are in no order)."""
    config, params = CONFIGS[name], shaken(CONFIGS[name])
    params = serve.quantize(params, config, weights) if weights else params
    if mesh is not None:
        params = tree.shard(params, serve.specs(config, mesh, form=form, format=weights), mesh)
    held = serve.init_cache(config, B, ROOM, mesh=mesh, form=form, **cache)
    held |= {"pages": held["pages"].flip(1)} if "pages" in held else {}
    prompts = torch.randint(config.V, (B, T), generator=torch.Generator().manual_seed(1))
    return params, *serve.prefill(params, prompts, held, config, mesh, lengths=LENGTHS, form=form, donate=True)


def compared(mesh, name: str, form="heads", steps=20, tolerance=1e-12, compile=None, **cache) -> fixed.Steps:
    """Decode greedily by `serve.decode` and by fixed steps, one beside the other."""
    config = CONFIGS[name]
    params, logits, held = filled(name, mesh, form, **cache)
    _, _, other = filled(name, mesh, form, **cache)
    step = fixed.Steps(params, config, other, mesh, form, compile=compile)
    pages = other["pages"].tolist() if "pages" in other else ()
    for n in range(steps):
        ids = logits.argmax(-1)
        found = step([[id] for id in ids.tolist()], (LENGTHS + n).tolist(), pages)
        logits, held = serve.decode(params, ids, held, config, mesh, form=form, donate=True)
        assert (found - logits).abs().max() <= tolerance * logits.abs().max(), n
        assert torch.equal(found.argmax(-1), logits.argmax(-1)), n
    return step


def cases(table: str, steps: int, marks=()) -> list:
    rows = read_table(table, globals(), ("model",))
    return [pytest.param(steps, name, cache, marks=marks, id=", ".join((name, *cache))) for name, cache in rows]


@pytest.mark.parametrize(("steps", "name", "cache"), cases(SHORT, 10) + cases(SWEPT, 200, pytest.mark.sweep))
def test_tokens_are_those_of_decode_by_one_graph_that_reads_nothing(steps, name, cache, monkeypatch):
    monkeypatch.setattr(fixed, "LEAST", ROOM)  # one bucket, of all places and pages
    monkeypatch.setattr(fixed.Steps, "rounded", lambda self, n: n if n == 1 else ROOM // 4)
    torch._dynamo.reset()
    counters.clear()
    graphs: list[Counter] = []
    compared(None, name, steps=steps, compile=watched(graphs), tolerance=1e-6 if "dtype" in cache else 1e-12, **cache)
    assert counters["stats"]["unique_graphs"] == len(graphs) == 1
    assert not counters["graph_break"]
    assert not [op for op in graphs[0] if any(read in op for read in READS)]


def test_a_layer_with_a_window_reads_no_more_places_than_its_window(monkeypatch):
    """Of a bucket of 256 places, of rows of different lengths."""
    monkeypatch.setattr(torch, "compile", uncompiled)
    monkeypatch.setattr(fixed, "LEAST", ROOM)
    over, places = Slots.over, []
    monkeypatch.setattr(Slots, "over", lambda self, Q, K, *rest: places.append(K.shape[1]) or over(self, Q, K, *rest))
    config, params = CONFIGS["rich"], shaken(CONFIGS["rich"])
    step = fixed.Steps(params, config, serve.init_cache(config, 2, ROOM), compile="eager")
    step([[1], [2]], [9, 200])
    step([[1, 2, 3], [2]], [9, 200], every=True)
    assert places == [ROOM, 5, 3, ROOM, 5 + 3, 3 + 3]  # of 3 tokens, which are filled up to 4


@torch._dynamo.config.patch(recompile_limit=1)
def test_each_shape_is_one_graph():
    """However many there are: torch compiles one function 8 times at most, here once."""
    torch._dynamo.reset()
    counters.clear()
    config, params = CONFIGS["gqa"].with_(L=1), shaken(CONFIGS["gqa"].with_(L=1))
    step = fixed.Steps(params, config, serve.init_cache(config, 1, 64, page=4), compile="eager")
    for held in (3, 12, 15):
        step([[1]], [held], [[*range(8)]])
    step([[1, 2, 3]], [13], [[*range(8)]], every=True)
    assert counters["stats"]["unique_graphs"] == len(step.made) == 3
    assert not counters["graph_break"]


def test_a_step_of_many_tokens_through_experts_is_not_fixed(monkeypatch):
    monkeypatch.setattr(torch, "compile", uncompiled)
    monkeypatch.setattr(fixed, "EVERY", 4)
    config, params = CONFIGS["experts"], shaken(CONFIGS["experts"])
    step = fixed.Steps(params, config, serve.init_cache(config, 8, 4, page=4), compile="eager")
    for rows, made in ((8, 0), (5, 0), (3, 1), (4, 2)):
        step([[1]] * rows, [0] * rows, [[row] for row in range(rows)])
        assert len(step.made) == made


def test_compiled_as_torch_does_for_a_gpu():
    """Without inductor's code, which the next test has: what is written in place becomes a copy at the graph's end."""
    torch._dynamo.reset()
    compared(None, "gqa", compile="aot_eager", steps=3, page=4)


def inductors_allocations() -> None:
    """What inductor allocates is nothing of a layer's cache, let alone of the whole one."""
    step, (code,) = run_and_get_code(compared, None, "gqa", compile="inductor", steps=3)
    sizes = [eval(f"({shape})") for shape in re.findall(r"empty_strided_cpu\(\(([^)]*)\)", code)]
    assert len(sizes) > 4
    assert max(map(math.prod, sizes)) < step.cache["KV"][0, 0].numel() / 2


@pytest.mark.sweep
def test_what_inductor_allocates():
    """In a process of its own: one that was forked of a process with inductor's threads would wait for them."""
    path = os.pathsep.join(filter(None, sys.path))
    program = [sys.executable, "-c", "import test_fixed; test_fixed.inductors_allocations()"]
    done = subprocess.run(program, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("name", [*CONFIGS])
def test_on_the_meta_device_where_every_read_is_an_error(name, monkeypatch):
    monkeypatch.setattr(torch, "compile", uncompiled)
    config = CONFIGS[name]
    for int8 in (False, True):
        params = transformer.init(config, 0, torch.float32, "meta")
        params = serve.quantize(params, config) if int8 else params
        cache = serve.init_cache(config, B, 64, page=4, dtype=torch.int8 if int8 else torch.float32)
        step = fixed.Steps(params, config, tree.map(lambda x: x.to("meta"), cache), compile="eager")
        pages = [[*range(16 * b, 16 * b + 16)] for b in range(B)]
        assert step([[1], [2, 3], [], [4]], [5, 6, 0, 9], pages).shape == (B, config.V)
        assert step([[1], [2, 3], [], [4]], [5, 6, 0, 9], pages, every=True).shape == (B, 2, config.V)


CONFIGS |= {f"{name}, 1 layer": CONFIGS[name].with_(L=1) for name in ("gqa", "experts")}
COLUMNS = "mesh  model  form  options\n"
FEW = """
Z=2  gqa, 1 layer      sequence
E=2  experts, 1 layer  heads
"""
MORE = """
Y=2      gqa       heads
Z=2      gqa       sequence
E=2      experts   heads
X=2      rich      2d           PAGED | INT8
Y=2      deepseek  experts
Z=2      experts   heads_batch  PAGED
E=2,Y=2  deepseek  experts
Y=2      rich      heads        PAGED | INT8
Y=2      latent    heads
Y=2      mqa       heads        PAGED
Z=2      gqa       heads        PAGED
Z=2      gqa       heads_batch
Z=2      latent    sequence
Y=2,Z=2  gqa       heads_batch  PAGED
"""
MESHES, MORE = (read_table(COLUMNS + rows.strip(), globals(), ("model", "form")) for rows in (FEW, MORE))


def on_a_mesh(mesh, name, form, cache) -> dict[str, int]:
    """The collectives of the one graph."""
    torch._dynamo.reset()
    graphs: list[Counter] = []
    tolerance = 1e-6 if "dtype" in cache else 1e-12
    step = compared(mesh, name, form, steps=3, compile=watched(graphs), tolerance=tolerance, **cache)
    assert len(graphs) == len(step.made)
    assert not [op for graph in graphs for op in graph if any(read in op for read in READS)]
    return {op: count for op, count in graphs[0].items() if "c10d" in op}


@pytest.mark.parametrize("cases", [*([case] for case in MESHES), pytest.param(MORE, marks=pytest.mark.sweep)])
def test_on_a_mesh_collectives_are_in_the_graph(ranks, cases):
    for sizes, *rest in cases:
        found = ranks(on_a_mesh, sizes, *rest)
        assert found[0] == found[1]
        layers = CONFIGS[rest[0]].L if "Z" not in sizes or rest[1] != "heads" else 0  # by heads Z divides no layer
        assert sum(found[0].values()) >= max(1, 2 * layers)


@pytest.mark.parametrize("draft", [None, "ngram", "small", "near"])
def test_the_engine_and_generate(draft, monkeypatch):
    """Prefix hits, preemptions, two workers, sampling and drafts, in the traces in which everything happens."""
    init, made = fixed.Steps.__init__, []

    def of_fixed_shapes(self, *args, **options):
        init(self, *args, **options | {"compile": "eager"})
        made.append(self.made)

    monkeypatch.setattr(fixed.Steps, "__init__", of_fixed_shapes)
    monkeypatch.setattr(torch, "compile", uncompiled)
    test_tokens.test_random_traces(draft, 7 if draft == "small" else None, test_tokens.RICH)
    test_tokens.test_generate(draft)
    assert len({key for shapes in made for key in shapes}) > 12


GROUPS = """
lengths                    again  groups
[64] * 15 + [8192]         2600   [[*range(15)], [15]]
[8192] + [64] * 15         2600   [[*range(1, 16)], [0]]
# the weights take longer to read than what is saved
[64] * 15 + [8192]         90000  [[*range(16)]]
[64, 100, 128] * 5         0      [[*range(0, 15, 3), *range(1, 15, 3), *range(2, 15, 3)]]
[10] * 9 + [100, 1000] * 4  0      [[*range(9)], [9, 11, 13, 15], [10, 12, 14, 16]]
[7]                        0      [[0]]
[7]                        inf    [[0]]
"""


@pytest.mark.parametrize(("lengths", "again", "groups"), read_table(GROUPS, {"inf": math.inf, "range": range}))
def test_rows_are_split_by_length_where_that_halves_what_is_read(lengths, again, groups):
    assert by_length(lengths, again) == groups


@pytest.mark.parametrize("draft", [None, "ngram"])
def test_rows_that_are_computed_in_several_steps(draft, monkeypatch):
    monkeypatch.setattr(
        fixed, "by_length", lambda lengths, _: [*filter(None, ([*range(len(lengths))][i::2] for i in (1, 0)))]
    )
    test_tokens.test_random_traces(draft, None, test_tokens.RICH)


def test_what_is_not_captured_is_named():
    cuda = torch.device("cuda")
    assert why_not(CONFIGS["experts"], ONE, cuda) is None
    assert "linear" in str(why_not(LINEAR, ONE, cuda))
    assert "cpu" in str(why_not(CONFIGS["gqa"], ONE, torch.device("cpu")))


def test_the_commands_options(tmp_path, capsys, monkeypatch):
    hf.save(tmp_path, CONFIGS["gqa"], transformer.init(CONFIGS["gqa"]))
    args = arguments(["--model", str(tmp_path), "--prompt-ids", "1", "--compile", "--no-capture"])
    for why in (None, "it has linear layers"):
        monkeypatch.setattr("scaling.serve.loading.why_eager", lambda config, why=why: why)
        _, given = read_served(args).loaded(Mesh({}))
        assert (given["compile"], given["capture"]) == ("inductor", False)
        assert capsys.readouterr().err == (f"decode steps are not compiled: {why}\n" if why else "")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
@pytest.mark.parametrize("compile", [None, "inductor"])
def test_captured(compile):
    config = CONFIGS["rich"]
    params = tree.map(lambda x: x.to("cuda", torch.float32), shaken(config))
    prompts = [[1, 2, 3, 4, 5], [6], [7, 8, 9, 10, 11, 12, 13]]
    ways: list[dict[str, Any]] = [{}, {"page": 4}, {"page": 4, "draft": "ngram"}, {"temperature": 0.8}]
    for way in ways:
        wanted = serve.generate(params, prompts, config, 60, capture=False, **way)
        assert serve.generate(params, prompts, config, 60, compile=compile, **way) == wanted
