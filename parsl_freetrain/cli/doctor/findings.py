"""Evaluates the measurements of ``freetrain doctor``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SKEW_S = 2.0
"""Maximum difference of clocks, in seconds, that counts as none, since deadlines have larger
margins.
"""

FREE_BYTES = 1 << 30
SLOW_FSYNC_MS = 200.0
FEW_PORTS = 50

NETWORK_FILE_SYSTEMS = ('nfs', 'lustre', 'gpfs', 'beegfs', 'ceph', 'panfs', 'wekafs', 'daos')


@dataclass(frozen=True)
class Finding:
    """The result for one thing that was measured.

    ``state`` is 'ok', 'note' (works, but you should know) or 'bad' (trainings would fail, or lose
    work).
    """

    what: str
    state: str
    says: str


def findings(facts: Mapping[str, Any]) -> list[Finding]:
    """One finding for each thing that was measured."""
    found = [
        _versions(facts['here']),
        _torch('torch here', facts['here']),
        *_gpus('GPUs here', facts['here']),
        *_batch(facts['schedulers'], facts['programs']),
        *_file_system(facts['file_system']),
        _ports(facts['ports']),
    ]
    there = facts.get('node')
    if there is not None:
        found += _node(facts['here'], there)
    return found


def _versions(here: Mapping[str, Any]) -> Finding:
    if 'error' in here:
        return Finding('Python here', 'bad', here['error'])
    known = ', '.join(f'{name} {version}' for name, version in here['versions'].items() if version)
    missing = [name for name, version in here['versions'].items() if version is None]
    return Finding(
        'versions here',
        'bad' if missing else 'ok',
        known + (f'; not installed: {", ".join(missing)}' if missing else ''),
    )


def _torch(what: str, one: Mapping[str, Any]) -> Finding:
    torch = one.get('torch', {'error': one.get('error', 'not asked')})
    if 'error' in torch:
        return Finding(what, 'bad', f'cannot be used: {torch["error"]}')
    backends = ', '.join(torch['backends']) or 'none'
    says = (
        f'{torch["version"]}, imported in {torch["import_s"]:.1f} s, backends {backends}, '
        f'{torch["threads"]} threads'
    )
    if torch['gpus'] and 'nccl' not in torch['backends']:
        return Finding(what, 'bad', f'{says}; there are GPUs, but no nccl')
    return Finding(
        what,
        'ok' if torch['gloo_works'] else 'bad',
        says if torch['gloo_works'] else f'{says}; gloo adds up wrongly',
    )


def _gpus(what: str, one: Mapping[str, Any]) -> list[Finding]:
    seen, listed = one.get('torch', {}).get('gpus', []), one.get('gpus', [])
    if listed and not seen:
        return [
            Finding(
                what,
                'bad',
                f'there are {len(listed)}, but torch sees none; is it a build for CPUs?',
            )
        ]
    return [Finding(what, 'ok', ', '.join(seen) if seen else 'none')]


def _present(schedulers: Mapping[str, Sequence[str]], programs: Container[str]) -> list[str]:
    """The schedulers of this machine.

    Several have commands of the same names, such as qsub. They belong to a scheduler that also has
    a command of its own here, if there is one.
    """
    owners = Counter(name for needed in schedulers.values() for name in needed)
    here = {
        scheduler: {name for name in needed if name in programs}
        for scheduler, needed in schedulers.items()
    }
    sure = {one: names for one, names in here.items() if any(owners[name] == 1 for name in names)}
    explained = set().union(*sure.values())
    return [one for one, names in here.items() if one in sure or names - explained]


def _batch(
    schedulers: Mapping[str, Sequence[str]], programs: Mapping[str, Mapping[str, str]]
) -> list[Finding]:
    found = []
    for scheduler in _present(schedulers, programs):
        needed = schedulers[scheduler]
        missing = [name for name in needed if name not in programs]
        says = [programs[name]['version'] for name in needed if name in programs]
        version = next(filter(None, says), 'version unknown')
        found.append(
            Finding(
                scheduler,
                'note' if missing or 'does not answer' in version else 'ok',
                version + (f'; missing: {", ".join(missing)}' if missing else ''),
            )
        )
    if not found:
        found.append(
            Finding(
                'batch system',
                'note',
                f'no commands of {", ".join(schedulers)} here; the local site works',
            )
        )
    return found


def _file_system(one: Mapping[str, Any]) -> list[Finding]:
    shared = any(one['type'].startswith(kind) for kind in NETWORK_FILE_SYSTEMS)
    where = f'{one["folder"]} ({one["type"]} at {one["mount"]})'
    found = [
        Finding(
            'file system',
            'ok' if shared else 'note',
            where if shared else f'{where}; make sure that compute nodes see it, too',
        )
    ]
    options = set(one['options'].split(','))
    if one['type'].startswith('nfs') and options & {'nocto', 'async'}:
        found.append(
            Finding(
                'mount options',
                'bad',
                f'{", ".join(sorted(options & {"nocto", "async"}))}: nodes may see old content',
            )
        )
    slow = one['fsync_ms'] > SLOW_FSYNC_MS
    found.append(
        Finding(
            'fsync',
            'note' if slow else 'ok',
            f'{one["fsync_ms"]:.2f} ms for 64 KiB, {one["fsync_dir_ms"]:.2f} ms for a directory',
        )
    )
    found += _exclusive('exclusive names', one['race'])
    found.append(
        Finding(
            'rename of a directory',
            'ok' if one['rename'] else 'bad',
            'works' if one['rename'] else 'does not work',
        )
    )
    found.append(Finding('SQLite locks', 'bad' if one['sqlite'] else 'ok', one['sqlite'] or 'hold'))
    found.append(_clock('clock of the file server', one['mtime_skew_s']))
    small = one['free_bytes'] < FREE_BYTES
    found.append(
        Finding('free space', 'note' if small else 'ok', f'{one["free_bytes"] / 2**30:.1f} GiB')
    )
    return found


def _exclusive(what: str, race: Mapping[str, bool]) -> list[Finding]:
    broken = [kind for kind, holds in race.items() if not holds]
    says = (
        f'{" and ".join(broken)} of one name succeeded twice, or never: checkpoints are '
        'not safe here'
        if broken
        else 'if several create the same name, one succeeds'
    )
    return [Finding(what, 'bad' if broken else 'ok', says)]


def _clock(what: str, skew_s: float) -> Finding:
    off = abs(skew_s) > SKEW_S
    return Finding(
        what,
        'bad' if off else 'ok',
        f'{skew_s:+.2f} s from the one here'
        + ('; deadlines of blocks would be missed' if off else ''),
    )


def _ports(ports: Mapping[str, Any]) -> Finding:
    few = [f'{span}: {free}' for span, free in ports['free'].items() if free < FEW_PORTS]
    says = (
        ', '.join(f'{free} free in {span}' for span, free in ports['free'].items())
        + f'; addresses {", ".join(ports["addresses"])}'
    )
    return Finding('ports', 'bad' if few else 'ok', says)


def _node(here: Mapping[str, Any], there: Mapping[str, Any]) -> list[Finding]:
    if 'error' in there:
        return [Finding('node', 'bad', there['error'])]
    ours, theirs = here.get('versions', {}), there['versions']
    differ = [
        f'{name} {ours.get(name) or "missing"} here, {version or "missing"} there'
        for name, version in theirs.items()
        if version != ours.get(name)
    ]
    same_host = '' if there['host'] != here.get('host') else ', which is this computer'
    found = [
        Finding(
            'node',
            'note' if same_host else 'ok',
            f'{there["host"]}{same_host}; {there["cores"]} cores, {there["executable"]}',
        ),
        Finding(
            'versions there', 'bad' if differ else 'ok', '; '.join(differ) or 'the same as here'
        ),
        _torch('torch there', there),
        *_gpus('GPUs there', there),
        _clock('clock there', there['clock_skew_s']),
    ]
    if not there['sees_folder'] or 'folder_error' in there:
        found.append(
            Finding(
                'shared folder',
                'bad',
                there.get('folder_error', 'the node does not see the folder of checkpoints'),
            )
        )
    elif there['race'] is None:
        found.append(
            Finding(
                'shared folder',
                'bad',
                "the two sides do not see each other's files within a minute",
            )
        )
    else:
        found += _exclusive('shared folder', there['race'])
    reaches = there['reaches']
    found.append(
        Finding(
            'network',
            'ok' if reaches else 'bad',
            f'the node reaches {reaches[0]}'
            if reaches
            else "the node reaches none of this computer's addresses; give the executor an "
            'address= that it can reach',
        )
    )
    return found
