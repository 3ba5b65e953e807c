"""Closed forms: the printed tables of their sources, and the messages of recorded steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import zfun as zf
from zfun.planner import formulae

# Table 1 of ZeRO's paper: P_os, P_os+g and P_os+g+p for 7.5B, 128B and 1T, in GB.
ZERO = """
   1    120     120      120    2048    2048    2048   16000   16000   16000
   4    52.5    41.3     30     896     704     512    7000    5500    4000
  16    35.6    21.6     7.5    608     368     128    4750    2875    1000
  64    31.4    16.6     1.88   536     284     32     4187    2218    250
 256    30.4    15.4     0.47   518     263     8      4046    2054    62.5
1024    30.1    15.1     0.12   513     257     2      4011    2013    15.6
"""


def test_the_table_of_zero_is_that_of_the_paper() -> None:
    printed = formulae.zero_table().splitlines()[2:]
    assert [line.split() for line in printed] == [line.split() for line in ZERO.split("\n")[1:-1]]


@pytest.mark.parametrize("model", [7.5e9, 128e9, 1e12])
def test_stages_1_to_3_hold_no_more_than_the_stage_before(model: float) -> None:
    for size in (1, 4, 1024):
        held = [formulae.zero_memory(model, size, stage) for stage in (0, 1, 2, 3)]
        assert held == sorted(held, reverse=True)
        assert held[0] == 16 * model
        assert held[3] == held[0] / size


def test_the_largest_models_are_those_of_table_2() -> None:
    sizes = [formulae.largest_model(32e9, 64, stage) / 10**9 for stage in (0, 1, 2, 3)]
    assert [round(float(size), 1) for size in sizes] == [2.0, 7.6, 14.4, 128.0]
    # The paper's other rows are multiples of the rounded first row, for 16 times the devices.
    split = [
        formulae.largest_model(32e9, 64, stage, model_parallel=16) / 10**9 for stage in range(4)
    ]
    assert split == [16 * size for size in sizes]


T0_3B = """\
Estimated memory needed for params, optim states and gradients for a:
HW: Setup with 1 node, 1 GPU per node.
SW: Model with 2783M total params, 65M largest layer params.
  per CPU  |  per GPU |   Options
   70.00GB |   0.25GB | offload_param=cpu , offload_optimizer=cpu , zero_init=1
   70.00GB |   0.25GB | offload_param=cpu , offload_optimizer=cpu , zero_init=0
   62.23GB |   5.43GB | offload_param=none, offload_optimizer=cpu , zero_init=1
   62.23GB |   5.43GB | offload_param=none, offload_optimizer=cpu , zero_init=0
    0.37GB |  46.91GB | offload_param=none, offload_optimizer=none, zero_init=1
   15.56GB |  46.91GB | offload_param=none, offload_optimizer=none, zero_init=0"""
NUMEL, LAYER = 2_783_959_040, 65_798_144


def test_the_estimate_of_t0_3b_is_the_printed_one() -> None:
    assert str(formulae.estimate_zero3(NUMEL, LAYER)) == T0_3B


@pytest.mark.parametrize(
    ("gpus_per_node", "num_nodes", "cells"),
    [
        (1, 1, [("62.23", "5.19"), ("15.56", "51.86")]),
        (8, 1, [("124.45", "5.19"), ("124.45", "11.02")]),
        (8, 8, [("995.62", "5.19"), ("124.45", "5.91")]),
    ],
)
def test_the_estimates_of_zero2_are_deepspeeds(
    gpus_per_node: int, num_nodes: int, cells: list[tuple[str, str]]
) -> None:
    found = formulae.estimate_zero2(NUMEL, gpus_per_node=gpus_per_node, num_nodes=num_nodes)
    printed = [
        tuple(cell.strip().removesuffix("GB") for cell in line.split("|")[:2])
        for line in str(found).splitlines()[4:]
    ]
    assert printed == cells
    machines = f"{num_nodes} node{'s' if num_nodes > 1 else ''}"
    assert machines in found.header


def test_zero3_needs_host_memory_for_whole_copies_on_machines_with_many_devices() -> None:
    rows = formulae.estimate_zero3(NUMEL, LAYER, gpus_per_node=8, num_nodes=2).rows
    # By hand: parameters and optimizer offloaded, made in shards or whole.
    assert rows[0].host == int(NUMEL * 9 * 1.5)
    assert rows[1].host == int(NUMEL * 32 * 1.5)
    assert rows[0].device == 4 * LAYER
    assert rows[4] == (
        int(LAYER * 32 * 1.5),
        4 * LAYER + 18 * NUMEL // 16,
        "offload_param=none, offload_optimizer=none, zero_init=1",
    )


class Tied(torch.nn.Module):
    """Two layers with one weight, and a layer without a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(50, 8, device="meta")
        self.body = torch.nn.Sequential(
            torch.nn.Linear(8, 30, device="meta"), torch.nn.Linear(30, 8, device="meta")
        )
        self.head = torch.nn.Linear(8, 50, bias=False, device="meta")
        self.head.weight = self.embedding.weight


