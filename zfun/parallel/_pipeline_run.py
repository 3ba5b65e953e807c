"""One step of a pipeline on one rank: its actions in order, with the messages between."""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from zfun import tree
from zfun.collectives import AllReduce, Collective, Group, Stream, Work
from zfun.errors import OptionError
from zfun.parallel._cuts import call_with
from zfun.parallel._pipeline_messages import Arrival, Channel, form_of, grad_leaves
from zfun.parallel.schedules import BACKWARD, FORWARD, INPUTS, WEIGHTS, Action
from zfun.transforms import Pullback, add_grads, open_batch
from zfun.transforms.grads._accumulate import times
from zfun.transforms.grads._pullback import View, seed_of
from zfun.transforms.grads._value import NO_AUX, parse

StartVjp: TypeAlias = Callable[[Callable[..., Any], Any], tuple[Any, Pullback]]
"""``(fn, batch)`` to the outputs and the pullback, as :attr:`zfun.recipes.Zero.vjp` without the
state."""

# Messages that a rank sends before it waits for the first of them.
_MAX_SENT = 2


class Handed:
    """The input of a stage, which transforms of the batch, such as a cast, leave as it is.

    Attributes:
        value: the input; unused by the first stage.
        is_split: whether backward comes in two halves, for which the stage gets views.
        views: of the parameters, which the stage got.
    """

    # No dataclass, because a batch is mapped down to the fields of a dataclass.
    __slots__ = ("is_split", "value", "views")

    def __init__(self, value: Any, *, is_split: bool) -> None:
        self.value, self.is_split = value, is_split
        self.views: list[View] = []

    def viewed(self, leaf: Any) -> Any:
        """Return a view of a parameter, unless it is gathered where it is used."""
        is_plain = type(leaf) is Tensor or type(leaf) is FakeTensor
        if not self.is_split or not is_plain or not leaf.requires_grad:
            return leaf
        self.views.append((leaf, leaf.view_as(leaf)))
        return self.views[-1][1]


@dataclass(frozen=True)
class StageFunction:
    """A stage as a function of a batch, for :func:`zfun.vjp`.

    Attributes:
        fn: the stage.
        pick: the parameters of the stage, from those of the rank.
        takes_batch: whether the stage gets the micro-batch too.
        is_first: whether the stage gets the micro-batch as its input.
        is_last: whether the stage returns the loss.
    """

    fn: Callable[..., Any]
    pick: Callable[[Any], Any]
    takes_batch: bool
    is_first: bool
    is_last: bool

    def __call__(self, params: Any, given: tuple[Handed, Any]) -> Any:
        handed, batch = given
        x = batch if self.is_first else handed.value
        own = self.pick(params)
        rest = [x, batch] if self.takes_batch else [x]
        if handed.is_split:
            leaves, spec = tree.flatten(own)
            out = call_with(self.fn, own, spec, [*map(handed.viewed, leaves)], *rest)
        else:
            out = self.fn(own, *rest)
        if not self.is_last:
            return out
        _, total, weight, aux = parse(out)
        return {"total": total, "weight": weight, "aux": None if aux is NO_AUX else (aux,)}


@dataclass
class Open:
    """A stage between forward and backward of a micro-batch.

    Attributes:
        x: the input of the stage; ``None`` of the first one.
        out: the outputs.
        pullback: the way back.
        views: of the parameters, if backward comes in two halves.
        weights: of the loss, on this rank and on all ranks; ``None`` for a plain mean.
        rest: the second half of the pullback.
    """

    x: Any
    out: Any
    pullback: Pullback
    views: list[View]
    weights: Tensor | None = None
    rest: Callable[[], Any] | None = None


@dataclass
class Results:
    """The results of the actions of a step on one rank.

    Attributes:
        grads: the sum of the gradients of the micro-batches.
        losses: of each micro-batch, on the rank of the last stage.
        weights: of each micro-batch, over the data ranks; empty for plain means.
        auxes: the second results of the losses.
    """

    grads: Any = None
    losses: dict[int, Tensor] = field(default_factory=dict)
    weights: dict[int, Tensor] = field(default_factory=dict)
    auxes: dict[int, Any] = field(default_factory=dict)


