"""Chapters run in this process, as scripts with a small size on a terminal of 80 columns, cell by cell if need be."""

import contextlib
import io
import os
import re
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

CHAPTERS = Path(__file__).parents[2] / "chapters"
ON_A_PAGE = (  # the chapters that are written on a scaling.book.page.Page
    "01_roofline",
    "02_tpus",
    "02_networking",
    "03_sharding",
    "03_products",
    "03_plans",
    "03_collectives",
    "03_timings",
    "03_overlap",
    "04_transformers",
    "04_problems",
    "04_flash_attention",
    "05_dp",
    "05_fsdp",
    "05_tp",
    "05_fsdp_tp",
    "05_pp",
    "05_pods",
    "05_context",
    "05_moe",
    "05_transformer",
    "05_muon",
    "05_latent_attention",
    "05_when_bound",
    "06_applied_training",
    "06_train_llama",
    "07_kv_cache",
    "07_bottlenecks",
    "07_sharded_decode",
    "07_decode_listing",
    "07_attention_by_data",
    "07_latent_decode",
    "07_engine",
    "07_speculative",
    "08_applied_inference",
    "09_profiling",
    "09_quiz",
    "10_modes",
    "10_shard_map",
    "10_collective_matmul",
    "10_problems",
    "12_gpus",
    "12_gpu_networks",
    "12_gpu_rooflines",
)


TRAIN = {  # those that train, and how the tests run them; .ci/run has all on their own meshes
    **dict.fromkeys(("05_dp", "05_fsdp"), "--steps 2 --mesh X=2"),
    "05_tp": "--steps 2 --mesh Y=2",
    "05_pods": "--steps 2 --mesh P=2,X=2",
    "05_pp": "--steps 2",
    "05_fsdp_tp": "--steps 2 --mesh X=2,Y=2",
    "06_train_llama": "--steps 3 --mesh X=2,C=2",
}
NOTEBOOK = "01_roofline"  # the one that the tests run as a notebook


@dataclass
class Ran:
    """What a chapter left: its names, its page and what it printed."""

    names: dict
    text: str
    code: int  # the exit status

    @property
    def page(self):
        return self.names["page"]


def source(name: str) -> str:
    return (CHAPTERS / f"{name}.py").read_text(encoding="utf-8")


def run(name: str, *options: str, code: str | None = None) -> Ran:
    """The chapter, or an edited text of it, with these options and `--small`."""
    path = str(CHAPTERS / f"{name}.py")
    names = {"__name__": "__main__", "__file__": path}
    options = (*TRAIN.get(name, "").split(), *options)
    columns, argv, handler = os.environ.get("COLUMNS"), sys.argv, signal.getsignal(signal.SIGTERM)
    os.environ["COLUMNS"], sys.argv, status = "80", [path, "--small", *options], 0
    try:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(compile(source(name) if code is None else code, path, "exec"), names)
    except SystemExit as error:
        status = error.code
    finally:
        sys.argv = argv
        signal.signal(signal.SIGTERM, handler)
        os.environ.pop("COLUMNS") if columns is None else os.environ.update(COLUMNS=columns)
    return Ran(names, out.getvalue(), status)


def marked_cells(name: str) -> list[tuple[str, str, str]]:
    """The chapter's cells in order: (what stands beside its mark, "markdown" or "code", text)."""
    found = re.split(r"^# %%(.*)\n", source(name), flags=re.M)
    assert found[0] == "", f"{name} begins with something that is in no cell"
    kinds = ["markdown" if "[markdown]" in mark else "code" for mark in found[1::2]]
    return list(zip(found[1::2], kinds, found[2::2], strict=True))


def cells(name: str) -> list[tuple[str, str]]:
    """The chapter's cells in order: ("markdown" or "code", text)."""
    return [(kind, text) for _, kind, text in marked_cells(name)]


def things_to_try(name: str) -> dict[str, str]:
    """The last cell's three: {"old": ..., "new": ..., "expression": ..., "flag": ...}."""
    cell = re.sub(r"\n# ?", "\n", source(name).split("# %% [markdown]")[-1])
    words = re.sub(r"\s+", " ", cell)
    assert words.startswith(" ## Three things to try 1. Edit: "), f"{name} does not end with three things to try"
    edit = re.search(r"1\. Edit: replace `(.+?)` by `(.+?)`", words)
    question, flag = (
        re.search(r"2\. Question: .*?Evaluate `(.+?)`", words),
        re.search(r"3\. Flag: run with `(.+?)`", words),
    )
    return {"old": edit[1], "new": edit[2], "expression": question[1], "flag": flag[1]}


def without_training(text: str) -> str:
    """A chapter's text without the cells that train: what is left is one layer."""
    found = re.search(r"^# %% \[markdown\]\n# ## (Four layers, and training|Training, by)", text, flags=re.M)
    return text[: found.start()] + text[text.index("page.end()") :] if found else text
