"""Batch scripts for qsub of PBS; every value of a user is quoted."""

from pathlib import Path

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.sites.batch.block_shape import BlockShape, Output
from parsl_freetrain.sites.batch.shell import batch_script, run_with_launcher, until_deadline
from parsl_freetrain.sites.pbspro.options import PbsOptions


def render(
    options: PbsOptions, shape: BlockShape, place: Output, command: str, worker_init: str = ''
) -> str:
    """The batch script of one block; BadInput for paths that directives cannot hold."""
    launch = [word.replace('{nodes}', str(shape.nodes)) for word in options.launch] or task_manager(
        place.stdout.removesuffix('.out')
    )
    return batch_script(
        (f'#PBS {line}' for line in _directives(options, shape, place)),
        options,
        worker_init,
        _LIFETIME.format(least=shape.least_s) + until_deadline(shape.deadline, shape.hole_s),
        run_with_launcher(launch, command, options.grace_s),
    )


def _directives(options: PbsOptions, shape: BlockShape, place: Output) -> list[str]:
    resources = {**options.node_resources, **options.node_classes.get(shape.node_class, {})}
    chunk = ''.join(f':{name}={value}' for name, value in resources.items())
    if options.ncpus is not None:
        chunk += f':ncpus={options.ncpus}'
    if options.gpus_per_node:
        chunk += f':ngpus={options.gpus_per_node}'
    if shape.least_s < shape.walltime_s:
        walltime = f'min_walltime={clock(shape.least_s)},max_walltime={clock(shape.walltime_s)}'
    else:
        walltime = f'walltime={clock(shape.walltime_s)}'
    said = [
        f'-N {place.name}',
        f'-o {_path(place.stdout)}',
        f'-e {_path(place.stderr)}',
        '-k doe',
        '-W umask=0077',
        f'-q {options.queue}',
        f'-l select={shape.nodes}{chunk}',
        f'-l place={options.place}',
        f'-l {walltime}',
    ]
    if options.filesystems:
        said.append(f'-l filesystems={":".join(options.filesystems)}')
    if options.account is not None:
        said.append(f'-A {options.account}')
    if options.priority is not None:
        said.append(f'-p {options.priority}')
    # Where preemption means to requeue, a job that must not be requeued cannot be preempted.
    again = options.requeue or options.preemptible
    return [*said, '-r y' if again else '-r n', *options.pbs_options]


def _path(path: str) -> str:
    # qsub removes quotes, and cannot escape one. It takes what stands before a colon for a host.
    if "'" in path or '"' in path or '\n' in path or ':' in path:
        raise BadInput(
            f'PBS cannot write to {path!r}, because of a quote, a colon or a line end in '
            'it; use a folder with another name.'
        )
    return f'"{path}"' if ' ' in path else path


def clock(seconds: int) -> str:
    return f'{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}'


_LIFETIME = """# The scheduler may have shortened the walltime so that the block fits: ask.
waited=  # in the queue, by the scheduler's clock
said=$(timeout 20 qstat -f "$PBS_JOBID" 2>/dev/null)
of() {{ sed -n "s/^ *$1 = //p" <<<"$said"; }}
walltime=$(of 'Resource_List\\.walltime') made=$(of ctime) began=$(of stime)
[ -z "$made" ] || [ -z "$began" ] ||
    waited=$(($(date -d "$began" +%s) - $(date -d "$made" +%s)))
case $walltime in
    *[!0-9:]*|''|*:*:*:*) left={least} ;;
    *:*:*) IFS=: read -r h m s <<<"$walltime"; left=$((10#$h * 3600 + 10#$m * 60 + 10#$s)) ;;
    *) left={least} ;;
esac
export left=$((left - SECONDS))
"""

_LAUNCHER = Path(__file__).with_name('launcher.sh').read_text().partition('\n\n')[2]


def task_manager(files: str) -> tuple[str, ...]:
    """The launcher, before a node's command; needs ``left``, and ``files`` that nodes share."""
    return '/bin/bash', '-c', _LAUNCHER, files
