"""Recompute in backward what would take memory to keep: a transform of any function of tensors.

[Note: what is kept of a block]
Forward, autograd keeps no tensor of a block, only placeholders (``torch.utils.checkpoint`` without reentry does that). Of the block remain:

* its *inputs*. Those that are results of differentiable operations are activations; they stay where they are, or go to a store, or each
  rank keeps its part. Parameters stay, for somebody else keeps them anyway. What the hooks around the block make into something else is
  theirs (a view of a gathered bucket, in ``shard_params``; an input of an inner block, in an outer one). Lazy leaves are kept as they are:
  they have no data, and computing the block again gathers them again;
* the *results* that the policy asks for. They are found below autograd, by a dispatch mode, and numbered as they come; computing the
  block again takes the same numbers in place of running the operations. Views and operations that write in place are never asked for, and
  a result that the block writes to later is let go of. What gathers parameters is not counted: it may run in one pass and not in the other;
* the *random state* at its beginning. A random operation whose result is kept does not run again, so the state after it is kept too.

What is kept elsewhere is a vector of the tensor's memory, and comes back with the same strides and the same alignment: kernels may round
differently on others.

Not optimal yet: what comes from a store or from other ranks is asked for when it is needed, not ahead.

After Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016). That each rank keeps its part of an activation, in host memory
where asked, is from Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (2020), section 6.1.
Policies are those of ``jax.checkpoint``.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, noop_context_fn

from zfun import ops, policies, tree
from zfun.collectives import AllGather, Call, Entry, Group, Lane, agree
from zfun.errors import OptionError, PlacementError, SpecMismatch, ZfunError, checked_options
from zfun.flat import flats
from zfun.policies import Policy
from zfun.stores import Store, Stored, fetch
from zfun.transforms._lazy import LazyLeaf, is_loading, loading
from zfun.transforms._tape import is_bucket_view

__all__ = ["Remat", "remat", "warn_of_whole_loss"]


@dataclass(frozen=True, slots=True)
class Remat:
    """What :func:`remat` returns: a function that other transforms can look into.

    Attributes:
        fn: what is called.
        policy: which results are kept.
        store: where what is kept lives; ``None`` for where it is.
        shard_over: the ranks that each keep a part; ``None`` for the whole on every rank.
        generators: random generators whose state is restored, beside those among the arguments and the default ones.
    """

    fn: Callable[..., Any]
    policy: Policy = policies.nothing
    store: Store | None = None
    shard_over: Group | None = None
    generators: tuple[torch.Generator, ...] = ()
    _agreed: set[tuple[torch.dtype, torch.Size]] = field(default_factory=set, compare=False, repr=False)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what ``fn`` returns."""
        if not torch.is_grad_enabled():
            return self.fn(*args, **kwargs)
        if torch.compiler.is_dynamo_compiling():
            return self._compiled(args, kwargs)
        if torch._C._functorch.maybe_current_level() is not None:
            if self.policy is not policies.everything:
                warnings.warn(
                    "remat() saves no memory under torch.func transforms, which have no hooks for what autograd keeps; nothing is computed "
                    "again",
                    stacklevel=2,
                )
            return self.fn(*args, **kwargs)
        _check_flats((args, kwargs))
        leaves, spec = tree.flatten((args, kwargs))
        keeper = _Keeper(self, leaves)
        if self.policy is policies.everything:
            with keeper.hooks():
                return self.fn(*args, **kwargs)
        # The block itself must not hold on to its inputs, so they are taken out of the tree.
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and not isinstance(leaf, LazyLeaf)]
        tensors = [leaves[i] for i in places]
        for i in places:
            leaves[i] = None
        generators = (*self.generators, *(leaf for leaf in leaves if isinstance(leaf, torch.Generator)))
        block = _Block(self.fn, leaves, spec, places, generators)
        del args, kwargs
        modes = noop_context_fn if self.policy is policies.nothing else functools.partial(_modes, self.policy, keeper)
        with keeper.hooks():
            return checkpoint(block, *tensors, use_reentrant=False, context_fn=modes)

    def _compiled(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Be what the compiler knows, while it traces."""
        if self.policy is policies.everything and self.store is None and self.shard_over is None:
            return self.fn(*args, **kwargs)
        if self.policy is not policies.nothing or self.store is not None or self.shard_over is not None:
            raise TypeError("remat() inside of compiled code takes no policy, store or group: put remat() around the compiled function")
        return checkpoint(self.fn, *args, use_reentrant=False, **kwargs)


@checked_options
def remat(
    fn: Callable[..., Any],
    *,
    policy: Policy = policies.nothing,
    store: Store | None = None,
    shard_over: Group | None = None,
    generators: Sequence[torch.Generator] = (),
) -> Remat:
    """Compute a function again in backward instead of keeping its intermediate results; no bit changes.

    It goes around the blocks of a model, not around the whole loss: there all of it would be computed again, and kept, at once. Inside
    of :func:`zfun.shard_params` the parameters of a block are gathered again when it is computed again.

    Args:
        fn: any function of trees, tensors and other values, which must do the same when it is called again. A module, a method of one or
            a function of one is computed again with the parameters that the module has during the call, also inside of
            ``torch.func.functional_call``.
        policy: which results are kept all the same; see :mod:`zfun.policies`. By default none but the inputs.
        store: where what is kept lives until backward: ``zf.stores.host()`` moves activations to host memory. By default they stay where
            they are. Parameters are never moved.
        shard_over: ranks that hold the same activations, as those of a model-parallel axis do: each keeps its part of them (``R -> S``),
            and they are gathered before the block is computed again. The first tensor of each shape is compared across these ranks, with
            ``process_group(debug=True)`` every one. Goes with ``store`` as well.
        generators: random generators that ``fn`` uses without taking them as arguments. The default ones of the CPU and of the
            inputs' devices, and those among the arguments, are restored in any case.

    Returns:
        A function of the same arguments.

    Raises:
        PlacementError: from the returned function, around a loss that is inside of ``shard_params`` already.
        SpecMismatch: from the returned function, where ranks of ``shard_over`` hold different activations.

    Example:
        >>> import zfun as zf
        >>> block = zf.remat(lambda layer, x: torch.tanh(x @ layer["w"]))
        >>> loss = lambda params, x: block(params["second"], block(params["first"], x)).sum()
        >>> params = {"first": {"w": torch.eye(2)}, "second": {"w": torch.eye(2)}}
        >>> zf.value_and_grad(loss)(params, torch.zeros(1, 2))[0]
        tensor(0.)

    After Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016).
    """
    if not callable(fn):
        raise OptionError(f"remat() takes a function; got {type(fn).__name__}; pass the function that is to be computed again")
    if not callable(policy):
        raise OptionError(f"remat() takes a policy, which is a function of (op, result); got {policy!r}; zf.policies has some")
    return Remat(fn, policy, store, shard_over, tuple(generators))


def warn_of_whole_loss(loss: Any) -> None:
    """Say so where what is computed again is everything: then all of it lives at once, as if nothing were."""
    if isinstance(loss, Remat) and loss.policy is not policies.everything:
        warnings.warn(
            "remat() around a whole loss saves no memory: backward begins by computing all of it again; put it around the blocks",
            stacklevel=3,
        )


def _check_flats(value: tree.Tree) -> None:
    for flat in flats(value):
        if flat.tape is not None or flat.compute_dtype is not None:
            raise PlacementError(
                "remat() stands inside of shard_params(), where it can see the blocks; got sharded parameters; write "
                "shard_params(remat(...)), or better remat() around each block"
            )


# The block: what is run twice.


class _Block:
    """A function with all of its arguments but the tensors."""

    def __init__(
        self, fn: Callable[..., Any], leaves: list[Any], spec: tree.Spec, places: list[int], generators: Sequence[torch.Generator]
    ) -> None:
        self.fn = fn
        self.leaves = leaves
        self.spec = spec
        self.places = places
        self.states = [(generator, generator.get_state()) for generator in generators]
        self.captured = _captured(fn, leaves)
        self.again = False

    def __call__(self, *tensors: Tensor) -> Any:
        leaves = list(self.leaves)
        for place, tensor in zip(self.places, tensors, strict=True):
            leaves[place] = tensor
        args, kwargs = tree.unflatten(self.spec, leaves)
        again, self.again = self.again, True
        if not again:
            return self.fn(*args, **kwargs)
        with _restored(self.states):
            if self.captured is None:
                return self.fn(*args, **kwargs)
            module, values = self.captured
            return functional_call(module, values(), args, kwargs, tie_weights=False)


@contextlib.contextmanager
def _restored(states: Sequence[tuple[torch.Generator, Tensor]]) -> Iterator[None]:
    now = [generator.get_state() for generator, _ in states]
    for generator, state in states:
        generator.set_state(state)
    try:
        yield
    finally:
        for (generator, _), state in zip(states, now, strict=True):
            generator.set_state(state)


class _WithModules(nn.Module):
    """A function of modules as a module, so that ``functional_call`` can call it with other parameters."""

    def __init__(self, fn: Callable[..., Any], modules: Sequence[nn.Module]) -> None:
        super().__init__()
        self.inner = nn.ModuleList(modules)
        self.fn = (fn,)  # not a module of this one, if it is one

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.fn[0](*args, **kwargs)


def _captured(fn: Callable[..., Any], arguments: Sequence[Any]) -> tuple[nn.Module, Callable[[], dict[str, Tensor]]] | None:
    """Note the parameters that modules have now: those of ``functional_call`` are gone when backward comes."""
    found = list(arguments)
    inner = fn
    while isinstance(inner, functools.partial):
        found += [*inner.args, *inner.keywords.values()]
        inner = inner.func
    modules = [value for value in (inner, getattr(inner, "__self__", None), *found) if isinstance(value, nn.Module)]
    if not modules:
        return None
    module = _WithModules(fn, modules)
    parameters = dict(module.named_parameters(remove_duplicate=False))
    buffers = dict(module.named_buffers(remove_duplicate=False))

    def values() -> dict[str, Tensor]:
        # Running statistics advance once, in forward: the second time they are copies.
        with loading():
            return parameters | {name: buffer.clone() for name, buffer in buffers.items()}

    return module, values


# What is kept, and where.


@dataclass(frozen=True, slots=True)
class _Outer:
    """What the hooks around the block made of a tensor."""

    value: Any


@dataclass(frozen=True, slots=True)
class _Kept:
    """A tensor that is kept elsewhere: its memory as a vector, or this rank's part of it."""

    memory: Tensor | Stored
    size: tuple[int, ...]
    stride: tuple[int, ...]
    numel: int  # of the vector
    skew: int  # elements between an aligned address and its beginning
    device: torch.device


