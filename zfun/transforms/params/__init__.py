"""Stage 3: gather parameters where a loss uses the leaves.

``_shard_params`` is the transform. For each call of the loss, ``_gathered`` gives the loss lazy
leaves, gathers and views buckets, packs the views that autograd saves, except inside
``_torch_func``, follows a ``_schedule`` with a ``_cursor``, and handles ``_divergence``.

A ``_schedule`` is data that ``_scheduler`` makes of a trace and ``_schedule_options``.
"""
