"""The checks of ``freetrain doctor``: what its measurements mean for trainings."""

from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Facts = Mapping[str, Any]

SKEW_S = 2.0  # largest difference of clocks, in seconds, that counts as none: deadlines have more

FREE_BYTES = 1 << 30
SLOW_FSYNC_MS = 200.0
FEW_PORTS = 50

NETWORK_FILE_SYSTEMS = ('nfs', 'lustre', 'gpfs', 'beegfs', 'ceph', 'panfs', 'wekafs', 'daos')
STALE_OPTIONS = {'nocto', 'async'}  # mount options of NFS with which nodes may see old content


@dataclass(frozen=True)
class Finding:
    """What a measurement means: 'ok', 'note' (works, but know it) or 'bad' (work would be lost)."""

    what: str
    state: str
    says: str


def judged(what: str, says: str, *, bad: str | bool = '', note: str | bool = '') -> Finding:
    """One finding: ``bad`` or ``note`` where it holds, with its own sentence if it is one."""
    for state, wrong in (('bad', bad), ('note', note)):
        if wrong:
            return Finding(what, state, says if wrong is True else wrong)
    return Finding(what, 'ok', says)


def findings(facts: Facts) -> list[Finding]:
    """One finding for each thing that was measured, in the order of :data:`CHECKS`."""
    known = ((facts.get(part), check) for part, check in CHECKS)
    return [found for said, check in known if said is not None for found in check(said, facts)]


def _here(here: Facts, _: Facts) -> Iterator[Finding]:
    if 'error' in here:
        yield Finding('Python here', 'bad', here['error'])
    else:
        known = ', '.join(f'{name} {v}' for name, v in here['versions'].items() if v)
        missing = ', '.join(name for name, v in here['versions'].items() if v is None)
        yield judged('versions here', known, bad=missing and f'{known}; not installed: {missing}')
    yield from _torch_and_gpus(here, 'here')


def _torch_and_gpus(one: Facts, where: str) -> Iterator[Finding]:
    torch = one.get('torch', {'error': one.get('error', 'not asked')})
    if 'error' in torch:
        yield Finding(f'torch {where}', 'bad', f'cannot be used: {torch["error"]}')
    else:
        says = (
            f'{torch["version"]}, imported in {torch["import_s"]:.1f} s, backends '
            f'{", ".join(torch["backends"]) or "none"}, {torch["threads"]} threads'
        )
        no_nccl = torch['gpus'] and 'nccl' not in torch['backends']
        wrong = 'there are GPUs, but no nccl' if no_nccl else 'gloo adds up wrongly'
        works = torch['gloo_works'] and not no_nccl
        yield judged(f'torch {where}', says, bad='' if works else f'{says}; {wrong}')
    seen, listed = torch.get('gpus', []), one.get('gpus', [])
    blind = f'there are {len(listed)}, but torch sees none; is it a build for CPUs?'
    yield judged(
        f'GPUs {where}', ', '.join(seen) or 'none', bad=blind if listed and not seen else ''
    )


def _batch(programs: Facts, facts: Facts) -> Iterator[Finding]:
    schedulers = facts['schedulers']
    present = _present(schedulers, programs)
    for scheduler in present:
        missing = [name for name in schedulers[scheduler] if name not in programs]
        says = [programs[name]['version'] for name in schedulers[scheduler] if name in programs]
        version = next(filter(None, says), 'version unknown')
        lacks = f'; missing: {", ".join(missing)}' if missing else ''
        yield judged(scheduler, version + lacks, note=bool(missing) or 'does not answer' in version)
    if not present:
        none = f'no commands of {", ".join(schedulers)} here; the local site works'
        yield Finding('batch system', 'note', none)


def _present(schedulers: Mapping[str, Sequence[str]], programs: Container[str]) -> list[str]:
    """The schedulers of this machine; qsub, which several have, goes to one that is surely here."""
    owners = Counter(name for needed in schedulers.values() for name in needed)
    here = {name: {one for one in needed if one in programs} for name, needed in schedulers.items()}
    sure = {one: names for one, names in here.items() if any(owners[name] == 1 for name in names)}
    explained = set().union(*sure.values())
    return [one for one, names in here.items() if one in sure or names - explained]


def _file_system(one: Facts, _: Facts) -> Iterator[Finding]:
    where = f'{one["folder"]} ({one["type"]} at {one["mount"]})'
    shared = one['type'].startswith(NETWORK_FILE_SYSTEMS)
    unsure = f'{where}; make sure that compute nodes see it, too'
    yield judged('file system', where, note='' if shared else unsure)
    stale = STALE_OPTIONS.intersection(one['options'].split(','))
    if one['type'].startswith('nfs') and stale:
        says = f'{", ".join(sorted(stale))}: nodes may see old content'
        yield Finding('mount options', 'bad', says)
    fsync, directory = one['fsync_ms'], one['fsync_dir_ms']
    says = f'{fsync:.2f} ms for 64 KiB, {directory:.2f} ms for a directory'
    yield judged('fsync', says, note=fsync > SLOW_FSYNC_MS)
    yield _exclusive('exclusive names', one['race'])
    yield judged('rename of a directory', 'works', bad='' if one['rename'] else 'does not work')
    yield _clock('clock of the file server', one['mtime_skew_s'])
    free = one['free_bytes']
    yield judged('free space', f'{free / 2**30:.1f} GiB', note=free < FREE_BYTES)


