"""Decoders of ``transformers`` over the axes of a mesh: matrices, layers, and all axes together."""

from __future__ import annotations

import copy
import fnmatch
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from zfun.collectives import NamedMesh
from zfun.errors import OptionError
from zfun.interop.transformers._sequence import sequence_parallel
from zfun.modules import functional
from zfun.options import instance, integer, takes
from zfun.parallel import TensorStyle, pipeline, tensor_parallel, token_mean

AXES = ("pp", "dp", "sp", "tp")
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
# Their forward pass from embeddings on is that of the rest of the layers: nothing comes between the
# embedding and the first layer.
_DECODERS = ("llama", "mistral", "qwen2", "qwen3")


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
    if kind not in _DECODERS or not hasattr(model, "lm_head"):
        raise OptionError(
            f"pipeline_stages() cuts decoders with a head, of {', '.join(_DECODERS)}; got {kind!r} "
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


@takes(
    model=instance(PreTrainedModel, "a model of transformers", "LlamaForCausalLM(config)"),
    mesh=instance(NamedMesh, "a zf.mesh()", "zf.mesh(group, dp=2, tp=2)"),
)
def mesh_loss(
    model: PreTrainedModel, mesh: NamedMesh, num_micro_batches: int = 1
) -> Callable[..., Any]:
    """Return the loss of a causal model over the axes of a mesh, for :func:`zfun.zero`.

    The axes have the names ``pp`` (:func:`pipeline_stages`, 1F1B), ``dp``, ``sp``
    (:func:`sequence_parallel` by Ulysses) and ``tp`` (:func:`tp_plan`), any of which may be missing
    or of size 1. ``zfun.zero`` gets the data axes: ``mesh["dp", "sp"]`` or those that there are.

    Args:
        model: a decoder that each of its axes takes; may be on the ``meta`` device.
        mesh: the axes.
        num_micro_batches: of a pipeline; without one, ``zfun.zero`` cuts the batch.

    Returns:
        The loss of ``functional(model).params`` and a batch: a mapping with ``input_ids`` and
        ``labels``, or over a sequence axis that of :func:`zfun.parallel.sequence_batch`.

    Raises:
        OptionError: an axis of another name, or a pipeline beside a sequence axis.

    Example:
        >>> import torch, transformers, zfun as zf
        >>> config = transformers.LlamaConfig(
        ...     vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=2,
        ...     num_attention_heads=2)
        >>> model = transformers.LlamaForCausalLM(config)
        >>> ids = torch.arange(8).view(2, 4)
        >>> def main(group):
        ...     mesh = zf.mesh(group, pp=2, tp=2, dp=1)
        ...     zero = zf.zero(1, mesh_loss(model, mesh, 2), zf.optim.sgd(0.1), mesh["dp"])
        ...     state = zero.init(zf.functional(model).params)
        ...     return zero.step(state, {"input_ids": ids, "labels": ids})[1].loss
        >>> losses = zf.simulate(4, main)
        >>> torch.allclose(losses[0], model(ids, labels=ids).loss, atol=1e-6)
        True
    """
    sizes: Mapping[str, int] = dict.fromkeys(AXES, 1) | mesh.sizes
    unknown = [name for name in mesh.names if name not in AXES]
    if unknown or (sizes["pp"] > 1 and sizes["sp"] > 1):
        raise OptionError(
            "mesh_loss() knows the axes pp, dp, sp and tp, and not pp and sp together; got a mesh "
            f"of {', '.join(f'{name}={size}' for name, size in mesh.sizes.items())}; leave out "
            f"{unknown[0] if unknown else 'one of the two'}"
        )
    styles = tp_plan(model) if sizes["tp"] > 1 else {}

    def cut(fn: Callable[..., Any]) -> Callable[..., Any]:
        return tensor_parallel(fn, mesh["tp"], styles) if styles else fn

    if sizes["pp"] > 1:
        stages = pipeline_stages(model, sizes["pp"])
        return pipeline(
            [cut(fn) for fn in stages.functions],
            mesh["pp"],
            num_micro_batches=num_micro_batches,
            leaves=stages.leaves,
        )
    if sizes["sp"] > 1:
        apply = functional(sequence_parallel(model, mesh["sp"]))

        def loss(params: Any, batch: Mapping[str, Tensor]) -> Any:
            given = {name: x for name, x in batch.items() if name != "shift_labels"}
            logits = apply(params, **given, use_cache=False).logits
            return token_mean(logits, batch["shift_labels"])

        return cut(loss)
    apply = functional(model)
    return cut(lambda params, batch: apply(params, **batch, use_cache=False).loss)


@takes(
    sizes=instance(Mapping, "the size of each axis, by name", "{'dp': 2, 'sp': 2}"),
    rows=integer(1),
    length=integer(2),
)
def mesh_batch(sizes: Mapping[str, int], rows: int, length: int) -> dict[str, Tensor]:
    """Return the batch of a rank for :func:`mesh_loss`, without numbers, for a plan.

    Args:
        sizes: the size of each axis.
        rows: sequences in the batch of a data rank.
        length: tokens in a sequence, of which a rank of a sequence axis has a part.

    Returns:
        Tensors on the ``meta`` device.

    Example:
        >>> {name: tuple(x.shape) for name, x in mesh_batch({"dp": 4, "sp": 2}, 3, 64).items()}
        {'input_ids': (3, 32), 'position_ids': (3, 32), 'shift_labels': (3, 32)}
    """
    tokens = torch.empty(rows, length // sizes.get("sp", 1), dtype=torch.int64, device="meta")
    if sizes.get("sp", 1) == 1:
        return {"input_ids": tokens, "labels": tokens}
    return {"input_ids": tokens, "position_ids": tokens, "shift_labels": tokens}
