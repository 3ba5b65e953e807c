"""Optimizers of torch as pure ones, and their param groups as hyperparameters.

A torch optimizer holds parameters in groups, each with numbers of its own, and schedulers write
those numbers. Here the optimizer object keeps the groups, and never steps: before each step the
numbers of its groups become hyperparameters of the state.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer as TorchOptimizer

from zfun import optim
from zfun.errors import OptionError
from zfun.interop._torch_rules import rule_of
from zfun.interop.ds_config import Recipe
from zfun.optim import Optimizer

__all__ = ["ConfiguredGroups", "Groups", "groups_of"]

_UNBOUNDED = 3e38


class Groups:
    """The param groups of one torch optimizer.

    Args:
        optimizer: the optimizer, whose parameters are those of the module.
        names: the names of the parameters in the module, by identity.

    Attributes:
        trained: the names of the parameters that the optimizer has and that require a gradient.
    """

    def __init__(self, optimizer: TorchOptimizer, names: Mapping[int, str]) -> None:
        self.optimizer = optimizer
        self._labels: dict[str, str] = {}
        self._names: list[list[str]] = []
        for index, group in enumerate(optimizer.param_groups):
            self._names.append([])
            for param in group["params"]:
                name = names.get(id(param))
                if name is None:
                    raise OptionError(
                        "an optimizer steps parameters of the LightningModule; "
                        f"{type(optimizer).__name__} has a tensor of shape {tuple(param.shape)} "
                        "that is none of them; assign it to the module, and return "
                        "optimizers of self.parameters()"
                    )
                self._names[-1].append(name)
                if param.requires_grad:
                    self._labels[name] = str(index)
        if not self._labels:
            raise OptionError(
                "an optimizer has parameters that require a gradient; "
                f"{type(optimizer).__name__} has none; remove the optimizer"
            )

    @property
    def trained(self) -> frozenset[str]:
        return frozenset(self._labels)

    def pure(self) -> Optimizer:
        """Return a pure optimizer that clips and has the groups' numbers as hyperparameters."""
        parts = {
            str(index): optim.inject_hyperparams(make)(**options)
            for index, (make, options) in enumerate(
                rule_of(type(self.optimizer), group) for group in self.optimizer.param_groups
            )
        }
        used = {label: parts[label] for label in sorted(set(self._labels.values()), key=int)}
        labels = dict(self._labels)
        rule = optim.by_label(used, lambda path, leaf: labels[path])
        return optim.chain(optim.inject_hyperparams(optim.clip_by_global_norm)(_UNBOUNDED), rule)

    def hyperparams(self, max_norm: float | None = None) -> dict[str, float]:
        """Return the numbers of the groups by the names of :func:`zfun.optim.set_hyperparams`.

        Args:
            max_norm: the bound of the gradient's norm in this step; ``None`` for none.
        """
        used = set(self._labels.values())
        return {"max_norm": _UNBOUNDED if max_norm is None else max_norm} | {
            f"{index}.{name}": float(value)
            for index, group in enumerate(self.optimizer.param_groups)
            if str(index) in used
            for name, value in rule_of(type(self.optimizer), group)[1].items()
            if isinstance(value, (int, float, Tensor)) and not isinstance(value, bool)
        }

    def stepped(self, learning_rate: float | None) -> None:
        """Do nothing, because schedulers of torch set the learning rate."""

    def numbers(self) -> list[dict[str, Any]]:
        """Return the options of the groups for a checkpoint, with names of parameters."""
        return [
            {**{name: value for name, value in group.items() if name != "params"}, "names": names}
            for group, names in zip(self.optimizer.param_groups, self._names, strict=True)
        ]

    def restore(self, numbers: list[dict[str, Any]]) -> None:
        """Set the options of the groups from a checkpoint."""
        if len(numbers) != len(self.optimizer.param_groups):
            raise OptionError(
                "an optimizer resumes with the param groups of its checkpoint; got "
                f"{len(self.optimizer.param_groups)} groups and a checkpoint with {len(numbers)}; "
                "return the same optimizers from configure_optimizers()"
            )
        for group, saved in zip(self.optimizer.param_groups, numbers, strict=True):
            group.update({name: x for name, x in saved.items() if name not in ("params", "names")})


class ConfiguredOptimizer(TorchOptimizer):
    """The optimizer of a configuration, as Lightning sees it; the state steps.

    Args:
        params: the parameters.
        learning_rate: of the first step.
    """

    def __init__(self, params: Iterable[nn.Parameter], learning_rate: float) -> None:
        super().__init__(params, {"lr": learning_rate})

    def step(self, closure: Any = None) -> Any:
        """Refuse a step without the engine."""
        raise OptionError(
            "Lightning steps the optimizer of a configuration; got a call of step(); remove it"
        )


class ConfiguredGroups(Groups):
    """The optimizer of a configuration of DeepSpeed, which has numbers and schedules of its own.

    Args:
        recipe: what the configuration makes.
        module: whose parameters that require a gradient are trained.
    """

    def __init__(self, recipe: Recipe, module: nn.Module) -> None:
        rate = recipe.learning_rate
        first = rate(0) if callable(rate) else rate
        params = [param for param in module.parameters() if param.requires_grad]
        super().__init__(
            ConfiguredOptimizer(params, float(first or 0.0)),
            {id(param): name for name, param in module.named_parameters()},
        )
        self._recipe = recipe

    def pure(self) -> Optimizer:
        """Return the optimizer of the configuration, which clips."""
        assert self._recipe.optimizer is not None
        return self._recipe.optimizer

    def hyperparams(self, max_norm: float | None = None) -> dict[str, float]:
        """Return nothing, because schedule and clipping are parts of the optimizer.

        Raises:
            OptionError: another bound than that of the configuration.
        """
        if (max_norm or 0.0) != self._recipe.max_grad_norm:
            raise OptionError(
                "the optimizer of a configuration clips by gradient_clipping, "
                f"{self._recipe.max_grad_norm}; got clip_gradients({max_norm}); write the bound "
                "into the configuration"
            )
        return {}

    def stepped(self, learning_rate: float | None) -> None:
        """Show Lightning the learning rate of a step."""
        if learning_rate is not None:
            self.optimizer.param_groups[0]["lr"] = learning_rate


def groups_of(optimizers: list[TorchOptimizer], module: nn.Module) -> list[Groups]:
    """Return the groups of each optimizer of a module.

    Raises:
        OptionError: a parameter has two optimizers, or is none of the module's.
        NotElementwiseError: an optimizer that needs whole tensors.
    """
    names = {id(param): name for name, param in module.named_parameters()}
    found = [Groups(optimizer, names) for optimizer in optimizers]
    seen: dict[str, int] = {}
    for index, groups in enumerate(found):
        for name in sorted(groups.trained):
            if name in seen:
                raise OptionError(
                    "a parameter has one optimizer, because its state is sharded with it; leaf "
                    f"{name!r} is in the optimizers {seen[name]} and {index}; give each optimizer "
                    "parameters of its own",
                    leaf=name,
                )
            seen[name] = index
    return found
