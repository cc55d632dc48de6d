"""What the kernel counts of processes that it ended because memory was full."""

from pathlib import Path

import pytest

from parsl_freetrain.host.processes import OomWatch, oom_kills

V1 = '9:name=systemd:/x\n4:hugetlb,memory:/slurm/job_7\n0::/other\n'
V2 = '0::/system.slice/job_7/step_0\n'


def told(root: Path, groups: str, **counters: int) -> Path:
    """A computer whose files say this."""
    files = {
        'v1': 'sys/fs/cgroup/memory/slurm/job_7/memory.oom_control',
        'v2': 'sys/fs/cgroup/system.slice/job_7/step_0/memory.events',
        'machine': 'proc/vmstat',
    }
    texts = {'proc/7/cgroup': groups}
    for name, count in counters.items():
        texts[files[name]] = f'under_oom 0\noom_kill {count}\noom_group_kill 5\n'
    for name, text in texts.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ('groups', 'counters', 'expected'),
    [
        (V1, {'v1': 3, 'v2': 4, 'machine': 9}, 3),
        (V2, {'v1': 3, 'v2': 4, 'machine': 9}, 4),
        ('0::/\n', {'v1': 3, 'machine': 9}, 9),
        (V1, {}, 0),
    ],
)
def test_the_count_is_that_of_the_cgroup_or_of_the_computer(
    tmp_path: Path, groups: str, counters: dict[str, int], expected: int
) -> None:
    assert oom_kills(7, told(tmp_path, groups, **counters))[1] == expected


def test_only_what_has_just_happened_counts_and_once(tmp_path: Path) -> None:
    """The slots of one computer share a count."""
    watch = OomWatch(7, told(tmp_path, V2, v2=1))
    watch.beat()
    assert not watch.struck()
    told(tmp_path, V2, v2=2)
    watch.beat()
    assert watch.struck()
    assert not watch.struck()
    told(tmp_path, V2, v2=3)
    for _ in range(9):
        watch.beat()  # the process was slow to end
    assert watch.struck()
    told(tmp_path, V2, v2=4)
    for _ in range(10):
        watch.beat()
    assert not watch.struck()


@pytest.mark.parametrize('beats', [0, 1])
def test_a_process_that_was_moved_has_another_count(tmp_path: Path, beats: int) -> None:
    """What its new cgroup has lost may have been this process's child."""
    watch = OomWatch(7, told(tmp_path, V1, v1=3))
    told(tmp_path, V2, v2=1)
    for _ in range(beats):
        watch.beat()
    assert watch.struck()
    assert not watch.struck()
    told(tmp_path, V2, v2=2)
    assert watch.struck()
