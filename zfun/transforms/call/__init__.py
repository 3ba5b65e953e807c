"""One call of a loss, the ground that gradients and sharded parameters share.

``_lazy``, ``_saved`` and ``_buckets`` are the parameters of a call, ``_executor``, ``_reducer`` and
``_hooks`` its gradients, ``_call`` tells the two of each other, ``_trace`` is their order of use.
"""
