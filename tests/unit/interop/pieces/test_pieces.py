"""Code reads a model in pieces before ``initialize``: fingerprints, norms and files."""

from __future__ import annotations

import copy
import hashlib
import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import zfun as zf
from zfun.errors import CollectiveMismatch, PlacementError
from zfun.interop import deepspeed

GatheredParameters = deepspeed.zero.GatheredParameters


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.line = nn.Embedding(5, 3), nn.Linear(3, 5)
        self.still = nn.Linear(3, 3).requires_grad_(False)
        self.register_buffer("scale", torch.full((2,), 3.0))
        self.line.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.line(self.still(self.table(x)))


def pieces(group: zf.Group, dtype: torch.dtype = torch.float32) -> Net:
    with deepspeed.zero.Init(data_parallel_group=group, dtype=dtype):
        return Net()


def digest(module: nn.Module) -> str:
    """Return a fingerprint, as hash_module() of TRL does."""
    found = hashlib.sha256()
    for _, x in sorted(module.state_dict().items()):
        x = x.cpu()
        found.update(str(x.dtype).encode())
        x = x.to(torch.float32) if x.dtype is torch.bfloat16 else x
        found.update(x.numpy().tobytes())
    return found.hexdigest()


def saved(module: nn.Module) -> dict[str, Tensor]:
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    return dict(torch.load(file))


def fingerprint(module: nn.Module) -> Any:
    return pytest.importorskip("datasets.fingerprint").Hasher.hash(module.state_dict())


READS: dict[str, Callable[[Net], Any]] = {
    "digest": digest,
    "fingerprint": fingerprint,
    "saved": saved,
    "sums": lambda net: [p.sum().item() for p in net.parameters()],
    "norm": lambda net: torch.stack([p.norm() for p in net.parameters()]).norm().tolist(),
    "norms of data": lambda net: [p.data.norm().tolist() for p in net.parameters()],
    "copy": lambda net: dict(copy.deepcopy(net).state_dict()),
    "copy of entries": lambda net: dict(copy.deepcopy(net.state_dict())),
    "pickle": lambda net: dict(pickle.loads(pickle.dumps(net)).state_dict()),
    "views": lambda net: [net.line.weight[1:, 0].tolist(), net.line.bias.view(-1, 1).tolist()],
    "rows": lambda net: [row.tolist() for row in net.line.weight],
    "array": lambda net: np.asarray(net.line.weight.detach()).sum().item(),
    "call": torch.no_grad()(lambda net: net(torch.arange(5)).tolist()),
    "other": lambda net: torch.zeros(5).copy_(net.line.bias.detach()).tolist(),
    "vector": lambda net: nn.utils.parameters_to_vector(net.parameters()).tolist(),
}


@pytest.mark.parametrize(
    ("read", "dtype"),
    [
        (read, dtype)
        for read in READS
        for dtype in (torch.float32, torch.bfloat16)
        if (read, dtype) != ("array", torch.bfloat16)  # numpy has no bfloat16
    ],
)
@pytest.mark.shows(
    "`state_dict()` and reads of a model in pieces, as `precompute_ref_log_probs` of TRL",
    "right",
    "on all ranks, one parameter at a time; a write is refused",
)
def test_reads_of_a_model_in_pieces_are_those_of_a_whole_one(read: str, dtype: torch.dtype) -> None:
    plain = Net()
    with torch.no_grad():
        for p in plain.parameters():
            p.data = p.data.to(dtype)
    expected = READS[read](plain)

    def main(group: zf.Group) -> None:
        net = pieces(group, dtype)
        if isinstance(expected, str):
            assert READS[read](net) == expected
        else:
            torch.testing.assert_close(READS[read](net), expected, rtol=0, atol=0)
        # Nothing is whole after a read.
        assert all(p.untyped_storage().nbytes() <= 8 for p in map(plain_of, net.parameters()))

    zf.simulate(2, main)


def plain_of(param: Tensor) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return param.as_subclass(Tensor)


def swap(net: Net) -> None:
    for row in net.state_dict()["line.weight"]:
        row.mul_(2.0)


