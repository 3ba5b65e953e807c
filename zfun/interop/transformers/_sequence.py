"""Models of transformers over a sequence axis, by the attention interface of transformers."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from zfun import ops
from zfun.collectives import Group
from zfun.errors import OptionError
from zfun.modules import functional
from zfun.options import instance, one_of, takes
from zfun.parallel import check_heads, ring_attention, sequence_piece, ulysses

_CONTIGUOUS, _ZIGZAG = "zfun_sequence", "zfun_sequence_zigzag"
# Arguments that transformers passes to every attention, without effect on the result.
_UNUSED = frozenset(
    ["position_ids", "cache_position", "use_cache", "cache", "past_key_values", "is_causal"]
)

# Layers in which tokens meet by attention alone. Attention refuses windows and chunks itself.
_ATTENTIONS = frozenset(["attention", "full_attention", "sliding_attention", "chunked_attention"])
# Frequencies that follow the largest position.
_ROPES_OF_LENGTH = frozenset(["dynamic", "longrope"])


@takes(
    model=instance(PreTrainedModel, "a model of transformers", "model"),
    kind=one_of("ulysses", "ring"),
)
def sequence_parallel(
    model: PreTrainedModel, axis: Group, kind: str = "ulysses", *, zigzag: bool = False
) -> Any:
    """Return a causal model whose sequences are cut over an axis: ``S -> S`` along the tokens.

    See :func:`zfun.parallel.sequence_batch` for the batches, and
    :func:`zfun.parallel.token_mean` for the loss.

    Args:
        model: a decoder whose attention is chosen by ``attn_implementation``, such as Llama, Qwen2,
            Qwen3 or GPT-NeoX. It stays as it is.
        axis: the sequence axis, such as ``mesh["sp"]``.
        kind: ``"ulysses"`` exchanges tokens for heads, ``"ring"`` sends keys and values around, for
            any number of heads.
        zigzag: whether pieces are in zigzag order, so that a ring has equal work on all ranks.

    Returns:
        A copy of the model with the same parameters. It takes ``input_ids`` (or ``inputs_embeds``)
        and ``position_ids`` of this rank's tokens, and returns their logits.

    Raises:
        OptionError: the ranks do not divide the heads, or ``zigzag`` with ``"ulysses"``; tokens
            that meet outside of attention, or rotary frequencies that follow the length; or, from
            the model: an attention mask, labels, a cache with tokens, positions of other tokens, or
            attention of another form, such as a sliding window.

    Example:
        >>> import torch, transformers, zfun as zf
        >>> from zfun.interop.transformers import sequence_parallel
        >>> config = transformers.LlamaConfig(
        ...     vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        ...     num_attention_heads=2, num_key_value_heads=1)
        >>> model = transformers.LlamaForCausalLM(config)
        >>> ids = torch.arange(8).view(1, 8)
        >>> def main(group):
        ...     batch = zf.parallel.sequence_batch({"input_ids": ids}, group)
        ...     return sequence_parallel(model, group)(**batch).logits
        >>> torch.allclose(torch.cat(zf.simulate(2, main), 1), model(ids).logits, atol=1e-6)
        True
    """
    if kind == "ulysses" and zigzag:
        raise OptionError(
            "ulysses needs no zigzag order, because every rank has whole sequences; got "
            'zigzag=True; leave it out, or pass kind="ring"'
        )
    config = model.config
    if not getattr(config, "is_causal", True):
        raise OptionError(
            "sequence_parallel() takes a causal model; got a configuration with is_causal=False; "
            "wrap the model's attention in zf.parallel.ulysses()"
        )
    _check_layers(model)
    if kind == "ulysses" and (heads := getattr(config, "num_attention_heads", None)):
        check_heads(heads, getattr(config, "num_key_value_heads", None) or heads, axis.size)
    _register()
    spec = _SequenceAttention(axis, kind, zigzag)
    found = functional(model).bind({})
    configs: dict[int, Any] = {}
    modules: list[Any] = [module for module in found.modules() if hasattr(module, "config")]
    for module in modules:
        own = configs.setdefault(id(module.config), copy.deepcopy(module.config))
        own._attn_implementation = _ZIGZAG if zigzag else _CONTIGUOUS
        module.config, module.zfun_attention = own, spec
        if isinstance(module, PreTrainedModel):
            module.register_forward_pre_hook(spec.check, with_kwargs=True)
    return found


def _check_layers(model: PreTrainedModel) -> None:
    """Refuse a model whose tokens depend on others outside of its attention."""
    config: Any = model.config.get_text_config()
    others = sorted(set(getattr(config, "layer_types", None) or ()) - _ATTENTIONS)
    if others or not model._supports_attention_backend:
        found = f"layers of {', '.join(others)}" if others else "attention or mixing of its own"
        raise OptionError(
            "over a sequence axis tokens meet in attention alone, which the model looks up by "
            f"attn_implementation; {type(model).__name__} has {found}; train this model without a "
            "sequence axis"
        )
    rope = getattr(config, "rope_parameters", None) or {}
    options = [rope, *(x for x in rope.values() if isinstance(x, dict))]
    for one in options:
        if (name := one.get("rope_type")) in _ROPES_OF_LENGTH:
            raise OptionError(
                "rotary frequencies are equal on all ranks of a sequence axis, and those of "
                f"{name!r} follow the positions of one piece; {type(model).__name__} has the "
                f"rope_type {name!r}; use 'default', 'linear', 'llama3' or 'yarn'"
            )


@dataclass(frozen=True, slots=True, eq=False)
class _SequenceAttention:
    """The attention of a model over a sequence axis."""

    axis: Group
    kind: str
    zigzag: bool

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, dropout: float, scale: float | None
    ) -> Tensor:
        if self.kind == "ulysses":
            attend = ulysses(_fused, self.axis)
            return attend(q, k, v, is_causal=causal, dropout_p=dropout, scale=scale)
        if dropout:
            raise OptionError(
                f"ring attention has no dropout; got {dropout}; set attention_dropout=0 in the "
                'configuration, or use kind="ulysses"'
            )
        return ring_attention(q, k, v, self.axis, causal=causal, scale=scale, zigzag=self.zigzag)

    def check(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuse arguments of a model that attention over a sequence axis cannot honour."""
        names = inspect.signature(model.forward).parameters
        given = dict(zip(names, args, strict=False)) | kwargs
        for name, remedy in _REFUSED.items():
            if given.get(name) is not None:
                raise OptionError(
                    f"a model over a sequence axis takes no {name}, because a rank has a piece of "
                    f"each sequence; got {name}; {remedy}"
                )
        places = given.get("position_ids")
        if places is None:
            raise OptionError(
                "a model over a sequence axis needs the positions of its tokens, because it would "
                "count from 0 on every rank; got no position_ids; cut the batch with "
                "zf.parallel.sequence_batch()"
            )
        # To read positions from a device would let the host wait.
        if not places.is_cpu or ops.is_abstract(places):
            return
        whole = torch.arange(places.shape[-1] * self.axis.size)
        expected = sequence_piece(whole, self.axis, 0, zigzag=self.zigzag)
        if not bool((places == expected).all()):
            order = "zigzag" if self.zigzag else "contiguous"
            raise OptionError(
                f"rank {self.axis.rank} of a sequence axis in {order} order has the tokens "
                f"{_span(expected)}; got position_ids {_span(places.flatten())}; cut the batch "
                f"with zf.parallel.sequence_batch(zigzag={self.zigzag}), one sequence in a row"
            )


