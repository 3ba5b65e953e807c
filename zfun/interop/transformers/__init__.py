"""``transformers`` with sharded training state, and models cut over axes.

Needs ``pip install zfun[transformers]``.

===============  =================================================================================
``_trainer``     the subclasses: arguments, and what the loop of ``transformers`` calls
``_files``       files of weights beside a sharded state, and whether a user has changed them
``_options``     the meaning of ``zero=``, and arguments that are refused
``_meshes``      decoders over the axes of a mesh: plans, stages, and all axes together
``_experts``     models over an expert axis
``_sequence``    models over a sequence axis
===============  =================================================================================
"""

from zfun.interop.transformers._experts import expert_parallel
from zfun.interop.transformers._meshes import (
    Stages,
    mesh_batch,
    mesh_loss,
    pipeline_stages,
    tp_plan,
)
from zfun.interop.transformers._sequence import sequence_parallel
from zfun.interop.transformers._trainer import (
    EmaCallback,
    Seq2SeqTrainer,
    Trainer,
    TrainingArguments,
)

__all__ = [
    "EmaCallback",
    "Seq2SeqTrainer",
    "Stages",
    "Trainer",
    "TrainingArguments",
    "expert_parallel",
    "mesh_batch",
    "mesh_loss",
    "pipeline_stages",
    "sequence_parallel",
    "tp_plan",
]
