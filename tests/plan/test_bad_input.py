"""Every option of the planner's commands with values that it cannot have."""

import json

import pytest
from machine import ended

from scaling.plan import __main__, guide
from scaling.plan.serve import command as serve_command

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
