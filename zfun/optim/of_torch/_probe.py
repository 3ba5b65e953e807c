"""Find out what a step of one of torch's optimizers leaves behind, apart from new parameters.

[Note: what a step writes]
Each step of ``from_torch`` makes a new optimizer of the class. So the probe looks at everything
that a step leaves behind: two optimizers of the class take some steps, with other gradients and
other cuts. The state of elements is carried from step to step, and so are numbers of the group that
are equal in both runs. The rest is refused by name: attributes of the optimizer, values of the
group that are no numbers, and numbers that gradients or cuts decide.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AnySet
from types import FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from zfun.errors import NotElementwiseError, OptionError

# The lengths of the pieces of a vector.
CUTS = ([48], [13, 1, 34])
# Tensors with the same elements, by which a class may decide: by dimensions, or by their number.
_SHAPES = (
    ((48,), [(6, 8), (2, 4, 6), (2, 2, 3, 4)]),
    ((160 * 160,), [(160, 160)]),
)
_NUM_STEPS = 3
# Some classes look at a matrix from a later step on, or in each tenth one.
_MANY_STEPS = 30
_MAX_DEPTH = 8
# Flags of torch's own classes, about devices.
FLAGS = ("_need_device_dtype_check_for_fused", "_warned_capturable_if_run_uncaptured")
_NUMBERS = (bool, int, float, np.bool_, np.integer, np.floating)


class Kept(NamedTuple):
    """The values that a class carries from step to step."""

    # The numbers that a step writes into its group, as they are before the first step.
    group: dict[str, Tensor]
    # The names in the state of a tensor whose number is that of the steps.
    counters: frozenset[str]
    # The values of the first run of the probe after all steps.
    end: Tensor


class _ProbeNote(NamedTuple):
    """The values of an optimizer, before a step or after."""

    # A value that is no number as tokens.
    group: dict[str, Any]
    # A token for each value outside of state and group, by path.
    hidden: dict[str, Any]
    # Of the first tensor, without ``None``.
    state: dict[str, Any]


def samples(length: int = sum(CUTS[0])) -> list[Tensor]:
    """Return the values of a vector, and the gradients of some steps."""
    generator = torch.Generator(device="cpu").manual_seed(0)
    scale = torch.logspace(-3, 3, length, dtype=torch.float64, device="cpu")
    return [
        torch.randn(len(scale), generator=generator, dtype=torch.float64, device="cpu") * scale
        for _ in range(1 + _NUM_STEPS)
    ]


def as_tensor(value: Any) -> Tensor:
    """Return a number of torch's state or group, with all digits, as a 0-dim tensor on the CPU."""
    if isinstance(value, Tensor):
        return value.detach().cpu()
    value = value.item() if isinstance(value, np.generic) else value
    dtype = {bool: torch.bool, int: torch.int64}.get(type(value), torch.float64)
    return torch.tensor(value, dtype=dtype, device="cpu")


def as_kind(kind: Any, value: Tensor) -> Any:
    """Return a number as a new one of the kind of another."""
    if isinstance(kind, Tensor):
        return value.to(kind.dtype, copy=True)
    return type(kind)(value.item()) if isinstance(kind, np.generic) else value.item()


def examine(make: type[torch.optim.Optimizer], options: Mapping[str, Any]) -> Kept:
    """Find out what a class carries from step to step, or refuse the class."""
    name = make.__name__
    if callable(getattr(make, "train", None)) and callable(getattr(make, "eval", None)):
        raise OptionError(
            "from_torch() takes classes that train and evaluate the same parameters; got "
            f"{name}, whose train() and eval() exchange the parameters; use one of zf.optim, with "
            "a schedule as the learning rate"
        )
    values, *grads = samples()
    try:
        runs, end = _run(make, options, values, grads, CUTS[0])
        fewer = [-0.75 * x.flip(0)[:40] for x in (values, *grads)]
        others, _ = _run(make, options, fewer[0], fewer[1:], [13, 1, 26])
    except Exception as error:  # the code of any class runs here and may raise anything
        raise raised_on(name, error) from error
    _check_hidden(name, [noted.hidden for noted in runs])
    late = [key for noted in runs[2:] for key in noted.state if key not in runs[1].state]
    if late:
        raise OptionError(
            f"from_torch() takes classes whose first step makes the whole state; got {name}, "
            f"where a later step makes {late[0]!r}; make it in the first step"
        )
    group = {
        key: _carried(name, key, *([x.group.get(key) for x in run] for run in (runs, others)))
        for key in dict.fromkeys(key for noted in runs for key in noted.group)
        if len({_token(noted.group.get(key)) for noted in runs}) > 1
    }
    if torch.equal(end, values) and not group:
        raise OptionError(
            f"from_torch() calls step() without a closure; got {name}, whose steps then change "
            "nothing; use a class that steps by the gradients alone"
        )
    counters = frozenset(
        key
        for key in runs[1].state
        if all(
            _is_number(noted.state.get(key)) and float(noted.state[key]) == step
            for step, noted in enumerate(runs)
            if step
        )
    )
    return Kept(group, counters, end)


