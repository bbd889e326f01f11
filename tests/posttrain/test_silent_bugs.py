"""Published silent bugs of post-training, planted by an edit of the source and run by the command: each is refused, or
a metric or a comparison with one device shows it. docs/museum.md has the table."""

import importlib
import sys
from pathlib import Path
from types import FunctionType, ModuleType
from typing import NamedTuple

import pytest
from grpo import EXPERTS, SIZES, STEP, plain, run, write_folder
from runs import records

from scaling.common import console

ROOT = Path(__file__).parents[2]
LOOP, DRAW = "scaling/posttrain/loop.py", "scaling/serve/generation.py"
EXPERT = "scaling/strategies/expert/layer.py"
MARIN = "Open-Athena/MarinFold"
SHOWN = {
    "gap_max": "metric gap_max: the two sides' log-probabilities differ",
    "kl": "metric kl: it stays 0",
    "loss": "the losses are not those of one device",
}


class Bug(NamedTuple):
    """A bug: its name, where it was reported, {file: {text: the text with the bug}}, what shows it (a metric of SHOWN,
    or words of a refusal), and the flags, sizes and number of steps that lead to it."""

    name: str
    there: str
    edits: dict[str, dict[str, str]]
    seen: str
    flags: str = ""
    sizes: str = SIZES
    steps: int = 2


BUGS = (
    Bug("a prefix cache that keeps pages of old weights", "InternLM/lmdeploy#4917 radixark/miles#2782", {DRAW: {
        "    engine = Engine(params, config, options, mesh=mesh, draft=draft, form=form, paged=paged, **more)\n":
            "    engine = KEPT.setdefault('engine', Engine(params, config, options, mesh=mesh, form=form, **more))\n"
            "    for pool in engine.model.pools.values():\n        pool.params = params\n"
            "    first = KEPT['first'] = KEPT.get('first', -len(rows)) + len(rows)\n",
        "[Request(row, tuple": "[Request(first + row, tuple",
        "failed = scheduler.initial(options)": "failed = KEPT.get('state') or scheduler.initial(options)",
        "        if not events:\n": "        if not events:\n            KEPT['state'] = state\n",
        "[(row, own.tokens, own.logits) for row,": "[(row - first, own.tokens, own.logits) for row,",
        "    size, ahead = page or S,": "    size, S, ahead = 1, 99,", "prefix=False": "prefix=True",
        "\n\nclass Token": "\n\nKEPT = {}\n\n\nclass Token"}}, "gap_max", steps=3),
    Bug("weights that are not sent after an update", f"{MARIN}#236", {LOOP: {
        "        weights = push_weights(frozen | params if trains else None, settings, meshes)\n        ends":
            "        ends"}}, "gap_max"),
    Bug("layers that arrive in another order", f"{MARIN}#236", {LOOP: {
        "W.detach() for": "W.detach().flip(0) for"}},
        "more than 1e-09, the rounding of fp64", "--check --train-mesh X=2,Y=2"),
    Bug("adapters that are left out where weights are sent", "", {LOOP: {
        "tree.leaves(with_adapters(params, settings, meshes.train))":
            "tree.leaves({name: W for name, W in params.items() if name != 'lora'})"}}, "gap_max", "--lora 2"),
    Bug("log-probabilities of a distribution cut by top-p, renormalized", "huggingface/trl#6789", {
        LOOP: {"Sampling(temperature=1.0)": "Sampling(temperature=1.0, top_p=0.9)"},
        DRAW: {"    found = iter(":
                   "    wide = probabilities(wide, Sampling(temperature=1.0, top_p=0.9)).log()\n    found = iter(",
               "import sample\n": "import probabilities, sample\n"}}, "gap_max"),
    Bug("log-probabilities of the token before", "huggingface/trl#6789", {LOOP: {
        "old[:, 1:]": "old[:, :-1]"}}, "gap_max"),
    Bug("a token of the prompt is counted as drawn", "Snowflake-AI-Research/Arctic-Platform#55", {LOOP: {
        "mask[:, 1:]": "(mask | mask.roll(-1, 1))[:, 1:]"}}, "gap_max"),
    Bug("each rank divides by its own tokens", "Snowflake-AI-Research/Arctic-Platform#55 allenai/open-instruct#1161",
        {LOOP: {"drawn if asked.mean": "lengths.sum() if asked.mean"}},
        "the tokens' shares of the loss add up to 2, not to 1", "--train-mesh X=2"),
    Bug("padding of the vocabulary is drawn", f"{MARIN}#237", {LOOP: {
        "    return tree.unflatten(transformer":
            "    found[-1] = torch.nn.functional.pad(found[-1], (0, 64))\n"
            "    return tree.unflatten(transformer"}},
        "U[D, V] has the shape (16, 256) on each device"),
    Bug("answers that are used in the wrong order", "", {LOOP: {
        "batch = queue.pop(0)": "batch = queue.pop()"}}, "its answers are of weights", "--staleness 2", steps=3),
    Bug("a reference model that is the one in training", "", {LOOP: {
        "tree.map(torch.clone, begun)": "begun"}}, "kl", "--beta 0.1"),
    Bug("serving ranks that draw by seeds of their own", "", {LOOP: {
        "number_of(settings.seed, step, i)": "number_of(settings.seed, step, i, meshes.serve.rank)"}},
        "elements are held by several devices along Y", "--serve-mesh Y=2"),
    Bug("routing that is replayed without a gradient", "ISEEKYAN/Megatron-LM#79", {EXPERT: {
        "weigh_vjp((dweights": "weigh_vjp((0 * dweights"}},
        "loss", "--train-mesh E=2", EXPERTS),
)  # fmt: skip


