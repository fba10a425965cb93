"""The states of recurrent layers after each row of the passes since a beginning.

mlx-lm's layers keep the state after a pass's last row alone. Here a pass of several
rows is watched: what the functions that update a state were given, and the inputs of
convolutions. An earlier state follows from these without any weight: the same function
is called with the first rows, and a convolution's state is a slice of its input. After
passes of one row the states themselves are kept.
"""

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from functools import wraps
from threading import RLock, get_ident
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.cache import ArraysCache

from mlx_marlin.warn_once import warn_once

MEMORY_SHARE = 0.02
"""Part of the device's memory that states after passes of one row may take."""
MEMORY = 8 * 2**30
"""Assumed bytes of a device that does not tell its memory."""
Variables = dict[str, Any]
After = Callable[[int], mx.array]
"""Returns a variable of a cache after the first rows of a pass."""


class Update(NamedTuple):
    """A function that returns results and a new state: its parameters."""

    rows: tuple[str, ...]  # Those that have a part for each row
    state: str  # The state before
    axis: int = 1  # The axis of the rows


UPDATES = {
    "gated_delta_update": Update(("q", "k", "v", "a", "b"), "state"),
    "ssm_update": Update(("hidden_states", "B", "C", "dt"), "state"),
    "recurrent_gla": Update(("q", "k", "v"), "h", axis=2),
    "ssm_step": Update(("x",), "state"),
}
"""By the name of the function or method in mlx-lm's modules."""
Places = dict[tuple[Any, str], Update | None]
"""Modules and classes with the name of an update; None for a convolution's call."""
_places_change = RLock()


class Call(NamedTuple):
    """A call of an update."""

    function: Callable[..., tuple[mx.array, mx.array]]
    update: Update
    given: Variables
    state: mx.array  # The state after it

    @property
    def rows(self) -> int:
        """Number of rows; mamba's method is given one, without an axis for it."""
        first, axis = self.given[self.update.rows[0]], self.update.axis
        return int(first.shape[axis]) if first.ndim > axis + 1 else 1

    def after(self, rows: int) -> mx.array:
        """Returns the state after the first rows."""
        if self.rows == 1:
            return self.state
        first = (slice(None),) * self.update.axis + (slice(rows),)
        parts = {name: self.given[name][first] for name in self.update.rows}
        return self.function(**self.given | parts)[1]


class _UnknownError(LookupError):
    """A variable of a cache is not among what was seen."""


class Record:
    """What was seen of one pass."""

    def __init__(self) -> None:
        """Begins with nothing."""
        self._calls: dict[int, Call] = {}  # by the id of the state after it
        self._convolved: list[mx.array] = []  # inputs of convolutions, in their order

    @contextmanager
    def of(self, places: Places) -> Iterator[None]:
        """Sees what this thread calls."""
        with _places_change:
            own = {place: vars(place[0])[place[1]] for place in places}
            for (owner, name), update in places.items():
                setattr(owner, name, self._seen(own[owner, name], update))
            try:
                yield
            finally:
                for (owner, name), function in own.items():
                    setattr(owner, name, function)

    def _seen(self, own: Callable[..., Any], update: Update | None) -> Any:
        names, thread = [*inspect.signature(own).parameters], get_ident()

        @wraps(own)
        def function(*values: Any, **options: Any) -> Any:
            found = own(*values, **options)
            given = dict(zip(names, values, strict=False)) | options
            if get_ident() != thread:
                return found
            if update is None:
                self._convolved.append(given[names[1]])
            elif isinstance(found, tuple):
                self._calls[id(found[1])] = Call(own, update, given, found[1])
            return found

        return function

    def states(
        self, leaves: Sequence[ArraysCache], rows: int
    ) -> list[list[After | None]] | None:
        """Returns how each variable of each cache is had; None if one is unknown."""
        inputs = iter(self._convolved)
        try:
            found = [
                [self._state(value, rows, inputs) for value in leaf.cache]
                for leaf in leaves
            ]
        except _UnknownError:
            return None
        return found if next(inputs, None) is None else None

    def _state(
        self, value: mx.array | None, rows: int, inputs: Iterator[mx.array]
    ) -> After | None:
        if value is None:
            return None
        if id(value) in self._calls:
            return self._updated(value, rows)
        convolved, taps = next(inputs, None), value.shape[1]
        if convolved is None or convolved.shape[1:] != (rows + taps, *value.shape[2:]):
            raise _UnknownError
        return lambda count: mx.contiguous(convolved[:, count : count + taps])

    def _updated(self, value: mx.array | None, rows: int) -> After:
        """Returns the states of the calls that led to one from that before the pass."""
        calls: list[Call] = []
        while rows > 0 and (call := self._calls.get(id(value))):
            calls.insert(0, call)
            rows, value = rows - call.rows, call.given.get(call.update.state)
        if rows:
            raise _UnknownError

        def after(count: int) -> mx.array:
            nth = 0
            while count > calls[nth].rows:
                count, nth = count - calls[nth].rows, nth + 1
            return calls[nth].after(count)

        return after


