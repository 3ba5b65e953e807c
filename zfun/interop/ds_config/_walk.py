"""An older path of two names."""

from zfun.interop.ds_config._values import Checked as Walked
from zfun.interop.ds_config._values import walk

__all__ = ["Walked", "walk"]
