"""Every row of docs/evidence/replay.md, done again: ``python -m tests.replay.evidence FOLDER``."""

import csv
import gzip
import json
import re
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from joblib import Parallel, delayed

from tests.support.programs import run_to_end

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT.parent / 'shared' / 'data'
PAGE = ROOT / 'docs' / 'evidence' / 'replay.md'
SUMMIT = {'idle': str(DATA / 'idle' / 'summit-2021-02-week1.csv.gz'), 'from': 72743}
THETA = {'swf': str(DATA / 'theta-2022.swf.gz')}
SHUFFLENET = 'hpo-shufflenet-1000'


@dataclass(frozen=True)
class Row:
    """A row of a table: the trainers' file, its options, its first figure, U to three digits."""

    section: str
    trainers: str
    options: str
    efficiency: float

    def study(self, backlog: Path) -> str:
        """Its study, as TOML."""
        theta = self.section.startswith('Theta')
        trainers = backlog if theta else DATA / 'trainers' / f'{self.trainers}.json.gz'
        whole = theta or self.section == 'All nodes'
        settings: dict[str, object] = {
            **(THETA if theta else SUMMIT),
            **({} if whole else {'nodes': 1024}),
            'trainers': str(trainers),
        }
        for name, value in re.findall(r'--([a-z-]+)(?: ([^- ]\S*))?', self.options):
            number = re.fullmatch(r'[\d.]+', value)
            settings[name] = json.loads(value) if number else value or True
        return ''.join(f'{name} = {json.dumps(value)}\n' for name, value in settings.items())


def rows(page: str) -> list[Row]:
    """All rows with a figure, in the order of the page."""
    found = []
    section = ''
    for line in page.splitlines():
        if line.startswith('## '):
            section = line[3:]
        elif match := re.match(
            r'\| (?:([a-z0-9-]+) \| )?`(--[^`]+)` \|(?: [a-z]+ \|)? \**(\d?\.\d+)', line
        ):
            found.append(Row(section, match[1] or SHUFFLENET, match[2], float(match[3])))
    return found


def write_backlog(folder: Path) -> Path:
    """The trainers of the Theta rows, by the line of the page."""
    packed = DATA / 'trainers' / f'{SHUFFLENET}.json.gz'
    everyone = json.loads(gzip.decompress(packed.read_bytes()))
    path = folder / 'backlog.json'
    path.write_text(
        json.dumps([trainer | {'submit_s': 0, 'total_samples': 1e15} for trainer in everyone[:30]])
    )
    return path


def done_again(row: Row, backlog: Path) -> dict[str, object]:
    """What ``freetrain replay`` answers; RuntimeError with its words if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        study = Path(folder) / 'study.toml'
        study.write_text(row.study(backlog))
        program = [sys.executable, '-m', 'parsl_freetrain.cli.main']
        done = run_to_end([*program, 'replay', str(study), '--json'])
    if done.returncode:
        raise RuntimeError(f'{row}: {done.stderr}')
    answer: dict[str, object] = json.loads(done.stdout)
    return answer


def main(folder: Path) -> int:
    """Do all rows again, two at a time; 1 if a figure differs from the page's."""
    if not DATA.exists():
        print(
            'The records of Summit and Theta are not part of the repository; they are '
            f'looked for in {DATA}.',
            file=sys.stderr,
        )
        return 2
    folder.mkdir(parents=True, exist_ok=True)
    backlog, wanted = write_backlog(folder), rows(PAGE.read_text())
    different = 0
    with (folder / 'evidence.csv').open('w', newline='') as file:
        table = csv.writer(file)
        table.writerow(['section', 'trainers', 'options', 'documented', 'efficiency', 'wall_s'])
        answers = Parallel(n_jobs=2, return_as='generator')(
            delayed(done_again)(row, backlog) for row in wanted
        )
        for row, answer in zip(wanted, answers, strict=True):
            efficiency = float(str(answer['efficiency']))
            same = round(efficiency, 3) == row.efficiency
            different += not same
            print(
                f'{row.section:18.18} {row.trainers:22} {row.options:58} '
                f'{row.efficiency:.3f} {efficiency:.4f} '
                f'{float(str(answer["wall_s"])):7.1f} s{"" if same else "  DIFFERENT"}',
                flush=True,
            )
            table.writerow(
                [
                    row.section,
                    row.trainers,
                    row.options,
                    row.efficiency,
                    efficiency,
                    answer['wall_s'],
                ]
            )
    print(f'{len(wanted)} rows, {different} different; {folder / "evidence.csv"}')
    return int(different > 0)


if __name__ == '__main__':
    sys.exit(main(Path(sys.argv[1])))
