"""``dispatch`` and ``combine`` inside ``jax.jit``, with gradients.

::

    import deepep_cupy.jax as ep

    ep.attach(buffer)

    @jax.jit
    def layer(x, topk_idx, topk_weights):
        recv = ep.dispatch(buffer, x, topk_idx, topk_weights)
        y = experts(recv.x, recv.topk_idx, recv.topk_weights)
        return ep.combine(buffer, y, recv.handle).x

Nothing of JAX is imported before this package is. It needs the extra ``jax``.
"""

from deepep_cupy.jax.attached import Attachment, attach, check
from deepep_cupy.jax.calls import combine, dispatch
from deepep_cupy.jax.trees import Combined, Handle, Received

__all__ = [
    "Attachment",
    "Combined",
    "Handle",
    "Received",
    "attach",
    "check",
    "combine",
    "dispatch",
]
