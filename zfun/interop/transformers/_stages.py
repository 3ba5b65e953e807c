"""Decoders of ``transformers`` cut between layers, as the stages of a pipeline."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from zfun.errors import OptionError
from zfun.modules import functional
from zfun.options import instance, integer, takes

# Their forward pass from embeddings on is that of the rest of the layers: nothing comes between the
# embedding and the first layer.
_KINDS = ("llama", "mistral", "qwen2", "qwen3")


class Stages(NamedTuple):
    """The stages of a model.

    Attributes:
        functions: for ``stages`` of :func:`zfun.pipeline`.
        leaves: the names of the parameters of each, for ``leaves``.
    """

    functions: list[Callable[..., Any]]
    leaves: list[list[str]]


@takes(
    model=instance(nn.Module, "a decoder of transformers", "LlamaForCausalLM(config)"),
    num_stages=integer(1),
)
def pipeline_stages(model: nn.Module, num_stages: int) -> Stages:
    """Cut a decoder between layers, for :func:`zfun.pipeline`.

    The first stage has the embedding, the last one the norm, the head and the loss; an embedding
    that is tied to the head belongs to both. Parameters have the names of
    :func:`zfun.functional`, so ``zf.functional(model).params`` is the tree for ``init``.

    Args:
        model: a Llama, Mistral, Qwen2 or Qwen3 ``ForCausalLM``. It does not change, and may be on
            the ``meta`` device.
        num_stages: at most the number of layers; the first stages get one layer more where it does
            not divide them.

    Returns:
        The functions and the leaves of the stages. A micro-batch is a mapping with ``input_ids``,
        ``labels`` and, if wanted, ``attention_mask`` and ``position_ids``; the loss is that of the
        model.

    Raises:
        OptionError: another model, or more stages than layers.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = {"hidden_size": 8, "intermediate_size": 16, "num_attention_heads": 2}
        >>> model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=3, vocab_size=32))
        >>> stages = pipeline_stages(model, 2)
        >>> [len(names) for names in stages.leaves]
        [19, 11]
    """
    config: Any = getattr(model, "config", None)
    kind = getattr(config, "model_type", type(model).__name__)
    if kind not in _KINDS or not hasattr(model, "lm_head"):
        raise OptionError(
            f"pipeline_stages() cuts decoders with a head, of {', '.join(_KINDS)}; got {kind!r} "
            f"({type(model).__name__}); write the stages as functions for zf.pipeline()"
        )
    count = config.num_hidden_layers
    if num_stages > count:
        raise OptionError(
            f"each stage has a layer at least; got {num_stages} stages for {count} layers; use at "
            f"most {count}"
        )
    size, more = divmod(count, num_stages)
    ends = [stage * size + min(stage, more) for stage in range(num_stages + 1)]
    functions: list[Callable[..., Any]] = []
    leaves: list[list[str]] = []
    for stage in range(num_stages):
        is_last = stage == num_stages - 1
        part = _part(model, ends[stage], ends[stage + 1], is_first=stage == 0, is_last=is_last)
        names = [name for name, _ in part.named_parameters()]
        functions.append(_function(part, names, is_first=stage == 0, is_last=is_last))
        leaves.append(names)
    return Stages(functions, leaves)


def _part(model: Any, begin: int, end: int, *, is_first: bool, is_last: bool) -> nn.Module:
    """Return a copy of a model with some of its layers, under their names."""
    part, decoder = _copied(model), _copied(model.model)
    part._modules["model"] = decoder
    layers = nn.ModuleList()
    for index in range(begin, end):
        layers._modules[str(index)] = model.model.layers[index]
    decoder._modules["layers"] = layers
    decoder.config = copy.copy(model.config)
    decoder.config.num_hidden_layers = end - begin
    if getattr(model.config, "layer_types", None) is not None:
        decoder.config.layer_types = model.config.layer_types[begin:end]
    is_tied = model.lm_head.weight is model.model.embed_tokens.weight
    # The first name of a tied embedding is that of the embedding.
    if not is_first and not (is_last and is_tied):
        decoder._modules["embed_tokens"] = None
    if not is_last:
        decoder._modules["norm"] = nn.Identity()
        del part._modules["lm_head"]
    return part


def _copied(module: nn.Module) -> Any:
    """Return a copy of a module whose sub-modules can be replaced."""
    found = copy.copy(module)
    found.__dict__["_modules"] = dict(module._modules)
    return found


def _function(
    part: nn.Module, names: list[str], *, is_first: bool, is_last: bool
) -> Callable[[Any, Any, Mapping[str, Any]], Any]:
    """Return a stage as a function ``(params, x, batch)``."""
    apply = functional(part)

    def stage(params: Mapping[str, Tensor], x: Any, batch: Mapping[str, Any]) -> Any:
        given = {name: batch[name] for name in ("attention_mask", "position_ids") if name in batch}
        given["input_ids" if is_first else "inputs_embeds"] = batch["input_ids"] if is_first else x
        own = {name: params[name] for name in names}
        if is_last:
            return apply(own, **given, labels=batch["labels"], use_cache=False).loss
        return apply.bind(own).model(**given, use_cache=False).last_hidden_state

    return stage
