# $0 is where files may be written that all nodes see, the arguments are the command. pbs_tmrsh
# passes neither the environment nor signals, and ends on SIGTERM: the environment goes through a
# private file. A task that is spawned once PBS ends the job holds that up for seconds, ten minutes
# once (OpenPBS 23.06). So nothing is spawned after a SIGTERM: only the first node, which runs this,
# is told; PBS kills the others at once. At the end of its time each node of a block tells itself.

umask 077
command -v pbs_tmrsh >/dev/null ||
    { . "${PBS_CONF_FILE:-/etc/pbs.conf}"; export PATH="$PATH:$PBS_EXEC/bin"; }
files=$(mktemp -d "$0.XXXXXX") || exit 1
trap 'rm -rf "$files"' EXIT
{
    (unset PBS_NODENUM PBS_TASKNUM left; export -p)
    printf 'cd %q\necho $$ >%q/"$1"\n[ ! -e %q/told ] || exit 143\n' "$PWD" "$files" "$files"
    printf 'exec timeout --foreground "$2"'
    printf ' %q' "$@"
} >"$files/start"
mapfile -t hosts < <(awk '!seen[$0]++' "$PBS_NODEFILE")  # this one is the first
tell() {
    [ ! -e "$files/told" ] || return
    : >"$files/told"
    [ ! -s "$files/${hosts[0]}" ] || kill -TERM "$(<"$files/${hosts[0]}")" 2>/dev/null
}
trap tell TERM
within=0  # seconds; no limit
for host in "${hosts[@]}"; do
    [ ! -e "$files/told" ] || break
    (trap '' TERM; exec pbs_tmrsh "$host" /bin/bash "$files/start" "$host" "$within") &
    running+=($!)
    within=$left
done
status=0
for one in "${running[@]}"; do
    while kill -0 "$one" 2>/dev/null; do wait "$one"; done
    wait "$one" || status=$?
done
exit "$status"
