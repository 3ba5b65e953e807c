"""The dtypes of arguments and buffers under bf16 and fp16, which are those of DeepSpeed 0.19.8."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zfun as zf
import zfun.interop.deepspeed as deepspeed
from tests.interop.deepspeed_runs import config, ranks
from zfun.interop.deepspeed.pipe import PipelineModule

STAGES = pytest.mark.parametrize("stage", [0, 2, 3])
BY_DTYPE = {torch.bfloat16: "bf16", torch.float16: "fp16"}
DTYPES = pytest.mark.parametrize("dtype", BY_DTYPE, ids=str)


class Timed(nn.Module):
    """A model of flow matching, whose float32 times go through sine and cosine."""

    frequencies: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)
        self.register_buffer("frequencies", torch.exp(-torch.arange(4.0)))

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        phase = time[:, None] * self.frequencies
        waves = torch.cat([phase.sin(), phase.cos()], 1).to(self.first.weight.dtype)
        return self.last((self.first(x) + waves).tanh())

    def generate(self, x: Tensor, time: Tensor) -> Tensor:
        return self(x, time)


def half(dtype: torch.dtype, **fp16: Any) -> dict[str, Any]:
    """Return the sections of a dtype, without accumulation and clipping."""
    plain = {"gradient_accumulation_steps": 1, "gradient_clipping": 0.0}
    if dtype is torch.bfloat16:
        return {**plain, "bf16": {"enabled": True}, "fp16": {"enabled": False, **fp16}}
    return {**plain, "fp16": {"enabled": True, "loss_scale": 1.0, **fp16}}


def made(group: zf.Group, stage: int, model: nn.Module, **more: Any) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    options = {"model": model, "optimizer": optimizer, "config": config(stage, **more)}
    return deepspeed.initialize(**options, mpu=ranks(group))[0]


def data(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(4, 8, generator=generator), 1000 * torch.rand(4, generator=generator)


@pytest.mark.shows(
    "arguments of a module under `bf16` and `fp16`",
    "right",
    "not cast, so cast the batch; `fp16.auto_cast` casts those by position to float16",
)
@STAGES
@DTYPES
def test_arguments_are_not_cast(dtype: torch.dtype, stage: int) -> None:
    plain, masters = Timed(), Timed()
    for x in plain.parameters():
        x.data = x.data.to(dtype)

    def main(group: zf.Group) -> None:
        engine = made(group, stage, Timed(), **half(dtype))
        optimizer = torch.optim.SGD(masters.parameters(), 0.1)
        for step in range(3):
            x, time = data(step)
            loss = engine(x.to(dtype), time=time).float().square().mean()
            engine.backward(loss)
            engine.step()
            plain.zero_grad()
            expected = plain(x.to(dtype), time).float().square().mean()
            expected.backward()
            torch.testing.assert_close(loss.detach(), expected.detach())
            for master, own in zip(masters.parameters(), plain.parameters(), strict=True):
                assert own.grad is not None
                master.grad = own.grad.float()
            optimizer.step()
            for master, own in zip(masters.parameters(), plain.parameters(), strict=True):
                own.data.copy_(master)
        x, time = data(3)
        with torch.no_grad():
            expected = plain.eval()(x.to(dtype), time)
            engine.eval()
            for call in (engine, engine.module, engine.generate):
                torch.testing.assert_close(call(x.to(dtype), time), expected)

    zf.simulate(1, main)


@STAGES
@DTYPES
def test_an_argument_of_another_dtype_has_the_error_of_torch(
    dtype: torch.dtype, stage: int
) -> None:
    def main(group: zf.Group) -> None:
        engine = made(group, stage, nn.Linear(8, 4), **half(dtype))
        for grads in (True, False):
            with torch.set_grad_enabled(grads), pytest.raises(RuntimeError, match="same dtype"):
                engine(data(0)[0])

    zf.simulate(1, main)


class Seen(nn.Module):
    """Keeps the dtypes of its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.dtypes = nn.Parameter(torch.ones(4)), [torch.int8]

    def forward(self, x: Any, *more: Any, time: Tensor | None = None) -> Any:
        pair, found = x if isinstance(x, tuple) else (x, {"x": [x]})
        tensors = [pair, *found["x"], *more, *([] if time is None else [time])]
        self.dtypes = [t.dtype for t in tensors]
        return pair[..., :4] * self.scale


