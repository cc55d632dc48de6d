#!/bin/bash
#SBATCH --job-name=freetrain.r1.block-0
#SBATCH --output=/project/me/block-0.out
#SBATCH --error=/project/me/block-0.err
#SBATCH --open-mode=append
#SBATCH --partition=batch
#SBATCH --nodes=91
#SBATCH --ntasks-per-node=1
#SBATCH --time=82
#SBATCH --time-min=41
#SBATCH --deadline=2027-01-15T09:23:20
#SBATCH --account=my-project
#SBATCH --gres=gpu:8
#SBATCH --nice=2147483645
#SBATCH --mem=0
#SBATCH --exclusive
#SBATCH --no-requeue
#SBATCH --network=disable_rdzv_get

SECONDS=0
module load PrgEnv-gnu/8.7.0 cpe/26.03 miniforge3/23.11.0-0 rocm/7.1.1 rccl-net-plugin
module load craype-accel-amd-gfx90a
export LD_LIBRARY_PATH=$CRAY_LD_LIBRARY_PATH:$LD_LIBRARY_PATH
. ~/venv/bin/activate
export NCCL_SOCKET_IFNAME=hsn0,hsn1,hsn2,hsn3 NCCL_NET_GDR_LEVEL=PHB NCCL_CROSS_NIC=1
export FI_CXI_RDZV_PROTO=alt_read FI_MR_CACHE_MONITOR=kdreg2
export TMPDIR=/tmp MIOPEN_USER_DB_PATH=/tmp/miopen-$SLURM_JOB_ID
export MIOPEN_CUSTOM_CACHE_DIR=$MIOPEN_USER_DB_PATH
unset CUDA_VISIBLE_DEVICES HIP_VISIBLE_DEVICES

set +eu  # what follows looks at statuses
# Slurm ends a job up to a minute late. The scheduler may also have shortened the limit,
# or an administrator changed it: ask.
read -r start end < <(
    SLURM_TIME_FORMAT=%s timeout 20 squeue --noheader --jobs="$SLURM_JOB_ID" --format='%S %e' |
        grep -E '^[0-9]+ +[0-9]+ *$'  # no line of a wrapper's
)
case $start$end in
    ''|*[!0-9]*) left=4920 ;;
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
timeout --kill-after=10 "$left" srun --nodes=91 --ntasks=91 --ntasks-per-node=1 --wait=0 --kill-on-bad-exit=0 --no-kill --input=none --cpu-bind=none --mpi=none /bin/bash -c "$node" freetrain-node 'process_worker_pool.py --cert_dir '"'"'/a b'"'"''
status=$?
[ "$status" != 124 ] || status=0
exit "$status"
