"""Compositions that save and load, and an oracle of logical values, for tests of checkpoints."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import zfun as zf
from tests import models
from zfun import optim, tree
from zfun.collectives import sum_group
from zfun.flat import Flat
from zfun.optim import LossScaleState, MasterState

PRECISIONS: dict[str, Any] = {
    "as it is": None,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "computes bfloat16": zf.Precision(compute=torch.bfloat16),
}

OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "adamw": lambda: optim.adamw(optim.linear(0.1, 0.01, 9), weight_decay=0.1),
    "clipped": lambda: optim.chain(
        optim.clip_by_global_norm(0.5), optim.sgd(0.05, momentum=0.9, nesterov=True)
    ),
    "lion": lambda: optim.lion(0.05),
    "adagrad": lambda: optim.adagrad(0.05),
    "lamb": lambda: optim.lamb(0.05),
    "torch": lambda: optim.from_torch(torch.optim.RMSprop, lr=0.05, momentum=0.9, centered=True),
    "nadam": lambda: optim.from_torch(torch.optim.NAdam, lr=0.05),
    "by label": lambda: optim.by_label(
        {"decay": optim.adamw(0.1, weight_decay=0.1), "rest": optim.sgd(0.05, momentum=0.5)},
        lambda path, leaf: "decay" if leaf.ndim > 1 else "rest",
    ),
    "muon": lambda: optim.muon(0.05, optim.adamw(0.1)),
    "onebit": lambda: optim.onebit_adam(0.05, freeze_step=2),
}


@dataclass(frozen=True)
class Case:
    """One composition.

    Attributes:
        size: the number of ranks.
        stage: of ZeRO.
        inner: the ranks of a row of the mesh; 0 for no mesh.
        precision: a key of ``PRECISIONS``.
        optimizer: a key of ``OPTIMIZERS``.
        store: ``""``, ``"host"`` or ``"nvme"``.
        bucket_bytes: where buckets close.
        frozen: whether some leaves are not trained.
        seed: of the first parameters.
    """

    size: int = 2
    stage: int = 3
    inner: int = 0
    precision: str = "as it is"
    optimizer: str = "adamw"
    store: str = ""
    bucket_bytes: int = 256
    frozen: bool = False
    seed: int = 1


def params_of(seed: int) -> dict[str, Any]:
    """A tree with ties, an empty leaf, a scalar, complex numbers and odd shapes, in float32."""
    g = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=g)
    shared = draw(7, 3)
    return {
        "embedding": shared,
        "h": [{"w": draw(5, 3), "b": draw(5)}, {"w": draw(3, 11).T, "b": draw(11)}],
        "scale": draw(()),
        "empty": draw(0, 4),
        "rotation": torch.complex(draw(3), draw(3)),
        "head": shared,
        "steps": draw(1),
    }


def trainable(path: str, leaf: Any) -> bool:
    return not path.startswith("h.0")


def loss_fn(params: Any, batch: Tensor) -> Tensor:
    return models.tree_loss(params, batch).float()


def compose(group: zf.Group, case: Case, directory: str) -> Any:
    """Return the loop of a case."""
    store = {
        "": lambda: None,
        "host": zf.stores.host,
        "nvme": lambda: zf.stores.nvme(directory, block_size=4096, num_threads=1),
    }[case.store]()
    offload = zf.stores.Offload(params=store if case.stage == 3 else None, optimizer=store)
    return zf.zero(
        case.stage,
        loss_fn,
        OPTIMIZERS[case.optimizer](),
        zf.split(group, case.inner).inner if case.inner else group,
        precision=PRECISIONS[case.precision],
        offload=offload,
        bucket_bytes=case.bucket_bytes,
        trainable=trainable if case.frozen else None,
    )


def batch_of(step: int, rank: int) -> Tensor:
    return torch.randn(3, generator=torch.Generator().manual_seed(100 * step + rank))


def trained(z: Any, state: Any, group: zf.Group, steps: range) -> Any:
    for step in steps:
        state, _ = z.step(state, batch_of(step, group.rank))
    return state


def values(state: Any) -> dict[str, Any]:
    """The logical values of a state, by path: whole tensors on every rank.

    Master weights stand in place of their parameters, because the parameters are rounded ones.
    """
    found: dict[str, Any] = {}
    masters: dict[str, Any] = {}

    def visit(prefix: str, value: Any) -> None:
        stop = lambda x: isinstance(x, (Flat, MasterState, LossScaleState))
        for path, leaf in zip(
            tree.paths(value, is_leaf=stop), tree.leaves(value, is_leaf=stop), strict=True
        ):
            here = f"{prefix}{path}"
            if isinstance(leaf, MasterState):
                visit(f"{here}.", leaf.inner)
                if leaf.master is not None:
                    whole = zf.unshard(leaf.master)
                    masters.update(zip(tree.paths(whole), tree.leaves(whole), strict=True))
            elif isinstance(leaf, Flat):
                whole = zf.unshard(leaf)
                for name, x in zip(tree.paths(whole), tree.leaves(whole), strict=True):
                    # A whole value in host memory is not copied.
                    found[f"{here}.{name}"] = x.clone()
            elif isinstance(leaf, zf.stores.Stored):
                found[here] = leaf.get(torch.device("cpu")).wait().clone()
            elif not isinstance(leaf, LossScaleState):
                found[here] = leaf.clone() if isinstance(leaf, Tensor) else leaf

    visit("", state)
    for name, x in masters.items():
        found[f"params.{name}"] = x
    # `inner` of a state with master weights is no part of the logical path.
    return {
        key.replace("opt_state...", "opt_state.").replace("opt_state..", "opt_state."): x
        for key, x in found.items()
    }


@contextmanager
def directories() -> Iterator[tuple[str, str]]:
    """A directory for checkpoints and one for stores."""
    root = tempfile.mkdtemp(prefix="zfun-test-")
    try:
        for name in ("saved", "store"):
            (Path(root) / name).mkdir()
        yield os.path.join(root, "saved"), os.path.join(root, "store")  # noqa: PTH118
    finally:
        shutil.rmtree(root, ignore_errors=True)


def save_after(
    group: zf.Group, case: Case, saved: str, stores: str, steps: int = 2, **options: Any
) -> dict[str, Any]:
    """Train, save, and return the logical values."""
    z = compose(group, case, stores)
    state = trained(z, z.init(params_of(case.seed)), group, range(steps))
    zf.save(saved, state, **options).wait()
    return values(state)


def load_into(
    group: zf.Group, case: Case, saved: str, stores: str, steps: range = range(0), **options: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Load, return the logical values, train on, and return the logical values again."""
    z = compose(group, case, stores)
    state = zf.load(saved, z.init(params_of(case.seed + 100)), **options).state
    before = values(state)
    return before, values(trained(z, state, group, steps))


def unbroken(group: zf.Group, case: Case, stores: str, steps: int) -> dict[str, Any]:
    z = compose(group, case, stores)
    return values(trained(z, z.init(params_of(case.seed)), group, range(steps)))


__all__ = [
    "OPTIMIZERS",
    "PRECISIONS",
    "Case",
    "compose",
    "directories",
    "load_into",
    "params_of",
    "replace",
    "save_after",
    "sum_group",
    "trained",
    "unbroken",
    "values",
]