@STAGES
@DTYPES
@pytest.mark.parametrize("calls", ["engine", "module", "evaluation"])
def test_auto_cast_takes_positional_arguments_to_float16(
    calls: str, dtype: torch.dtype, stage: int
) -> None:
    def main(group: zf.Group) -> None:
        engine = made(group, stage, Seen(), **half(dtype, auto_cast=True))
        call = engine.module if calls == "module" else engine
        x, time = data(0)
        with torch.set_grad_enabled(calls != "evaluation"):
            call((x, {"x": [time.double()]}), torch.arange(2), time=time)
        seen = copy.copy(engine.module.dtypes)
        assert seen == [torch.float16, torch.float16, torch.int64, torch.float32]

    zf.simulate(1, main)


@pytest.mark.parametrize("casts", [True, False])
def test_layers_of_a_pipeline_get_what_others_get(casts: bool) -> None:
    def main(group: zf.Group) -> None:
        net = PipelineModule(
            [Seen()], num_stages=1, loss_fn=lambda out, y: (out.float() - y).square().mean()
        )
        sections = half(torch.float16, auto_cast=casts)
        engine: Any = deepspeed.initialize(
            model=net,
            optimizer=torch.optim.SGD(net.parameters(), 0.1),
            config=config(1, **sections),
        )[0]
        for run in (engine.train_batch, engine.eval_batch):
            run(iter([(data(0)[0], torch.zeros(4, 4))]))
            (layer,) = (x for x in net.modules() if isinstance(x, Seen))
            assert layer.dtypes[0] is (torch.float16 if casts else torch.float32)

    zf.simulate(1, main)


class Kept(nn.Module):
    _keep_in_fp32_modules_strict = ("bias_a",)
    _keep_in_fp32_modules = ("bias_b",)

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)
        self.register_buffer("bias_a", torch.ones(2, dtype=torch.bfloat16))
        self.register_buffer("bias_b", torch.ones(2, dtype=torch.float16))
        self.register_buffer("other", torch.ones(2))
        self.register_buffer("index", torch.arange(2))


# The dtypes that DeepSpeed 0.19.8 gives, of k.bias_a, k.bias_b, k.other and bias_a.
@pytest.mark.parametrize(
    ("kind", "section", "expected"),
    [
        ("bf16", {}, "float32 float16 float32 bfloat16"),
        ("fp16", {}, "float32 float32 float32 bfloat16"),
        ("bf16", {"buffer_dtype": "bf16"}, "float32 bfloat16 bfloat16 bfloat16"),
        ("fp16", {"buffer_dtype": "fp32"}, "float32 float32 float32 float32"),
        ("bf16", {"keep_in_fp32_modules": []}, "bfloat16 float16 float32 bfloat16"),
        (
            "fp16",
            {"keep_in_fp32_modules": ["k.*_b", "^bias"], "buffer_dtype": "fp16"},
            "float16 float32 float16 float32",
        ),
        (
            "",
            {"keep_in_fp32_modules": ["k"], "buffer_dtype": "fp16"},
            "bfloat16 float16 float32 bf",
        ),
    ],
)
@STAGES
def test_buffers_have_the_dtypes_of_the_configuration(
    kind: str, section: dict[str, Any], expected: str, stage: int
) -> None:
    def main(group: zf.Group) -> None:
        model = nn.Module()
        model.k = Kept()
        model.register_buffer("bias_a", torch.ones(2, dtype=torch.bfloat16))
        more = {kind: {"enabled": True}} if kind else {}
        engine = made(group, stage, model, data_types=section, **more)
        found = dict(engine.module.named_buffers())
        names = ("k.bias_a", "k.bias_b", "k.other", "bias_a")
        assert " ".join(str(found[x].dtype)[6:] for x in names).startswith(expected)
        assert found["k.index"].dtype is torch.int64

    zf.simulate(1, main)
