"""Copies of the parameters that an optimizer keeps: master weights, and averages."""

from zfun.optim.copies._ema import EmaState, ema
from zfun.optim.copies._master import MasterState, masters_of, with_master

__all__ = ["EmaState", "MasterState", "ema", "masters_of", "with_master"]
