"""Blocks that fail before any node is ready, and folders for which every block would."""

from pathlib import Path

import pytest

from parsl_freetrain import BadInput, CobaltSite, LocalSite, freetrain_app
from parsl_freetrain.journal.read import Journal
from tests.sites.batch_blocks import QUICK
from tests.support.batch_tests import Rehearsal
from tests.support.training import fit, freetrain
from tests.support.waiting import wait_until


@pytest.mark.parametrize('name', ["it's", '{block_id}', 'two\nlines'])
def test_folder_that_cannot_be_in_command_is_refused_at_start(tmp_path: Path, name: str) -> None:
    with (
        pytest.raises(BadInput, match='single quotes, braces and line ends'),
        freetrain(tmp_path / name, LocalSite(1)),
    ):
        pytest.fail('it was loaded')


def test_three_failures_in_a_row_name_the_output(cobalt: Rehearsal, tmp_path: Path) -> None:
    settings = {**QUICK, 'worker_init': 'echo no such module >&2; exit 3'}
    trainer = freetrain_app(max_nodes=1, total_epochs=1)(fit)
    with freetrain(
        tmp_path, CobaltSite(queue='batch', **settings), address='127.0.0.1'
    ) as executor:
        future = trainer()

        def refused() -> str:
            said = Journal(executor.ledger_path).history().runs[-1].refused
            return said[-1].error if said else ''

        why = wait_until(refused)
        future.cancel()
    assert why.startswith('the last 3 blocks ended by themselves')
    log = Path(why.split(' and ')[-1])
    assert log.read_text() == 'no such module\n'
