"""Stage 3: parameters that are gathered where a loss uses them.

``_shard_params`` is the transform. Each call of its loss is run by an ``_executor``, which gives
the loss ``_lazy`` leaves, gathers and views ``_buckets``, packs what autograd has ``_saved`` of
them, and follows a ``_schedule`` with a ``_cursor``.
"""
