import math
import statistics
from dataclasses import replace

import pytest

from scaling.book.arrays import largest
from scaling.configs import get
from scaling.hardware import chip
from scaling.plan import Job, published
from scaling.plan.classes import error_line, is_unusual, runs_table, usual_error
from scaling.plan.serve.published import data, measured_steps

SMALL, LLAMA = 128, 16_384  # chips of the runs beside which the planner finds its own layout here; the command: all


@pytest.fixture(scope="module")
def rows():
    """Each run beside the planner; of large ones only the run's own mesh."""
    found = []
    for run in published.published_runs():
        if run.chips <= SMALL or run.chips == LLAMA:
            found.append(published.beside_planner(run))
        else:
            own = published.own_mesh(run)
            found.append(published.Beside(run, own, own))
    return found


@pytest.mark.slow
def test_forecasts_of_the_published_meshes_are_near_what_was_measured_and_what_is_off_is_explained(rows):
    errors, printed = [abs(math.log1p(row.error)) for row in rows], published.table(rows)
    assert statistics.median(errors) < math.log(1.08)
    assert largest(errors) < math.log(1.6)
    assert len(rows) > 65
    for row in rows:
        assert {axis: n for axis, n in row.own.layout.sizes.items() if n > 1} == dict(row.run.mesh)
        assert row.own.chips == row.run.chips
        assert row.own.bound * row.run.measured * row.run.chips <= row.run.job.batch, "beats its bound"
        unusual = is_unusual(row.run.job, row.run.chip, row.own.layout)
        assert row.best is row.own or row.best.forecast < row.own.forecast or unusual
        assert row.run.gave or row.gain <= published.BETTER, row.run.where
        assert row.run.wanting or abs(row.error) <= published.BETTER or not row.run.compared, row.run.where
        assert row.run.source in " ".join(printed.split())
        assert row.run.where in " ".join(printed.split())
    assert max(map(len, printed.splitlines())) <= 100


@pytest.mark.slow
def test_what_a_forecast_says_of_its_class_is_what_halves_of_the_runs_say_of_each_other(rows):
    stored = {name: tuple(found) for name, found in runs_table()["errors"].items()}
    found = published.class_errors(rows)
    assert {name: (round(error, 2), count) for name, (error, count) in found.items()} == stored
    assert all(error < 0.205 for error, _ in found.values())
    for what, most in (("publication", 0.1), ("class", 0.15)):
        assert published.median(published.errors_without(rows, what)) < most


def test_a_forecast_says_how_far_its_class_is_off():
    job = Job(get("llama3-8b"), 2**20)
    assert error_line(job, chip("h100")).startswith("39 published runs of this class (dense models on GPUs) are off by")
    assert "no published run" in error_line(replace(job, config=get("mixtral-8x7b"), seq=2**15), chip("v5p"))
    assert "rtx3090" in error_line(job, chip("rtx3090"))
    assert usual_error(job, chip("rtx3090")) is None


def test_runs_are_of_models_that_a_user_can_name_and_tokens_follow_from_tflops():
    """LLaMA-3 405B: 400 TFLOPs/s a GPU of 6 x 405e9 FLOPs a token and attention are 41% of 989."""
    runs = published.published_runs()
    assert [get(run.job.config.name) for run in runs] == [run.job.config for run in runs]
    run = next(run for run in runs if run.chips == LLAMA and run.job.seq == 8192)
    assert run.measured * published.token_flops(run.job, "causal") == pytest.approx(400e12)
    assert 6 * 405e9 < published.token_flops(run.job, "causal") < 6.5 * 405e9


def test_bounds_of_serving_are_those_by_hand_and_none_is_beaten():
    """70.55e9 params in int8 less the embedding, 163,840 bytes a token; LLaMA-2 7B in bf16, 524,288 bytes a token."""
    steps = [one for group in data()["group"] for one in measured_steps(group)]
    assert len(steps) > 40
    for one in steps:
        assert one.bound <= one.seconds, (one.group, one.config.name, one.batch)
        assert one.bound + one.slower + one.step.comms + one.rest == pytest.approx(one.seconds)
        assert one.slower > 0
    of = {(one.group[:13], one.config.name, one.chips, one.batch, one.context): one for one in steps}
    read = 70_553_706_496 - 128256 * 8192
    two = of["LLaMA-3.1 70B", "llama3-70b", 8, 128, 2048]  # 64 sequences each
    assert two.bound == pytest.approx((64 * 2048 * 163_840 + read) / (8 * 8.2e11))
    compute = of["LLaMA-3.1 70B", "llama3-70b", 16, 128, 2048]
    assert compute.bound == pytest.approx(128 * 2048 * 163_840 / (16 * 8.2e11) + 2 * 128 * read / (16 * 1.97e14))
    small = of["gpt-fast, bf1", "llama2-7b", 2, 1, 205]
    assert small.bound == pytest.approx((2 * (6_738_415_616 - 32000 * 4096) + 205 * 524_288) / (2 * 2.0e12))
    assert small.step.comms == pytest.approx((2 * 32 + 2) * 2e-5)  # launches
