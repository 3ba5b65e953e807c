"""``pytorch_lightning`` and ``lightning_fabric``: classes with the names of ``lightning``."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import pytest

from zfun.errors import OptionError

pytest.importorskip("lightning")
zl = pytest.importorskip("zfun.interop.lightning")

pytestmark = pytest.mark.filterwarnings("ignore")
OPTIONS: dict[str, Any] = {"accelerator": "cpu", "devices": 1}
REFUSED = r"works with the classes of the package lightning; got Precision of {}; make the Trainer"


@pytest.mark.parametrize("strategy", ["zfun", "zfun_stage_3", "zfun_stage_1_offload", None])
def test_a_trainer_of_the_other_package_names_the_remedy(strategy: str | None) -> None:
    """It ended in Lightning's own error: the name is invalid."""
    other = pytest.importorskip("pytorch_lightning")
    importlib.reload(zl)
    with pytest.raises(OptionError, match=REFUSED.format("pytorch_lightning")):
        other.Trainer(strategy=strategy or zl.ZfunStrategy(stage=2), logger=False, **OPTIONS)


@pytest.mark.parametrize("strategy", ["zfun_stage_2", None])
def test_a_fabric_of_the_other_package_names_the_remedy(strategy: str | None) -> None:
    other = pytest.importorskip("lightning_fabric")
    importlib.reload(zl)
    with pytest.raises(OptionError, match=REFUSED.format("lightning_fabric")):
        other.Fabric(strategy=strategy or zl.ZfunFabricStrategy(stage=2), **OPTIONS)


def test_a_package_that_the_program_lacks_is_not_imported(monkeypatch: Any) -> None:
    monkeypatch.delitem(sys.modules, "pytorch_lightning.strategies", raising=False)
    importlib.reload(zl)
    assert "pytorch_lightning.strategies" not in sys.modules
