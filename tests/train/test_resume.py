"""`--resume` goes on with what a checkpoint was made with, or refuses and leaves the run's folder as it is.

A run reads the data that it began with to its end, or, if that is asked for, a new epoch of other data."""

import itertools
import json
import math
import shutil
from pathlib import Path

import numpy
import pytest
import torch
from machine import ended
from refused import named
from runs import SMALL, TINY, losses, records, refusal, train, tree_of, write_text

from scaling.models import hf, transformer
from scaling.train import batches, command, dcp, loop
from scaling.train.corpus import Corpus
from scaling.train.record import option_changes, read_record
from scaling.train.settings import DTYPES

# by whoever finds it
WRONG = named("""
flags                           words of the refusal
--seed 5                        was begun with --seed 0, not 5
--seed 5 --lr 0.5               --seed 0, not 5
--optimizer muon                --optimizer adamw, not muon
--dtype fp64                    --dtype fp32, not fp64
--seq 8                         --seq 16, not 8
--valid 0.1                     --valid 0.05, not 0.1
--seq 8 --dtype bf16            --dtype fp32, not bf16; with --seq 16, not 8
--model other.toml              another model than other: L 1, not 2
--model tiny                    another model than tiny:
--data large.npy                other data: large.npy has changed (
--data short.txt --lr 0.5       --new-data if these data are meant
--data text.txt,text.txt        other data: 1 sources, not 2
--data large.npy --new-data     token 299 lies outside the vocabulary
--data short.txt --new-data     hold no sequence of 16
--data nowhere.txt              no such file
--data text.txt:0,short.txt     is not above 0
--tokenizer nowhere.json        no such file
--steps 2                       is at step 2 of 2
--mesh Q=2                      splits nothing
--mesh Y=3                      KV heads over Y=3
--batch 3 --microbatches 2      microbatches
--chip nowhere.toml             nowhere.toml
--plan                          needs to know the machine
--lr -1
--betas 0.9                     '0.9' is not two numbers
--betas 0.9,1                   is not two numbers from 0 to below 1
--label-smoothing 1.5
--z-loss -1
--min-lr 2
--data negative.npy --new-data  holds the id -1
--profile /dev/null/x
--no-such-flag
--no-eos --eos-id 0             exclude each other
""")
WRONG |= {} if torch.cuda.is_available() else {"--device cuda": "torch finds no GPU here"}


def test_a_refused_resume_leaves_the_folder_as_it_was(begun, capsys):
    """And a plain --resume goes on as if it had not been asked for."""
    Path("run/stop").touch()  # as an earlier run leaves it
    before = tree_of("run")
    for flags, words in WRONG.items():
        code = ended(train, f"--resume --steps 4 {flags}")
        said = capsys.readouterr().err
        assert code, flags
        assert words in said, flags
        assert "Traceback" not in said
        assert tree_of("run") == before, flags
    shutil.move("run/run.toml", "run.toml")
    assert "run.toml: is missing or cut short" in refusal(capsys, f"--resume --data text.txt {SMALL}")
    shutil.move("run.toml", "run/run.toml")
    assert train("--resume --steps 4") == 0
    assert losses("run") == losses("whole")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "words"), [("--data short.txt --new-data", "hold no"), ("--seed 5", "--seed 0, not 5")]
)
def test_ranks_that_refuse_leave_it_so_too(begun, capsys, flags, words):
    before = tree_of("run")
    assert train(f"--resume --steps 4 --mesh X=2 {flags}") == 1
    assert words in capsys.readouterr().err
    assert tree_of("run") == before
    assert train(f"--data short.txt {SMALL} --mesh X=2 --out a/new/run") == 1
    assert not Path("a").exists()


