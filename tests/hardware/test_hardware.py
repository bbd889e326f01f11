import pickle
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from refused import evaluated, refused

from scaling import cost
from scaling.hardware import Level, Measured, chip, chips, load_chip, systolic
from scaling.hardware.catalogue import registry


def test_every_chip_and_variant_can_be_read():
    for name in chips():
        one = chip(name)
        assert one.source
        assert hash(one) == hash(pickle.loads(pickle.dumps(one)))
        assert all(chip(name, variant) != one for variant in registry()[name].get("variants", ()))


def test_tables_of_the_book():
    for name, *of_part_2 in (  # pod, HBM, HBM/s, bf16, int8, link one-way
        ("v3", (32, 32), 32e9, 9.0e11, 1.4e14, 1.4e14, 1.0e11),
        ("v4p", (16, 16, 16), 32e9, 1.2e12, 2.75e14, 2.75e14, 4.5e10),
        ("v5p", (16, 20, 28), 96e9, 2.8e12, 4.59e14, 9.18e14, 9.0e10),
        ("v5e", (16, 16), 16e9, 8.2e11, 1.97e14, 3.94e14, 4.5e10),
        ("v6e", (16, 16), 32e9, 1.6e12, 9.20e14, 1.84e15, 9.0e10),
        ("7x", (4, 4, 576), 192e9, 7.4e12, 2.30e15, 4.61e15, 9.0e10),
    ):
        c = chip(name)
        assert [c.pod, c.hbm_bytes, c.hbm_bw, c.flops("bf16"), c.flops("int8"), c.link_bw] == of_part_2
        assert c.ici_bw == 2 * c.need("link_bw")
    for name, *of_part_12 in (  # HBM, HBM/s, bf16, fp8, node's link
        ("a100", 80e9, 2.0e12, 3.1e14, 6.2e14, 300e9),
        ("h100", 80e9, 3.4e12, 9.9e14, 2.0e15, 450e9),
        ("h200", 141e9, 4.8e12, 9.9e14, 2.0e15, 450e9),
        ("b200", 192e9, 8.0e12, 2.3e15, 4.5e15, 900e9),
    ):
        c = chip(name)
        assert [c.hbm_bytes, c.hbm_bw, c.flops("bf16"), c.flops("fp8"), c.bandwidth("node")] == of_part_12
    egress = {name: (chip(name).node_gpus, chip(name).bandwidth("scale-out")) for name in ("h100", "b200", "gb200")}
    assert egress == {"h100": (8, 400e9), "b200": (8, 400e9), "gb200": (72, 3600e9)}
    # Variants are the other values of the text; what one does not name stays
    assert [chip("v6e", "part1").flops(dtype) for dtype in ("bf16", "int8")] == [9.1e14, 1.84e15]
    assert chip("v4p", "part2").hbm_bw == 1.23e12


def multiplied(x, w, n=2):
    return systolic.systolic_matmul(torch.ones(x), torch.ones(w), n)


PODLESS, NODE = replace(chip("v5e"), pod=None), replace(chip("h100"), levels=chip("h100").levels[:1])
LACKS = {  # what is asked for: what is said
    "chip('v6e', 'part9')": "no variant 'part9': it has part1, part2, feb2025",
    "chip('v9')": "unknown chip 'v9'\n  fix: ",
    "chip('v5e').flops('int4')": "v5e has no FLOPs/s for int4: its table has bf16, int8",
    "chip('v100').flops()": "v100 has no FLOPs/s for bf16: its table has no dtype at all",
    "chip('v5p').bandwidth('ici', axes=4)": "4 axes: v5p has 3",
    "chip('h100').bandwidth('ici')": "h100 (gpu) has no axes",
    "chip('v5p').bandwidth('node')": "v5p (tpu) has no levels", "NODE.bandwidth('scale-out')": "beyond the node\n",
    "NODE.levels_for(16)": "16 GPUs: nothing is known of h100's network beyond the node of 8; fix:",
    "chip('v5p').bandwidth('ethernet')": "link = 'ethernet'", "chip('7x').bandwidth('pcie')": "has no pcie_bw",
    "chip('v5e').wraps(32)": "slice 32: a pod of v5e is 16x16", "chip('v5e').wraps((4, 4, 4))": "3 axes: v5e has 2",
    "chip('v5e').wraps((4, 0))": "length = 0: must be a whole number",
    "multiplied((2, 3), (4, 2))": "X[2, 3] W[4, 2]\n  fix: give two matrices",
    "multiplied((3,), (3, 2))": "X[3] W[3, 2]\n  fix: give two matrices",
    "multiplied((0, 3), (3, 2))": "X[0, 3] W[3, 2]\n  fix: give two", "multiplied((2, 3), (3, 2), n=0)": "n = 0",
    "cost.reduce_scatter(1e9, PODLESS, 8)": "fix: give wrap=True or wrap=False",
}  # fmt: skip
test_what_a_chip_lacks = refused(evaluated(LACKS, globals()))


