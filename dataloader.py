"""Batches from token shards, as a pure function of the position.

The training tokens are cut into N windows. Window i is tokens [i·T, i·T + T + 1). Its last token is
the first one of the next window, so that every token but the first is a target once, up to the
end of the last window. An epoch is a permutation of the N windows. From the second epoch on, all
windows begin some tokens later, so that repeated text is cut at other places. Both depend only on
the seed and the epoch.

Position p of this order is window p of the first epoch, and so on in the next epochs. A step reads
the next windows of the order, as many as its global batch has, split over micro-steps and ranks.
Therefore a step sees the same windows on any number of processes, and the position is the loader's
only state.
"""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from corpus.shards import TokenArray, TokenShards
from model import IGNORE_INDEX
from runtime.device import to_device
from runtime.distributed import DistInfo, rank_batches
from runtime.errors import UserError
from runtime.permutation import IndexArray, permute

BATCHES_AHEAD = 8  # micro-batches of this process that are read in advance, a thread for each


class Batch(NamedTuple):
    """One micro-batch on the device: (B, T) int64 each, `targets` one token ahead."""

    inputs: Tensor
    targets: Tensor


def count_windows(tokens: int, block_size: int) -> int:
    """Return the number of windows of `block_size` targets in a split of `tokens` tokens."""
    return max(0, tokens - 1) // block_size


def epoch_offset(epoch: int, block_size: int, seed: int) -> int:
    """Return an epoch's window offset: 0 in epoch 0, distinct within any T epochs in a row."""
    first, this = permute(np.array([0, epoch % block_size]), block_size, seed, epoch=-1)
    return int(this - first) % block_size


@dataclass
class ShardedDataLoader:
    """Endless iterator over this process's micro-batches, from a position on.

    Threads read the next micro-batches in advance: with several GPUs and a network disk, reading
    one can take longer than a step.

        with ShardedDataLoader(...) as batches:  # starts and stops the threads
            inputs, targets = next(batches)

    Raises UserError during iteration if an id is too large.
    """

    shards: TokenShards
    block_size: int
    micro_batch_size: int
    """Sequences per micro-batch."""
    seed: int
    shuffle: bool
    """False: read the windows in order, in every epoch from the first token."""
    vocab_size: int
    """Token ids must be below this number."""
    dist_info: DistInfo
    """This process, with the device for the batches."""
    position: int = 0
    """Windows that all processes have taken since the start of the run, without prefetched ones."""

    def __post_init__(self) -> None:
        self.windows_per_epoch = count_windows(self.shards.total_tokens, self.block_size)

    @property
    def tokens_seen(self) -> int:
        """Number of targets in the windows that all processes have taken."""
        return self.position * self.block_size

    def __enter__(self) -> "ShardedDataLoader":
        self._threads = ThreadPoolExecutor(BATCHES_AHEAD, "dataloader")
        self.start_at(self.position, self.micro_batch_size)
        return self

    def start_at(self, position: int, micro_batch_size: int) -> None:
        """Continue from a position of the order, with micro-batches of this size."""
        self.position, self.micro_batch_size = position, micro_batch_size
        self.windows_per_micro_step = micro_batch_size * self.dist_info.world_size
        positions = [position + i * self.windows_per_micro_step for i in range(BATCHES_AHEAD)]
        self._upcoming = deque(self._threads.submit(self._read_tokens, p) for p in positions)

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(cancel_futures=True)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        tokens = self._upcoming.popleft().result()
        ahead = BATCHES_AHEAD * self.windows_per_micro_step
        self._upcoming.append(self._threads.submit(self._read_tokens, self.position + ahead))
        self.position += self.windows_per_micro_step
        return to_batch(tokens, self.dist_info.device)

    def _read_tokens(self, position: int) -> TokenArray:
        """Read this process's micro-batch of the micro-step that starts at `position`."""
        first = position + self.dist_info.rank * self.micro_batch_size
        starts = self.window_starts(first, self.micro_batch_size)
        return read_windows(self.shards, starts, self.block_size, self.vocab_size)

    def window_starts(self, position: int, count: int) -> IndexArray:
        """Return the first tokens of `count` windows, from a position of the order on: int64."""
        epochs, positions = np.divmod(position + np.arange(count), self.windows_per_epoch)
        if not self.shuffle:
            return positions * self.block_size
        starts = np.empty_like(positions)
        for epoch in np.unique(epochs).tolist():  # a step may cross from one epoch into the next
            in_epoch = epochs == epoch
            windows = permute(positions[in_epoch], self.windows_per_epoch, self.seed, epoch)
            offset = epoch_offset(epoch, self.block_size, self.seed)
            starts[in_epoch] = windows * self.block_size + offset
        # The offset may move the last window beyond the end of the split.
        return np.minimum(starts, self.shards.total_tokens - self.block_size - 1)


