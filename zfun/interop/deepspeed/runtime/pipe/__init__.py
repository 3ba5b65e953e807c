"""``deepspeed.pipe`` and ``deepspeed.runtime.pipe``: a model as layers that lie on stages."""

from zfun.interop.deepspeed._absent import absent
from zfun.interop.deepspeed.runtime.pipe.module import LayerSpec, PipelineModule, TiedLayerSpec
from zfun.interop.deepspeed.runtime.pipe.topology import (
    PipeDataParallelTopology,
    PipelineParallelGrid,
    PipeModelDataParallelTopology,
    ProcessTopology,
)

__all__ = [
    "LayerSpec",
    "PipeDataParallelTopology",
    "PipeModelDataParallelTopology",
    "PipelineModule",
    "PipelineParallelGrid",
    "ProcessTopology",
    "TiedLayerSpec",
]

__getattr__ = absent("runtime.pipe", globals())
