"""``Config``: DeepEP V1's settings of queues, of which there are none here."""

from __future__ import annotations

from dataclasses import dataclass, fields

from deepep_cupy.errors import ContractError

__all__ = ["Config"]


@dataclass(frozen=True)
class Config:
    """Settings of one call, as DeepEP V1 has them. Only ``num_sms`` has an effect here.

    Rows go straight to their final place: there are no queues whose chunks could be tuned, so
    that the other numbers are accepted, checked and not used.

    Attributes:
        num_sms: GPU blocks of the call; odd numbers are fine too. The host engine has no blocks.
        num_max_nvl_chunked_send_tokens: Not used.
        num_max_nvl_chunked_recv_tokens: Not used.
        num_max_rdma_chunked_send_tokens: Not used.
        num_max_rdma_chunked_recv_tokens: Not used.
    """

    num_sms: int = 20
    num_max_nvl_chunked_send_tokens: int = 6
    num_max_nvl_chunked_recv_tokens: int = 256
    num_max_rdma_chunked_send_tokens: int = 6
    num_max_rdma_chunked_recv_tokens: int = 256

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ContractError(
                    f"Config(): argument '{field.name}' must be a whole number from 1 on, got "
                    f"{value!r}."
                )
