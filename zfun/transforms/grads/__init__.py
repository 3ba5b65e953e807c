"""Gradient functions: from a loss to gradients that are reduced over the ranks inside backward.

``_gradient`` calls the loss and its derivative; ``_reducer`` collects each bucket of gradients and
starts its reduction through the ``_hooks``; ``_sum_grads`` and ``_accumulate`` are transforms of
gradient functions; ``_value`` is the value of a loss.
"""
