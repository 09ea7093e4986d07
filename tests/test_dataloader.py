import itertools
import threading
from contextlib import ExitStack

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from corpus.shards import TokenShards, open_shards
from dataloader import (
    BATCHES_AHEAD,
    ShardedDataLoader,
    count_windows,
    epoch_offset,
    permute,
    to_batch,
    validation_batches,
    validation_fingerprint,
)
from model import IGNORE_INDEX
from runtime.distributed import DistInfo

CPU = torch.device("cpu")
T = 8


@pytest.fixture
def data_dir(tmp_path):
    """A training split of 1000 tokens, each its own position, in three shards of odd lengths."""
    tokens = np.arange(1000, dtype=np.uint16)
    for number, piece in enumerate(np.split(tokens, [333, 350])):
        np.save(tmp_path / f"train_{number}.npy", piece)
    np.save(tmp_path / "val_0.npy", np.arange(500, dtype=np.uint16))
    return tmp_path


def loader(data_dir, rank=0, world_size=1, **changes):
    options = {
        "block_size": T,
        "micro_batch_size": 4,
        "seed": 1,
        "shuffle": True,
        "vocab_size": 50257,
    }
    dist_info = DistInfo(CPU, rank=rank, world_size=world_size)
    return ShardedDataLoader(
        open_shards(data_dir, "train"), dist_info=dist_info, **options | changes
    )


@given(size=st.integers(1, 5000), seed=st.integers(0, 10), epoch=st.integers(0, 3))
@settings(max_examples=60)
def test_permute_is_one_to_one(size, seed, epoch):
    places = np.arange(size)
    assert np.array_equal(np.sort(permute(places, size, seed, epoch)), places)


def test_permute_looks_random():
    size = 100_000
    order = permute(np.arange(size), size, seed=1337, epoch=0)
    other_epoch = permute(np.arange(size), size, seed=1337, epoch=1)
    assert abs(np.corrcoef(np.arange(size), order)[0, 1]) < 0.02
    assert abs(np.corrcoef(order, other_epoch)[0, 1]) < 0.02
    # Neighbours end up a third of the range apart on average, as independent draws would.
    assert np.abs(np.diff(order)).mean() / size == pytest.approx(1 / 3, abs=0.01)


def test_permute_takes_no_memory_for_the_range():
    huge = 10**15
    places = permute(np.array([0, 1, huge - 1]), huge, seed=0, epoch=0)
    assert len(set(places.tolist())) == 3
    assert all(0 <= place < huge for place in places.tolist())


def test_loader_targets_are_inputs_one_token_ahead_across_shard_edges(data_dir):
    with loader(data_dir, shuffle=False) as batches:
        seen = list(itertools.islice(batches, 15))
    inputs = torch.cat([batch.inputs for batch in seen])
    targets = torch.cat([batch.targets for batch in seen])
    assert torch.equal(targets, inputs + 1)
    assert torch.equal(inputs.flatten(), torch.arange(15 * 4 * T))


def test_loader_step_across_an_epoch_edge_repeats_nothing(data_dir):
    batches = loader(data_dir)  # 8 windows a step, 124 an epoch: step 15 crosses; two epochs
    seen = [start for step in range(31) for start in batches.window_starts(8 * step, 8).tolist()]
    offset = epoch_offset(1, T, seed=1)
    assert sorted(seen[:124]) == list(range(0, 124 * T, T))
    assert sorted(seen[124:]) == list(range(offset, 124 * T + offset, T))
    assert offset > 0
    assert seen[:124] != [start - offset for start in seen[124:]]


def test_loader_reads_the_last_window_of_a_later_epoch_where_it_fits(data_dir):
    # 111 windows of 9 tokens, which fill the split: one step takes them all.
    batches = loader(data_dir, block_size=9)
    offset = epoch_offset(1, 9, seed=1)
    first, second = (sorted(batches.window_starts(111 * step, 111).tolist()) for step in (0, 1))
    assert first == list(range(0, 991, 9))
    assert offset > 0
    assert second == [*range(offset, 990, 9), 990]  # the last one is tokens [990, 1000)


def test_epochs_all_begin_elsewhere_and_the_first_at_the_beginning():
    offsets = [epoch_offset(epoch, T, seed=3) for epoch in range(T)]
    assert offsets[0] == 0
    assert sorted(offsets) == list(range(T))
    assert [epoch_offset(epoch, T, seed=4) for epoch in range(T)] != offsets


def test_loader_order_depends_on_the_seed_and_the_position_only(data_dir):
    order = loader(data_dir).window_starts(0, 300).tolist()
    assert order[:8] != loader(data_dir, seed=2).window_starts(0, 8).tolist()
    for position, count in ((0, 1), (3, 8), (120, 8), (123, 1), (124, 125), (299, 1)):
        other = loader(data_dir, rank=1, world_size=2, micro_batch_size=3, position=7)
        found = other.window_starts(position, count).tolist()
        assert found == order[position : position + count]


