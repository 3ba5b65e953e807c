"""The check of arguments: one table for each function, which says what every argument may be.

A :class:`Kind` is data: a predicate, the rule in words, and an example. :func:`takes` compares the
arguments of a call with the kinds before the call, so that a wrong option is refused where the
option is given, by name, and not where a kernel or a collective meets the value.

Rules about two arguments together (a root below the size of the group) stay in the functions.
"""

from zfun.options._kinds import ANY as ANY
from zfun.options._kinds import BOOL as BOOL
from zfun.options._kinds import DECAY as DECAY
from zfun.options._kinds import DEVICE as DEVICE
from zfun.options._kinds import DTYPE as DTYPE
from zfun.options._kinds import FLOATING as FLOATING
from zfun.options._kinds import FRACTION as FRACTION
from zfun.options._kinds import FUNCTION as FUNCTION
from zfun.options._kinds import GROUP as GROUP
from zfun.options._kinds import ITERABLE as ITERABLE
from zfun.options._kinds import NAMES as NAMES
from zfun.options._kinds import OF_LEAVES as OF_LEAVES
from zfun.options._kinds import PATH as PATH
from zfun.options._kinds import SCALAR as SCALAR
from zfun.options._kinds import SCHEDULE as SCHEDULE
from zfun.options._kinds import SECOND_DECAY as SECOND_DECAY
from zfun.options._kinds import SECONDS as SECONDS
from zfun.options._kinds import STORE as STORE
from zfun.options._kinds import TENSOR as TENSOR
from zfun.options._kinds import TEXT as TEXT
from zfun.options._kinds import Kind as Kind
from zfun.options._kinds import each as each
from zfun.options._kinds import function as function
from zfun.options._kinds import instance as instance
from zfun.options._kinds import integer as integer
from zfun.options._kinds import number as number
from zfun.options._kinds import one_of as one_of
from zfun.options._kinds import shown as shown
from zfun.options._takes import takes as takes
