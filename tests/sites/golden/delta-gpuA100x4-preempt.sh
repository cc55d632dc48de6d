#!/bin/bash
#SBATCH --job-name=freetrain.r1.block-0
#SBATCH --output=/project/me/block-0.out
#SBATCH --error=/project/me/block-0.err
#SBATCH --open-mode=append
#SBATCH --partition=gpuA100x4-preempt
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --time=480
#SBATCH --time-min=240
#SBATCH --account=my-project
#SBATCH --constraint=scratch
#SBATCH --gres=gpu:4
#SBATCH --nice=2147483645
#SBATCH --mem=0
#SBATCH --exclusive
#SBATCH --requeue

SECONDS=0
. ~/venv/bin/activate
export NCCL_SOCKET_IFNAME=hsn TMPDIR=/tmp

set +eu  # what follows looks at statuses
# Slurm ends a job up to a minute late. The scheduler may also have shortened the limit,
# or an administrator changed it: ask.
read -r start end < <(
    SLURM_TIME_FORMAT=%s timeout 20 squeue --noheader --jobs="$SLURM_JOB_ID" --format='%S %e' |
        grep -E '^[0-9]+ +[0-9]+ *$'  # no line of a wrapper's
)
case $start$end in
    ''|*[!0-9]*) left=28800 ;;
    *) left=$((end - start - SECONDS)) ;;  # of one clock; the node may have another
esac
left=$((left - 10))
[ "$left" -gt 0 ] || exit 0

node='export FREETRAIN_NODE="$SLURMD_NODENAME" FREETRAIN_NODE_SHELL=$$
trap : TERM USR1
/bin/bash -c "$1" &
command=$!
while kill -0 "$command" 2>/dev/null; do wait "$command"; done
wait "$command"; status=$?
[ "$status" != 137 ] || kill -KILL 0
exit "$status"
'
timeout --kill-after=10 "$left" srun --nodes=4 --ntasks=4 --ntasks-per-node=1 --wait=0 --kill-on-bad-exit=0 --no-kill --input=none --cpu-bind=none --mpi=none /bin/bash -c "$node" freetrain-node 'process_worker_pool.py --cert_dir '"'"'/a b'"'"''
status=$?
if [ "$status" = 143 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
[ "$status" != 124 ] || status=0
exit "$status"
