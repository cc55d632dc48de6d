import time
from collections.abc import Iterator

import pytest


@pytest.fixture
def utc() -> Iterator[None]:
    """Local times are those of UTC."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv('TZ', 'UTC')
        time.tzset()
        yield
    time.tzset()
