"""Layers, and which of them this rank has."""

from __future__ import annotations

import functools
import glob
import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zfun.collectives import Group, broadcast, gather_json
from zfun.errors import OptionError
from zfun.interop.deepspeed._ranks import group_of
from zfun.interop.deepspeed.pipe._topology import (
    PipeDataParallelTopology,
    PipelineParallelGrid,
    ProcessTopology,
)
from zfun.interop.deepspeed.runtime import checkpointing
from zfun.interop.deepspeed.runtime.zero._stand_ins import is_partitioned
from zfun.interop.deepspeed.utils import set_random_seed


class PipelineError(Exception):
    """A method of the engine that a pipeline does not have."""


class LayerSpec:
    """A layer that the ranks of its stage make.

    Args:
        typename: a class of modules.
        module_args: its arguments.
        module_kwargs: its arguments by name.
    """

    def __init__(self, typename: type[nn.Module], *module_args: Any, **module_kwargs: Any) -> None:
        if not (isinstance(typename, type) and issubclass(typename, nn.Module)):
            raise OptionError(
                f"LayerSpec() takes a class of modules; got {typename!r}; pass functions to "
                "PipelineModule() as they are"
            )
        self.typename, self.module_args, self.module_kwargs = typename, module_args, module_kwargs

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.typename.__name__})"

    def build(self, log: bool = False) -> nn.Module:
        """Make the layer."""
        return self.typename(*self.module_args, **self.module_kwargs)


class TiedLayerSpec(LayerSpec):
    """A layer whose parameters are those of the other layers with its key, on any stage.

    Args:
        key: of the shared module.
        typename: a class of modules.
        module_args: its arguments.
        forward_fn: ``(module, x) -> x``, in place of a call of the module.
        tied_weight_attr: not used, because all parameters of the module are shared.
        module_kwargs: its arguments by name.
    """

    def __init__(
        self,
        key: str,
        typename: type[nn.Module],
        *module_args: Any,
        forward_fn: Callable[[nn.Module, Any], Any] | None = None,
        tied_weight_attr: str | Sequence[str] = ("weight",),
        **module_kwargs: Any,
    ) -> None:
        super().__init__(typename, *module_args, **module_kwargs)
        self.key, self.forward_fn = key, forward_fn
        self.tied_weight_attr = tied_weight_attr