@pytest.mark.slow
def test_the_dtype_of_a_checkpoint_stays(begun, capsys, monkeypatch):
    monkeypatch.setattr(command, "fits_as_before", lambda *sizes: True)  # its memory is not counted again
    for dtype in DTYPES:
        assert train(f"--data text.txt --out {dtype} {SMALL} --steps 1 --dtype {dtype}") == 0
    for dtype, other in itertools.permutations(DTYPES, 2):
        words = f"{dtype}: was begun with --dtype {dtype}, not {other}\n  fix: give the same, or another --out"
        assert words in refusal(capsys, f"--resume --out {dtype} --steps 2 --dtype {other}")
        assert train(f"--resume --out {dtype} --steps 1 --dtype {dtype}") == 1  # there is nothing left to do


@pytest.mark.slow
def test_what_may_change_is_said(begun, capsys):
    capsys.readouterr()
    assert train("--resume --out run --steps 3 --lr 0.01") == 0
    assert "from step 3 on: --lr 0.01, not 0.001, --steps 3, not 2\n" in capsys.readouterr().out
    assert losses("run")[:2] == losses("whole")[:2]


def test_a_run_without_a_record_of_its_options_is_not_gone_on_with(begun, capsys):
    """As earlier versions wrote it; its params can still be loaded."""
    for index in Path("run").glob("step-*/index.json"):
        content = json.loads(index.read_text())
        index.write_text(json.dumps({key: content[key] for key in ("step", "mesh", "types", "values")}))
    assert "step-000002: does not say with which options of scaling.train" in refusal(capsys, "--resume --out run")


