"""``deepspeed.pipe`` and ``deepspeed.runtime.pipe``: a model as layers that lie on stages."""

from zfun.interop.deepspeed._absent import absent
from zfun.interop.deepspeed.pipe._module import (
    LayerSpec,
    PipelineError,
    PipelineModule,
    TiedLayerSpec,
)
from zfun.interop.deepspeed.pipe._topology import (
    PipeDataParallelTopology,
    PipelineParallelGrid,
    PipeModelDataParallelTopology,
    ProcessTopology,
)

__all__ = [
    "LayerSpec",
    "PipeDataParallelTopology",
    "PipeModelDataParallelTopology",
    "PipelineError",
    "PipelineModule",
    "PipelineParallelGrid",
    "ProcessTopology",
    "TiedLayerSpec",
]

__getattr__ = absent("pipe", globals())
