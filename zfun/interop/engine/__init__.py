"""A module with a training state, for imperative loops.

=================  ===================================================================
``_engine``        the class: calls and steps; see [Note: the engine]
``_passes``        backward passes, the gradients of the next step, and what drops them
``_held``          the state, and values of the module
``_calls``         calls in training and without gradients
``_live``          the module reads its parameters from the state
``_parameter``     parameters outside of calls
``_grad_sum``      the gradients of a step
``_methods``       methods of live modules, and ``torch.compile`` of blocks
``_groups``        parameter groups of torch optimizers as pure optimizers
``_moments``       the state and the functions of a torch optimizer that an engine steps
``_torch_states``  ``state_dict()`` of torch optimizers
``_values``        buffers, whole leaves, states of other trained leaves
=================  ===================================================================
"""

from zfun.interop.engine._engine import Engine
from zfun.interop.engine._groups import UNBOUNDED, ParamGroups, group_number, with_group_numbers
from zfun.interop.engine._methods import compile_blocks
from zfun.interop.engine._torch_states import TORCH_NAMES, torch_numbers
from zfun.interop.engine._values import EngineBuffers, named_leaves
