"""One valid call of every public function, for :mod:`tests.bad_values`."""

from __future__ import annotations

import functools
import importlib
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file

import zfun as zf
import zfun.testing
from zfun import collectives as co
from zfun import interop, layout, tree
from zfun.collectives import Group

WEIGHTS = torch.tensor([[1.0, -2.0], [0.5, 3.0]])
BATCH = torch.tensor([[1.0, 2.0], [3.0, 4.0]])


def loss(params: Any, batch: Any) -> Any:
    return ((batch @ params["w"]) ** 2).sum() + params["b"].sum()


def params() -> dict[str, torch.Tensor]:
    return {"w": WEIGHTS.clone(), "b": torch.tensor([0.5, -0.5])}


@functools.cache
def folder_of_params() -> str:
    """A folder with the parameters."""
    folder = tempfile.mkdtemp()
    save_file(params(), Path(folder) / "model.safetensors")
    return folder


class Case(NamedTuple):
    """A call.

    Attributes:
        arguments: the arguments by name, for a rank.
        use: does with the result what a user would do, and returns what to compare.
        ranks: how many; 0 for a function that needs none.
    """

    arguments: Callable[[Group], dict[str, Any]]
    use: Callable[[Group, Any], Any]
    ranks: int = 0


def same(group: Group, result: Any) -> Any:
    return result


def stepped(group: Group, optimizer: Any) -> Any:
    """Two steps of an optimizer on trees."""
    now, grads = params(), {"w": WEIGHTS * 3, "b": torch.tensor([1.0, 2.0])}
    state = optimizer.init(now)
    for _ in range(2):
        now, state = optimizer.apply(grads, state, now)
    return now


def scheduled(group: Group, schedule: Any) -> Any:
    return [schedule(step) for step in (0, 1, 2, 5, 50)]


def gradients(group: Group, vg: Any) -> Any:
    return vg(params(), BATCH)


def trained(group: Group, zero: Any) -> Any:
    state = zero.init(params())
    for _ in range(2):
        state, _ = zero.step(state, BATCH)
    return zero.params(state)


def entered(group: Group, context: Any) -> Any:
    with context as value:
        return repr(value)


def sharded(group: Group) -> Any:
    return zf.shard(params(), group)


def partial(group: Group) -> Any:
    return zf.data_parallel(zf.value_and_grad(loss), group)


def laid_out() -> Any:
    return layout.layout_of(params(), 2)


def traced() -> Any:
    return zf.planner.trace(loss, params(), BATCH, 2)


def hugging_face_config(path: Any) -> None:
    transformers = importlib.import_module("transformers")
    sizes = {"n_embd": 8, "n_layer": 1, "n_head": 1, "n_positions": 16, "vocab_size": 32}
    transformers.GPT2Config(**sizes).save_pretrained(path)


class Writer:
    """A writer of TensorBoard and a run of wandb that keep nothing."""

    def add_scalar(self, name: str, value: float, step: int) -> None: ...

    def log(self, numbers: dict[str, float], step: int) -> None: ...


def print_nothing(step: int, numbers: Any) -> None: ...


STEP = zf.recipes.StepInfo(torch.tensor(0.5), torch.tensor(2.0), False, None, None)
CASES: dict[str, Case] = {}
CLASSES = (
    zf.stores.Offload,
    zf.stores.locating,
    zf.reductions.Spent,
    zf.compression.Compression,
    zf.ScheduleOptions,
    zf.Precision,
    zf.parallel.TensorStyle,
    interop.AutoValues,
    co.Mesh,
    co.Workers,
    co.Collective,
    co.Broadcast,
    co.Reduce,
    co.Permute,
    co.Work,
    zf.compression.BlockCodec,
    zf.compression.ErrorFeedback,
    zf.stores.HostStore,
    zf.planner.Hardware,
    zf.planner.Model,
    zf.testing.Composition,
)

# Arguments that a caller of the caller receives: what they may be is the function's own affair.
PASSED_ON = {
    ("simulate", "args"),
    ("collectives.spawn", "args"),
    ("tree.register", "cls"),  # a class is registered once, for the whole process
}

# Numbers that mean something, and so are accepted, for arguments whose type alone does not say so.
FINITE = ("zero", "negative", "negative half", "half", "10**30")
FROM_0 = ("zero", "half", "10**30")
POSITIVE = ("half", "10**30")
MEANT: dict[str, tuple[str, ...]] = {}


def case(
    name: str,
    arguments: Callable[[Group], dict[str, Any]],
    use: Callable[[Group, Any], Any] = same,
    ranks: int = 0,
    **meant: tuple[str, ...],
) -> None:
    CASES[name] = Case(arguments, use, ranks)
    MEANT.update({f"{name}.{argument}": labels for argument, labels in meant.items()})


# Checkpoints.
DIRECTORY = tempfile.TemporaryDirectory()


def saved(group: Group, handle: Any) -> Any:
    """The leaves that a save left, which are then removed."""
    path = Path(handle.wait())
    found = [leaf.key for leaf in zf.checkpoint.read_manifest(path).leaves]
    shutil.rmtree(path.parent)
    return found


def checkpoint() -> str:
    """A directory with one checkpoint."""
    path = tempfile.mkdtemp(dir=DIRECTORY.name)
    zf.save(path, {"w": WEIGHTS}, step=3)
    return path


case(
    "save",
    lambda g: {"path": tempfile.mkdtemp(dir=DIRECTORY.name), "state": {"w": WEIGHTS}, "step": 3},
    saved,
)
case(
    "load",
    lambda g: {"path": checkpoint(), "like": {"w": WEIGHTS * 0}},
    lambda g, found: found.state["w"],
)
case("checkpoint.check_saves", lambda g: {"group": g}, same, 2)
case("checkpoint.steps", lambda g: {"path": "none"})
case("checkpoint.latest", lambda g: {"path": "none"})
case("checkpoint.step_path", lambda g: {"path": checkpoint()}, lambda g, path: path[-8:])
case(
    "checkpoint.read_manifest",
    lambda g: {"path": zf.checkpoint.step_path(checkpoint())},
    lambda g, manifest: manifest.leaves,
)


def payload() -> dict[str, Any]:
    path = zf.checkpoint.step_path(checkpoint())
    manifest = zf.checkpoint.read_manifest(path)
    return {"payload": zf.checkpoint.Payload(path, manifest), "entry": manifest.leaves[0]}


