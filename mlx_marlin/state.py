"""The registry of what a process remembers: caches, decisions, kernels and verdicts.

State that depends on the environment, the devices or files registers here when it is
created; `reset` empties all of it. Caches of pure functions need not register.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Protocol, TypeVar, cast


class Clearable(Protocol):
    """A container that can be emptied, such as a dict, a set or a deque."""

    def clear(self) -> None:
        """Removes everything."""


Container = TypeVar("Container", bound=Clearable)
Function = TypeVar("Function", bound=Callable[..., object])

_resets: list[Callable[[], None]] = []


def register(container: Container) -> Container:
    """Returns a container that `reset` clears from now on."""
    _resets.append(container.clear)
    return container


def cache(maxsize: int | None = None) -> Callable[[Function], Function]:
    """Returns a decorator like `functools.lru_cache` whose cache `reset` clears."""

    def decorate(function: Function) -> Function:
        cached = lru_cache(maxsize)(function)
        _resets.append(cached.cache_clear)
        return cast(Function, cached)

    return decorate


def reset() -> None:
    """Clears all registered state, so that the next call decides everything again.

    Modules register in the order of their imports, lower layers first, but for those
    that are imported when they are needed. In a second pass, decisions that another
    thread has made meanwhile from old state are cleared too.
    """
    for clear in [*_resets, *_resets]:
        clear()
