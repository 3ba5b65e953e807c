"""Stage 3: gather parameters where a loss uses the leaves.

``_shard_params`` is the transform. For each call of the loss, ``_gathered`` gives the loss
``_lazy`` leaves, gathers and views ``_buckets``, packs the views that autograd has ``_saved``,
follows a ``_schedule`` with a ``_cursor``, and handles ``_divergence``.
"""
