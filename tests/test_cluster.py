from dataclasses import replace

import pytest

from model import GPTConfig
from training.cluster import (
    INFINIBAND,
    Cluster,
    describe_cluster,
    estimate,
    ring_seconds,
    step_seconds,
)
from training.config import TrainConfig

PLAN = TrainConfig(plan=True, gpus=8, nodes=1)
GPT2 = GPTConfig()
FREE = Cluster(8, 1, within=1e30, between=1e30)


def test_ring_seconds_of_an_all_gather():
    # Four members with 100 bytes each take in the 300 of the others, at 10 bytes a second.
    assert ring_seconds(400, 4, 10) == 30
    assert ring_seconds(400, 1, 10) == 0


def test_step_seconds_without_communication_is_the_computation():
    for parallel in ("ddp", "fsdp"):
        config = TrainConfig(parallel=parallel)
        assert step_seconds(config, GPT2, FREE, 3, 1.0, 2.0) == pytest.approx(9.0)


def test_step_seconds_of_ddp_by_hand():
    # 4 bytes a parameter, 7/8 of them twice: at this rate 10 s, of which a backward pass hides 2.
    rate = 2 * 7 / 8 * 4 * GPT2.n_params / 10
    slow = Cluster(8, 1, within=rate, between=1.0)
    assert step_seconds(TrainConfig(), GPT2, slow, 1, 1.0, 2.0) == pytest.approx(3 + 8)
    # What is complete only when the backward pass is cannot hide.
    embeddings = (GPT2.padded_vocab_size + GPT2.block_size + 2) * GPT2.n_embd / GPT2.n_params
    assert step_seconds(TrainConfig(), GPT2, slow, 1, 1.0, 50.0) == pytest.approx(
        51 + 10 * embeddings
    )


def test_step_seconds_of_zero_3_by_hand():
    blocks = GPT2.n_layer * GPT2.block_params
    rest = GPT2.n_params - blocks
    link = Cluster(8, 1, within=1e9, between=1.0)
    gather, reduce = 7 / 8 * 2 * blocks / 1e9, 7 / 8 * 4 * blocks / 1e9
    root = 7 / 8 * 4 * rest / 1e9
    zero_3, zero_2 = (
        TrainConfig(parallel="fsdp", reshard_after_forward=again) for again in (True, False)
    )
    # With next to no computation all is communication: both gathers each micro-step, one reduction.
    assert step_seconds(zero_3, GPT2, link, 2, 0.0, 0.0) == pytest.approx(
        4 * gather + 2 * root + reduce + root
    )
    assert step_seconds(zero_2, GPT2, link, 2, 0.0, 0.0) == pytest.approx(
        2 * gather + 2 * root + reduce + root
    )


def test_step_seconds_of_hsdp_gathers_within_nodes():
    fsdp, hsdp = TrainConfig(parallel="fsdp"), TrainConfig(parallel="hsdp")
    slow_network = Cluster(64, 8, within=300e9, between=10e9)
    times = [step_seconds(config, GPT2, slow_network, 8, 0.01, 0.02) for config in (fsdp, hsdp)]
    assert times[1] < times[0]


def test_estimate_shares_out_the_state_of_gpt2_xl():
    xl = GPTConfig(n_layer=48, n_head=25, n_embd=1600)
    config = TrainConfig(plan=True, size="gpt2-xl", gpus=8, total_batch_size=2**19)
    ddp = estimate(config, xl, INFINIBAND)
    fsdp = estimate(replace(config, parallel="fsdp", micro_batch_size=1), xl, INFINIBAND)
    assert ddp.memory_gib > 16 * xl.n_params / 2**30
    assert fsdp.memory_gib < ddp.memory_gib
    assert ddp.hours == pytest.approx(config.max_steps * ddp.step_seconds / 3600)
    assert ddp.tokens_per_second == pytest.approx(2**19 / ddp.step_seconds)


def test_estimate_of_full_checkpointing_takes_longer_and_less():
    config = replace(PLAN, micro_batch_size=16)
    plain = estimate(config, GPT2, INFINIBAND)
    full = estimate(replace(config, activation_checkpointing="full"), GPT2, INFINIBAND)
    offload = estimate(replace(config, activation_offload=True), GPT2, INFINIBAND)
    assert full.step_seconds == pytest.approx(plain.step_seconds * 4 / 3, rel=0.01)
    assert full.memory_gib < plain.memory_gib
    assert offload.memory_gib < full.memory_gib
    assert offload.step_seconds > full.step_seconds


def test_estimate_of_float32_is_at_the_rate_of_tf32():
    steps = [
        estimate(replace(PLAN, micro_batch_size=16, dtype=dtype), GPT2, INFINIBAND).step_seconds
        for dtype in ("bfloat16", "float32")
    ]
    assert 1.9 * steps[0] < steps[1] < 2.1 * steps[0]


def test_estimate_agrees_with_published_eight_gpu_runs():
    # 124M on 8 GPUs: 218k tokens/s a GPU at 60% MFU on A100s, 473k at 41% on H100s.
    for gpu, mfu, published in (("A100", 0.60, 218e3), ("H100", 0.41, 473e3)):
        run = estimate(replace(PLAN, gpu=gpu, mfu=mfu), GPT2, INFINIBAND)
        assert run.tokens_per_second / 8 == pytest.approx(published, rel=0.03)


def test_describe_cluster_has_every_mode_and_the_price():
    text = describe_cluster(replace(PLAN, gpus=64, nodes=8, gpu_hour_price=2.0), GPT2)
    ddp = next(line for line in text.splitlines() if line.startswith("ddp ")).split()
    gpu_hours, price = float(ddp[7]), float(ddp[9])
    assert price == pytest.approx(2 * gpu_hours, abs=0.2)
    for word in ("fsdp ", "hsdp ", "--no-reshard-after-forward", "400 Gb/s", "131,072"):
        assert word in text
    assert "hsdp " not in describe_cluster(PLAN, GPT2).split("batch: ")[0]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"gpus": 64, "nodes": 7}, "use --gpus 63 or 70"),
        ({"gpus": 2, "nodes": 4}, "use --gpus 4"),
        ({"gpus": 8, "parallel": "hsdp"}, "--parallel hsdp needs --nodes 2 or more"),
        ({"gpus": 8, "plan": False}, "--gpus goes with --plan"),
        ({"nodes": 2}, "--nodes goes with --plan --gpus"),
        ({"gpus": 0}, "--gpus must be above 0"),
        ({"gpu_hour_price": 2.0}, "--gpu-hour-price goes with --plan --gpus"),
        ({"mfu": 40.0}, "--mfu 40.0 is above 1"),
    ],
)
def test_impossible_clusters_are_refused(flags, message):
    with pytest.raises(ValueError, match=message):
        TrainConfig(**{"plan": True, **flags})


def test_estimate_names_batches_that_divide():
    config = replace(PLAN, gpus=24)
    with pytest.raises(ValueError, match="use 516096 or 540672"):
        estimate(config, GPT2, INFINIBAND)
