"""Models of transformers whose experts lie on the ranks of an axis."""

from __future__ import annotations

import functools
import inspect
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from zfun.collectives import Group
from zfun.errors import OptionError
from zfun.modules import functional
from zfun.options import instance, takes
from zfun.parallel import check_experts, dispatch


@takes(model=instance(PreTrainedModel, "a model of transformers", "model"))
def expert_parallel(model: PreTrainedModel, axis: Group) -> Any:
    """Return a model whose tokens travel to the ranks of their experts: ``S -> S``.

    Experts are modules with stacked matrices (``gate_up_proj`` and ``down_proj``), as Mixtral and
    Qwen3-MoE have them, and are called with tokens, choices and weights. Routers and shared experts
    stay as they are.

    Args:
        model: any model with such experts, and any ``experts_implementation``. It stays as it is.
        axis: the ranks that share the experts, such as ``mesh["ep"]``.

    Returns:
        A copy of the model with the same parameters, for a loss in
        :func:`zfun.parallel.expert_parallel`, which cuts them.

    Raises:
        OptionError: the model has no such experts, or the ranks do not divide them; from the model:
            its experts are not cut.

    Example:
        >>> import torch, transformers, zfun as zf
        >>> from zfun.interop.transformers import expert_parallel
        >>> config = transformers.MixtralConfig(
        ...     vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        ...     num_attention_heads=2, num_key_value_heads=1, num_local_experts=4)
        >>> model = transformers.MixtralForCausalLM(config)
        >>> ids = torch.arange(8).view(2, 1, 4)
        >>> def main(group):
        ...     mesh = zf.mesh(group, dp=1, ep=2)
        ...     apply = zf.functional(expert_parallel(model, mesh["ep"]))
        ...     loss = lambda params, ids: apply(params, input_ids=ids, labels=ids).loss
        ...     loss = zf.parallel.expert_parallel(loss, mesh["ep"])
        ...     zero = zf.zero(3, loss, zf.optim.adamw(1e-3), mesh["dp"])
        ...     return zero.step(zero.init(apply.params), ids[group.rank])[1].loss
        >>> plain = torch.stack([model(input_ids=x, labels=x).loss for x in ids]).mean()
        >>> torch.allclose(torch.stack(zf.simulate(2, main)), plain)
        True
    """
    found = functional(model).bind({})
    modules: list[Any] = [module for module in found.modules() if _has_experts(module)]
    if not modules:
        raise OptionError(
            "expert_parallel() takes a model with experts that have stacked matrices, gate_up_proj "
            "or up_proj and down_proj, and take rows, choices and weights; "
            f"{type(model).__name__} has none; call zf.parallel.dispatch() in its layers"
        )
    for module in modules:
        num_experts = len(module.down_proj)
        check_experts(axis, num_experts)
        module.num_experts = num_experts // axis.size
        # A partial, because functional() puts the module's copy into it.
        module.forward = functools.partial(_dispatched, module, axis, num_experts)
    return found


def _has_experts(module: nn.Module) -> bool:
    down = getattr(module, "down_proj", None)
    is_stacked = isinstance(down, Tensor) and down.dim() == 3 and hasattr(module, "num_experts")
    # Of itself, rows, choices and weights. Llama4's experts get rows alone, sorted already.
    return is_stacked and len(inspect.signature(type(module).forward).parameters) > 3


def _dispatched(
    module: Any, axis: Group, num_experts: int, x: Tensor, chosen: Tensor, weights: Tensor
) -> Tensor:
    """The forward of a module of experts, which are those of this rank."""
    if len(module.down_proj) * axis.size != num_experts:
        raise OptionError(
            f"a rank has 1/{axis.size} of the experts; got {len(module.down_proj)} of "
            f"{num_experts}; put the loss into zf.parallel.expert_parallel(), and the parameters "
            "into the init of zf.zero()"
        )

    def experts(rows: Tensor, ids: Tensor) -> Tensor:
        ones = weights.new_ones((len(rows), 1))
        found: Tensor = type(module).forward(module, rows, ids.unsqueeze(1), ones)
        return found

    return dispatch(experts, x, chosen, weights, axis, num_experts)
