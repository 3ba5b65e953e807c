"""Recipes: compositions of the transforms under well-known names.

==============  ==================================================================================
``_zero``       ``zf.zero``: the signature of all options
``_options``    the options as one value
``_loop``       ``init``, ``step`` and ``params``
``_state``      the state between steps, and the results of a step
``_start``      the first state, built leaf by leaf
``_update``     the second half of a step, from gradients to a new state
``_compose``    the transforms of each stage
``_precision``  the dtypes of a run
``_checks``     options that all ranks share; gradients that are missing or not finite
``_known``      a state of other options than the step's
==============  ==================================================================================
"""

from zfun.recipes._checks import check_is_state as check_is_state
from zfun.recipes._precision import Precision
from zfun.recipes._precision import policy_of as policy_of
from zfun.recipes._state import StepInfo, Zero, ZeroState
from zfun.recipes._zero import zero

__all__ = ["Precision", "StepInfo", "Zero", "ZeroState", "zero"]