@pytest.mark.parametrize(("world_size", "micro_batch_size"), [(1, 4), (2, 2), (4, 1)])
def test_loader_steps_have_the_same_windows_at_every_world_size(
    data_dir, world_size, micro_batch_size
):
    """Also if the steps differ in size and cross from the first epoch into the second."""
    sizes, position = (4, 8, 8, 16, 4), 100
    ranks = [
        loader(data_dir, rank, world_size, micro_batch_size=micro_batch_size, position=position)
        for rank in range(world_size)
    ]
    with ExitStack() as stack:
        for batches in ranks:
            stack.enter_context(batches)
        for size in sizes:
            micro_steps = size // (world_size * micro_batch_size)
            seen = [next(batches).inputs[:, 0] for batches in ranks for _ in range(micro_steps)]
            expected = ranks[0].window_starts(position, size)  # each token is its own position
            assert sorted(torch.cat(seen).tolist()) == sorted(expected.tolist())
            position += size
            assert {batches.position for batches in ranks} == {position}


@pytest.mark.parametrize("taken", [0, 6, 31])  # of 4 windows; batch 31 ends the first epoch
def test_loader_continues_at_the_position_of_what_was_taken(data_dir, taken, monkeypatch):
    windows, read_shards = threading.Semaphore(0), TokenShards.read

    def read(*args):
        tokens = read_shards(*args)
        windows.release()
        return tokens

    monkeypatch.setattr(TokenShards, "read", read)
    with loader(data_dir) as batches:
        list(itertools.islice(batches, taken))
        for _ in range(4 * (taken + BATCHES_AHEAD)):  # the next batches are already read
            assert windows.acquire(timeout=600)
        assert (batches.position, batches.tokens_seen) == (4 * taken, 4 * taken * T)
        with loader(data_dir, position=batches.position) as resumed:
            for _ in range(2):
                for ours, theirs in zip(next(resumed), next(batches), strict=True):
                    assert torch.equal(ours, theirs)


def test_loader_thread_ends_with_the_body(data_dir):
    with loader(data_dir) as batches:
        next(batches)
    assert not any(thread.name.startswith("dataloader") for thread in threading.enumerate())


def test_loader_refuses_an_impossible_id(data_dir):
    batches = loader(data_dir, shuffle=False)
    path = data_dir / "train_1.npy"
    tokens = np.load(path)
    tokens[10] = 60000  # after the folder was opened and checked
    np.save(path, tokens)
    with batches, pytest.raises(ValueError, match=f"{data_dir} has token id 60000, but ids must"):
        list(itertools.islice(batches, 15))


def test_to_batch_keeps_ids_beyond_int16():
    tokens = np.array([[0, 1, 32767, 32768, 50256]], np.uint16)
    batch = to_batch(tokens, CPU)
    assert batch.inputs.tolist() == [[0, 1, 32767, 32768]]
    assert batch.targets.tolist() == [[1, 32767, 32768, 50256]]
    assert batch.inputs.dtype == torch.int64


def validation_targets(data_dir, max_tokens, rank=0, world_size=1):
    """The targets that count in each batch of a rank."""
    batches = validation_batches(
        open_shards(data_dir, "val"),
        block_size=T,
        micro_batch_size=4,
        max_tokens=max_tokens,
        vocab_size=50257,
        dist_info=DistInfo(CPU, rank=rank, world_size=world_size),
    )
    for batch in batches:
        assert batch.targets.shape == (4, T)
        yield batch.targets[batch.targets != IGNORE_INDEX].tolist()


@pytest.mark.parametrize("world_size", [1, 3])
def test_validation_batches_cover_the_same_tokens_at_every_world_size(data_dir, world_size):
    """25 of the split's 62 windows, from its start to near its end."""
    ranks = [[*validation_targets(data_dir, 200, r, world_size)] for r in range(world_size)]
    starts = [i * 62 // 25 * T for i in range(25)]
    expected = [start + 1 + i for start in starts for i in range(T)]
    assert sorted(itertools.chain(*itertools.chain(*ranks))) == expected
    assert len({len(batches) for batches in ranks}) == 1


def test_validation_fingerprint_names_the_windows_of_a_part(data_dir):
    shards = open_shards(data_dir, "val")
    assert validation_fingerprint(shards, T, 496) == shards.fingerprint
    found = validation_fingerprint(shards, T, 200)
    assert found == f"{shards.fingerprint} (25 of 62 windows, spread)"


def test_validation_batches_take_what_there_is(data_dir):
    counted = sum(map(len, validation_targets(data_dir, 10**9)))
    assert counted == count_windows(500, T) * T == 496
