# use_environment.sh ARCHIVE SHA256 FOLDER COMMAND ...: unpack ARCHIVE into a new folder in FOLDER
# (empty: TMPDIR, or /tmp), and become COMMAND in the environment that was in it. If that fails, say
# why, and become COMMAND in the environment that there is.

archive=$1 wanted=$2 local=${3:-${TMPDIR:-/tmp}} here='' why=''
shift 3

# Nodes that were killed could not remove theirs. Only this computer knows its processes, and others
# may have the same folder.
boot=$(< /proc/sys/kernel/random/boot_id)
this="freetrain-environment-$UID@$(< /proc/sys/kernel/hostname)@"
for old in "$local/$this"*; do
  owner=${old##*-}
  if [ -d "$old" ] && [ ! -L "$old" ] && [ -O "$old" ] \
    && { [[ $old != "$local/$this${boot%%-*}-"* ]] || ! kill -0 "${owner%.*}" 2>/dev/null; }; then
    rm -rf -- "$old"
  fi
done

unpack() {
  local found said
  found=$(sha256sum < "$archive") && [ "${found%% *}" = "$wanted" ] \
    || { why="$archive cannot be read, or is not what was packed"; return 1; }
  here=$(mktemp -d "$local/$this${boot%%-*}-$$.XXXXXX") \
    || { why="no folder can be made in $local"; return 1; }
  said=$(tar -xf "$archive" -C "$here" 2>&1) \
    || { why="$archive cannot be unpacked in $local: ${said:0:200}"; return 1; }
  if [ -e "$here/bin/conda-unpack" ]; then
    said=$("$here/bin/python3" "$here/bin/conda-unpack" 2>&1) \
      || { why="conda-unpack has failed: ${said:0:200}"; return 1; }
  fi
  said=$("$here/bin/python3" -P -c 'import parsl_freetrain' 2>&1) \
    || { why="the environment of $archive does not work here: ${said##*$'\n'}"; return 1; }
}

if unpack; then
  export PATH="$here/bin:$PATH" FREETRAIN_ENVIRONMENT="$here"
  unset PYTHONHOME
else
  echo "$(hostname): $why; the packed environment is not used." >&2
  [ -z "$here" ] || rm -rf -- "$here"
fi
exec "$@"
