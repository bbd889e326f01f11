"""tests/benchmarks/gpu.py without a GPU: a part goes on past what fails, and names it; equalities can fail."""

import importlib
import itertools
import sys
from pathlib import Path

import pytest
from machine import SOON, Forked, on_ranks, ranks_of_torchrun

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path.append(str(BENCHMARKS))

import gpu  # noqa: E402
import gpu_equal  # noqa: E402
import gpu_table  # noqa: E402

from scaling import collectives  # noqa: E402

FAILING = """
import os, time, torch.distributed as dist
def cases_rates(device, tiny):
    def fails(): raise ValueError("of its own accord")
    return {"first": lambda: [{"what": "a", "rate": 1.0}], "raises": fails, "hangs": lambda: time.sleep(600),
            "after": lambda: [{"what": "b", "rate": 2.0}], "dies": lambda: os._exit(3)}
def cases_equal(device, tiny):
    dist.init_process_group("gloo")
    def alone():
        if dist.get_rank() == 1: raise ValueError("one rank alone")
        time.sleep(600)
    return {"alone": alone}
"""


def forks(command: list[str], limit: float) -> tuple[int, list[str]]:
    """What `last_words` does, by forks of this process, which has imported torch."""
    several = "--standalone" in command  # torchrun's options before the script

    def program():
        sys.argv = command[6 if several else 1 :]
        sys.exit(gpu.main())

    processes = ranks_of_torchrun(lambda: Forked(program)) if several else [Forked(program)]
    said = [process.communicate(SOON)[0].splitlines() for process in processes]
    return max(process.returncode for process in processes), said[0]


def cases_of(name: str, ranks: int, count: int, folder: Path, monkeypatch) -> dict[str, dict]:
    """The first `count` cases of a part, each of which may take a second."""
    (folder / "failing.py").write_text(FAILING)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(gpu, "last_words", forks)
    cases = gpu.start_part(name, "failing", "cpu", ranks, limit=90, each=1)
    return {case["case"]: case for case in itertools.islice(cases, count)}


def test_the_last_words_and_the_end_of_a_process():
    quick = [sys.executable, "-S", "-c"]
    assert gpu.last_words([*quick, "print(7)\nraise SystemExit(3)"], SOON) == (3, ["7"])
    assert gpu.last_words([*quick, "import time; time.sleep(600)"], 0.1) == (None, [])


def written(parts: dict, about: dict, device: str) -> str:
    """The tables, of which columns are wide as they need to be."""
    return " ".join(gpu_table.markdown({"parts": parts, "about": about, "device": device, "ranks": 1}).split())


@pytest.mark.slow
def test_a_part_goes_on_past_what_raises_dies_and_hangs(tmp_path, monkeypatch):
    cases = cases_of("rates", 1, 5, tmp_path, monkeypatch)
    assert list(cases) == ["first", "raises", "hangs", "after", "dies"]
    assert [name for name, case in cases.items() if "failed" in case] == ["raises", "hangs", "dies"]
    assert cases["raises"]["failed"][-1] == "ValueError: of its own accord"
    assert "exit code 3" in cases["dies"]["failed"][0]
    assert "failing.py" in " ".join(cases["hangs"]["failed"])  # where it hung
    text = written({"rates": {"ranks": 1, "cases": list(cases.values())}}, {"devices": []}, "cpu")
    assert all(row in text for row in ("| rates | hangs |", "| b | 2 |"))


@pytest.mark.slow
def test_a_rank_that_raises_alone_is_named(tmp_path, monkeypatch):
    cases = cases_of("equal", 2, 1, tmp_path, monkeypatch)
    assert cases["alone"]["failed"][-1] == "ValueError: one rank alone"


@on_ranks({"X": 2})
def test_equalities_find_a_wrong_transpose_and_a_wrong_value(mesh):
    """What the equalities say of an AllReduce whose gradient is the identity, as that of torch's own under torch.func;
    and of one that is twice too large."""
    right = collectives.all_reduce

    def identity(line, x, mesh, op="sum", **options):
        found = right(line, x, mesh, op=op, **options)
        if op != "sum" or "{U_X} -> " not in line or "donate" in options:
            return found
        return x + (collectives.wait(found) - x).detach()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu_equal, "DRAWN", 16)
        patch.setattr(collectives, "all_reduce", identity)
        with pytest.raises(ValueError, match=r"<w, f\(x\)> and <f'\(w\), x>"):
            gpu_equal.drawn("all_reduce", mesh)
        patch.setattr(collectives, "all_reduce", lambda line, x, *rest, **options: right(line, 2 * x, *rest, **options))
        with pytest.raises(ValueError, match="another number"):
            gpu_equal.drawn("all_reduce", mesh)


def test_the_tables_of_a_gpu():
    """Of figures as a GPU gives them: the shares are of the book's table, and a case that failed is in none of them."""
    rows = {
        "train": {"model": "m", "how": "eager", "tokens": 10, "flops": 0.99e12, "ranks": 1, "sides": ["ours", "tuned"],
                  "ms": {"ours": [1, 2, 3]}, "MB": {"ours": 1}, "ratio": {}, "failed": {"tuned": "out of memory"}},
        "equal": {"kind": "gather", "line": "right, leaf", "calls": 3},
        "decode": {"B": 1, "T": 2, "side": "ours", "prefill": 1.0, "decode": 1.0, "bytes": 3.4e11, "flops": 1.0},
    }  # fmt: skip
    parts = {name: {"ranks": 1, "cases": [{"case": "c", "seconds": 1, "rows": [row]}]} for name, row in rows.items()}
    parts["equal"]["cases"][0]["rows"] += [
        {"kind": "gather", "line": said, "calls": 5} for said in ("right, vjp", "refused", "loud in vmap: an error")
    ]
    about = {"devices": [{"name": "NVIDIA H100 80GB HBM3", "GB": 80}], "torch": "2", "cuda": "13", "nccl": "2"}
    text = written(parts, about, "cuda")
    shares = "50.0%", "10.0%"  # 0.99e12 FLOPs in 2 ms of 9.9e14 a second; 3.4e11 bytes/s of 3.4e12
    assert "| gather | 8 |" in text  # those that are right
    assert all(part in text for part in (*shares, "1 x NVIDIA H100 80GB HBM3", "| train | c: tuned | out of memory |"))


@pytest.mark.slow
def test_it_needs_torch_numpy_and_optree_alone():
    """Every part's module can be imported where the extras cannot."""
    absent = "matplotlib", "transformers", "safetensors", "tokenizers", "huggingface_hub", "hypothesis"
    modules = {part.module for part in gpu.PARTS.values()} | {"gpu", "gpu_table"}

    def imports() -> None:
        again = "scaling", "misuse", *modules
        for name in [name for name in sys.modules if name.partition(".")[0] in again]:
            del sys.modules[name]
        sys.modules.update(dict.fromkeys(absent))
        for module in sorted(modules):
            importlib.import_module(module)

    process = Forked(imports)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0, out
