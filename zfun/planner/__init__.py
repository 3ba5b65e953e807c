"""Plans of a step, found without running the step, and the profile of a real step.

==============  ================================================================================
before a step   ``_trace`` (the order of use), ``_explain`` with ``_price`` (messages) and
                ``_timeline``; ``_memory``, which runs the step on tensors without numbers
                (``_abstract``)
after a step    ``_profile``
==============  ================================================================================
"""

from zfun.planner._explain import Accumulation, Explanation, Message, explain
from zfun.planner._memory import Held, Live, Meter, Moment, live_bytes
from zfun.planner._profile import Noted, Profile, profile
from zfun.planner._timeline import Span, Timeline, timeline
from zfun.planner._trace import order_of_use, trace
from zfun.transforms import Event, Schedule, ScheduleOptions, Step, Trace, TracedBucket, schedule

__all__ = [
    "Accumulation",
    "Event",
    "Explanation",
    "Held",
    "Live",
    "Message",
    "Meter",
    "Moment",
    "Noted",
    "Profile",
    "Schedule",
    "ScheduleOptions",
    "Span",
    "Step",
    "Timeline",
    "Trace",
    "TracedBucket",
    "explain",
    "live_bytes",
    "order_of_use",
    "profile",
    "schedule",
    "timeline",
    "trace",
]
