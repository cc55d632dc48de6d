"""Types of sites: ours, and one that another package registers, with nothing changed here."""

import logging
from pathlib import Path

import pytest

from parsl_freetrain.cli.doctor.measuring import programs
from parsl_freetrain.sites.named import site_described, site_in_table
from parsl_freetrain.sites.registry import site_types


def test_our_own_types_are_there_wherever_the_package_is() -> None:
    assert list(site_types())[:4] == ['local', 'slurm', 'pbspro', 'cobalt']
    for name, kind in site_types().items():
        assert kind.name == name
        assert (kind.options is None) == (name == 'local')


@pytest.mark.usefixtures('lsf')
def test_another_package_adds_a_type(tmp_path: Path) -> None:
    kind = site_types()['lsf']
    file = tmp_path / 'site.toml'
    file.write_text('[lsf]\nqueue = "batch"\n')
    assert type(site_in_table(file)) is kind.make
    found = programs([kind])
    assert set(kind.programs) <= set(found)
    assert found['bsub']['version'] == 'IBM Spectrum LSF 10.1.0.14'
    # As a client from afar does:
    assert type(site_described({'type': 'lsf', 'queue': 'batch'})) is site_types()['lsf'].make


def test_a_type_that_cannot_be_loaded_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    info = tmp_path / 'broken-1.0.dist-info'
    info.mkdir()
    (info / 'METADATA').write_text('Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n')
    (info / 'entry_points.txt').write_text(
        '[parsl_freetrain.sites]\n'
        'broken = no_such_module:SITE_TYPE\nstrange = json:dumps\n'
        'second = parsl_freetrain.sites.slurm:SlurmSite\n'
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with caplog.at_level(logging.WARNING):
        assert {'broken', 'strange', 'second'}.isdisjoint(site_types())
    assert 'no_such_module' in caplog.text
    assert 'json:dumps) is no SiteType' in caplog.text