def manifest() -> Any:
    return zf.checkpoint.read_manifest(zf.checkpoint.step_path(checkpoint()))


case("checkpoint.read_leaf", lambda g: payload())
case("checkpoint.format_manifest", lambda g: {"manifest": manifest()})
case(
    "checkpoint.parse_manifest",
    lambda g: {"text": zf.checkpoint.format_manifest(manifest())},
    lambda g, found: found.leaves,
)


@functools.cache
def kept() -> str:
    """A directory with one checkpoint, for calls that do not change it."""
    return checkpoint()


def unwritten(group: Group, written: Any) -> Any:
    """The bytes of tensors that a call wrote into a folder, which is then removed."""
    shutil.rmtree(written.files[0].parent)
    return written.num_bytes


case("checkpoint.inspect", lambda g: {"path": kept()}, lambda g, text: text[:6])
case("checkpoint.verify", lambda g: {"path": kept()}, lambda g, found: found.problems)
case("checkpoint.leaves", lambda g: {"path": kept()}, lambda g, found: list(found))
case(
    "checkpoint.training_state",
    lambda g: {"path": kept(), "params": "."},
    lambda g, found: list(found.params),
)
case(
    "checkpoint.export",
    lambda g: {"path": kept(), "out": tempfile.mkdtemp(dir=DIRECTORY.name), "params": "."},
    unwritten,
)
case("checkpoint.prune", lambda g: {"path": checkpoint(), "keep": 1}, lambda g, x: len(x.kept))


def found() -> Any:
    """A training state of another library."""
    held = zf.sources.tensors(params())
    return zf.sources.TrainingState(held, zf.sources.tensors({}), {"exp_avg": held}, 3, {})


case(
    "checkpoint.convert",
    lambda g: {"found": found(), "path": tempfile.mkdtemp(dir=DIRECTORY.name)},
    lambda g, path: shutil.rmtree(Path(path).parent),
)


# Files of other libraries.
def source() -> Any:
    return zf.sources.tensors(params())


def written(name: str, write: Callable[[str], Any]) -> str:
    path = f"{tempfile.mkdtemp(dir=DIRECTORY.name)}/{name}"
    write(path)
    return path


def loaded(group: Group, leaves: Any) -> Any:
    return {name: leaf.load() for name, leaf in leaves.items()}


FIXTURES = Path(__file__).parent / "fixtures"
case("sources.tensors", lambda g: {"leaves": params()}, loaded)
case("sources.joined", lambda g: {"sources": (source(),)}, loaded)
case("sources.place", lambda g: {"source": source(), "params": params()}, lambda g, x: x.missing)
case("sources.compare", lambda g: {"first": source(), "second": source()})
case(
    "sources.state_dict",
    lambda g: {"path": written("model.pt", lambda path: torch.save(params(), path))},
    loaded,
)
case(
    "sources.huggingface",
    lambda g: {"path": written("model", lambda path: zf.sources.write_safetensors(path, source()))},
    loaded,
)
case(
    "sources.deepspeed",
    lambda g: {"path": FIXTURES / "deepspeed" / "stage1-fp32"},
    lambda g, found: list(found.params),
)
case(
    "sources.dcp",
    lambda g: {"path": FIXTURES / "dcp" / "sharded"},
    lambda g, found: list(found.params),
)
case(
    "sources.write_dcp",
    lambda g: {"path": tempfile.mkdtemp(dir=DIRECTORY.name), "source": source()},
    unwritten,
)
case(
    "sources.write_safetensors",
    lambda g: {"path": tempfile.mkdtemp(dir=DIRECTORY.name), "source": source()},
    unwritten,
)

# The recipe.
case(
    "zero",
    lambda g: {"stage": 3, "loss_fn": loss, "optimizer": zf.optim.sgd(0.1), "group": g},
    trained,
    2,
    stage=("zero",),
)
case("stores.Offload", lambda g: {})
case("compression.Compression", lambda g: {})
case(
    "ScheduleOptions",
    lambda g: {},
    prefetch=("zero",),
    max_live=("zero",),
    reuse_distance=("zero",),
    read_ahead=("zero",),
    persistence=("zero",),
    max_persistent=("zero",),
)
case("Precision", lambda g: {}, loss_scale=("half", "10**30"))

# Gradient functions and losses.
case("value_and_grad", lambda g: {"loss": loss}, gradients)
case(
    "accumulate",
    lambda g: {"vg": zf.value_and_grad(loss), "num_micro_batches": 2},
    gradients,
)
case("cast", lambda g: {"loss": loss, "dtype": torch.bfloat16}, lambda g, fn: fn(params(), BATCH))
case("data_parallel", lambda g: {"vg": zf.value_and_grad(loss), "group": g}, gradients, 2)
case(
    "transforms.scale_loss",
    lambda g: {"vg": zf.value_and_grad(loss), "scale": 2.0},
    gradients,
    scale=("half", "10**30"),
)
case("shard_grads", lambda g: {"vg": partial(g), "group": g}, gradients, 2)
case("transforms.replicate_grads", lambda g: {"vg": partial(g), "group": g}, gradients, 2)
case(
    "vjp",
    lambda g: {"fn": lambda p, x: x @ p["w"], "params": params(), "batch": BATCH},
    lambda g, called: called[1](called[0]),
)
case("transforms.add_grads", lambda g: {"total": params(), "grads": params()})
case(
    "transforms.scale_grads",
    lambda g: {"grads": params(), "factor": 2.0},
    factor=("zero", "negative", "negative half", "half"),
)
case(
    "weighted_mean",
    lambda g: {"total": torch.tensor(4.0), "weight": 2.0},
    lambda g, x: x.mean,
    weight=("half", "10**30", "zero"),
)
case(
    "shard_params",
    lambda g: {"loss": loss, "group": g},
    lambda g, fn: fn(sharded(g), BATCH),
    2,
)
case(
    "remat",
    lambda g: {"fn": torch.tanh},
    lambda g, fn: (
        torch.func.grad(lambda x: fn(x).sum())(WEIGHTS)
        if not g
        else torch.autograd.grad(fn(x := WEIGHTS.clone().requires_grad_()).sum(), x)
    ),
)

