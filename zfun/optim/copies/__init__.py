"""Copies of the parameters that an optimizer keeps: master weights, and averages."""

from zfun.optim.copies._ema import EmaState, averages_of, ema
from zfun.optim.copies._master import MasterState, masters_of, with_master
