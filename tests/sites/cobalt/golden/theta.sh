#!/bin/bash
#COBALT --jobname freetrain.r1.block-0
#COBALT -o /lus/me/block-0.out
#COBALT -e /lus/me/block-0.err
#COBALT --debuglog /lus/me/block-0.cobaltlog
#COBALT -q default
#COBALT -n 128
#COBALT -t 82
#COBALT -A my-project
#COBALT --attrs mcdram=cache:numa=quad:filesystems=home,theta-fs0

SECONDS=0
module load miniconda-3
export OMP_NUM_THREADS=64 MKL_NUM_THREADS=64 KMP_BLOCKTIME=0 KMP_AFFINITY='granularity=fine,compact,1,0'
export MKL_ENABLE_INSTRUCTIONS=AVX512_MIC

set +eu  # what follows looks at statuses
case $COBALT_STARTTIME$COBALT_ENDTIME in
    ''|*[!0-9]*) left=$((4920 - SECONDS)) ;;
    *) left=$((COBALT_ENDTIME - COBALT_STARTTIME - SECONDS)) ;;  # of one clock
esac
hole=$((1800005000 - $(date +%s)))
[ "$hole" -ge "$left" ] || left=$hole
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
timeout --foreground --kill-after=10 "$left" aprun -n 128 -N 1 -d 64 -j 1 -cc depth /bin/bash -c "$node" freetrain-node 'process_worker_pool.py --cert_dir '"'"'/a b'"'"'' </dev/null &
running=$!
while kill -0 "$running" 2>/dev/null; do wait "$running"; done
wait "$running"; status=$?
[ "$status" != 124 ] || status=0
exit "$status"