class PipelineModule(nn.Module):
    """A sequence of layers, of which this rank has those of its stage; all ranks call.

    The arguments are DeepSpeed's. Each layer gets what the one before returned: a tensor, or a
    tuple of tensors. A layer is a module, a :class:`LayerSpec`, or a function. Layers of other
    stages are made on the ``meta`` device, for the names and the sizes of their parameters.

    Args:
        layers: all layers, the same on every rank.
        num_stages: how many ranks have the layers; the other ranks are data parallel.
        topology: the places of the ranks, in place of ``num_stages``.
        loss_fn: ``(output, label) -> loss``; without it the last layer returns the loss.
        seed_layers: whether each layer begins with a seed of its own, when it is made and called.
        seed_fn: sets a seed, in place of that of the process.
        base_seed: of the first layer.
        partition_method: ``"parameters"``, ``"uniform"`` or ``"type:regex"``: the stages have
            equally many trained parameters, layers, or layers of this type.
        activation_checkpoint_interval: how many layers are recomputed together in backward; 0 for
            none.
        activation_checkpoint_func: ``(function, *inputs)``, which recomputes.
        checkpointable_layers: the names of the classes that are recomputed; by default layers with
            parameters.
        dynamic_shape: only ``False``.
        group: all ranks; by default those of the process.

    Attributes:
        parts: the first layer of each stage, and the number of layers.
        stage_id: of this rank.

    Raises:
        OptionError: ranks that the stages do not divide, or a stage without a parameter.

    Example:
        >>> module = PipelineModule([LayerSpec(nn.Linear, 4, 4), torch.relu], num_stages=1)
        >>> module.parts, [name for name, _ in module.named_parameters()]
        ([0, 2], ['0.weight', '0.bias'])
    """

    def __init__(
        self,
        layers: Sequence[Any],
        num_stages: int | None = None,
        topology: ProcessTopology | None = None,
        loss_fn: Callable[[Any, Any], Any] | None = None,
        seed_layers: bool = False,
        seed_fn: Callable[[int], Any] | None = None,
        base_seed: int = 1234,
        partition_method: str = "parameters",
        activation_checkpoint_interval: int = 0,
        activation_checkpoint_func: Callable[..., Any] = checkpointing.checkpoint,
        checkpointable_layers: Sequence[str] | None = None,
        dynamic_shape: bool = False,
        *,
        group: Group | None = None,
    ) -> None:
        super().__init__()
        self.ranks = group_of(group)
        if topology is None:
            if num_stages is None or num_stages < 1 or self.ranks.size % num_stages:
                raise OptionError(
                    "the stages of a PipelineModule divide the ranks; got num_stages="
                    f"{num_stages} for {self.ranks.size} ranks; pass a divisor, or topology="
                )
            topology = PipeDataParallelTopology(num_stages, self.ranks.size // num_stages)
        if dynamic_shape:
            raise OptionError(
                "ranks send the shapes of activations once; got dynamic_shape=True; pad the "
                "micro-batches, or call engine.reset_activation_shape() where shapes change"
            )
        self.loss_fn, self.base_seed = loss_fn, base_seed
        self.seed_layers = seed_layers
        self.seed_fn = set_random_seed if seed_fn is None else seed_fn
        self.activation_checkpoint_interval = activation_checkpoint_interval
        self.activation_checkpoint_func = activation_checkpoint_func
        self.checkpointable_layers = checkpointable_layers
        self.micro_offset = 0
        self._grid = PipelineParallelGrid(topology, self.ranks)
        self.num_stages, self.stage_id = self._grid.pipe_parallel_size, self._grid.stage_id
        self._layer_specs = list(layers)
        with torch.device("meta"):
            blank = [x.build() if isinstance(x, LayerSpec) else x for x in self._layer_specs]
        own = [dict(x.named_parameters()) if isinstance(x, nn.Module) else {} for x in blank]
        self.parts = _parts(partition_method, self._layer_specs, own, self.num_stages)
        self._local_start, self._local_stop = self.parts[self.stage_id : self.stage_id + 2]
        # The logical tree, without values, and the stages that have each leaf.
        self._leaves: dict[str, Tensor] = {}
        self._holders: dict[str, list[int]] = {}
        owners: dict[int, int] = {}
        for stage, (start, stop) in enumerate(itertools.pairwise(self.parts)):
            for index in range(start, stop):
                for name, param in own[index].items():
                    full = f"{_prefix(index, self._layer_specs[index])}.{name}"
                    if id(param) not in owners:
                        self._add(full, param, stage)
                    elif owners[id(param)] != stage:
                        raise OptionError(
                            "layers of several stages share parameters by a key; got leaf "
                            f"{full!r} of a module in two stages; use TiedLayerSpec"
                        )
                    owners[id(param)] = stage
            if not any(own[i][name].requires_grad for i in range(start, stop) for name in own[i]):
                raise OptionError(
                    f"each stage trains a parameter; got layers {start} to {stop - 1} for stage "
                    f"{stage}, which have none; use fewer stages, or another partition_method"
                )
        self.tied_modules = nn.ModuleDict()
        self.forward_funcs = [
            self._built(index) for index in range(self._local_start, self._local_stop)
        ]

    def _add(self, name: str, param: Tensor, stage: int) -> None:
        """Add a leaf to the logical tree."""
        if is_partitioned(param):
            raise OptionError(
                f"a stage makes its own layers; got leaf {name!r} in pieces, of zero.Init; use "
                "LayerSpec without zero.Init"
            )
        leaf = torch.empty_like(param, device="meta", requires_grad=param.requires_grad)
        known = self._leaves.setdefault(name, leaf)
        if (known.shape, known.requires_grad) != (leaf.shape, leaf.requires_grad):
            raise OptionError(
                f"layers with one key have the same parameters; got {tuple(known.shape)} and "
                f"{tuple(leaf.shape)} for leaf {name!r}; give each of them its own key"
            )
        holders = self._holders.setdefault(name, [])
        holders += [] if stage in holders else [stage]

    def _built(self, index: int) -> Callable[[Any], Any]:
        """Make a layer of this stage."""
        layer = self._layer_specs[index]
        if self.seed_layers:
            self.seed_fn(self.base_seed + index)
        if isinstance(layer, TiedLayerSpec):
            if layer.key not in self.tied_modules:
                self.tied_modules[layer.key] = layer.build()
            module = self.tied_modules[layer.key]
            if (buffer := next((name for name, _ in module.named_buffers()), None)) is not None:
                raise OptionError(
                    "stages that share a module share parameters; got buffer "
                    f"{buffer!r} in the module of key {layer.key!r}; make it in the loss"
                )
            return (
                module if layer.forward_fn is None else functools.partial(layer.forward_fn, module)
            )
        if isinstance(layer, LayerSpec | nn.Module):
            module = layer.build() if isinstance(layer, LayerSpec) else layer
            self.add_module(str(index), module)
            return module
        return layer

    def stage_leaves(self) -> list[list[str]]:
        """Return the names of the leaves of each stage, as globs."""
        return [
            [glob.escape(name) for name, holders in self._holders.items() if stage in holders]
            for stage in range(self.num_stages)
        ]

    def check_own(self) -> None:
        """Refuse leaves that are not those of the stages any more; every rank must call.

        Every rank has the error of any stage, because ranks wait for each other next.
        """
        own, known = dict(self.named_parameters()), self._leaves
        cast = [name for name, param in own.items() if param.dtype != known[name].dtype]
        casts = [f"{own[x].dtype} for leaf {x!r}, which was {known[x].dtype}" for x in cast[:1]]
        is_trained = any(param.requires_grad for param in own.values())
        mine = [self.stage_id, casts, is_trained]
        ranks = gather_json(mine, self.ranks, "leaves of a pipeline")
        if found := next((casts for _, casts, _ in ranks if casts), None):
            raise OptionError(
                f"leaves keep their dtypes after PipelineModule(); got {found[0]}; pass dtype= to "
                "the layer, or turn on bf16 or fp16 in the configuration"
            )
        frozen = [stage for stage, _, is_trained in ranks if not is_trained]
        if 0 < len(frozen) < len(ranks):
            raise OptionError(
                f"each stage trains a parameter; got none that requires a gradient on stage "
                f"{frozen[0]}; freeze layers before PipelineModule(), and use fewer stages"
            )

    def logical(self) -> dict[str, Tensor]:
        """Return the leaves of all stages, with values on their own; every rank must call.

        Values are those of the first data rank, and of the first stage of a shared module.
        """
        own = {name: param.detach() for name, param in self.named_parameters()}
        pipe, data = self._grid.mesh["pipe"], self._grid.mesh["data"]
        device = next(iter(own.values())).device
        for name, value in own.items():
            value.copy_(broadcast(value.clone(), data, 0, name="parameters", part=name))
        for name, holders in self._holders.items():
            if len(holders) > 1:
                value = own.get(name, torch.empty_like(self._leaves[name], device=device))
                value = value.detach()
                value.copy_(broadcast(value.clone(), pipe, holders[0], name="tied", part=name))
        return self._leaves | own

    def is_elsewhere(self, name: str) -> bool:
        """Return whether a name of a state belongs to a layer of another stage."""
        first, _, rest = name.partition(".")
        if first == "tied_modules":
            key = rest.partition(".")[0]
            return key not in self.tied_modules and any(
                isinstance(x, TiedLayerSpec) and x.key == key for x in self._layer_specs
            )
        index = int(first) if first.isdecimal() else -1
        return 0 <= index < self._local_start or self._local_stop <= index < self.parts[-1]

    def mpu(self) -> PipelineParallelGrid:
        """Return the groups of this rank."""
        return self._grid

    def topology(self) -> ProcessTopology:
        """Return the places of the ranks."""
        return self._grid.topology()

    def num_pipeline_stages(self) -> int:
        """Return the number of stages."""
        return self.num_stages

    def forward(self, forward_input: Any) -> Any:
        """Call the layers of this stage, one after the other."""
        self.micro_offset += 1
        step = self.activation_checkpoint_interval or len(self.forward_funcs)
        x = forward_input
        for start in range(0, len(self.forward_funcs), step):
            run = functools.partial(self._run, start, start + step, self.micro_offset + 1)
            # As in DeepSpeed, layers that are not recomputed get a tuple as it is.
            is_open = self.activation_checkpoint_interval and isinstance(x, tuple)
            inputs = x if is_open else (x,)
            is_recomputed = self.activation_checkpoint_interval and self._is_checkpointable(
                self.forward_funcs[start : start + step]
            )
            x = self.activation_checkpoint_func(run, *inputs) if is_recomputed else run(*inputs)
        return x

    def _run(self, start: int, stop: int, offset: int, *inputs: Any) -> Any:
        x = inputs[0] if len(inputs) == 1 else inputs
        for index, layer in enumerate(self.forward_funcs[start:stop], self._local_start + start):
            if self.seed_layers:
                self.seed_fn(self.base_seed * offset + index)
            x = layer(x)
        return x

    def _is_checkpointable(self, layers: Sequence[Any]) -> bool:
        if self.checkpointable_layers is not None:
            return all(type(x).__name__ in self.checkpointable_layers for x in layers)
        return any(isinstance(x, nn.Module) and any(True for _ in x.parameters()) for x in layers)


def _prefix(index: int, layer: Any) -> str:
    return f"tied_modules.{layer.key}" if isinstance(layer, TiedLayerSpec) else str(index)


def _parts(
    method: str, layers: Sequence[Any], params: Sequence[Mapping[str, Tensor]], num_stages: int
) -> list[int]:
    """Return the first layer of each stage, and the number of layers."""
    kind, _, pattern = method.lower().partition(":")
    if kind == "uniform" or len(layers) <= num_stages:
        size, more = divmod(len(layers), num_stages)
        return [stage * size + min(stage, more) for stage in range(num_stages + 1)]
    if kind == "parameters":
        return balanced(
            [sum(x.numel() for x in own.values() if x.requires_grad) for own in params], num_stages
        )
    if kind == "type" and pattern:
        types = [x.typename if isinstance(x, LayerSpec) else x for x in layers]
        types = [type(x) if isinstance(x, nn.Module) else x for x in types]
        found = [int(bool(re.search(pattern, getattr(x, "__name__", ""), re.I))) for x in types]
        if any(found):
            return balanced(found, num_stages)
    raise OptionError(
        "partition_method is 'parameters', 'uniform' or 'type:' with a pattern that a layer's type "
        f"has; got {method!r}; pass partition_method='uniform'"
    )


def balanced(weights: Sequence[int], num_parts: int) -> list[int]:
    """Return cuts with the least difference between the heaviest and the lightest part.

    Parts are added one by one, each to the best cuts before it; of equal ones the last part is the
    shortest, as in DeepSpeed.

    Example:
        >>> balanced([4, 1, 1, 1, 1], 2)
        [0, 1, 5]
    """
    sums = [0, *itertools.accumulate(weights)]
    # For the first so many layers: the most and the least of a part, and the cuts.
    best: dict[int, tuple[float, float, list[int]]] = {0: (0, math.inf, [0])}
    for _ in range(num_parts):
        longer: dict[int, tuple[float, float, list[int]]] = {}
        for stop in range(1, len(sums)):
            for start in (x for x in best if x < stop):
                most, least, cuts = best[start]
                most, least = (
                    max(most, sums[stop] - sums[start]),
                    min(least, sums[stop] - sums[start]),
                )
                if stop not in longer or most - least <= longer[stop][0] - longer[stop][1]:
                    longer[stop] = most, least, [*cuts, stop]
        best = longer
    return best[len(weights)][2]