def validation_windows(shards: TokenShards, block_size: int, max_tokens: int) -> IndexArray:
    """Return the windows of a validation on at most `max_tokens` targets: int64, ascending.

    They are all N of the split or, spread over it, n of them: the i-th is window i * N // n.
    """
    total = count_windows(shards.total_tokens, block_size)
    n_windows = min(total, max_tokens // block_size)
    return np.arange(n_windows) * total // max(1, n_windows)


def validation_fingerprint(shards: TokenShards, block_size: int, max_tokens: int) -> str:
    """Return the split's fingerprint and, if not all windows are validated, which of them are."""
    total = count_windows(shards.total_tokens, block_size)
    n_windows = len(validation_windows(shards, block_size, max_tokens))
    part = f" ({n_windows} of {total} windows, spread)" if n_windows < total else ""
    return f"{shards.fingerprint}{part}"


def validation_batches(
    shards: TokenShards,
    *,
    block_size: int,
    micro_batch_size: int,
    max_tokens: int,
    vocab_size: int,
    dist_info: DistInfo,
    before_batch: Callable[[], object] = lambda: None,
) -> Iterator[Batch]:
    """Yield this process's batches, (B, T) each, of `validation_windows`.

    Every process gets the same number of batches, all of the same shape: windows that only fill up
    a batch have `IGNORE_INDEX` as targets. `before_batch` is called before each; see
    `rank_batches`.
    """
    windows = validation_windows(shards, block_size, max_tokens)
    n_windows = len(windows)
    firsts = range(0, n_windows, micro_batch_size)
    for first, is_counted in rank_batches(firsts, dist_info, before_batch, "validating"):
        indices = np.minimum(first + np.arange(micro_batch_size), n_windows - 1)
        tokens = read_windows(shards, windows[indices] * block_size, block_size, vocab_size)
        batch = to_batch(tokens, dist_info.device)
        n_counted = n_windows - first if is_counted else 0
        filler = torch.arange(micro_batch_size, device=dist_info.device) >= n_counted
        yield Batch(batch.inputs, batch.targets.masked_fill(filler[:, None], IGNORE_INDEX))


def read_windows(
    shards: TokenShards, starts: IndexArray, block_size: int, vocab_size: int
) -> TokenArray:
    """Read windows into one (B, T + 1) uint16 array; raise if an id is `vocab_size` or more."""
    tokens = np.empty((len(starts), block_size + 1), np.uint16)
    for row, start in enumerate(starts.tolist()):
        tokens[row] = shards.read(start, block_size + 1)
    if (largest := int(tokens.max())) >= vocab_size:
        raise UserError(
            f"{shards.paths[0].parent} has token id {largest}, but ids must be below "
            f"{vocab_size}: use shards of GPT-2 tokens, or restore a damaged file"
        )
    return tokens


def to_batch(tokens: TokenArray, device: torch.device) -> Batch:
    """Copy (B, T + 1) uint16 to the device and widen it there to two (B, T) int64 tensors."""
    # Copied as int16, which every device supports: ids above 32767 are negative until masked.
    on_device = to_device(torch.from_numpy(tokens.view(np.int16)), device).long() & 0xFFFF
    return Batch(on_device[:, :-1].contiguous(), on_device[:, 1:].contiguous())
