"""Stage 3: gather parameters where a loss uses the leaves.

``_shard_params`` is the transform. For each call of the loss, ``_gathered`` gives the loss lazy
leaves, gathers buckets, and packs the views that autograd saves, except inside ``_torch_func``;
``_views`` has the leaves as the loss sees them. ``_course`` says which steps come next: it follows
a ``_schedule`` with a ``_cursor``, and handles ``_divergence``.

A ``_schedule`` is data that ``_scheduler`` makes of a trace and ``_schedule_options``.
"""