def check_shapes(make: type[torch.optim.Optimizer], options: Mapping[str, Any]) -> None:
    """Refuse a class that steps the elements of a matrix in another way than those of a vector."""
    for flat, shapes in _SHAPES:
        values, *grads = samples(flat[0])
        ends = [_end(make, options, values, grads, shape, {}) for shape in (flat, *shapes)]
        for shape, end in zip(shapes, ends[1:], strict=True):
            if found := differing(ends[0] - values, end - values, values):
                raise NotElementwiseError(
                    "an optimizer for from_torch() works element by element; "
                    f"{make.__name__} changed an element of a vector by {found[0]:.6g}, and the "
                    f"same one of a tensor of shape {shape} by {found[1]:.6g}; use one of zf.optim"
                )


def keys_that_steps_read(
    make: type[torch.optim.Optimizer], options: Mapping[str, Any], others: Mapping[str, Any]
) -> list[str]:
    """Return the keys by which the steps of a class differ if its group has these others too.

    Numbers that the steps write themselves are left out.
    """
    values, *grads = samples()
    both = torch.cat([values, values])

    def end(more: Mapping[str, Any]) -> Tensor:
        shapes = (_SHAPES[0][0], _SHAPES[0][1][0])
        return torch.cat([_end(make, options, values, grads, x, more) for x in shapes])

    def is_read(name: str) -> bool:
        try:
            return bool(differing(end({name: others[name]}), plain, both))
        except NotElementwiseError as error:
            raise OptionError(
                "an engine makes the optimizer anew in each step; got a group with "
                f"{name!r}, with which no step runs: {error.__cause__!r}; leave it out, or use one "
                "of zf.optim"
            ) from error

    plain, noted = end({}), _run(make, options, values, grads, CUTS[0])[0]
    first, last = noted[0].group, noted[-1].group
    written = {name for name in last if _token(last[name]) != _token(first.get(name))}
    return [name for name in others if name not in written and is_read(name)]


def differing(first: Tensor, second: Tensor, values: Tensor) -> list[float]:
    """Return two changes of one element of some values that are not equal, or nothing."""
    wrong = ~torch.isclose(first, second, rtol=1e-9, atol=0.0, equal_nan=True)
    # The new values have rounding errors of their own.
    wrong &= (first - second).abs() > 1e-15 * values.abs()
    return [x[wrong][0].item() for x in (first, second)] if wrong.any() else []


def _end(
    make: type[torch.optim.Optimizer],
    options: Mapping[str, Any],
    values: Tensor,
    grads: Sequence[Tensor],
    shape: tuple[int, ...],
    more: Mapping[str, Any],
) -> Tensor:
    """Return the elements of a tensor of a shape after all steps, with more keys in the group."""
    param = torch.nn.Parameter(values.clone().view(shape), requires_grad=False)
    try:
        made: Any = make([param], **options)
        made.param_groups[0].update(more)
        for step in range(_MANY_STEPS):
            grad, now = grads[step % len(grads)].clone(), param.detach().reshape(-1)
            if step % 4 == 3:
                # As before a normalization; AdamP and its like look for that.
                grad -= now * (grad @ now) / (now @ now)
            param.grad = grad.view(shape)
            step_alone(made)
    except Exception as error:  # the code of any class runs here and may raise anything
        raise raised_on(make.__name__, error, f"a tensor of shape {shape}") from error
    return param.detach().reshape(-1)


def raised_on(name: str, error: Exception, what: str = "a vector") -> NotElementwiseError:
    """Return the error about a class that raised."""
    return NotElementwiseError(
        f"an optimizer for from_torch() works element by element; {name} raised "
        f"{type(error).__name__} on {what}: {error}; use one of zf.optim"
    )


def _run(
    make: type[torch.optim.Optimizer],
    options: Mapping[str, Any],
    values: Tensor,
    grads: Sequence[Tensor],
    cuts: list[int],
) -> tuple[list[_ProbeNote], Tensor]:
    """Let one optimizer take all steps; note what it has before the first, and after each."""
    pieces = [torch.nn.Parameter(x.clone(), requires_grad=False) for x in values.split(cuts)]
    made: Any = make(pieces, **options)
    # The defaults of the class may share lists and tensors with the group.
    entries = [
        x for x in made.param_groups[0].values() if isinstance(x, Tensor) or not _is_number(x)
    ]
    known = {id(x) for x in (made, *pieces, *entries)}
    noted = [_note(made, pieces, known)]
    for grad in grads:
        for piece, its in zip(pieces, grad.split(cuts), strict=True):
            piece.grad = its.clone()
        step_alone(made)
        noted.append(_note(made, pieces, known))
    return noted, torch.cat([piece.detach() for piece in pieces])


def step_alone(made: Any) -> None:
    """Step an optimizer of a shard, without the hooks that code has put on all optimizers.

    These belong to the step of the whole parameters, which an engine runs them around.
    """
    step = type(made).step
    if not getattr(step, "hooked", False):
        made.step()
        return
    for hook in (*made._optimizer_step_pre_hooks.values(),):
        hook(made, (), {})
    step.__wrapped__(made)
    for hook in (*made._optimizer_step_post_hooks.values(),):
        hook(made, (), {})