class _Keeper:
    """Takes tensors over in forward, and gives them back in backward."""

    def __init__(self, options: Remat, arguments: Sequence[Any]) -> None:
        self.options = options
        self.moves = options.store is not None or options.shard_over is not None
        self.outer = torch._C._autograd._top_saved_tensors_default_hooks(False) if self.moves else None
        # What has no gradient is data, and is kept by who made it.
        self.data = {
            leaf.untyped_storage()._cdata
            for leaf in arguments
            if self.moves and isinstance(leaf, Tensor) and _is_plain(leaf) and leaf.grad_fn is None
        }
        self.all = options.policy is policies.everything

    def hooks(self) -> contextlib.AbstractContextManager[Any]:
        """The context in which the block is called: what autograd saves in it, the inputs, is kept here."""
        return torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack) if self.moves else contextlib.nullcontext()

    def pack(self, tensor: Tensor) -> Any:
        """Take over what autograd saves."""
        packed = tensor if self.outer is None else self.outer[0](tensor)
        # Within backward this block is part of one that is being computed again, and lives for a moment only.
        if not isinstance(packed, Tensor) or torch._C._current_graph_task_id() != -1 or not self._is_activation(tensor):
            return _Outer(packed)
        return self.keep(packed)

    def unpack(self, kept: Any) -> Any:
        """Give it back."""
        value = kept.value if isinstance(kept, _Outer) else self.restore(kept)
        return value if self.outer is None else self.outer[1](value)

    def _is_activation(self, tensor: Tensor) -> bool:
        if not _is_plain(tensor):
            return False
        base = tensor._base if tensor._is_view() and tensor._base is not None else tensor
        node = base.grad_fn
        # A cast parameter is one still.
        while node is not None and node.name() == "ToCopyBackward0":
            node = node.next_functions[0][0]
        if node is None:
            # Autograd saves the results of operations without their history.
            return self.all and not base.requires_grad and base.untyped_storage()._cdata not in self.data
        return node.name() != "torch::autograd::AccumulateGrad" and not is_bucket_view(node)

    def keep(self, tensor: Tensor) -> Any:
        """Move a tensor to the store, or this rank's part of it; a tensor that cannot be moved stays."""
        vector = _vector(tensor)
        if vector is None:
            return _Outer(tensor)
        options = self.options
        numel = vector.numel()
        if options.shard_over is not None:
            self._check_agreement(tensor, options.shard_over)
            vector = _part(vector, options.shard_over)
        elif options.store is not None and vector.device == options.store.device:
            # It would be kept as it is, and somebody may write to it.
            vector = vector.clone()
        memory = vector if options.store is None else options.store.put(vector, "activations")
        skew = tensor.storage_offset() * tensor.element_size() % _ALIGNMENT // tensor.element_size()
        return _Kept(memory, tuple(tensor.shape), tensor.stride(), numel, skew, tensor.device)

    def restore(self, kept: _Kept | _Outer) -> Tensor:
        """Bring a tensor back."""
        if isinstance(kept, _Outer):
            return kept.value
        vector = fetch(kept.memory, kept.device)
        group = self.options.shard_over
        if group is not None and group.size > 1:
            vector = group.start(Call(AllGather(), "activations", lane=Lane.PARAMS), vector).wait()
        return _tensor(vector[: kept.numel], kept)

    def _check_agreement(self, tensor: Tensor, group: Group) -> None:
        key = (tensor.dtype, tensor.shape)
        if group.size == 1 or (key in self.options._agreed and not group.debug):
            return
        entry = Entry("input", f"{tensor.dtype} {tuple(tensor.shape)}", str(ops.fingerprint(tensor)))
        try:
            agree([entry], group, "activations")
        except SpecMismatch as error:
            raise SpecMismatch(
                f"shard_over takes ranks that hold the same activations, as those of a model-parallel axis do; {error}; ranks with batches "
                "of their own keep activations of their own: leave shard_over out, or pass the group of the model-parallel axis",
                rank=group.rank,
            ) from None
        self.options._agreed.add(key)


