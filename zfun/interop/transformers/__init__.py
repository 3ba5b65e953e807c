"""``transformers`` with sharded training state, and models cut over axes.

Needs ``pip install zfun[transformers]``.

===============  =================================================================================
``_trainer``     the subclasses: what the loop of ``transformers`` calls
``_arguments``   ``TrainingArguments`` with ``zero`` and ``deepspeed``
``_options``     the meaning of ``zero=``, and arguments that are refused
``_plans``       the tensor parallelism that a model names for itself
``_experts``     models over an expert axis
``_sequence``    models over a sequence axis
``_stages``      decoders cut between layers, for pipelines
===============  =================================================================================
"""

from zfun.interop.transformers._arguments import TrainingArguments
from zfun.interop.transformers._experts import expert_parallel
from zfun.interop.transformers._plans import tp_plan
from zfun.interop.transformers._sequence import sequence_parallel
from zfun.interop.transformers._stages import Stages, pipeline_stages
from zfun.interop.transformers._trainer import EmaCallback, Seq2SeqTrainer, Trainer

__all__ = [
    "EmaCallback",
    "Seq2SeqTrainer",
    "Stages",
    "Trainer",
    "TrainingArguments",
    "expert_parallel",
    "pipeline_stages",
    "sequence_parallel",
    "tp_plan",
]