# Model axes.
case(
    "parallel.schedules.draw",
    lambda g: {
        "schedule": SCHEDULE,
        "title": "1F1B",
        "forward": 1.0,
        "inputs": 1.0,
        "weights": 1.0,
    },
    forward=("zero", "half", "10**30"),
    inputs=("zero", "half", "10**30"),
    weights=("zero", "half", "10**30"),
)
case("parallel.model_axes", lambda g: {"loss": loss})


def cut_loss(params: Any, batch: Any) -> Any:
    return torch.nn.functional.linear(batch, params["w"], params["b"]).sum()


case(
    "tensor_parallel",
    lambda g: {"loss": cut_loss, "axis": g, "plan": {"*": "colwise_gather_output"}},
    lambda g, fn: fn({name: leaf.chunk(2)[g.rank] for name, leaf in params().items()}, BATCH),
    2,
    sequence_dim=("zero",),
)
case(
    "parallel.vocab_cross_entropy",
    lambda g: {
        "logits": WEIGHTS,
        "labels": torch.tensor([0, 3]),
        "axis": g,
        "vocab_size": 2 * WEIGHTS.shape[-1],
    },
    same,
    2,
    ignore_index=("zero", "negative"),
)
case(
    "parallel.TensorStyle",
    lambda g: {"name": "packed_colwise", "parts": (4, 2), "heads": 2},
    lambda g, style: style.cut("w", (6, 2), 2),
)

case(
    "parallel.expert_parallel",
    lambda g: {"loss": cut_loss, "axis": g, "experts": ("b",), "gathered": ("w",)},
    lambda g, fn: fn({name: leaf.chunk(2)[g.rank] for name, leaf in params().items()}, BATCH),
    2,
)
case(
    "parallel.dispatch",
    lambda g: {
        "experts": lambda rows, ids: rows,
        "x": WEIGHTS,
        "chosen": torch.tensor([[0], [1]]),
        "weights": torch.ones(2, 1),
        "axis": g,
        "num_experts": 2,
    },
    same,
    2,
)

# Sequences.
HEADS = torch.arange(16.0).view(1, 2, 4, 2) / 8
case(
    "parallel.sequence_piece",
    lambda g: {"x": WEIGHTS, "axis": g},
    same,
    2,
    dim=("zero", "negative"),
)
case(
    "parallel.sequence_batch",
    lambda g: {"batch": {"input_ids": BATCH.long(), "labels": BATCH.long()}, "axis": g},
    same,
    2,
    pad_id=("zero", "10**30"),
    ignore_index=("zero", "negative"),
)
case(
    "parallel.token_mean",
    lambda g: {"logits": WEIGHTS, "labels": torch.tensor([0, 1])},
    ignore_index=("zero", "negative"),
)
case(
    "parallel.ulysses",
    lambda g: {"attention": torch.nn.functional.scaled_dot_product_attention, "axis": g},
    lambda g, attend: attend(HEADS, HEADS, HEADS),
    2,
)
case(
    "parallel.ring_attention",
    lambda g: {"q": HEADS, "k": HEADS, "v": HEADS, "axis": g},
    same,
    2,
    scale=FINITE,
)
case(
    "parallel.tiled",
    lambda g: {"fn": torch.tanh, "num_tiles": 2},
    lambda g, fn: fn(WEIGHTS),
    dim=("zero", "negative"),
)

# Values.
case("shard", lambda g: {"params": params(), "group": g}, same, 2, persistence=("zero",))
case("replicate", lambda g: {"params": params(), "group": g}, same, 2)
case("unshard", lambda g: {"value": sharded(g)}, same, 2)
case("gather", lambda g: {"value": sharded(g)}, same, 2)
case("redistribute", lambda g: {"value": sharded(g), "placement": zf.R, "group": g}, same, 2)
case("describe", lambda g: {"value": params()})
case(
    "transforms.check_agreement",
    lambda g: {"params": params(), "group": g},
    same,
    2,
    persistence=("zero",),
)
case("combine", lambda g: {"parts": (params(), params())})
case("partition", lambda g: {"tree": params(), "predicate": lambda path, leaf: path == "w"})

# Optimizers on values of any placement.
case(
    "apply",
    lambda g: {
        "optimizer": zf.optim.sgd(0.1),
        "grads": sharded(g),
        "state": zf.optim.sgd(0.1).init(sharded(g)),
        "params": sharded(g),
    },
    same,
    2,
)
case(
    "shard_optimizer",
    lambda g: {"optimizer": zf.optim.sgd(0.1), "group": g},
    stepped,
    2,
)
case(
    "transforms.check_state",
    lambda g: {
        "optimizer": zf.optim.sgd(0.1),
        "state": zf.optim.sgd(0.1).init(sharded(g)),
        "params": sharded(g),
        "placement": zf.S,
        "group": g,
    },
    same,
    2,
)
case(
    "transforms.kind_of_state",
    lambda g: {"state": zf.optim.sgd(0.1).init(params())},
    lambda g, kind: str(kind),
)
case("transforms.probe", lambda g: {"optimizer": zf.optim.sgd(0.1)})

