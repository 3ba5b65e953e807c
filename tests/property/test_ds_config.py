"""Mutated configurations load, or one error names every mistake and nothing else."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import examples
from tests.interop.ds_configs import FILES, auto_of
from zfun.errors import ConfigError
from zfun.interop import Recipe, from_ds_config
from zfun.interop.ds_config._read import read

CONFIGS = [(dict(read(path)[0]), auto_of(path)) for path in FILES]

# The value to write, and the path of the mistake. Keys of a contradiction are not mutated again.
CONTRADICTIONS: list[tuple[dict[str, Any], str]] = [
    ({"fp16.enabled": True, "bf16.enabled": True}, "fp16.enabled"),
    (
        {"zero_optimization.stage": 2, "zero_optimization.offload_param.device": "cpu"},
        "zero_optimization.offload_param.device",
    ),
    (
        {
            "zero_optimization.stage": 0,
            "zero_optimization.offload_optimizer.device": "cpu",
            "zero_optimization.offload_param.device": "none",
        },
        "zero_optimization.offload_optimizer.device",
    ),
    (
        {
            "zero_optimization.stage": 3,
            "zero_optimization.offload_param.device": "nvme",
            "zero_optimization.offload_param.nvme_path": None,
        },
        "zero_optimization.offload_param.nvme_path",
    ),
    (
        {
            "train_batch_size": 13,
            "train_micro_batch_size_per_gpu": 3,
            "gradient_accumulation_steps": 2,
        },
        "train_batch_size",
    ),
    (
        {"elasticity": {"enabled": True, "max_train_batch_size": 100, "micro_batch_sizes": [3]}},
        "",
    ),
]
UNTOUCHED = {
    # A value in another place decides whether these are read.
    "optimizer.type",
    "scheduler.type",
    "zero_optimization.stage",
    "zero_optimization.offload_optimizer.device",
    "zero_optimization.offload_param.device",
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "fp16.enabled",
    "bf16.enabled",
}


def leaves(config: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in config.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def sections(config: dict[str, Any], prefix: str = "") -> Iterator[str]:
    yield prefix
    for name, value in config.items():
        if isinstance(value, dict) and name != "amp":
            yield from sections(value, f"{prefix}{name}.")


def write(config: dict[str, Any], path: str, value: Any) -> None:
    *before, last = path.split(".")
    for name in before:
        config = config.setdefault(name, {})
    config[last] = value


@st.composite
def mutated(draw: st.DrawFn) -> tuple[dict[str, Any], Any, set[str]]:
    """A configuration, values of the run, and the paths of all mistakes."""
    original, auto = draw(st.sampled_from(CONFIGS))
    config = copy.deepcopy(original)
    expected: set[str] = set()
    taken: set[str] = set(UNTOUCHED)
    if draw(st.booleans()):
        changes, path = draw(st.sampled_from(CONTRADICTIONS[:-1]))
        if "onebit" not in str(config).lower():
            for at, value in changes.items():
                write(config, at, value)
                taken.add(at)
            expected.add(path)
            # The dtype of the run would contradict one of the two as well.
            auto = replace(auto, dtype=None) if "bf16.enabled" in changes else auto
    places = sorted(sections(config))
    candidates = sorted({*leaves(config)} - taken)
    candidates = [path for path in candidates if not path.startswith("amp.")]
    if candidates:
        for path in draw(st.lists(st.sampled_from(candidates), max_size=3, unique=True)):
            # A path may be any text.
            text = () if path.endswith("nvme_path") else ("wrong",)
            write(config, path, draw(st.sampled_from([["wrong"], {"wrong": 1}, -7.5, *text])))
            expected.add(path)
    for number, section in enumerate(draw(st.lists(st.sampled_from(places), max_size=3))):
        name = f"{section}{draw(st.sampled_from(['stge', 'unknown', 'betass', 'auto']))}{number}"
        write(config, name, draw(st.sampled_from([1, "auto", None, {"a": 1}])))
        # There DeepSpeed ignores a key that it does not know.
        expected |= set() if section in ("", "optimizer.", "scheduler.") else {name}
    return config, auto, expected


def mistakes_or_recipe(config: dict[str, Any], auto: Any) -> Recipe | tuple[Any, ...]:
    try:
        return from_ds_config(config, auto=auto)
    except ConfigError as error:
        found = error
    lines = str(found).splitlines()[1:]
    assert len(lines) == len(found.mistakes) > 0
    for line, one in zip(lines, found.mistakes, strict=True):
        assert line.startswith(f"- {one.path}: ")
        assert "; got " in line
        assert one.rule
        assert one.remedy
    return found.mistakes


@settings(max_examples=examples(400))
@given(mutated())
def test_one_error_names_every_mistake_and_nothing_else(
    case: tuple[dict[str, Any], Any, set[str]],
) -> None:
    config, auto, expected = case
    before = copy.deepcopy(config)
    found = mistakes_or_recipe(config, auto)
    paths = set() if isinstance(found, Recipe) else {one.path for one in found}
    assert paths == expected
    if isinstance(found, Recipe):
        unknown = {
            name for name in config if name.startswith(("stge", "unknown", "betass", "auto"))
        }
        ignored = {one.path for one in found.entries if one.verdict == "ignored"}
        assert unknown - {"autotuning"} <= ignored
    assert config == before


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)


@settings(max_examples=examples(400))
@given(st.sampled_from(CONFIGS), st.data())
def test_any_values_load_or_raise_one_error(case: Any, data: st.DataObject) -> None:
    original, auto = case
    config = copy.deepcopy(original)
    places = sorted({*leaves(config), *(section[:-1] for section in sections(config) if section)})
    for path in data.draw(st.lists(st.sampled_from(places), min_size=1, max_size=3)):
        try:
            write(config, path, data.draw(JSON))
        except (TypeError, AttributeError):
            continue  # a section above is no section any more
    found = mistakes_or_recipe(config, auto)
    assert not isinstance(found, Recipe) or str(found).count("\n") + 1 == len(found.entries)


def test_elastic_sizes_and_other_sizes_contradict() -> None:
    changes, _ = CONTRADICTIONS[-1]
    config = {"train_batch_size": 12, **changes}
    with pytest.raises(ConfigError, match="train_batch_size: the elastic batch sets the sizes"):
        from_ds_config(config, auto=auto_of(FILES[0]))
