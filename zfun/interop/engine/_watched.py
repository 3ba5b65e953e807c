"""Values of parameters that code has read: it must not write them, or use them after the step."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from zfun import ops
from zfun.errors import PlacementError
from zfun.transforms.call._lazy import outside_inference_mode

# As many values are watched at a time.
_MAX_WATCHED = 4096
# As many whole values are there for views that are gone.
_MAX_ROOTS = 8
# Elements that are looked at together.
_PIECE = 1 << 16
_FACTOR = 0x9E3779B1
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class WatchedValues:
    """Values that were read outside of calls, until the next :meth:`check`."""

    def __init__(self) -> None:
        self._seen: list[_Seen] = []
        # Those whose memory is not let go.
        self._held: list[_Seen] = []
        self._max_held = 1
        self._roots: list[_Root] = []
        self._max_roots = _MAX_ROOTS

    def add(self, name: str, value: Tensor, *, is_own: bool, is_kept: bool) -> None:
        """Watch a value; check the others if there are too many.

        ``is_own`` says that the memory is not the state's, and ``is_kept`` that code gets the
        value, and may pass the memory on.
        """
        seen = _Seen(name, value, is_own=is_own, is_kept=is_kept)
        self._seen.append(seen)
        if is_own and is_kept:
            if len(self._held) >= self._max_held:
                self._held = [x for x in self._held if x.is_held()]
                self._max_held = 2 * len(self._held) + 1
            self._held.append(seen)
        if len(self._seen) >= _MAX_WATCHED:
            self.check()

    def drop(self, value: object) -> None:
        """Let code write a value, because it gives the value back."""
        if isinstance(value, Tensor):
            self._seen = [x for x in self._seen if not x.is_of(value)]
            self._roots = [x for x in self._roots if not x.has(value)]

    def root(self, name: str, make: Callable[[], Tensor], *, is_own: bool) -> Tensor:
        """Return a whole value of which code gets views; :meth:`written` tells what they write.

        Another view of a value that ``make`` has made is one of the same value; a value that is
        the caller's own, as after a gather, stays no longer than its views.
        """
        for x in self._roots:
            if x.name == name and not (is_own or x.is_old):
                return x.value
        if is_own or len(self._roots) >= self._max_roots:
            self._roots = [x for x in self._roots if x.is_held()]
            self._max_roots = max(_MAX_ROOTS, 2 * len(self._roots))
        with outside_inference_mode():
            self._roots.append(_Root(name, make()))
        return self._roots[-1].value

    def refresh(self, values: Mapping[str, Tensor]) -> None:
        """Let views that code holds have new values, as those of the memory would."""
        self._roots = [x for x in self._roots if x.name not in values or x.is_held()]
        for x in self._roots:
            if (value := values.get(x.name)) is not None:
                x.value.copy_(value)
                x.age()
                x.is_old = False

    def written(self, name: str | None = None) -> dict[str, Tensor]:
        """Return whole values that code has written through views, of one leaf or of all."""
        found: dict[str, Tensor] = {}
        for x in self._roots:
            if name in (None, x.name) and x.is_written():
                if x.is_old or x.name in found:
                    raise lost_write(x.name)
                found[x.name] = x.value
                x.age()
        return found

    def accept(self) -> None:
        """Accept what the memory of the state has now, because the state has changed."""
        for x in self._seen:
            if not x.is_own:
                x.memory = None

    def check(self) -> None:
        """Refuse a write to a value or to a view of one, and forget all."""
        seen, self._seen = self._seen, list[_Seen]()
        self._held.clear()
        roots, self._roots = self._roots, [x for x in self._roots if x.is_held()]
        lost = [x.name for x in seen if x.is_written()]
        lost += [x.name for x in roots if x.is_written() or x.is_changed]
        for x in roots:
            x.age()
        if lost:
            raise lost_write(lost[0])


class _Root:
    """A whole value, of which code has views that it may write."""

    def __init__(self, name: str, value: Tensor) -> None:
        self.name, self.value, self.is_old, self.is_changed = name, value, False, False
        self._has_arrays = value.is_cpu and not ops.is_abstract(value)
        self.age()
        self.is_old = False

    def age(self) -> None:
        """Know that the parameter may have another value from now on."""
        self.is_old, self._version = True, self.value._version
        self._total = checksum(self.value) if self._has_arrays else 0

    def has(self, value: Tensor) -> bool:
        """Whether a value is a view."""
        return value.untyped_storage()._cdata == self.value.untyped_storage()._cdata

    def is_written(self) -> bool:
        """Whether an operation has written a view."""
        return self.value._version != self._version

    def is_held(self) -> bool:
        """Whether code has a view, or has written one."""
        if self._has_arrays and not (self.is_written() or self.is_changed):
            self.is_changed = checksum(self.value) != self._total
        return self.is_written() or self.is_changed or is_shared(self.value)


class CallSums:
    """Checksums of the values that a call has read, and must not write."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[int, weakref.ref[Tensor]]] = {}

    def add(self, name: str, value: Tensor) -> None:
        """Know a value, or refuse another one than the first."""
        total = checksum(value)
        if self._seen.setdefault(name, (total, weakref.ref(value)))[0] != total:
            raise call_write(name)

    def drop(self, name: str) -> None:
        """Forget a parameter, which has a new value."""
        self._seen.pop(name, None)

    def check(self) -> None:
        """Refuse what the call has written after the last read, in values that are there."""
        for name, (total, ref) in self._seen.items():
            value = ref()
            is_released = value is None or not value.numel()
            if not is_released and checksum(value) != total:
                raise call_write(name)


