"""A user's function on its way to the nodes."""

import importlib
import subprocess
import sys
from functools import cache
from pathlib import Path

import cloudpickle
import pytest
import torch

from parsl_freetrain import BadInput
from parsl_freetrain.executor.fragment import payload
from parsl_freetrain.executor.fragment.payload import pack


def tunes() -> bool:
    return bool(torch.backends.cudnn.benchmark)


@cache
def fibonacci(n: int) -> int:
    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)


def counts() -> int:
    return fibonacci(20)


def test_a_function_may_use_one_with_a_cache() -> None:
    function, _, _ = cloudpickle.loads(pack(counts, (), {}, 'cnn').payload)
    assert function.__globals__['fibonacci'] is not fibonacci
    assert function() == 6765


def test_a_function_may_use_modules_that_are_of_their_own_class() -> None:
    function, _, _ = cloudpickle.loads(pack(tunes, (), {}, 'cnn').payload)
    assert function is not tunes  # sent by value
    assert function() is False


def test_nodes_look_for_modules_where_the_program_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / 'elsewhere.py').write_text('def half(n): return n / 2\n')
    monkeypatch.syspath_prepend(str(tmp_path))
    half = importlib.import_module('elsewhere').half
    sent = pack(lambda n: half(n), (), {}, 'cnn').payload
    load = 'import cloudpickle, sys; print(cloudpickle.load(sys.stdin.buffer)[0](6))'
    node = subprocess.run([sys.executable, '-P', '-c', load], input=sent, capture_output=True)
    assert node.stdout == b'3.0\n', node.stderr.decode()


def test_what_is_too_large_to_be_sent_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(payload, 'MOST_MB', 1)
    with pytest.raises(BadInput, match=r'the function has 2 MB, at most 1 MB .* pass its path'):
        pack(counts, (bytes(2_000_000),), {}, 'cnn')


def test_a_function_keeps_the_file_that_it_stands_in() -> None:
    """cloudpickle 3.1.3 forgets it; tracebacks show it, and it tells whose a function is."""

    def outer(n: int) -> int:
        return sum((lambda: n)() for _ in range(n))

    function, _, _ = cloudpickle.loads(pack(outer, (), {}, 'cnn').payload)
    codes = [function.__code__]
    for code in codes:
        codes += [one for one in code.co_consts if isinstance(one, type(code))]
    assert len(codes) == 3 and {code.co_filename for code in codes} == {__file__}
    assert function(3) == 9
