# %% [markdown]
"""Part 2, "TPU Networking": how chips are joined, how fast each channel is, and how far a message travels.
https://jax-ml.github.io/scaling-book/tpus#tpu-networking

This chapter compares the channels of a chip, counts the links of a torus, times collectives on slices with and without
wraparound, and answers Questions 5 and 6. The parts of one TPU are the subject of 02_tpus.py.
"""

# %% [markdown]
# ## Why a torus?
# Each TPU has links to its nearest neighbours only, four in two dimensions or six in three. GPUs are joined by
# switches, and each can send to any other in a few hops (12_gpu_networks.py). A torus gives that up: a message to a
# distant chip passes all chips between. In return it needs no network of switches, and a chip has the same links and
# the same bandwidth in a pod of 16 as in one of 8,960. Most collectives lose nothing by it, because they can be written
# as rings, in which a chip only ever talks to its neighbours (03_collectives.py).

# %%
import math

import torch

from scaling import cost
from scaling.book.answers import Answer
from scaling.book.layout import beside, format_number
from scaling.book.page import Page
from scaling.common.console import number as positive
from scaling.hardware import chip
from scaling.hardware.torus import Torus, slice_of
from scaling.show import svg

page = Page(__doc__, bytes=(64e6, "bytes of the array in the table of slices", positive(1)))
V5E, V5P, V4P = (chip(name) for name in ("v5e", "v5p", "v4p"))

# %% [markdown]
# ## The channels
# A chip reaches data through five channels, and each is slower than the one before: VMEM, the memory beside its cores;
# HBM, its main memory; ICI, the links to other chips of its pod; PCIe, to the memory of its host; and DCN, the
# datacenter's network to other hosts, of which the table has one chip's share. The figure for an ICI link counts one
# direction; on a ring a chip sends over two links, and so twice as fast. The second table gives the consequence: how
# many FLOPs a computation must do for each byte that goes over the channel, so that the channel is not what binds it.

# %%
CHANNELS = {"VMEM": "sram_bw", "HBM": "hbm_bw", "ICI, ring": "ici_bw", "ICI, link": "link_bw", "PCIe": "pcie_bw",
            "DCN": "dcn_bw"}  # fmt: skip
rates = {name: [getattr(chip(name), field) for field in CHANNELS.values()]
         for name in ("v3", "v4p", "v5p", "v5e", "v6e", "7x")}  # fmt: skip
page.title("The channels of a chip: bytes/s")
page.table([(name, *(format_number(rate) if rate else "-" for rate in row)) for name, row in rates.items()],
           ["TPU", *CHANNELS])  # fmt: skip
page.title("The bf16 FLOPs that each byte over a channel asks for")
page.table([(name, *(f"{chip(name).flops() / rate:,.0f}" if rate else "-" for rate in row))
            for name, row in rates.items()], ["TPU", *CHANNELS])  # fmt: skip

# %% [markdown]
# ## The torus
# Chips are joined to their neighbours only, so a message may take several hops. The picture gives the number of hops
# from one corner to every chip. On lines the far corner is six hops away. On rings the farthest chip is the one in the
# middle, and along each axis it is only half as far.


# %%
def hops_from_corner(torus: Torus) -> list[list[int]]:
    """Return the hops from chip (0, 0) to each chip of a 2D torus."""
    rows, columns = torus.shape
    return [[torus.distance((0, 0), (x, y)) for y in range(columns)] for x in range(rows)]


page.title("Hops from TPU{0,0}: 4x4 of lines (a slice of v5e), and as if of rings")
lines, rings = Torus((4, 4), (False, False)), Torus((4, 4), (True, True))
hops = {"lines": hops_from_corner(lines), "rings": hops_from_corner(rings)}
shaded = {name: [[(str(n), f"hsl(210,65%,{95 - 8 * n}%)") for n in row] for row in rows] for name, rows in hops.items()}
drawn = ["\n".join([name, *(" ".join(map(str, row)) for row in rows)]) for name, rows in hops.items()]
page.show(beside(drawn, gap=8), lambda: svg.grids(shaded.items(), 120, 120))

# %% [markdown]
# The table has slices, the parts of a pod that one can rent. Their bisection is what all links carry together between
# two halves of the slice. The next column is the time of an AllGather, and then comes an AllToAll, in which every chip
# sends a part of its array to every other one: each message is routed link by link, and the fullest link gives the
# time. The last column is the closed form for it, V max(axes)/(4 N W) on rings and twice that on lines, for V bytes in
# all, N chips, and W bytes/s of a chip on a ring. Compare 16 with 8 on a v5e, where only an axis of 16 is a ring.