WRITES: dict[str, Callable[[Net], Any]] = {
    "in place": lambda net: net.line.weight.mul_(2.0),
    "entry": lambda net: net.state_dict()["line.bias"].copy_(torch.ones(5)),
    "item": lambda net: net.line.weight.data.__setitem__(0, 1.0),
    "view": lambda net: net.line.weight[0].zero_(),
    "view of a view": lambda net: net.line.weight.detach().T[0].unsqueeze(0).zero_(),
    "rows": swap,
    "out": lambda net: torch.add(net.line.bias, 1.0, out=net.line.bias.detach()[:]),
    "init": lambda net: nn.init.ones_(net.line.weight),
    "init of a view": lambda net: nn.init.ones_(net.line.weight[1:]),
    "data": lambda net: setattr(net.line.weight, "data", torch.ones(5, 3)),
    "data of a view": lambda net: setattr(net.line.weight[0], "data", torch.ones(3)),
    "foreach": lambda net: torch._foreach_mul_([net.line.weight, net.line.bias], 2.0),
    "memory": lambda net: net.line.bias.data_ptr(),
    "hook": lambda net: net.line.bias.register_post_accumulate_grad_hook(print),
    "step": lambda net: (
        torch.optim.SGD([nn.Parameter(net.line.weight[0])], 0.1)
        .param_groups[0]["params"][0]
        .sub_(1.0)
    ),
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("grad", [True, False])
def test_a_write_to_what_was_read_from_pieces_is_refused(write: str, grad: bool) -> None:
    def main(group: zf.Group) -> None:
        net = pieces(group)
        words = r"written, and has memory.*modifier_rank=0"
        with torch.set_grad_enabled(grad), pytest.raises(PlacementError, match=words):
            WRITES[write](net)
        assert digest(net) == digest(Net())

    zf.simulate(2, main)


def test_an_array_of_pieces_takes_no_writes() -> None:
    def main(group: zf.Group) -> None:
        net = pieces(group)
        for array in (net.line.bias.detach().numpy(), np.asarray(net.line.bias.detach()[1:])):
            with pytest.raises(ValueError, match="read-only"):
                array[0] = 1.0

    zf.simulate(2, main)


def test_backward_of_a_read_of_pieces_is_refused() -> None:
    def main(group: zf.Group) -> None:
        net = pieces(group)
        loss = net(torch.arange(5)).sum()
        with pytest.raises(PlacementError, match=r"gradients in an engine; .* initialize\(\)"):
            loss.backward()
        with pytest.raises(PlacementError, match="gradients in an engine"):
            (net.line.bias.norm() + torch.ones((), requires_grad=True)).backward()

    zf.simulate(2, main)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_entries_from_before_initialize_are_those_of_the_engine_then(stage: int) -> None:
    """As in torch, where they share the memory of the parameters."""

    def main(group: zf.Group) -> None:
        net = pieces(group)
        entries = net.state_dict()
        with GatheredParameters(net.line.bias, modifier_rank=0):
            net.line.bias.data.fill_(group.rank + 5.0)
            assert entries["line.bias"].tolist() == [group.rank + 5.0] * 5
        assert entries["line.bias"].tolist() == [5.0] * 5
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
            "zero_optimization": {"stage": stage},
        }
        mpu = deepspeed_mpu(group)
        engine, *_ = deepspeed.initialize(model=net, config=config, mpu=mpu)
        engine.backward(engine(torch.arange(5)).sum())
        engine.step()
        weights = engine.module_state_dict()
        assert weights["line.bias"].tolist() != [5.0] * 5
        for name in ("line.bias", "table.weight", "still.weight"):
            assert torch.equal(entries[name].clone(), weights[name])

    zf.simulate(2, main)


def deepspeed_mpu(group: zf.Group) -> Any:
    class Ranks:
        @staticmethod
        def get_data_parallel_group() -> zf.Group:
            return group

        @staticmethod
        def get_model_parallel_world_size() -> int:
            return 1

    return Ranks()


@pytest.mark.parametrize(
    ("read", "words"),
    [
        (digest, "a read of parameter .*on all ranks"),
        (lambda net: net.line.bias.sum(), "a read of parameter .*on all ranks"),
        (pickle.dumps, "a read of parameter .*on all ranks"),
    ],
)
def test_a_rank_that_reads_pieces_alone_is_named(read: Callable[[Net], Any], words: str) -> None:
    def main(group: zf.Group) -> None:
        net = pieces(group)
        if group.rank == 0:
            read(net)
        with GatheredParameters(list(net.parameters())):
            pass

    with pytest.raises(CollectiveMismatch, match=words):
        zf.simulate(2, main)