def test_a_run_of_an_earlier_version_keeps_the_order_and_the_share_of_its_data(begun, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        patch.setattr(loop, "order_of", lambda *records: (batches.DRAWN, False))
        for out, steps in (("drawn", 4), ("earlier", 2)):
            assert train(f"--data text.txt --out {out} {SMALL} --steps {steps} --save-every 1") == 0
    for index in Path("earlier").glob("step-*/index.json"):
        content = json.loads(index.read_text())
        del content["checksum"], content["made_with"]["order"], content["made_with"]["options"]["valid"]
        index.write_text(json.dumps(content))
    Path("earlier/run.toml").write_text(Path("earlier/run.toml").read_text().replace("valid = 0.05\n", ""))
    assert "--valid 0.05, not 0.1" in refusal(capsys, "--resume --out earlier --steps 4 --valid 0.1")
    for steps in (3, 4):
        assert train(f"--resume --out earlier --steps {steps}") == 0
    assert losses("earlier") == losses("drawn")


def moved(path: Path, to: Path) -> None:
    to.write_bytes(path.read_bytes())


def swapped(step: Path, *leaves: str) -> None:
    """Swap the blocks of two leaves of one size in the file that holds both."""
    (one, other), file = (dcp.saved_leaves(step)[leaf].blocks[0] for leaf in leaves), block_of(step)
    data = bytearray(file.read_bytes())
    one, other = (slice(block.start, block.start + block.nbytes) for block in (one, other))
    data[one], data[other] = data[other], data[one]
    file.write_bytes(data)


STEP1, STEP2 = Path("run/step-000001"), Path("run/step-000002")


LEAF, MOMENT = "params.layers.W_Q", "optimizer.m.layers.W_Q"  # of one size


def block_of(step: Path) -> Path:
    return step / dcp.saved_leaves(step)[LEAF].blocks[0].file


STRANGE, OTHER_BYTES = "is not the file that was written for this step", "are not those that were written"
DAMAGE = {  # what: (how, whether --resume says so and goes on from step 1, words that verify says)
    "a block of an earlier step": (lambda: moved(block_of(STEP1), block_of(STEP2)), True, STRANGE),
    "a block of a later step": (lambda: moved(block_of(STEP2), block_of(STEP1)), False, STRANGE),
    "two blocks of a step": (lambda: swapped(STEP2, LEAF, MOMENT), True, OTHER_BYTES),
    "an index of another step": (lambda: moved(STEP1 / "index.json", STEP2 / "index.json"), True, "that of step 1"),
    "a step of another name": (lambda: STEP1.rename("run/step-000003"), False, "index.json: is that of step 1"),
    "no index": (lambda: (STEP2 / "index.json").unlink(), True, "no complete checkpoint"),
    "an index that is a list": (lambda: (STEP2 / "index.json").write_text("[]"), True, "is damaged: TypeError"),
    "no block": (lambda: block_of(STEP2).unlink(), True, "missing or cut short"),
    "no listing": (lambda: (STEP2 / ".metadata").unlink(), True, "there is no checkpoint of torch"),
    "latest, junk": (lambda: Path("run/latest").write_bytes(b"\xff"), False, ""),
    "latest, a digit that is none": (lambda: Path("run/latest").write_text("²"), False, ""),
    "latest, too long": (lambda: Path("run/latest").write_text("9" * 5000), False, ""),
    "a folder of no step": (lambda: Path("run/step-¹").mkdir(), False, ""),
    "a record that is none": (lambda: Path("run/metrics.jsonl").write_bytes(b"{}\n[1\n\xff\n[]\n"), False, ""),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("what", DAMAGE)
def test_damage_is_named_and_the_losses_are_right(begun, capsys, what):
    """`verify` finds it, --resume goes on from the newest step that is whole, and then verify has nothing to say."""
    harm, back, words = DAMAGE[what]
    harm()
    assert train("verify run") == bool(words)
    assert words in capsys.readouterr().out
    assert train("--resume --steps 4") == 0
    said = capsys.readouterr().err
    assert ("warning: step 2 is damaged: " in said) == back
    assert ("warning: " in said) == (back or not words)
    assert losses("run")[-(2 + back) :] == losses("whole")[-(2 + back) :]
    assert Path("run/latest").read_text() == "4"
    shutil.rmtree(STEP1, ignore_errors=True)
    assert train("verify run") == 0


@pytest.mark.parametrize("name", ["metrics.jsonl", "latest", "norms.jsonl"])
def test_a_folder_where_a_run_has_a_file_is_refused_before_anything_is_written(begun, capsys, name):
    Path("run", name).unlink(missing_ok=True)
    Path("run", name).mkdir()
    before = tree_of("run")
    assert f"run/{name}: is a folder, where a run has a file" in refusal(capsys, "--resume --steps 4")
    assert tree_of("run") == before


def test_a_step_may_be_chosen(begun, capsys, monkeypatch):
    """Later steps count no more; a damaged one is not replaced by another. A count of restarts that is left in a shell
    without torchrun's other variables changes nothing."""
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    moved(*(block_of(Path("whole", step)) for step in ("step-000003", "step-000002")))
    before = tree_of("whole")
    for step, words in ((9, "no complete checkpoint"), (2, STRANGE)):
        assert words in refusal(capsys, f"--resume --out whole --steps 5 --step {step}")
    assert ended(train, "--step 1") == 2
    assert "--step and --new-data say how" in capsys.readouterr().err
    assert tree_of("whole") == before
    wanted = losses("whole")
    for steps, more in ((3, "--step 1"), (4, "")):
        assert train(f"--resume --out whole --steps {steps} {more}") == 0
        assert losses("whole") == wanted[:steps]
        assert Path("whole/latest").read_text() == str(steps)


@pytest.mark.slow
def test_weights_of_another_model_are_not_taken_and_that_is_said(here, capsys):
    config = TINY.with_(V=256)
    for seed, name in enumerate(("one", "other")):
        hf.save(name, config, transformer.init(config, seed, torch.float32, "cpu"))
    write_text(300)
    for out, model in (("run", "one"), ("whole", "one")):
        assert train(f"--data text.txt --out {out} {SMALL} --model {model} --steps 2 --save-every 1") == 0
    capsys.readouterr()
    assert train("--resume --out run --steps 3 --model other") == 0
    assert "warning: run goes on with its own weights, not with those of other\n" in capsys.readouterr().err
    assert train("--resume --out whole --steps 3 --model one") == 0
    assert "warning" not in capsys.readouterr().err
    assert losses("run") == losses("whole")


def test_terms_of_the_training_loss_are_kept_and_not_evaluated(begun, capsys):
    small = f"--data text.txt {SMALL} --lr 0 --steps 1"
    assert train(f"{small} --out plain") == 0
    new = {"betas": "0.8,0.9", "label_smoothing": 0.5, "min_lr": 0.3, "z_loss": 0.1}
    assert train(f"{small} --out other --betas 0.8,.9 --label-smoothing 0.5 --min-lr 0.3 --z-loss 0.1") == 0
    (plain,), (other,) = records("plain"), records("other")
    assert plain["valid"] == other["valid"]
    assert other["loss"] > plain["loss"] + 1
    capsys.readouterr()
    assert train("--resume --out other --steps 2") == 0
    assert "from step 2 on: --steps 2, not 1\n" in capsys.readouterr().out
    now = read_record(Path("other"), 2)
    assert {name: now["options"][name] for name in new} == new
    before = {"options": {name: value for name, value in now["options"].items() if name not in new}}
    found = "--betas 0.8,0.9, not 0.9,0.95, --label-smoothing 0.5, not 0.0, --min-lr 0.3, not its default, --z-loss 0.1"
    assert option_changes(before, now).startswith(found)  # from a checkpoint of an earlier version


@pytest.mark.slow
def test_more_steps_stretch_the_cosine_unless_its_end_is_given(begun, capsys):
    """The rates are those of the cosine's formula, from the peak to a tenth of it."""
    falls = "--schedule cosine --warmup 0 --lr 1"
    assert train(f"--data text.txt --out falls {SMALL} {falls} --steps 2 --save-every 1") == 0
    shutil.copytree("falls", "kept")
    capsys.readouterr()
    assert train("--resume --out falls --steps 4") == 0
    assert (
        "the learning rate of step 3 is 0.55, where it was to be 0.1: --decay-steps 2 lets" in capsys.readouterr().out
    )
    assert train("--resume --out kept --steps 4 --decay-steps 2") == 0
    assert "learning rate of step" not in capsys.readouterr().out
    cosine = [0.1 + 0.45 * (1 + math.cos(math.pi * part)) for part in (0, 1 / 2, 2 / 4, 3 / 4)]
    for out, rates in ("falls", cosine), ("kept", [*cosine[:2], 0.1, 0.1]):
        assert [record["lr"] for record in records(out)] == pytest.approx(rates)


def edited(name: str, text: str | None) -> None:
    """Write a file of the data, or remove it."""
    path = Path("data", name)
    path.unlink() if text is None else path.write_text(text)


CHANGES = {  # what becomes of a folder of a.txt, b.txt and c.jsonl: what is said of it; "" for what is no change
    "it is moved": (lambda: Path("data").rename("moved"), ""),
    "its files have other names, in the same order": (lambda: Path("data/a.txt").rename("data/aa.txt"), ""),
    "its files are younger": (lambda: Path("data/a.txt").touch(), ""),
    "more": (lambda: edited("d.txt", "more " * 50), "data/d.txt was added"),
    "less": (lambda: edited("a.txt", None), "data/a.txt was removed"),
    "other text of one length": (lambda: edited("b.txt", "c" * 900), "data/b.txt has changed (900 bytes, now 900)"),
    "another order": (lambda: Path("data/a.txt").rename("data/bb.txt"), "data/bb.txt was added"),
    "a chat": (lambda: edited("c.jsonl", '{"text": "x"}'), "data/c.jsonl has changed"),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", CHANGES)
def test_changed_data_are_refused_with_what_has_changed(begun, capsys, what):
    change, words = CHANGES[what]
    Path("data").mkdir()
    for name, text in {"a.txt": "ab" * 800, "b.txt": "b" * 900, "c.jsonl": '{"text": "abcd"}'}.items():
        edited(name, text)
    assert train(f"--data data --out other {SMALL} --steps 1") == 0
    change()
    data = "--data moved" if Path("moved").exists() else ""
    if not words:
        assert train(f"--resume --out other --steps 2 {data}") == 0
        return
    before = tree_of("other")
    said = refusal(capsys, "--resume --out other --steps 2 --microbatches 2")
    assert "was begun with other data: " in said
    assert words in said
    assert "--new-data" in said
    assert tree_of("other") == before


@pytest.mark.slow
def test_new_data_begin_an_epoch_that_later_resumes_go_on_with(begun, capsys):
    """Not at a restart, for which the data are the same again."""
    write_text(330)
    shutil.copytree("run", "whole", dirs_exist_ok=True)
    drawn = []
    with pytest.MonkeyPatch.context() as patch:
        prefetch = loop.prefetch
        patch.setattr(loop, "prefetch", lambda data, seen, *more: drawn.append(seen) or prefetch(data, seen, *more))
        assert train("--resume --out whole --data text.txt --steps 6 --new-data") == 0
        said = capsys.readouterr()
        assert "a new epoch of other data: " in said.out
        assert "text.txt has changed" in said.out
        assert "warning" not in said.err
        for steps in (3, 4, 6):
            assert train(f"--resume --data text.txt --steps {steps} --new-data") == 0
    assert drawn == [0, 0, 2, 4]
    assert losses("run") == losses("whole")
    assert "is at step 6 of 6" in refusal(capsys, "--resume")
    assert "other data: 1 sources, not 2" in refusal(capsys, "--resume --steps 7 --data text.txt:2,large.npy:1")


def test_text_that_was_held_out_is_not_trained_on_later():
    """Of 100 sequences, then of 111: an epoch has each of the others once. And where it has moved, it is said."""

    def cut(tokens, before=()):
        corpus = Corpus((numpy.array(tokens),), numpy.array([0]))
        train, valid = batches.hold_out(corpus, batch=4, length=10, seed=0, valid=0.05)
        train, *found = batches.leave_out(batches.Mixture((train,), (1,)), [valid], before)
        return *train.sources, *found

    _, held, gone = cut(range(1001))
    assert (held[0][:2], gone) == ([951, 1001], 0)
    later, held, gone = cut(range(1111), held)
    assert ([each[:2] for each in held], gone) == ([[1055, 1111], [951, 1001]], 0)
    epoch = later.rows(later.places)[0].flatten().tolist()
    assert not {*epoch} & {*range(951, 1001), *range(1055, 1111)}
    assert sorted(later.numbers(numpy.arange(later.sequences))) == [*later.places]
    assert {*range(950), *range(1010, 1050)} <= {*epoch}
    assert cut([7, *range(1110)], held)[2] == 2


def test_losses_of_experts_are_asked_for_by_flags_that_a_run_keeps(monkeypatch, capsys):
    """Transformers' own, over all layers' routers together, is refused where a config.json asks for it."""
    started = []
    monkeypatch.setattr(
        command, "launch_training", lambda settings, *given: given[-1]() or started.append(settings.model)
    )
    write_text(1)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
    sizes |= {"vocab_size": 256, "num_local_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.02}
    for name, more in {"two": {"output_router_logits": True}, "quiet": {}}.items():
        table = {"model_type": "mixtral", "num_hidden_layers": 2} | sizes | more
        Path(f"{name}.json").write_text(json.dumps(table))
    begin = "--data text.txt --seq 4 --batch 2"
    said = refusal(capsys, f"{begin} --model two.json")
    assert "two.json: output_router_logits asks for 0.02 times transformers' loss" in said
    assert "fix: give --aux-coef 0.02, which" in said
    assert "--z-coef: tiny has no experts" in refusal(capsys, f"{begin} --z-coef 0.1")
    train(f"{begin} --model two.json --aux-coef 0.02 --z-coef 0.003")
    train("--resume --z-coef 0")
    assert [(model.aux_coef, model.z_coef) for model in started] == [(0.02, 0.003), (0.02, 0)]
    assert "warning" not in capsys.readouterr().err
    train(f"{begin} --model quiet.json --out quiet")
    assert "nothing evens out the load of quiet's experts" in capsys.readouterr().err
    train(f"{begin} --model quiet.json --out meant --aux-coef 0")
    assert capsys.readouterr().err == ""
