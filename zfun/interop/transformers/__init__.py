"""``transformers.Trainer`` with sharded training state; needs ``pip install zfun[transformers]``.

=================  ===============================================================================
``_trainer``       the subclass: what the loop of ``transformers`` calls
``_run``           a module whose parameters are a state of ``zf.zero``
``_optimizers``    optimizers of torch as pure ones, which follow their parameter groups
``_options``       the meaning of ``zero=``, and arguments that are refused
=================  ===============================================================================
"""

from zfun.interop.transformers._trainer import Trainer

__all__ = ["Trainer"]
