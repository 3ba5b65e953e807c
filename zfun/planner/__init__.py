"""Plans of a step, found without running the step, and the profile of a real step.

==============  ================================================================================
before a step   ``_trace`` (the order of use), ``_explain`` with ``_price`` (messages) and
                ``_timeline``; ``plans``, which run the step on tensors without numbers
                (``_abstract``, ``_shapes``, ``_kernels``), and ``_meter``, which counts the
                memory of a step (``_buffers``)
after a step    ``_profile``
without a step  ``formulae``: closed forms of papers and of DeepSpeed
==============  ================================================================================
"""

from zfun.planner import formulae
from zfun.planner._explain import Accumulation, Explanation, Message, Read, explain
from zfun.planner._meter import Meter
from zfun.planner._parts import Bytes, Instant, Live
from zfun.planner._profile import Noted, Profile, profile
from zfun.planner._timeline import Span, Timeline, timeline
from zfun.planner._trace import order_of_use, trace
from zfun.planner.plans._advise import Advice, Rung, advise
from zfun.planner.plans._bounds import Bound
from zfun.planner.plans._compare import PlanComparison, compare
from zfun.planner.plans._flops import Flops, Touched
from zfun.planner.plans._hardware import Forecast, Hardware, StepWork
from zfun.planner.plans._huggingface import from_huggingface
from zfun.planner.plans._huggingface import module_of as module_of
from zfun.planner.plans._huggingface import recompute as recompute
from zfun.planner.plans._kept import PathBytes
from zfun.planner.plans._meshes import MeshCandidate, MeshModel, mesh_sizes
from zfun.planner.plans._plan import Observer, live_bytes, plan
from zfun.planner.plans._record import InPipeline, Moved, Plan, Sent
from zfun.planner.plans._space import Candidate, Model
from zfun.transforms import (
    Event,
    Schedule,
    ScheduleOptions,
    Step,
    Trace,
    TracedBucket,
    UpdatePlan,
    UpdateStep,
    plan_update,
    schedule,
)

__all__ = [
    "Accumulation",
    "Advice",
    "Bound",
    "Bytes",
    "Candidate",
    "Event",
    "Explanation",
    "Flops",
    "Forecast",
    "Hardware",
    "InPipeline",
    "Instant",
    "Live",
    "MeshCandidate",
    "MeshModel",
    "Message",
    "Meter",
    "Model",
    "Moved",
    "Noted",
    "Observer",
    "PathBytes",
    "Plan",
    "PlanComparison",
    "Profile",
    "Read",
    "Rung",
    "Schedule",
    "ScheduleOptions",
    "Sent",
    "Span",
    "Step",
    "StepWork",
    "Timeline",
    "Touched",
    "Trace",
    "TracedBucket",
    "UpdatePlan",
    "UpdateStep",
    "advise",
    "compare",
    "explain",
    "formulae",
    "from_huggingface",
    "live_bytes",
    "mesh_sizes",
    "order_of_use",
    "plan",
    "plan_update",
    "profile",
    "schedule",
    "timeline",
    "trace",
]