@dataclass(eq=False)
class PipelineStep:
    """The actions of a rank.

    Attributes:
        stages: the stages of this rank, by number.
        num_stages: of the pipeline.
        channels: to and from other ranks, by stage and kind of the message.
        start: runs the first half of a stage.
        batches: the micro-batches.
        group: the data ranks, over which weights are summed.
        loss_scale: the factor of the loss in backward.
    """

    stages: dict[int, StageFunction]
    num_stages: int
    channels: dict[tuple[int, str], Channel]
    start: StartVjp
    batches: Sequence[Any]
    group: Group
    loss_scale: float | Tensor

    def __post_init__(self) -> None:
        self._results = Results()
        self._keys = [_key(batch) for batch in self.batches]
        self._open: dict[tuple[int, int], Open] = {}
        self._arriving: dict[tuple[int, str, int], Arrival] = {}
        self._sent: dict[Action, list[Work]] = {}
        self._summed: dict[int, Work] = {}
        # Stages and micro-batches whose backward comes in two halves.
        self._split: set[tuple[int, int]] = set()
        # The input of the forward pass that runs.
        self._x: Any = None

    def run(
        self, actions: Sequence[Action], watch: Callable[[Action | None], object] | None = None
    ) -> Results:
        """Run the actions, and wait for everything that was sent.

        Args:
            actions: of this rank.
            watch: is called before each action, and with ``None`` after the last one.
        """
        self._split = {(stage, k) for stage, kind, k in actions if kind == INPUTS}
        try:
            for action in actions:
                if watch is not None:
                    watch(action)
                try:
                    self._run(action)
                except BaseException as error:
                    error.add_note(f"in action {action} of a pipeline{self._input_of(action)}")
                    raise
            if watch is not None:
                watch(None)
        finally:
            for call in self._open.values():
                call.pullback.close()
        while self._sent:
            self._wait_sent(next(iter(self._sent)))
        return self._results

    def _run(self, action: Action) -> None:
        stage, kind, k = action
        if kind == FORWARD:
            self._x = self._arriving.pop((stage, "F", k))() if stage else None
            self._forward(stage, k, self._x)
            self._x = None
        elif kind in (BACKWARD, INPUTS):
            self._backward(stage, k, is_whole=kind == BACKWARD)
        elif kind == WEIGHTS:
            call = self._open.pop((stage, k))
            assert call.rest is not None
            self._add(k, call, call.rest)
        elif kind == "SEND_F":
            # The pullback says which outputs have a graph.
            call = self._open[stage, k]
            wanted = set(call.pullback.paths)
            self._send(action, call.out, wanted.__contains__)
        elif kind == "SEND_B":
            self._send(action, self._arriving.pop((stage - 1, "B", k))(), lambda path: False)
        else:
            found = self.channels[stage, kind].receive(_message(stage, kind, k), self._keys[k])
            self._arriving[stage, kind[-1], k] = found

    def _send(self, action: Action, value: Any, has_grad: Callable[[str], bool]) -> None:
        stage, kind, k = action
        channel = self.channels[stage, kind]
        self._sent[action] = channel.send(value, _message(stage, kind, k), self._keys[k], has_grad)
        while len(self._sent) > _MAX_SENT:
            self._wait_sent(next(iter(self._sent)))

    def _wait_sent(self, action: Action) -> None:
        _wait(self._sent.pop(action, []))

    def _input_of(self, action: Action) -> str:
        """Say for the error of a forward pass what the stage before has given."""
        if action.kind != FORWARD or self._x is None:
            return ""
        form, _ = form_of(self._x, lambda path: False, "activations")
        return f", whose input from stage {action.stage - 1} is {form}"

    def _forward(self, stage: int, k: int, x: Any) -> None:
        handed = Handed(x, is_split=(stage, k) in self._split)
        out, pullback = self.start(self.stages[stage], (handed, self.batches[k]))
        call = self._open[stage, k] = Open(x, out, pullback, handed.views)
        if stage == self.num_stages - 1:
            self._take_loss(k, out, call)
        elif stage + 1 in self.stages:
            # The rule for activations holds on one rank too.
            form_of(out, lambda path: False, "activations")
            wanted = set(pullback.paths)
            self._arriving[stage + 1, "F", k] = lambda: _handed_over(out, wanted)

    def _take_loss(self, k: int, out: Any, call: Open) -> None:
        """Keep the loss of a micro-batch, and start to sum its weight."""
        self._results.losses[k] = out["total"].detach()
        if out["aux"] is not None:
            (self._results.auxes[k],) = out["aux"]
        if out["weight"] is not None:
            call.weights = out["weight"].detach().reshape(1)
            summing = Collective(AllReduce(), "weight", f"micro-batch {k}", Stream.CONTROL)
            self._summed[k] = self.group.start(summing, call.weights)

    def _backward(self, stage: int, k: int, *, is_whole: bool) -> None:
        call = self._open[stage, k]
        if stage == self.num_stages - 1:
            cotangents: Any = {"total": seed_of(call.out["total"], self.loss_scale)}
            if call.weights is not None:
                # Both in one tensor, for the stages before.
                summed = self._summed.pop(k).wait()
                call.weights = torch.cat([call.weights, summed]).double()
        else:
            back = self._arriving.pop((stage, "B", k))()
            # The next stage has answered, so the outputs have arrived, and may be freed here.
            self._wait_sent(Action(stage, "SEND_F", k))
            call.weights = back["weights"]
            cotangents = _like(call.out, set(call.pullback.paths), back["x"])
        inputs = grad_leaves(call.x)
        weight = None if call.weights is None else call.weights[0]
        if is_whole:
            found: list[Tensor | None] = []

            def run() -> Any:
                grads, found[:] = call.pullback.with_inputs(cotangents, inputs, weight=weight)
                return grads

            self._add(k, call, run)
            del self._open[stage, k]
        else:
            found, call.rest = call.pullback.inputs_first(
                cotangents, inputs, call.views, weight=weight
            )
        if stage:
            back = {"x": found, "weights": call.weights}
            # Of this rank, or sent next.
            self._arriving[stage - 1, "B", k] = lambda: back
        # Cotangents and activations must not outlive the action.
        call.x = call.out = None
        call.views = []

    def _add(self, k: int, call: Open, run: Callable[[], Any]) -> None:
        """Add the gradients of a micro-batch, which a function computes."""
        total, weights = self._results.grads, call.weights
        if weights is None and call.pullback.adds_onto(total):
            grads = run()
            # A leaf that one of the two uses is used.
            unused = dict.fromkeys(path for path in total.missed if path in grads.missed)
            self._results.grads = grads.with_missed(unused)
            return
        grads = run()
        if weights is not None:
            self._results.weights[k] = weights[1]
            # Divided by the weight of all micro-batches at the end.
            grads = times(grads, weights[1]) if len(self.batches) > 1 else grads
        self._results.grads = add_grads(total, grads)