# What torch's allocators align to.
_ALIGNMENT = 64


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided and not (tensor.is_conj() or tensor.is_neg())


def _order(size: Sequence[int], stride: Sequence[int]) -> list[int]:
    return sorted(range(len(size)), key=lambda dim: stride[dim], reverse=True)


def _vector(tensor: Tensor) -> Tensor | None:
    """Return the elements of a tensor in the order of its memory, each once; ``None`` where they overlap, or are none."""
    if not tensor.numel():
        return None
    found = tensor.detach()
    for dim, stride in enumerate(found.stride()):
        found = found.narrow(dim, 0, 1) if stride == 0 and found.shape[dim] > 1 else found
    found = found.permute(_order(found.shape, found.stride()))
    reach = 0
    for size, stride in zip(reversed(found.shape), reversed(found.stride()), strict=True):
        if size > 1:
            if stride <= reach:
                return None
            reach += (size - 1) * stride
    return found.reshape(-1)


def _tensor(vector: Tensor, kept: _Kept) -> Tensor:
    """The inverse of :func:`_vector`: the same strides, and as well aligned."""
    size = [1 if stride == 0 else n for n, stride in zip(kept.size, kept.stride, strict=True)]
    reach = 1 + sum((n - 1) * stride for n, stride in zip(size, kept.stride, strict=True))
    if kept.skew or reach != vector.numel():
        room = vector.new_empty(kept.skew + reach)
        order = _order(size, kept.stride)
        room.as_strided([size[d] for d in order], [kept.stride[d] for d in order], kept.skew).copy_(vector.view([size[d] for d in order]))
        return room.as_strided(kept.size, kept.stride, kept.skew)
    return vector.as_strided(kept.size, kept.stride, vector.storage_offset())