def test_intensities_and_wraparound():
    assert chip("v5e").intensity("hbm") == pytest.approx(240, abs=0.5)
    assert [chip("v5p").intensity("dcn"), chip("v5p").intensity("ici", axes=3)] == [73440, 850]
    assert chip("v5e").bandwidth("line") == 4.5e10
    assert chip("h100").flops(torch.bfloat16) == chip("h100").flops("float16") == 9.9e14
    assert cost.reduce_scatter(1e9, PODLESS, 8, wrap=True) == cost.reduce_scatter(1e9, chip("v5e"), 8, wrap=True)
    for name, shape, rings in (
        ("v5e", (4, 4), (False, False)),
        ("v5e", (8, 16), (False, True)),
        ("v5e", 16, (True,)),
        ("v5p", (2, 2, 4), (False, False, False)),
        ("v5p", (4, 4, 8), (True, True, True)),
        ("v3", (32, 16), (True, False)),
    ):
        assert chip(name).wraps(shape) == rings


def read(folder, text, name="mine.toml"):
    """A chip from the text of its file."""
    (folder / name).write_text(text, encoding="utf-8")
    return load_chip(folder / name)


BOX = """
name = "box"
kind = "cpu"
hbm_bytes = 64e9
hbm_bw = 2e10
flops = { fp32 = 1e11 }
levels = [{ name = "node", degree = 4, link_bw = 5e9 }]
measured = [{ op = "AllGather", ranks = 2, latency = 1e-4, bandwidth = 1e9 }]
"""


def test_a_chip_is_read_from_its_file_and_may_stand_on_a_base(tmp_path):
    box, h100 = read(tmp_path, BOX), chip("h100")
    assert (box.name, box.kind, box.flops("float32"), box.node_gpus) == ("box", "cpu", 1e11, 4)
    assert box.levels == (Level("node", 4, 5e9),)
    assert box.measured == (Measured("AllGather", 2, 1e-4, 1e9),)
    assert chip(str(tmp_path / "mine.toml")) == box
    assert chip("TPU v5p") == chip("v5p")
    ours = read(tmp_path, 'base = "h100"\nhbm_bw = 3e12\n[flops]\nbf16 = 8e14\n', "ours.toml")
    expected = replace(h100, name="ours", source="", hbm_bw=3e12)
    assert replace(ours, peaks=()) == replace(expected, peaks=())
    assert (ours.flops("bf16"), ours.flops("fp8")) == (8e14, 2.0e15)
    ours = read(tmp_path, 'base = "h800"\nhbm_bytes = 96e9\n')  # which has one itself
    assert (ours.bandwidth("node"), ours.hbm_bytes, ours.flops("fp8")) == (300e9, 96e9, 2.0e15)
    assert ours.efficiency == h100.efficiency
    ours = read(tmp_path, 'base = "h100"\n[efficiency]\nlinks = 0.4\n')
    assert ours.efficiency == replace(h100.efficiency, links=0.4)