# Stores.
case("offload", lambda g: {"value": zf.optim.sgd(0.1), "store": zf.stores.host()}, stepped)
case(
    "transforms.offload_optimizer",
    lambda g: {"optimizer": zf.optim.sgd(0.1), "store": zf.stores.host()},
    stepped,
)
case(
    "transforms.offload_params",
    lambda g: {"params": sharded(g), "store": zf.stores.host()},
    lambda g, x: zf.unshard(x),
    2,
)
case(
    "transforms.offload_grads",
    lambda g: {"vg": partial(g), "store": zf.stores.host()},
    lambda g, vg: zf.unshard(vg(params(), BATCH)[1]),
    2,
)
case(
    "transforms.offload_loss",
    lambda g: {"loss": loss, "store": zf.stores.host()},
    gradients,
)
case("stores.host", lambda g: {})
case("stores.HostStore", lambda g: {"pin": False}, lambda g, s: s.put(WEIGHTS, "state").tensor)
case(
    "stores.nvme",
    lambda g: {"path": tempfile.gettempdir()},
    lambda g, s: s.put(WEIGHTS, "state").get(torch.device("cpu")).wait(),
)
case("stores.clean", lambda g: {"path": tempfile.mkdtemp()})
case(
    "stores.offload_values",
    lambda g: {"value": [sharded(g)], "store": zf.stores.host()},
    lambda g, x: zf.unshard(x[0]),
    2,
)
case(
    "stores.reload",
    lambda g: {"value": [sharded(g)], "store": zf.stores.host()},
    lambda g, x: zf.unshard(x[0]),
    2,
)
case(
    "sources.initialised",
    lambda g: {"params": params(), "initialise": lambda path, spec: torch.ones(spec.shape)},
    lambda g, made: tree.map(lambda leaf: leaf.load(), made),
)
case(
    "sources.safetensors",
    lambda g: {"path": folder_of_params(), "params": params(), "name_of": lambda path: path},
    lambda g, made: tree.map(lambda leaf: leaf.load(), made),
)
case("stores.flush", lambda g: {"value": [zf.stores.host().put(WEIGHTS, "state")]})
case("stores.located", lambda g: {"fn": lambda x: x, "value": [WEIGHTS]})
case("stores.locating", lambda g: {}, entered)
case("stores.on_disk", lambda g: {"listener": lambda kind, handle: None}, entered)
case("stores.fetch", lambda g: {"value": WEIGHTS, "device": torch.device("cpu")})
case("stores.resident", lambda g: {"flat": sharded(g)}, same, 2)
case("stores.reading", lambda g: {"flat": sharded(g)}, lambda g, x: [*x], 2)
case("stores.by_bucket", lambda g: {"fn": lambda one: one, "flat": sharded(g)}, same, 2)
case("stores.start_read", lambda g: {"buffer": WEIGHTS, "device": torch.device("cpu")})
case(
    "stores.derived",
    lambda g: {
        "source": zf.stores.host().put(WEIGHTS, "state"),
        "fn": lambda x: x * 2,
        "dtype": WEIGHTS.dtype,
    },
    lambda g, made: made.get(torch.device("cpu")).wait(),
)

# Groups.
case("process_group", lambda g: {}, lambda g, made: (made.rank, made.size))
case("record", lambda g: {"group": g}, lambda g, made: made.size, 2)
case("simulate", lambda g: {"n": 2, "fn": lambda group: group.rank, "args": ()})
case("split", lambda g: {"group": g, "inner": 2}, lambda g, made: made.inner.size, 2)
case("mesh", lambda g: {"group": g, "dp": 2}, lambda g, made: made["dp"].size, 2)
SCHEDULE = zf.parallel.schedules.one_forward_one_backward(2, 3)
for name in ("gpipe", "interleaved", "zero_bubble"):
    case(
        f"parallel.schedules.{name}",
        lambda g: {"num_ranks": 2, "num_micro_batches": 4, "stages_per_rank": 2},
    )
case(
    "parallel.schedules.one_forward_one_backward",
    lambda g: {"num_ranks": 2, "num_micro_batches": 3},
)
case("parallel.schedules.read_csv", lambda g: {"text": "0F0,0B0"})
for name in (
    "activations_in_flight",
    "check_schedule",
    "ranks_of_stages",
    "with_messages",
    "write_csv",
):
    case(f"parallel.schedules.{name}", lambda g: {"schedule": SCHEDULE})
case(
    "parallel.schedules.bubble",
    lambda g: {"schedule": SCHEDULE, "forward": 1.0, "inputs": 1.0, "weights": 1.0},
    forward=("zero", "half", "10**30"),
    inputs=("zero", "half", "10**30"),
    weights=("zero", "half", "10**30"),
)
case("parallel.model_axes", lambda g: {"loss": loss}, same)
case(
    "pipeline",
    lambda g: {
        "stages": [lambda params, x: x @ params["w"], lambda params, x: (x * params["b"]).sum()],
        "axis": g,
        "num_micro_batches": 2,
        "leaves": [["w"], ["b"]],
    },
    lambda g, made: trained(g, zf.zero(1, made, zf.optim.sgd(0.1), co.single_group())),
    2,
)
case("collectives.Mesh", lambda g: {"inner": g, "outer": co.single_group()}, lambda g, m: m.size, 2)
case("collectives.Workers", lambda g: {"n": 2}, lambda g, made: None)
case("collectives.abstract_group", lambda g: {"size": 2}, lambda g, m: (m.rank, m.size))
case("collectives.single_group", lambda g: {}, lambda g, m: m.size)
case("collectives.checked", lambda g: {"group": g}, lambda g, m: co.barrier(m), 2)
for name in ("axis_of", "global_ranks", "is_checked", "is_symmetric", "barrier"):
    case(f"collectives.{name}", lambda g: {"group": g}, lambda g, x: repr(x), 2)
for name in ("sum_group", "agreement_group"):
    case(f"collectives.{name}", lambda g: {"group": g}, lambda g, m: m.size, 2)
case("collectives.check_shardable", lambda g: {"group": g, "what": "x"}, same, 2)
case(
    "collectives.allocate",
    lambda g: {"group": g, "numel": 2, "dtype": torch.float32},
    lambda g, x: x.shape,
    2,
    numel=("zero",),
)
case("collectives.await_readers", lambda g: {"group": g, "tensors": [torch.ones(2)]}, same, 2)
case(
    "collectives.check_same",
    lambda g: {"entries": [co.LeafRecord("w", "x")], "group": g, "what": "x"},
    same,
    2,
)

# Collectives.
X = torch.arange(8.0).view(4, 2)
for name, more in {
    "all_gather": {},
    "all_reduce": {},
    "all_to_all": {},
    "broadcast": {},
    "permute": {"destinations": (1, 0)},
    "reduce_scatter": {},
}.items():
    case(f"collectives.{name}", lambda g, more=more: {"x": X, "group": g, **more}, same, 2)
    case(
        f"collectives.start_{name}",
        lambda g, more=more: {"x": X, "group": g, **more},
        lambda g, work: work.wait(),
        2,
    )
    for form in (name, f"start_{name}"):
        for argument in ("dim", "split_dim", "concat_dim", "root"):
            MEANT[f"collectives.{form}.{argument}"] = ("zero", "negative")
case("collectives.replicated", lambda g: {"x": X, "group": g}, same, 2)
for name in ("enter", "leave"):
    case(f"collectives.{name}", lambda g: {"x": X, "group": g}, same, 2, dim=("zero", "negative"))
case("collectives.gather_values", lambda g: {"x": X, "group": g, "name": "x"}, same, 2)
case(
    "collectives.exchange_values",
    lambda g: {"x": torch.ones(2, 3), "group": g, "name": "x"},
    same,
    2,
)
case(
    "collectives.start_reduce_scatter_over",
    lambda g: {"group": g, "call": co.Collective(co.ReduceScatter()), "x": torch.ones(4)},
    lambda g, work: work.wait(),
    2,
)


