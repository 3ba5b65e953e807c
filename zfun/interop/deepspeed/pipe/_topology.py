"""The places of ranks along the axes of a pipeline."""

from __future__ import annotations

import itertools
import math
from collections import namedtuple
from collections.abc import Sequence
from typing import Any

from zfun.collectives import Group, mesh
from zfun.errors import OptionError


class ProcessTopology:
    """The ranks along named axes, of which the last one varies fastest.

    Args:
        axes: their names.
        dims: how many ranks lie along each.

    Example:
        >>> topology = ProcessTopology(axes=["pipe", "data"], dims=[2, 3])
        >>> topology.get_rank(pipe=1, data=2), topology.get_coord(4)
        (5, ProcessCoord(pipe=1, data=1))
        >>> topology.get_axis_comm_lists("pipe"), topology.filter_match(data=0)
        ([[0, 3], [1, 4], [2, 5]], [0, 3])
    """

    def __init__(self, axes: Sequence[str], dims: Sequence[int]) -> None:
        self.axes, self.dims = list(axes), list(dims)
        # pyrefly: ignore[bad-class-definition]
        self.ProcessCoord: Any = namedtuple("ProcessCoord", self.axes)
        places = itertools.product(*map(range, self.dims))
        self.mapping = {self.ProcessCoord(*place): rank for rank, place in enumerate(places)}

    def get_rank(self, **coords: int) -> int:
        """Return the rank at a place, of which every coordinate is given."""
        if coords.keys() != set(self.axes):
            raise ValueError(f"get_rank() takes {self.axes}; got {coords}; use filter_match()")
        return self.mapping[self.ProcessCoord(**coords)]

    def get_coord(self, rank: int) -> Any:
        """Return the place of a rank."""
        return list(self.mapping)[rank]

    def get_axis_names(self) -> list[str]:
        """Return the names of the axes."""
        return self.axes

    def get_dim(self, axis: str) -> int:
        """Return how many ranks lie along an axis; 0 along none of this name."""
        return self.dims[self.axes.index(axis)] if axis in self.axes else 0

    def filter_match(self, **coords: int) -> list[int]:
        """Return the ranks with these coordinates."""
        wanted = coords.items()
        return [
            rank
            for place, rank in self.mapping.items()
            if all(getattr(place, axis) == x for axis, x in wanted)
        ]

    def get_axis_list(self, axis: str, idx: int) -> list[int]:
        """Return the ranks at one place of an axis."""
        return self.filter_match(**{axis: idx})

    def get_axis_comm_lists(self, axis: str) -> list[list[int]]:
        """Return the lists of ranks that differ along an axis only."""
        if axis not in self.axes:
            return []
        others = [x for x in self.axes if x != axis]
        places = itertools.product(*(range(self.get_dim(x)) for x in others))
        return [self.filter_match(**dict(zip(others, x, strict=True))) for x in places]

    def get_rank_repr(
        self,
        rank: int,
        omit_axes: Sequence[str] = ("data", "pipe"),
        inner_sep: str = "_",
        outer_sep: str = "-",
    ) -> str:
        """Return a name for the place of a rank, without some axes."""
        place = self.get_coord(rank)
        names = [x for x in self.axes if x not in omit_axes]
        return outer_sep.join(f"{x}{inner_sep}{getattr(place, x):02d}" for x in names)

    def world_size(self) -> int:
        """Return the number of ranks."""
        return math.prod(self.dims)

    def __str__(self) -> str:
        return str(self.mapping)


class PipeDataParallelTopology(ProcessTopology):
    """Stages, each over neighbouring data parallel ranks."""

    def __init__(self, num_pp: int, num_dp: int) -> None:
        super().__init__(["pipe", "data"], [num_pp, num_dp])


class PipeModelDataParallelTopology(ProcessTopology):
    """Stages over data parallel ranks, each of neighbouring model parallel ranks.

    :class:`~zfun.interop.deepspeed.pipe.PipelineModule` takes one model parallel rank only.
    """

    def __init__(self, num_pp: int, num_mp: int, num_dp: int) -> None:
        super().__init__(["pipe", "data", "model"], [num_pp, num_dp, num_mp])


class PipelineParallelGrid:
    """The groups of this rank along the axes of a topology, as DeepSpeed's ``mpu``; all ranks call.

    The groups are zfun's. Model parallel ranks are alone.

    Args:
        topology: the axes ``pipe`` and ``data``, and others of one rank.
        process_group: all ranks, a group of zfun.

    Raises:
        OptionError: another axis of several ranks, or another number of ranks.
    """

    def __init__(self, topology: ProcessTopology, process_group: Group) -> None:
        sizes = dict(zip(topology.axes, topology.dims, strict=True))
        more = {axis: n for axis, n in sizes.items() if axis not in ("pipe", "data") and n > 1}
        if more or not sizes.keys() >= {"pipe", "data"}:
            raise OptionError(
                "a pipeline has the axes 'pipe' and 'data', because layers that share a matrix "
                f"over ranks have a norm and a seed of their own; got {sizes}; use "
                "PipeDataParallelTopology, or zf.tensor_parallel in the stages of zf.pipeline"
            )
        if topology.world_size() != process_group.size:
            raise OptionError(
                f"a topology has a place for every rank; got {sizes} for {process_group.size} "
                "ranks; change num_pp or num_dp"
            )
        self._topo = topology
        self.mesh = mesh(process_group, **sizes)
        self.global_rank, self.world_size = process_group.rank, process_group.size
        self.pipe_parallel_size, self.data_parallel_size = sizes["pipe"], sizes["data"]
        self.model_parallel_size = self.slice_parallel_size = 1
        self.stage_id = self.mesh["pipe"].rank
        self.data_parallel_id = self.mesh["data"].rank

    def topology(self) -> ProcessTopology:
        """Return the topology."""
        return self._topo

    def stage_to_global(self, stage_id: int, **coords: int) -> int:
        """Return the rank of another stage at the place of this rank."""
        place = self._topo.get_coord(self.global_rank)._asdict()
        return self._topo.get_rank(**{**place, **coords, "pipe": stage_id})

    def get_global_rank(self) -> int:
        """Return the rank among all ranks."""
        return self.global_rank

    def get_pipe_parallel_group(self) -> Group:
        """Return the stages of this rank's pipeline."""
        return self.mesh["pipe"]

    def get_data_parallel_group(self) -> Group:
        """Return the ranks with this stage."""
        return self.mesh["data"]

    get_stage_id = get_pipe_parallel_rank = get_pipeline_model_parallel_rank = lambda self: (
        self.stage_id
    )
    get_data_parallel_id = get_data_parallel_rank = lambda self: self.data_parallel_id
    get_pipe_parallel_world_size = get_pipeline_model_parallel_world_size = lambda self: (
        self.pipe_parallel_size
    )
    get_data_parallel_world_size = lambda self: self.data_parallel_size
    get_model_parallel_rank = get_slice_parallel_rank = lambda self: 0
    get_model_parallel_world_size = get_slice_parallel_world_size = lambda self: 1
    get_tensor_model_parallel_rank = get_model_parallel_rank
    get_tensor_model_parallel_world_size = get_model_parallel_world_size