WRONG = [
    ("kind = ", "mine.toml: not a TOML file"),
    ("hbm_bw = 1e12", "mine.toml: kind = None: one of 'tpu'"),
    ('kind = "tpu"\nhbm = 1', r"unknown field \['hbm'\]"),
    ('kind = "tpu"\nflops = { bf17 = 1e12 }', r"unknown field \['bf17'\]"),
    ('kind = "asic"', "kind = 'asic'"),
    ('kind = "tpu"\nhbm_bw = -1.0', "hbm_bw is -1.0: must be in .0, inf."),
    ('kind = "tpu"\nflops = { bf16 = 0 }', "flops.bf16 is 0"),
    ('kind = "tpu"\nhbm_bw = "fast"', "hbm_bw is 'fast'"),
    ('kind = "tpu"\naxes = "two"', "axes is 'two'"),
    ('kind = "tpu"\naxes = 2\npod = [4, 4.5]', "pod is 4.5: must be a whole number"),
    (
        'kind = "gpu"\nlevels = [{ name = "node", degree = 8.0, link_bw = 1 }]',
        "levels.degree is 8.0: must be",
    ),
    ('kind = "gpu"\nlevels = 8', "mine.toml"),
    ('kind = "tpu"\naxes = 2\npod = [4, 4, 4]', "has 3 axes, but axes = 2"),
    ('kind = "tpu"\nwrap = "moebius"', "wrap is 'moebius'"),
    ('kind = "gpu"\nlevels = [{ name = "node", degree = 8 }]', "mine.toml.*link_bw"),
    ('base = "h1000"', "base = 'h1000': one of"),
    ('base = "h100"\nhbm_bytes = 80', "hbm_bytes is 80: too little in SI units"),
    ('base = "h100"\nflops = { bf16 = 989 }', "flops.bf16 is 989: too little in SI units"),
    ('base = "h100"\nlevels = [{ name = "node", degre = 8, link_bw = 1 }]', r"unknown field \['degre'\] in levels"),
    ('base = "h100"\nefficiency = { matmul = 1.2 }', "efficiency.matmul.bf16 is 1.2: must be in .0, 1."),
    ('base = "h100"\nefficiency = { matmuls = 0.5 }', r"unknown field \['matmuls'\] in efficiency"),
    ('kind = "gpu"\nhbm_bytes = 80e9\nflops = { bf16 = 1e15 }', "a gpu needs levels; fix:"),
    ('kind = "tpu"\naxes = 2', "a tpu needs hbm_bytes, link_bw, wrap, flops"),
]


@pytest.mark.parametrize(("text", "message"), WRONG)
def test_chip_files_that_are_wrong(tmp_path, text, message):
    with pytest.raises(ValueError, match=message):
        read(tmp_path, text)


@pytest.mark.slow
@settings(deadline=None, max_examples=30, derandomize=True)
@given(*[st.integers(1, 9)] * 3, st.integers(1, 5), st.integers(0, 100))
def test_a_systolic_array_multiplies_in_the_cycles_it_says(M, K, N, n, seed):
    g = torch.Generator().manual_seed(seed)
    X, W = (torch.randint(-9, 10, shape, generator=g).double() for shape in ((M, K), (K, N)))
    run = systolic.systolic_matmul(X, W, n)
    assert torch.equal(run.out, X @ W)
    assert run.cycles == systolic.cycles(M, K, N, n)
    assert run.utilization == M * K * N / (run.cycles * n * n) <= 1


def test_rows_enter_a_systolic_array_diagonally():
    frames = []
    systolic.systolic_matmul(torch.ones(2, 3), torch.full((3, 3), 5.0), 3, frames)
    assert systolic.draw(frames[1]) == ["1 0 .", "0 . .", ". . ."]
    assert systolic.draw(frames[3]) == [". . 1", ". 1 0", "1 0 ."]
    assert systolic.draw(frames[2], values=True) == [" .  5  5", "10 10  .", "15  .  ."]
    assert len(frames) == 2 + 2 * 3 - 2