def _exclusive(what: str, race: Mapping[str, bool]) -> Finding:
    broken = ' and '.join(kind for kind, holds in race.items() if not holds)
    wrong = f'{broken} of one name succeeded twice, or never: checkpoints are not safe here'
    says = 'if several create the same name, one succeeds'
    return judged(what, says, bad=wrong if broken else '')


def _clock(what: str, skew_s: float) -> Finding:
    says = f'{skew_s:+.2f} s from the one here'
    wrong = f'{says}; deadlines of blocks would be missed'
    return judged(what, says, bad=wrong if abs(skew_s) > SKEW_S else '')


def _ports(ports: Facts, _: Facts) -> Iterator[Finding]:
    free = ', '.join(f'{count} free in {span}' for span, count in ports['free'].items())
    few = any(count < FEW_PORTS for count in ports['free'].values())
    yield judged('ports', f'{free}; addresses {", ".join(ports["addresses"])}', bad=few)


def _node(there: Facts, facts: Facts) -> Iterator[Finding]:
    if 'error' in there:
        yield Finding('node', 'bad', there['error'])
        return
    here = facts['here']
    says = f'{there["cores"]} cores, {there["executable"]}'
    same = f'{there["host"]}, which is this computer; {says}'
    same = same if there['host'] == here.get('host') else ''
    yield judged('node', f'{there["host"]}; {says}', note=same)
    ours = here.get('versions', {})
    differ = '; '.join(
        f'{name} {ours.get(name) or "missing"} here, {version or "missing"} there'
        for name, version in there['versions'].items()
        if version != ours.get(name)
    )
    yield judged('versions there', 'the same as here', bad=differ)
    yield from _torch_and_gpus(there, 'there')
    yield _clock('clock there', there['clock_skew_s'])
    if not there['sees_folder'] or 'folder_error' in there:
        unseen = 'the node does not see the folder of checkpoints'
        yield Finding('shared folder', 'bad', there.get('folder_error', unseen))
    elif there['race'] is None:
        apart = "the two sides do not see each other's files within a minute"
        yield Finding('shared folder', 'bad', apart)
    else:
        yield _exclusive('shared folder', there['race'])
    cut_off = (
        "the node reaches none of this computer's addresses; give the executor an address= that "
        'it can reach'
    )
    reaches = there['reaches']
    says = f'the node reaches {reaches[0]}' if reaches else cut_off
    yield judged('network', says, bad=not reaches)


def _imports(facts: Facts, _: Facts) -> Iterator[Finding]:
    if 'error' in facts:
        yield Finding('imports', 'note', f'could not be compared: {facts["error"]}')
        return
    packed_s = facts['unpack_s'] + facts['local_s']
    says = (
        f'{facts["shared_s"]:.1f} s from {facts["prefix"]} with nothing cached; '
        f'{facts["unpack_s"]:.1f} s to unpack {facts["bytes"] / 2**30:.2f} GiB in '
        f'{facts["local"]} and {facts["local_s"]:.1f} s from there'
    )
    pays = f'{says}: BackfillProvider(environment=PackedEnvironment()) pays'
    rarely = (
        f'{says}: packing pays only where imports of many nodes at once take more than '
        f'{packed_s:.1f} s'
    )
    yield judged('imports', rarely, note=pays if facts['shared_s'] > packed_s else '')


def _endpoint(facts: Facts, _: Facts) -> Iterator[Finding]:
    if 'error' in facts:
        yield Finding('endpoint', 'bad', facts['error'])
        return
    wrong = [one for one in facts['versions'] if not one['fits']]
    says = ', '.join(
        f'{one["name"]} {one["there"]}'
        + (f' there, {one["here"]} here' if one['here'] != one['there'] else '')
        for one in wrong or facts['versions']
    )
    yield judged('endpoint', says, bad=bool(wrong))


Check = Callable[[Any, Facts], Iterator[Finding]]

CHECKS: tuple[tuple[str, Check], ...] = (
    ('here', _here),
    ('programs', _batch),
    ('file_system', _file_system),
    ('ports', _ports),
    ('node', _node),
    ('imports', _imports),
    ('endpoint', _endpoint),
)
"""By part of the facts, what is looked at in it; the check gets the part, and all facts."""
