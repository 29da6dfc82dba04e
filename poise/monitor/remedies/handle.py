"""What `poise.remedy` returns: a remedy at work on a model, and the one way to take it off again.

Every change to the model goes through a `Remedy`, which remembers how to reverse it; a remedy that fails half way is
taken off before the error leaves. Which changes make which remedy is in the files beside this one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from functools import partial
from types import TracebackType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from poise.monitor.remedies.anatomy import Anatomy

# Which remedies stand on which attention module.
_standing: WeakKeyDictionary[nn.Module, set[str]] = WeakKeyDictionary()


class Remedy:
    """A remedy at work; leaving it as a context manager, or `undo`, takes it off.

    name: as it was asked for. layers: the paths of the attention modules it treats.
    """

    def __init__(self, model: nn.Module, name: str, treated: Iterable[Anatomy]) -> None:
        self.model, self.name = model, name
        self.treated = list(treated)
        self.layers = tuple(one.name for one in self.treated)
        self.active = True
        self._reversals: list[Callable[[], object]] = []
        self._new: list[nn.Parameter] = []
        for one in self.treated:
            standing = _standing.setdefault(one.module, set())
            if name in standing:
                self.undo()
                raise ValueError(
                    f'"{name}" is at work on {one.name} already; undo that one first, or choose others with layers=...'
                )
            standing.add(name)
            self.on_undo(partial(standing.discard, name))

    def parameters(self) -> list[nn.Parameter]:
        """What this remedy added to the model that learns; it belongs into the optimizer."""
        return list(self._new)

    def undo(self) -> None:
        """Takes the remedy off; again changes nothing. What training has made of the weights stays."""
        self.active = False
        while self._reversals:
            self._reversals.pop()()

    def __enter__(self) -> Remedy:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.undo()

    def __repr__(self) -> str:
        state = f"on {len(self.layers)} layers" if self.active else "undone"
        return f"Remedy({self.name!r}, {type(self.model).__name__}, {state})"

    # For the files that make remedies.

    def on_undo(self, reverse: Callable[[], object]) -> None:
        self._reversals.append(reverse)

    def adopt(self, *parameters: nn.Parameter) -> None:
        self._new.extend(parameters)

    def put(self, module: nn.Module, name: str, value: Any) -> None:
        """module.name = value, whatever it was before and whichever of the module's tables held it."""
        tables: list[dict[str, Any]] = [module._parameters, module._buffers, module._modules, module.__dict__]
        table = next((held for held in tables if name in held), module.__dict__)
        before = table.pop(name, None)
        if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
            module.register_buffer(name, value, persistent=False)
        else:
            setattr(module, name, value)

        def reverse() -> None:
            for held in tables:
                held.pop(name, None)
            module._non_persistent_buffers_set.discard(name)
            table[name] = before

        self.on_undo(reverse)

    def refuse(self, one: Anatomy, why: str) -> ValueError:
        return ValueError(f'remedy "{self.name}" cannot be applied to {one.name} ({type(one.module).__name__}): {why}')


def stands(name: str, module: nn.Module) -> bool:
    """Whether this remedy is at work on an attention module."""
    return name in _standing.get(module, ())


def chosen(known: Iterable[str], layers: str | Iterable[str] | Callable[[str], bool] | None) -> list[str]:
    """The paths that the caller named."""
    known = list(known)
    if layers is None:
        return known
    if callable(layers):
        return [name for name in known if layers(name)]
    patterns = (layers,) if isinstance(layers, str) else tuple(layers)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in known):
            raise ValueError(f"layers: {pattern!r} is the path of no attention module. Paths look like {known[0]!r}")
    return [name for name in known if any(fnmatchcase(name, pattern) for pattern in patterns)]
