"""A causal model of ``transformers`` over all axes of a mesh."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from zfun.collectives import NamedMesh
from zfun.errors import OptionError
from zfun.interop.transformers._plans import tp_plan
from zfun.interop.transformers._sequence import sequence_parallel
from zfun.interop.transformers._stages import pipeline_stages
from zfun.modules import functional
from zfun.options import instance, integer, takes
from zfun.parallel import pipeline, tensor_parallel, token_mean

AXES = ("pp", "dp", "sp", "tp")


@takes(
    model=instance(PreTrainedModel, "a model of transformers", "LlamaForCausalLM(config)"),
    mesh=instance(NamedMesh, "a zf.mesh()", "zf.mesh(group, dp=2, tp=2)"),
    num_micro_batches=integer(1),
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