def plant(bug: Bug, patch: pytest.MonkeyPatch) -> None:
    """Give modules the functions and values of their edited sources."""
    for file, edits in bug.edits.items():
        module = importlib.import_module(file.removesuffix(".py").replace("/", "."))
        text = (ROOT / file).read_text(encoding="utf-8")
        for old, new in edits.items():
            assert text.count(old) == 1, (bug.name, old)
            text = text.replace(old, new)
        edited = ModuleType(module.__name__)
        exec(compile(text, file, "exec"), edited.__dict__)
        new = {name: value for name, value in vars(edited).items() if isinstance(value, FunctionType)}
        first = {name: vars(module)[name] for name, value in new.items() if value.__module__ == module.__name__}
        for each in [one for name, one in sys.modules.items() if name.startswith("scaling.")]:
            for name, value in first.items():
                if vars(each).get(name) is value:
                    patch.setattr(each, name, new[name])


def table() -> str:
    rows = [(i, bug.name, SHOWN.get(bug.seen, f"refused: {bug.seen}")) for i, bug in enumerate(BUGS, 1)]
    return console.table(rows, ["", "bug", "what shows it here"], 100)


def test_the_museum_has_the_table():
    page = (ROOT / "docs/museum.md").read_text(encoding="utf-8")
    assert table() in page
    for place in " ".join(bug.there for bug in BUGS).split():
        assert "https://github.com/" + place.replace("#", "/issues/") in page


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_silent_bug_is_seen(tmp_path, monkeypatch, capsys, bug):
    monkeypatch.chdir(tmp_path)
    made = write_folder(bug.sizes)
    answers = []
    for out in ("right", "planted"):
        code = run(f"{STEP} --steps {bug.steps} {bug.flags} --out {out}")
        said = capsys.readouterr()
        metric = [record[bug.seen] for record in records(out)] if bug.seen in SHOWN else []
        answers.append((code, metric, said.err + said.out * code))
        if out == "right":
            plant(bug, monkeypatch)
    (fine, right, _), (code, found, said) = answers
    assert fine == 0
    if bug.seen == "gap_max":
        assert max(right) < 1e-12
        assert max(found) > 1e-4
    elif bug.seen == "kl":
        assert right[-1] > 1e-6
        assert found[-1] == 0
    elif bug.seen == "loss":
        wanted = pytest.approx([loss for loss, _ in plain(*made, bug.steps)[0]], abs=1e-9)
        assert right == wanted
        assert found != wanted
    else:
        assert code == 1
        assert bug.seen in said
