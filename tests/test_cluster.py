from dataclasses import replace

import pytest
from training.cluster import (
    INFINIBAND,
    Cluster,
    describe_cluster,
    estimate,
    ring_seconds,
    step_seconds,
)

from model import GPTConfig
from training.config import TrainConfig

PLAN = TrainConfig(plan=True, gpus=8, nodes=1)
GPT2 = GPTConfig()


def test_ring_seconds_of_an_all_gather():
    # Four members with 100 bytes each take in the 300 of the others, at 10 bytes a second.
    assert ring_seconds(400, 4, 10) == 30
    assert ring_seconds(400, 1, 10) == 0


def test_step_seconds_of_ddp_by_hand():
    # 4 bytes per parameter, 7/8 of them twice: at this rate 10 s, of which the backward pass of the
    # last of three micro-steps hides 2.
    rate = 2 * 7 / 8 * 4 * GPT2.n_params / 10
    slow = Cluster(8, 1, within=rate, between=1.0)
    assert step_seconds(TrainConfig(), GPT2, slow, 3, 1.0, 2.0) == pytest.approx(9 + 8)
    # What is complete only when the backward pass is cannot hide.
    embeddings = (GPT2.padded_vocab_size + GPT2.block_size + 2) * GPT2.n_embd / GPT2.n_params
    seconds = step_seconds(TrainConfig(), GPT2, slow, 1, 1.0, 50.0)
    assert seconds == pytest.approx(51 + 10 * embeddings)


@pytest.mark.parametrize(("reshard_after_forward", "gathers"), [(True, 4), (False, 2)])
def test_step_seconds_of_fsdp_by_hand(reshard_after_forward, gathers):
    blocks = GPT2.n_layer * GPT2.block_params
    config = TrainConfig(parallel="fsdp", reshard_after_forward=reshard_after_forward)
    link = Cluster(8, 1, within=1e9, between=1.0)
    gather, reduce = 7 / 8 * 2 * blocks / 1e9, 7 / 8 * 4 * blocks / 1e9
    root = 7 / 8 * 4 * (GPT2.n_params - blocks) / 1e9
    # With no computation all is communication: gathers in both micro-steps, one reduction.
    seconds = step_seconds(config, GPT2, link, 2, 0.0, 0.0)
    assert seconds == pytest.approx(gathers * gather + 2 * root + reduce + root)


def test_step_seconds_of_hsdp_gathers_within_nodes():
    fsdp, hsdp = TrainConfig(parallel="fsdp"), TrainConfig(parallel="hsdp")
    slow_network = Cluster(64, 8, within=300e9, between=10e9)
    times = [step_seconds(config, GPT2, slow_network, 8, 0.01, 0.02) for config in (fsdp, hsdp)]
    assert times[1] < times[0]


def test_estimate_of_fsdp_shards_the_state_of_gpt2_xl():
    xl = GPTConfig(n_layer=48, n_head=25, n_embd=1600)
    config = TrainConfig(plan=True, size="gpt2-xl", gpus=8, total_batch_size=2**19)
    ddp = estimate(config, xl, INFINIBAND)
    fsdp = estimate(replace(config, parallel="fsdp", micro_batch_size=1), xl, INFINIBAND)
    assert ddp.memory_gib > 16 * xl.n_params / 2**30
    assert fsdp.memory_gib < ddp.memory_gib


def test_estimate_of_full_checkpointing_takes_longer_and_less():
    config = replace(PLAN, micro_batch_size=16)
    plain = estimate(config, GPT2, INFINIBAND)
    full = estimate(replace(config, activation_checkpointing="full"), GPT2, INFINIBAND)
    offload = estimate(replace(config, activation_offload=True), GPT2, INFINIBAND)
    assert full.step_seconds == pytest.approx(plain.step_seconds * 4 / 3, rel=0.01)
    assert full.memory_gib < plain.memory_gib
    assert offload.memory_gib < full.memory_gib
    assert offload.step_seconds > full.step_seconds


def test_estimate_agrees_with_published_eight_gpu_runs():
    # 124M on 8 GPUs: 218k tokens/s per GPU at 60% MFU on A100s, 473k at 41% on H100s.
    for gpu, mfu, published in (("A100", 0.60, 218e3), ("H100", 0.41, 473e3)):
        run = estimate(replace(PLAN, gpu=gpu, mfu=mfu), GPT2, INFINIBAND)
        assert PLAN.total_batch_size / run.step_seconds / 8 == pytest.approx(published, rel=0.03)


def test_describe_cluster_has_every_mode_and_the_price():
    config = replace(PLAN, gpus=64, nodes=8, gpu_hour_price=2.0)
    text = describe_cluster(config, GPT2)
    ddp = next(line for line in text.splitlines() if line.startswith("ddp ")).split()
    speed, hours, gpu_hours, price = (float(ddp[i].replace(",", "")) for i in (5, 6, 7, 9))
    tokens = config.max_steps * config.total_batch_size
    assert hours == pytest.approx(tokens / speed / 3600, abs=0.1)
    assert gpu_hours == pytest.approx(64 * hours, abs=4)
    assert price == pytest.approx(2 * gpu_hours, abs=0.2)
    for word in ("fsdp ", "hsdp ", "--no-reshard-after-forward", "400 Gb/s", "131,072"):
        assert word in text
    assert "hsdp " not in describe_cluster(PLAN, GPT2).split("batch: ")[0]


def test_plan_is_printed_by_rank_0_only(commands):
    for flags in ([], ["--gpus=8"]):
        done = commands.run_ranks(2, "train_gpt2", "--plan", "--device=cpu", *flags)
        assert done.code == 0, done.stderr
        assert done.stdout.count("peak GiB per device") == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"gpus": 64, "nodes": 7}, "use --gpus 63 or 70"),
        ({"gpus": 2, "nodes": 4}, "use --gpus 4$"),
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
