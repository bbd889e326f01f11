import pytest

from scaling.plan.serve.published import data, measured_steps

GROUPS = data()["group"]
STEPS = [one for group in GROUPS for one in measured_steps(group)]


def test_no_bound_is_beaten():
    assert len(STEPS) > 40
    for one in STEPS:
        assert one.bound <= one.seconds, (one.group, one.config.name, one.batch)
        assert one.bound + one.slower + one.step.comms + one.rest == pytest.approx(one.seconds)
        assert one.slower > 0


def test_bounds_by_hand():
    """70.55e9 params in int8 less the embedding, 163,840 bytes a token; LLaMA-2 7B in bf16, 524,288 bytes a token."""
    of = {(one.group[:13], one.config.name, one.chips, one.batch, one.context): one for one in STEPS}
    read = 70_553_706_496 - 128256 * 8192
    eight = of["LLaMA-3.1 70B", "llama3-70b", 16, 8, 2048]
    assert eight.bound == pytest.approx((8 * 2048 * 163_840 + read) / (16 * 8.2e11))
    two = of["LLaMA-3.1 70B", "llama3-70b", 8, 128, 2048]  # 64 sequences each
    assert two.bound == pytest.approx((64 * 2048 * 163_840 + read) / (8 * 8.2e11))
    compute = of["LLaMA-3.1 70B", "llama3-70b", 16, 128, 2048]
    assert compute.bound == pytest.approx(128 * 2048 * 163_840 / (16 * 8.2e11) + 2 * 128 * read / (16 * 1.97e14))
    small = of["gpt-fast, bf1", "llama2-7b", 2, 1, 205]
    assert small.bound == pytest.approx((2 * (6_738_415_616 - 32000 * 4096) + 205 * 524_288) / (2 * 2.0e12))
    assert small.step.comms == pytest.approx((2 * 32 + 2) * 2e-5)  # launches


def test_in_bf16_a_cache_would_beat_its_bound():
    """So the cache of the v5e's figures is in int8: two replicas, 32 sequences of 8192."""
    read = 70_553_706_496 - 128256 * 8192
    assert (16 * 8192 * 2 * 163_840 + read) / (8 * 8.2e11) > 1 / 71.3