def started(group: Group, op: Any) -> Any:
    return group.start(co.Collective(op), torch.arange(2.0) + group.rank).wait()


case("collectives.Broadcast", lambda g: {}, started, 2)
case("collectives.Reduce", lambda g: {}, started, 2)
case("collectives.Permute", lambda g: {"destinations": (1, 0)}, started, 2)
case(
    "collectives.Collective",
    lambda g: {"op": co.AllReduce()},
    lambda g, call: g.start(call, torch.ones(2)).wait(),
    2,
)
case("collectives.Work", lambda g: {"finish": lambda: WEIGHTS}, lambda g, work: work.wait())

# Compression.
FLAT_X = torch.tensor([1.0, 2.0, -3.0, 4.0])
for name in ("all_gather", "all_reduce", "reduce_scatter"):
    case(
        f"compression.{name}",
        lambda g: {"x": FLAT_X, "group": g, "codec": zf.compression.int8()},
        same,
        2,
    )
case(
    "compression.compressed_all_reduce",
    lambda g: {"x": FLAT_X, "worker_error": None, "server_error": None, "group": g},
    same,
    2,
)
for name in ("start", "start_over"):
    case(
        f"compression.{name}",
        lambda g: {
            "call": co.Collective(co.ReduceScatter()),
            "x": FLAT_X,
            "group": g,
            "codec": zf.compression.int8(),
        },
        lambda g, work: work.wait(),
        2,
    )


def encoded(group: Group, codec: Any) -> Any:
    return zf.compression.reduce_scatter(FLAT_X, group, codec)


case("compression.int8", lambda g: {}, encoded, 2)
case("compression.int4", lambda g: {}, encoded, 2)
case("compression.BlockCodec", lambda g: {"bits": 8, "block": 128}, encoded, 2)
FEEDBACK: dict[str, Any] = {"err_beta": ("zero", "half"), "reset": ("zero",)}
case(
    "compression.error_feedback",
    lambda g: {},
    lambda g, feedback: encoded(g, zf.compression.int8(feedback=feedback)),
    2,
    **FEEDBACK,
)
case(
    "compression.ErrorFeedback",
    lambda g: {"err_beta": 0.5, "reset": 8},
    lambda g, feedback: encoded(g, zf.compression.int8(feedback=feedback)),
    2,
    **FEEDBACK,
)

# The planner.
case(
    "transforms.schedule",
    lambda g: {"trace": traced()},
    lambda g, made: made.steps,
)
case("transforms.secondary_of", lambda g: {"group": g, "options": zf.ScheduleOptions()}, same, 2)
case(
    "planner.explain",
    lambda g: {"schedule": zf.planner.schedule(traced())},
    lambda g, found: str(found),
)
case(
    "planner.live_bytes",
    lambda g: {
        "recipe": lambda group: zf.zero(3, loss, zf.optim.sgd(0.1), group),
        "params": params(),
        "batch": BATCH,
        "group": 2,
    },
    lambda g, found: found.peak,
)
case(
    "plan",
    lambda g: {
        "recipe": lambda group: zf.zero(3, loss, zf.optim.sgd(0.1), group),
        "params": params(),
        "batch": BATCH,
        "group": 2,
    },
    lambda g, found: str(found),
)
case(
    "planner.compare",
    lambda g: {
        "recipes": {"ZeRO-1": lambda group: zf.zero(1, loss, zf.optim.sgd(0.1), group)},
        "params": params(),
        "batch": BATCH,
        "group": 2,
    },
    lambda g, found: str(found),
)
case(
    "planner.mesh_sizes",
    lambda g: {"num_ranks": 4, "divides": {"tp": 4}},
    lambda g, found: found,
)
case(
    "planner.advise",
    lambda g: {
        "model": zf.planner.Model(loss, params(), BATCH),
        "hardware": zf.planner.Hardware(flops_per_s=1e12, device_bytes=1e9),
        "group": 2,
    },
    lambda g, found: str(found),
)
case(
    "planner.Model",
    lambda g: {"loss": loss, "params": params(), "batch": BATCH},
)
case(
    "planner.from_huggingface",
    lambda g: {"path": written("config", hugging_face_config), "length": 16},
    lambda g, found: found.batch.shape,
)
case(
    "planner.Hardware",
    lambda g: {"flops_per_s": 1e12},
    flops_per_s=("half", "10**30", "infinity"),
    network=("half", "10**30", "infinity"),
    host_link=("half", "10**30", "infinity"),
    disk=("half", "10**30", "infinity"),
    latency_s=FROM_0,
    memory=("half", "10**30", "infinity"),
    host_memory=("half", "10**30", "infinity"),
    device_bytes=("zero", "half", "10**30", "infinity"),
    host_bytes=("zero", "half", "10**30", "infinity"),
    disk_bytes=("zero", "half", "10**30", "infinity"),
    local_network=("half", "10**30", "infinity"),
    touch=("half", "10**30", "infinity"),
    op_s=FROM_0,
    message_s=FROM_0,
    leaf_s=FROM_0,
    step_s=FROM_0,
    least_flops_per_s=("half", "10**30", "infinity"),
)
case("planner.order_of_use", lambda g: {"loss": loss, "params": params(), "batch": BATCH})
case("planner.profile", lambda g: {}, lambda g, context: None)
case(
    "transforms.plan_update",
    lambda g: {"layout": zf.layout.layout_of(params())},
    lambda g, plan: plan.steps,
)
case(
    "planner.timeline",
    lambda g: {"schedule": zf.planner.schedule(traced())},
    lambda g, found: found.duration,
    gather_cost=FROM_0,
    reduce_cost=FROM_0,
    backward_cost=FROM_0,
)
case(
    "planner.trace",
    lambda g: {"loss": loss, "params": params(), "batch": BATCH, "size": 2},
    lambda g, found: found.forward,
    persistence=("zero",),
)

