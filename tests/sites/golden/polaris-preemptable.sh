#!/bin/bash
#PBS -N freetrain.r1.block-0
#PBS -o /project/me/block-0.out
#PBS -e /project/me/block-0.err
#PBS -k doe
#PBS -W umask=0077
#PBS -q preemptable
#PBS -l select=10:system=polaris:ngpus=4
#PBS -l place=scatter:excl
#PBS -l min_walltime=01:30:00,max_walltime=03:00:00
#PBS -l filesystems=home:eagle
#PBS -A my-project
#PBS -p -1024
#PBS -r y

SECONDS=0
module use /soft/modulefiles
module load conda
conda activate
export TMPDIR=/tmp
export NCCL_NET_GDR_LEVEL=PHB NCCL_CROSS_NIC=1 NCCL_COLLNET_ENABLE=1 NCCL_NET='AWS Libfabric'
export NCCL_SOCKET_IFNAME=hsn
export FI_CXI_DISABLE_HOST_REGISTER=1 FI_MR_CACHE_MONITOR=userfaultfd FI_CXI_DEFAULT_CQ_SIZE=131072
plugin=/soft/libraries/hwloc/lib:/soft/libraries/aws-ofi-nccl/v1.9.1-aws/lib
LD_LIBRARY_PATH=$plugin${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
export LD_LIBRARY_PATH

set +eu  # what follows looks at statuses
# The scheduler may have shortened the walltime so that the block fits: ask.
waited=  # in the queue, by the scheduler's clock
said=$(timeout 20 qstat -f "$PBS_JOBID" 2>/dev/null)
of() { sed -n "s/^ *$1 = //p" <<<"$said"; }
walltime=$(of 'Resource_List\.walltime') made=$(of ctime) began=$(of stime)
[ -z "$made" ] || [ -z "$began" ] ||
    waited=$(($(date -d "$began" +%s) - $(date -d "$made" +%s)))
case $walltime in
    *[!0-9:]*|''|*:*:*:*) left=5400 ;;
    *:*:*) IFS=: read -r h m s <<<"$walltime"; left=$((10#$h * 3600 + 10#$m * 60 + 10#$s)) ;;
    *) left=5400 ;;
esac
export left=$((left - SECONDS))
left=$((left - 10))
[ "$left" -gt 0 ] || exit 0

node='export FREETRAIN_NODE="$(hostname -s)" FREETRAIN_NODE_SHELL=$$
trap '"'"'[ -z "$command" ] || kill -TERM "$command" 2>/dev/null'"'"' TERM
trap '"'"'[ -z "$command" ] || kill -USR1 "$command" 2>/dev/null'"'"' USR1
/bin/bash -c "$1" &
command=$!
while kill -0 "$command" 2>/dev/null; do wait "$command"; done
wait "$command"; status=$?
[ "$status" != 137 ] || kill -KILL 0
exit "$status"
'
trap '[ -z "$running" ] || kill -TERM "$running" 2>/dev/null' TERM
timeout --foreground --kill-after=10 "$left" mpiexec -n 10 --ppn 1 --cpu-bind none /bin/bash -c "$node" freetrain-node 'process_worker_pool.py --cert_dir '"'"'/a b'"'"'' </dev/null &
running=$!
while kill -0 "$running" 2>/dev/null; do wait "$running"; done
wait "$running"; status=$?
[ "$status" != 124 ] || status=0
exit "$status"
