"""A module with a training state, for imperative loops.

============  ====================================================================
``_engine``   the class; see [Note: the engine]
``_calls``    a forward pass in autograd's graph
============  ====================================================================
"""

from zfun.interop.engine._engine import Engine

__all__ = ["Engine"]
