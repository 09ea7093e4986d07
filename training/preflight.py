"""`--preflight`: check network, software, data and disk, without training."""

import shutil
import tempfile
from contextlib import ExitStack
from pathlib import Path

from corpus.shards import Manifest, verify_shards
from formats.checkpoint import Checkpoint
from runtime import distributed
from runtime.device import device_name
from runtime.distributed import DistInfo, gather_text, is_main, print0, raise_on_all_ranks
from training.checks import check_ranks_agree
from training.config import TrainConfig
from training.folder import check_usable
from training.memory import CHECKPOINT_BYTES_PER_PARAMETER, find_device


def run_preflight(config: TrainConfig, resumed: Checkpoint | None, dist_info: DistInfo) -> None:
    """Run all checks; print a line for each one that passes."""
    distributed.barrier()
    count, per_machine = dist_info.world_size, dist_info.local_world_size
    print0(f"network   {count} x {device_name(dist_info.device)}, {per_machine} per machine")
    check_ranks_agree(config, resumed, find_device(config, dist_info).dtype, dist_info)
    print0("ranks     have the same software, flags, data and checkpoint")
    print0(f"data      {check_hashes(config, dist_info)}")
    print0(f"disk      {check_disk(config, resumed)}")


def check_hashes(config: TrainConfig, dist_info: DistInfo) -> str:
    """Check every shard's hash, if there is a manifest; return a line for the report."""
    manifest = Manifest.load(config.data_dir)
    if manifest is None:
        return "no manifest, so hashes were not checked"
    with raise_on_all_ranks():  # the ranks of a machine share the work
        rank_shards = manifest.shards[dist_info.local_rank :: dist_info.local_world_size]
        verify_shards(config.data_dir, rank_shards)
    return f"the hashes of all {len(manifest.shards)} shards match"


def check_disk(config: TrainConfig, resumed: Checkpoint | None) -> str:
    """Check that all ranks share `--out-dir` and that a checkpoint fits; return a report line."""
    needed = CHECKPOINT_BYTES_PER_PARAMETER * config.model_config().n_params / 2**30
    out_dir, name = config.out_dir, ""
    with ExitStack() as stack:
        with raise_on_all_ranks():
            if is_main():
                if config.run_name is not None:
                    check_usable(out_dir / config.run_name, config, resumed)
                out_dir.mkdir(parents=True, exist_ok=True)
                name = stack.enter_context(tempfile.NamedTemporaryFile(dir=out_dir)).name
        name = Path(gather_text(name)[0]).name
        with raise_on_all_ranks():
            if not (out_dir / name).is_file():
                raise ValueError(
                    f"rank 0 wrote a file to {out_dir} that this rank does not see: use an "
                    f"--out-dir that all machines share"
                )
            free = shutil.disk_usage(out_dir).free / 2**30
            found = f"{out_dir} has {free:.2f} GiB free, a checkpoint needs {needed:.2f} GiB"
            if free < needed:
                raise ValueError(f"{found}: use an --out-dir with more space")
    return found