class _Seen:
    """One value. Arrays of numpy write it without a count in the version."""

    def __init__(self, name: str, value: Tensor, *, is_own: bool, is_kept: bool) -> None:
        self.name, self.is_own, self._is_changed = name, is_own, False
        # An alias without the memory shares the count of writes, also when the value is gone.
        self._counter = value.detach()
        self._counter.data = torch.empty(0, dtype=value.dtype, device=value.device)
        self._version = value._version
        # Another device has no arrays.
        has_arrays = is_kept and value.is_cpu and not ops.is_abstract(value)
        self.memory = value.data if has_arrays else None
        self._total = 0 if self.memory is None else checksum(self.memory)

    def is_of(self, value: Tensor) -> bool:
        """Whether this is a value, which has the memory alone."""
        return self.memory is not None and self.memory.data_ptr() == value.data_ptr()

    def is_held(self) -> bool:
        """Whether code holds the memory; else look at it once more, and let it go."""
        if self.memory is not None and not is_shared(self.memory):
            self._look()
        return self.memory is not None

    def _look(self) -> None:
        if self.memory is not None:
            self._is_changed |= checksum(self.memory) != self._total
            self.memory = None

    def is_written(self) -> bool:
        """Whether the value or a view of it was written since."""
        self._look()
        return self._is_changed or self._counter._version != self._version


def is_shared(value: Tensor) -> bool:
    """Whether another tensor has the memory of this one."""
    return torch._C._storage_Use_Count(value.untyped_storage()._cdata) > 2


def checksum(value: Tensor) -> int:
    """Return a number that a change of elements or of their order changes, in all likelihood.

    It takes a few passes over the memory, a tenth of :func:`zfun.ops.fingerprint`.
    """
    flat = (torch.view_as_real(value) if value.is_complex() else value).detach().reshape(-1)
    words = flat.view(_INTEGERS[flat.element_size()])
    # Odd, so that no product loses a bit; all sums wrap around.
    places = (2 * torch.arange(min(_PIECE, len(words)), device=words.device) + 1).to(words.dtype)
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for piece in words.split(_PIECE):
        total = total * _FACTOR + (piece * places[: len(piece)]).sum()
    return int(total)


def refuse_old(name: str, param: Tensor) -> None:
    """Refuse a gradient of a value that was gathered outside of calls before the last step."""
    raise PlacementError(
        "a tensor that was gathered outside of a call is old after the step; got a gradient of "
        f"leaf {name!r} from before; read the attribute of the module again in each step",
        leaf=name,
    )


def call_write(name: str) -> PlacementError:
    """Return the error about a parameter that a call writes."""
    return PlacementError(
        "a call reads parameters, and writes only frozen ones that no optimizer has, by an "
        "operation in place on an item of parameters() or its .data, outside of blocks that "
        f"backward runs again; got an operation in place on leaf {name!r}; write between the "
        "steps, in Lightning in on_train_batch_start()",
        leaf=name,
    )


def lost_write(name: str) -> PlacementError:
    """Return the error about a write that did not go through the parameter."""
    return PlacementError(
        "a parameter of an engine is written by an operation in place on the parameter or its "
        f".data, between the steps; got a write to leaf {name!r} through a view or detach(), an "
        "array of numpy, set_() or swap_tensors(), which would be lost; write to the parameter "
        "or its .data by its own name under torch.no_grad(), such as `p.mul_(2)` or `p[1:] = 0`",
        leaf=name,
    )
