#!/usr/bin/env bash
# Train on several machines under Slurm. Submit it from the repository's folder:
#
#   sbatch --nodes=2 --gpus-per-node=8 --time=12:00:00 scripts/slurm_train.sh NAME [flags of train_gpt2.py]
#
# The job starts one torchrun per node. Five minutes before the time limit, all ranks save a
# checkpoint and rank 0 writes the file PREEMPTED to the run's folder. The job is then requeued with
# the same id, and resumes, as after a node failure. After a crash it is not requeued. To resume a run in a new job,
# submit the script again with the same NAME.
#
# Environment variables, with their defaults:
#   OUT_DIR             folder of run folders, on a disk that all nodes share (runs)
#   PYTHON              Python interpreter (python)
#   PROCESSES_PER_NODE  number of processes per node (the number of GPUs)
#   MASTER_PORT         port of the rendezvous (derived from the job's id)
#
#SBATCH --job-name=gpt2
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=24:00:00
#SBATCH --signal=USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%j.log

set -euo pipefail

if [[ -z ${SLURM_JOB_ID:-} || $# -eq 0 || $1 == -* ]]; then
    echo "usage: sbatch [flags of sbatch] scripts/slurm_train.sh NAME [flags of train_gpt2.py]" >&2
    exit 2
fi
name=$1
shift
cd "${SLURM_SUBMIT_DIR:?}" # Slurm runs a copy of this script from another folder
if [[ ! -f train_gpt2.py ]]; then
    echo "error: $PWD has no train_gpt2.py: run sbatch in the repository's folder" >&2
    exit 2
fi
preempted_file=${OUT_DIR:=runs}/$name/PREEMPTED
mapfile -t nodes < <(scontrol show hostnames "${SLURM_JOB_NODELIST:?}")
port=${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 10000))}
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=240 # seconds to save before torchrun kills the ranks

# torchrun must itself be the task, because Slurm sends signals to tasks, not to their children.
launch() {
    srun --ntasks-per-node=1 --cpu-bind=none --kill-on-bad-exit=1 \
        "${PYTHON:-python}" -m torch.distributed.run \
        --nnodes="${SLURM_JOB_NUM_NODES:?}" --nproc-per-node="${PROCESSES_PER_NODE:-gpu}" \
        --rdzv-backend=c10d --rdzv-endpoint="${nodes[0]}:$port" --rdzv-id="$SLURM_JOB_ID" \
        --signals-to-handle=SIGTERM,SIGINT,SIGUSR1 \
        train_gpt2.py "$@" --out-dir="$OUT_DIR" --run-name="$name" --resume=auto
}

launch --preflight "$@"
before=$(cat "$preempted_file" 2>/dev/null || true)
status=0
launch "$@" || status=$?
# If PREEMPTED has not changed, the run makes no progress.
if [[ -f $preempted_file && $(<"$preempted_file") != "$before" ]]; then
    scontrol requeue "$SLURM_JOB_ID"
    exit 0
fi
exit "$status"
