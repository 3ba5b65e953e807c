"""Models of transformers made in pieces have the values, ties and buffers of whole ones."""

import copy
import sys
import tempfile

import deepspeed
import torch
import torch.distributed as dist
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    Qwen2Config,
    Qwen2ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.integrations import HfDeepSpeedConfig, is_deepspeed_zero3_enabled

deepspeed.init_distributed()
rank = deepspeed.comm.get_rank()
small = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
t5 = T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2)
cases = [
    (T5ForConditionalGeneration, t5),
    (LlamaForCausalLM, LlamaConfig(**small)),
    (Qwen2ForCausalLM, Qwen2Config(**small, tie_word_embeddings=True)),
]


def ties(named):
    """Return the sets of names that have one parameter."""
    by_id = {}
    for name, param in named.items():
        by_id.setdefault(id(param), set()).add(name)
    return sorted(map(sorted, by_id.values()))


def check(plain, model):
    """Compare a model in pieces with a whole one."""
    wanted = dict(plain.named_parameters(remove_duplicate=False))
    found = dict(model.named_parameters(remove_duplicate=False))
    assert ties(wanted) == ties(found)
    assert all(type(param).__name__ == "Partitioned" for param in found.values())
    with deepspeed.zero.GatheredParameters(list(found.values())):
        for name, param in wanted.items():
            assert torch.equal(param, found[name]), name
    for (name, one), (again, other) in zip(
        plain.named_buffers(), model.named_buffers(), strict=True
    ):
        assert name == again
        assert torch.equal(one, other), name


for cls, config in cases:
    box = [tempfile.mkdtemp(dir=sys.argv[1]) if rank == 0 else None]
    dist.broadcast_object_list(box, 0)
    torch.manual_seed(0)
    plain = cls(copy.deepcopy(config))
    if rank == 0:
        plain.save_pretrained(box[0])
    dist.barrier()
    torch.manual_seed(rank)
    with deepspeed.zero.Init():
        built = cls(copy.deepcopy(config))
    check(plain, built)
    with deepspeed.zero.Init():
        loaded = cls.from_pretrained(box[0])
    check(plain, loaded)
    alive = HfDeepSpeedConfig(
        {"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 1}
    )
    assert is_deepspeed_zero3_enabled()
    check(plain, cls.from_pretrained(box[0]))
    made = cls._from_config(copy.deepcopy(config))
    with deepspeed.zero.GatheredParameters(list(made.parameters())):
        assert all(param.isfinite().all() for param in made.parameters())
    del alive

# A constructor that makes its own body in pieces; rank 0 gives the values.
alive = HfDeepSpeedConfig({"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 1})
torch.manual_seed(rank)
made = LlamaForSequenceClassification(LlamaConfig(**small, pad_token_id=0))
with deepspeed.zero.GatheredParameters(list(made.parameters())):
    values = torch.cat([param.detach().reshape(-1) for param in made.model.parameters()])
first = values.clone()
dist.broadcast(first, 0)
assert torch.equal(values, first)
assert values.std() > 0
