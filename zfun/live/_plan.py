"""The plan of a step."""

from __future__ import annotations

from typing import Any

import torch

from zfun.collectives import Group, abstract_group, axis_of, mesh_of
from zfun.errors import OptionError, checked_options
from zfun.layout import Layout, split_by_label
from zfun.live._held import Live
from zfun.live._play import Play
from zfun.live._rehearsal import is_scaled, rehearsed
from zfun.optim import as_optimizer
from zfun.recipes import Precision
from zfun.transforms import Schedule
from zfun.wire import Wire, check_wire

__all__ = ["live_bytes"]


@checked_options
def live_bytes(
    stage: int,
    layout: Layout,
    schedule: Schedule,
    optimizer: Any,
    *,
    group: Group | None = None,
    secondary: Group | None = None,
    frozen: Layout | None = None,
    precision: torch.dtype | Precision | None = None,
    num_micro_batches: int = 1,
    offload_optimizer: bool = False,
    offload_params: bool = False,
    offload_grads: bool = False,
    wire_params: Wire | None = None,
    wire_grads: Wire | None = None,
    donate: bool = True,
    first_step: bool = False,
) -> Live:
    """Say how many bytes each rank holds at every moment of a step of :func:`zfun.zero`, without running it.

    It is exact to the byte for simulated ranks and optimizers that work on flat buffers, where no operation of the loss, and no block that
    :func:`zfun.remat` computes again, uses leaves of two buckets: it would keep the first until it is through. Processes hold buffers of
    their transport instead of some of these: parts of messages over gloo, and pages of each other through shared memory.

    Args:
        stage: 0, 1, 2 or 3.
        layout: of the trained parameters, in the dtypes in which they are kept.
        schedule: of their use, as :func:`zfun.schedule` makes it of a :func:`zfun.trace` of the same leaves; at stages 0 to 2 only the
            order of gradients counts.
        optimizer: what :func:`zfun.zero` is given.
        group: a mesh or the inner axis of one, where :func:`zfun.zero` is given that; an abstract one will do.
        secondary: the inner axis of ``group``, where backward gathers over that.
        frozen: the layout of the leaves that are not trained.
        precision: as :func:`zfun.zero` takes it. It says what master weights there are, and whether gradients are divided by a loss scale,
            which must not come to be 1; the other dtypes are in the layout and the trace.
        num_micro_batches: how many micro-batches a batch is split in.
        offload_optimizer: whether the optimizer's state is in a store.
        offload_params: whether the parameters are.
        offload_grads: whether the gradients are.
        wire_params: the format in which parameters are gathered; stage 3 only.
        wire_grads: the format in which gradients are summed. What error feedback keeps counts as gradients on their way; a step in which it
            forgets (``reset``) holds a little less than is said here.
        donate: whether the step takes over the state that it is given.
        first_step: whether it is the first one, which is still learning the order of use.

    Returns:
        The bytes, by what they are and where.

    Raises:
        OptionError: a stage that does not exist, options that do not go with it, a schedule of other leaves; or what is not covered:
            :func:`zfun.optim.muon`, :func:`zfun.optim.from_torch` and :func:`zfun.optim.onebit_adam`.

    Example:
        >>> import zfun as zf
        >>> params = {"a": torch.empty(64, 64, device="meta"), "b": torch.empty(64, 64, device="meta")}
        >>> loss = lambda params, x: torch.tanh(x @ params["a"] @ params["b"]).sum()
        >>> found = zf.schedule(zf.trace(loss, params, torch.empty(1, 64, device="meta"), 8, bucket_bytes=1))
        >>> print(zf.live_bytes(3, zf.layout_of(params, 8, 1), found, zf.optim.adamw(1e-3)))
                                 params  gathered  gradients  reduced  optimizer  on the device  in a store
        between steps             4,096         0          0        0      8,192         12,288           0
        peak: gathered bucket 0   4,096    16,384     32,768    4,096      8,192         65,536           0

    After Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (2020).
    """
    if stage not in (0, 1, 2, 3):
        raise OptionError(f"stage must be 0, 1, 2 or 3; got {stage!r}")
    if num_micro_batches < 1:
        raise OptionError(f"num_micro_batches must be at least 1; got {num_micro_batches}")
    if offload_params and stage < 3:
        raise OptionError(f"offload_params keeps shards, which only stage 3 has; got stage {stage}; use stage=3, or leave it out")
    if wire_params is not None and stage < 3:
        raise OptionError(
            f"wire_params is for stage 3, which gathers what it does not keep; got stage {stage}; use stage=3, or leave it out"
        )
    check_wire(wire_params, "live_bytes(wire_params=...)", is_repeated=True)
    check_wire(wire_grads, "live_bytes(wire_grads=...)")
    labels = as_optimizer(optimizer).labels
    layout = layout if labels is None else split_by_label(layout, labels)
    parts = [layout] if frozen is None else [layout, frozen]
    kept = [(bucket.padded_numel, bucket.dtype.itemsize) for part in parts for bucket in part.buckets]
    traced = schedule.trace.buckets
    group = _checked_group(stage, abstract_group(layout.size) if group is None else group, secondary)
    if [numel for numel, _ in kept] != [b.numel for b in traced] or (schedule.trace.size, layout.size) != (group.size, mesh_of(group).size):
        raise OptionError(
            f"the schedule must be of the buckets of the layout; got {len(traced)} buckets on {schedule.trace.size} ranks for {len(kept)} "
            f"on {layout.size}; trace the same parameters with the same size, bucket_bytes, persistence and labels"
        )
    play = Play(
        stage,
        len(layout.buckets),
        group,
        secondary,
        schedule,
        [itemsize for _, itemsize in kept],
        offload_params=offload_params,
        offload_grads=offload_grads,
        wire_params=wire_params,
        wire_grads=wire_grads,
        accumulates=num_micro_batches > 1,
    )
    state_bytes, changes = rehearsed(optimizer, precision, layout, group.size if stage > 0 else 1, donate=donate, first_step=first_step)
    where = "store" if offload_optimizer else "device"
    play.hold("params", play.shards_of(range(len(traced))), "", play.param_place)
    play.hold("optimizer", state_bytes, "", where)
    for bucket in schedule.persistent if stage == 3 and not first_step else ():
        if not traced[bucket].grad_itemsize:
            play.hold("gathered", play.gathered(bucket), "")
    if not first_step:
        play.begin()
    before = play.moments[-1]._replace(what="between steps")
    play.moments.clear()
    for micro in range(num_micro_batches):
        play.gradient(first=micro == 0, learning=first_step and micro == 0)
        if micro:
            play.add()
    play.redistribute()
    if is_scaled(precision):
        play.unscale()
    play.update(changes, where, donate=donate)
    play.moments.append(play.now("the end"))
    return Live(before, tuple(play.moments))


def _checked_group(stage: int, group: Group, secondary: Group | None) -> Group:
    if axis_of(group) == "outer":
        raise OptionError(f"the live bytes of a step are known over a group, a mesh or its inner axis; got {group!r}; pass the mesh")
    if secondary is not None and (stage < 3 or mesh_of(secondary) is not group or axis_of(secondary) != "inner"):
        raise OptionError(
            f"secondary is the inner axis of the mesh group, at stage 3; got {secondary!r} for {group!r} at stage {stage}; leave it out, "
            "or pass group=mesh, secondary=mesh.inner"
        )
    return group