def _note(made: torch.optim.Optimizer, pieces: Sequence[Tensor], known: set[int]) -> _ProbeNote:
    # A copy, because a look at the state of a new tensor would make an entry.
    states = dict(made.state)
    parts = {
        "self.": {
            x: y for x, y in vars(made).items() if x not in ("state", "param_groups", *FLAGS)
        },
        "self.state": {f"[{x!r}]": y for x, y in states.items() if id(x) not in known},
    }
    for kind in type(made).__mro__:
        if kind.__module__.partition(".")[0] not in ("torch", "builtins"):
            parts[f"{kind.__name__}."] = {
                x: y
                for x, y in vars(kind).items()
                if not (x.startswith("__") or callable(y) or hasattr(y, "__get__"))
            }
    hidden = {
        path: token
        for prefix, part in parts.items()
        for key, value in part.items()
        for path, token in _walk(value, f"{prefix}{key}", known)
    }
    group = {key: _copied(x) for key, x in made.param_groups[0].items() if key != "params"}
    state = {key: _copied(x) for key, x in states.get(pieces[0], {}).items() if x is not None}
    return _ProbeNote(group, hidden, state)


def _check_hidden(name: str, noted: Sequence[dict[str, Any]]) -> None:
    for path in dict.fromkeys(path for each in noted for path in each):
        if len({each.get(path) for each in noted}) > 1:
            raise OptionError(
                "from_torch() carries the state of each parameter and the numbers of the group "
                f"from step to step, and nothing else; got {name}, whose step changes {path}; keep "
                "the value in self.state[p], or as a number in the group"
            )


def _carried(name: str, key: str, values: Sequence[Any], others: Sequence[Any]) -> Tensor:
    """Return a number of the group as it is before the first step, if it can be carried."""
    kinds = {as_tensor(x).dtype if _is_number(x) else None for x in values[1:]}
    kinds = {torch.float64} if kinds == {torch.int64, torch.float64} else kinds
    dtype = next(iter(kinds))
    if dtype is None or len(kinds) > 1:
        raise OptionError(
            "from_torch() carries the state of each parameter and the numbers of the group from "
            f"step to step; got {name}, whose step writes {key!r} into the group, which is no "
            "number or is of several kinds; write one number, or keep the value in self.state[p]"
        )
    for mine, its in zip(values, others, strict=True):
        if _token(mine) != _token(its):
            shown = [f"{float(x):.6g}" if _is_number(x) else "no number" for x in (mine, its)]
            raise NotElementwiseError(
                f"an optimizer for from_torch() works element by element; a step of {name} writes "
                f"{key!r} into the group, which was {shown[0]} for some gradients and {shown[1]} "
                "for others; use one of zf.optim"
            )
    first = values[0]
    return as_tensor(first).to(dtype) if _is_number(first) else torch.zeros((), dtype=dtype)


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.dim() == 0 and not value.is_complex()
    return isinstance(value, _NUMBERS)


def _copied(value: Any) -> Any:
    """Return a tensor or number as it is now, and of another value the tokens."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    return value if value is None or _is_number(value) else tuple(_walk(value, "", set()))


def _token(value: Any) -> Any:
    """Return a value to compare instead of a leaf of :func:`_walk`, which may change later."""
    if isinstance(value, Tensor) and value.layout is torch.strided and not value.is_meta:
        data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return value.dtype, tuple(value.shape), data.numpy().tobytes()
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, torch.Generator):
        return _token(value.get_state())
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, (type, FunctionType, MethodType, ModuleType, Tensor)):
        return id(value)
    if isinstance(value, AnySet):
        return frozenset(map(repr, value))
    return value if isinstance(value, tuple) else (type(value), repr(value))


def _walk(value: Any, path: str, known: set[int], depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield a token for each leaf of a value that lists, dicts and objects make up, by path."""
    if id(value) in known or depth > _MAX_DEPTH:
        return
    inner: dict[str, Any] | None = None
    if isinstance(value, Mapping):
        keys = [repr(x) if isinstance(x, (str, int)) else type(x).__name__ for x in value]
        inner = {f"[{key}]": x for key, x in zip(keys, value.values(), strict=True)}
    elif isinstance(value, Sequence) and not isinstance(value, (str, bytes, range)):
        inner = {f"[{index}]": x for index, x in enumerate(value)}
    elif isinstance(value, np.random.Generator):
        inner = {".bit_generator": value.bit_generator.state}
    elif hasattr(value, "__dict__") and not isinstance(
        value, (Tensor, type, FunctionType, MethodType, ModuleType, random.Random)
    ):
        inner = {f".{key}": x for key, x in vars(value).items()}
    if inner is None:
        yield path, _token(value)
    for key, x in (inner or {}).items():
        yield from _walk(x, f"{path}{key}", known | {id(value)}, depth + 1)