def forward_only(
    stages: Sequence[int],
    num_stages: int,
    channels: dict[tuple[int, str], Channel],
    run: Callable[[int, Any, Any], Any],
    batches: Sequence[Any],
) -> list[Any]:
    """Run the stages of this rank on all micro-batches, and return what the last stage gives."""
    found: list[Any] = []
    sent: deque[list[Work]] = deque()
    out: Any = None
    for k, batch in enumerate(batches):
        key = _key(batch)
        for stage in stages:
            x = out
            if (stage, "RECV_F") in channels:
                x = channels[stage, "RECV_F"].receive(_message(stage, "RECV_F", k), key)()
            out = run(stage, x, batch)
            if stage == num_stages - 1:
                found.append(out)
            elif (stage, "SEND_F") in channels:
                part = _message(stage, "SEND_F", k)
                sent.append(channels[stage, "SEND_F"].send(out, part, key, lambda path: False))
        while len(sent) > _MAX_SENT:
            _wait(sent.popleft())
    for works in sent:
        _wait(works)
    return found


def takes_batch(stage: int, fn: Callable[..., Any]) -> bool:
    """Whether a stage takes ``(params, x, batch)`` rather than ``(params, x)``."""
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        return False
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    needed = [x for x in parameters if x.kind in kinds and x.default is x.empty]
    taken = [x for x in parameters if x.kind in kinds]
    has_rest = any(x.kind is inspect.Parameter.VAR_POSITIONAL for x in parameters)
    if len(needed) > 3 or (len(taken) < 2 and not has_rest):
        raise OptionError(
            "a stage is a function (params, x), or (params, x, batch); got one of "
            f"{len(needed)} arguments for stage {stage}; bind the others with functools.partial()"
        )
    return len(needed) == 3 or (len(taken) == 3 and taken[2].name == "batch")


def _wait(works: Sequence[Work]) -> None:
    for work in works:
        work.wait()


def _message(stage: int, kind: str, k: int) -> str:
    """Name a message, alike on both sides."""
    other = stage + 1 if kind in ("SEND_F", "RECV_B") else stage - 1
    first, second = (stage, other) if kind.startswith("SEND") else (other, stage)
    return f"stage {first} to {second}, micro-batch {k}"


def _key(batch: Any) -> Hashable:
    """Return the shapes of a micro-batch, with its booleans and strings.

    Two with equal keys make messages of one form. Numbers are left out, because one that counts
    steps would bring a form in every step, so numbers that set shapes are to be strings.
    """
    parts = open_batch(batch)
    return tuple(
        (path, tuple(leaf.shape), leaf.dtype)
        if isinstance(leaf, Tensor)
        else (path, leaf if isinstance(leaf, (bool, str)) else type(leaf))
        for path, leaf in zip(parts.paths, parts.leaves, strict=True)
    )


def _handed_over(out: Any, wanted: set[str | None]) -> Any:
    """Return outputs as inputs of the next stage of the same rank."""
    return tree.unflatten(
        tree.structure(out),
        [
            leaf.detach().requires_grad_(path in wanted)
            for path, leaf in zip(tree.paths(out), tree.leaves(out), strict=True)
        ],
    )


def _like(out: Any, wanted: set[str | None], cotangents: Sequence[Tensor | None]) -> Any:
    """Return cotangents as a tree like the outputs."""
    rest = iter(cotangents)
    return tree.unflatten(
        tree.structure(out), [next(rest) if path in wanted else None for path in tree.paths(out)]
    )