# Closed forms.
case(
    "planner.formulae.zero_memory",
    lambda g: {"num_params": 1e9, "size": 8, "stage": 3},
    num_params=FROM_0,
    stage=("zero",),
    optimizer_bytes=FROM_0,
)
case(
    "planner.formulae.zero_table",
    lambda g: {"models": (1e9,), "sizes": (8,)},
    optimizer_bytes=FROM_0,
)
case(
    "planner.formulae.largest_model",
    lambda g: {"device_bytes": 32e9, "size": 8, "stage": 3},
    device_bytes=POSITIVE,
    stage=("zero",),
    optimizer_bytes=FROM_0,
)
case(
    "planner.formulae.zero_volume",
    lambda g: {"num_params": 1e9, "size": 8, "stage": 3},
    num_params=FROM_0,
    stage=("zero",),
)
case(
    "planner.formulae.bucket_buffer_bytes",
    lambda g: {"gather_bucket": 2e8, "reduce_bucket": 2e8},
    gather_bucket=FROM_0,
    reduce_bucket=FROM_0,
)
case(
    "planner.formulae.estimate_zero2",
    lambda g: {"num_params": 1e9},
    num_params=FROM_0,
    buffer_factor=FROM_0,
)
case(
    "planner.formulae.estimate_zero3",
    lambda g: {"num_params": 1e9, "largest_layer": 1e6},
    num_params=FROM_0,
    largest_layer=FROM_0,
    buffer_factor=FROM_0,
)
case("planner.formulae.sizes_of", lambda g: {"model": params()})
case("planner.formulae.transformer_params", lambda g: {"num_layers": 2, "hidden": 64})
case("planner.formulae.intensity", lambda g: {"part": "optimizer"})
case(
    "planner.formulae.efficiency",
    lambda g: {"ait": 100.0, "bandwidth": 1e9, "peak": 1e12},
    ait=POSITIVE,
    bandwidth=POSITIVE,
    peak=POSITIVE,
)
case(
    "planner.formulae.required_bandwidth",
    lambda g: {"ait": 100.0, "share": 0.25, "peak": 1e12},
    ait=POSITIVE,
    share=("half",),
    peak=POSITIVE,
)
case(
    "planner.formulae.aggregate_bandwidth",
    lambda g: {"size": 8, "link": 4e9, "fabric": 7e10},
    link=POSITIVE,
    fabric=POSITIVE,
)
case("planner.formulae.infinity_memory", lambda g: {"num_layers": 2, "hidden": 64, "heads": 4})

# Policies.
RESULT = zf.policies.Result(torch.Size([2]), torch.float32, torch.device("cpu"), 8, None)
for name in ("attention", "everything", "matmuls", "nothing", "unbatched_matmuls"):
    case(f"policies.{name}", lambda g: {"op": torch.ops.aten.mm.default, "result": RESULT})
    PASSED_ON.add((f"policies.{name}", "op"))
case(
    "policies.either",
    lambda g: {"policies": (zf.policies.matmuls,)},
    lambda g, policy: policy(torch.ops.aten.mm.default, RESULT),
)
case(
    "policies.names",
    lambda g: {"chosen": ("x",)},
    lambda g, policy: policy(torch.ops.aten.mm.default, RESULT),
)
case("policies.named", lambda g: {"name": "x"}, entered)

# Optimizers.
RATE: dict[str, Any] = {"learning_rate": FROM_0}
DECAYS: dict[str, Any] = {"b1": ("zero", "half"), "b2": ("zero", "half")}
REST: dict[str, Any] = {"eps": FROM_0, "weight_decay": FROM_0}
case(
    "optim.sgd",
    lambda g: {"learning_rate": 0.1, "momentum": 0.9},
    stepped,
    **RATE,
    **REST,
    momentum=("zero", "half"),
)
for name in ("adam", "adamw", "lion", "lamb", "onebit_adam"):
    case(
        f"optim.{name}",
        lambda g: {"learning_rate": 0.1},
        stepped,
        **RATE,
        **DECAYS,
        **REST,
        min_ratio=("zero", "half"),
        max_ratio=("half", "10**30", "infinity"),
    )
case("optim.adagrad", lambda g: {"learning_rate": 0.1}, stepped, **RATE, **REST, rate_decay=FROM_0)
case(
    "optim.muon",
    lambda g: {"learning_rate": 0.1, "rest": zf.optim.sgd(0.1)},
    stepped,
    **RATE,
    **REST,
    momentum=("zero", "half"),
)
case("optim.scale_by_adagrad", lambda g: {}, stepped, **REST)
case("optim.scale_by_adam", lambda g: {}, stepped, **REST, **DECAYS)
case("optim.scale_by_lion", lambda g: {}, stepped, **DECAYS)
case("optim.scale_by_learning_rate", lambda g: {"learning_rate": 0.1}, stepped, **RATE)
case("optim.scale_by_schedule", lambda g: {"schedule": zf.optim.constant(0.1)}, stepped)
case("optim.scale", lambda g: {"factor": -0.1}, stepped, factor=FINITE)
case("optim.trace", lambda g: {"decay": 0.9}, stepped, decay=("zero", "half"))
case("optim.add_decayed_weights", lambda g: {"weight_decay": 0.1}, stepped, **REST)
case(
    "optim.clip_by_global_norm",
    lambda g: {"max_norm": 1.0},
    stepped,
    max_norm=("half", "10**30", "infinity"),
)
case("optim.chain", lambda g: {"optimizers": (zf.optim.sgd(0.1),)}, stepped)
case(
    "optim.masked",
    lambda g: {"inner": zf.optim.sgd(0.1), "mask": lambda path, leaf: path == "w"},
    stepped,
)
case(
    "optim.by_label",
    lambda g: {"optimizers": {"x": zf.optim.sgd(0.1)}, "label": lambda path, leaf: "x"},
    stepped,
)
case("optim.ema", lambda g: {"decay": 0.5, "optimizer": zf.optim.sgd(0.1)}, stepped)
case("optim.with_master", lambda g: {"optimizer": zf.optim.sgd(0.1)}, stepped)
case(
    "optim.inject_hyperparams",
    lambda g: {"make": zf.optim.sgd},
    lambda g, make: stepped(g, make(0.1)),
)


def injected() -> Any:
    return zf.optim.inject_hyperparams(zf.optim.sgd)(0.1).init(params())


