"""The tests here write many checkpoints."""

from tests.support.in_memory import tmp_path_factory  # noqa: F401
