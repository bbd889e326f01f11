"""Post-training's chips divided between both sides: its parts are the planners' own, and the division is the best."""

import json
import math
from dataclasses import replace

import pytest
from refused import evaluated, refused

from scaling.configs import get
from scaling.hardware import chip
from scaling.plan import Job, plans
from scaling.plan.__main__ import main
from scaling.plan.job import IN_BF16
from scaling.plan.posttrain import PosttrainJob, divisions, link, writing
from scaling.plan.serve import candidates
from scaling.plan.serve.forecast import likely_token

ASKED = PosttrainJob(get("llama3-8b"), 128, 16, 512, 2048)
H100 = chip("h100")


def test_each_side_is_what_its_own_planner_forecasts():
    found = divisions(ASKED, H100, 64)
    assert [one.seconds for one in found] == sorted(one.seconds for one in found)
    for one in found:
        trained = plans(Job(ASKED.config, 2048 * 2560, 2560, "bf16", *IN_BF16), H100, one.train_chips)[0]
        assert one.train == pytest.approx(float(trained.forecast))
        at_once = one.serving.batch * one.serving.replicas
        rounds = math.ceil(math.ceil(2048 / one.serving.replicas) / one.serving.batch)
        assert one.write == pytest.approx(rounds * 2048 * likely_token(one.serving).seconds)
        assert at_once * rounds >= 2048
        assert one.train_chips + one.write_chips == (64 if one.apart else 128)


def test_no_plan_of_the_serving_planner_writes_sooner():
    seconds, _ = writing(ASKED, H100, 24)
    for plan in candidates.plans(ASKED.service, H100, chips=24, replicas=None):
        each = math.ceil(2048 / plan.replicas)
        for batch in {min(plan.batch, each), max(1, plan.batch // 2)}:
            if batch % plan.groups == 0:
                held = replace(plan, batch=batch)
                assert seconds <= math.ceil(each / batch) * 2048 * likely_token(held).seconds * 1.001


def test_longer_answers_take_more_chips_for_writing():
    def chips(output: int) -> int:
        return next(one.write_chips for one in divisions(replace(ASKED, output=output), H100, 64) if one.apart)

    counts = [chips(output) for output in (128, 1024, 8192)]
    assert counts == sorted(counts)
    assert counts[0] < counts[-1]


def test_in_turn_a_step_waits_for_its_longest_answer_and_apart_only_if_that_is_all_of_it():
    even = {(one.apart, one.train_chips): one for one in divisions(ASKED, H100, 16)}
    for one in divisions(replace(ASKED, longest=8192), H100, 16):
        other, serving = even[one.apart, one.train_chips], one.serving
        token = likely_token(replace(serving, batch=serving.groups)).seconds
        waited = max(other.write, 8192 * token) if one.apart else other.write + 6144 * token
        assert one.write == pytest.approx(waited)


def test_a_reference_takes_a_third_more_of_training():
    plain, compared = (divisions(replace(ASKED, references=n), H100, 16) for n in (0, 1))
    seconds = {one.train_chips: one.train for one in plain}
    assert all(one.train == pytest.approx(seconds[one.train_chips] * 4 / 3) for one in compared)


def test_a_push_is_what_the_busier_side_sends_or_receives():
    """Weights of 16 GB: a serving chip's share into it, or all replicas' shares out of the training chips."""
    for one in divisions(ASKED, H100, 64):
        nbytes = 2 * 8.03e9
        moved = max(nbytes / one.serving.chips, nbytes * one.serving.replicas / one.train_chips)
        assert one.push == pytest.approx(moved / 50e9, rel=0.01)  # 400 Gbit/s a GPU
    assert link(H100, 8) == 450e9
    assert link(chip("v5p"), 8960) == chip("v5p").bandwidth("ici")
    assert link(chip("v5p"), 8961) == chip("v5p").bandwidth("dcn")


def test_waiting_is_the_rest_of_the_chips_time():
    for one in divisions(ASKED, H100, 64):
        busy = one.train_chips * one.train + one.write_chips * one.write
        chips = one.train_chips + one.write_chips if one.apart else 64
        assert one.waiting == pytest.approx(1 - busy / chips / one.seconds)


def test_the_command_prints_what_its_json_says(capsys):
    asked = "--model llama3-8b --chip h100 --chips 64 --prompts 128 --group 16 --output 2048"
    words = ["posttrain", *asked.split()]
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert main([*words, "--json"]) == 0
    best = json.loads(capsys.readouterr().out)[0]
    assert f"Best: {'apart' if best['apart'] else 'colocated'}, " in shown
    assert f"A step takes {best['step_seconds']:.3g} s" in shown
    assert max(map(len, shown.splitlines())) <= 100
    assert main(["posttrain", "--model", "llama3-8b", "--chip", "h100", "--chips", "1009", "--prompts", "8"]) == 0
    assert "on 1,009 h100" in capsys.readouterr().out  # which no layout trains on all together
    assert main(["posttrain", "--model", "llama3-70b", "--chip", "h100", "--chips", "4"]) == 1
    assert "fits 4 h100 neither" in capsys.readouterr().err


REFUSED = """
call                       words of its error
replace(ASKED, prompts=0)  prompts
replace(ASKED, longest=9)  at least the average
replace(ASKED, group=1.5)  group
divisions(ASKED, H100, 0)  chips
divisions(replace(ASKED, config=get('llama3-405b')), H100, 8)  neither
"""
test_what_is_not_a_count_is_refused = refused(evaluated(REFUSED, globals()))