# %%
def size(lengths) -> str:
    return "x".join(map(str, lengths))


V = page.args.bytes
page.title(f"Slices, and collectives of {format_number(V)} bytes over all their axes")
rows = []
slices = [(V5E, (16,)), (V5E, (8,)), (V5E, (4, 4)), (V4P, (4, 4, 4)), (V4P, (2, 2, 4))]
for hw, lengths in slices if page.small else [*slices, (V5E, (8, 16)), (V4P, (4, 4, 8))]:
    torus, formula = slice_of(hw, lengths), cost.all_to_all(V, hw, lengths)
    routed = max(torus.all_to_all_seconds(V, hw.link_bw), torus.diameter * hw.hop_latency)
    page.check(f"{hw.name} {size(lengths)}: routed AllToAll", math.isclose(routed, formula, rel_tol=1e-9))
    times = [f"{1e6 * t:.1f}" for t in (cost.all_gather(V, hw, lengths), routed, formula)]
    kinds = ["ring" if ring else "line" for ring in torus.wrap]
    joined = kinds[0] + "s" * (len(kinds) > 1) if len(set(kinds)) == 1 else ", ".join(kinds)
    cut = format_number(2 * torus.bisection_links * hw.link_bw)
    rows.append((hw.name, size(lengths), joined, torus.diameter, f"{torus.mean_distance:.2f}", cut, *times))
page.table(rows, ["chip", "slice", "axes", "most\nhops", "mean", "bisection\nbytes/s,\nboth ways", "AllGather\nus",
                  "AllToAll\nrouted", "formula\nus"])  # fmt: skip

# %% [markdown]
# ## The numbers of the text
# Each number of the text is compared with what the specifications and the torus give.


# %%
def yes(value: bool) -> str:
    return "yes" if value else "no"


opened, closed = (cost.all_gather(1e9, V5E, (16, 16), wrap=wrap) for wrap in (False, True))
page.answers([
    Answer("HBM/s over PCIe, v4p ('close to 100x')", "100", V4P.hbm_bw / V4P.pcie_bw, "times",
           "1.2e12 / 1.6e10 by the tables", hedged="close to 100x"),
    Answer("HBM/s of a v5p", "2.8e12", V5P.hbm_bw, "bytes/s"),
    Answer("ICI of a v5p 'per axis'", "9e10", V5P.ici_bw, "bytes/s", erratum=
           "9e10 is a link, one way; an axis has two links at a chip, as the table of interconnects says"),
    Answer("DCN of a v5p: a host's 25e9 bytes/s for each of its chips", "6.25e9", 200e9 / 8 / V5P.host_chips, "bytes/s",
           "Part 5: 200 Gbit/s a host"),
    Answer("Hops between the farthest two of 16 in a ring", "8", Torus((16,), (True,)).diameter, "hops"),
    Answer("Hops between the farthest two of 16 in a line", "16", Torus((16,), (False,)).diameter, "hops",
           "N - 1, which the book calls N"),
    Answer("Time without wraparound over time with it, 16x16", "2", opened / closed, "times", "2 (N - 1)/N"),
    Answer("v5e 8x16 wraps on the long axis only", "yes", yes(V5E.wraps((8, 16)) == (False, True))),
    Answer("v5p 2x2x4 has no wraparound", "yes", yes(not any(V5P.wraps((2, 2, 4))))),
    Answer("v5p 4x4x8 has wraparound on all axes", "yes", yes(all(V5P.wraps((4, 4, 8))))),
    Answer("Chips of a superpod of v4p, 16x16x16 of them", "4096", V4P.pod_chips),
    Answer("Chips of a superpod of v5p, 16x20x28 of them", "8960", V5P.pod_chips),
])  # fmt: skip

# %% [markdown]
# ## Question 5: bf16[8, 128, 8192] from TPU{0,0} to TPU{3,3} of a v5e 4x4
# How long does a message take if it crosses a slice? A corner of a 4x4 of lines has two links, and each carries half of
# the array. The hops delay the first byte by about 1 us each, and that latency adds to the time of the whole transfer.

