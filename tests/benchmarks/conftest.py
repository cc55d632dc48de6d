"""What is measured starts as on a node of a cluster."""

from collections.abc import Iterator

import pytest

from tests.support import template


@pytest.fixture(scope='session', autouse=True)
def nodes_import_what_nodes_do(shared_template: None) -> Iterator[None]:
    """The template of the other tests imports more, and a larger process forks more slowly."""
    with template.that_imports():
        yield
