"""What the user's code changes in the data between epochs; checkpoints hold it."""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

from torch.utils.data import Dataset

from parsl_freetrain.training.loop import changes
from parsl_freetrain.training.loop.packing import How, NotPlain, packed


class ChangedData:
    """``paths``: what is known to change; what changes within an epoch may be a cache."""

    def __init__(self, paths: set[str]) -> None:
        self.paths = paths
        self._read = set[int]()  # empty: ctx.loop has not been given its data yet
        self._then = dict[int, dict[str, Any]]()

    def read(self, known: Iterable[Any]) -> list[Any]:
        """The datasets among known objects, and those within them, as in a Subset."""
        data = [one for k in known if isinstance(one := getattr(k, 'dataset', k), Dataset)]
        for one in data:
            own = getattr(one, '__dict__', {}).values()
            data += [v for v in own if isinstance(v, Dataset) and all(v is not d for d in data)]
        self._read = {*map(id, data)}
        return data

    def look(self, datasets: Mapping[str, Any]) -> None:
        self._then = {
            id(one): _marks(one)
            for one in datasets.values()
            if not self._read or id(one) in self._read
        }

    def changed(self, datasets: Mapping[str, Any], how: How) -> bool:
        """Whether something has changed since :meth:`look` of which that was not known."""
        new = set[str]()
        for name, one in datasets.items():
            then = self._then.get(id(one))
            if then is None or id(one) not in self._read:
                continue
            for key, mark in _marks(one).items():
                if f'{name}.{key}' in self.paths or then.get(key) == mark:
                    continue
                with suppress(NotPlain):  # what is first made between epochs may be a cache, too
                    if key not in then:
                        packed(vars(one)[key], how)
                    new.add(f'{name}.{key}')
        self.paths |= new
        return bool(new)


def _marks(one: Any) -> dict[str, Any]:
    return {
        key: changes.mark(value)
        for key, value in [*getattr(one, '__dict__', {}).items()]
        if changes.may_be_saved(value) and 'cache' not in key
    }
