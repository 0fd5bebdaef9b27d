"""Machines and network of a run on several processes, for its plan."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from xlcli.config.base import BaseConfig, Positive


class ClusterConfig(BaseConfig):
    """Assumptions of `xlcli train --dry-run --nproc N`, see `xlcli.training.scaling`; a run does not use them.

    Attributes:
        peak_flops: Operations of matrix products per second at the peak of the device of a process; None measures those
            of this machine.
        utilization: Share of that peak that training reaches; `xlcli bench train` measures it.
        bandwidth: Bytes per second that a process sends to the next one in the ring; the slowest link counts.
        latency: Seconds until a message arrives, besides the time of its bytes.
    """

    peak_flops: Positive | None = None
    utilization: Annotated[float, Field(gt=0.0, le=1.0)] = 0.4
    bandwidth: Positive = 12.5e9
    latency: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] = 5e-6
