"""Live bytes: what each rank holds while a step runs, as a pure function of data.

[Note: what is counted]
The flat buffers that zfun makes: parameters, gathered buckets, buckets of gradients, reduced gradients, and the optimizer's state. What the
user's loss makes (activations, gradients of single leaves, casts of single leaves) is not in it; nor are scalars, the few numbers that
ranks tell each other, and the room of fixed size that a kernel may work in. A collective holds what it reads and what it writes from its
start until it is waited for; in a wire format these are its messages, and nobody holds what they were written of. With ``donate``, the sum
of whole gradients takes the place of this rank's term, and new whole parameters that of the old. Where a group lends its ranks each
other's memory (those of one host over shared memory), less is held than is counted.

The step is played from data: the layout says how long buffers are, the schedule when gathers and gradients come, and the optimizer, run on
tensors without numbers, what its state is and what its step makes. Nothing is computed, and nothing here has seen a measurement.
"""

from zfun.live._held import Held, Live, Moment
from zfun.live._plan import live_bytes

__all__ = ["Held", "Live", "Moment", "live_bytes"]
