"""Batch scripts for sbatch; every value of a user is quoted."""

import shlex
from datetime import datetime

from parsl_freetrain.sites.batch.block_shape import BlockShape, Output
from parsl_freetrain.sites.batch.shell import batch_script, on_each_node
from parsl_freetrain.sites.slurm.options import SlurmOptions


def render(
    options: SlurmOptions, shape: BlockShape, place: Output, command: str, worker_init: str = ''
) -> str:
    """The batch script of one block; ``command`` and ``worker_init`` are shell."""
    srun = shlex.join(
        [
            'srun',
            f'--nodes={shape.nodes}',
            f'--ntasks={shape.nodes}',
            '--ntasks-per-node=1',
            '--wait=0',
            '--kill-on-bad-exit=0',
            '--no-kill',  # the block goes on when nodes of it are given back
            '--input=none',
            '--cpu-bind=none',
            '--mpi=none',
            *options.srun_options,
        ]
    )
    node = shlex.quote(on_each_node('"$SLURMD_NODENAME"'))
    run = f"""node={node}
timeout --kill-after=10 "$left" {srun} /bin/bash -c "$node" freetrain-node {shlex.quote(command)}
status=$?
"""
    return batch_script(
        (f'#SBATCH {shlex.quote(option)}' for option in _options(options, shape, place)),
        options,
        worker_init,
        _LIFETIME.format(limit=shape.walltime_s),
        run + (_REQUEUE if options.requeue else ''),
    )


def _options(options: SlurmOptions, shape: BlockShape, place: Output) -> list[str]:
    said = [
        f'--job-name={place.name}',
        f'--output={_path(place.stdout)}',
        f'--error={_path(place.stderr)}',
        '--open-mode=append',
        f'--partition={options.partition}',
        f'--nodes={shape.nodes}',
        '--ntasks-per-node=1',
        f'--time={shape.walltime_s // 60}',
    ]
    if shape.least_s < shape.walltime_s:
        said.append(f'--time-min={shape.least_s // 60}')
    if shape.deadline is not None:
        at = datetime.fromtimestamp(shape.deadline)
        # An hour that clocks pass twice is counted from sbatch's start.
        twice = at.replace(fold=0).timestamp() != at.replace(fold=1).timestamp()
        said.append(f'--deadline={f"now+{shape.hole_s}" if twice else at.isoformat()}')
    for name, value in (
        ('account', options.account),
        ('qos', options.qos),
        ('constraint', options.constraint_on(shape.node_class)),
        ('gres', options.gres_on(shape.node_class)),
        ('nice', options.nice),
        ('mem', options.memory),
        ('signal', options.signal),
        ('nodelist', ','.join(shape.names) or None),
        ('exclude', ','.join(shape.avoid) or None),
    ):
        if value is not None:
            said.append(f'--{name}={value}')
    if options.exclusive:
        said.append('--exclusive')
    return [*said, '--requeue' if options.requeue else '--no-requeue', *options.sbatch_options]


def _path(path: str) -> str:
    return path.replace('%', '%%')  # Slurm replaces patterns such as %j


_LIFETIME = """\
# Slurm ends a job up to a minute late. The scheduler may also have shortened the limit,
# or an administrator changed it: ask.
read -r start end < <(
    SLURM_TIME_FORMAT=%s timeout 20 squeue --noheader --jobs="$SLURM_JOB_ID" --format='%S %e' |
        grep -E '^[0-9]+ +[0-9]+ *$'  # no line of a wrapper's
)
case $start$end in
    ''|*[!0-9]*) left={limit} ;;
    *) left=$((end - start - SECONDS)) ;;  # of one clock; the node may have another
esac
"""

# Otherwise a block that gave its nodes back on SIGTERM would count as done.
_REQUEUE = """if [ "$status" = 143 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
"""