_REFUSED = {
    "attention_mask": "pad on the right, and cut the batch with zf.parallel.sequence_batch(), "
    "which turns the mask into ignored labels",
    "labels": "leave them out, and let the loss return "
    "zf.parallel.token_mean(logits, shift_labels)",
}


def _register() -> None:
    for name in (_CONTIGUOUS, _ZIGZAG):
        ALL_ATTENTION_FUNCTIONS.register(name, _attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(_CONTIGUOUS, _mask)
    ALL_MASK_ATTENTION_FUNCTIONS.register(_ZIGZAG, _zigzag_mask)


def _attention(
    module: nn.Module,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend as transformers asks for: ``[b, h, t, d]`` to ``[b, t, h, d]``."""
    spec: Any = getattr(module, "zfun_attention", None)
    if spec is None:
        raise OptionError(
            f"attention over a sequence axis needs the axis; got {type(module).__name__} without "
            "one; make the model with zfun.interop.transformers.sequence_parallel()"
        )
    asked = others | {"attention_mask": attention_mask}
    unable = [n for n, x in asked.items() if n not in _UNUSED and x is not None and x is not False]
    if unable:
        raise _unable(type(module).__name__, ", ".join(sorted(unable)))
    causal: Any = others.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    out = spec(q, k, v, causal=causal, dropout=dropout, scale=scaling)
    return out.transpose(1, 2).contiguous(), None


def _fused(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    is_grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=is_grouped, **options)


def _zigzag_mask(
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    **_: Any,
) -> None:
    """Return no mask: attention knows that it is causal. Other masks are refused.

    In zigzag order transformers takes the two chunks of a piece for two packed sequences, so the
    mask's function says nothing.
    """
    if attention_mask is not None:
        raise _unable("a model", "an attention mask")
    if local_size is not None:
        raise _unable("a model", "a sliding window or chunks")
    if use_vmap:
        raise _unable("a model", "a mask function of its own")
    if q_length != kv_length or not isinstance(q_offset, int) or q_offset:
        raise _unable("a model", "a cache with tokens")


def _mask(mask_function: Callable[..., Any] = causal_mask_function, **others: Any) -> None:
    _zigzag_mask(**others)
    if mask_function is not causal_mask_function:
        raise _unable("a model", "packed sequences, or a mask that is not causal")


def _unable(asker: str, asked: str) -> OptionError:
    return OptionError(
        f"attention over a sequence axis is causal over the whole sequence, and nothing else; "
        f"{asker} asks for {asked}; leave it out, or train this model without a sequence axis"
    )


def _span(places: Tensor) -> str:
    shown = places.tolist()
    return str(shown) if len(shown) <= 8 else f"{str(shown[:4])[:-1]}, ..., {shown[-1]}]"