def _part(vector: Tensor, group: Group) -> Tensor:
    numel = -(-vector.numel() // group.size)
    mine = vector[group.rank * numel : (group.rank + 1) * numel]
    part = vector.new_zeros(numel)
    part[: mine.numel()] = mine
    return part


# What the policy asks for: two modes below autograd.


def _modes(policy: Policy, keeper: _Keeper) -> tuple[TorchDispatchMode, TorchDispatchMode]:
    kept: dict[int, _Result] = {}
    return _Recording(policy, keeper, kept), _Replaying(keeper, kept)


@dataclass(frozen=True, slots=True)
class _Result:
    """What an operation returned, and the random state that it left."""

    op: Any
    leaves: tuple[Any, ...]
    spec: tree.Spec
    versions: tuple[int | None, ...]
    random: tuple[tuple[torch.device, Tensor], ...]


class _Mode(TorchDispatchMode):
    """A mode that lets compiled functions run inside of it."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True


class _Recording(_Mode):
    """Runs forward, asks the policy about each result and keeps what it wants."""

    def __init__(self, policy: Policy, keeper: _Keeper, kept: dict[int, _Result]) -> None:
        super().__init__()
        self.policy = policy
        self.keeper = keeper
        self.kept = kept
        self.numbers: dict[int, int] = {}  # of what is kept, by its storage
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if is_loading():
            return out
        if not _may_be_kept(func):
            for written in _written(func, args, kwargs):
                self.kept.pop(self.numbers.pop(written.untyped_storage()._cdata, -1), None)
            return out
        number = self.count
        self.count += 1
        leaves, spec = tree.flatten(out)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        # A generator of the user's own has a state of its own.
        if tensors and kwargs.get("generator") is None and self.policy(func, policies.described(tensors)):
            kept = tuple(self._keep(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves)
            versions = tuple(leaf._version if isinstance(leaf, Tensor) else None for leaf in kept)
            self.kept[number] = _Result(func, kept, spec, versions, _random_states(func, tensors))
            self.numbers |= {leaf.untyped_storage()._cdata: number for leaf in tensors if _is_plain(leaf)}
        return out

    def _keep(self, tensor: Tensor) -> Any:
        return self.keeper.keep(tensor) if self.keeper.moves and _is_plain(tensor) else _alias(tensor)


class _Replaying(_Mode):
    """Computes a block again, but for what is kept."""

    def __init__(self, keeper: _Keeper, kept: dict[int, _Result]) -> None:
        super().__init__()
        self.keeper = keeper
        self.kept = kept
        self.count = 0

    def __enter__(self) -> Any:
        self.count = 0
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if is_loading() or not _may_be_kept(func):
            return func(*args, **(kwargs or {}))
        found = self.kept.get(self.count)
        self.count += 1
        if found is None:
            return func(*args, **(kwargs or {}))
        if found.op is not func:
            raise ZfunError(
                f"a function under remat() must do the same when it is computed again; got {func} where {found.op} was; look for what "
                "depends on a global, a counter or a cache"
            )
        for device, state in found.random:
            _set_random_state(device, state)
        return tree.unflatten(found.spec, [self._restore(found, i) for i in range(len(found.leaves))])

    def _restore(self, found: _Result, index: int) -> Any:
        leaf = found.leaves[index]
        if isinstance(leaf, (_Kept, _Outer)):
            return self.keeper.restore(leaf)
        if not isinstance(leaf, Tensor):
            return leaf
        if leaf._version != found.versions[index]:
            raise ZfunError(
                f"what a policy keeps must not be written to after the function has returned; the result of {found.op} was; write what "
                "follows out of place, or let the policy leave this result out"
            )
        return _alias(leaf)


def _alias(tensor: Tensor) -> Tensor:
    """The same memory without a place in a graph, but with the same count of writes."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


@functools.cache
def _may_be_kept(op: Any) -> bool:
    """Whether an operation makes new tensors and writes to none."""
    schema = getattr(op, "_schema", None)
    return (
        schema is not None
        and not schema.is_mutable
        and all(result.alias_info is None for result in schema.returns)
        and bool(schema.returns)
    )


def _written(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors that an operation writes to."""
    schema = getattr(op, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    values = {argument.name: value for argument, value in zip(schema.arguments, args, strict=False)} | kwargs
    names = [argument.name for argument in schema.arguments if argument.alias_info is not None and argument.alias_info.is_write]
    return [leaf for name in names for leaf in tree.leaves(values.get(name)) if isinstance(leaf, Tensor) and _is_plain(leaf)]


def _random_states(op: Any, tensors: Sequence[Tensor]) -> tuple[tuple[torch.device, Tensor], ...]:
    if torch.Tag.nondeterministic_seeded not in op.tags:
        return ()
    devices = dict.fromkeys(tensor.device for tensor in tensors)
    return tuple((device, _random_state(device)) for device in devices)


def _random_state(device: torch.device) -> Tensor:
    return torch.get_rng_state() if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)


def _set_random_state(device: torch.device, state: Tensor) -> None:
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)
