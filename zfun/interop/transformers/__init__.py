"""``transformers.Trainer`` with sharded training state; needs ``pip install zfun[transformers]``.

===============  =================================================================================
``_trainer``     the subclasses: what the loop of ``transformers`` calls
``_arguments``   ``TrainingArguments`` with ``zero`` and ``deepspeed``
``_options``     the meaning of ``zero=``, and arguments that are refused
``_sequence``    models over a sequence axis
===============  =================================================================================
"""

from zfun.interop.transformers._arguments import TrainingArguments
from zfun.interop.transformers._sequence import sequence_parallel
from zfun.interop.transformers._trainer import Seq2SeqTrainer, Trainer

__all__ = ["Seq2SeqTrainer", "Trainer", "TrainingArguments", "sequence_parallel"]
