"""Gradient functions: from a loss to gradients that are reduced over the ranks inside backward.

``_gradient`` calls the loss and the derivative of the loss, and ``_pullback`` keeps the derivative;
``_sum_grads`` and ``_accumulate`` are transforms of gradient functions; ``_value`` is the value of
a loss.
"""
