"""Starts a command on each node of a job with PBS's own task manager, without MPI."""

from __future__ import annotations

# $0 is where files may be written that all nodes see, the arguments are the command. pbs_tmrsh
# passes neither the environment nor signals, and ends on SIGTERM: the environment goes through a
# private file, and a signal through a second pbs_tmrsh, which finds the process by its number.
_LAUNCHER = """\
umask 077
command -v pbs_tmrsh >/dev/null ||
    { . "${PBS_CONF_FILE:-/etc/pbs.conf}"; export PATH="$PATH:$PBS_EXEC/bin"; }
files=$(mktemp -d "$0.XXXXXX") || exit 1
trap 'rm -rf "$files"' EXIT
{
    (unset PBS_NODENUM PBS_TASKNUM; export -p)
    printf 'cd %q\\necho $$ >%q/"$1"\\n[ ! -e %q/told ] || exit 143\\nexec' "$PWD" "$files" "$files"
    printf ' %q' "$@"
} >"$files/start"
printf 'kill -TERM "$(<%q/"$1")"\\n' "$files" >"$files/tell"
mapfile -t hosts < <(sort -u "$PBS_NODEFILE")
tell() {
    [ ! -e "$files/told" ] || return
    : >"$files/told"
    for host in "${hosts[@]}"; do
        [ -s "$files/$host" ] || continue
        (trap '' TERM; exec pbs_tmrsh "$host" /bin/bash "$files/tell" "$host") &
        telling+=($!)
    done
}
trap tell TERM
for host in "${hosts[@]}"; do
    (trap '' TERM; exec pbs_tmrsh "$host" /bin/bash "$files/start" "$host") &
    running+=($!)
done
status=0
for one in "${running[@]}"; do
    while kill -0 "$one" 2>/dev/null; do wait "$one"; done
    wait "$one" || status=$?
done
[ ${#telling[@]} = 0 ] || kill -KILL "${telling[@]}" 2>/dev/null
exit "$status"
"""


def task_manager(files: str) -> tuple[str, ...]:
    """The launcher as a command, to which the node's own command is added.

    Parameters
    ----------
    files
        How the paths of its temporary files begin, on a file system that all nodes share.
    """
    return '/bin/bash', '-c', _LAUNCHER, files
