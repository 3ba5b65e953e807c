"""The tensor parallelism that a model of ``transformers`` names for itself."""

from __future__ import annotations

import fnmatch
from typing import Any

from transformers import PreTrainedModel

from zfun.errors import OptionError
from zfun.options import instance, takes
from zfun.parallel import TensorStyle

# Matrices along which attention heads lie, and where a configuration has the number of heads.
_HEADS = {
    "q_proj": "num_attention_heads",
    "k_proj": "num_key_value_heads",
    "v_proj": "num_key_value_heads",
    "o_proj": "num_attention_heads",
    "query_key_value": "num_attention_heads",
    "attention.dense": "num_attention_heads",
    "self_attn.dense": "num_attention_heads",
}
# Styles of modules that need nothing here: their leaves have styles of their own, or are whole.
_OF_MODULES = frozenset(["moe_tp_experts", "local_params", "replicate"])
_SYNONYMS = {"colwise_rep": "colwise_gather_output", "rowwise_rep": "rowwise_split_input"}


@takes(model=instance(PreTrainedModel, "a model of transformers", "LlamaForCausalLM(config)"))
def tp_plan(model: PreTrainedModel) -> dict[str, TensorStyle]:
    """Return the plan of a model for :func:`zfun.tensor_parallel`.

    The plan is the model's own ``tp_plan``, as globs of the leaves that the model has, with the
    numbers of attention heads, which the ranks must divide. Change it as any dict: leave out the
    head to keep it whole, or name it ``"colwise"`` for
    :func:`zfun.parallel.vocab_cross_entropy`.

    Matrices of experts stay whole, unless the model runs one expert after the other
    (``experts_implementation="eager"``).

    Args:
        model: may be on the ``meta`` device.

    Returns:
        Styles by glob.

    Raises:
        OptionError: the model has no plan, or one with a style that zfun does not know.

    Example:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = {"hidden_size": 16, "num_attention_heads": 4, "intermediate_size": 24}
        >>> with torch.device("meta"):
        ...     model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=1))
        >>> plan = tp_plan(model)
        >>> plan["model.layers.*.self_attn.q_proj"]
        TensorStyle(name='colwise', parts=(), heads=4)
        >>> plan["lm_head"].name
        'colwise_gather_output'
    """
    config: Any = model.config.get_text_config()
    names = [name for name, _ in model.named_parameters()]
    owners = {name.rpartition(".")[0] for name in names}
    are_eager = getattr(config, "_experts_implementation", None) == "eager"
    found: dict[str, TensorStyle] = {}
    for glob, style in (model.tp_plan or {}).items():
        is_expert = ".experts" in glob
        has_leaf = any(fnmatch.fnmatchcase(name, glob) for name in (*names, *owners))
        if style in _OF_MODULES or not has_leaf or (is_expert and not are_eager):
            continue
        try:
            found[glob] = TensorStyle(_SYNONYMS.get(style, style), heads=_heads_of(glob, config))
        except OptionError as error:
            raise OptionError(
                f"the plan of {type(model).__name__} has the style {style!r} for {glob!r}, which "
                "zfun does not know; write a plan of your own"
            ) from error
    if not found:
        raise OptionError(
            f"tp_plan() reads the plan of a model; {type(model).__name__} has none; write a plan "
            "of your own for tensor_parallel()"
        )
    return found


def _heads_of(glob: str, config: Any) -> int:
    """Return the heads that lie along a matrix; 0 where none do."""
    for end, key in _HEADS.items():
        if glob.endswith(end):
            return getattr(config, key, None) or getattr(config, "num_attention_heads", 0)
    return 0
