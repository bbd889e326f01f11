"""The page that walks through a training step names the files that a step enters, in their order."""

import re
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from machine import on_ranks

import scaling
from scaling.configs import Config
from scaling.models import transformer as model
from scaling.strategies import transformer

ROOT = Path(scaling.__file__).parent
PAGE = ROOT.parent / "docs" / "a-training-step.md"
ASIDE = """
    strategies/transformer/step.py strategies/transformer/types.py models/leaves.py collectives/lines.py
    strategies/transformer/stages.py strategies/pipeline.py models/latent.py
"""  # of a first step, of stages, and of other models
ONE_IDEA = {"__init__", "wait", "gather", "exchange", "forward"}  # of one thing in several classes


@on_ranks({"X": 2, "Y": 2})
@pytest.mark.slow
def test_a_step_enters_the_files_in_the_order_of_the_page(mesh):
    """No two functions on the way have one name."""
    config = Config("tiny", L=2, D=32, F=64, N=4, K=2, H=8, V=64)
    params = transformer.shard(model.init(config, 0), config, mesh)
    tokens = torch.arange(34).view(2, 17)
    entered: dict[str, None] = {}
    functions = set()

    def note(frame, event, arg):
        if event == "call" and frame.f_code.co_filename.startswith(str(ROOT)):
            entered.setdefault(Path(frame.f_code.co_filename).relative_to(ROOT).as_posix())
            functions.add(frame.f_code)

    for profile in (None, None, note):  # later steps enter fewer files than the first one
        sys.setprofile(profile)
        transformer.loss_and_grads(params, tokens[:, :-1], tokens[:, 1:], config, mesh)
        sys.setprofile(None)
    entered.pop("mesh/page.py", None)  # only if a rank waits long for another
    named = dict.fromkeys(name for name in re.findall(r"`([\w/]+/\w+\.py|tree\.py)`", PAGE.read_text(encoding="utf-8")))
    assert all((ROOT / name).exists() for name in named)
    assert [name for name in named if name not in ASIDE.split()] == list(entered)
    names = Counter(code.co_name.strip("_") for code in functions if not code.co_name.startswith("<"))
    assert {name for name, count in names.items() if count > 1} <= {name.strip("_") for name in ONE_IDEA}