class RowStates:
    """The recurrent states of a model's cache after each row since `begin`."""

    def __init__(self, model: nn.Module, leaves: Sequence[Any]) -> None:
        """Finds what a pass calls.

        `leaves`: caches that no rows can be taken from.
        """
        self._leaves, self._model = [*leaves], type(model)
        recurrent = all(type(leaf) is ArraysCache for leaf in leaves)
        self._places = _places(model) if leaves and recurrent else {}
        self._is_checked = False
        self._before: list[Variables] = []
        self._after: dict[int, list[Variables]] = {}  # by rows, after passes of one
        self._pass: list[list[After | None]] | None = None
        self._rows = self._most = 0

    @property
    def are_fed_again(self) -> bool:
        """Whether rows before a rejected one have to be fed again."""
        return bool(self._leaves) and not self._places

    def begin(self, passes: int) -> None:
        """Keeps the states from which rows count, for some passes."""
        self._before = self._now()
        self._after, self._pass, self._rows = {}, None, 0
        self._most = _kept_states(self._before, passes)

    @contextmanager
    def watching(self, rows: int, *, is_verifying: bool) -> Iterator[None]:
        """Keeps what the states after fewer rows of a pass are had from.

        `is_verifying`: whether some of the rows may be rejected.
        """
        if is_verifying and self._places:
            record = Record()
            with record.of(self._places):
                yield
            self._pass = self._checked(record, rows)
        else:
            yield
        self._rows += rows
        if len(self._after) < self._most:
            self._after[self._rows] = self._now()

    def reach(self, rows: int) -> int:
        """Returns the most rows, up to some, whose states can be had."""
        if not self._leaves or self._pass is not None:
            return rows
        return max((each for each in self._after if each <= rows), default=0)

    def put(self, rows: int) -> None:
        """Makes the caches have the states after the first rows, as `reach` allows."""
        if not self._leaves:
            return
        if self._pass is None or not rows:
            states = self._after[rows] if rows else self._before
            for leaf, variables in zip(self._leaves, states, strict=True):
                vars(leaf).update(copied(variables))
            return
        for leaf, each in zip(self._leaves, self._pass, strict=True):
            leaf.cache = [None if after is None else after(rows) for after in each]

    def _now(self) -> list[Variables]:
        return [copied(vars(leaf)) for leaf in self._leaves]

    def _checked(self, record: Record, rows: int) -> list[list[After | None]] | None:
        """Returns how states are had, if that of all rows is what the pass left."""
        found = record.states(self._leaves, rows)
        if found is not None and (self._is_checked or self._are_left(found, rows)):
            self._is_checked = True
            return found
        self._places = {}
        _tell(f"{self._model.__module__} makes its states otherwise than is known")
        return None

    def _are_left(self, found: list[list[After | None]], rows: int) -> bool:
        pairs = [
            (after(rows), value)
            for leaf, each in zip(self._leaves, found, strict=True)
            for after, value in zip(each, leaf.cache, strict=True)
            if after is not None
        ]
        equal = [mx.array_equal(a, b, equal_nan=True) for a, b in pairs]
        return all(each.item() for each in equal)


def copied(value: Any) -> Any:
    """Returns a value with containers and variables of arrays of its own.

    Arrays are shared, not copied: MLX's are immutable, and an assignment to a slice
    gives the variable another one.
    """
    if isinstance(value, mx.array):
        return copy(value)
    if isinstance(value, dict):
        return {key: copied(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(copied, value))
    return value


def _kept_states(state: list[Variables], passes: int) -> int:
    """Returns how many states to keep after passes of one row; none after a single."""
    if passes == 1:
        return 0
    arrays: Any = tree_flatten(state)
    own = sum(getattr(array, "nbytes", 0) for _, array in arrays)
    return int(MEMORY_SHARE * _memory()) // own if own else passes


def _memory() -> int:
    told = mx.device_info()
    return int(told.get("memory_size") or told.get("total_memory") or MEMORY)


def _places(model: nn.Module) -> Places:
    """Returns where a model's classes find updates; empty if one is not as known."""
    found: Places = {}
    classes = {cls for module in model.modules() for cls in type(module).__mro__}
    for cls in classes:
        for owner in (cls, sys.modules[cls.__module__]):
            for name in UPDATES.keys() & vars(owner).keys():
                update = UPDATES[name]
                known = inspect.signature(vars(owner)[name]).parameters.keys()
                if missing := {*update.rows, update.state} - known:
                    _tell(f"{owner.__name__}'s {name} has no {min(missing)}")
                    return {}
                found[owner, name] = update
    if nn.Conv1d in classes:
        found[nn.Conv1d, "__call__"] = None
    return found


def _tell(reason: str) -> None:
    warn_once(
        "row states",
        "accepted tokens are fed again after a rejected draft, which takes longer, "
        f"because {reason}",
    )