case("optim.hyperparams", lambda g: {"state": injected()})
case(
    "optim.set_hyperparams",
    lambda g: {"state": injected(), "learning_rate": 0.25},
    lambda g, state: zf.optim.hyperparams(state)["learning_rate"],
    learning_rate=FINITE,
)
case("optim.as_optimizer", lambda g: {"x": zf.optim.sgd(0.1)}, stepped)
case("optim.from_torch", lambda g: {"make": torch.optim.SGD, "options": {}}, lambda g, rule: None)
CASES["optim.from_torch"] = Case(lambda g: {"make": torch.optim.RMSprop}, stepped)
case(
    "optim.optimizer",
    lambda g: {"init": lambda params: (), "update": lambda grads, state, params: (grads, state)},
    stepped,
)
case("optim.apply_updates", lambda g: {"params": params(), "updates": params()})


def plain_kernel(param: Any, grad: Any, mu: Any, change: Any, **_: Any) -> None:
    change.copy_(-grad)


def plain_kernel_at(before: int) -> Any:
    return plain_kernel


case(
    "optim.elementwise",
    lambda g: {"make_state": zf.optim.LionState, "names": ("mu",), "kernel_at": plain_kernel_at},
    lambda g, rule: rule.init(params()),
)
case(
    "optim.dynamic_loss_scale",
    lambda g: {},
    lambda g, rule: rule.update(rule.init(), False),
    initial=("half", "10**30"),
    min_scale=("half", "10**30"),
)
case(
    "optim.static_loss_scale",
    lambda g: {"scale": 2.0},
    lambda g, rule: rule.init(),
    scale=("half", "10**30"),
)

# Schedules.
VALUES: dict[str, Any] = dict.fromkeys(("value", "start", "end", "peak", "low", "high"), FINITE)
case("optim.constant", lambda g: {"value": 0.1}, scheduled, **VALUES)
case("optim.linear", lambda g: {"start": 0.1, "end": 0.2, "num_steps": 4}, scheduled, **VALUES)
case(
    "optim.warmup",
    lambda g: {"peak": 0.1, "num_warmup": 4},
    scheduled,
    **VALUES,
    num_warmup=("zero",),
)
for name in ("warmup_cosine", "warmup_linear"):
    case(
        f"optim.{name}",
        lambda g: {"peak": 0.1, "num_warmup": 4, "num_steps": 8},
        scheduled,
        **VALUES,
        num_warmup=("zero",),
    )
CYCLE: dict[str, Any] = {
    "stairs_up": ("zero",),
    "stairs_down": ("zero",),
    "decay_rate": FROM_0,
    "decay_steps": ("zero",),
}
for name in ("one_cycle", "one_cycle_momentum"):
    case(
        f"optim.{name}",
        lambda g: {"low": 0.1, "high": 0.2, "num_up": 4, "decay_steps": 2, "decay_rate": 0.5},
        scheduled,
        **VALUES,
        **CYCLE,
    )
case(
    "optim.lr_range_test",
    lambda g: {"start": 0.1, "num_steps": 4},
    scheduled,
    **VALUES,
    rate=FINITE,
)
case(
    "optim.join",
    lambda g: {
        "schedules": [zf.optim.constant(0.1), zf.optim.constant(0.2)],
        "boundaries": [2],
    },
    scheduled,
)

# Trees, layouts, flats.
for name in ("flatten", "leaves", "paths", "structure"):
    case(f"tree.{name}", lambda g: {"tree": params()}, lambda g, found: str(found))
case("tree.unflatten", lambda g: {"spec": tree.structure([0, 0]), "leaves": [1, 2]})
case("tree.leaves_like", lambda g: {"spec": tree.structure([0, 0]), "tree": [1, 2]})
case("tree.subtrees", lambda g: {"spec": tree.structure([0, 0]), "tree": [1, 2]})
case("tree.map", lambda g: {"fn": lambda x: x, "tree": params(), "rest": ()})


class Node:
    """A node; registered once."""


def registered(group: Group, nothing: Any) -> None:
    return None


def fresh_class(group: Group) -> dict[str, Any]:
    return {
        "cls": type("Node", (), {}),
        "to_children": lambda node: ((), None),
        "from_children": lambda static, children: Node(),
    }


case("tree.register", fresh_class, registered)
case("layout.layout_of", lambda g: {"params": params()}, same, persistence=("zero",))
case(
    "layout.split_by_label",
    lambda g: {"layout": laid_out(), "label": lambda path, leaf: path},
)
case("layout.place", lambda g: {"layout": laid_out(), "placement": zf.S, "size": 2})
case("layout.unique_leaves", lambda g: {"params": params(), "layout": laid_out()})
case(
    "flat.ravel",
    lambda g: {"params": params(), "layout": laid_out(), "group": g},
    same,
    2,
    scale=FINITE,
)
case("flat.unravel", lambda g: {"flat": zf.replicate(params(), g)}, same, 2)
case("flat.change_layout", lambda g: {"flat": sharded(g), "layout": sharded(g).layout}, same, 2)
case(
    "flat.check_same_layout",
    lambda g: {"first": sharded(g), "second": sharded(g), "what": "both"},
    same,
    2,
)
case("flat.consume", lambda g: {"values": [sharded(g)], "consumed_by": "a test"}, same, 2)
case("flat.flats", lambda g: {"value": sharded(g)}, same, 2)
case("flat.leaf_spans", lambda g: {"flat": sharded(g)}, same, 2, rank=("zero",))
case("flat.call_site", lambda g: {}, lambda g, text: None)
case("reductions.all_ranks", lambda g: {"flat": sharded(g)}, lambda g, x: x.size, 2)
case("reductions.Spent", lambda g: {"squares": WEIGHTS})
case("reductions.gather_values", lambda g: {"flat": sharded(g), "x": WEIGHTS}, same, 2)
case("reductions.global_norm", lambda g: {"value": sharded(g)}, same, 2)
case(
    "reductions.norm_and_counts",
    lambda g: {"grads": sharded(g), "count": 3},
    same,
    2,
    count=("zero",),
)
case("reductions.norm_on_device", lambda g: {"grads": sharded(g)}, same, 2)
case("reductions.any_rank", lambda g: {"flag": g.rank == 1, "group": g}, same, 2)
case(
    "reductions.mean_metrics",
    lambda g: {"metrics": [({"loss": torch.tensor(2.0)}, 4.0)], "group": g},
    same,
    2,
)
case(
    "reductions.merge_buffers",
    lambda g: {"buffers": params(), "group": g, "rule": lambda path, leaf: "mean"},
    same,
    2,
)
case(
    "reductions.map_leaves",
    lambda g: {"flat": sharded(g), "fn": lambda x: x, "cost": lambda shape: 1.0},
    same,
    2,
)
case(
    "reductions.mean_metrics",
    lambda g: {"metrics": [({"a": 1.0}, 2), ({"a": 3.0}, 1)], "group": g},
    same,
    2,
)
case("reductions.any_rank", lambda g: {"flag": True, "group": g}, same, 2)
case(
    "evaluation.evaluate",
    lambda g: {"fn": loss, "group": g},
    lambda g, forward: forward(zf.zero(3, loss, zf.optim.sgd(0.1), g).init(params()), BATCH),
    2,
)
case(
    "evaluation.averaged",
    lambda g: {"state": zf.zero(2, loss, zf.optim.ema(0.5, zf.optim.sgd(0.1)), g).init(params())},
    lambda g, state: state.step,
    2,
)
case(
    "evaluation.bound",
    lambda g: {
        "apply": zf.functional(torch.nn.Linear(3, 1)),
        "state": zf.zero(3, loss, zf.optim.sgd(0.1), g).init(
            zf.functional(torch.nn.Linear(3, 1)).params
        ),
        "group": g,
    },
    lambda g, context: context.__enter__()(torch.ones(3)),
    2,
)

