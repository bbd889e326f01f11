"""What the oracles of greedy completions share: save a model, ask the other library, compare with ours, store."""

import json
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from storing import asked_to_store

from scaling import serve
from scaling.models import hf

sys.path.insert(0, str(Path(__file__).parents[1] / "serve"))
import stored


def compare(doc: str, table: stored.Table, theirs: Callable, completions: Callable, options: Mapping[str, dict]) -> int:
    """The command of an oracle, by its docstring: how many completions differ, by model and by option; 1 if any does.

    `theirs(folder, prompts)` asks the other library about the model saved in the
    folder; `completions(answer)` are the tokens of its answer. `options`: of `serve.generate`, by their names.
    """
    write, answers, wrong = asked_to_store(doc, table.path), {}, 0
    for name, config in table.configs.items():
        params, prompts = table.params_of(name), table.prompts_of(name)
        with tempfile.TemporaryDirectory() as folder:
            hf.save(folder, config, params)
            answers[name] = theirs(Path(folder), prompts)
        wanted = completions(answers[name])
        differ = {}
        for label, given in options.items():
            ours = serve.generate(params, prompts, config, table.new, **given)
            differ[label] = sum(a != b for a, b in zip(ours, wanted, strict=True))
        wrong += sum(differ.values())
        print(f"{name:10} {len(prompts)} prompts, completions that differ: {differ}")
    if write:
        rows = ",\n".join(f'"{name}": {json.dumps(row, separators=(",", ":"))}' for name, row in answers.items())
        table.path.write_text(f"{{\n{rows}\n}}\n")
    return 1 if wrong else 0
