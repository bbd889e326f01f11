"""One device for all gloo groups of a process: tests have many ranks on few cores."""

import torch.distributed as dist


def share_gloo_device() -> None:
    """Let all gloo groups that this process makes from now on send by one device of the loopback interface: each device
    has a thread that wakes a hundred times a second."""
    c10d = dist.distributed_c10d
    device = c10d.ProcessGroupGloo.create_device(interface="lo")

    class OnOneDevice(c10d.ProcessGroupGloo):
        def __init__(self, store, rank, size, timeout, **_):  # torch 2.15 gives enable_reconfigure as well
            options = c10d.ProcessGroupGloo._Options()
            options._devices, options._threads, options._timeout = [device], 2, timeout
            super().__init__(store, rank, size, options)

    c10d.ProcessGroupGloo = OnOneDevice