# The laws.
case("testing.all_compositions", lambda g: {}, lambda g, found: len(found))
case("testing.assert_same_bits", lambda g: {"first": params(), "second": params()})
case("testing.same_bits", lambda g: {"first": params(), "second": params()})
case("testing.bucket_sizes", lambda g: {}, lambda g, s: None)
case("testing.compositions", lambda g: {}, lambda g, s: None)
case("testing.tensors", lambda g: {}, lambda g, s: s.validate(), max_dims=("zero",))
case("testing.trees", lambda g: {}, lambda g, s: s.validate())
case(
    "testing.assert_same_runs",
    lambda g: {
        "loss_fn": loss,
        "optimizer": zf.optim.sgd(0.1),
        "params": params(),
        "batches": [[BATCH, BATCH]],
        "compositions": [zf.testing.Composition()],
    },
    lambda g, run: run.losses,
)
case("testing.assert_padding", lambda g: {"value": sharded(g)}, same, 2)
case(
    "testing.assert_redistribution", lambda g: {"value": sharded(g), "path": [zf.R, zf.S]}, same, 2
)
case("testing.assert_round_trip", lambda g: {"params": params(), "group": g}, same, 2)
case(
    "testing.train",
    lambda g: {
        "composition": zf.testing.Composition(),
        "group": g,
        "loss_fn": loss,
        "optimizer": zf.optim.sgd(0.1),
        "params": params(),
        "batches": [[BATCH, BATCH]],
    },
    lambda g, run: run.losses,
    2,
)
case("testing.Composition", lambda g: {})


def spawned(group: Any) -> int:
    return int(group.rank)


case("collectives.spawn", lambda g: {"n": 2, "fn": spawned, "args": ()})

case(
    "functional",
    lambda g: {"module": torch.nn.Linear(2, 2), "gather": [""]},
    lambda g, fn: sorted(fn.params),
)
case("transforms.split_batch", lambda g: {"batch": BATCH, "count": 2})
case("transforms.map_batch", lambda g: {"fn": lambda x: x, "batch": BATCH})
case(
    "testing.assert_adjoint",
    lambda g: {"fn": co.all_reduce, "inputs": [torch.ones(2), torch.ones(2)]},
)


def mean_loss(params: Any, batch: Any) -> Any:
    return ((batch @ params["w"] + params["b"]) ** 2).mean()


case(
    "testing.assert_invariant",
    lambda g: {
        "loss_fn": mean_loss,
        "params": params(),
        "batch": torch.cat([BATCH, 2 * BATCH]),
        "optimizer": zf.optim.sgd(0.01),
        "make": lambda group: zf.zero(1, mean_loss, zf.optim.sgd(0.01), group),
        "sizes": (2,),
        "num_steps": 1,
    },
)


def made(group: Group) -> Any:
    return zf.zero(3, loss, zf.optim.sgd(0.1), group)


case(
    "testing.assert_memory",
    lambda g: {"make": made, "params": params(), "batch": BATCH, "size": 2, "at_most": 10**6},
    lambda g, found: found.peak,
)
case(
    "testing.assert_traffic",
    lambda g: {"make": made, "params": params(), "batches": [[BATCH, BATCH]] * 2, "at_most": 1e6},
)
case("testing.group_sizes", lambda g: {}, lambda g, s: None)
case("testing.layouts", lambda g: {}, lambda g, s: s.validate())
case("testing.micro_batch_splits", lambda g: {"rows": 4}, lambda g, s: s.validate())
case("testing.placements", lambda g: {}, lambda g, s: None)
case("testing.schedules", lambda g: {}, lambda g, s: None)

# Calls that start processes, for the long form.
SLOW = ("collectives.spawn",)

# Configurations of DeepSpeed.
case("interop.from_ds_config", lambda g: {"config": {"bf16": {"enabled": True}}})
case(
    "interop.AutoValues",
    lambda g: {},
    max_grad_norm=FROM_0,
    learning_rate=FROM_0,
    eps=FROM_0,
    weight_decay=FROM_0,
    num_warmup=("zero",),
)
case("interop.parse_auto_values", lambda g: {"settings": ["world_size=2"]})
case("interop.batch_of", lambda g: {"world_size": 2, "train": 4})
case("interop.solve_batch", lambda g: {"max_batch": 64, "micro_batches": [2, 4]})

# The border to DTensor, and loggers.
case("interop.dtensor.from_dtensor", lambda g: {"params": params(), "keep": []})
case(
    "interop.dtensor.to_dtensor",
    lambda g: {"value": zf.shard(params(), g), "like": params(), "keep": []},
)
case("interop.loggers.step_numbers", lambda g: {"info": STEP})


def logged(group: Group, log: Any) -> Any:
    log(4, STEP)
    return STEP


case(
    "interop.loggers.step_logger",
    lambda g: {"group": g, "sinks": [print_nothing], "every": 2},
    logged,
)
# The sinks write nothing before the first number.
case("interop.loggers.to_csv", lambda g: {"path": "log.csv"})
case("interop.loggers.to_tensorboard", lambda g: {"writer": Writer(), "prefix": "a/"})
case("interop.loggers.to_wandb", lambda g: {"run": Writer()})
