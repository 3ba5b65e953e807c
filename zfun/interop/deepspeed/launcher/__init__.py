"""``deepspeed.launcher``: ``python -m zfun.interop.deepspeed`` for ``deepspeed`` on a command line.

===========  ======================================================================================
``runner``   the command line, as a command of torchrun
``site``     a folder for ``PYTHONPATH``, in which ``import deepspeed`` and the version are found
===========  ======================================================================================
"""

from zfun.interop.deepspeed._absent import absent
from zfun.interop.deepspeed.launcher import runner as runner

__getattr__ = absent("launcher", globals())