def test_sizes_of_a_module_and_of_the_tree_agree() -> None:
    module = Tied()
    total = 50 * 8 + 8 * 30 + 30 + 30 * 8 + 8
    assert formulae.sizes_of(module) == (total, 400)
    params = {
        "embedding": {"weight": module.embedding.weight},
        "body": [dict(layer.named_parameters()) for layer in module.body],
        "head": {"weight": module.head.weight},
    }
    assert formulae.sizes_of(params) == (total, 400)
    assert formulae.sizes_of(torch.ones(3)) == (3, 3)


def test_the_buffers_of_deepspeeds_buckets() -> None:
    assert formulae.bucket_buffer_bytes(2e8, 2e8) == 3_600_000_000
    assert formulae.bucket_buffer_bytes(5e8, 5e8) == 9_000_000_000


# Figure 2 (a) of ZeRO-Infinity's paper: layers, width and heads; TiB of model states and of
# checkpoints of 32 sequences; GiB of working memory of 1 operator, and of 1 block of 4 sequences.
INFINITY = [
    (100, 20_480, 160, "9.16", "0.12", "6.25", "2.50"),
    (128, 25_600, 256, "18.31", "0.20", "9.77", "3.56"),
    (195, 65_536, 512, "182.81", "0.76", "64.00", "8.00"),
    (315, 163_840, 1024, "1845.70", "3.08", "400.00", "18.00"),
]


@pytest.mark.parametrize("row", INFINITY)
def test_the_memory_of_zero_infinity(row: Any) -> None:
    num_layers, hidden, heads, *printed = row
    whole = formulae.infinity_memory(num_layers, hidden, heads, batch=32)
    rank = formulae.infinity_memory(num_layers, hidden, heads, batch=4)
    assert printed == [
        f"{whole.states / 2**40:.2f}",
        f"{whole.checkpoints / 2**40:.2f}",
        f"{rank.working_states / 2**30:.2f}",
        f"{rank.working_activations / 2**30:.2f}",
    ]
    # 20 bytes for each parameter.
    assert whole.states == 20 * formulae.transformer_params(num_layers, hidden)


def test_the_bandwidths_of_zero_infinity() -> None:
    """Section 4 states these for a device of 70 TFlops and 1,024 tokens."""
    peak = 70e12
    params = formulae.intensity("params and grads", batch=1)
    assert 0.5 < formulae.efficiency(params, 70e9, peak) < 0.52
    optimizer = formulae.intensity("optimizer", batch=1)
    assert formulae.required_bandwidth(optimizer, 0.5, peak) == pytest.approx(
        4 * formulae.required_bandwidth(params, 0.5, peak)
    )
    assert formulae.required_bandwidth(
        formulae.intensity("optimizer", batch=2), 0.9, peak
    ) == pytest.approx(1.23e12, rel=1e-2)
    activations = [formulae.intensity("activations", hidden=hidden) for hidden in (2048, 8192)]
    needed = [formulae.required_bandwidth(ait, 0.5, peak) for ait in activations]
    assert needed[0] < 2e9
    assert needed[1] < 1e9


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_efficiency_and_required_bandwidth_are_inverse(share: float) -> None:
    needed = formulae.required_bandwidth(300.0, share, 1e12)
    assert formulae.efficiency(300.0, needed, 1e12) == pytest.approx(share)


def test_many_links_reach_the_bandwidth_of_the_fabric() -> None:
    assert formulae.aggregate_bandwidth(64 * 16, 4e9, 1e13) == 4.096e12
    assert formulae.aggregate_bandwidth(64, 4e9, 70e9) == 70e9


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(("num_micro_batches", "keep"), [(1, False), (3, False), (1, True)])
def test_the_volume_is_that_of_recorded_steps(
    stage: int, num_micro_batches: int, keep: bool
) -> None:
    size, numel = 4, 4096

    def main(group: zf.Group) -> tuple[int, int]:
        recorded = zf.record(group)
        zero = zf.zero(
            stage,
            lambda params, batch: sum((w * batch.sum()).sum() for w in params.values()),
            zf.optim.adamw(0.1),
            recorded,
            num_micro_batches=num_micro_batches,
            bucket_bytes=1,
            schedule=zf.ScheduleOptions(reuse_distance=10**9 if keep else 0)
            if stage == 3
            else None,
        )
        state = zero.init({"a": torch.ones(numel), "b": torch.ones(numel)})
        state, _ = zero.step(state, torch.ones(num_micro_batches))
        recorded.clear()
        zero.step(state, torch.ones(num_micro_batches))
        return recorded.bytes_sent("grads"), recorded.bytes_sent("params")

    found = formulae.zero_volume(
        2 * numel, size, stage, num_micro_batches=num_micro_batches, keep_gathered=keep
    )
    assert zf.simulate(size, main)[0] == (4 * found.grads, 4 * found.params)


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(zf.errors.OptionError, match=r"stage of zero_memory\(\) must be 0, 1, 2"):
        formulae.zero_memory(1e9, 8, 4)
    with pytest.raises(zf.errors.OptionError, match=r"sizes of zero_table\(\) must be"):
        formulae.zero_table(sizes=(0,))
    with pytest.raises(zf.errors.OptionError, match=r"part of intensity\(\) must be"):
        formulae.intensity("weights")
