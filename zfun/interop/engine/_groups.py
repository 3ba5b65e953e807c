"""Parameter groups of torch optimizers as pure optimizers, for every loop that holds one.

A torch optimizer holds parameters in groups, each with numbers of its own, and schedulers and
callbacks write those numbers. Here the optimizer object keeps the groups, and never steps: before
each step the numbers of the groups become hyperparameters of the state.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zfun import optim
from zfun.errors import CheckpointError, OptionError
from zfun.interop._configured import Rule, check_made_anew, class_of, flags_of, rule_of, unwrapped
from zfun.interop.engine._moments import ShardedMoments, check_functions, check_once, join, leave
from zfun.interop.engine._values import parts_of
from zfun.optim import Optimizer
from zfun.recipes import ZeroState

# The label of leaves that require a gradient and are in no group.
_NO_GROUP = "no group"
_EXTRA = "extra "
# In the path of a number that steps write into the group of a label.
GROUP = ".inner.group."
# The key of the groups' options in a checkpoint.
_SAVED = "param_groups of zfun"
_PLAIN = (bool, int, float, str, tuple, list, Tensor, type(None))
UNBOUNDED = 3e38
"""The bound of a norm that clips nothing."""


class ParamGroups:
    """The parameter groups of an optimizer, which schedulers and callbacks change.

    Args:
        optimizer: of torch, or a wrapper with ``param_groups``; no step of the optimizer is used.
        params: the parameters by name.
        extra: the names of parameters that belong to no model, whose gradients do not count for
            the norm and are not clipped, as in ``clip_grad_norm_(model.parameters())``.
        norm_of_all: whether a parameter that requires a gradient and is in no group counts for the
            norm of the gradient, as in ``clip_grad_norm_(model.parameters())``; it keeps its value.
    """

    def __init__(
        self,
        optimizer: Any,
        params: Mapping[str, nn.Parameter],
        *,
        extra: Collection[str] = (),
        norm_of_all: bool = False,
    ) -> None:
        self.optimizer = optimizer
        self.torch_optimizer = unwrapped(optimizer)
        self.extra = frozenset(extra)
        self._names = {id(param): name for name, param in params.items()}
        self._params = dict(params)
        self._norm_of_all = norm_of_all
        self._seen: Any = None
        with torch._C.DisableTorchFunctionSubclass():
            # As torch does, which steps a frozen parameter too if it has a gradient.
            self._retained = {name for name, param in params.items() if param.grad is not None}
        # The options of the optimizer that pure() has returned, by label.
        self._first: dict[str, dict[str, Any]] = {}
        # The names of the groups, by trained leaf.
        self.labels: dict[str, str] = {}
        # The leaves that had moments before the first step, as Adagrad makes them.
        self.begun: frozenset[str] = frozenset()
        # Whether the hooks of the optimizer are around what runs now.
        self._is_hooked = False
        # The state of the optimizer while an engine has the moments.
        self._moments: ShardedMoments | None = None
        # Of an average of the parameters, if there is one.
        self.ema_decay: float | optim.Schedule | None = None
        self.refresh()
        if not set(self.labels.values()) - {_NO_GROUP}:
            raise OptionError(
                "an optimizer trains at least one parameter; "
                f"{type(self.torch_optimizer).__name__} has none that requires a gradient; set "
                "requires_grad, or pass an optimizer of the model's own parameters"
            )

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The groups."""
        return self.optimizer.param_groups

    @property
    def extra_params(self) -> dict[str, nn.Parameter]:
        """The parameters that belong to no model, by name."""
        return {name: x for name, x in self._params.items() if name in self.extra}

    def join(self, engine: Any) -> None:
        """Let the state of the optimizer be that of an engine, to which its moments go."""
        optimizer = self.torch_optimizer
        check_functions(optimizer)
        first = with_group_numbers([dict(group) for group in self.groups], engine.state)
        pairs = [
            (new[name], x)
            for new, group in zip(first, self.groups, strict=True)
            for name, x in group.items()
            if name != "params"
        ]
        # Some classes keep numbers in the groups, and no moments.
        has_steps = bool(optimizer.state) or any(new is not x and new != x for new, x in pairs)
        own = torch.optim.Optimizer.state_dict(optimizer) if has_steps else None
        begun = [id(p) for p, entry in optimizer.state.items() if entry.get("step") == 0]
        self.begun = frozenset(self._names[p] for p in begun if p in self._names)
        self._moments = join(optimizer, engine, has_moments=own is not None)
        if own is not None:
            engine.load_optimizer_state(own)

    def leave(self) -> None:
        """Let the state of the optimizer be its own, without moments."""
        leave(self.torch_optimizer)
        self._moments = None

    def positions(self) -> dict[str, int]:
        """Return the places of the parameters in the groups, by name."""
        params = [p for group in self.groups for p in group["params"]]
        return {self._names[id(p)]: i for i, p in enumerate(params) if id(p) in self._names}

    def leaves_out(self, name: str) -> bool:
        """Whether a parameter requires a gradient and is in no group."""
        is_known = name in self.labels or name in self.positions()
        return not is_known and self._params[name].requires_grad

    def retain(self, names: Iterable[str]) -> None:
        """Take parameters as trained, as in an earlier run, though frozen now."""
        self._retained |= set(names)
        self._seen = None

    def refresh(self) -> bool:
        """Look at the groups again; return whether another leaf is trained, or in another group.

        A leaf that was trained stays so, also while ``requires_grad`` is ``False``.
        """
        seen = [[id(p) if p.requires_grad else 0 for p in group["params"]] for group in self.groups]
        more = self._params.items() if self._norm_of_all else ()
        others = [p.requires_grad for _, p in more]
        if self._seen == (seen, others):
            return False
        here = {self._names.get(id(p)) for group in self.groups for p in group["params"]}
        if gone := [x for x, label in self.labels.items() if label != _NO_GROUP and x not in here]:
            raise OptionError(
                "a parameter that an optimizer trains stays in its groups; got groups without leaf "
                f"{gone[0]!r}; freeze it with requires_grad_(False), and keep the groups",
                leaf=gone[0],
            )
        self._seen = (seen, others)
        before, trained = dict(self.labels), {n for n, p in self._params.items() if p.requires_grad}
        self._label(trained | before.keys() | self._retained)
        return self.labels != before

    def train(self, names: Collection[str]) -> None:
        """Train these leaves alone, until :meth:`refresh`."""
        self._seen, self.labels = None, dict[str, str]()
        self._label(names)

    def held(self) -> tuple[Any, ...]:
        """Return what :meth:`train`, :meth:`refresh` and :meth:`pure` replace."""
        return self._seen, self.labels, self._first

    def go_back(self, held: tuple[Any, ...]) -> None:
        """Take back what :meth:`held` has returned."""
        self._seen, self.labels, self._first = held

    def _label(self, names: Collection[str]) -> None:
        check_once(self.groups, {key: name for key, name in self._names.items() if name in names})
        for index, group in enumerate(self.groups):
            for param in group["params"]:
                name = self._names.get(id(param), "")
                # A frozen parameter of another class, such as a quantised weight, has no name.
                if not name and (param.requires_grad or type(param) in (Tensor, nn.Parameter)):
                    raise OptionError(
                        "an optimizer has parameters of the model; got one of shape "
                        f"{tuple(param.shape)} that is none of them; assign it to the module, and "
                        "make the optimizer of the module's parameters"
                    )
                if name in names:
                    self.labels[name] = f"{_EXTRA}{index}" if name in self.extra else str(index)
        for name in self._params if self._norm_of_all else ():
            if name in names:
                self.labels.setdefault(name, _NO_GROUP)

    def pure(self, max_norm: float | None = None) -> Optimizer:
        """Return the optimizer as a pure one, by label, with the first bound of the norm.

        Without a bound no step ever clips; :data:`UNBOUNDED` may be replaced between steps.
        """
        own: dict[str, Optimizer] = {}
        rest: dict[str, Optimizer] = {}
        self._first = self._options()
        for label, (make, options) in self._made().items():
            rules = rest if label.startswith(_EXTRA) else own
            rules[label] = optim.inject_hyperparams(make)(**options)
        if _NO_GROUP in self.labels.values():
            own[_NO_GROUP] = optim.scale(0.0)
        labels = dict(self.labels)
        of_labels = lambda rules: optim.by_label(rules, lambda path, leaf: labels[path])
        alone = next(iter(own.values())) if len(own) == 1 else None
        rule = of_labels(own) if alone is None or alone.partial is None else alone
        if max_norm is not None:
            clip = optim.inject_hyperparams(optim.clip_by_global_norm)(max_norm)
            rule = optim.chain(clip, rule)
        if rest:
            rule = optim.by_label(
                {"model": rule, "extra": of_labels(rest)},
                lambda path, leaf: "extra" if path in self.extra else "model",
            )
        return rule if self.ema_decay is None else optim.ema(self.ema_decay, rule)

    def set_in(self, state: Any, max_norm: float | None = None) -> Any:
        """Return a state of the optimizer with the numbers that the groups have now."""
        optimizer = self.torch_optimizer
        if "_zfun_engine" not in vars(optimizer):
            check_functions(optimizer)
        if self._moments is not None and optimizer.state is not self._moments:
            raise OptionError(
                "the moments of an engine's optimizer are sharded; got another optimizer.state "
                "than the engine's; call load_state_dict() of the optimizer, and leave "
                "optimizer.state as it is"
            )
        options = self._options()
        if (found := self._changed(state, options)) is not None:
            name, before, now = found
            raise OptionError(
                f"{class_of(self.torch_optimizer).__name__} has constant {name}; got {now!r} in a "
                f"group, and {before!r} before; leave {name} as it is, and pass "
                "cycle_momentum=False to a scheduler that cycles it"
            )
        values = {(label, name): x for label, own in options.items() for name, x in own.items()}
        values[("", "max_norm")] = max_norm
        keys = {key: self._key(key) for key in optim.hyperparams(state)}
        new = {key: x for key, short in keys.items() if (x := values.get(short)) is not None}
        return optim.set_hyperparams(state, new)

    def numbers(self) -> dict[str, Any]:
        """Return the numbers that the groups have now, by name."""
        return {
            f"{name} of group {label}": x
            for label, own in self._options().items()
            for name, x in own.items()
            if isinstance(x, (int, float, tuple))
        }

    def beside(self, extra: Any) -> dict[str, Any]:
        """Return the plain values of a checkpoint: those of the caller, and the groups' options."""
        plain = lambda x: x.item() if isinstance(x, Tensor) and x.numel() == 1 else x
        groups = [
            {
                name: list(map(plain, x)) if isinstance(x, (tuple, list)) else plain(x)
                for name, x in group.items()
                if name != "params" and isinstance(x, _PLAIN)
            }
            for group in self.groups
        ]
        return {_SAVED: groups, "extra": extra}

    def restored(self, data: Any, state: Any, *, keeps: bool) -> Any:
        """Write the options of a checkpoint into the groups, as ``load_state_dict`` of torch does.

        Returns the caller's values, of which earlier checkpoints have nothing else. The groups keep
        their options if ``keeps``.
        """
        if not isinstance(data, dict) or _SAVED not in data:
            return data
        if not keeps:
            self.check_saved(state, data[_SAVED])
            for own, saved in zip(self.groups, data[_SAVED], strict=False):
                for name, x in saved.items():
                    old = own.get(name)
                    if isinstance(old, Tensor):
                        old.fill_(x)  # a scheduler holds the tensor too
                    else:
                        own[name] = tuple(x) if isinstance(old, tuple) else x
        return data["extra"]

    def check_saved(self, state: Any, groups: Iterable[Mapping[str, Any]]) -> None:
        """Refuse saved groups with other constants than the optimizer of a state."""
        merged = [{**own, **group} for own, group in zip(self.groups, groups, strict=False)]
        if (found := self._changed(state, self._options(merged))) is not None:
            name, before, now = found
            raise CheckpointError(
                f"{class_of(self.torch_optimizer).__name__} has constant {name}; got {now!r} in a "
                f"saved group, and {before!r} in this run; make the optimizer with the saved "
                f"{name}"
            )

    def _changed(
        self, state: Any, options: Mapping[str, Mapping[str, Any]]
    ) -> tuple[str, Any, Any] | None:
        """Return the name of a constant that has changed, and both values."""
        numbers = set(map(self._key, optim.hyperparams(state)))
        for label, now in options.items():
            before = self._first[label]
            # Options with other names are those of another rule. A flag has chosen the rule, and
            # flags come first.
            is_same_rule = before.keys() == now.keys()
            for name in (*before, *(x for x in now if x not in before)):
                old, new = before.get(name), now.get(name)
                is_number = isinstance(new, (int, float, Tensor)) and not isinstance(new, bool)
                is_free = is_same_rule and (label, name) in numbers
                if not (is_number if is_free else old == new):
                    return name, old, new
        return None

    def _key(self, hyperparam: str) -> tuple[str, str]:
        """Return the label and the name of a hyperparameter of the state."""
        label, _, name = hyperparam.rpartition(".")
        label = label.removeprefix("model").removeprefix("extra").removeprefix(".")
        # One optimizer may stand alone.
        own = [x for x in self._first if not x.startswith(_EXTRA)]
        return label or (own[0] if len(own) == 1 and name != "max_norm" else ""), name

    def hooked(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``step()`` for the optimizer: a function with the hooks of torch around it.

        As in torch, hooks get the arguments, may replace them, and are around a closure too. An
        engine's step that the function takes runs no hooks again.
        """
        optimizer = self.torch_optimizer

        def inside(_: Any, *args: Any, **kwargs: Any) -> Any:
            self._is_hooked = True
            try:
                return step(*args, **kwargs)
            finally:
                self._is_hooked = False

        around: Any = torch.optim.Optimizer.profile_hook_step(inside)

        def hooked(*args: Any, **kwargs: Any) -> Any:
            if self._is_hooked:
                return step(*args, **kwargs)
            optimizer._opt_called = True  # schedulers ask for it
            return around(optimizer, *args, **kwargs)

        # A scheduler that wraps step() looks for its mark, and may have wrapped it before.
        hooked._wrapped_by_lr_sched = True  # pyrefly: ignore[missing-attribute]
        return hooked

    def named(self) -> list[dict[str, Any]]:
        """Return the options of the groups, with names of parameters in place of tensors."""
        return [
            {
                **{name: value for name, value in group.items() if name != "params"},
                "names": [self._names.get(id(p), "") for p in group["params"]],
            }
            for group in self.groups
        ]

    def _made(self) -> dict[str, Rule]:
        groups, optimizer = dict(self._labelled(self.groups)), self.torch_optimizer
        for group in groups.values():
            check_made_anew(optimizer, group)
        return {label: rule_of(optimizer, group) for label, group in groups.items()}

    def _options(
        self, groups: Sequence[Mapping[str, Any]] | None = None
    ) -> dict[str, dict[str, Any]]:
        """Return the options of groups by label, with the flags that choose an optimizer."""
        optimizer, found = self.torch_optimizer, dict[str, dict[str, Any]]()
        for label, group in self._labelled(self.groups if groups is None else groups):
            options = {**flags_of(optimizer, group), **rule_of(optimizer, group)[1]}
            found[label] = {k: tuple(x) if isinstance(x, list) else x for k, x in options.items()}
        return found

    def _labelled(
        self, groups: Sequence[Mapping[str, Any]]
    ) -> Iterator[tuple[str, Mapping[str, Any]]]:
        used = set(self.labels.values())
        for index, group in enumerate(groups):
            labels = (str(index), f"{_EXTRA}{index}")
            yield from ((label, group) for label in labels if label in used)


def with_group_numbers(groups: list[dict[str, Any]], state: ZeroState) -> list[dict[str, Any]]:
    """Return parameter groups with the numbers that steps have written into them."""
    for path, part in zip(*parts_of(state.opt_state), strict=True):
        if GROUP in path:
            index, name = group_of(path, GROUP)
            groups[index][name] = part.item()
    return groups


def group_of(path: str, marker: str) -> tuple[int, str]:
    """Return the index of the group and the name of a number of the group."""
    label, _, name = path.partition(marker)
    return int(label.rpartition(".")[2]), name


def group_number(*states: Any) -> Callable[[str], bool]:
    """Return whether a leaf of a checkpoint is a number that each step takes from its group."""
    names = {name.rpartition(".")[2] for name in optim.hyperparams(states)}
    leaves = tuple(f".{path}" for state in states for path in state.params.layout.paths)
    return lambda key: key.rpartition(".hyperparams.")[2] in names and not key.endswith(leaves)
