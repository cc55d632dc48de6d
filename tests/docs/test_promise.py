"""What is promised to other people's jobs is the same wherever it is said."""

from pathlib import Path

PAGES = 'README.md', 'docs/guides/administrators.md', 'docs/slurm.md', 'docs/pbs.md'


def test_the_promise_is_the_same_on_all_pages() -> None:
    said = set()
    for page in PAGES:
        text = Path(page).read_text()
        begin = text.index("With the scheduler's preemption (`mode='preemptible'`)")
        said.add(text[begin : text.index('[Measured](', begin)])
    assert len(said) == 1
