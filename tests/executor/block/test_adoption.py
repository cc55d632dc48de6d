"""A run that finds another one, or its blocks: without a scheduler."""

from pathlib import Path
from typing import Any

import pytest

from parsl_freetrain.core.model.types import BlockRequest
from parsl_freetrain.executor.block.adoption import NODE, Adoption
from parsl_freetrain.sites.local import LocalSite
from parsl_freetrain.sites.provider import BackfillProvider
from parsl_freetrain.sites.slurm import SlurmSite
from parsl_freetrain.training.process.block_lease import read_holder
from tests.support.parsl_sides import NoParsl


def adoption(
    folder: Path, site: Any, run: str = 'one', wait_s: float = 300.0, label: str = 'freetrain'
) -> Adoption:
    return Adoption(BackfillProvider(site=site), folder, label, run, wait_s)


def named(folder: Path, label: str = 'freetrain') -> str:
    site = SlurmSite(partition='batch')
    adoption(folder, site, label=label).begin()
    return site.run


def test_the_same_folder_and_label_name_the_same_run(tmp_path: Path) -> None:
    assert named(tmp_path) == named(tmp_path / '.' / 'x' / '..')
    assert len({named(tmp_path), named(tmp_path, 'other'), named(tmp_path / 'x')}) == 3
    mine = SlurmSite(partition='batch', run='mine')
    adoption(tmp_path, mine).begin()
    assert mine.run == 'mine'


@pytest.mark.parametrize(
    ('site', 'wait_s'),
    [(LocalSite(nodes=1), 300.0), (SlurmSite(partition='batch'), 0.0)],
    ids=['local', 'slurm'],
)
def test_where_blocks_end_nothing_is_adopted(tmp_path: Path, site: Any, wait_s: float) -> None:
    plain = adoption(tmp_path, site, wait_s=wait_s)
    plain.begin()
    assert plain.node_command() == NODE
    assert plain.take_over(NoParsl()) == []
    plain.end()
    assert list(tmp_path.iterdir()) == []


def test_adopted_nodes_are_told_of_this_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = SlurmSite(partition='batch')
    asked = {'17': BlockRequest(2, None, 'batch'), '18': BlockRequest(1, 2e9, 'batch')}
    monkeypatch.setattr(site, 'adopt', lambda: asked)
    mine = adoption(tmp_path / "it's here", site)
    mine.begin()
    blocks = mine.take_over(NoParsl())
    found = [(b.block, b.job_id, b.request) for b in blocks]
    assert found == [(f'block-{job}', job, request) for job, request in asked.items()]
    (file,) = (tmp_path / "it's here").iterdir()
    holder = read_holder(file)
    assert holder is not None
    assert holder.commands == {'17': 'run 17', '18': 'run 18'}
    assert (
        f"--holder '{str(file).replace(chr(39), chr(39) + chr(34) + chr(39) + chr(34) + chr(39))}'"
        in mine.node_command()
    )
    mine.end()
    assert not file.exists()
