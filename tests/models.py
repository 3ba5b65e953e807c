"""Losses, trees and batches that the tests share; no zfun transforms."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zfun import tree


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclass
class Layer:
    """A class that the test registers as a tree node."""

    weight: Any
    bias: Any
    name: str = "layer"


tree.register(
    Layer,
    lambda layer: ((layer.weight, layer.bias), layer.name),
    lambda name, parts: Layer(*tuple(parts)[:2], name=name),
)


def _dict(children: list[Any]) -> Any:
    return dict(zip("wbka", children, strict=False))


def _pair(children: list[Any]) -> Any:
    return Pair(children[0], children[-1] if len(children) > 1 else None)


def _layer(children: list[Any]) -> Any:
    return Layer(children[0], children[1:])


NODES: tuple[Callable[[list[Any]], Any], ...] = (_dict, list, tuple, _pair, _layer)


def tree_loss(params: Any, batch: Tensor) -> Tensor:
    """A smooth loss of any tree in which every leaf's gradient depends on the leaves before."""
    shift = batch.double().mean()
    carry = torch.tanh(shift)
    for leaf in tree.leaves(params):
        # view_as_real, because abs() of a complex number has no derivative at 0.
        real = torch.view_as_real(leaf.resolve_conj()) if leaf.is_complex() else leaf
        x = real.double().reshape(-1)
        waves = torch.cos(torch.arange(x.numel(), dtype=torch.float64) * 0.37 + shift)
        carry = torch.tanh(carry + (x * waves).sum() / max(1, x.numel())) + 0.05 * (
            x * x
        ).sum() / max(1.0, math.sqrt(x.numel()))
    return carry


def tree_batches(num_steps: int, size: int, rows: int, seed: int = 0) -> list[list[Tensor]]:
    """Return ``batches[step][rank]``: vectors with very different means."""
    generator = torch.Generator().manual_seed(1000 + seed)
    return [
        [torch.randn(rows, generator=generator, dtype=torch.float64) for _ in range(size)]
        for _ in range(num_steps)
    ]


def mlp(
    width: int = 5, num_layers: int = 4, dtype: torch.dtype = torch.float64, seed: int = 1
) -> dict[str, Any]:
    """Return parameters of a small network."""
    g = torch.Generator().manual_seed(seed)
    layers = [
        {
            "w": torch.randn(width, width, generator=g, dtype=dtype),
            "b": torch.randn(width, generator=g, dtype=dtype),
        }
        for _ in range(num_layers)
    ]
    return {"h": layers, "out": torch.randn(width, generator=g, dtype=dtype)}


def mlp_loss(params: Any, x: Tensor) -> Tensor:
    for layer in params["h"]:
        x = torch.tanh(x @ layer["w"] + layer["b"])
    return (x @ params["out"]).pow(2).mean()


def mlp_batches(
    num_steps: int, size: int, rows: int = 4, width: int = 5, dtype: torch.dtype = torch.float64
) -> list[list[Tensor]]:
    return [
        [
            torch.randn(
                rows, width, generator=torch.Generator().manual_seed(100 * step + rank), dtype=dtype
            )
            for rank in range(size)
        ]
        for step in range(num_steps)
    ]


def mixture(
    width: int = 5, num_layers: int = 2, num_experts: int = 4, seed: int = 1
) -> dict[str, Any]:
    """Return parameters of a mixture of experts."""
    g = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64) / math.sqrt(width)
    experts = lambda: [
        {"up": draw(width, 2 * width), "down": draw(2 * width, width)} for _ in range(num_experts)
    ]
    return {
        "h": [
            {"router": draw(width, num_experts), "experts": experts()} for _ in range(num_layers)
        ],
        "out": draw(width),
    }


def mixture_loss(params: Any, x: Tensor, top_k: int, capacity: int) -> tuple[Tensor, Tensor]:
    """Return the loss, and the number of tokens of each expert of each layer.

    An expert takes the first ``capacity`` tokens, and does not run without tokens.
    """
    loads = []
    for layer in params["h"]:
        gates, chosen = torch.softmax(x @ layer["router"], dim=1).topk(top_k)
        mixed = torch.zeros_like(x)
        for index, expert in enumerate(layer["experts"]):
            tokens, places = (
                found[:capacity] for found in torch.nonzero(chosen == index, as_tuple=True)
            )
            loads.append(len(tokens))
            if len(tokens):
                out = torch.tanh(x[tokens] @ expert["up"]) @ expert["down"]
                mixed = mixed.index_add(0, tokens, gates[tokens, places, None] * out)
        x = x + mixed
    return (x @ params["out"]).pow(2).mean(), torch.tensor(loads)


def flat_dict(params: Any) -> dict[str, Tensor]:
    """Convert a tree to a dict by path, with tied leaves once, for tests/reference.py."""
    seen: dict[int, str] = {}
    return {
        path: leaf
        for path, leaf in zip(tree.paths(params), tree.leaves(params), strict=True)
        if seen.setdefault(id(leaf), path) == path
    }


def unflat_dict(flat: dict[str, Tensor], like: Any) -> Any:
    """Invert :func:`flat_dict`."""
    first: dict[int, str] = {}
    leaves, spec = tree.flatten(like)
    names = [
        first.setdefault(id(leaf), path)
        for path, leaf in zip(tree.paths(like), leaves, strict=True)
    ]
    return tree.unflatten(spec, [flat[name] for name in names])


def micro_batches(step: Sequence[Tensor], count: int) -> list[Tensor]:
    """Split the batches of all ranks into micro-batches, for the oracle."""
    return [micro for batch in step for micro in batch.chunk(count)]
