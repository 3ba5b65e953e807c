"""The plan of a model equals a real step on simulated ranks."""

from __future__ import annotations

import concurrent.futures
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zfun as zf
from tests.conftest import FORM
from tests.unit.planner.test_plan import ADAMW, EVERYTHING, check, measured
from zfun.planner import Plan

transformers = pytest.importorskip("transformers")

F = nn.functional
VOCABULARY, LAYERS = 61, 2
TOKENS = torch.arange(4 * 12).reshape(4, 12) % VOCABULARY
TEXT = {"input_ids": TOKENS, "labels": TOKENS}
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "max_position_embeddings": 16,
}
GROUPED = {**SIZES, "num_key_value_heads": 2}
ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def gpt2() -> Any:
    sizes = {"n_embd": 32, "n_layer": LAYERS, "n_head": 2, "n_positions": 16}
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=VOCABULARY, **sizes, **ENDS)
    ), TEXT


def qwen2() -> Any:
    config = transformers.Qwen2Config(**GROUPED, tie_word_embeddings=True)
    return transformers.Qwen2ForCausalLM(config), TEXT


def mixtral() -> Any:
    config = transformers.MixtralConfig(**GROUPED, num_local_experts=4, num_experts_per_tok=2)
    return transformers.MixtralForCausalLM(config), TEXT


def mamba() -> Any:
    sizes = {"hidden_size": 32, "state_size": 4, "num_hidden_layers": LAYERS}
    config = transformers.MambaConfig(vocab_size=VOCABULARY, **sizes, **ENDS)
    return transformers.MambaForCausalLM(config), TEXT


def t5() -> Any:
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": LAYERS, "num_heads": 4}
    config = transformers.T5Config(vocab_size=VOCABULARY, decoder_start_token_id=0, **sizes)
    return transformers.T5ForConditionalGeneration(config), TEXT


def whisper() -> Any:
    both = {"layers": LAYERS, "attention_heads": 2, "ffn_dim": 48}
    sizes = {f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in both.items()}
    config = transformers.WhisperConfig(
        vocab_size=VOCABULARY,
        d_model=32,
        num_mel_bins=8,
        max_source_positions=16,
        max_target_positions=16,
        decoder_start_token_id=1,
        **sizes,
        **ENDS,
    )
    module = transformers.WhisperForConditionalGeneration(config)
    return module, {"input_features": torch.ones(4, 8, 32), "labels": TOKENS}


def vit() -> Any:
    sizes = {
        name: n
        for name, n in SIZES.items()
        if name not in ("vocab_size", "max_position_embeddings")
    }
    config = transformers.ViTConfig(**sizes, image_size=16, patch_size=4, num_labels=7)
    labels = torch.arange(4) % 7
    module = transformers.ViTForImageClassification(config)
    return module, {"pixel_values": torch.ones(4, 3, 16, 16), "labels": labels}


