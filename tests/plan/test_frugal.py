"""Ways to train in less memory, beside peft's and bitsandbytes' counts."""

import pytest

from scaling.configs import get
from scaling.hardware import chip
from scaling.plan import Job, plans
from scaling.plan.fitting import adapter_params, frugal_ways
from scaling.plan.job import Fixed

L8 = get("llama3-8b")


def test_adapters_and_frozen_weights_are_those_of_llama3_8b():
    """peft prints 41,943,040 trainable params for rank 16 on all linear layers; its NF4 weights are about 5.7 GB."""
    assert adapter_params(L8) == 41_943_040
    ways = {way.name: way for way in frugal_ways(Job(L8, 2**16, 2048))}
    assert list(ways) == ["8-bit Adam", "Adam on the host", "activations on the host", "LoRA", "QLoRA"]
    assert ways["QLoRA"].job.param_bytes * 8.03e9 == pytest.approx(5.7e9, rel=0.02)
    assert ways["8-bit Adam"].job.optimizer_bytes == 2
    card = chip("rtx4090")
    assert ways["LoRA"].on(card).headroom == pytest.approx(0.9 - 16 * 41_943_040 / 24e9)
    assert next(frugal_ways(Job(L8, 2**16, 2048, optimizer_bytes=2))).name == "Adam on the host"


@pytest.mark.parametrize("remat", ["block", "matmuls"])
def test_of_layers_inputs_two_remain_where_the_others_wait_on_the_host(remat):
    here, there = (
        plans(Job(L8, 2**20, 2048, offload=offload), chip("h100"), 8, Fixed((("fsdp", 8),), remat, 1))[0].held
        for offload in (False, True)
    )
    layers = L8.L if remat == "block" else 2
    assert there.activations == pytest.approx(here.activations * 2 / layers)
    assert (there.total < here.total) == (remat == "block")
