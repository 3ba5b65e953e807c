"""``torch.func`` inside a loss whose parameters are lazy leaves.

[Note: torch.func in the loss]
``torch.func`` transforms wrap their arguments in levels, and a lazy leaf inside a level has no way
to its bucket. ``grad``, ``vjp`` and their compositions also refuse to start under saved-tensor
hooks, because levels call no hooks, and torch offers no way to suspend the hooks of a caller. So
while a loss runs under the hooks of this package, the functions of torch that all transforms call
are replaced by functions that first gather the lazy leaves among their arguments, and, where torch
refuses hooks, take the hooks of this package off the stack until the end. Tensors that autograd
saves in between keep their gathered bucket alive until backward. A parameter that a transformed
function uses for the first time is gathered outside of all levels, so that gradients reach the
bucket node.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._functorch import apis, eager_transforms

from zfun import tree
from zfun.transforms.call._lazy import LazyLeaf, materialise
from zfun.transforms.call._saved import SavedViews

# The functions that all transforms call, and whether torch refuses saved-tensor hooks there.
# torch does not promise these names: without them a loss can only hold gathered leaves.
_TRANSFORMS = [
    (module, name, refuses)
    for module, name, refuses in (
        (eager_transforms, "grad_and_value_impl", True),
        (eager_transforms, "_vjp_with_argnums", True),
        (eager_transforms, "_jvp_with_argnums", False),
        (apis, "vmap_impl", False),
    )
    if hasattr(module, name)
]
_lock = threading.Lock()
# The originals, while losses run, and these losses.
_originals: list[Callable[..., Any]] = []
_losses: list[SavedViews] = []


@contextlib.contextmanager
def saved_views_hooks(views: SavedViews, unpack: Callable[[Any], torch.Tensor]) -> Iterator[None]:
    """The context of a loss: autograd saves the places of views, except inside ``torch.func``."""
    with _lock:
        if not _losses:
            _originals[:] = [getattr(module, name) for module, name, _ in _TRANSFORMS]
            for (module, name, refuses), original in zip(_TRANSFORMS, _originals, strict=True):
                setattr(module, name, _adapted(original, refuses_hooks=refuses))
        _losses.append(views)
    try:
        with torch.autograd.graph.saved_tensors_hooks(views.pack, unpack):
            yield
    finally:
        with _lock:
            _losses.remove(views)
            if not _losses:
                for (module, name, _), original in zip(_TRANSFORMS, _originals, strict=True):
                    setattr(module, name, original)


def _adapted(transform: Callable[..., Any], *, refuses_hooks: bool) -> Callable[..., Any]:
    @functools.wraps(transform)
    def run(*args: Any, **kwargs: Any) -> Any:
        if any(isinstance(leaf, LazyLeaf) for leaf in tree.leaves((args, kwargs))):
            args, kwargs = materialise((args, kwargs))
        hooks = []
        while refuses_hooks and _top_is_ours():
            hooks.append(torch._C._autograd._top_saved_tensors_default_hooks(False))
            torch._C._autograd._pop_saved_tensors_default_hooks()
        try:
            return transform(*args, **kwargs)
        finally:
            for pack, unpack in reversed(hooks):
                torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)

    return run


def _top_is_ours() -> bool:
    top = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return top is not None and isinstance(getattr(top[0], "__self__", None), SavedViews)