class UNet(nn.Module):
    """Convolutions down and up with a skip, norms of groups and batches, and attention between."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(32, 3, 3, padding=1)
        self.norm, self.batch_norm = (
            nn.GroupNorm(4, 16),
            nn.BatchNorm2d(32, track_running_stats=False),
        )
        self.down, self.up = nn.Conv2d(16, 32, 3, padding=1), nn.ConvTranspose2d(32, 16, 2, 2)
        self.attention = nn.MultiheadAttention(32, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        skip = F.silu(self.norm(self.into(x)))
        low = F.mish(self.batch_norm(self.down(F.max_pool2d(skip, 2))))
        rows = low.flatten(2).transpose(1, 2)
        rows = rows + self.attention(rows, rows, rows, need_weights=False)[0]
        high = self.up(rows.transpose(1, 2).unflatten(-1, low.shape[2:]))
        high = torch.cat([skip, high], 1) + F.interpolate(low, scale_factor=2)
        return F.mse_loss(self.out(F.dropout(high, 0.1)), x)


def unet() -> Any:
    return UNet(), {"x": torch.ones(4, 3, 16, 16)}


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, 24), nn.Linear(32, VOCABULARY)
        self.layers = kind(24, 32, num_layers=LAYERS, batch_first=True)  # type: ignore[call-arg]

    def forward(self, x: Tensor) -> Tensor:
        logits = self.head(self.layers(self.embedding(x))[0])
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), x[:, 1:].flatten())


def lstm() -> Any:
    return Recurrent(nn.LSTM), {"x": TOKENS}


def gru() -> Any:
    return Recurrent(nn.GRU), {"x": TOKENS}


MODELS: dict[str, Callable[[], Any]] = {
    fn.__name__: fn for fn in (gpt2, qwen2, mixtral, mamba, t5, whisper, vit, unet, lstm, gru)
}
# On a CPU, dropout of attention weights needs these.
WHOLE = ["whole matrices"]
ATTENTION: dict[str, list[str]] = {"gpt2": WHOLE, "t5": WHOLE, "mamba": [], "lstm": [], "gru": []}
# These have no switch of transformers to recompute blocks.
OWN = ("unet", "lstm", "gru")


def problem(name: str, *, remat: bool) -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    module, batch = MODELS[name]()
    module.train()
    if remat and name not in OWN:
        # The second name is that of older versions.
        names = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
        switch = next(getattr(module, name) for name in names if hasattr(module, name))
        switch({"use_reentrant": False})
    apply = zf.functional(module)
    options = {} if name in (*OWN, "vit") else {"use_cache": False}

    def loss(params: Any, batch: Any) -> Tensor:
        out = apply(params, **batch, **options)
        return out if isinstance(out, Tensor) else out.loss

    again = lambda params, batch: 1.0 * zf.remat(loss)(params, batch)
    chosen = again if remat and name in OWN else loss
    return chosen, {path: leaf.clone() for path, leaf in apply.params.items()}, batch


class _AtOnce:
    """Threads that take no time: a disk as fast as memory, so that no write is under way."""

    def __init__(self, *args: Any) -> None:
        pass

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Any:
        done: Any = concurrent.futures.Future()
        done.set_result(fn(*args, **kwargs))
        return done

    def shutdown(self, wait: bool = True) -> None:
        pass


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "mixed precision": {"precision": torch.bfloat16},
    "remat": {},
    "accumulation": {"num_micro_batches": 2},
    "host": {"store": zf.stores.host},
    "half on the host": {"store": zf.stores.host, "fraction": 0.5},
    "disk": {"store": zf.stores.nvme},
    "half on the disk": {"store": zf.stores.nvme, "fraction": 0.5},
    "disk, all": {
        "store": zf.stores.nvme,
        "precision": torch.bfloat16,
        "num_micro_batches": 2,
    },
}
DAILY = {("mixtral", "plain"), ("unet", "disk"), ("vit", "half on the host"), ("lstm", "remat")}


def recipe(group: zf.Group, stage: int, loss: Any, path: str, options: dict[str, Any]) -> Any:
    options = dict(options)
    make, fraction = options.pop("store", None), options.pop("fraction", 1.0)
    offload = None
    if make is not None:
        store = make(path) if make is zf.stores.nvme else make(pin=False)
        parts: dict[str, Any] = dict.fromkeys(EVERYTHING[: 3 if stage == 3 else 2], store)
        offload = zf.stores.Offload(**parts, fraction=fraction)
    return zf.zero(stage, loss, ADAMW, group, bucket_bytes=8000, offload=offload, **options)


def near(make: Any, params: Any, batch: Any) -> Plan:
    """Compare a plan with a workspace of about the real size, ten pages of each layer's more."""
    plan, real = zf.plan(make, params, batch, 2), measured(make, params, batch, 2)
    assert len(plan.instants) == len(real.instants)
    for planned, found in zip(plan.instants, real.instants, strict=True):
        assert abs(planned.device.total - found.device.total) <= LAYERS * 10 * 4096
        assert planned.device._replace(activations=0) == found.device._replace(activations=0)
        assert planned.disk == found.disk
    return plan


@pytest.mark.parametrize(
    ("name", "stage", "variant"),
    [
        pytest.param(
            name,
            stage,
            variant,
            marks=() if stage == 3 and (name, variant) in DAILY else pytest.mark.slow,
        )
        for number, name in enumerate(MODELS)
        for stage in (0, 1, 2, 3)
        for place, variant in enumerate(VARIANTS if stage == 3 else ("plain", "disk, all"))
        # Every model and every variant in `make test-all`; all pairs take 12 minutes.
        if FORM == "search" or (name, variant) in DAILY or (number + place + stage) % 8 == 0
    ],
)
def test_the_plan_equals_a_real_step(
    name: str, stage: int, variant: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setattr("zfun.stores._disk.ThreadPoolExecutor", _AtOnce)
    loss, params, batch = problem(name, remat=variant == "remat")
    make = functools.partial(
        recipe, stage=stage, loss=loss, path=str(tmp_path), options=VARIANTS[variant]
    )
    plan = check(make, params, batch, 2) if name != "lstm" else near(make, params, batch)
    assert bool(plan.flops.recomputed) == (variant == "remat")
    assert [kernel for kernel, _ in plan.attention] == ATTENTION.get(name, ["flash, CPU"])


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name == "qwen2" else pytest.mark.slow) for name in MODELS],
)
def test_a_device_sends_as_much_as_the_cpu(name: str) -> None:
    loss, params, batch = problem(name, remat=name not in OWN)
    make = functools.partial(recipe, stage=3, loss=loss, path="", options={})
    here, there = (zf.plan(make, params, batch, 2, device=device) for device in ("cpu", "meta"))
    assert there.sent == here.sent
    assert there.steady.device == here.steady.device
    assert sum(n for _, n in there.attention) == sum(n for _, n in here.attention)
