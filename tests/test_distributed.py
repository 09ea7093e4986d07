import socket

from runtime.threads import usable_cores

import pytest
from conftest import check_on_ranks

from runtime import distributed
from runtime.distributed import DistInfo, read_dist_env, setup_distributed
from runtime.errors import UserError

RANK_CHECK = """
import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from parallel import DDP
from runtime.errors import UserError
from runtime.errors import UserError

def fail_on_one(dist_info):
    with raise_on_all_ranks():
        if dist_info.rank:
            raise UserError("one")

def differ(dist_info):
    check_same_on_all_ranks("numbers", ["same", str(dist_info.rank)])

def check(dist_info):
    me = float(dist_info.rank)
    assert dist_info.world_size == 2
    assert all_reduce_sum(torch.tensor([1.0, me])).tolist() == [2.0, 1.0]
    assert all_reduce_max(dist_info.rank) == 1
    assert gather_text("Grüße" * dist_info.rank) == ["", "Grüße"]
    path = os.fsdecode(b"runs\\xff")  # not UTF-8
    assert gather_text(path) == [path, path]
    check_same_on_all_ranks("numbers", ["one", "two"])
    rounds = list(rank_batches("abc", dist_info))  # each batch counts once
    assert rounds == ([("b", True), ("c", False)] if dist_info.rank else [("a", True), ("c", True)])
    for end_on_one, message in ((fail_on_one, "on rank 1: one"), (differ, "rank 1 has 1, rank 0")):
        try:
            end_on_one(dist_info)
        except (ValueError, SystemExit) as error:
            expected = message if dist_info.rank == 0 else "2"
            assert expected in str(error), error
        else:
            raise AssertionError("went on")

    torch.manual_seed(0)
    raw = torch.nn.Linear(3, 1)
    ranks, synced = DDP(**vars(dist_info)), []
    model = ranks.wrap(raw)
    def count(state, bucket):
        synced.append(bucket.index())
        return default_hooks.allreduce_hook(None, bucket)
    model.register_comm_hook(None, count)
    for micro_step in range(3):
        with ranks.accumulate(model, is_last=micro_step == 2):
            model(torch.full((1, 3), me + 1)).sum().backward()
        assert len(synced) == (micro_step == 2), (micro_step, synced)
        if micro_step < 2:  # not averaged yet: each process has its own
            assert raw.weight.grad.flatten()[0] == (micro_step + 1) * (me + 1)
    assert raw.weight.grad.flatten()[0] == 3 * 1.5
    averages = ranks.average([torch.tensor(me), 1 - me])
    assert averages.tolist() == [0.5, 0.5]
    model.register_buffer("count", torch.tensor([me]))
    ranks.sync_buffers(model)
    assert model.count.tolist() == [0.0]
"""


def test_two_ranks_reduce_agree_and_average_gradients_on_the_last_micro_step_only(
    commands, tmp_path
):
    check_on_ranks(commands, RANK_CHECK, tmp_path)


IDLE_CHECK = """
import torch
from parallel import DDP, Ranks

# The experts that are used in a step: for each micro-step, those of rank 0 and of rank 1.
STEPS = [
    [([0], [1]), ([2], [0])],  # each on one rank, and expert 2 only in the last micro-step
    [([0, 1], []), ([], [])],  # only before the last micro-step
    [([0, 1, 2, 3], [0, 1, 2, 3]), ([0, 1, 2, 3], [0, 1, 2, 3])],
    [([], []), ([], [3])],
    [([], []), ([], [])],
]

def train(ranks, places):
    torch.manual_seed(0)
    raw = torch.nn.ModuleList(torch.nn.Linear(3, 3) for _ in range(5))
    raw.forward = lambda x, used: sum(raw[i](x).square().sum() for i in [*used, 4])
    model, missing = ranks.wrap(raw), []
    optimizer = torch.optim.AdamW(raw.parameters(), lr=0.01, weight_decay=0.5)
    for step, micro_steps in enumerate(STEPS):
        batches = [(used[place], place) for used in micro_steps for place in places]
        for n, (used, place) in enumerate(batches):
            with ranks.accumulate(model, is_last=n == len(batches) - 1):
                inputs = torch.full((2, 3), step + 0.5 * place)
                (model(inputs, used) / len(batches)).backward()
        missing.append([p.grad is None for p in raw.parameters()])
        optimizer.step()
        optimizer.zero_grad()
    return raw, missing

def check(dist_info):
    raw, missing = train(DDP(**vars(dist_info)), [dist_info.rank])
    alone, missing_alone = train(Ranks(), [0, 1])
    assert missing == missing_alone  # a gradient of 0 would decay the weights and the moments
    for p, q in zip(raw.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(p, q)
"""


def test_two_ranks_train_like_one_if_some_of_them_do_not_use_a_parameter(commands, tmp_path):
    check_on_ranks(commands, IDLE_CHECK, tmp_path)


def test_world_size_without_a_rank_is_one_process(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert read_dist_env("cpu") == DistInfo()
    with setup_distributed("cpu") as dist_info:
        assert dist_info == DistInfo()


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"MASTER_PORT": "{port}"}, r"EADDRINUSE.*: start with torchrun, or .* a free port$"),
        ({"MASTER_PORT": None}, r"MASTER_PORT expected, but not set\): start with torchrun, or"),
        ({"MASTER_ADDR": None}, r"MASTER_ADDR expected, but not set\): start with torchrun, or"),
        ({"MASTER_PORT": "http"}, r"'http'\): start with torchrun, or set"),
    ],
)
def test_address_that_a_process_cannot_use_is_an_error_of_the_environment(
    changed, problem, monkeypatch
):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        environment = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"} | changed
        for name, value in environment.items():
            if value is None:
                monkeypatch.delenv(name, raising=False)
            else:
                monkeypatch.setenv(name, value.format(port=port))
        with pytest.raises(UserError, match=problem), setup_distributed("cpu"):
            pass


@pytest.mark.parametrize("size", distributed.LAUNCHERS)
def test_processes_that_torchrun_did_not_start_are_an_error_of_the_first(size, monkeypatch):
    monkeypatch.setattr(distributed, "RANK_0_SECONDS", 0)
    monkeypatch.setenv("SLURM_NTASKS", "8")  # also set for a single command in a job
    monkeypatch.setenv(size, "1")
    assert read_dist_env("cpu") == DistInfo()
    monkeypatch.setenv(size, "8")
    with pytest.raises(ValueError, match=f"{size} is 8: start .* torchrun .*, or unset {size} "):
        read_dist_env("cpu")
    monkeypatch.setenv(distributed.LAUNCHERS[size], "1")
    with pytest.raises(SystemExit, match="2"):
        read_dist_env("cpu")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert read_dist_env("cpu").world_size == 8


@pytest.mark.parametrize(("given", "threads"), [("3", "3"), ("1", f"{usable_cores()} // 2 or 1")])
def test_ranks_have_as_many_threads_as_given_else_their_share_of_the_cores(
    commands, tmp_path, given, threads
):
    check = f"import torch\ndef check(_):\n    assert torch.get_num_threads() == ({threads})\n"
    check_on_ranks(commands, check, tmp_path, OMP_NUM_THREADS=given)