# %%
torus, sent = slice_of(V5E, (4, 4)), torch.empty(8, 128, 8192, dtype=torch.bfloat16).nbytes
hops, ports = torus.distance((0, 0), (3, 3)), len(torus.neighbours((0, 0)))
first, whole = (1e6 * cost.point_to_point(nbytes, V5E, hops, ports) for nbytes in (0, sent))
by_book = 1e6 * 1.7e7 / 9e10
page.answers([
    Answer("5 bytes to send", "1.7e7", sent, "bytes"),
    Answer("5 the first byte arrives after", "6", first, "us", "six hops, routed"),
    Answer("5 bytes over bandwidth", "188", whole - first, "us", rounded=(by_book, "1.7e7 for the bytes")),
    Answer("5 the whole transfer", "194", whole, "us", rounded=(by_book + 6, "1.7e7 for the bytes")),
])  # fmt: skip

# %% [markdown]
# ## Question 6: int8[128Ki, 128Ki] from the hosts of a v5e 4x4 to TPU{0,0}, times bf16[8, 128Ki]
# A large array lies in the hosts' memory, in shards, and one chip needs all of it. The book loads the shards over PCIe
# and gathers them over ICI. The way that it rejects would send half of the array over the network between the hosts and
# all of it over one PCIe link: look at how long both would take. The last row is a warning: the whole array does not
# fit the chip's HBM, so it must be multiplied while it streams in.

# %%
side, hosts = 128 * 1024, 16 / V5E.host_chips
A, lacking = side**2, side**2 * 15 / 16  # bytes of the array, and of what TPU{0,0} lacks once all is loaded
op = cost.matmul(8, side, side, V5E.flops(), V5E.hbm_bw, ("bf16", "int8", "bf16"))
steps = {"PCIe": A / 16 / V5E.pcie_bw, "ICI": lacking / (ports * V5E.link_bw), "HBM": op.comms, "FLOPs": op.math}
ms = {name: 1e3 * seconds for name, seconds in steps.items()}
rejected = {"DCN": A / hosts / (V5E.host_chips * V5E.dcn_bw), "PCIe": A / V5E.pcie_bw}
slow = (1e3 * 15e9 / 9e10, "15 of 16e9 for 15/16 of 17.18e9 bytes")
page.answers([
    Answer("6 loading it over 16 PCIe links", "63", ms["PCIe"], "ms",
           rounded=(1e3 * 1e9 / 1.6e10, "16e9 for 17.18e9 bytes")),
    Answer("6 gathering it over TPU{0,0}'s ICI links", "167", ms["ICI"], "ms", rounded=slow),
    Answer("6 from HBM to the MXU", "20", ms["HBM"], "ms"),
    Answer("6 FLOPs", "1.4", ms["FLOPs"], "ms"),
    Answer("6 in all, overlapped: at least", "167", max(ms.values()), "ms", rounded=slow),
    Answer("6 in all, one after the other: at most", "", sum(ms.values()), "ms", "the sum of the four"),
    Answer("6 rejected: half of it over DCN between the hosts", "", 1e3 * rejected["DCN"], "ms",
           "through a host's eight shares of 3.125e9 bytes/s"),
    Answer("6 rejected: and all of it over one PCIe link", "", 1e3 * rejected["PCIe"], "ms",
           f"{rejected['PCIe'] / steps['PCIe']:.0f} times as long as over 16"),
    Answer("6 it fits the HBM of TPU{0,0}", "yes", yes(V5E.hbm_bytes >= A), "", erratum=
           f"{format_number(A)} > {format_number(V5E.hbm_bytes)} bytes: it must be streamed through"),
])  # fmt: skip
page.end()

# %% [markdown]
# ## Three things to try
# 1. Edit: replace `torus, sent = slice_of(V5E, (4, 4))` by `torus, sent = slice_of(V5E, (16, 16))`. In a whole pod the
#    axes are rings: how many links does the corner send through now, and what becomes of the 186 us of Question 5?
#    Answer: Four links, two in each direction of both axes, where a corner of lines has two. Each carries a quarter of
#    the array, so the time is half, 93 us.
# 2. Question: an AllToAll of 64 MB takes 88.9 us on a slice of 4x4. On 16x16 v5e, all rings, V max(axes)/(4 N W) is
#    11.1 us. Why does it take longer? Evaluate `1e6 * cost.all_to_all(64e6, V5E, (16, 16))`.
#    Answer: 16 us: so little goes over each link that the hops decide. The farthest chips of 16x16 rings are 8 + 8
#    hops apart, at 1 us each.
# 3. Flag: run with `--bytes 1e3`. Which number of the table do the times of so small an array repeat?
#    Answer: The most hops. A kilobyte takes no time on any link, so all collectives take a microsecond a hop.
